"""Prints a program as Python: the text that people read is the text that is executed.

    def forward(box):
        (
            blocks_0,                                   #                  12 parameters     unit blocks.0
            x,                                          # f32[8, 64]
        ) = unbox(box)
        blocks_0_gather = all_gather(blocks_0)          #                  +195 KiB          blocks.0
        blocks_0_full = wait(blocks_0_gather)           #                                    blocks.0
        blocks_0_out = region_0(blocks_0_full, x)       # f32[8, 64]       +2 KiB            blocks.0
        release(blocks_0_full)                          #                  -195 KiB          blocks.0

The right margin shows the type of each value (`&`: it shares the memory of another value), the bytes that the line
allocates or frees, and the module that it comes from.
`unbox(box)` empties the caller's list of arguments, so that `del` really frees them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx

from zcompile.ir.bundles import Bundle, bundles_of, grouped
from zcompile.ir.layout import Param
from zcompile.ir.liveness import last_needs
from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import (
    Call,
    Input,
    Item,
    Kind,
    Parameter,
    Results,
    RuntimeInput,
    Shards,
    WaitGather,
    WaitSecondary,
    is_part,
    items_of,
)
from zcompile.ir.program_graph import ProgramGraph, after_items
from zcompile.ir.region import Region, graph_text
from zcompile.ir.spelling import counted, escaped, quoted
from zcompile.ir.tensor_type import TensorType, dtype_text, human_bytes
from zcompile.torch_internals.operators import HigherOrderOperator, OpOverload

WIDTH = 84
"""Columns for code and type; longer code is broken at its commas."""
_WITH_SOURCE = 96
"""Columns for code, type and module path; with the rest of the margin, a line has 120."""
_CONTINUED = 104
"""Columns for continuation lines, which have no margin."""
_LEAST = 40
"""Least columns for code before a long type."""
_TYPE = 28
"""Width of the type column at most; longer types are not aligned."""
_MARK = "\0"
"""Separates a line from the name of its node in intermediate text."""


A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line: the code, and the three columns of its right margin."""

    code: str
    type: str = ""
    delta: str = ""
    source: str = ""
    node: str = ""
    """The name of the node that the line belongs to; "" if there is none."""

    def padded(self, widths: tuple[int, int, int]) -> str:
        end = f"{_MARK}{self.node}"
        if not (self.type or self.delta or self.source):
            return f"{self.code}{end}"
        code, type_, delta = widths
        head = f"{self.code.ljust(code)}  # {self.type}".ljust(code + len("  # ") + type_)
        return f"{head}  {self.delta.ljust(delta)}  {self.source}".rstrip() + end

    @property
    def room(self) -> int:
        """Columns that are left for code."""
        return max(min(WIDTH, _WITH_SOURCE - len(self.source)) - len(self.type), _LEAST)


@dataclass(frozen=True, slots=True)
class Function:
    """A printed function: its name, the names it unboxes, and its body."""

    name: str
    arguments: list[str]
    body: list[str]
    decorators: tuple[str, ...] = ()

    def __str__(self) -> str:
        decorators = [f"@{decorator}" for decorator in self.decorators]
        arguments = (f"        {line}" for line in self.arguments)
        body = (f"    {line}" for line in self.body)
        return "\n".join([*decorators, f"def {self.name}(box):", "    (", *arguments, "    ) = unbox(box)", *body])


def render(program: ProgramGraph, *, regions: bool = False, units: bool = False) -> str:
    """Return the text of `program`: its phases, preceded by its units and its regions if requested."""
    return _without_marks(_rendered_program(program, regions=regions, units=units))


def region_text(region: Region) -> str:
    """Return the ATen operations of a region, as a function that `parse` reads."""
    return _without_marks(_rendered([str(_region_function(region))]))


def lines_with_nodes(program: ProgramGraph) -> list[tuple[str, str]]:
    """Return the lines of `render(program)`, each with the name of its node, or "" if it has none."""
    split = (line.partition(_MARK) for line in _rendered_program(program).splitlines())
    return [(text, node) for text, _, node in split]


