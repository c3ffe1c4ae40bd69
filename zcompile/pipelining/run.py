"""The program of one rank of a pipeline, loaded, and run once a step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from zcompile.cost.line_calls import lines_of
from zcompile.engine.lowering import WRITTEN
from zcompile.engine.metrics import StepResult
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.region_cache import RegionCache
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import AllGather, GatherOutside, Group, Input, Kind, OffloadStore, Shards
from zcompile.ir.printer import inputs_of
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_random
from zcompile.pipelining.ranks import PipelineRanks
from zcompile.pipelining.results import StepResults
from zcompile.recording.recording import Recorded
from zcompile.runtime.executor import BoundUnit, Gradients, InsideAverages
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.loader import load
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.random_numbers import numbers_of_rank
from zcompile.runtime.recorder import Track
from zcompile.torch_internals.inductor import prepare_inductor


class PipelinedRun:
    """What runs the steps of a rank.

    Args:
        program: This rank's.
        traced: The step of one micro-batch, the same on all ranks.
        model: Whose buffers it reads.
        results: What makes the results of a step of what its program returns.
        common: What the step is called by all ranks.
    """

    def __init__(
        self,
        program: Program,
        traced: Program,
        runtime: ModelRuntime,
        ranks: PipelineRanks,
        model: nn.Module,
        results: StepResults,
        common: str,
    ) -> None:
        self.program, self.runtime, self.ranks, self._model, self._results = program, runtime, ranks, model, results
        ranks.connect(program)
        cache = RegionCache(runtime.options.backend, ranks.everyone.rank)
        if runtime.options.backend == "inductor":
            cache.ready = prepare_inductor(ranks.device)
        name = f"<zcompile step {program.digest()[:12]}>"
        recorder = runtime.recorder
        track = Track(recorder, str(Phase.STEP), program.digest()[:12], lines_of(program, Phase.STEP))
        regions, given = cache.get_all(program.regions), track if recorder.enabled else None
        self._run, self.regions = load(str(program), str(Phase.STEP), regions, name, given), cache
        self._recorded = Recorded(program, Phase.STEP, regions, ())
        self._given = inputs_of(program, Phase.STEP)
        self._traced = [op_of(node, Input) for node in traced.nodes(Input) if op_of(node, Input).kind is Kind.DATA]
        self._draws = any(is_random(node) for node in traced.graph.nodes)
        """True if any rank draws random numbers in a step."""
        self._keeps = any(data(node).op.keep for node in program.nodes(AllGather, GatherOutside))  # type: ignore[attr-defined]
        self._has_run = False
        self._digest = hashlib.sha256(common.encode(errors="backslashreplace")).hexdigest()

    def step(
        self, microbatches: Sequence[Sequence[Any]], updater: Updater | None, scale: torch.Tensor | None = None
    ) -> tuple[StepResult | None, Sequence[Gradients | InsideAverages]]:
        """Run the program; gives the results of the step, and the gradients that it has not used.

        Args:
            microbatches: Of each what the call is given, containers taken apart.
            updater: What steps the optimizers, where the program updates.
            scale: What the loss is multiplied by for the backward, [].

        Raises:
            GroupError: another rank failed or stayed away.
            AgreementError: the ranks are out of step.
        """
        self._enter(RunKind.STEP)
        tangent = torch.full_like(self._results.zero(), 1 / len(microbatches))
        if scale is not None:
            tangent *= scale
        return self._ran(microbatches, tangent, updater)

    def evaluate(self, microbatches: Sequence[Sequence[Any]]) -> StepResult | None:
        """Run a program of forwards alone; gives its results.

        Raises:
            As `step`.
        """
        self._enter(RunKind.EVALUATION)
        return self._ran(microbatches, None, None)[0]

    def _ran(
        self, microbatches: Sequence[Sequence[Any]], tangent: torch.Tensor | None, updater: Updater | None
    ) -> tuple[StepResult | None, Sequence[Gradients | InsideAverages]]:
        """What `step` gives, of a run that has begun."""
        recorder, recordings, version = self.runtime.recorder, self.runtime.recordings, self.runtime.version()
        recorder.begin_call(version, trains=tangent is not None)
        recordings.begin_call(version, trains=tangent is not None)
        run = self._run if recordings.current is None else recordings.current.loaded(self._recorded)
        self._buffers = dict(self._model.named_buffers())
        box = [self._value(node, microbatches, tangent, updater) for node in self._given]
        try:
            with torch.no_grad(), self._numbers(), updater.updating() if updater is not None else nullcontext():
                outputs, gradients = run(box)
        except BaseException:
            self.ranks.data.order_all()
            self.ranks.links.order_all()
            self.runtime.settle()
            raise
        self.runtime.settle()
        found = self._results.of(outputs)
        recorder.end_call(split=False)
        return found, gradients

    def _numbers(self) -> AbstractContextManager[None]:
        """What the step draws random numbers under: each stage and each data-parallel rank its own."""
        if not self._draws:
            return nullcontext()
        place = self.ranks.links.rank * self.ranks.data.size + self.ranks.data.rank
        return numbers_of_rank(place, self.ranks.device, others_draw=True)

    def _enter(self, kind: RunKind) -> None:
        """Begin a run that all ranks number alike, with no copy of a parameter that a step has outdated."""
        freshness, lockstep = self.runtime.freshness, self.runtime.lockstep
        stale = self._keeps and freshness.drop_stale_copies()
        call = lockstep.enter(kind, self._digest, [WRITTEN] if stale else [])
        self.ranks.data.stamp(call.position.number)
        first, self._has_run = not self._has_run, True
        self.ranks.links.begin(call.position.number, first=first)
        lockstep.check()  # the program may update: behind it, it would be too late
        if self._keeps and freshness.has_current and WRITTEN in call.marks:
            freshness.compare()

    def _value(
        self,
        node: fx.Node,
        microbatches: Sequence[Sequence[Any]],
        tangent: torch.Tensor | None,
        updater: Updater | None,
    ) -> Any:
        """What the program is given in the place of `node`."""
        op = data(node).op
        if isinstance(op, Shards):
            return BoundUnit(self.runtime.shards[op.unit], self.program.layout.unit(op.unit), updater)
        if isinstance(op, Group):
            return self.ranks.links if op.axis == self.ranks.links.axis else self.ranks.data.outside
        if isinstance(op, OffloadStore):
            return self.runtime.offloads[op]
        assert isinstance(op, Input), "a step is given units, groups, a place for activations and inputs"
        if op.kind is Kind.CONSTANT:
            return self.program.constants[node.name]
        if op.kind is Kind.TANGENT:
            return tangent
        traced = self._traced[op.index]
        if traced.leaf is None:
            return self._buffers[traced.held]
        return microbatches[op.microbatch or 0][traced.leaf]
