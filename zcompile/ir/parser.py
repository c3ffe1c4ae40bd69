"""Parses a printed program: the inverse of `zcompile.ir.printer`, used to write and to test passes.

The margin is parsed, too: it has the types of values and the modules that they come from.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from zcompile.errors import ParseError
from zcompile.ir import ops
from zcompile.ir.axis import Axis, AxisKind, axes_of
from zcompile.ir.bundles import member_name
from zcompile.ir.layout import STAGES, Hybrid, Layout, Param, Unit
from zcompile.ir.liveness import memory_of_result
from zcompile.ir.operation import Data, Operation, Phase, data, given_to, set_data
from zcompile.ir.operators import known
from zcompile.ir.ops import Call, Compute, Input, Item, Kind, Parameter, Placeholder, Shards
from zcompile.ir.placement import RowLoop, placement_of
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.region import Region
from zcompile.ir.spelling import common_module, identifier, unescaped
from zcompile.ir.tensor_type import TensorType, dtype_of
from zcompile.torch_internals.sizes import FakeTensorMode

_MARGIN = re.compile(
    r"#\s*(?P<types>(?:(?:=?&?\w+\[[^\]]*\](?:@\d+)?|=?\d+ values)(?:,\s*)?)*)\s*"
    r"(?:[+-]?[\d.e+]+ (?:B|[KMGT]iB|parameters?))?\s*(?P<source>.*)"
)
_COMMENT = re.compile(r"""(?:[^#'"]++|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")*+(#.*)""")
_PHASES = frozenset(map(str, Phase))
_NAMED: tuple[type[Placeholder], ...] = (Shards, Parameter, *ops.RUNTIME_INPUTS)
_PLACEHOLDERS = {kind.label: kind for kind in _NAMED}


def parse(text: str) -> Program:
    """Parse a program printed by `Program.text(regions=True)`.

    Raises:
        ParseError: a line is not valid in a printed program; names the line.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ParseError(f"line {error.lineno}", error.msg, "parse what Program.text(regions=True) printed") from error
    actions = {number: line[6:] for number, line in enumerate(text.split("\n"), 1) if line.startswith("    # ")}
    return _Parser(tree, _margins(text), actions).program()


@dataclass(frozen=True, slots=True)
class _Type:
    """The type of a value in a margin (None for a size), whether it is a view, and the bytes that it keeps alive.

    `replicated`: "=" if all ranks of a model-parallel mesh have the same value.
    """

    type: TensorType | None = None
    view: bool = False
    replicated: str = ""
    storage: int = 0

    @classmethod
    def parse(cls, text: str) -> _Type:
        if "int[]" in text:
            return cls()
        storage = int(text.partition("@")[2] or 0)
        return cls(TensorType.parse(text), "&" in text, "=" if text.startswith("=") else "", storage)

    def data(self, op: Operation, phase: Phase, source: str) -> Data:
        """Return the data of a value of this type."""
        return Data(
            op, phase, self.type, unescaped(source), view=self.view, replicated=self.replicated, storage=self.storage
        )


@dataclass(frozen=True, slots=True)
class LineMargin:
    """The margin of a line, to the right of its code."""

    types: tuple[_Type, ...] = ()
    source: str = ""
    count: int | None = None
    """The number of values in a bundle; None if the line has none."""
    replicated: str = ""
    """For a bundle, `=` if all ranks of a model-parallel mesh have the same values."""

    @classmethod
    def of(cls, line: str) -> LineMargin | None:
        """Parse the margin of a line; None if it has none.

        Raises:
            ValueError: a type is invalid.
        """
        comment = _COMMENT.match(line)
        found = _MARGIN.match(comment[1]) if comment else None
        if found is None:
            return None
        types = tuple(map(_Type.parse, re.findall(r"=?&?\w+\[[^\]]*\](?:@\d+)?", found["types"])))
        bundle = re.search(r"(=?)(\d+) values", found["types"])
        return cls(types, found["source"].strip(), int(bundle[2]) if bundle else None, bundle[1] if bundle else "")

    @property
    def first(self) -> _Type:
        return self.types[0] if self.types else _Type()

    @property
    def placeholder(self) -> Placeholder | None:
        """The unit, parameter or runtime input that a name represents; None for other inputs."""
        kind, *named = self.source.split(" ")
        found = _PLACEHOLDERS.get(kind)
        if found is None or len(named) != len(fields(found)):  # type: ignore[arg-type]
            return None  # a value from a module with the name of a label
        return found(*map(unescaped, named))


def _margins(text: str) -> dict[int, LineMargin]:
    margins = {}
    for number, line in enumerate(text.split("\n"), 1):
        try:
            margin = LineMargin.of(line)
        except ValueError as error:
            fix = "write it as programs are printed, such as f32[8, s0=256]"
            raise ParseError(f"line {number}", f"no type: {error}", fix) from error
        if margin is not None:
            margins[number] = margin
    return margins


@dataclass
class _Scope:
    """A graph being filled, and the names defined so far."""

    graph: fx.Graph
    phase: Phase
    names: dict[str, Any] = field(default_factory=dict)


class _Parser:
    def __init__(self, tree: ast.Module, margins: dict[int, LineMargin], actions: dict[int, str]) -> None:
        self.margins, self.actions, self.action = margins, actions, ""
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        constants = {
            target.id: literal(statement.value)
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        self.functions = [statement for statement in tree.body if isinstance(statement, ast.FunctionDef)]
        self.layout = layout_of(constants)
        self.unused = _flagged(constants, "unused")
        self.regions: dict[str, Region] = {}

    def program(self) -> Program:
        for function in self.functions:
            if function.name not in _PHASES:
                self.regions[function.name] = self._region(function)
        phases = [Phase(function.name) for function in self.functions if function.name in _PHASES]
        if not {Phase.FORWARD, Phase.STEP}.intersection(phases):
            raise ParseError("the text", "has no function `forward`", "parse what Program.text(regions=True) printed")
        graph, results = fx.Graph(), dict[str, Any]()
        scope = _Scope(graph, Phase.FORWARD)
        for function in self.functions:
            if function.name in _PHASES:
                scope.phase = Phase(function.name)
                self._phase(function, scope, results)
        given = {data(node).op for node in graph.find_nodes(op="placeholder")}
        for unit in self.layout.units if self.regions else ():
            if Shards(unit.name) not in given:
                name = identifier(unit.name.removeprefix(common_module(unit.name for unit in self.layout.units)))
                set_data(graph.create_node("placeholder", name, name=name), Data(Shards(unit.name)))
        _placeholders_first(graph)
        set_results(graph, **results)
        whole = (Phase.STEP,) if Phase.STEP in phases else (Phase.FORWARD, Phase.BACKWARD)
        return Program(graph, self.layout, self.regions, unused=self.unused, phases=whole)

    # -- functions ------------------------------------------------------------------------------------------------

    def _region(self, function: ast.FunctionDef) -> Region:
        scope = _Scope(fx.Graph(), Phase.FORWARD)
        takes = []
        for name, line in _unboxed(function):
            margin = self._margin(line)
            takes.append(_take(margin.source, line))
            node = scope.graph.create_node("placeholder", name, name=name)
            scope.names[name] = self._typed(node, Data(Input(Kind.DATA, len(takes) - 1), type=margin.first.type))
        *body, end = function.body[1:]
        for statement in body:
            self._statement(statement, scope)
        if not isinstance(end, ast.Return):
            raise ParseError(
                f"line {end.lineno}", f"{function.name} ends without a return: it is cut off", "print it again"
            )
        values = value_of(end.value, scope.names)
        set_data(scope.graph.output(tuple(values) if len(values) > 1 else values[0]), Data(ops.Results()))
        return Region(function.name, scope.graph, tuple(takes), **_decorated(function))

    def _phase(self, function: ast.FunctionDef, scope: _Scope, results: dict[str, Any]) -> None:
        for name, line in _unboxed(function):
            if name not in scope.names:
                scope.names[name] = self._input(name, self._margin(line), scope)
        *body, end = function.body[1:]
        for statement in body:
            self._statement(statement, scope)
        if not isinstance(end, ast.Return) or not isinstance(end.value, ast.Tuple):
            raise ParseError(f"line {end.lineno}", "a phase ends in two lists", "end it with `return [...], [...]`")
        first, second = (value_of(value, scope.names) for value in end.value.elts)
        if scope.phase is not Phase.BACKWARD:
            results["outputs"] = first
        if scope.phase is not Phase.FORWARD:
            results["input_gradients"] = first if scope.phase is Phase.BACKWARD else []
            results["gradients" if isinstance(second, dict) else "reduced"] = second

    def _input(self, name: str, margin: LineMargin, scope: _Scope) -> fx.Node:
        kind = margin.source.partition(" ")[0]
        index = len(scope.graph.find_nodes(op="placeholder"))
        op = margin.placeholder
        if op is None:
            held = "mesh" if kind == "mesh" and margin.first.type is None else ""
            op = Input(Kind(kind) if kind in ("tangent", "constant") else Kind.DATA, index, kind == "mutated", held)
        phase = scope.phase if kind == "tangent" or scope.phase is Phase.STEP else Phase.FORWARD
        source = margin.source if isinstance(op, Input) and op.kind is Kind.DATA and not op.mutated else ""
        type_ = margin.first
        prefix = "tangents" if kind == "tangent" else "primals"  # as AOTAutograd calls them: partitioners look at it
        node = scope.graph.create_node("placeholder", f"{prefix}_{index}", name=name)
        node.meta["partitioner_tag"] = "is_backward" if kind == "tangent" else "is_forward"
        return self._typed(
            node, Data(op, phase, type_.type, unescaped(source), view=type_.view, replicated=type_.replicated)
        )

    # -- statements -----------------------------------------------------------------------------------------------

    def _statement(self, statement: ast.stmt, scope: _Scope) -> None:
        margin = self._margin(statement.lineno)
        self.action = self.actions.get(statement.lineno - 1, self.action)
        match statement:
            case ast.Delete():
                return
            case ast.Expr(value=ast.Call() as call):
                self._call(call, "release", margin, scope)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if margin.count is not None:
                source = self._call(call, "", margin, scope)
                scope.names[name] = self._bundle(name, source, 0, margin, scope)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                scope.names[name] = self._call(call, name, margin, scope)
            case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Call() as call):
                margin = self._margin(call.lineno)
                source = self._call(call, "", replace(margin, types=()), scope)
                lines = [self._margin(line) for line in sorted({element.lineno for element in elements})]
                types = tuple(found for line in lines for found in line.types)
                self._items(source, elements, replace(margin, types=types, replicated=lines[-1].replicated), scope)
            case _:
                raise ParseError(
                    f"line {statement.lineno}", f"{ast.unparse(statement)!r} is not a statement of a program",
                    "write assignments of calls, releases, del and return",
                )  # fmt: skip

    def _items(self, source: fx.Node, elements: list[ast.expr], margin: LineMargin, scope: _Scope) -> None:
        types = iter(margin.types)
        for index, element in enumerate(elements):
            if isinstance(element, ast.Name) and element.id != "_":
                node = scope.graph.create_node("call_function", operator.getitem, (source, index), name=element.id)
                meta = next(types, _Type()).data(Item(index), scope.phase, margin.source)
                scope.names[element.id] = self._typed(node, meta)
            elif isinstance(element, ast.Starred) and isinstance(element.value, ast.Name) and element.value.id != "_":
                name = element.value.id
                scope.names[name] = self._bundle(name, source, index, margin, scope)

    def _bundle(self, name: str, source: fx.Node, first: int, margin: LineMargin, scope: _Scope) -> list[fx.Node]:
        """Add items for the results of a region from `first` on; their types are in the text of the region."""
        op = data(source).op
        if not isinstance(op, Call):
            problem = "is given results of something that is not a region"
            raise ParseError(f"the bundle {name}", problem, "name each of them")
        region, members = self.regions[op.region], []
        for index in range(first, len(region.outputs)):
            given = (source, index)
            node = scope.graph.create_node("call_function", operator.getitem, given, name=member_name(name, index))
            view, storage = memory_of_result(region, index)
            type_ = _Type(region.result_type(index), view, margin.replicated, storage)
            members.append(self._typed(node, type_.data(Item(index), scope.phase, margin.source)))
        return members

    def _call(self, call: ast.Call, name: str, margin: LineMargin, scope: _Scope) -> fx.Node:
        args = _values(call.args, scope.names)
        kwargs = {keyword.arg: value_of(keyword.value, scope.names) for keyword in call.keywords if keyword.arg}
        text = ast.unparse(call.func)
        target: Callable[..., Any]
        if text in self.regions:
            names = (argument.id for argument in call.args if isinstance(argument, ast.Name))
            if listed := next((name for name in names if isinstance(scope.names.get(name), list)), ""):
                raise ParseError(f"line {call.lineno}", f"{text} is given the list {listed}", f"write *{listed}")
            target, args = ops.region, [text, *args]
        elif text in ops.FUNCTIONS:
            target = ops.FUNCTIONS[text]
        else:
            target = known(text)
            if not callable(target):
                raise _undefined(call.func)
        node = scope.graph.create_node("call_function", target, tuple(args), kwargs, name=name or _default_name(text))
        node.meta["partitioner_tag"] = f"is_{scope.phase}"
        try:
            op = _operation(node, self.layout, self.regions, margin.source)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"{ast.unparse(call)!r} is given what {text} does not take"
            raise ParseError(f"line {call.lineno}", problem, "write it as programs are printed") from error
        return self._typed(node, margin.first.data(op, scope.phase, margin.source))

    # -- values ---------------------------------------------------------------------------------------------------

    def _margin(self, line: int) -> LineMargin:
        return self.margins.get(line, LineMargin())

    def _typed(self, node: fx.Node, meta: Data) -> fx.Node:
        if meta.type is not None:
            with self.mode:
                node.meta["val"] = torch.empty(meta.type.shape, dtype=meta.type.dtype)
        of_action = node.op == "call_function" and meta.phase is Phase.STEP
        return set_data(node, replace(meta, action=self.action) if of_action else meta)


def value_of(expression: ast.expr | None, names: Mapping[str, Any]) -> Any:
    """Evaluate an argument: a name in `names`, a list, tuple or dict of arguments, a known attribute, or a constant.

    Raises:
        ParseError: it is not an argument that programs are printed with.
    """
    match expression:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper)):
            return (value_of(value, names), value_of(lower, names), value_of(upper, names))
        case ast.Call(func=function, args=[ast.Constant(value=str() as text)], keywords=[]):
            return _made(ast.unparse(function), text, expression)
        case ast.List(elts=elements):
            return _values(elements, names)
        case ast.Tuple(elts=elements):
            return tuple(value_of(element, names) for element in elements)
        case ast.Dict(keys=keys, values=values):
            return {literal(k): value_of(v, names) for k, v in zip(keys, values, strict=True) if k}
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp() | ast.BinOp():
            return literal(expression)
        case ast.Attribute() if (found := known(ast.unparse(expression))) is not None:
            return found
        case _:
            raise _undefined(expression)


def _values(expressions: Iterable[ast.expr], names: Mapping[str, Any]) -> list[Any]:
    """Evaluate arguments or elements of a list; `*name` gives all values of a bundle."""
    values = []
    for expression in expressions:
        value = value_of(expression.value if isinstance(expression, ast.Starred) else expression, names)
        if not isinstance(expression, ast.Starred):
            values.append(value)
        elif isinstance(value, list):
            values += value
        else:
            problem = f"{ast.unparse(expression)!r} unpacks a single value"
            raise ParseError(f"line {expression.lineno}", problem, "leave out the *")
    return values


def _made(function: str, text: str, expression: ast.expr) -> Any:
    """Evaluate a call that is printed as an argument: `torch.device('cuda:0')`, `float('inf')`."""
    try:
        if function == "torch.device":
            return torch.device(text)
        if function == "float":
            return float(text)
    except (RuntimeError, ValueError) as error:
        raise ParseError(f"line {expression.lineno}", str(error).partition("\n")[0], "spell it right") from error
    raise _undefined(expression)


def literal(expression: ast.expr) -> Any:
    """Evaluate a constant.

    Raises:
        ParseError: `expression` is not a constant.
    """
    try:
        return ast.literal_eval(expression)
    except ValueError:
        raise _undefined(expression) from None


def _undefined(expression: ast.expr | None) -> ParseError:
    text, line = (ast.unparse(expression), expression.lineno) if expression else ("nothing", "?")
    fix = "define it above, or spell it right: operators, dtypes and what else programs are printed with are known"
    return ParseError(f"line {line}", f"{text!r} is not defined here", fix)


def _operation(node: fx.Node, layout: Layout, regions: dict[str, Region], source: str) -> Operation:
    """Return the operation of a call, from its function and its arguments."""
    function = node.target.__name__  # type: ignore[union-attr]
    if node.target is ops.region:
        # The margin names the units that the call is meant to read; its arguments are what it does read.
        units = [name for name in map(unescaped, source.split(" + ")) if layout.has_unit(name)]
        reads = {argument for argument, item in regions[str(node.args[0])].takes if item is not None}
        return Call(str(node.args[0]), tuple(units[: len(reads)]))
    if node.target is not ops.FUNCTIONS.get(function):
        return Compute()
    keywords: dict[str, Any] = dict(node.kwargs)
    if "at" in keywords:
        keywords["at"] = keywords["at"][1:]
    return ops.operation(function, given_to(node), keywords, layout)


def _default_name(function: str) -> str:
    """Return a name for a call with several results, which has none in the text."""
    return function.split(".")[-2] if "." in function else f"{function}_results"


def _take(source: str, line: int) -> tuple[int, int | None]:
    """Parse the margin of a region's placeholder, the source of its value: `argument 0 item 3`, `argument 1`."""
    match = re.fullmatch(r"argument (\d+)(?: item (\d+))?", source)
    if match is None:
        raise ParseError(f"line {line}", f"{source!r} does not say where it comes from", "write `argument 0`")
    return int(match[1]), int(match[2]) if match[2] else None


def _decorated(function: ast.FunctionDef) -> dict[str, Any]:
    """Parse the decorators of a region: its placeholders with a fixed address, and the loop that runs it.

    They are printed as `@cuda_graph(fixed=[0, 1])` and `@chunked(rows=8, size=2, takes=[0, None], gives=['sum'])`.
    """
    found: dict[str, Any] = {}
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id="cuda_graph"), args=[], keywords=[ast.keyword(arg="fixed", value=listed)]):
                found["fixed"] = frozenset(_listed(listed, function))
                if not all(type(number) is int for number in found["fixed"]):
                    raise _undecorated(function)
            case ast.Call(func=ast.Name(id="chunked"), args=[], keywords=keywords):
                found["rows"] = _loop({one.arg: literal(one.value) for one in keywords if one.arg}, function)
            case _:
                raise _undecorated(function)
    return found


