"""What a program is made of: its graph and layout, its regions and results, how they are read and edited."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import fx

from zcompile.ir.layout import Layout
from zcompile.ir.operation import Data, Operation, Phase, Traffic, data, keywords_of, op_of, set_data
from zcompile.ir.ops import (
    FUNCTIONS,
    Call,
    Communication,
    Gathering,
    Input,
    Item,
    Kind,
    Parameter,
    Placeholder,
    Results,
    RuntimeInput,
    Shards,
    Update,
    WaitGather,
)
from zcompile.ir.region import Region


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
        return [n for n in self.nodes(phase=phase) if not isinstance(data(n).op, (Placeholder, Results))]

    def node(self, name: str) -> fx.Node:
        """The node called `name`."""
        result: dict[str, fx.Node] = {node.name: node for node in self.graph.nodes}
        return result[name]

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

    @property
    def is_captured(self) -> bool:
        """True if regions are captured as CUDA graphs."""
        return any(region.fixed is not None for region in self.regions.values())

    def differentiated(self) -> set[str]:
        """Parameters with a gradient in this program."""
        return {*self.layout.trainable} - self.unused if self.has_backward else set()

    def saved(self) -> list[fx.Node]:
        """Values of the forward (inputs too) that the backward uses, in program order: full parameters left out."""
        return [
            n for n in self._crossing() if not isinstance(data(n).op, (Parameter, Shards, RuntimeInput, WaitGather))
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
            for node in self.nodes(Communication, phase=phase):
                lines.append(f"{phase}: {op_of(node, Communication).message_text(self.layout)}")
        return lines

    def digest(self) -> str:
        """SHA-256 of the communications: equal on all ranks, or the program must not run."""
        return hashlib.sha256("\n".join(self.communications()).encode(errors="backslashreplace")).hexdigest()

    def traffic(self, node: fx.Node) -> Traffic | None:
        """What `node` sends; None for what sends nothing."""
        return data(node).op.traffic(node, self.layout)

    def volume(self) -> int:
        """Bytes that this rank sends to others that train on other data in one run of the program."""
        return sum(self.volumes().values())

    def volumes(self) -> dict[str, int]:
        """`volume` by the names of the axes over which gradients are averaged."""
        payloads = {axis.name: 0 for axis in self.layout.averaged}
        for node in self.nodes(Communication):
            if data(node).phase in self.phases and (traffic := self.traffic(node)):
                payloads[traffic.axis.name] += traffic.payload
        sizes = {axis.name: axis.size for axis in self.layout.averaged}
        return {name: payload * (sizes[name] - 1) // sizes[name] for name, payload in payloads.items()}

    def memory(self, node: fx.Node) -> int:
        """Bytes gained when `node` runs (negative for a release)."""
        return data(node).op.memory(node, self.layout)

    # -- editing --------------------------------------------------------------------------------------------------

    def copy(self) -> Self:
        """A program with a graph of its own and the same names."""
        graph = fx.Graph()
        result = graph.graph_copy(self.graph, {}, return_output_node=True)
        assert isinstance(result, tuple), "a program's graph ends in an output node"
        end = graph.output(result[0])
        end.meta = dict(result[1].meta)
        return replace(self, graph=graph)

    def add_placeholder(self, name: str, meta: Data) -> fx.Node:
        """Insert a placeholder before all others."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            return set_data(self.graph.create_node("placeholder", name, name=name), meta)

    def add(self, args: tuple[Any, ...], meta: Data, name: str) -> fx.Node:
        """Insert a line of the operation of `meta` at the graph's insertion point."""
        node = self.graph.create_node("call_function", FUNCTIONS[meta.op.function], args, name=name)
        return self.respell(set_data(node, meta), meta.op)

    def respell(self, node: fx.Node, op: Operation, arena: fx.Node | None = None) -> fx.Node:
        """Let `node` be of `op`, in its data and in its text; `arena`: where its bytes are, if it has any there."""
        keywords = keywords_of(op)
        if "at" in keywords:
            keywords["at"] = (arena, *keywords["at"])
        node.target, node.kwargs = FUNCTIONS[op.function], keywords
        return set_data(node, replace(data(node), op=op))


def after_items(call: fx.Node) -> fx.Node:
    """The last of a call's results; `call` itself when it has one. Nothing may come between a call and its results."""
    while isinstance(data(call.next).op, Item):
        call = call.next
    return call


def reads_of(shards: fx.Node) -> list[fx.Node]:
    """The lines that read a unit's parameters: its gathers, until they have arrived, and the calls of regions."""
    reads = [user for user in shards.users if isinstance(op := data(user).op, (Gathering, Call)) and op.gives]
    full = [user for gather in reads for user in gather.users if isinstance(data(user).op, WaitGather)]
    return [*reads, *full, *(user for node in full for user in node.users if isinstance(data(user).op, Call))]


@dataclass(frozen=True)
class ResultsView:
    """What a program hands back, read from the argument of its output node.

    `outputs`: what the forward returns. `input_gradients`: for each differentiable input that is no parameter, or None.
    `gradients`: by parameter, until reductions are inserted; of a step of several micro-batches a list for each.
    `reduced`: waits of reductions, by unit.
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

    def gradient_lists(self) -> dict[str, list[fx.Node]]:
        """Of a step of several micro-batches: for each parameter the gradients of each of them."""
        return {name: list(nodes) for name, nodes in self.mapping["gradients"].items()}

    def gradient_nodes(self) -> Iterator[fx.Node]:
        """The gradients of parameters; of a step of several micro-batches, those of each."""
        for value in self.mapping["gradients"].values():
            yield from value if isinstance(value, list) else [value]

    def backward_nodes(self) -> Iterator[fx.Node]:
        """What the backward hands back."""
        for value in (*self.input_gradients, *self.gradient_nodes(), *self.reduced):
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
