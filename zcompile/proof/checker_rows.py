"""Loops over rows, as the checker reads them: a region that runs for some rows at a time computes that of all rows.

Its operations have to treat rows alike, f(concat(a, b)) = concat(f(a), f(b)), or to add up over them, f(concat(a, b)) =
f(a) + f(b). So each line has the term of the same operation on all rows, whose shape is that in the traced step. Lines
that are linear in a factor, for which the loop has 1, are read where a result is multiplied by the factor.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from zcompile.proof.checker_texts import Place, Text, dotted, loop_of, refusal
from zcompile.proof.checker_values import TermValue

Rows = tuple[int, int]
"""The dimension that has rows, and the number of groups of all rows in it."""
At = Rows | str | None
"""Where a value has its rows; SUM if it is a sum over those of a turn, None if it is the same in all turns."""
SUM = "sum"
ANY = 0
"""The number of groups in a dimension along which a value is the same."""
NUMBERS = -1
"""The same of the numbers of rows, which are counted from the first of a turn's."""
Axis = tuple[Mapping[int, int], Sequence[int | str]]
"""A dimension by number of tensor among arguments, and where the results have it: a dimension, or SUM."""


class Called(NamedTuple):
    """A call: the names of its tensors, their shapes for all rows and dtypes, and the other arguments."""

    tensors: list[str]
    shapes: list[tuple[int, ...]]
    kinds: list[str]
    args: list[Any]
    named: dict[str, Any]

    def get(self, name: str, at: int, default: Any = None) -> Any:
        return self.named.get(name, self.args[at] if at < len(self.args) else default)


Axes = Callable[[Called], Iterator[Axis]]


def _pointwise(line: Called) -> Iterator[Axis]:
    rank = max(map(len, line.shapes))
    for right in range(1, rank + 1):
        sizes = {i: shape[-right] for i, shape in enumerate(line.shapes) if len(shape) >= right}
        has = [i for i, size in sizes.items() if size == max(sizes.values())]
        yield {i: len(line.shapes[i]) - right for i in has}, [rank - right]


def _lettered(equation: str) -> Axes:
    *operands, result = equation.replace("->", ",").split(",")

    def axes(_: Called) -> Iterator[Axis]:
        for letter in {*"".join(operands)}:
            has = {i: own.index(letter) for i, own in enumerate(operands) if letter in own}
            yield has, [result.index(letter) if letter in result else SUM]

    return axes


def _addmm(line: Called) -> Iterator[Axis]:
    bias, (rows, _), (_, columns) = line.shapes
    yield {1: 0} | ({0: 0} if bias[-2:-1] == (rows,) else {}), [0]
    yield {2: 1} | ({0: len(bias) - 1} if bias[-1:] == (columns,) else {}), [1]


def _reduced(line: Called, *, adds: bool = False) -> Iterator[Axis]:
    rank, dims = len(line.shapes[0]), line.get("dim", 1)
    over = {dim % rank for dim in (range(rank) if dims in (None, []) else [dims] if type(dims) is int else dims)}
    for dim in range(rank):
        if dim not in over:
            yield {0: dim}, [dim if line.get("keepdim", 2, default=False) else dim - sum(o < dim for o in over)]
        elif adds:
            yield {0: dim}, [SUM]


def _spread(line: Called) -> Iterator[Axis]:
    """As overloads named "correction" take them: others have something else where `keepdim` is elsewhere."""
    if len(line.args) <= 2:
        yield from _reduced(line)


def _along(line: Called, place: int = 1) -> Iterator[Axis]:
    shape, every = line.shapes[0], range(len(line.shapes))
    for dim in range(len(shape)):
        if dim != line.get("dim", place) % len(shape) and all(s[dim] == shape[dim] for s in line.shapes):
            yield dict.fromkeys(every, dim), [dim]


def _rows_of(*tensors: int, results: Sequence[int | str] = (), over: int = 1) -> Axes:
    """The dimensions before those that a normalization is over: the results have them too, or are sums."""

    def axes(line: Called) -> Iterator[Axis]:
        for dim in range(len(line.shapes[tensors[0]]) - len(line.args[over])):
            yield dict.fromkeys(tensors, dim), [dim, *(results or [dim, dim])]

    return axes