def _listed(expression: ast.expr, function: ast.FunctionDef) -> list[Any]:
    if not isinstance(expression, ast.List) or not all(isinstance(one, ast.Constant) for one in expression.elts):
        raise _undecorated(function)
    return list(literal(expression))


def _loop(said: Mapping[str, Any], function: ast.FunctionDef) -> RowLoop:
    try:
        takes, gives = (tuple(map(placement_of, said[side])) for side in ("takes", "gives"))
        return RowLoop(int(said["rows"]), int(said["size"]), takes, gives, str(said.get("factor", "")))
    except (KeyError, TypeError, ValueError) as error:
        raise _undecorated(function) from error


def _undecorated(function: ast.FunctionDef) -> ParseError:
    fix = "write `@cuda_graph(fixed=[0, 1])`, with the numbers of arguments, or leave it out"
    return ParseError(f"line {function.lineno}", f"{function.name} has a decorator that says nothing", fix)


def _unboxed(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    """Yield the names that `(...) = unbox(box)` binds, with their line numbers."""
    match function.body[0]:
        case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Call(func=ast.Name(id="unbox"))):
            for element in elements:
                assert isinstance(element, ast.Name), "unbox binds names"
                yield element.id, element.lineno
        case statement:
            raise ParseError(f"line {statement.lineno}", "no unboxing", "begin with `(a, b,) = unbox(box)`")


