"""divide_sequence: let each rank of a group compute a part of the tokens of the same batch.

    h = aten.embedding.default(w, tokens)             mine = ops.zcompile.shard.default(tokens, 1, 2, 'sp')
    y = aten.bmm.default(h, k)                        h = aten.embedding.default(w, mine)
    loss = aten.sum.default(y)                ->      y = aten.bmm.default(h, k)
    dw = aten.mm.default(h_t, dy)                     part = aten.sum.default(y)
                                                      loss = ops.zcompile.all_reduce.default(part, 2, 'sp')
                                                      dw_part = aten.mm.default(h_t, dy)
                                                      dw = aten.mul.Tensor(dw_part, 2)

Each value is whole, or each rank has a part of it along a dimension, or they add up to it. What operations make of
parts is read from the table of axes (`zcompile.ir.row_axes`); where one wants its values otherwise, they change hands:
attention wants all tokens of some heads, and gives them back (DeepSpeed-Ulysses, Jacobs et al., 2023), or ranks hand
keys and values on in a ring (see `zcompile.torch_internals.ring_attention`). What is computed
from inputs alone, such as masks and positions, is computed as a whole. Gradients of parameters are sums over ranks,
which are data-parallel ranks as well, and average them: so each is multiplied by the number of ranks before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import fx

import zcompile.torch_internals.group_operators  # noqa: F401  # registers the operators
from zcompile.cost.hardware import Hardware, guess_for
from zcompile.cost.roofline import collective_seconds, ring_bytes
from zcompile.errors import OptionError
from zcompile.ir.axis import Axis
from zcompile.ir.operation import Data, Phase, data, line_of, op_of, set_data
from zcompile.ir.ops import Compute, Input, Item, Kind, Parameter
from zcompile.ir.placement import PARTIAL, WHOLE, Divided, Placement
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.row_axes import (
    MixedRowsError,
    attended,
    gives_several,
    is_additive,
    is_attention,
    is_same_in_parts,
    operators,
    resized,
    shape_of,
    tensors_of,
)
from zcompile.ir.rows import Placements, dimension, fake_value
from zcompile.ir.side_effects import is_collective, is_random, is_ring
from zcompile.ir.tensor_type import TensorType, human_bytes
from zcompile.passes.common.row_runs import check_sizes
from zcompile.torch_internals.operators import HigherOrderOperator, OpOverload
from zcompile.torch_internals.ring_attention import OF_TOKENS, RINGS, arguments_of

aten = torch.ops.aten
_OWN = torch.ops.zcompile
_TOKENS = Divided(1)
"""Where inputs have their tokens: (batch, tokens, ...)."""
_HEADS, _BEHIND_HEADS = Divided(1), Divided(2)
"""Where attention has heads and tokens: (batch, heads, tokens, width)."""
_NAMES = {"shard": "part", "all_gather": "whole", "all_to_all": "exchanged", "all_reduce": "sum"}
"""How the results of operators that divide are named, behind their argument's name."""
_RINGS = 'choose sequence="ring", which divides no heads, or take fewer ranks'
_SAME = operators("detach alias")
"""What has no effect within a graph."""


def divide_sequence(program: Program, how: str = "ulysses", hardware: Hardware | None = None) -> Program:
    """Return a program that computes a part of the tokens, for the ranks of the sequence axis, which have one batch.

    Its losses are sums over tokens, and no means, as `loss_decompositions` makes them.

    Args:
        program: The traced step.
        how: "ulysses" for attention to all tokens by heads, "ring" for keys and values that go round, or "auto" for
            what takes less time by the cost model.
        hardware: What that time is for; by default a guess for the device.

    Raises:
        OptionError: no input has (batch, tokens) that can be divided, heads cannot be, or random numbers are drawn.
    """
    axis = program.layout.sequence
    if axis is None:
        fix = 'give a mesh with a dimension "sp": init_device_mesh(kind, (data, ranks), mesh_dim_names=("dp", "sp"))'
        raise OptionError("sequence", "divides tokens over ranks, but the mesh has no axis for them", fix)
    if axis.size == 1:
        return program
    check_sizes(program, "sequence")
    divided, errors = list[Program](), list[OptionError]()
    for zigzag in [False, True] if how == "auto" else [how == "ring"]:
        try:
            divided.append(_divided(program, axis, zigzag=zigzag))
        except OptionError as error:
            errors.append(error)
    if not divided:
        raise errors[-1]
    return min(divided, key=lambda found: _seconds_sent(found, hardware))


