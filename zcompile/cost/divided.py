"""A model divided into pipeline stages: what each takes, and what it gives the others, from what its units take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import model_state
from zcompile.cost.simulator import update_seconds
from zcompile.ir.actions import Action, ActionKind, ActionTable
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import Layout, Stage, Unit
from zcompile.ir.ops import AllGather, Reduce


@dataclass(frozen=True)
class PartCost:
    """One part of a unit's step."""

    seconds: float = 0.0
    peak: int = 0
    """The most bytes of what the unit computes that are there in it, those from earlier parts included."""
    reads: bool = False
    """True if it reads the unit's parameters."""


@dataclass(frozen=True)
class UnitCost:
    """What a unit takes for one micro-batch.

    Attributes:
        units: Its parameters, with the messages that they travel in, by the names of the first unit that is equal.
        flops: Of its forward and backward.
        parts: By kind of action.
        saved: Bytes that its backward needs of the forward, by value.
        left: Bytes that gradients of weights need, by value, once those of inputs have been computed.
        inputs: Bytes of each value that earlier units give it.
        tangents: Bytes of each gradient that later units give it.
        ahead: Bytes of each value that a later unit needs, with the number of that unit.
        back: Likewise of gradients that an earlier unit needs.
        lent: Bytes of the parameters that other units read, with the number of each such unit.
    """

    units: tuple[Unit, ...]
    flops: int
    parts: Mapping[ActionKind, PartCost]
    saved: Mapping[str, int]
    left: Mapping[str, int]
    inputs: Mapping[str, int]
    tangents: Mapping[str, int]
    ahead: Mapping[str, tuple[int, int]]
    back: Mapping[str, tuple[int, int]]
    lent: Mapping[int, int]


@dataclass(frozen=True)
class PipelineCosts:
    """What all units of a traced step take, in order.

    Attributes:
        names: Of the units.
        work: Seconds by which stages are balanced.
        units: As they are asked for.
        plain: With all that is saved, where `units` compute it again; else the same.
    """

    names: tuple[str, ...]
    work: tuple[float, ...]
    units: tuple[UnitCost, ...]
    plain: tuple[UnitCost, ...]

    @property
    def flops(self) -> int:
        """Of one micro-batch, without what is computed again."""
        return sum(unit.flops for unit in self.plain)


WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
"""The actions that give gradients of weights."""


@dataclass(frozen=True)
class StageCost:
    """The units of one stage."""

    units: tuple[UnitCost, ...]
    layouts: tuple[UnitLayout, ...]
    ahead: Mapping[int, int]
    """Bytes that each later stage is sent."""
    back: Mapping[int, int]
    borrowed: int
    """Bytes of parameters of other stages that it reads."""
    is_first: bool

    def seconds(self, kind: ActionKind) -> float:
        return sum(self.part(unit, kind).seconds for unit in self.units)

    def part(self, unit: UnitCost, kind: ActionKind) -> PartCost:
        """What a unit takes in an action. The first stage divides no backward: nobody waits for what it gives."""
        if self.is_first and kind is ActionKind.BACKWARD_INPUT:
            return PartCost()
        return unit.parts[ActionKind.BACKWARD if self.is_first and kind is ActionKind.BACKWARD_WEIGHT else kind]

    def in_order(self, action: Action, zero: Stage) -> list[tuple[UnitCost, UnitLayout, bool]]:
        """The units in the order in which they compute in an action, and whether each is gathered for it."""
        forward, each = action.kind is ActionKind.FORWARD, zero.parameters_sharded
        once = forward and action.microbatch == 0
        pairs = list(zip(self.units, self.layouts, strict=True))
        return [
            (unit, layout, layout.full > 0 and (once or (each and self.part(unit, action.kind).reads)))
            for unit, layout in (pairs if forward else reversed(pairs))
        ]

    @cached_property
    def saved(self) -> dict[str, int]:
        return {name: nbytes for unit in self.units for name, nbytes in unit.saved.items()}

    @cached_property
    def left(self) -> dict[str, int]:
        return self.saved if self.is_first else {n: b for unit in self.units for n, b in unit.left.items()}

    def needs(self, unit: UnitCost, kind: ActionKind) -> Mapping[str, int]:
        """What a backward of a unit finds."""
        return unit.left if kind is ActionKind.BACKWARD_WEIGHT and not self.is_first else unit.saved


def may_gather(action: Action, zero: Stage) -> bool:
    """False for actions that read what has been gathered for others."""
    return zero.parameters_sharded or (action.kind is ActionKind.FORWARD and action.microbatch == 0)