def _without_marks(text: str) -> str:
    return "\n".join(line.partition(_MARK)[0] for line in text.split("\n"))


def _rendered_program(program: ProgramGraph, *, regions: bool = False, units: bool = False) -> str:
    blocks = ["\n".join(_head(program))] if units else []
    blocks += [str(_region_function(region)) for region in program.regions.values() if regions]
    for phase in program.phases:
        if phase is not Phase.BACKWARD or program.has_backward:
            blocks.append(str(_function(str(phase), *_phase_lines(program, phase))))
    return _rendered(blocks)


def _rendered(blocks: Iterable[str]) -> str:
    return "\n" + "\n\n\n".join(blocks) + "\n"


def _head(program: ProgramGraph) -> Iterator[str]:
    """Yield the lines for the mesh, the stage, the units, and their packed messages."""
    layout = program.layout
    yield f"axes = {{{', '.join(f'{quoted(axis.name)}: {quoted(str(axis))}' for axis in layout.axes)}}}"
    yield f"stage = {layout.stage.number}"
    if layout.has_secondary:
        yield f'hybrid = "{layout.hybrid}"'
    if layout.away:
        yield 'shards = "cpu"'
    yield "units = {"
    for unit in layout.units:
        yield f"    {quoted(unit.name)}: ["
        yield from (f"        {quoted(_param_text(param, program.unused))}," for param in unit.params)
        yield "    ],"
    yield "}"
    yield "packed = {"
    for unit in layout.units:
        if packed := [list(message) for message in unit.messages if len(message) > 1]:
            yield f"    {quoted(unit.name)}: {packed},"
    yield "}"


def _param_text(param: Param, unused: frozenset[str]) -> str:
    flags = (
        (f" computed in {dtype_text(param.compute_dtype)}" if param.compute_dtype else "")
        + (f" reduced in {dtype_text(param.reduction_dtype)}" if param.reduction_dtype else "")
        + (f" sent across in {dtype_text(param.outer_dtype)}" if param.outer_dtype else "")
        + (f" gathered in {dtype_text(param.outer_gather_dtype)}" if param.outer_gather_dtype else "")
        + (" unused" if param.name in unused else "")
        + ("" if param.trainable else " frozen")
        + ("" if param.shards else " whole")
        + ("" if param.owner is None else f" owner {param.owner}")
    )
    return f"{escaped(param.name)} {TensorType.make(param.dtype, param.shape)}{flags}"


def _function(name: str, arguments: list[TextLine], body: list[TextLine]) -> Function:
    lines = [*arguments, *body]
    codes = [*(TextLine(f"    {line.code}", line.type, line.delta, line.source) for line in arguments), *body]
    usual = [len(line.code) for line in codes if line.type or line.delta or line.source]
    aligned = min(WIDTH, _WITH_SOURCE - max((len(line.source) for line in lines), default=0))
    type_ = max((len(line.type) for line in lines if len(line.type) <= _TYPE), default=0)
    widths = (
        max((length for length in usual if length <= aligned - type_), default=0),
        type_,
        max((len(line.delta) for line in lines), default=0),
    )
    indented = (max(widths[0] - 4, 0), *widths[1:])  # arguments are indented by four more columns than the body
    return Function(name, [line.padded(indented) for line in arguments], [line.padded(widths) for line in body])


# -- a phase ----------------------------------------------------------------------------------------------------------


def inputs_of(program: ProgramGraph, phase: Phase) -> list[fx.Node]:
    """Return the values that the function of `phase` unboxes: units first, then inputs or values of the forward."""
    body = program.body(phase)
    used = {source for node in body for source in node.all_input_nodes}
    ends = set(_result_nodes(program, phase))
    shards = [n for n in program.nodes(Parameter, Shards) if n in used or n in ends]
    constants = [n for n in program.nodes(Input) if op_of(n, Input).kind is Kind.CONSTANT and n in used]
    bound = [*shards, *constants, *(n for n in program.nodes(RuntimeInput) if n in used)]
    given = [n for n in program.nodes(Input) if op_of(n, Input).kind is Kind.DATA]
    tangents = [n for n in program.nodes(Input) if op_of(n, Input).kind is Kind.TANGENT]
    if phase is not Phase.BACKWARD:
        return [*bound, *given, *(tangents if phase is Phase.STEP else ())]
    return [*bound, *program.kept(), *program.saved(), *tangents]