def _placeholders_first(graph: fx.Graph) -> None:
    """Move the placeholders of the backward to the start of the graph, where FX requires them."""
    last = None
    for node in graph.find_nodes(op="placeholder"):
        if last is not None:
            last.append(node)
        last = node


def layout_of(constants: Mapping[str, Any]) -> Layout:
    """Return the layout given by the constants, by name, at the head of a program's text.

    Raises:
        ParseError: a constant has a value that is never printed.
    """
    hybrid = constants.get("hybrid", Hybrid.HSDP)
    if hybrid not in list(Hybrid):
        raise ParseError("hybrid", f"{hybrid!r} is unknown", f"write one of {', '.join(Hybrid)}")
    stage = STAGES[constants.get("stage", 3)]
    empty = Layout((), stage, _axes(constants.get("axes", {})), constants.get("shards") == "cpu", Hybrid(hybrid))
    packed = constants.get("packed", {})
    units = []
    for name, texts in constants.get("units", {}).items():
        params = tuple(_param(text, empty.shards) for text in texts)
        unit = Unit(name, params, _modules(name, params))
        if name in packed:
            together = [tuple(message) for message in packed[name]]
            alone = [(i,) for i in range(len(params)) if not any(i in message for message in together)]
            unit = replace(unit, messages=tuple(sorted((*alone, *together))))
        units.append(unit)
    return empty.with_units(tuple(units))


