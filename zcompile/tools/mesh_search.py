"""A branch-and-bound search over meshes: choices in the order of their lower bounds, so that few are forecast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zcompile.cost.divided import DividedPipeline, PipelineCosts, PipelineSetting
from zcompile.cost.forecast import MeshChoice, MeshForecast
from zcompile.cost.pipeline_forecast import forecast, least_seconds, peak_bytes, state_bytes
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.ir.actions import ActionTable
from zcompile.ir.axis import Axis, AxisKind, axes_of
from zcompile.ir.layout import STAGES
from zcompile.pipelining.action_tables import SCHEDULES, action_table
from zcompile.pipelining.balance import balanced
from zcompile.tools.planner import Progress
from zcompile.tools.traced_units import TracedUnits

STAGES_PER_RANK = {"interleaved1f1b": (2, 4), "interleavedzerobubble": (1, 2)}
"""Stages per rank that are compared, for schedules that leave them open."""
ACTIONS = 2**16
"""Choices with more forwards and backwards than this, in a step over all ranks, are left out."""
PREFETCH = 2
"""Units gathered ahead: the default of `zcompile.compile`."""


@dataclass(frozen=True)
class MeshSpace:
    """The values that a search compares."""

    world: int
    global_batch: int
    least: int
    """Rows of the smallest micro-batch."""
    times: tuple[int, ...]
    schedules: tuple[str, ...]
    stages: tuple[int, ...]
    checkpoints: tuple[str | None, ...]


@dataclass
class MeshSearch:
    """A search that finds the fastest choice on each mesh: it stops when a lower bound exceeds the best time."""

    traced: TracedUnits
    space: MeshSpace
    limit: float
    """Bytes per rank."""
    report_progress: Progress
    notes: list[str]
    best: dict[tuple[int, ...], MeshForecast] = field(default_factory=dict)
    searched: int = 0
    _tried: list[tuple[int, MeshChoice]] = field(default_factory=list)
    """Choices that do not fit, with their least bytes."""
    _left_out: int = 0
    """Number of choices with more than `ACTIONS` actions."""
    _tables: dict[tuple[str, int, int, int], ActionTable | None] = field(default_factory=dict)
    _settings: dict[tuple[Any, ...], PipelineSetting] = field(default_factory=dict)
    _units: dict[int, TracedUnits] = field(default_factory=dict)
    """By the number of ranks that divide tokens."""
    _cuts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def run(self) -> None:
        """Search all meshes; those that divide sequences where data parallelism ends, until they are no faster."""
        tensors = list(self._tensor_sizes())
        self._search_inner([(1, tensor) for tensor in tensors])
        if not self.best or self.space.global_batch < self.space.world * self.space.least:
            for sequence in _divisors(self.space.world)[1:]:
                before, searched = min((found.seconds for found in self.best.values()), default=math.inf), self.searched
                self._search_inner([(sequence, tensor) for tensor in tensors])
                slower = self.best and min(found.seconds for found in self.best.values()) >= before
                if slower and self.searched > searched:
                    break
        if self._left_out:
            most = f"stages x micro-batches are more than {ACTIONS // 2:,}"
            self.notes.append(f"{self._left_out} choices not compared: {most}")
        self.report_progress("done", len(tensors), len(tensors))

    def _search_inner(self, inner: Sequence[tuple[int, int]]) -> None:
        """Search the meshes of which so many ranks divide tokens, and so many of these parameters."""
        for done, (sequence, tensor) in enumerate(inner):
            ranks, left = divmod(self.space.world, sequence * tensor)
            if left:
                continue
            of = f"{tensor} part{'s' * (tensor > 1)}{f' of {sequence} parts of a sequence' if sequence > 1 else ''}"
            self.report_progress(f"tracing one of {of}", done, len(inner))
            try:
                self._costs((sequence, tensor), self.space.times[0] * self.space.least, None)
            except (CaptureError, ModelError, OptionError) as error:
                if (sequence, tensor) == (1, 1) or (sequence == 1 and isinstance(error, OptionError)):
                    raise
                what = f"no tensor parallelism over {tensor} ranks: a rank's part cannot be traced"
                what = f"no sequences over {sequence} ranks beside {tensor} parts" if sequence > 1 else what
                self.notes.append(f"{what}: {error.problem}")
                continue
            for pipeline in _divisors(ranks):
                mesh = pipeline, ranks // pipeline, sequence, tensor
                self.report_progress(" x ".join(map(str, mesh)), done, len(inner))
                self._search_mesh(*mesh)

    def _tensor_sizes(self) -> Iterator[int]:
        """Degrees of tensor parallelism: at most the size of the innermost level of the network."""
        links = self.traced.hardware.links
        most = links[0].members if len(links) > 1 else self.space.world
        yield from (size for size in _divisors(self.space.world) if size == 1 or (self.traced.plan and size <= most))

    def _costs(self, inner: tuple[int, int], size: int, checkpoint: str | None) -> PipelineCosts:
        """Costs of the units for one of `inner` ranks, which divide tokens and parameters, and `size` rows."""
        sequence, tensor = inner
        if sequence not in self._units:
            self._units[sequence] = self.traced if sequence == 1 else self.traced.over(sequence)
        return self._units[sequence].costs(tensor, size // self.space.least, checkpoint=checkpoint is not None)

    def _search_mesh(self, *mesh: int) -> None:
        """Forecast those choices on a mesh that may be faster than the best so far."""
        bounded = self._bounded(*mesh)
        for bound, choice in sorted(bounded, key=lambda one: (one[0], one[1].stages_per_rank)):
            if choice.mesh in self.best and bound >= self.best[choice.mesh].seconds:
                break
            self._try(choice)

    def _bounded(self, pipeline: int, data: int, sequence: int, tensor: int) -> Iterator[tuple[float, MeshChoice]]:
        """The choices on a mesh, before choosing a ZeRO stage, each with a lower bound of a step's seconds."""
        space = self.space
        for size in (times * space.least for times in space.times):
            microbatches, left = divmod(space.global_batch, data * size)
            if left:
                continue
            for schedule in space.schedules if pipeline > 1 else ("1f1b",):
                for per_rank in STAGES_PER_RANK.get(schedule, (SCHEDULES[schedule].stages,)):
                    if pipeline * per_rank > len(self._costs((sequence, tensor), size, None).names):
                        continue
                    if 2 * pipeline * per_rank * microbatches > ACTIONS:
                        self._left_out += len(space.checkpoints)
                        continue
                    if self._table(schedule, pipeline, microbatches, per_rank) is None:
                        continue
                    shape = pipeline, data, tensor, size, microbatches, schedule, per_rank
                    for checkpoint in space.checkpoints:
                        choice = MeshChoice(*shape, 0, checkpoint, self.traced.dtype, sequence)
                        yield least_seconds(self._divided(choice)), choice

    def _table(self, schedule: str, ranks: int, microbatches: int, stages_per_rank: int) -> ActionTable | None:
        """The action table of a schedule; None if the schedule does not allow these sizes."""
        key = schedule, ranks, microbatches, stages_per_rank
        if key not in self._tables:
            try:
                self._tables[key] = action_table(*key)
            except OptionError:
                self._tables[key] = None
        return self._tables[key]

    def _starts(self, choice: MeshChoice) -> tuple[int, ...]:
        """The first unit of each stage, as `train_step` chooses them."""
        stages = choice.pipeline * choice.stages_per_rank
        inner = choice.sequence, choice.tensor
        if (key := (*inner, choice.microbatch_size, stages)) not in self._cuts:
            self._cuts[key] = (0, *balanced(self._costs(inner, choice.microbatch_size, None).work, stages))
        return self._cuts[key]

    def _divided(self, choice: MeshChoice) -> DividedPipeline:
        key = choice.mesh, choice.microbatch_size, choice.checkpoint, choice.stage
        if key not in self._settings:
            data = choice.data * choice.sequence
            pipeline = Axis("pp", AxisKind.PIPELINE, choice.pipeline, data * choice.tensor)
            axes = axes_of(data, choice.tensor)
            costs = self._costs((choice.sequence, choice.tensor), choice.microbatch_size, choice.checkpoint)
            stage = STAGES[choice.stage]
            self._settings[key] = PipelineSetting(costs, self.traced.hardware, stage, axes, pipeline, PREFETCH)
        table = self._table(choice.schedule, choice.pipeline, choice.microbatches, choice.stages_per_rank)
        assert table is not None, "every choice has a table"
        return self._settings[key].at(table, self._starts(choice))

    def _try(self, choice: MeshChoice) -> None:
        """Forecast a choice in the first ZeRO stage in which it fits."""
        for stage in self._stages_for(choice):
            self.searched += 1
            staged = replace(choice, stage=stage)
            divided = self._divided(staged)
            least = state_bytes(divided)
            if least > self.limit or peak_bytes(divided, self.limit) > self.limit:
                self._tried.append((least, staged))
            else:
                found = self._forecast(staged)
                if choice.mesh not in self.best or found.seconds < self.best[choice.mesh].seconds:
                    self.best[choice.mesh] = found
                return

    def _stages_for(self, choice: MeshChoice) -> list[int]:
        """ZeRO stages, the one that sends least first. One rank shards nothing, but stage 3 still releases units."""
        wanted = (0, 3) if choice.data * choice.sequence == 1 else (1, 0, 2, 3)
        return [stage for stage in wanted if stage in self.space.stages] or list(self.space.stages[:1])

    def _forecast(self, choice: MeshChoice) -> MeshForecast:
        found = forecast(self._divided(choice))
        costs = self._costs((choice.sequence, choice.tensor), choice.microbatch_size, None)
        flops = costs.flops * choice.microbatches / choice.pipeline
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
        """The forecast of least memory among the choices that do not fit."""
        fewest, smallest = math.inf, None
        for least, choice in sorted(self._tried, key=lambda tried: tried[0]):
            if least >= fewest:
                break
            if (nbytes := peak_bytes(self._divided(choice), fewest)) < fewest:
                fewest, smallest = nbytes, choice
        return None if smallest is None else self._forecast(smallest)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
