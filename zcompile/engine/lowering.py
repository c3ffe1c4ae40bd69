"""Lowering: loads the program's text, and runs the step under AOTAutograd's calling convention."""

from __future__ import annotations

import contextlib
import hashlib
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
from zcompile.runtime.device import is_capturing
from zcompile.runtime.executor import BoundUnit, Gradients
from zcompile.runtime.gradients.delivery import HOLDS, Unreached
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.groups import SEQUENCE
from zcompile.runtime.loader import load
from zcompile.runtime.lockstep import MOST, Lockstep, RunExchange, RunKind
from zcompile.runtime.recorder import Track
from zcompile.runtime.shards import Full
from zcompile.schedule.default_pipeline import ACCUMULATE
from zcompile.torch_internals.sizes import is_symbolic

WRITTEN = 0
"""The mark, in the message of a forward, of a rank whose full copies may no longer equal the shards."""
ALL = HOLDS + 1
"""The mark of a rank on which gradients reach all parameters of a program; marks of groups of parameters follow."""


class LoadedProgram:
    """A loaded program and what it runs with; `updater` steps optimizers, if the program updates."""

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
        """The text of `phase` as a function that takes a box of all values that it unboxes; and how it is recorded.

        `lent`: the indices in the box of memory and storage lent to the program.
        """
        digest, recorder = program.digest()[:12], self.runtime.recorder
        track = Track(recorder, str(phase), digest, lines_of(program, phase)) if recorder.enabled else None
        text = program.phase(phase).text()
        run = load(text, str(phase), regions, f"<zcompile {phase} {digest}>", track)
        return run, Recorded(program, phase, regions, lent)

    def _fixed(self, program: Program, node: fx.Node) -> Any:
        """The argument for `node` in every run: a unit, or a constant; None if it varies."""
        op = data(node).op
        if isinstance(op, Shards):
            return self._units[op.unit]
        return program.constants[node.name] if isinstance(op, Input) and op.kind is Kind.CONSTANT else None


