"""A model divided into pipeline stages: the cost of each stage and its messages, from the costs of its units."""

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
    """The cost of one part of a unit's step: its forward, its backward, or a half of that."""

    seconds: float = 0.0
    peak: int = 0
    """Peak bytes of values that the unit computes, including those saved by earlier parts."""
    reads: bool = False
    """True if it reads the unit's parameters."""


@dataclass(frozen=True)
class UnitCost:
    """The cost of a unit for one micro-batch.

    Attributes:
        units: Its parameters and messages, under the names of the first equal unit.
        flops: FLOPs of its forward and backward.
        parts: The cost of each kind of action.
        saved: Bytes of each value of the forward that its backward needs.
        left: Bytes of each value that gradients of weights still need after gradients of inputs.
        inputs: Bytes of each value from earlier units.
        tangents: Bytes of each gradient from later units.
        ahead: For each value that a later unit needs, the number of that unit and the bytes.
        back: The same for gradients that an earlier unit needs.
        lent: By the number of each other unit that reads parameters of this one, the bytes of these.
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
    """The costs of all units of a traced step, in order.

    Attributes:
        names: The names of the units.
        work: Seconds of each unit, by which stages are balanced.
        units: The costs with the requested activation checkpointing.
        plain: The costs without checkpointing.
    """

    names: tuple[str, ...]
    work: tuple[float, ...]
    units: tuple[UnitCost, ...]
    plain: tuple[UnitCost, ...]

    @property
    def flops(self) -> int:
        """FLOPs of one micro-batch, without recomputation."""
        return sum(unit.flops for unit in self.plain)


WEIGHTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
"""The kinds of actions that compute gradients of weights."""


@dataclass(frozen=True)
class StageCost:
    """The costs of the units of one stage, and of its messages."""

    units: tuple[UnitCost, ...]
    layouts: tuple[UnitLayout, ...]
    ahead: Mapping[int, int]
    """Bytes sent to each later stage, per micro-batch."""
    back: Mapping[int, int]
    """Bytes sent to each earlier stage, per micro-batch."""
    borrowed: int
    """Bytes of parameters of other stages that it reads."""
    is_first: bool

    def seconds(self, kind: ActionKind) -> float:
        return sum(self.part(unit, kind).seconds for unit in self.units)

    def part(self, unit: UnitCost, kind: ActionKind) -> PartCost:
        """Return the cost of a unit in an action. The first stage never divides its backward: no stage waits for it."""
        if self.is_first and kind is ActionKind.BACKWARD_INPUT:
            return PartCost()
        return unit.parts[ActionKind.BACKWARD if self.is_first and kind is ActionKind.BACKWARD_WEIGHT else kind]

    def in_order(self, action: Action, zero: Stage) -> list[tuple[UnitCost, UnitLayout, bool]]:
        """Return the units in the order in which an action computes them, and whether it gathers each."""
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
        """Return the bytes of each saved value that a backward of a unit needs."""
        return unit.left if kind is ActionKind.BACKWARD_WEIGHT and not self.is_first else unit.saved


def may_gather(action: Action, zero: Stage) -> bool:
    """Return False for actions that only read parameters gathered by earlier actions."""
    return zero.parameters_sharded or (action.kind is ActionKind.FORWARD and action.microbatch == 0)


@dataclass(frozen=True)
class PipelineSetting:
    """The ranks and options that forecasts of several schedules have in common."""

    costs: PipelineCosts
    hardware: Hardware
    stage: Stage
    axes: tuple[Axis, ...]
    """The axes of the ranks that have the same units, including the tensor-parallel axis."""
    pipeline: Axis
    prefetch: int = 2

    @property
    def size(self) -> int:
        """The number of ranks that shard the same units."""
        return next(axis.size for axis in self.axes if axis.kind is AxisKind.SHARD)

    @cached_property
    def layouts(self) -> list[UnitLayout]:
        """The layout of each unit of the model."""
        done: dict[int, UnitLayout] = {}
        for cost in self.costs.units:
            if id(cost.units) not in done:  # equal units share the measured parameters
                done[id(cost.units)] = UnitLayout.of(cost.units, self.stage, self.axes, self.hardware)
        return [done[id(cost.units)] for cost in self.costs.units]

    def at(self, table: ActionTable, starts: Sequence[int]) -> DividedPipeline:
        """Return the model divided into stages that begin with the units numbered `starts`, run by `table`."""
        return DividedPipeline(self, table, tuple(self._stage_costs(table, starts)))

    def _stage_costs(self, table: ActionTable, starts: Sequence[int]) -> list[StageCost]:
        bounds = [*starts, len(self.costs.units)]
        home = [stage for stage in range(table.stages) for _ in range(bounds[stage], bounds[stage + 1])]
        result = []
        for stage in range(table.stages):
            begin, end = bounds[stage], bounds[stage + 1]
            units = list(self.costs.units[begin:end])
            if stage in table.at_once:  # the last unit's backward follows at once: it is not recomputed
                units[-1] = self.costs.plain[end - 1]
            lent = (unit.lent.get(reader, 0) for unit in self.costs.units for reader in range(begin, end))
            own = (unit.lent.get(reader, 0) for unit in units for reader in range(begin, end))
            result.append(
                StageCost(
                    tuple(units),
                    tuple(self.layouts[begin:end]),
                    _between(stage, (value for unit in units for value in unit.ahead.values()), home),
                    _between(stage, (value for unit in units for value in unit.back.values()), home),
                    sum(lent) - sum(own),
                    stage == 0,
                )
            )
        return result


@dataclass(frozen=True)
class DividedPipeline:
    """A model divided into stages, with the schedule that runs them."""

    setting: PipelineSetting
    table: ActionTable
    stages: tuple[StageCost, ...]

    @cached_property
    def senders(self) -> Mapping[bool, Sequence[Sequence[int]]]:
        """For each stage, the stages that send to it, in the forward (True) and in the backward (False)."""
        found: dict[bool, list[list[int]]] = {way: [[] for _ in self.stages] for way in (True, False)}
        for number, stage in enumerate(self.stages):
            for to in stage.ahead:
                found[True][to].append(number)
            for to in stage.back:
                found[False][to].append(number)
        return found

    def layouts_of(self, rank: int) -> list[UnitLayout]:
        """Return the layouts of a rank's units."""
        return [layout for number in self.table.stages_of(rank) for layout in self.stages[number].layouts]

    def gathers_of(self, rank: int) -> list[UnitLayout]:
        """Return the layout of each unit that a rank gathers, in order of its gathers."""
        zero = self.setting.stage
        actions = (action for action in self.table.rows[rank] if may_gather(action, zero))
        units = (unit for action in actions for unit in self.stages[action.stage].in_order(action, zero))
        return [layout for _, layout, gathered in units if gathered]

    def reductions_of(self, rank: int) -> list[UnitLayout]:
        """Return the layout of each unit that a rank reduces, in order, if every micro-batch is reduced."""
        stages = (action.stage for action in self.table.rows[rank] if action.kind in WEIGHTS)
        return [layout for stage in stages for layout in reversed(self.stages[stage].layouts)]


def _between(stage: int, sent: Iterable[tuple[int, int]], home: Sequence[int]) -> dict[int, int]:
    """Return the bytes sent to each stage other than `stage`."""
    result: dict[int, int] = {}
    for to, nbytes in sent:
        if home[to] != stage:
            result[home[to]] = result.get(home[to], 0) + nbytes
    return result


@dataclass(frozen=True)
class UnitLayout:
    """Bytes of a unit's state under a layout, and seconds of its communication.

    Attributes:
        shards: Bytes of this rank's shards.
        moments: Bytes of their optimizer state.
        full: Bytes of the gathered parameters.
        gradients: Bytes of the local gradients of one micro-batch.
        sums: Bytes of their sums over micro-batches.
        averages: Bytes of this rank's averaged gradients.
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
        """Return the layout of units, whatever they were laid out for, under a ZeRO stage and over these axes."""
        layout = Layout(units, stage, axes)
        size = layout.sharded.size if stage.optimizer_sharded else 0
        divided = (tuple(replace(p, shards=size if p.shards else 0) for p in unit.params) for unit in units)
        layout = layout.with_units(tuple(replace(u, params=params) for u, params in zip(units, divided, strict=True)))
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