def _result_nodes(program: ProgramGraph, phase: Phase) -> Iterator[fx.Node]:
    if phase is not Phase.FORWARD:
        yield from program.results.backward_nodes()
    if phase is Phase.BACKWARD:
        return
    yield from (value for value in program.results.outputs if isinstance(value, fx.Node))
    if phase is Phase.FORWARD and program.has_backward:
        yield from program.saved()
        yield from program.kept()


def _phase_lines(program: ProgramGraph, phase: Phase) -> tuple[list[TextLine], list[TextLine]]:
    bundles: dict[fx.Node, Bundle] = _if_sound(bundles_of, program, {})
    inputs = list(grouped(inputs_of(program, phase), bundles))
    arguments = [_bundle_argument(arg) if isinstance(arg, Bundle) else _argument(program, arg) for arg in inputs]
    body = program.body(phase)
    deaths = _deaths(program, phase, body)
    freed: dict[fx.Node, int] = _if_sound(_freed, program, {})
    lines: list[TextLine] = []
    action = ""
    for node in body:
        if data(node).action not in ("", action):
            action = data(node).action
            lines.append(TextLine(f"# {action}"))
        end = _if_sound(after_items, node, node)
        if node.op == "get_attr":
            lines.append(_graph_line(node, program.modules))
        elif not isinstance(data(node).op, Item):
            # Memory may be freed after the last line that names its value: a view keeps it, or it is being sent.
            at_once = 0 if _dead(deaths, end, bundles) else freed.get(end, 0)
            delta = _if_sound(program.memory, node, 0) - at_once
            count = _results_of(program, node)
            lines += [replace(line, node=node.name) for line in _statement(node, delta, bundles, count)]
        if dead := _dead(deaths, node, bundles):
            lines += _delete(dead, freed.get(node, 0))
    return arguments, [*lines, *_wrapped(TextLine(_return(program, phase, bundles)))]


def _results_of(program: ProgramGraph, node: fx.Node) -> int | None:
    """Return how many results the region that `node` calls has; None if it calls no known region."""
    op = data(node).op
    region = program.regions.get(op.region) if isinstance(op, Call) else None
    return len(region.outputs) if region else None


def _dead(deaths: Mapping[fx.Node, list[fx.Node]], node: fx.Node, bundles: Mapping[fx.Node, Bundle]) -> list[str]:
    """Return the names of values to delete after `node`; lists of gradients are emptied by the line that takes them."""
    dead = grouped(deaths.get(node, ()), bundles)
    return [value.name for value in dead if not (isinstance(value, Bundle) and value.is_given_whole)]


def _if_sound(function: Callable[[A], T], argument: A, default: T) -> T:
    """Return `function(argument)`, or `default` if it raises: broken programs are printed, too, to show the problem."""
    try:
        return function(argument)
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError):
        return default


def _freed(program: ProgramGraph) -> dict[fx.Node, int]:
    """Return the bytes that are freed after each line, or after the last item of its results."""
    freed: dict[fx.Node, int] = {}
    for value, line in last_needs(program).items():
        if not isinstance(data(line).op, Results):
            end = after_items(line)
            freed[end] = freed.get(end, 0) + data(value).nbytes
    return freed


