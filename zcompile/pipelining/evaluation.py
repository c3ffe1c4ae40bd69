"""Evaluations of a pipeline: the forward of each micro-batch, without gradients, by programs of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zcompile.engine.metrics import StepResult
from zcompile.engine.step_trace import CallSpec, StepTrace, changed_line
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program
from zcompile.pipelining.first_step import ReadyStep, StepSetup, trace_step
from zcompile.pipelining.guard import traced_with
from zcompile.pipelining.microbatches import SAME_DATA, digest_of
from zcompile.pipelining.program import PipelinedProgram, rewrite
from zcompile.pipelining.results import ResultPlaces, StepResults
from zcompile.pipelining.run import PipelinedRun
from zcompile.proof.ranks import check_texts
from zcompile.runtime.lockstep import RunKind

NEW = 0
"""The mark of a rank that has no program for an evaluation yet."""
MOST = 8
"""Evaluations whose programs are kept: of batches of other sizes, and of the model in other modes."""


@dataclass(frozen=True)
class ReadyEvaluation:
    """An evaluation that can be run, of batches of one size and the model in one mode."""

    run: PipelinedRun
    trace: StepTrace


@dataclass(frozen=True)
class Asked:
    """A batch to evaluate.

    Attributes:
        parts: Its micro-batches.
        traced_for: What they are made of, and the mode that the model is in.
        extra: What the evaluation reads beside them; None where it has not been traced.
    """

    parts: Sequence[CallSpec]
    traced_for: str
    extra: list[torch.Tensor] | None


class Evaluations:
    """The evaluations of a model that is divided, made as they are asked for.

    Args:
        setup: What the train step is made of, with an action table of forwards.
        ready: The train step.
    """

    def __init__(self, setup: StepSetup, ready: ReadyStep) -> None:
        self.setup, self._ready = setup, ready
        self._made: dict[str, ReadyEvaluation] = {}

    def look_up(self, parts: Sequence[CallSpec]) -> Asked:
        """What is asked for by the micro-batches of a batch.

        Raises:
            OptionError, ModelError: these differ from each other, or the model has other modules than its train step.
        """
        self._ready.guard.check_modules()
        traced_for, *others = (traced_with(self.setup.model, part) for part in parts)
        for other in others:
            if line := changed_line(traced_for, other):
                raise OptionError("batch", f"has micro-batches that differ: {line}", "give all of them the same kinds")
        return Asked(parts, traced_for, self._extra(traced_for, parts[0]))

    def run(self, asked: Asked) -> StepResult | None:
        """The results of a batch. Collective.

        Raises:
            As `PipelinedStep.evaluate`.
        """
        lockstep, is_new = self._ready.run.runtime.lockstep, asked.extra is None
        digest = hashlib.sha256(asked.traced_for.encode(errors="backslashreplace")).hexdigest()
        call = lockstep.enter(RunKind.EVALUATION, digest, [NEW] if is_new else [], is_new=is_new)
        lockstep.check()
        if NEW in call.marks:
            self._made[asked.traced_for] = self._prepared(asked.parts)
        extra = self._extra(asked.traced_for, asked.parts[0]) if asked.extra is None else asked.extra
        assert extra is not None, "it has just been traced"
        return self._made[asked.traced_for].run.evaluate([[*part.leaves(), *extra] for part in asked.parts])

    def _extra(self, traced_for: str, first: CallSpec) -> list[torch.Tensor] | None:
        """What an evaluation reads beside its arguments; None where it has to be traced, or traced again."""
        known = self._made.get(traced_for)
        try:
            return None if known is None else known.trace.others(first)
        except ModelError:
            return None

    def _prepared(self, parts: Sequence[CallSpec]) -> ReadyEvaluation:
        """An evaluation that is traced, and proven, for what a batch is made of. Collective."""
        setup, trained = self.setup, self._ready
        ranks, values = setup.ranks, {str(number): (part.args, part.kwargs) for number, part in enumerate(parts)}
        ranks.compare_along("the batch of an evaluation", digest_of((), values), SAME_DATA)
        while len(self._made) >= MOST:
            self._made.pop(next(iter(self._made)))
        traced = partial(trace_step, setup, parts[0], trained.trace)
        trace = ranks.agreement.attempt("the traced evaluation", traced)[0]
        common = ranks.compare("the traced evaluation", str(trace.program))
        made = ranks.agreement.attempt("the program of the evaluation", lambda: self._rewritten(trace.program))[0]
        texts = ranks.agreement.share("the programs of the evaluation", made.program.text(regions=True))
        check_texts(dict(zip(ranks.everyone.waits.ranks, texts, strict=True)))
        places = ResultPlaces.of(setup.flat.names, trace.program, made, setup.table)
        results = StepResults(places, setup.table.microbatches, ranks.links, setup.asked.results)
        run = PipelinedRun(made.program, trace.program, trained.run.runtime, ranks, setup.model, results, common)
        return ReadyEvaluation(run, trace)

    def _rewritten(self, traced: Program) -> PipelinedProgram:
        """The program of this rank.

        Raises:
            CaptureError: it reads a buffer that only another rank has.
        """
        place = replace(self._ready.place, table=self.setup.table)
        options = replace(self._ready.options, checkpoint=None, offload_activations=None)
        made = rewrite(traced, place, options, self.setup.hardware, updates=False)
        buffers = dict(self.setup.model.named_buffers())
        inputs = [op_of(node, Input) for node in traced.nodes(Input)]
        given = [op for op in inputs if op.kind is Kind.DATA]
        for op in (op_of(node, Input) for node in made.program.nodes(Input)):
            held = given[op.index].held if op.kind is Kind.DATA else ""
            if held in buffers and buffers[held].is_meta:
                problem = "is a buffer that the train step writes to in one stage, and an evaluation reads in another"
                raise CaptureError(
                    held, problem, "begin the stages with other units, so that one has both: split=[...]"
                )
        return made