def _embedding_backward(line: Called) -> Iterator[Axis]:
    for dim in range(len(line.shapes[1]) if line.get("scale_grad_by_freq", 4) is False else 0):
        yield {0: dim, 1: dim}, [SUM]


def _loss_backward(line: Called) -> Iterator[Axis]:
    if len(line.shapes[1]) == 2 and line.args[4] in (0, 2):
        yield {1: 0, 2: 0} | ({0: 0} if line.args[4] == 0 else {}), [0]


def _permuted(line: Called) -> Iterator[Axis]:
    order = [*range(rank := len(line.shapes[0]))]
    given = line.args[1:] or [order[::-1]]
    if len(given) == 2:
        one, other = given
        order[one], order[other] = order[other], order[one]
    for now, dim in enumerate([] if line.named else order if len(given) == 2 else given[0]):
        yield {0: dim % rank}, [now]


def _cut(line: Called, place: int = 1, *, grows: int = 0) -> Iterator[Axis]:
    """Parts along a dimension, or parts joined along it; `grows`: by how many dimensions the result has more."""
    rank, whole = len(line.shapes[0]) + max(grows, 0), line.args[place + 1 :] in _ALL and not line.named
    cut = line.get("dim", place, 0) % rank
    for dim in range(rank):
        if dim != cut or whole:
            taken, given = dim - (grows > 0 and cut < dim), dim - (grows < 0 and cut < dim)
            yield dict.fromkeys(range(len(line.shapes)), taken), [given]


def _put(line: Called) -> Iterator[Axis]:
    """A number in place of those at a mask, of all dimensions or the first ones."""
    if len(line.shapes) == 3 and line.shapes[2] == () and line.kinds[1] == "b8":
        inside = len(line.shapes[1])
        yield from ((dict.fromkeys([0, 1] if dim < inside else [0], dim), [dim]) for dim in range(len(line.shapes[0])))


def _padded(line: Called) -> Iterator[Axis]:
    rank, pads = len(line.shapes[0]), line.args[1]
    yield from (({0: dim}, [dim]) for dim in range(rank) if not any(pads[2 * (rank - 1 - dim) :][:2]))


_ALL = [[start, end, *step] for start in (0, None) for end in (2**63 - 1, None) for step in ([], [1])]
"""Start, end and step of a slice that is all of a dimension."""
_POINTWISE = (
    "abs acos acosh add alias asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp"
    " clamp_max clamp_min clone copysign cos cosh detach div elu elu_backward eq erf erfc erfinv exp exp2 expm1 floor"
    " fmod frac full_like ge gelu gelu_backward gt hardsigmoid hardsigmoid_backward hardswish hardswish_backward"
    " hardtanh hardtanh_backward isinf isnan le leaky_relu leaky_relu_backward lerp lift_fresh_copy log log10 log1p"
    " log2 logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish"
    " mish_backward mul nan_to_num ne neg ones_like pow reciprocal relu remainder round rsqrt rsub sgn sigmoid"
    " sigmoid_backward sign silu silu_backward sin sinc sinh softplus softplus_backward sqrt sub tan tanh tanh_backward"
    " threshold threshold_backward trunc where xlogy zeros_like _to_copy all_reduce wait_tensor"
)
_REDUCTIONS = "amax amin mean logsumexp any all prod argmax argmin max min"
_AXES: dict[str, Axes] = {
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduced),
    **dict.fromkeys(("var", "std", "var_mean"), _spread),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "gather", "scatter", "scatter_add"), _along),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), lambda line: _along(line, 2)),
    "mm": _lettered("ik,kj->ij"),
    "bmm": _lettered("bik,bkj->bij"),
    "mv": _lettered("ik,k->i"),
    "dot": _lettered("k,k->"),
    "addmm": _addmm,
    "sum": lambda line: _reduced(line, adds=True),
    "embedding": lambda line: (({1: dim}, [dim]) for dim in range(len(line.shapes[1]))),
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_backward": _loss_backward,
    "native_layer_norm": _rows_of(0),
    "_fused_rms_norm": _rows_of(0),
    "native_layer_norm_backward": _rows_of(0, 1, 2, 3, results=[SUM, SUM], over=2),
    "_fused_rms_norm_backward": _rows_of(0, 1, 2, results=[SUM], over=2),
    **dict.fromkeys(("t", "transpose", "permute"), _permuted),
    **dict.fromkeys(("select", "unbind"), lambda line: _cut(line, grows=-1)),
    "slice": _cut,
    **dict.fromkeys(("split", "split_with_sizes", "slice_backward"), lambda line: _cut(line, 2)),
    "cat": _cut,
    "constant_pad_nd": _padded,
    "index_put": _put,
    "select_backward": lambda line: _cut(line, 2, grows=1),
}
"""The axes of operations of ATen by name, whatever the overload."""
_VIEWS = ["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"]
_MADE = {"arange": 0, "expand": 1, "full": 0, "zeros": 0, "ones": 0, "new_full": 1, "new_zeros": 1, "new_ones": 1}
_PARTED = "split along rows"
_SHAPES = _MADE | dict.fromkeys(["slice_backward", "select_backward", "view", "_unsafe_view", "reshape", _PARTED], 1)
"""Where the shape of the result stands among the arguments."""