def _divided(program: Program, axis: Axis, *, zigzag: bool) -> Program:
    """Return a program in which tokens are divided: those of inputs, or if that divides nothing, those of attention."""
    for of_inputs in (True, False):
        division = _Division(program, axis.size, axis.name, zigzag=zigzag, of_inputs=of_inputs)
        for node in program.graph.nodes:
            division.add(node)
        if any(isinstance(place, Divided) for place in division.place.values()):
            return division.finished()
    problem = f"no input is (batch, tokens), of tokens that {axis.size} ranks can divide"
    raise OptionError("sequence", problem, f"give batches so, whose length is a multiple of {division.chunks}")


def _seconds_sent(program: Program, hardware: Hardware | None) -> float:
    """Return the seconds in which values change hands, and nothing is computed."""
    sent = [node for node in program.graph.nodes if is_collective(node)]
    assumed = hardware or guess_for(sent[0].all_input_nodes[0].meta["val"].device.type)
    return sum(collective_seconds(node, assumed, program.layout) for node in sent)


class _Division:
    """A program that is being divided."""

    def __init__(self, program: Program, size: int, group: str, *, zigzag: bool, of_inputs: bool) -> None:
        self.program, self.size, self.group = program, size, group
        self.order = {"zigzag": True} if zigzag else {}
        self.chunks = 2 * size if zigzag else size
        """Of how many equal chunks of the tokens ranks have some."""
        self.graph = fx.Graph()
        self.place: dict[fx.Node, Placement] = {}
        """How each value is divided where nothing else is wanted."""
        self.ways: dict[fx.Node, dict[Placement, fx.Node]] = {}
        """The values in the new graph, by how they are divided."""
        self.several: dict[fx.Node, tuple[Placement, ...]] = {}
        self.tokens: dict[fx.Node, Divided] = {}
        """Where values that are whole have their tokens, if they have."""
        self.rows: dict[fx.Node, int] = {}
        """How many tokens there are, of values that may have other dimensions in the same place."""
        self.returned: set[Any] = {*program.results.outputs, *program.results.input_gradients}
        self.trained: set[fx.Node] = set()
        """Parameters, and what is computed from them."""
        self.of_inputs = of_inputs
        if not of_inputs:
            self._label_attended()

    # -- values

    def _label_attended(self) -> None:
        """Note where the first value has tokens that attention sees, such as patches of images."""
        waiting = [one for node in self.program.graph.nodes if is_attention(node) for one in attended(node)[:1]][:1]
        placed = Placements(shape_of(waiting[0])[2] if waiting else 1)
        for query in waiting:
            placed.put(query, _BEHIND_HEADS, query)
        while waiting:
            value = waiting.pop()
            parent = value.all_input_nodes[0] if isinstance(data(value).op, Item) else value
            try:
                placed.follow(value)
                found = [one for one in tensors_of(parent) if isinstance(placed.of.get(one), Divided)]
            except MixedRowsError:
                found = []
            if not found and isinstance(place := placed.of.get(value), Divided):
                self.tokens[value] = place
            waiting += [one for one in found if one.op == "call_function"]

    def add(self, node: fx.Node) -> None:
        """Add a value of the program."""
        if node.op == "output":
            return
        if isinstance(data(node).op, Parameter) or not self.trained.isdisjoint(node.all_input_nodes):
            self.trained.add(node)
        if node.op != "call_function":
            self._give(node, self.graph.node_copy(node), WHOLE)
            op = data(node).op
            is_argument = isinstance(op, Input) and op.kind is Kind.DATA and op.held in ("", "?")
            if self.of_inputs and is_argument and len(shape_of(node)) > 1 and shape_of(node)[1] % self.chunks == 0:
                self.tokens[node] = _TOKENS
        elif isinstance(data(node).op, Item):
            self._item(node)
        elif node.target in _SAME:
            (source,) = node.all_input_nodes
            self.place[node], self.ways[node] = self.place[source], self.ways[source]
            self.tokens |= {node: self.tokens[source]} if source in self.tokens else {}
            self.rows |= {node: self.rows[source]} if source in self.rows else {}
            self._returned(node)
        elif not isinstance(node.target, HigherOrderOperator):
            self._operation(node)
        elif any(self.place[source] is not WHOLE for source in node.all_input_nodes):  # such as flex attention
            self._refuse(node, "has graphs of its own, for all tokens", "use scaled_dot_product_attention, with a mask")
        else:
            self._give(node, self.graph.node_copy(node, self._any), WHOLE)

    def _item(self, node: fx.Node) -> None:
        parent, index = node.all_input_nodes[0], op_of(node, Item).index
        (made,) = self.ways[parent].values()
        copied = self._copy(node, (made, index), node.kwargs)
        placement = self.several[parent][index] if parent in self.several else WHOLE
        self._give(node, copied, placement)
        self.rows |= {node: self.rows[parent]} if parent in self.rows else {}
        if is_attention(parent) and placement == _HEADS and len(shape_of(node)) == 4:
            self.place[node] = _BEHIND_HEADS

    def _operation(self, node: fx.Node) -> None:
        if is_random(node):
            self._refuse(node, "draws random numbers, which would be others on each rank", "turn dropout off")
        sources = tensors_of(node)
        given = {source: p for source in sources if isinstance(p := self.place[source], Divided)}
        partial = [source for source in sources if self.place[source] is PARTIAL]
        if node in self.trained and not given:  # the first that reads parameters and tokens
            given = {source: self.tokens[source] for source in sources if source in self.tokens}
        if partial and len(partial) == len(sources) and is_additive(node):
            self._made(node, dict.fromkeys(sources, PARTIAL), [PARTIAL])
        elif is_attention(node) and given:
            (self._ring if self.order else self._attention)(node, sources)
        else:
            self._made(node, *self._cheapest(node, sources, given))

    def _cheapest(
        self, node: fx.Node, sources: Sequence[fx.Node], given: Mapping[fx.Node, Divided]
    ) -> tuple[dict[fx.Node, Placement], Sequence[Placement]]:
        """Return how an operation takes its values, and gives its results: so that as little as possible is sent."""
        found = list[tuple[int, int, dict[fx.Node, Placement], Sequence[Placement]]]()
        for source, placement in given.items():
            if (placed := self._followed(node, source, placement)) is None:
                continue
            wanted = {other: placed.of.get(other, WHOLE) for other in sources}
            if results := placed.results(node):
                found.append((sum(self._sent(*one) for one in wanted.items()), len(found), wanted, results))
        if not found:
            self._label(node, sources)
            return dict.fromkeys(sources, WHOLE), []
        _, _, wanted, gives = min(found, key=lambda one: one[:2])
        return wanted, gives

    def _label(self, node: fx.Node, sources: Iterable[fx.Node]) -> None:
        """Note where a value that is computed as a whole has its tokens."""
        for source in sources:
            placed = self._followed(node, source, self.tokens[source]) if source in self.tokens else None
            if placed is not None and isinstance(found := placed.of.get(node), Divided):
                self.tokens[node] = found
                return

    def _followed(self, node: fx.Node, source: fx.Node, placement: Divided) -> Placements | None:
        """Return where an operation has its rows if `source` has tokens there; None if it mixes tokens."""
        rows = self.rows.get(source, shape_of(source)[placement.dim] // placement.outer)
        placed = Placements(rows)
        try:
            placed.put(source, placement, node)
            placed.follow(node)
        except MixedRowsError:
            return None
        self.rows[node] = rows
        return placed if rows % self.chunks == 0 else None

    def _attention(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        wanted: dict[fx.Node, Placement] = {}
        for source in sources:
            shape, has_all = shape_of(source), source in attended(node)
            has_heads = has_all or (len(shape) > 2 and shape[1] > 1)
            if has_heads and shape[1] % self.size:
                self._refuse(node, f"has {shape[1]} heads, which {self.size} ranks do not divide", _RINGS)
            wanted[source] = _HEADS if has_heads else WHOLE
        values = node.meta["val"] if gives_several(node) else [node.meta["val"]]
        gives = [_HEADS if isinstance(v, torch.Tensor) and v.dim() > 2 else WHOLE for v in values]
        self._made(node, wanted, gives)

    def _ring(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        kernel = node.target
        if not isinstance(kernel, OpOverload) or (ring := RINGS.get(kernel)) is None:
            self._refuse(node, "gives no logarithms of sums", 'choose sequence="ulysses"')
        given = arguments_of(kernel, node.args, node.kwargs)
        of_tokens = [value for name, value in given.items() if name in OF_TOKENS]
        for source in of_tokens:
            if (tokens := shape_of(source)[2]) % self.chunks and source in attended(node):
                problem = f"has {tokens} tokens, which {self.size} ranks do not divide in a ring"
                self._refuse(node, problem, f"give a multiple of {self.chunks} tokens")
        if given["is_causal"] and shape_of(given["query"])[2] != shape_of(given["key"])[2]:
            self._refuse(node, "is causal, with fewer queries than keys", "give a mask")
        if given.get("grad_input_mask", [False])[-1]:
            self._refuse(node, "computes the gradient of a mask", 'choose sequence="ulysses"')
        gives = [_BEHIND_HEADS if isinstance(v, torch.Tensor) and v.dim() > 2 else WHOLE for v in node.meta["val"]]
        wanted: dict[fx.Node, Placement] = {one: _BEHIND_HEADS if one in of_tokens else WHOLE for one in sources}
        self._made(node, wanted, gives, ring)

    def _made(
        self,
        node: fx.Node,
        wanted: Mapping[fx.Node, Placement],
        gives: Sequence[Placement],
        ring: OpOverload | None = None,
    ) -> None:
        """Append an operation that takes its values as `wanted`, or that for a ring in its place."""
        several = gives_several(node)
        first = gives[0] if gives and not several else WHOLE
        inside = {source: self._as(source, placement, node) for source, placement in wanted.items()}
        others = {source: self._any(source) for source in node.all_input_nodes if source not in inside}
        try:
            args = resized(node, dimension(gives), self.size, 1)
        except MixedRowsError as error:
            self._refuse(node, str(error), "leave it out")
        kwargs = node.kwargs if ring is None else {**node.kwargs, "size": self.size, "group": self.group}
        args, kwargs = fx.map_arg((args, kwargs), lambda source: inside.get(source) or others[source])
        copied = self._copy(node, args, kwargs, ring or node.target)
        if several:
            self.several |= {node: tuple(gives)} if gives else {}
            self.ways[node] = {WHOLE: copied}
            self.place[node] = WHOLE
        else:
            self._give(node, copied, first)

    def _give(self, node: fx.Node, made: fx.Node, placement: Placement) -> None:
        self.place[node], self.ways[node] = placement, {placement: made}
        self._returned(node)

    def _returned(self, node: fx.Node) -> None:
        """Let a value be whole if it is returned."""
        if node in self.returned:
            self._as(node, WHOLE, node)

    def _copy(self, node: fx.Node, args: Any, kwargs: Any, target: Any = None) -> fx.Node:
        made = self.graph.create_node(node.op, target or node.target, tuple(args), dict(kwargs), name=node.name)
        made.meta = dict(node.meta)
        return self._typed(made, data(node))

    def _typed(self, made: fx.Node, like: Data) -> fx.Node:
        made.meta["val"] = value = fake_value(made)
        return set_data(made, replace(like, type=TensorType.of(value)))

    def _any(self, node: fx.Node) -> fx.Node:
        """Return a value of which no numbers are read."""
        return next(iter(self.ways[node].values()))

    # -- how values change hands

    def _sent(self, node: fx.Node, wanted: Placement) -> int:
        """Return about how many bytes of a value are sent before each rank has it as `wanted`."""
        if wanted in self.ways[node] or self.place[node] is WHOLE:
            return 0
        nbytes: int = node.meta["val"].numel() * node.meta["val"].element_size()
        if self.place[node] is PARTIAL:
            return 2 * nbytes
        return nbytes if wanted is WHOLE else nbytes // self.size

    def _as(self, node: fx.Node, wanted: Placement, user: fx.Node) -> fx.Node:
        """Return a value divided as `wanted`, for a reader."""
        ways = self.ways[node]
        if wanted in ways:
            return ways[wanted]
        have, value = next(iter(ways.items()))
        if have is WHOLE and is_same_in_parts(node) and isinstance(wanted, Divided) and not is_attention(user):
            made = self._copy(node, resized(node, wanted.dim, self.size, 1), node.kwargs)
        elif have is WHOLE and isinstance(wanted, Divided):
            made = self._call(_OWN.shard, user, value, wanted.dim, wanted.outer, self.size, _order(node), **self.order)
        elif have is PARTIAL and wanted is WHOLE:
            made = self._call(_OWN.all_reduce, user, value, self.size)
        elif isinstance(have, Divided) and wanted is WHOLE:
            made = self._call(_OWN.all_gather, user, value, have.dim, have.outer, self.size, _order(node), **self.order)
        elif (
            isinstance(have, Divided)
            and isinstance(wanted, Divided)
            and have.outer == wanted.outer == 1
            and not self.order
        ):
            made = self._call(_OWN.all_to_all, user, value, have.dim, wanted.dim, self.size, _order(node))
        else:
            self._as(node, WHOLE, user)
            ways[have] = ways.pop(have)  # what is whole comes first now
            return self._as(node, wanted, user)
        ways[wanted] = made
        return made

    def _call(self, packet: Any, user: fx.Node, value: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        name = f"{value.name}_{_NAMES[packet.__name__]}"
        made = self.graph.create_node("call_function", packet.default, (value, *args, self.group), kwargs, name=name)
        phase = data(user).phase
        made.meta = {"partitioner_tag": f"is_{phase}"}
        return self._typed(made, Data(Compute(), phase, source=data(user).source))

    # -- the end

    def finished(self) -> Program:
        """Return the program, whose results are whole."""
        results = self.program.results

        def whole(value: Any) -> Any:
            return self.ways[value][WHOLE] if isinstance(value, fx.Node) else value

        outputs = [*map(whole, results.outputs)]
        gradients = {name: self._gradient(value) for name, value in results.gradients.items()}
        set_results(
            self.graph,
            outputs=outputs,
            input_gradients=[*map(whole, results.input_gradients)],
            gradients=gradients,
        )
        made = [node for node in self.graph.nodes if is_collective(node) and node.target is not _OWN.shard.default]
        nbytes = sum(ring_bytes(node, self.size) if is_ring(node) else data(node).nbytes for node in made)
        how = "in a ring" if self.order else "by heads"
        note = f"divide_sequence: tokens over {self.size} ranks {how}, {len(made)} exchanges of {human_bytes(nbytes)}"
        return replace(self.program, graph=self.graph, notes=(*self.program.notes, note))

    def _gradient(self, value: fx.Node) -> fx.Node:
        """Return a gradient of which the mean over all ranks is that over batches."""
        if self.place[value] is not PARTIAL:
            return self._as(value, WHOLE, value)
        share = self.ways[value][PARTIAL]
        with self.graph.inserting_after(share):  # its reduction need not wait for the rest of the backward
            made = self.graph.call_function(aten.mul.Tensor, (share, self.size), name=f"{value.name}_scaled")
        made.meta = {"partitioner_tag": f"is_{Phase.BACKWARD}"}
        return self._typed(made, replace(data(value), op=Compute(), view=False))

    def _refuse(self, node: fx.Node, problem: str, fix: str) -> NoReturn:
        source, line = data(node).source, line_of(node)
        where = " ".join([node.name, *([f"in {source}"] if source else []), *([f"({line})"] if line else [])])
        raise OptionError("sequence", f"cannot divide {where}: it {problem}", fix)


def _order(node: fx.Node) -> list[int]:
    """Return the dimensions of a value as they lie in memory, the outermost first."""
    strides = node.meta["val"].stride()  # 0 of what is expanded: kernels of attention want the last one innermost
    return sorted(range(len(strides)), key=lambda dim: -strides[dim] or -math.inf)
