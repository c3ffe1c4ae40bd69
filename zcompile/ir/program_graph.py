"""What a program is made of: its graph and layout, its regions and results, how they are read and edited."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import fx

from zcompile.ir.layout import Layout, Param
from zcompile.ir.ops import (
    AllGather,
    Arena,
    Away,
    Call,
    Compute,
    Data,
    Fetch,
    GatherAhead,
    Input,
    Item,
    Kind,
    Parameter,
    Peers,
    Phase,
    Reduce,
    Release,
    Results,
    Shards,
    Stack,
    Store,
    Update,
    WaitGather,
    data,
    items_of,
    op_of,
    set_data,
)
from zcompile.ir.region import Region
from zcompile.ir.tensor_type import TensorType

PLACEHOLDERS = (Input, Parameter, Shards, Arena, Stack, Away, Peers)
Communication = AllGather | GatherAhead | Reduce
COMMUNICATIONS = (AllGather, GatherAhead, Reduce)


@dataclass(frozen=True, repr=False)
class ProgramGraph:
    """All of a program but its text, which is made of this: see `zcompile.ir.program.Program`."""

    graph: fx.Graph
    layout: Layout
    regions: Mapping[str, Region] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Tensors that were attributes of the traced graph, by the name of their placeholder."""
    modules: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    """Trainable parameters that the traced code does not use, so that they have no gradient here."""
    notes: tuple[str, ...] = ()
    """What passes have to say of their choices; `explain()` shows it."""
    phases: tuple[Phase, ...] = (Phase.FORWARD, Phase.BACKWARD)

    # -- reading --------------------------------------------------------------------------------------------------

    def nodes(self, *ops: type[Any], phase: Phase | None = None) -> list[fx.Node]:
        """Nodes in program order, of the given operations (all when none is given) and phase."""
        return [
            node
            for node in self.graph.nodes
            if (not ops or isinstance(data(node).op, ops)) and (phase is None or data(node).phase is phase)
        ]

    def body(self, phase: Phase) -> list[fx.Node]:
        """What `phase` executes, in order: no placeholders, no results."""
        return [n for n in self.nodes(phase=phase) if not isinstance(data(n).op, (*PLACEHOLDERS, Results))]

    def node(self, name: str) -> fx.Node:
        """The node called `name`."""
        found: dict[str, fx.Node] = {node.name: node for node in self.graph.nodes}
        return found[name]

    @property
    def results(self) -> ResultsView:
        (mapping,) = self.graph.output_node().args
        assert isinstance(mapping, dict), "a program ends in its results"
        return ResultsView(mapping)

    @property
    def has_backward(self) -> bool:
        results = self.results
        reduced = results.gradients or results.reduced or self.nodes(Update)
        return bool(reduced or any(gradient is not None for gradient in results.input_gradients))

    def differentiated(self) -> set[str]:
        """Parameters with a gradient in this program."""
        return {*self.layout.trainable} - self.unused if self.has_backward else set()

    def saved(self) -> list[fx.Node]:
        """Values of the forward (inputs too) that the backward uses, in program order: full parameters left out."""
        return [
            n
            for n in self._crossing()
            if not isinstance(data(n).op, (Parameter, Shards, Arena, Away, Peers, WaitGather))
        ]

    def kept(self) -> list[fx.Node]:
        """Full parameters gathered in the forward that the backward uses as they are."""
        return [n for n in self._crossing() if isinstance(data(n).op, WaitGather)]

    def _crossing(self) -> list[fx.Node]:
        ends = set(self.results.backward_nodes())
        return [
            node
            for node in self.graph.nodes
            if data(node).phase is Phase.FORWARD
            and not isinstance(data(node).op, Results)
            and not (isinstance(data(node).op, Input) and op_of(node, Input).kind is Kind.CONSTANT)
            and (
                node in ends
                or any(
                    data(user).phase is Phase.BACKWARD and not isinstance(data(user).op, Results) for user in node.users
                )
            )
        ]

    def phase(self, phase: Phase) -> Self:
        """The forward or the backward alone, for printing and lowering."""
        return replace(self, phases=(phase,))

    @property
    def name(self) -> str:
        """`forward`, `backward`, or `step` for both."""
        return str(self.phases[0]) if len(self.phases) == 1 else "step"

    # -- communication --------------------------------------------------------------------------------------------

    def communications(self) -> list[str]:
        """One line for each collective in issue order: what every rank must agree on, activation shapes left out."""
        lines = []
        for phase in self.phases:
            for node in self.nodes(*COMMUNICATIONS, phase=phase):
                op = data(node).op
                assert isinstance(op, COMMUNICATIONS), "asked for by kind"
                lines.append(f"{phase}: {self._text_of(op)}")
        return lines

    def _text_of(self, op: Communication) -> str:
        """`all_gather blocks.0 (a f32[8, 4], b f32[4]+c f32[4])`: one entry a message, packed ones added."""
        match op:
            case Reduce(scatter=scatter):
                name = "reduce_scatter" if scatter else "all_reduce"
            case AllGather(keep=keep):
                name = "all_gather keep" if keep else "all_gather"
            case GatherAhead():
                name = "gather_ahead"
        texts = []
        for params in self.messages(op):
            types = (TensorType.make(sent_dtype(op, p), p.shape) for p in params)
            texts.append("+".join(f"{p.name} {type_}" for p, type_ in zip(params, types, strict=True)))
        pieces = f" by {op.bucket}" if isinstance(op, Reduce) and op.bucket else ""
        return f"{name} {op.unit} ({', '.join(texts)}){pieces}"

    def messages(self, op: Communication) -> list[list[Param]]:
        """The parameters of each message of a communication."""
        unit = self.layout.unit(op.unit)
        wanted = set(op.params) if isinstance(op, Reduce) else {p.name for p in unit.params if p.shards}
        sent = ([unit.params[i] for i in message if unit.params[i].name in wanted] for message in unit.messages)
        return [params for params in sent if params]

    def message_count(self, node: fx.Node) -> int:
        """In how many messages a communication travels."""
        op = data(node).op
        assert isinstance(op, COMMUNICATIONS), f"{node.name} is no communication"
        return len(self.messages(op))

    def message_bytes(self, node: fx.Node) -> list[int]:
        """Bytes of each message of a communication, padding included."""
        op = data(node).op
        assert isinstance(op, COMMUNICATIONS), f"{node.name} is no communication"
        return [sum(p.padded_numel * sent_dtype(op, p).itemsize for p in params) for params in self.messages(op)]

    def digest(self) -> str:
        """SHA-256 of the communications: equal on all ranks, or the program must not run."""
        return hashlib.sha256("\n".join(self.communications()).encode(errors="backslashreplace")).hexdigest()

    def payload(self, node: fx.Node) -> int:
        """Bytes of the tensors that one communication moves, padding included; an all_reduce moves them twice.

        What is gathered ahead counts where the next step would gather it.
        """
        op = data(node).op
        if isinstance(op, GatherAhead):
            return 0
        if isinstance(op, AllGather):
            return sum(param.padded_bytes for param in self.layout.unit(op.unit).params if param.shards)
        assert isinstance(op, Reduce), f"{node.name} is no communication"
        params = [self.layout.param(name) for name in op.params]
        factors = [1 if op.scatter and p.shards else 2 for p in params]
        return sum(p.padded_numel * p.reduce_dtype.itemsize * f for p, f in zip(params, factors, strict=True))

    def wire_bytes(self, *nodes: fx.Node) -> int:
        """Bytes that this rank sends for communications: (N-1)/N of their payload."""
        world = self.layout.world
        return sum(map(self.payload, nodes)) * (world - 1) // world

    def volume(self) -> int:
        """Bytes that this rank sends in one run of the program."""
        return self.wire_bytes(*(n for n in self.nodes(*COMMUNICATIONS) if data(n).phase in self.phases))

    def peers_of(self, node: fx.Node) -> int:
        """From how many ranks a line fetches an activation together; 0 for any other line."""
        place = data(node.all_input_nodes[1]).op if isinstance(data(node).op, Fetch) else None
        return place.size if isinstance(place, Peers) else 0

    def memory(self, node: fx.Node) -> int:
        """Bytes gained when `node` runs (negative for a release)."""
        op = data(node).op
        match op:
            case GatherAhead(keep=True):
                return 0  # into the memory of the copy that the forward has gathered
            case AllGather(at=place) if place is not None:
                return 0  # in the arena, which is there anyway
            case AllGather() | GatherAhead():
                return self.layout.gathered_bytes(op.unit)
            case Call() | Compute():
                return data(node).nbytes + sum(data(item).nbytes for item in items_of(node))
            case Reduce(scatter=True) if (world := self.layout.world) > 1:  # alone, a gradient is its own average
                params = [self.layout.param(name) for name in op.params]
                return sum(param.padded_numel * param.reduce_dtype.itemsize // world for param in params)
            case Item() | Results() | Store():
                return 0  # a stack is there anyway, too
            case Update():
                return -self.memory(node.all_input_nodes[1].all_input_nodes[0])
            case Release():
                return 0 if _placed(node) else -self.layout.gathered_bytes(op.unit)
            case _:
                return data(node).nbytes

    # -- editing --------------------------------------------------------------------------------------------------

    def copy(self) -> Self:
        """A program with a graph of its own and the same names."""
        graph = fx.Graph()
        result = graph.graph_copy(self.graph, {}, return_output_node=True)
        assert isinstance(result, tuple), "a program's graph ends in an output node"
        end = graph.output(result[0])
        end.meta = dict(result[1].meta)
        return replace(self, graph=graph)

    def add_placeholder(self, name: str, held: Data) -> fx.Node:
        """Insert a placeholder before all others."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            return set_data(self.graph.create_node("placeholder", name, name=name), held)

    def add(self, target: Callable[..., Any], args: tuple[Any, ...], held: Data, name: str, **kwargs: Any) -> fx.Node:
        """Insert a call of an outer operation at the graph's insertion point."""
        return set_data(self.graph.create_node("call_function", target, args, kwargs, name=name), held)


def sent_dtype(op: Communication, param: Param) -> torch.dtype:
    """In which a communication sends what it sends of `param`."""
    return param.reduce_dtype if isinstance(op, Reduce) else param.full_dtype


def _placed(release: fx.Node) -> bool:
    """True if what is released has a place in the arena."""
    gathers = (source for full in release.all_input_nodes for source in full.all_input_nodes)
    return any(isinstance(op := data(gather).op, AllGather) and op.at is not None for gather in gathers)


def after_items(call: fx.Node) -> fx.Node:
    """The last of a call's results; `call` itself when it has one. Nothing may come between a call and its results."""
    while isinstance(data(call.next).op, Item):
        call = call.next
    return call


def reads_of(shards: fx.Node) -> list[fx.Node]:
    """The lines that read a unit's parameters: its gathers, until they have arrived, and the calls of regions."""
    reads = [user for user in shards.users if isinstance(data(user).op, (AllGather, Call))]
    full = [user for gather in reads for user in gather.users if isinstance(data(user).op, WaitGather)]
    return [*reads, *full, *(user for node in full for user in node.users if isinstance(data(user).op, Call))]


@dataclass(frozen=True)
class ResultsView:
    """What a program hands back, read from the argument of its output node.

    `outputs`: what the forward returns. `input_gradients`: for each differentiable input that is no parameter, or None.
    `gradients`: by parameter, until reductions are inserted. `reduced`: waits of reductions, by unit.
    """

    mapping: dict[str, Any]

    @property
    def outputs(self) -> tuple[Any, ...]:
        return tuple(self.mapping["outputs"])

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        return tuple(self.mapping["input_gradients"])

    @property
    def gradients(self) -> dict[str, fx.Node]:
        return dict(self.mapping["gradients"])

    @property
    def reduced(self) -> tuple[fx.Node, ...]:
        return tuple(self.mapping["reduced"])

    def backward_nodes(self) -> Iterator[fx.Node]:
        for value in (*self.input_gradients, *self.gradients.values(), *self.reduced):
            if isinstance(value, fx.Node):
                yield value


def set_results(
    graph: fx.Graph,
    *,
    outputs: Iterable[Any],
    input_gradients: Iterable[Any] = (),
    gradients: Mapping[str, Any] | None = None,
    reduced: Iterable[Any] = (),
) -> fx.Node:
    """End `graph` with these results, in place of the ones it has."""
    for old in graph.find_nodes(op="output"):
        graph.erase_node(old)
    node = graph.output(
        {
            "outputs": list(outputs),
            "input_gradients": list(input_gradients),
            "gradients": dict(gradients or {}),
            "reduced": list(reduced),
        }
    )
    return set_data(node, Data(Results(), Phase.BACKWARD))