def _argument(program: ProgramGraph, node: fx.Node) -> TextLine:
    meta = data(node)
    match meta.op:
        case Shards(unit):
            count = counted(len(program.layout.unit(unit).params), "parameter")
            return TextLine(f"{node.name},", delta=count, source=f"unit {escaped(unit)}")
        case Parameter(name):
            return TextLine(f"{node.name},", _type_text(meta), source=f"parameter {escaped(name)}")
        case WaitGather(unit):
            return TextLine(f"{node.name},", source=f"full unit {escaped(unit)}")
        case WaitSecondary(unit):
            return TextLine(f"{node.name},", _type_text(meta), source=f"secondary unit {escaped(unit)}")
        case RuntimeInput() as op:
            type_ = _type_text(meta) if meta.type else ""
            return TextLine(f"{node.name},", type_, source=" ".join([op.label, *map(escaped, astuple(op))]))  # type: ignore[call-overload]
        case Input(held="mesh"):
            return TextLine(f"{node.name},", source="mesh")
        case Input(kind, mutated=mutated) if mutated or kind is not Kind.DATA:
            return TextLine(f"{node.name},", _type_text(meta), source="mutated" if mutated else str(kind))
        case _:
            return TextLine(f"{node.name},", _type_text(meta), source=_source_text(meta))


def _bundle_argument(bundle: Bundle) -> TextLine:
    source = _source_text(data(bundle.members[0]))
    return TextLine(f"{bundle.name},", _count_text(bundle), human_bytes(bundle.nbytes), source)


def _count_text(bundle: Bundle) -> str:
    """Return the number of values in a bundle, with `=` if all ranks of a model-parallel mesh have the same ones."""
    return f"{'=' if data(bundle.members[0]).replicated else ''}{len(bundle.members)} values"


def _type_text(meta: Data) -> str:
    """Return the type of a value: `&` marks a view, `@` precedes the bytes that the value keeps alive.

    `=` marks a value that all ranks of a model-parallel mesh have.
    """
    kept = f"@{meta.storage}" if meta.storage else ""
    return f"{'=' if meta.replicated else ''}{'&' if meta.view else ''}{meta.type}{kept}" if meta.type else "int[]"


def _source_text(meta: Data) -> str:
    """Return the modules or units that a value comes from, one word each."""
    units = meta.op.units if isinstance(meta.op, Call) else ()
    words = units if " + ".join(units) == meta.source else meta.source.split(" + ")
    return " + ".join(map(escaped, words))


def _statement(
    node: fx.Node, delta: int, bundles: Mapping[fx.Node, Bundle], count: int | None = None
) -> list[TextLine]:
    """Return the lines of a call; many results, `count` if known, are named over several lines with their types."""
    meta, call = data(node), _call_text(node, bundles)
    items = sorted(items_of(node), key=lambda item: op_of(item, Item).index)
    margin = (_delta_text(delta), _source_text(meta))
    if not meta.op.gives:
        return _wrapped(TextLine(call, "", *margin))
    if not items:
        type_ = _type_text(meta) if meta.type else ""
        return _wrapped(TextLine(f"{node.name} = {call}", type_, *margin))
    bundle = bundles.get(items[-1])
    alone = items[: -len(bundle.members)] if bundle else items
    whole = bundle is not None and op_of(bundle.members[0], Item).index == 0
    names = _item_names(alone, count if bundle is None else op_of(bundle.members[0], Item).index)
    names += [bundle.name if whole else f"*{bundle.name}"] if bundle else []
    types = [*(_type_text(data(item)) for item in alone), *([_count_text(bundle)] if bundle else [])]
    targets = ", ".join(names)
    line = TextLine(f"{targets} = {call}", ", ".join(types), *margin)
    if whole or len(f"{targets} = {call.partition('(')[0]}(") <= line.room:
        return _wrapped(line)
    end = TextLine(f") = {call}", "", *margin)
    return [TextLine("("), *_targets(names, types), *_wrapped(end)]


def _targets(names: list[str], types: list[str]) -> Iterator[TextLine]:
    """Yield lines of a few names to unpack into, with the types of the used ones."""
    left = iter(types)
    for few in _filled(names, 48):
        yield TextLine(f"    {', '.join(few)},", ", ".join(next(left) for name in few if name not in ("_", "*_")))


