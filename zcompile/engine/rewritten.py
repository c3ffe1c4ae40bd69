"""A step rewritten by passes, in this process or in an earlier one that has stored it in the step cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from zcompile.frontend.gradient_flow import Flows
from zcompile.frontend.step_cache import NotStorableError, dumped, loaded
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Input, Kind, Parameter
from zcompile.ir.program import Program
from zcompile.schedule.decision import Request
from zcompile.schedule.default_pipeline import Schedule
from zcompile.schedule.pipeline import Journal, Pipeline, Verified
from zcompile.torch_internals.sizes import FakeTensorMode, is_symbolic


@dataclass(frozen=True)
class PassInputs:
    """What a step's passes depend on in addition to the options: determined when it is compiled."""

    schedule: Schedule
    keeps: bool
    updates: bool
    free: int | None

    @classmethod
    def of(cls, request: Request, schedule: Schedule) -> PassInputs:
        return cls(schedule, request.keeps, request.updates, request.free)


class Rewritten:
    """A step that passes have rewritten, and what running it needs of the traced one.

    Args:
        program: The result of the passes.
        primals: Names of the parameters among the inputs of the traced forward, None for each other input.
        flows: Through which results parameters get their gradients.
        traced: Returns the traced step.
        pipeline: The passes that it went through.
        settled: What these depended on.
        journal: What passes did, if they ran in this process.
    """

    def __init__(
        self,
        program: Program,
        primals: tuple[str | None, ...],
        flows: Flows,
        traced: Callable[[], Program],
        pipeline: Pipeline,
        settled: PassInputs,
        journal: Journal | None = None,
    ) -> None:
        self.program, self.primals, self.flows = program, primals, flows
        self._trace, self._pipeline, self._settled, self._journal = traced, pipeline, settled, journal
        self.is_from_cache = journal is None
        """True if passes did not create it in this process."""

    @classmethod
    def now(cls, traced: Program, pipeline: Pipeline, settled: PassInputs, journal: Journal) -> Rewritten:
        """The result of `pipeline` for `traced`. Raises ProgramError, PipelineError: a pass went wrong."""
        program = pipeline.verified(traced, journal).program
        inputs = traced.nodes(Parameter, Input)
        primals = [n for n in inputs if isinstance(data(n).op, Parameter) or op_of(n, Input).kind is Kind.DATA]
        names = (op_of(n, Parameter).name if isinstance(data(n).op, Parameter) else None for n in primals)
        return cls(program, tuple(names), Flows(traced), lambda: traced, pipeline, settled, journal)

    @cached_property
    def traced(self) -> Program:
        return self._trace()

    @property
    def journal(self) -> Journal:
        """What the passes did, one by one; for a step of an earlier process they run again."""
        if self._journal is None:
            self._journal = Journal()
            self._pipeline.verified(self.traced, self._journal)
            self._journal.entries[-1] = replace(self._journal.entries[-1], after=self.program)  # the one that runs
        return self._journal

    @cached_property
    def verified(self) -> Verified:
        """The program with what it has to compute, for further passes."""
        return Verified.passed(self.traced, self._pipeline, self.program)

    def content(self) -> bytes:
        """The step as bytes, for `CachedStep.read`.

        Raises:
            NotStorableError: it has operations without a name, or numbers that depend on data.
        """
        return dumped(CachedStep(self._settled, self.program, self.primals, self.flows, dumped(self.traced)))


class StepPrograms:
    """The programs of a compiled step."""

    rewritten: Rewritten
    program: Program
    accumulating: Program | None = None
    """The program whose backward holds gradients back, once one has run under `no_sync`."""

    @property
    def programs(self) -> list[Program]:
        """One per phase: the forward, the backward if there is one, that of `no_sync` once there is one."""
        phases = self.program.phases if self.program.has_backward else (Phase.FORWARD,)
        found = [self.program.phase(phase) for phase in phases]
        return found if self.accumulating is None else [*found, self.accumulating.phase(Phase.BACKWARD)]


@dataclass(frozen=True)
class CachedStep:
    """A rewritten step in the cache; its traced program stays in bytes until it is needed."""

    settled: PassInputs
    program: Program
    primals: tuple[str | None, ...]
    flows: Flows
    _traced: bytes

    @classmethod
    def read(cls, content: bytes, mode: FakeTensorMode) -> CachedStep:
        """The step of `Rewritten.content`, its values traced in `mode`."""
        kept = loaded(content, mode)
        assert isinstance(kept, cls), "written by this very code"
        return kept

    def traced(self, mode: FakeTensorMode) -> Program:
        program = loaded(self._traced, mode)
        assert isinstance(program, Program), "written by this very code"
        # The proof compares constants by identity, and each of the two programs was read with its own.
        own = {name: self.program.constants.get(name, value) for name, value in program.constants.items()}
        return replace(program, constants=own)

    def check_fixed(self) -> None:
        """Refuse varying sizes: AOTAutograd's entry counts those that the program saves, which another program may not.

        Raises:
            NotStorableError: it has sizes that vary, and is traced again.
        """
        inputs = self.program.nodes(Input)
        varying = (dim.symbol for node in inputs if (found := data(node).type) for dim in found.dims)
        if any(varying) or any(is_symbolic(node.meta.get("val")) for node in inputs):
            raise NotStorableError("the step would be rewritten differently, and has sizes that vary")

    def rewritten(self, pipeline: Pipeline, mode: FakeTensorMode) -> Rewritten:
        """The step, which went through a `pipeline` of the same passes; traced in `mode` again if needed."""
        traced = functools.partial(self.traced, mode)
        return Rewritten(self.program, self.primals, self.flows, traced, pipeline, self.settled)
