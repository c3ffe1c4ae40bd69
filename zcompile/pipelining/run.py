"""The program of one rank of a pipeline, loaded, and run once a step; and what a step gives."""

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
    """What runs the steps of a rank.

    `traced` is the step of one micro-batch, the same on all ranks; `common` what all of them call it. The program
    reads the buffers of `model`.
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
        """Run the program; gives the results of the step, and the gradients that it has not used.

        Args:
            microbatches: Of each what the call is given, containers taken apart.
            scale: What the loss is multiplied by for the backward, [].
        """
        self._enter(RunKind.STEP)
        tangent = torch.full_like(self._results.zero(), 1 / len(microbatches))
        if scale is not None:
            tangent *= scale
        return self._ran(microbatches, tangent)

    def evaluate(self, microbatches: Sequence[Sequence[Any]]) -> StepResult | None:
        """Run a program of forwards alone; gives its results."""
        self._enter(RunKind.EVALUATION)
        return self._ran(microbatches, None)[0]

    def _ran(
        self, microbatches: Sequence[Sequence[Any]], tangent: torch.Tensor | None
    ) -> tuple[StepResult | None, Sequence[Gradients | InsideAverages]]:
        """What `step` gives, of a run that has begun."""
        runtime, ranks, updater = self.runtime, self.ranks, self._updater
        version, recordings = runtime.freshness.version(), runtime.recordings
        runtime.recorder.begin_call(version, trains=tangent is not None)
        recordings.begin_call(version, trains=tangent is not None)
        run = self._run if recordings.current is None else recordings.current.loaded(self._recorded)
        buffers = dict(self._model.named_buffers())
        box = [self._value(node, microbatches, tangent, buffers) for node in self._given]
        # Each stage and each data-parallel rank draws random numbers of its own.
        place = ranks.links.rank * ranks.data.size + ranks.data.rank
        numbers = numbers_of_rank(place, ranks.device, others_draw=True) if self._draws else nullcontext()
        try:
            with torch.no_grad(), numbers, updater.updating() if updater is not None else nullcontext():
                outputs, gradients = run(box)
        except BaseException:
            # What was begun goes on in streams of its own, over memory that the next step is lent again.
            ranks.data.order_all()
            ranks.links.order_all()
            runtime.settle()
            raise
        runtime.settle()
        found = self._results.of_outputs(outputs)
        runtime.recorder.end_call(split=False)
        return found, gradients

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
        buffers: Mapping[str, torch.Tensor],
    ) -> Any:
        """What the program is given in the place of `node`."""
        op = data(node).op
        if (fixed := self._fixed(self.program, node)) is not None:
            return fixed
        if isinstance(op, Group):
            return self.ranks.links if op.axis == self.ranks.links.axis else self.ranks.data.along(op.axis)
        if isinstance(op, OffloadStore):
            return self.runtime.offloads[op]
        assert isinstance(op, Input), "a step is given units, groups, a place for activations and inputs"
        if op.kind is Kind.TANGENT:
            return tangent
        traced = self._traced[op.index]
        return buffers[traced.held] if traced.leaf is None else microbatches[op.microbatch or 0][traced.leaf]


@dataclass(frozen=True)
class StepResults:
    """Makes the results of a step, the loss first, of what the programs of all ranks return.

    Attributes:
        microbatches: How many there are.
        links: To the other ranks along the pipeline axis.
        on: Which of them get the results.
        names: Of the results behind the loss; None if there is the loss alone.
        types: Of all, for one micro-batch.
        ranks: The places along the pipeline axis of the ranks that compute them.
        own: What this rank's program returns, in order: which result, and of which micro-batch.
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
        """Those of a traced step, and of what a rank makes of it; new values of buffers are no results."""
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
        """A loss of zero."""
        return torch.zeros(self.types[0].shape, dtype=self.types[0].dtype, device=self.links.device)

    def of_outputs(self, outputs: Sequence[torch.Tensor]) -> StepResult | None:
        """The mean loss, with metrics behind it if there are; None on ranks that are to have none. Collective."""
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
        """The mean of losses; metrics one behind the other."""
        in_order = [values[number] for number in range(self.microbatches)]
        if result:
            return torch.stack(in_order)
        total = self.zero()
        for loss in in_order:
            total += loss
        return total / self.microbatches

    def _share(self, rank: int, joined: dict[int, torch.Tensor]) -> None:
        """Give all ranks along the axis what one of them has computed, as one message."""
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
            # Copied: parts of a message may begin at addresses that the dtype does not allow.
            joined[result] = part.clone().view(joined[result].dtype).view(joined[result].shape)
