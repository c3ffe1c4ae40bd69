"""Run the loaded program of one rank of a pipeline, and combine the results of all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from zcompile.engine.lowering import WRITTEN, LoadedProgram
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.train_steps import ResultsOn, StepResult
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Group, Input, Kind, OffloadStore
from zcompile.ir.printer import inputs_of
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_random
from zcompile.ir.tensor_type import TensorType
from zcompile.passes.common.boundary import written_results
from zcompile.pipelining.guard import results_of
from zcompile.pipelining.program import PipelinedProgram
from zcompile.pipelining.ranks import PipelineRanks
from zcompile.runtime.device import numbers_of_rank
from zcompile.runtime.executor import Gradients, InsideAverages
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.stage_links import StageLinks


class PipelinedRun(LoadedProgram):
    """Runs the steps of a rank.

    `traced` is the step of one micro-batch, the same on all ranks; `common` is the same text on all ranks, by which
    they check that they run the same step. The program reads the buffers of `model`.
    """

    def __init__(
        self,
        made: PipelinedProgram,
        traced: Program,
        runtime: ModelRuntime,
        ranks: PipelineRanks,
        model: nn.Module,
        results: StepResults,
        common: str,
        updater: Updater | None = None,
    ) -> None:
        super().__init__(program := made.program, runtime, updater)
        self.ranks, self._model, self._results, self._updater = ranks, model, results, updater
        ranks.connect(program)
        self._run, self._recorded = self._load(program, Phase.STEP, runtime.regions.get_all(program.regions))
        self._given = inputs_of(program, Phase.STEP)
        self._traced = [op_of(node, Input) for node in traced.nodes(Input) if op_of(node, Input).kind is Kind.DATA]
        self._draws = any(is_random(node) for node in traced.graph.nodes)
        """True if any rank draws random numbers in a step."""
        self._has_run = False
        self._digest = hashlib.sha256(common.encode(errors="backslashreplace")).hexdigest()

    def step(
        self, microbatches: Sequence[Sequence[Any]], scale: torch.Tensor | None = None
    ) -> tuple[StepResult | None, Sequence[Gradients | InsideAverages]]:
        """Run the program; returns the results of the step, and the gradients that it did not use for updates.

        Args:
            microbatches: The flattened arguments of each micro-batch.
            scale: The loss scale for the backward, a 0-d tensor.
        """
        self._enter(RunKind.STEP)
        tangent = torch.full_like(self._results.zero(), 1 / len(microbatches))
        if scale is not None:
            tangent *= scale
        return self._execute(microbatches, tangent)

    def evaluate(self, microbatches: Sequence[Sequence[Any]]) -> StepResult | None:
        """Run a program of forwards only; returns its results."""
        self._enter(RunKind.EVALUATION)
        return self._execute(microbatches, None)[0]

    def _execute(
        self, microbatches: Sequence[Sequence[Any]], tangent: torch.Tensor | None
    ) -> tuple[StepResult | None, Sequence[Gradients | InsideAverages]]:
        """Run the program after `_enter`; returns the same as `step`."""
        runtime, ranks, updater = self.runtime, self.ranks, self._updater
        version, recordings = runtime.freshness.version(), runtime.recordings
        runtime.recorder.begin_call(version, trains=tangent is not None)
        recordings.begin_call(version, trains=tangent is not None)
        run = self._run if recordings.current is None else recordings.current.loaded(self._recorded)
        buffers = dict(self._model.named_buffers())
        box = [self._value(node, microbatches, tangent, buffers) for node in self._given]
        # Each stage and each data-parallel rank draws different random numbers.
        place = ranks.links.rank * ranks.data.size + ranks.data.rank
        numbers = numbers_of_rank(place, ranks.device, others_draw=True) if self._draws else nullcontext()
        try:
            with torch.no_grad(), numbers, updater.updating() if updater is not None else nullcontext():
                outputs, gradients = run(box)
        except BaseException:
            # Hazard: async work still runs on other streams and uses memory that the next step reuses. Order it first.
            ranks.data.order_all()
            ranks.links.order_all()
            runtime.settle()
            raise
        runtime.settle()
        found = self._results.of_outputs(outputs)
        runtime.recorder.end_call(split=False)
        return found, gradients

    def _enter(self, kind: RunKind) -> None:
        """Begin a run, numbered alike on all ranks, and drop copies of parameters that a step has made stale."""
        freshness, lockstep = self.runtime.freshness, self.runtime.lockstep
        stale = self._keeps and freshness.drop_stale_copies()
        call = lockstep.enter(kind, self._digest, [WRITTEN] if stale else [])
        self.ranks.data.stamp(call.position.number)
        first, self._has_run = not self._has_run, True
        self.ranks.links.begin(call.position.number, first=first)
        lockstep.check()  # before the program, which may update parameters
        if self._keeps and freshness.has_current and WRITTEN in call.marks:
            freshness.compare()

    def _value(
        self,
        node: fx.Node,
        microbatches: Sequence[Sequence[Any]],
        tangent: torch.Tensor | None,
        buffers: Mapping[str, torch.Tensor],
    ) -> Any:
        """The argument of the program for the placeholder `node`."""
        op = data(node).op
        if (fixed := self._fixed(self.program, node)) is not None:
            return fixed
        if isinstance(op, Group):
            return self.ranks.links if op.axis == self.ranks.links.axis else self.ranks.data.along(op.axis)
        if isinstance(op, OffloadStore):
            return self.runtime.offloads[op]
        assert isinstance(op, Input), "a step takes units, groups, activation storage and inputs"
        if op.kind is Kind.TANGENT:
            return tangent
        traced = self._traced[op.index]
        return buffers[traced.held] if traced.leaf is None else microbatches[op.microbatch or 0][traced.leaf]


@dataclass(frozen=True)
class StepResults:
    """Combines the outputs of all ranks' programs into the results of a step: the loss, and metrics.

    Attributes:
        microbatches: Number of micro-batches.
        links: Links to the other ranks along the pipeline axis.
        on: The ranks that get the results.
        names: Names of the metrics; None if there are none.
        types: Types of the loss and the metrics, for one micro-batch.
        ranks: For each result, the index along the pipeline axis of the rank that computes it.
        own: For each output of this rank's program: the index of the result, and the micro-batch.
    """

    microbatches: int
    links: StageLinks
    on: ResultsOn
    names: tuple[str, ...] | None
    types: tuple[TensorType, ...]
    ranks: tuple[int, ...]
    own: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, names: tuple[str, ...] | None, traced: Program, made: PipelinedProgram, links: StageLinks, on: ResultsOn
    ) -> StepResults:
        """Make the results of a traced step and a rank's program. New values of buffers are not results."""
        first, table = len(written_results(traced)), made.table
        ranks = dict[int, int]()
        for stage in made.stages:
            for end in stage.boundary.outputs:
                if isinstance(end, int) and end >= first:
                    ranks[end - first] = table.rank_of(stage.number)
        types = tuple(type_ for result in results_of(traced) if (type_ := data(result).type) is not None)
        own = tuple((result - first, number) for result, number in made.results)
        homes = tuple(ranks[result] for result in range(len(types)))
        return cls(table.microbatches, links, on, names, types, homes, own)

    def zero(self) -> torch.Tensor:
        """A zero loss."""
        return torch.zeros(self.types[0].shape, dtype=self.types[0].dtype, device=self.links.device)

    def of_outputs(self, outputs: Sequence[torch.Tensor]) -> StepResult | None:
        """The mean loss, or (mean loss, metrics); None on ranks that get no results. Collective."""
        own: dict[int, dict[int, torch.Tensor]] = {}
        for (result, number), value in zip(self.own, outputs, strict=True):
            own.setdefault(result, {})[number] = value
        joined = {result: self._joined(result, values) for result, values in own.items()}
        home = self.ranks[0]
        for rank in sorted({*self.ranks}):
            if self.links.size > 1 and (self.on == "all" or rank != home):
                self._share(rank, joined)
        if self.on == "last" and self.links.rank != home:
            return None
        if (names := self.names) is None:
            return joined[0]
        return joined[0], {name: joined[1 + at] for at, name in enumerate(names)}

    def _joined(self, result: int, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The mean of the losses, or metrics stacked to [microbatches, ...]."""
        in_order = [values[number] for number in range(self.microbatches)]
        if result:
            return torch.stack(in_order)
        total = self.zero()
        for loss in in_order:
            total += loss
        return total / self.microbatches

    def _share(self, rank: int, joined: dict[int, torch.Tensor]) -> None:
        """Broadcast the results that `rank` has computed along the axis, in one message."""
        device = self.links.device
        results = [result for result, at in enumerate(self.ranks) if at == rank]
        for result in results if self.links.rank != rank else ():
            type_ = self.types[result]
            shape = (self.microbatches, *type_.shape) if result else type_.shape
            joined[result] = torch.empty(shape, dtype=type_.dtype, device=device)
        flat = [joined[result].contiguous().view(-1).view(torch.uint8) for result in results]
        sent = torch.cat(flat)
        with self.links.waits.explained("the loss and metrics"):
            dist.broadcast(sent, group=self.links.group, group_src=rank)
        for result, part in zip(results, sent.split([one.numel() for one in flat]), strict=True):
            # Copy: a part of the message may not be aligned for its dtype.
            joined[result] = part.clone().view(joined[result].dtype).view(joined[result].shape)