def _filled(parts: list[str], width: int) -> Iterator[list[str]]:
    """Yield `parts` in groups that fit in `width` columns when joined."""
    group: list[str] = []
    for part in parts:
        if group and len(", ".join([*group, part])) > width:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _wrapped(line: TextLine) -> list[TextLine]:
    """Return `line`, broken at its commas if it is too long; the margin stays on the first part."""
    if len(line.code) <= line.room or "'" in line.code or '"' in line.code:
        return [line]
    parts = _bracketed_parts(line.code)
    first = next(_filled(parts, line.room))
    rest = parts[len(first) :]
    begin = f"{', '.join(first)}{',' if rest else ''}"
    if len(begin) > line.room and "(" in begin:  # no argument fits after the function
        function, _, taken = first[0].partition("(")
        begin, rest = f"{function}(", [taken, *parts[1:]]
    groups = [", ".join(group) for group in _filled(rest, _CONTINUED)]
    ends = [*("," for _ in groups[1:]), ""]
    return [
        replace(line, code=begin),
        *(TextLine(f"        {group}{end}") for group, end in zip(groups, ends, strict=False)),
    ]


def _bracketed_parts(code: str) -> list[str]:
    """Return `code` split at the commas inside brackets, where Python allows line breaks."""
    first, *rest = code.split(", ")
    parts = [first]
    depth = int(code.startswith(")"))  # the end of a target over several lines closes what an earlier line opened
    for previous, piece in zip([first, *rest], rest, strict=False):
        depth += sum(previous.count(opening) for opening in "([") - sum(previous.count(closing) for closing in ")]")
        if depth > 0:
            parts.append(piece)
        else:
            parts[-1] += f", {piece}"
    return parts


def _item_names(items: list[fx.Node], count: int | None) -> list[str]:
    """Return names to unpack a tuple of `count` results into, `_` for unused ones; `count` is None if unknown."""
    by_index = {op_of(item, Item).index: item.name for item in items}
    names = [by_index.get(index, "_") for index in range(max(max(by_index, default=-1) + 1, count or 0))]
    if count is not None:
        return names
    of_region = isinstance(data(items[0].all_input_nodes[0]).op, Call)
    return [*names, *([] if of_region and len(names) > 1 else ["*_"])]


def _delta_text(delta: int) -> str:
    return f"{'+' if delta > 0 else '-'}{human_bytes(abs(delta))}" if delta else ""