class CompiledStep(LoadedProgram, StepPrograms):
    """A rewritten program that runs: the callables that AOTAutograd calls.

    AOTAutograd's boxes hold, for the forward, all inputs of the graph; for the backward, saved sizes, saved tensors,
    parameters that the backward reads, and tangents. Its parameters are placeholders without memory here, unless the
    full parameter is kept from the forward to the backward.
    """

    compared = 3
    """In how many runs ranks of a sequence compare what is in their batches."""

    def __init__(self, rewritten: Rewritten, runtime: ModelRuntime, updater: Updater | None) -> None:
        super().__init__(program := rewritten.program, runtime, updater)
        self.rewritten, self._updates = rewritten, updater is not None
        groups = list(grouped(program.saved(), bundles_of(program)))
        self._groups = [len(one.members) if isinstance(one, Bundle) else None for one in groups]
        """For each name in the backward's text: its number of values; None if it is not a list."""
        self.saved: Sequence[fx.Node] = [
            node for one in groups for node in (one.members if isinstance(one, Bundle) else [one])
        ]
        self._graphs = runtime.graphs if program.is_captured else None
        self._is_size = [is_symbolic(node.meta.get("val")) for node in self.saved]
        tensors = [node for node, is_size in zip(self.saved, self._is_size, strict=True) if not is_size]
        self._made = next(
            (i for i, node in enumerate(tensors) if not isinstance(data(node).op, (Input, WaitSecondary))), None
        )
        """Index of the first saved tensor that the forward has created."""
        self._is_parameter = [name is not None for name in rewritten.primals]
        given = [op for node in program.nodes(Input) if (op := op_of(node, Input)).kind is Kind.DATA]
        others = [index for index, is_parameter in enumerate(self._is_parameter) if not is_parameter]
        self._arguments = [index for index, op in zip(others, given, strict=True) if op.held in ("", "?")]
        self._read = _parameters_read(program, Phase.BACKWARD)
        self.reread: Sequence[int] = [rewritten.primals.index(name) for name in self._read]
        self._kept = [op_of(node, WaitGather).unit for node in program.kept()]
        units = [(program.layout.unit_of(name), name) for name in self._read]
        kept = {unit: place for place, unit in enumerate(self._kept)}
        self._carries = [(kept.get(unit.name), unit.index(name)) for unit, name in units]
        """For each parameter that the backward reads: the index of the kept unit with it, if any, and its index
        there."""
        self._agreed = False
        self._digest = program.digest()
        self._sizes = hashlib.sha256(str([data(node).type for node in program.nodes(Input)]).encode()).hexdigest()
        """A digest of the types of a batch."""
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
        """What the step cache stores of it: see `Rewritten.content`."""
        return self.rewritten.content()

    def _bound(self, program: Program, phase: Phase) -> Callable[[list[Any]], Any]:
        """The text of `phase` as a function of what is not bound here; units and constants are."""
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
                    # Collectives that were not waited for still run on their own streams, on memory that is lent
                    # again once this call returns: order the current stream's later work after them.
                    self.runtime.communicator.order_all()
                    raise

        return call

    def _loan(self, op: RuntimeInput, values: Sequence[Any], loans: contextlib.ExitStack) -> Any:
        """What a program is lent for a run with `values`: its arena, its stack, or storage of activations."""
        if isinstance(op, Group) and op.axis in [axis.name for axis in self.program.layout.outside]:
            return self.runtime.communicator.along(op.axis)
        if isinstance(op, (OffloadStore, Group)):
            return self.runtime.offloads[op]
        if isinstance(op, Stack):
            return loans.enter_context(self._lender.stack())
        full = (tensor for value in values if isinstance(value, Full) for tensor in value.tensors)
        return self._lender.arena([tensor for tensor in full if tensor is not None])

    def forward(self, box: list[Any]) -> list[Any]:
        """Run the forward; returns the outputs, then what AOTAutograd is to keep for the backward."""
        # A kept full copy may be created under inference_mode and used in training later.
        with torch.inference_mode(False), torch.no_grad(), self.runtime.modes.back():
            return self._run_forward(box)

    def _run_forward(self, box: list[Any]) -> list[Any]:
        lockstep = self.runtime.lockstep
        kind = RunKind.EVALUATION if self._backward is None else RunKind.FORWARD
        lockstep.enter_tensor_parallel(kind)
        if self.runtime.sequence is not None:
            self._check_batch(self.runtime.sequence, kind, box)
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
        # Results that tensor parallelism divides are of a tensor subclass, for which autograd creates zeros.
        self.runtime.delivery.results = None if self.runtime.lockstep.tensor is not None else self._tangents.results
        outputs, crossing = self._forward(values)
        full, saved = crossing[: len(self._kept)], flattened(crossing[len(self._kept) :])
        sizes = [value for value, is_size in zip(saved, self._is_size, strict=True) if is_size]
        tensors = [value for value, is_size in zip(saved, self._is_size, strict=True) if not is_size]
        if self._graphs is not None:
            self._graphs.mark(tensors, self._made)
        return [*outputs, *tensors, *self._carried(full, placeholders), *sizes]

    def _check_batch(self, sequence: Lockstep, kind: RunKind, box: Sequence[Any]) -> None:
        """Raise AgreementError if ranks that divide the tokens of one batch have batches of other sizes.

        In the first runs also if whole numbers in them differ: each rank may have a sampler of its own by mistake.
        """
        # While a step is captured, the host cannot read what is in a batch.
        reads = sequence.number < self.compared and not is_capturing(self.runtime.communicator.device)
        sequence.enter(kind, self._digest_of(box) if reads else self._sizes)
        try:
            sequence.check()
        except AgreementError as error:
            problem = f"differs on ranks that divide its tokens, or they run something else: {error.problem}"
            raise AgreementError("the batch", problem, f"give all ranks of {SEQUENCE!r} the same batch") from error

    def _digest_of(self, box: Sequence[Any]) -> str:
        """A digest of the types of a batch, and of whole numbers in it; the host waits for these."""
        given = (one for index in self._arguments if isinstance(one := box[index], torch.Tensor))
        whole = (one.detach().cpu().reshape(-1).view(torch.uint8) for one in given if not one.is_floating_point())
        return hashlib.sha256(b"".join([self._sizes.encode(), *(one.numpy().tobytes() for one in whole)])).hexdigest()

    def _agree(self) -> None:
        """Compare the program with the other ranks', once; their `is_new` has announced this."""
        if not self._agreed:
            self.runtime.agree(self.program)
            self._agreed = True

    def _carried(self, full: Sequence[Full], placeholders: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is saved for the parameters that the backward reads: kept full ones, otherwise placeholders."""
        return [
            placeholder if kept is None else full[kept][place]
            for (kept, place), placeholder in zip(self._carries, placeholders, strict=True)
        ]

    @torch.no_grad()
    def backward(self, box: list[Any]) -> list[Any]:
        """Run the backward and deliver gradients of parameters; returns those of the other inputs."""
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
        """Begin a backward; returns a function that later gives the parameters that no gradient has reached."""
        self.runtime.lockstep.enter_tensor_parallel(RunKind.BACKWARD)
        delivery, flows = self.runtime.delivery, self._flows
        flowing, delivery.flowing = delivery.flowing, None
        # Autograd counts fewer results if AOTAutograd has added some of its own: which ones is not known.
        known = flowing is not None and len(flowing) == len(self.program.results.outputs)
        live = flows.live(flowing if known else None)
        if not delivery.synchronises:
            return lambda: flows.unreached(live)
        live |= flows.around([name for bound in self._units.values() for name in bound.shards.names_held()])
        if not self._communicates[Phase.BACKWARD]:
            return lambda: flows.unreached(live)
        # If all are reached on one rank, groups need not be sent, which may differ on another rank.
        countable = ALL + len(flows.groups) < MOST  # else zeros are delivered where no gradient arrives
        marks = [ALL] if len(live) == len(flows.groups) or not countable else [ALL + 1 + number for number in live]
        is_new = self.runtime.is_new(self._digest)
        call = delivery.enter(RunKind.BACKWARD, self._digest, marks, flows.digest, is_new=is_new)
        self._agree()
        if self._updates and not self.runtime.communicator.collectives.separates:
            self.runtime.lockstep.check()  # this backward updates, so a later check would be too late
        return lambda: _unreached(flows, call)

    def _regrouped(self, saved: list[Any]) -> list[Any]:
        """`saved`, which is emptied, as the backward's text unboxes it: a list for several values under one name."""
        result, start = list[Any](), 0
        for count in self._groups:
            end = start + (1 if count is None else count)
            result += saved[start:end] if count is None else [saved[start:end]]
            start = end
        saved.clear()
        return result

    def _accumulating(self) -> Callable[[list[Any]], Any]:
        """The backward that holds gradients back; created on first use."""
        if self._accumulate is None:
            # It must take the same saved values, under the same names.
            self.accumulating = self.rewritten.verified.holding_back().after([ACCUMULATE]).program
            self._accumulate = self._bound(self.accumulating, Phase.BACKWARD)
        return self._accumulate

    def _kept_full(self, carried: Sequence[torch.Tensor]) -> list[Full]:
        by_name = dict(zip(self._read, carried, strict=True))
        units = [self.program.layout.unit(name) for name in self._kept]
        return [Full(unit, [by_name.get(param.name) for param in unit.params]) for unit in units]


def _unreached(flows: Flows, call: RunExchange) -> Collection[str]:
    """The parameters of a program that no gradient has reached on any rank.

    Raises:
        AgreementError: on every rank: losses leave out results on all ranks, and the ranks' programs differ there.
    """
    if ALL in call.marks:
        return ()
    if len(call.variants) > 1:
        problem = "give gradients through other results on some ranks than on others, and no loss has used them all"
        raise AgreementError("the ranks' programs", problem, "let the model return the same results on every rank")
    return flows.unreached({mark - ALL - 1 for mark in call.marks if mark > ALL})


def flattened(values: Sequence[Any]) -> list[Any]:
    """`values`, with lists among them expanded."""
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
