"""Lowering: the program's text loaded, and the step run under AOTAutograd's calling convention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zcompile.cost.line_calls import lines_of
from zcompile.cost.memory import arena_bytes
from zcompile.engine.calls.blank_tangents import Tangents
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.rewritten import Rewritten, StepPrograms
from zcompile.errors import AgreementError
from zcompile.frontend.gradient_flow import Flows
from zcompile.ir.bundles import Bundle, bundles_of, grouped
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import (
    Call,
    Gathering,
    Group,
    Input,
    Kind,
    OffloadStore,
    RuntimeInput,
    Shards,
    Stack,
    Store,
    WaitGather,
    WaitSecondary,
)
from zcompile.ir.packing import aligned
from zcompile.ir.printer import inputs_of
from zcompile.ir.program import Program
from zcompile.recording.recording import Recorded
from zcompile.runtime.arena import Lender
from zcompile.runtime.executor import BoundUnit, Gradients
from zcompile.runtime.gradients.delivery import HOLDS, Unreached
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.loader import load
from zcompile.runtime.lockstep import MOST, RunExchange, RunKind
from zcompile.runtime.recorder import Track
from zcompile.runtime.shards import Full
from zcompile.schedule.default_pipeline import ACCUMULATE
from zcompile.torch_internals.sizes import is_symbolic

WRITTEN = 0
"""The mark of a rank whose full copies may no longer equal the shards, in what it tells the others of a forward."""
ALL = HOLDS + 1
"""The mark of a rank on which gradients flow to all parameters of a program; behind it are those of groups of them."""


class LoadedProgram:
    """A program that is loaded, and what it runs with; `updater` steps optimizers, where the program updates."""

    def __init__(
        self, program: Program, runtime: ModelRuntime, updater: Callable[[Gradients], None] | None = None
    ) -> None:
        self.program, self.runtime = program, runtime
        self._units = {unit.name: BoundUnit(runtime.shards[unit.name], unit, updater) for unit in program.layout.units}
        self._keeps = any(op_of(node, Gathering).keep for node in program.nodes(Gathering))
        """True if full parameters are kept from run to run."""

    def _load(
        self, program: Program, phase: Phase, regions: Mapping[str, Callable[..., Any]], lent: Collection[int] = ()
    ) -> tuple[Callable[[list[Any]], Any], Recorded]:
        """The text of `phase`, ready to be called with a box of all that it unboxes; and how it is recorded.

        `lent`: the places in the box of memory and storage that the program is lent.
        """
        digest, recorder = program.digest()[:12], self.runtime.recorder
        track = Track(recorder, str(phase), digest, lines_of(program, phase)) if recorder.enabled else None
        text = program.phase(phase).text()
        run = load(text, str(phase), regions, f"<zcompile {phase} {digest}>", track)
        return run, Recorded(program, phase, regions, lent)

    def _fixed(self, program: Program, node: fx.Node) -> Any:
        """What `node` is given in every run: a unit, or a constant; None for what differs."""
        op = data(node).op
        if isinstance(op, Shards):
            return self._units[op.unit]
        return program.constants[node.name] if isinstance(op, Input) and op.kind is Kind.CONSTANT else None


class CompiledStep(LoadedProgram, StepPrograms):
    """A rewritten program that runs: the callables that AOTAutograd calls.

    AOTAutograd's boxes hold, for the forward, all inputs of the graph; for the backward, saved sizes, saved tensors,
    parameters that the backward reads, and tangents. What it calls parameters here are placeholders without memory,
    unless the full parameter is kept over the turn.
    """

    def __init__(self, rewritten: Rewritten, runtime: ModelRuntime, updater: Updater | None) -> None:
        super().__init__(program := rewritten.program, runtime, updater)
        self.rewritten, self._updates = rewritten, updater is not None
        groups = list(grouped(program.saved(), bundles_of(program)))
        self._groups = [len(one.members) if isinstance(one, Bundle) else None for one in groups]
        """Of what the text of the backward calls by one name: how many values; None for one that is no list."""
        self.saved: Sequence[fx.Node] = [
            node for one in groups for node in (one.members if isinstance(one, Bundle) else [one])
        ]
        self._graphs = runtime.graphs if program.is_captured else None
        self._is_size = [is_symbolic(node.meta.get("val")) for node in self.saved]
        tensors = [node for node, is_size in zip(self.saved, self._is_size, strict=True) if not is_size]
        self._made = next(
            (i for i, node in enumerate(tensors) if not isinstance(data(node).op, (Input, WaitSecondary))), None
        )
        """Which of the tensors that are saved is the first that the forward has made."""
        self._is_parameter = [name is not None for name in rewritten.primals]
        self._read = _parameters_read(program, Phase.BACKWARD)
        self.reread: Sequence[int] = [rewritten.primals.index(name) for name in self._read]
        self._kept = [op_of(node, WaitGather).unit for node in program.kept()]
        units = [(program.layout.unit_of(name), name) for name in self._read]
        kept = {unit: place for place, unit in enumerate(self._kept)}
        self._carries = [(kept.get(unit.name), unit.index(name)) for unit, name in units]
        """Of each parameter that the backward reads: which of the kept units has it, and where in that."""
        self._agreed = False
        self._digest = program.digest()
        self._communicates = {phase: program.phase(phase).volume() > 0 for phase in program.phases}
        self._flows = rewritten.flows
        self._has_copies = self._keeps or (self._updates and program.layout.stage.optimizer_sharded)
        stacked = sum(aligned(data(node).nbytes) for node in program.nodes(Store))
        self._lender = Lender(runtime.arenas, arena_bytes(program), stacked)
        self._tangents = Tangents(program)
        self._regions = runtime.regions.get_all(program.regions, self._tangents.readers)
        self._forward = self._bound(program, Phase.FORWARD)
        self._backward = self._bound(program, Phase.BACKWARD) if program.has_backward else None
        self._accumulate: Callable[[list[Any]], Any] | None = None

    def content(self) -> bytes:
        """What the cache of steps keeps of it: see `Rewritten.content`."""
        return self.rewritten.content()

    def _bound(self, program: Program, phase: Phase) -> Callable[[list[Any]], Any]:
        """The text of `phase`, ready to be called with what is not bound here: units and constants."""
        given = inputs_of(program, phase)
        bound = [value for node in given if (value := self._fixed(program, node)) is not None]
        lent = [op for node in given if isinstance(op := data(node).op, RuntimeInput)]
        run, recorded = self._load(program, phase, self._regions, range(len(bound), len(bound) + len(lent)))

        def call(values: list[Any]) -> Any:
            with contextlib.ExitStack() as loans:
                loaned = [self._loan(op, values, loans) for op in lent]
                try:
                    recording = self.runtime.recordings.current
                    started = run if recording is None else recording.loaded(recorded)
                    return started([*bound, *loaned, *_drained(values)])
                except BaseException:
                    # Collectives that nobody has waited for go on in streams of their own, over memory that is lent
                    # again once this call has left: whatever comes next is ordered behind them.
                    self.runtime.communicator.order_all()
                    raise

        return call

    def _loan(self, op: RuntimeInput, values: Sequence[Any], loans: contextlib.ExitStack) -> Any:
        """What a program gets for a run with `values`: its arena, its stack, or where activations go."""
        if isinstance(op, Group) and op.axis in [axis.name for axis in self.program.layout.outside]:
            return self.runtime.communicator.along(op.axis)
        if isinstance(op, (OffloadStore, Group)):
            return self.runtime.offloads[op]
        if isinstance(op, Stack):
            return loans.enter_context(self._lender.stack())
        full = (tensor for value in values if isinstance(value, Full) for tensor in value.tensors)
        return self._lender.arena([tensor for tensor in full if tensor is not None])

    def forward(self, box: list[Any]) -> list[Any]:
        """Run the forward; gives the outputs, then what AOTAutograd is to keep for the backward."""
        # A full copy that is kept may be made under inference_mode and used in training later.
        with torch.inference_mode(False), torch.no_grad(), self.runtime.modes.back():
            return self._run_forward(box)

    def _run_forward(self, box: list[Any]) -> list[Any]:
        lockstep = self.runtime.lockstep
        kind = RunKind.EVALUATION if self._backward is None else RunKind.FORWARD
        lockstep.enter_tensor_parallel(kind)
        freshness, uses_copies = self.runtime.freshness, self._has_copies
        if self._communicates[Phase.FORWARD] or uses_copies:  # the ranks may have to compare these
            marks = [WRITTEN] if uses_copies and freshness.drop_stale_copies() else []
            call = lockstep.enter(kind, self._digest, marks, is_new=self.runtime.is_new(self._digest))
            self._agree()
            if uses_copies and freshness.has_current:
                lockstep.check()
                if WRITTEN in call.marks:
                    freshness.compare()
        elif lockstep.tensor is not None:
            self._agree()
        for offload in self.runtime.offloads.values():
            offload.sweep()
        placeholders = [box[index] for index in self.reread]
        values = [value for value, is_parameter in zip(box, self._is_parameter, strict=True) if not is_parameter]
        box.clear()
        if self._graphs is not None:
            self._graphs.begin()
        # Results that tensor parallelism divides are tensors of a subclass: autograd makes zeros of these.
        self.runtime.delivery.results = None if self.runtime.lockstep.tensor is not None else self._tangents.results
        outputs, crossing = self._forward(values)
        full, saved = crossing[: len(self._kept)], flattened(crossing[len(self._kept) :])
        sizes = [value for value, is_size in zip(saved, self._is_size, strict=True) if is_size]
        tensors = [value for value, is_size in zip(saved, self._is_size, strict=True) if not is_size]
        if self._graphs is not None:
            self._graphs.mark(tensors, self._made)
        return [*outputs, *tensors, *self._carried(full, placeholders), *sizes]

    def _agree(self) -> None:
        """Compare the program with the other ranks', once; they have been told that this is about to come."""
        if not self._agreed:
            self.runtime.agree(self.program)
            self._agreed = True

    def _carried(self, full: Sequence[Full], placeholders: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is saved as the parameters that the backward reads: kept full ones, else the placeholders."""
        return [
            placeholder if kept is None else full[kept][place]
            for (kept, place), placeholder in zip(self._carries, placeholders, strict=True)
        ]

    @torch.no_grad()
    def backward(self, box: list[Any]) -> list[Any]:
        """Run the backward, deliver the gradients of parameters; gives those of the other inputs."""
        assert self._backward is not None, "a program without a backward has no gradients"
        kinds, self.runtime.delivery.kinds = self.runtime.delivery.kinds, None
        unreached = self._entered()
        first, end = sum(self._is_size), len(self._is_size)
        sizes, tensors = iter(box[:first]), iter(box[first:end])
        carried, tangents = box[end : end + len(self._read)], box[end + len(self._read) :]
        if kinds is not None:
            tangents = self._tangents.filled(tangents, kinds, blank=self.runtime.recordings.current is None)
        box.clear()
        saved = [next(sizes if is_size else tensors) for is_size in self._is_size] if first else [*tensors]
        values = [*self._kept_full(carried), *self._regrouped(saved), *tangents]
        del saved, carried, tangents, tensors, sizes
        run = self._backward if self.runtime.delivery.synchronises else self._accumulating()
        try:
            input_gradients, gradients = run(values)
        finally:
            for memory in {bound.shards.memory for bound in self._units.values()}:
                memory.settle()
        self.runtime.delivery.add(gradients, unreached)
        others = iter(input_gradients)
        return [None if is_parameter else next(others) for is_parameter in self._is_parameter]

    def _entered(self) -> Unreached:
        """Begin a backward; gives what tells afterwards which parameters no gradient has flowed to."""
        self.runtime.lockstep.enter_tensor_parallel(RunKind.BACKWARD)
        delivery, flows = self.runtime.delivery, self._flows
        flowing, delivery.flowing = delivery.flowing, None
        # Autograd knows fewer results where AOTAutograd has put some of its own among them: which ones is not known.
        known = flowing is not None and len(flowing) == len(self.program.results.outputs)
        live = flows.live(flowing if known else None)
        if not delivery.synchronises:
            return lambda: flows.unreached(live)
        live |= flows.around([name for bound in self._units.values() for name in bound.shards.names_held()])
        if not self._communicates[Phase.BACKWARD]:
            return lambda: flows.unreached(live)
        # What is all of them on one rank need not be counted by groups, which another rank may have otherwise.
        countable = ALL + len(flows.groups) < MOST  # else zeros are delivered where no gradient flows
        marks = [ALL] if len(live) == len(flows.groups) or not countable else [ALL + 1 + number for number in live]
        is_new = self.runtime.is_new(self._digest)
        call = delivery.enter(RunKind.BACKWARD, self._digest, marks, flows.digest, is_new=is_new)
        self._agree()
        if self._updates and not self.runtime.communicator.collectives.separates:
            self.runtime.lockstep.check()  # this backward updates: behind it, it would be too late
        return lambda: _unreached(flows, call)

    def _regrouped(self, saved: list[Any]) -> list[Any]:
        """What the backward's text unboxes of `saved`, which is emptied: lists where it calls several by one name."""
        result, start = list[Any](), 0
        for count in self._groups:
            end = start + (1 if count is None else count)
            result += saved[start:end] if count is None else [saved[start:end]]
            start = end
        saved.clear()
        return result

    def _accumulating(self) -> Callable[[list[Any]], Any]:
        """The backward that holds gradients back; made when it is first needed."""
        if self._accumulate is None:
            # What is saved, and by which names, stays as it is.
            self.accumulating = self.rewritten.verified.holding_back().after([ACCUMULATE]).program
            self._accumulate = self._bound(self.accumulating, Phase.BACKWARD)
        return self._accumulate

    def _kept_full(self, carried: Sequence[torch.Tensor]) -> list[Full]:
        by_name = dict(zip(self._read, carried, strict=True))
        units = [self.program.layout.unit(name) for name in self._kept]
        return [Full(unit, [by_name.get(param.name) for param in unit.params]) for unit in units]


def _unreached(flows: Flows, call: RunExchange) -> Collection[str]:
    """The parameters of a program that no gradient has flowed to on any rank.

    Raises:
        AgreementError: on every rank: losses leave out results on all of them, of programs that differ in these.
    """
    if ALL in call.marks:
        return ()
    if len(call.variants) > 1:
        problem = "give gradients through other results on some ranks than on others, and no loss has used them all"
        raise AgreementError("the ranks' programs", problem, "let the model return the same results on every rank")
    return flows.unreached({mark - ALL - 1 for mark in call.marks if mark > ALL})


def flattened(values: Sequence[Any]) -> list[Any]:
    """`values`, with those of a list in its place."""
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def _drained(values: list[Any]) -> list[Any]:
    """A copy of `values`, which is emptied: the program must hold the only references."""
    copy = list(values)
    values.clear()
    return copy


def _parameters_read(program: Program, phase: Phase) -> list[str]:
    """Parameters that regions of `phase` read, in order of first use."""
    names: dict[str, None] = {}
    for call in program.nodes(Call, phase=phase):
        op = op_of(call, Call)
        for argument, item in program.regions[op.region].takes:
            if item is not None:
                names[program.layout.unit(op.units[argument]).params[item].name] = None
    return list(names)
