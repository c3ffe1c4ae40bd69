"""A search over meshes: all valid choices, in an order in which most need not be forecast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from zcompile.cost.forecast import Checkpoint
from zcompile.cost.hardware import Hardware
from zcompile.cost.mesh_plan import MeshChoice, MeshForecast
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.ir.actions import ActionTable
from zcompile.ir.axis import Axis, AxisKind, axes_of
from zcompile.ir.layout import STAGES
from zcompile.pipelining.action_tables import SCHEDULES, action_table
from zcompile.pipelining.balance import balanced
from zcompile.planning.divided import DividedPipeline, PipelineSetting
from zcompile.planning.forecast import forecast, least_seconds, peak_bytes, state_bytes
from zcompile.planning.unit_costs import PipelineCosts
from zcompile.tools.planner import Progress
from zcompile.tools.traced_units import TracedUnits

STAGES_PER_RANK = {"interleaved1f1b": (2, 4), "interleavedzerobubble": (1, 2)}
"""What is compared where a schedule leaves the choice."""
ACTIONS = 2**16
"""The most forwards and backwards of all ranks in a step that is looked at."""
PREFETCH = 2
"""Units gathered ahead, as by default."""


@dataclass(frozen=True)
class MeshSpace:
    """What a search compares."""

    world: int
    global_batch: int
    least: int
    """Rows of the smallest micro-batch."""
    times: tuple[int, ...]
    schedules: tuple[str, ...]
    stages: tuple[int, ...]
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class _Candidate:
    """What is to be forecast, but for the ZeRO stage."""

    pipeline: int
    data: int
    tensor: int
    times: int
    microbatches: int
    schedule: str
    stages_per_rank: int
    checkpoint: Checkpoint
    bound: float
    """Seconds that a step takes at least."""


@dataclass
class MeshSearch:
    """A search over meshes: of each, candidates in the order of what they take at least, until that is too much."""

    traced: TracedUnits
    space: MeshSpace
    hardware: Hardware
    limit: float
    dtype: torch.dtype | None
    tell: Progress
    notes: list[str]
    best: dict[tuple[int, int, int], MeshForecast] = field(default_factory=dict)
    searched: int = 0
    _tried: list[tuple[int, _Candidate, int]] = field(default_factory=list)
    """What does not fit, with the ZeRO stage, and what it takes at least."""
    _left_out: int = 0
    """Candidates with more actions than are looked at."""
    _tables: dict[tuple[str, int, int, int], ActionTable | None] = field(default_factory=dict)
    _cuts: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)

    def run(self) -> None:
        """Look at all meshes."""
        tensors = list(self._parts())
        for done, tensor in enumerate(tensors):
            self.tell(f"tracing one of {tensor} part{'s' * (tensor > 1)}", done, len(tensors))
            try:
                self._costs(tensor, self.space.times[0], None)
            except (CaptureError, ModelError) as error:
                if tensor == 1:
                    raise
                what = f"no tensor parallelism over {tensor} ranks: one's part cannot be traced"
                self.notes.append(f"{what}: {error.problem}")
                continue
            for pipeline in _divisors(self.space.world // tensor):
                self.tell(f"{pipeline} x {self.space.world // tensor // pipeline} x {tensor}", done, len(tensors))
                self._mesh(pipeline, self.space.world // tensor // pipeline, tensor)
        if self._left_out:
            most = f"stages x micro-batches are more than {ACTIONS // 2:,}"
            self.notes.append(f"{self._left_out} choices not compared: {most}")
        self.tell("done", len(tensors), len(tensors))

    def _parts(self) -> Iterator[int]:
        """Sizes of tensor parallelism: within the innermost level of the network."""
        most = self.hardware.links[0].members if len(self.hardware.links) > 1 else self.space.world
        yield from (size for size in _divisors(self.space.world) if size == 1 or (self.traced.plan and size <= most))

    def _costs(self, tensor: int, times: int, checkpoint: Checkpoint) -> PipelineCosts:
        return self.traced.costs(tensor, times, checkpoint=checkpoint is not None)

    def _mesh(self, pipeline: int, data: int, tensor: int) -> None:
        mesh = pipeline, data, tensor
        for candidate in sorted(self._candidates(*mesh), key=lambda one: (one.bound, one.stages_per_rank)):
            if mesh in self.best and candidate.bound >= self.best[mesh].seconds:
                break
            self._try(candidate)

    def _candidates(self, pipeline: int, data: int, tensor: int) -> Iterator[_Candidate]:
        space = self.space
        for times in space.times:
            if space.global_batch % (data * space.least * times):
                continue
            microbatches = space.global_batch // (data * space.least * times)
            for schedule in space.schedules if pipeline > 1 else ("1f1b",):
                known = SCHEDULES[schedule]
                for per_rank in STAGES_PER_RANK.get(schedule, (known.stages,)):
                    if pipeline * per_rank > len(self._costs(tensor, times, None).names):
                        continue
                    if 2 * pipeline * per_rank * microbatches > ACTIONS:
                        self._left_out += len(space.checkpoints)
                        continue
                    table = self._table(schedule, pipeline, microbatches, per_rank)
                    if table is None:
                        continue
                    for checkpoint in space.checkpoints:
                        shape = pipeline, data, tensor, times, microbatches, schedule, per_rank, checkpoint
                        unbounded = _Candidate(*shape, bound=0.0)
                        bound = least_seconds(self._divided(unbounded, 0))
                        yield replace(unbounded, bound=bound)

    def _table(self, schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> ActionTable | None:
        """The table of a schedule; None where it is not for so many."""
        key = schedule, ranks, microbatches, stages_per_rank
        if key not in self._tables:
            try:
                self._tables[key] = action_table(*key)
            except OptionError:
                self._tables[key] = None
        return self._tables[key]

    def _table_of(self, one: _Candidate) -> ActionTable:
        table = self._table(one.schedule, one.pipeline, one.microbatches, one.stages_per_rank)
        assert table is not None, "a candidate has one"
        return table

    def _starts(self, one: _Candidate) -> tuple[int, ...]:
        """The first unit of each stage, as `train_step` chooses them."""
        stages = one.pipeline * one.stages_per_rank
        if (key := (one.tensor, one.times, stages)) not in self._cuts:
            self._cuts[key] = (0, *balanced(self._costs(one.tensor, one.times, None).work, stages))
        return self._cuts[key]

    def _divided(self, one: _Candidate, stage: int) -> DividedPipeline:
        axes = axes_of(one.data, one.tensor)
        pipeline = Axis("pp", AxisKind.PIPELINE, one.pipeline, one.data * one.tensor)
        costs = self._costs(one.tensor, one.times, one.checkpoint)
        setting = PipelineSetting(costs, self.hardware, STAGES[stage], axes, pipeline, PREFETCH)
        return setting.at(self._table_of(one), self._starts(one))

    def _try(self, one: _Candidate) -> None:
        """Forecast a candidate under the first ZeRO stage with which it fits."""
        for stage in self._stages_for(one):
            self.searched += 1
            divided = self._divided(one, stage)
            least = state_bytes(divided)
            if least > self.limit or peak_bytes(divided, self.limit) > self.limit:
                self._tried.append((least, one, stage))
            else:
                found, mesh = self._forecast(one, stage), (one.pipeline, one.data, one.tensor)
                if mesh not in self.best or found.seconds < self.best[mesh].seconds:
                    self.best[mesh] = found
                return

    def _stages_for(self, one: _Candidate) -> list[int]:
        """ZeRO stages, that which sends least first; one rank alone has nothing to divide but what it holds full."""
        wanted = (0, 3) if one.data == 1 else (1, 0, 2, 3)
        return [stage for stage in wanted if stage in self.space.stages] or list(self.space.stages[:1])

    def _forecast(self, one: _Candidate, stage: int) -> MeshForecast:
        found = forecast(self._divided(one, stage))
        flops = self._costs(one.tensor, one.times, None).flops * one.microbatches / one.pipeline
        size = one.times * self.space.least
        shape = one.pipeline, one.data, one.tensor, size, one.microbatches, one.schedule, one.stages_per_rank
        choice = MeshChoice(*shape, stage, None if one.checkpoint is None else "unit", self.dtype)
        most = found.fullest
        return MeshForecast(
            choice=choice,
            parameters=most.parameters,
            optimizer=most.optimizer,
            held=most.held,
            seconds=found.seconds,
            idle_share=found.idle_share,
            flops=flops,
        )

    @property
    def smallest(self) -> MeshForecast | None:
        """What takes least memory of all that does not fit."""
        found: tuple[float, _Candidate | None, int] = math.inf, None, 0
        for least, one, stage in sorted(self._tried, key=lambda tried: tried[0]):
            if least >= found[0]:
                break
            found = min(found, (peak_bytes(self._divided(one, stage), found[0]), one, stage), key=lambda some: some[0])
        return None if found[1] is None else self._forecast(found[1], found[2])


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