class Loop:
    """A region that runs for some rows at a time.

    Args:
        evaluation: That of the program; `scope` is what the region takes, by name, for all rows.
        text: The region's.
        name: Its name.
        scope: What it takes.
        above: The line that calls it.
    """

    def __init__(self, evaluation: Any, text: Text, name: str, scope: dict[str, Any], above: Place) -> None:
        self.of, self.text, self.above, self.scope = evaluation, text, above, scope
        said = loop_of(text.functions[name]) or {}
        self.rows, self.size, self.factor = said["rows"], said["size"], said.get("factor", "")
        self.gives = [_at(given) for given in said["gives"]]
        taken = [_at(given) for given in said["takes"]]
        self.at: dict[str, Any] = dict(zip(scope, taken, strict=True))
        *self.lines, end = text.functions[name].body[1:]
        self.results = [dotted(node) for node in end.value.elts]  # type: ignore[attr-defined]
        self.end = end.lineno
        for value, at in self.at.items():
            if at is not None and self._shape(value)[at[0]] % (at[1] * self.rows):
                self._refuse(f"takes {value} in {self.rows} rows, which it does not have")
        if len(self.gives) != len(self.results):
            self._refuse(f"gives {len(self.results)} values, and says of {len(self.gives)} where their rows are")
        self.scaled = self._linear() if self.factor else set[str]()

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value for all rows."""
        shape: tuple[int, ...] | None = self.of.terms.shapes.get(self.scope[name].term)
        if shape is None:
            self._refuse(f"computes with {name}, which the traced step does not have")
        return shape

    def _refuse(self, problem: str) -> NoReturn:
        raise refusal(self.of.terms.here, problem)

    def values(self) -> list[TermValue]:
        """Return the results for all rows; those with the factor stand for what they are once they are multiplied."""
        for line in self.lines:
            if not self._is_scaled(line):
                self._line(line)
        # What is read for a result with the factor is read now, whatever becomes of its memory until it is multiplied.
        self.scope = {name: self.of._made(self.of._alive(value).term) for name, value in self.scope.items()}
        makes, number = self.of.terms.make, len(self.of.terms.scaled)
        found = []
        for index, name in enumerate(self.results):
            if name not in self.scaled:
                found.append(self._result(index))
                continue
            term = makes(f"result {index} of loop {number}, but for the factor")
            self.of.terms.scaled[term] = self, index
            found.append(self.of._made(term))
        return found

    def multiplied(self, index: int, factor: TermValue) -> TermValue:
        """Return a result times the factor."""
        place, scope, at = self.of.terms.here, dict(self.scope), dict(self.at)
        if self.of.terms.shapes.get(factor.term) != ():
            self._refuse("multiplies the result of a loop that still lacks a factor by something that is not a number")
        self.scope[self.factor], self.at[self.factor] = factor, None
        for line in self.lines:
            if self._is_scaled(line) and dotted(line.targets[0]) != self.factor:  # type: ignore[attr-defined]
                self._line(line)
        result = self._result(index)
        self.of.terms.here, self.scope, self.at = place, scope, at
        return result

    def _result(self, index: int) -> TermValue:
        name = self.results[index]
        self.of.terms.here = (*self.above, (self.text, self.end))
        at, gives = self.at[name], self.gives[index]
        made = type(at) is tuple and at[1] == ANY and type(gives) is tuple and gives[0] == at[0]
        if gives is None or (at != gives and not made):
            self._refuse(f"says of {name} that its rows are at {gives}; they are at {at}")
        found: TermValue = self.of._made(self.scope[name].term)
        return found

    def _line(self, line: ast.stmt) -> None:
        evaluation, outer = self.of, self.of.scope
        evaluation.terms.here = (*self.above, (self.text, line.lineno))
        if not isinstance(line, ast.Assign) or not isinstance(line.value, ast.Call):
            self._refuse("is not a line of a loop")
        (target,), call = line.targets, line.value
        names = _names(target)
        if "" in names or not self.at.keys().isdisjoint({*names} - {"_"}):
            self._refuse("binds a name again")
        effects = self._effects()
        evaluation.scope = self.scope
        found, lifted = self._placed(call)
        evaluation._bind(self.text, target, evaluation._call(lifted))
        evaluation.scope = outer
        if effects != self._effects():
            self._refuse("draws or writes in each turn of a loop")
        several = isinstance(target, ast.Tuple)
        self.at |= {name: _item(found, index) if several else found for index, name in enumerate(names)}

    def _effects(self) -> int:
        """Return how often something was drawn or written; ranks send alike in each turn, or are told so."""
        return sum(len(found) for kind, found in self.of.effects.items() if kind != "collective")

    def _placed(self, call: ast.Call) -> tuple[Any, ast.Call]:
        """Return where the results of a call have their rows, a list of several, and the call for all rows."""
        head = dotted(call.func)
        if head == "operator.getitem":
            return _item(self.at[dotted(call.args[0])], ast.literal_eval(call.args[1])), call
        names = [dotted(node) for node in flat(call) if dotted(node) in self.at]
        divided = {i: self.at[name] for i, name in enumerate(names) if self.at[name] is not None}
        packet = head.removeprefix("ops._c10d_functional.").removeprefix("aten.").partition(".")[0]
        if packet.startswith("new_") or not divided:
            return self._made(packet, names, call)
        literals = [literal_or_none(node) for node in call.args]
        named = {str(word.arg): literal_or_none(word.value) for word in call.keywords}
        kinds = [self.of.terms.kinds.get(self.scope[name].term, "") for name in names]
        line = Called(names, [*map(self._shape, names)], kinds, literals, named)
        if any(type(at) is not tuple for at in divided.values()):
            self._refuse("computes with a sum before all rows have been added up")
        if any(groups == NUMBERS for _, groups in divided.values()):
            return self._put_in_rows(packet, line, divided), call
        if packet in _VIEWS:
            return self._view(packet, line, call)
        if packet in ("split", "all_gather_into_tensor") and (grouped := self._in_groups(packet, line, call)):
            return grouped
        for has, results in _AXES.get(packet, lambda _: iter(()))(line) if packet != "expand" else self._expand(line):
            groups = {divided[i][1] for i in has if i in divided} - {ANY} or {ANY}
            if len(groups) == 1 and has == {i: dim for i, (dim, _) in divided.items()}:
                found: list[At] = [(dim, next(iter(groups))) if isinstance(dim, int) else dim for dim in results]
                return found[0] if len(found) == 1 else found, self._lifted(packet, call, found[0])
        return self._refuse("mixes rows, or is not known to treat them alike")

    def _made(self, packet: str, names: Sequence[str], call: ast.Call) -> tuple[At, ast.Call]:
        """Return where a value has rows that are all the same, if the traced step has such a one, and its call."""
        place, groups = _MADE.get(packet), NUMBERS if packet == "arange" else ANY
        shape = [] if place is None else _shape_of(call.args[place])
        for dim, size in enumerate(shape):
            source = self.of.terms.shapes.get(self.scope[names[0]].term, shape) if packet == "expand" else ()
            varies = len(source) >= len(shape) - dim and source[dim - len(shape)] != 1
            if size and size % self.size == 0 and not varies:
                lifted = self._lifted(packet, call, (dim, groups))
                if self.of._term(self.of._call(lifted)) in self.of.terms.shapes:
                    return (dim, groups), lifted
        return None, call

    def _put_in_rows(self, packet: str, line: Called, divided: Mapping[int, Rows]) -> At:
        """Return where a value has rows in which values are put, whose columns indices behind the rows' numbers say."""
        (rows, *_), *others = line.shapes
        at, numbers, *rest = (divided.get(i) for i in range(len(line.tensors)))
        apart = [place for place, shape in zip(rest, others[1:], strict=True) if place != at and shape != ()]
        in_rows = at is not None and at[0] == 0 and at[1] > ANY and numbers == (0, NUMBERS)
        if packet != "index_put" or not in_rows or {*others} - {(rows,), ()} or apart or None in rest[:-1]:
            self._refuse("computes with the numbers of rows")
        return at

    def _expand(self, line: Called) -> Iterator[Axis]:
        ((shape,), wanted) = line.shapes, line.args[1]
        for dim, size in enumerate(shape, len(wanted) - len(shape)):
            if size > 1:
                yield {0: dim - len(wanted) + len(shape)}, [dim]

    def _view(self, packet: str, line: Called, call: ast.Call) -> tuple[Any, ast.Call]:
        (shape,), (dim, groups) = line.shapes, self.at[line.tensors[0]]
        turn = [*shape]
        turn[dim] = shape[dim] // self.rows * self.size
        before, passed = math.prod(turn[:dim]) * max(groups, 1), 1
        for at, size in enumerate(_viewed(packet, turn, line)):
            if before % passed == 0 and size % (before // passed * self.size) == 0:
                return (at, before // passed), self._lifted(packet, call, (at, before // passed))
            passed *= size
        return self._refuse("joins rows with other values")

    def _in_groups(self, packet: str, line: Called, call: ast.Call) -> tuple[Any, ast.Call] | None:
        """Return where the values of ranks, one after the other, have rows, and values that are parted so again."""
        dim, groups = self.at[line.tensors[0]]
        if type(line.args[1]) is not int:
            return None
        if packet == "all_gather_into_tensor":
            return (dim, groups if dim else groups * line.args[1]), call
        shape = line.shapes[0]
        parts, left = divmod(shape[dim] // self.rows * self.size, line.args[1])
        if dim != line.get("dim", 2, 0) % len(shape) or left or groups < parts or groups % parts:
            return None
        return [(dim, groups // parts)] * parts, self._lifted(_PARTED, call, (0, 1))

    def _lifted(self, packet: str, call: ast.Call, at: At) -> ast.Call:
        """Return a call whose result has all rows, where its arguments say the shape."""
        place = _SHAPES.get(packet)
        if place is None or type(at) is not tuple:
            return call
        shape = _shape_of(call.args[place])
        if shape[at[0]] != -1:
            if shape[at[0]] % self.size:
                self._refuse(f"has no {self.size} rows")
            shape[at[0]] = shape[at[0]] // self.size * self.rows
        said = ast.parse(repr(shape[0] if packet in ("arange", _PARTED) else shape), mode="eval").body
        args = [*call.args[:place], ast.copy_location(said, call.args[place]), *call.args[place + 1 :]]
        return ast.copy_location(ast.Call(call.func, args, call.keywords), call)

    # -- what is linear in the factor

    def _is_scaled(self, line: ast.stmt) -> bool:
        return isinstance(line, ast.Assign) and not self.scaled.isdisjoint(_names(line.targets[0]))

    def _linear(self) -> set[str]:
        """Return the names of what is computed from the factor; refuse what is not linear in it."""
        scaled, zeros, is_one = {self.factor}, set[str](), list[bool]()
        for line in self.lines:
            if not isinstance(line, ast.Assign) or not isinstance(line.value, ast.Call):
                continue
            names, call = _names(line.targets[0]), line.value
            self.of.terms.here = (*self.above, (self.text, line.lineno))
            if names == [self.factor]:
                pinned = any(literal_or_none(word.value) is True for word in call.keywords)
                said = [dotted(call.func), *map(literal_or_none, call.args)]
                is_one.append(said == ["aten.full.default", [], 1] and not pinned)
            elif scaled.isdisjoint(map(dotted, flat(call))):
                zeros |= {*names} if _is_zero(call) else set()
            elif not _is_zero(call) and not _is_linear(call, scaled, zeros):
                self._refuse(f"is not linear in {self.factor}")
            else:
                scaled |= {*names} - {"_"}
        if self.factor in self.at or is_one != [True]:
            self._refuse(f"has {self.factor} as its factor, which is not 1 there")
        return scaled


_PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot"})
_FIRST = (
    "sum _to_copy clone neg xlogy div gather embedding_dense_backward alias detach _softmax_backward_data"
    " _log_softmax_backward_data nll_loss_backward gelu_backward silu_backward tanh_backward sigmoid_backward"
    " threshold_backward native_layer_norm_backward _fused_rms_norm_backward leaky_relu_backward elu_backward"
    " hardtanh_backward softplus_backward mish_backward t transpose permute expand select unbind slice split"
    " split_with_sizes slice_backward select_backward getitem view _unsafe_view reshape unsqueeze squeeze"
)
"""Operations that are linear in their first argument."""


def _is_linear(call: ast.Call, scaled: set[str], zeros: set[str]) -> bool:
    packet, given = dotted(call.func).split(".")[1], [dotted(node) for node in flat(call)]
    if any("int" in (said := ast.unparse(word)) or "bool" in said or "round" in said for word in call.keywords):
        return False
    match packet:
        case "where":
            return len(given) == 3 and given[0] not in scaled and {*given[1:]} <= scaled | zeros
        case "cat" | "add" | "sub":
            return (packet == "cat" or len(given) == 2) and {*given} <= scaled | zeros
        case "masked_fill":
            return given[0] in scaled and given[1] not in scaled and literal_or_none(call.args[2]) == 0
    if packet in _PRODUCTS:
        return sum(name in scaled for name in given) == 1
    return packet in _FIRST.split() and given[0] in scaled and scaled.isdisjoint(given[1:])


def _is_zero(call: ast.Call) -> bool:
    packet, *_ = dotted(call.func).removeprefix("aten.").split(".")
    value = {"scalar_tensor": 0, "full": 1, "full_like": 1}.get(packet)
    zero = value is not None and len(call.args) > value and literal_or_none(call.args[value]) == 0
    return zero or packet in ("zeros_like", "new_zeros", "zeros")


def _at(said: Any) -> At:
    at: At = (said, 1) if type(said) is int else said
    return at


def _item(found: Any, index: int) -> At:
    at: At = found[min(index, len(found) - 1)] if type(found) is list else found
    return at


def _viewed(packet: str, shape: Sequence[int], line: Called) -> list[int]:
    """Return the shape that a view has of what is of `shape`."""
    rank = len(shape)
    if packet == "unsqueeze":
        dim = line.get("dim", 1) % (rank + 1)
        return [*shape[:dim], 1, *shape[dim:]]
    if packet == "squeeze":
        dims = line.get("dim", 1)
        over = {dim % rank for dim in (range(rank) if dims is None else [dims] if type(dims) is int else dims)}
        return [size for dim, size in enumerate(shape) if size != 1 or dim not in over]
    wanted = list(line.args[1])
    left = math.prod(shape) // max(math.prod([size for size in wanted if size != -1]), 1)
    return [left if size == -1 else size for size in wanted]


def _shape_of(said: ast.expr) -> list[int]:
    shape = ast.literal_eval(said)
    return [shape] if type(shape) is int else list(shape)


def _names(target: ast.expr) -> list[str]:
    elements = target.elts if isinstance(target, ast.Tuple) else [target]
    return [dotted(node.value if isinstance(node, ast.Starred) else node) for node in elements]


def flat(call: ast.Call) -> Iterator[ast.expr]:
    """Yield the arguments of a call that are names, also those in lists."""
    for given in (*call.args, *(word.value for word in call.keywords)):
        elements = given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]
        yield from (element for element in elements if isinstance(element, ast.Name))


def literal_or_none(node: ast.expr) -> Any:
    """Return the value of a constant; None of anything else."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