def _axes(texts: Mapping[str, str]) -> tuple[Axis, ...]:
    try:
        result = tuple(Axis.parse(name, text) for name, text in texts.items())
    except ValueError as error:
        raise ParseError("axes", str(error), 'write them as programs are printed: {"dp": "shard 2"}') from error
    if result and [axis.kind for axis in result].count(AxisKind.SHARD) != 1:
        raise ParseError("axes", "want one that shards", 'write them as programs are printed: {"dp": "shard 2"}')
    return result or axes_of(1)


def _flagged(constants: Mapping[str, Any], flag: str) -> frozenset[str]:
    """Return the names of the parameters that have `flag` in the head."""
    words = (text.split() for texts in constants.get("units", {}).values() for text in texts)
    return frozenset(unescaped(name) for name, *rest in words if flag in rest)


def _param(text: str, shards: int) -> Param:
    name, _, rest = text.partition(" ")
    type_ = TensorType.parse(rest)
    casts = re.findall(r" (computed|reduced|across|gathered) in (\w+)", rest)
    dtypes = {kind: dtype_of(short) for kind, short in casts}
    return Param(
        unescaped(name),
        type_.shape,
        type_.dtype,
        "frozen" not in rest,
        0 if rest.endswith("whole") else shards,
        dtypes.get("computed"),
        dtypes.get("reduced"),
        int(owner[1]) if (owner := re.search(r" owner (\d+)$", rest)) else None,
        dtypes.get("across"),
        dtypes.get("gathered"),
    )


def _modules(name: str, params: tuple[Param, ...]) -> tuple[str, ...]:
    """Return the module paths of a unit: its own if all its parameters are below it, else those of the parameters."""
    if all(param.name.startswith(name + ".") for param in params):
        return (name,)
    return tuple(dict.fromkeys(param.name.rpartition(".")[0] for param in params))
