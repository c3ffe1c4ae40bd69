"""The parts of a program: its graph, layout, regions and results, and how they are read and edited."""

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
    """A program without its text, which is printed from this: see `zcompile.ir.program.Program`."""

    graph: fx.Graph
    layout: Layout
    regions: Mapping[str, Region] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Tensors that were attributes of the traced graph, by the name of their placeholder."""
    modules: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    """Trainable parameters that the traced code does not use, so that they have no gradient here."""
    notes: tuple[str, ...] = ()
    """Notes of passes on their choices, shown by `explain()`."""
    phases: tuple[Phase, ...] = (Phase.FORWARD, Phase.BACKWARD)

    # -- reading --------------------------------------------------------------------------------------------------

    def nodes(self, *ops: type[Any], phase: Phase | None = None) -> list[fx.Node]:
        """Return the nodes of the given operations and phase, in program order; all if none is given."""
        return [
            node
            for node in self.graph.nodes
            if (not ops or isinstance(data(node).op, ops)) and (phase is None or data(node).phase is phase)
        ]

    def body(self, phase: Phase) -> list[fx.Node]:
        """Return the nodes that `phase` executes, in order, without placeholders and results."""
        return [n for n in self.nodes(phase=phase) if not isinstance(data(n).op, (Placeholder, Results))]

    def node(self, name: str) -> fx.Node:
        """Return the node called `name`."""
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
        """Return the names of the parameters that have a gradient in this program."""
        return {*self.layout.trainable} - self.unused if self.has_backward else set()

    def saved(self) -> list[fx.Node]:
        """Return the values of the forward, inputs included, that the backward reads, except full parameters."""
        return [
            n for n in self._crossing() if not isinstance(data(n).op, (Parameter, Shards, RuntimeInput, WaitGather))
        ]

    def kept(self) -> list[fx.Node]:
        """Return the full parameters gathered in the forward that the backward reads without gathering them again."""
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
        """Return the forward or the backward alone, for printing and lowering."""
        return replace(self, phases=(phase,))

    @property
    def name(self) -> str:
        """`forward`, `backward`, or `step` for both."""
        return str(self.phases[0]) if len(self.phases) == 1 else "step"

    # -- communication --------------------------------------------------------------------------------------------

    def communications(self) -> list[str]:
        """Return a line per collective, in issue order: what all ranks must agree on, without activation shapes."""
        lines = []
        for phase in self.phases:
            for node in self.nodes(Communication, phase=phase):
                lines.append(f"{phase}: {op_of(node, Communication).message_text(self.layout)}")
        return lines

    def digest(self) -> str:
        """Return the SHA-256 of `communications()`, which must be equal on all ranks before the program runs."""
        return hashlib.sha256("\n".join(self.communications()).encode(errors="backslashreplace")).hexdigest()

    def traffic(self, node: fx.Node) -> Traffic | None:
        """Return what `node` sends; None if it sends nothing."""
        return data(node).op.traffic(node, self.layout)

    def volume(self) -> int:
        """Return the bytes that this rank sends to data-parallel ranks in one run of the program."""
        return sum(self.volumes().values())

    def volumes(self) -> dict[str, int]:
        """Return the bytes of `volume` by the name of the data-parallel axis."""
        payloads = {axis.name: 0 for axis in self.layout.averaged}
        for node in self.nodes(Communication):
            if data(node).phase in self.phases and (traffic := self.traffic(node)):
                payloads[traffic.axis.name] += traffic.payload
        sizes = {axis.name: axis.size for axis in self.layout.averaged}
        return {name: payload * (sizes[name] - 1) // sizes[name] for name, payload in payloads.items()}

    def memory(self, node: fx.Node) -> int:
        """Return the bytes that `node` allocates when it runs (negative for a release)."""
        return data(node).op.memory(node, self.layout)

    # -- editing --------------------------------------------------------------------------------------------------

    def copy(self) -> Self:
        """Return a program with a copy of the graph, in which nodes have the same names."""
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
        """Insert a line of the operation in `meta` at the graph's insertion point."""
        node = self.graph.create_node("call_function", FUNCTIONS[meta.op.function], args, name=name)
        return self.respell(set_data(node, meta), meta.op)

    def respell(self, node: fx.Node, op: Operation, arena: fx.Node | None = None) -> fx.Node:
        """Change the operation of `node` to `op`, in its data and its call; `arena`: the arena, if `op` uses it."""
        keywords = keywords_of(op)
        if "at" in keywords:
            keywords["at"] = (arena, *keywords["at"])
        node.target, node.kwargs = FUNCTIONS[op.function], keywords
        return set_data(node, replace(data(node), op=op))


def after_items(call: fx.Node) -> fx.Node:
    """Return the last item of a call, or `call` itself if it has none; nothing may come between them."""
    while isinstance(data(call.next).op, Item):
        call = call.next
    return call


def reads_of(shards: fx.Node) -> list[fx.Node]:
    """Return the lines that read a unit's parameters: its gathers, their waits, and calls of regions."""
    reads = [user for user in shards.users if isinstance(op := data(user).op, (Gathering, Call)) and op.gives]
    full = [user for gather in reads for user in gather.users if isinstance(data(user).op, WaitGather)]
    return [*reads, *full, *(user for node in full for user in node.users if isinstance(data(user).op, Call))]


@dataclass(frozen=True)
class ResultsView:
    """The results of a program, read from the argument of its output node.

    `outputs`: of the forward. `input_gradients`: a gradient or None for each differentiable input that is no parameter.
    `gradients`: by parameter, until reductions are inserted; in a step of several micro-batches, a list for each.
    `reduced`: the waits for reductions, by unit.
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
        """Return, for a step of several micro-batches, the list of gradients of each parameter."""
        return {name: list(nodes) for name, nodes in self.mapping["gradients"].items()}

    def gradient_nodes(self) -> Iterator[fx.Node]:
        """Yield the gradients of parameters, of all micro-batches if there are several."""
        for value in self.mapping["gradients"].values():
            yield from value if isinstance(value, list) else [value]

    def backward_nodes(self) -> Iterator[fx.Node]:
        """Yield the results of the backward."""
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
    """Replace the output node of `graph` by one with these results."""
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