@dataclass(frozen=True)
class PipelineSetting:
    """The ranks that a model is divided over, and how: all that forecasts of several schedules have in common."""

    costs: PipelineCosts
    hardware: Hardware
    stage: Stage
    axes: tuple[Axis, ...]
    """Of the ranks that have the same units, with the one of tensor parallelism."""
    pipeline: Axis
    prefetch: int = 2

    @property
    def size(self) -> int:
        """Ranks that have the same units."""
        return next(axis.size for axis in self.axes if axis.kind is AxisKind.SHARD)

    @cached_property
    def layouts(self) -> list[UnitLayout]:
        """Of each unit of the model."""
        done: dict[int, UnitLayout] = {}
        for cost in self.costs.units:
            if id(cost.units) not in done:  # equal units share what was measured
                done[id(cost.units)] = UnitLayout.of(cost.units, self.stage, self.axes, self.hardware)
        return [done[id(cost.units)] for cost in self.costs.units]

    def at(self, table: ActionTable, starts: Sequence[int]) -> DividedPipeline:
        """A step of this schedule, with stages that begin with the units of these numbers."""
        return DividedPipeline(self, table, tuple(self._stage_costs(table, starts)))

    def _stage_costs(self, table: ActionTable, starts: Sequence[int]) -> list[StageCost]:
        bounds = [*starts, len(self.costs.units)]
        home = [stage for stage in range(table.stages) for _ in range(bounds[stage], bounds[stage + 1])]
        result = []
        for stage in range(table.stages):
            begin, end = bounds[stage], bounds[stage + 1]
            units = list(self.costs.units[begin:end])
            if stage in table.at_once:  # what has just been computed is not computed again
                units[-1] = self.costs.plain[end - 1]
            lent = (unit.lent.get(reader, 0) for unit in self.costs.units for reader in range(begin, end))
            own = (unit.lent.get(reader, 0) for unit in units for reader in range(begin, end))
            result.append(
                StageCost(
                    tuple(units),
                    tuple(self.layouts[begin:end]),
                    _between(stage, (one for unit in units for one in unit.ahead.values()), home),
                    _between(stage, (one for unit in units for one in unit.back.values()), home),
                    sum(lent) - sum(own),
                    stage == 0,
                )
            )
        return result


@dataclass(frozen=True)
class DividedPipeline:
    """A model divided into stages, that a schedule runs."""

    setting: PipelineSetting
    table: ActionTable
    stages: tuple[StageCost, ...]

    @cached_property
    def senders(self) -> Mapping[bool, Sequence[Sequence[int]]]:
        """For each stage the stages that send to it: True for the forward, False for the backward."""
        found: dict[bool, list[list[int]]] = {way: [[] for _ in self.stages] for way in (True, False)}
        for number, stage in enumerate(self.stages):
            for to in stage.ahead:
                found[True][to].append(number)
            for to in stage.back:
                found[False][to].append(number)
        return found

    def layouts_of(self, rank: int) -> list[UnitLayout]:
        """The units of a rank."""
        return [layout for number in self.table.stages_of(rank) for layout in self.stages[number].layouts]

    def gathers_of(self, rank: int) -> list[UnitLayout]:
        """The gathers of a rank, in order."""
        zero = self.setting.stage
        actions = (one for one in self.table.rows[rank] if may_gather(one, zero))
        return [layout for one in actions for _, layout, wanted in self.stages[one.stage].in_order(one, zero) if wanted]

    def reductions_of(self, rank: int) -> list[UnitLayout]:
        """The reductions of a rank, where each micro-batch has its own, in order."""
        row = self.table.rows[rank]
        return [layout for one in row if one.kind in WEIGHTS for layout in reversed(self.stages[one.stage].layouts)]


def _between(stage: int, sent: Iterable[tuple[int, int]], home: Sequence[int]) -> dict[int, int]:
    """Bytes by the stage that they go to, what stays in `stage` left out."""
    result: dict[int, int] = {}
    for to, nbytes in sent:
        if home[to] != stage:
            result[home[to]] = result.get(home[to], 0) + nbytes
    return result


@dataclass(frozen=True)
class UnitLayout:
    """What becomes of a unit's parameters: bytes, and seconds of their communication.

    Attributes:
        shards: Bytes of this rank's shards.
        moments: Of their optimizer state.
        full: Of the gathered parameters.
        gradients: Of the gradients that a backward gives.
        sums: Of their sums over micro-batches.
        averages: Of what a reduction leaves this rank.
        gather: Seconds of the gather.
        reduce: Seconds of the reduction.
        update: Seconds of the optimizer's step.
    """

    shards: int
    moments: int
    full: int
    gradients: int
    sums: int
    averages: int
    gather: float
    reduce: float
    update: float

    @classmethod
    def of(cls, units: tuple[Unit, ...], stage: Stage, axes: tuple[Axis, ...], hardware: Hardware) -> UnitLayout:
        """That of units which were laid out for any ranks, under a ZeRO stage and over these axes."""
        layout = Layout(units, stage, axes)
        size = layout.sharded.size if stage.optimizer_sharded else 0
        divided = (tuple(replace(p, shards=size if p.shards else 0) for p in unit.params) for unit in units)
        layout = layout.with_units(tuple(replace(u, params=some) for u, some in zip(units, divided, strict=True)))
        state, gather, reduce = model_state(layout), 0.0, 0.0
        for unit in layout.units:
            if stage.optimizer_sharded:
                sent = AllGather(unit.name, dtype=unit.compute_dtype)
                gather += hardware.collective_seconds(sent.payload(layout), layout.sharded, len(sent.messages(layout)))
            names = tuple(param.name for param in unit.params if param.trainable)
            sums = Reduce(unit.name, names, stage.optimizer_sharded, unit.reduction_dtype)
            reduce += hardware.collective_seconds(sums.payload(layout), layout.sharded, len(sums.messages(layout)))
        full = sum(layout.gathered_bytes(unit.name) for unit in layout.units)
        trained = layout.trainable.values()
        gradients = sum(param.numel * param.full_dtype.itemsize for param in trained)
        summed = sum(param.numel * (param.sum_dtype or param.full_dtype).itemsize for param in trained)
        averages = sum(param.padded_numel * param.reduce_dtype.itemsize // max(size, 1) for param in trained)
        averages = gradients if size == 1 else averages  # alone, a gradient is its own average
        update = update_seconds(state.gradients, hardware)
        return cls(state.parameters, state.moments, full, gradients, summed, averages, gather, reduce, update)