def _deaths(program: ProgramGraph, phase: Phase, body: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map nodes of the body to the values that are deleted after them."""
    alive_at_end = set(_result_nodes(program, phase))
    last: dict[fx.Node, fx.Node] = {}
    for node in body:
        if data(node).type:
            last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    deaths: dict[fx.Node, list[fx.Node]] = {}
    for node in [*inputs_of(program, phase), *body]:
        end = last.get(node)
        if end is None or node in alive_at_end or data(node).type is None:
            continue
        if isinstance(data(node).op, (Parameter, RuntimeInput)) or (isinstance(data(node).op, Item) and end is node):
            continue
        deaths.setdefault(_if_sound(after_items, end, end), []).append(node)
    return deaths


def _delete(dead: list[str], freed: int) -> list[TextLine]:
    """Return lines that `del` values, a few per line, with the bytes that they free together."""
    lines = [TextLine(f"del {', '.join(names)}") for names in _filled(dead, WIDTH)]
    return [replace(line, delta="" if index else _delta_text(-freed)) for index, line in enumerate(lines)]


def _return(program: ProgramGraph, phase: Phase, bundles: Mapping[fx.Node, Bundle]) -> str:
    results = program.results
    if phase is Phase.FORWARD:
        saved = [*program.kept(), *program.saved()] if program.has_backward else []
        return f"return {_list(results.outputs)}, {_list(grouped(saved, bundles))}"
    gradients = ", ".join(f"{name!r}: {python_text(node)}" for name, node in results.gradients.items())
    delivered = f"{{{gradients}}}" if results.gradients else _list(results.reduced)
    given = results.outputs if phase is Phase.STEP else results.input_gradients
    return f"return {_list(given)}, {delivered}"


def _list(values: Iterable[Any]) -> str:
    return f"[{', '.join(map(python_text, values))}]"


# -- a region ---------------------------------------------------------------------------------------------------------


def _region_function(region: Region) -> Function:
    """Return a region as a function; its decorators say what loop runs it, and that it is captured as a CUDA graph."""
    loop = [f"chunked({region.rows})"] if region.rows is not None else []
    graph = [f"cuda_graph(fixed={sorted(region.fixed)})"] if region.fixed is not None else []
    return replace(_function(region.name, *_region_lines(region)), decorators=(*graph, *loop))


def _region_lines(region: Region) -> tuple[list[TextLine], list[TextLine]]:
    arguments = []
    for node, (argument, item) in zip(region.graph.find_nodes(op="placeholder"), region.takes, strict=True):
        origin = f"argument {argument}" + (f" item {item}" if item is not None else "")
        arguments.append(TextLine(f"{node.name},", _type_text(data(node)), source=origin))
    body = []
    for node in region.graph.nodes:
        if node.op == "get_attr":
            body.append(_graph_line(node, region.modules))
        elif node.op == "call_function" and not is_part(node):
            body += _statement(node, data(node).nbytes + sum(data(item).nbytes for item in items_of(node)), {})
    return arguments, [*body, *_wrapped(TextLine(f"return {_list(region.outputs)}"))]


def _graph_line(node: fx.Node, modules: Mapping[str, fx.GraphModule]) -> TextLine:
    """Return the line of a graph that a higher-order operation calls: a digest, to tell it from other graphs."""
    module = modules.get(str(node.target))
    digest = hashlib.sha256(graph_text(module).encode(errors="backslashreplace")).hexdigest() if module else ""
    return TextLine(f"{node.name} = graph('{digest[:16]}')", node=node.name)


# -- expressions ------------------------------------------------------------------------------------------------------


def _call_text(node: fx.Node, bundles: Mapping[fx.Node, Bundle]) -> str:
    args: tuple[Any, ...] = node.args
    if isinstance(data(node).op, Call):
        function, args = op_of(node, Call).region, args[1:]
    else:
        function = function_text(node.target)
    parts = _spread(args, bundles) + [f"{key}={_keyword(key, value)}" for key, value in node.kwargs.items()]
    return f"{function}({', '.join(parts)})"


def _spread(args: Iterable[Any], bundles: Mapping[fx.Node, Bundle]) -> list[str]:
    """Return the texts of arguments, or of elements of a list, with bundles as `*name`."""
    return [
        f"*{arg.name}"
        if isinstance(arg, Bundle)
        else _listed(arg, bundles)
        if isinstance(arg, list)
        else python_text(arg)
        for arg in grouped(args, bundles)
    ]


def _listed(values: list[Any], bundles: Mapping[fx.Node, Bundle]) -> str:
    """Return the text of a list of values: the name of a bundle if it is the whole list."""
    bundle = bundles.get(values[0]) if values and isinstance(values[0], fx.Node) else None
    if bundle and bundle.is_given_whole:
        return bundle.name
    return f"[{', '.join(_spread(values, bundles))}]"


def _keyword(key: str, value: Any) -> str:
    if key != "at":
        return python_text(value)
    arena, start, stop = value
    return f"{arena}[{start}:{stop}]"  # the arena is None if a pass did not set it


def function_text(target: Any) -> str:
    """Return the name of the function `target` in a printed program."""
    if isinstance(target, OpOverload):
        return str(target) if target.namespace == "aten" else f"ops.{target}"
    if isinstance(target, HigherOrderOperator):
        return f"ops.higher_order.{target.name()}"
    module = str(getattr(target, "__module__", ""))
    if module in ("_operator", "operator", "math", "torch"):
        return f"{module.removeprefix('_')}.{target.__name__}"
    return str(target.__name__)


def python_text(value: Any) -> str:
    """Return an argument of a node as Python source."""
    match value:
        case fx.Node() | Bundle():
            return value.name
        case OpOverload():
            return function_text(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case float() if not math.isfinite(value):
            return f"float('{value}')"
        case tuple():
            return f"({', '.join(map(python_text, value))}{',' if len(value) == 1 else ''})"
        case list():
            return _list(value)
        case dict():
            return f"{{{', '.join(f'{key!r}: {python_text(item)}' for key, item in value.items())}}}"
        case _:
            return repr(value)
