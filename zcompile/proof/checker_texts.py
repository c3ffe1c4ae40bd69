"""The texts of a dump, as the checker reads them: their syntax, lines, functions, and margins.

Only the few Python statements that programs consist of are accepted; anything else is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zcompile.errors import ProofError

FIX = "write the dump again; if the dump is unchanged, a pass has changed what the program computes"
_TYPE = re.compile(r"(=?)&?(\w+)\[([^\]]*)\](?:@\d+)?")
_COMMENT = re.compile(r"""(?:[^'"#]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")*(#.*)?""")
_MARGIN = re.compile(
    r"#\s*((?:(?:=?&?\w+\[[^\]]*\](?:@\d+)?|=?\d+ values)(?:,\s*)?)*)\s*"
    r"(?:[+-]?[\d.e+]+ (?:B|[KMGT]iB|parameters?))?\s*(.*)"
)

CAPTURE, FORWARD, BACKWARD, STEP = "00_capture.py", "forward.py", "backward.py", "step.py"
"""The files of a program besides `regions/region_0.py` and so on; all but CAPTURE have the function of that name."""


class Margin(NamedTuple):
    """The margin of a line: types, each a mark, a dtype and dimensions, and the words after them."""

    types: list[tuple[str, str, str]]
    words: str
    line: int


class ParamText(NamedTuple):
    """A parameter, as declared in the units."""

    name: str
    dtype: str
    flags: list[str]
    computed: str = ""
    reduced: str = ""
    across: str = ""
    gathered: str = ""

    @property
    def summed(self) -> str:
        """The dtype in which gradients are summed: that of the average if it is wider, else ""."""
        return self.reduced if self.reduced and _bits(self.reduced) > _bits(self.computed or self.dtype) else ""

    def full(self, dtype: str) -> str:
        """Return the head of the term of the whole parameter in a dtype."""
        ways = ([dtype] if dtype != self.dtype else []) + ([f"gathered in {self.gathered}"] if self.gathered else [])
        return f"full({', '.join([self.name, *ways])})"


def _bits(dtype: str) -> int:
    return int(re.sub(r"^\D+(\d+).*", r"\1", dtype))


def file_text(path: Path) -> str:
    """Return the text of a file, with its line endings unchanged.

    Raises:
        OSError: it cannot be read, or is not a regular file (a device may never end).
        UnicodeDecodeError: it is not UTF-8 text.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


class Text:
    """One file: its name, its lines, its functions and its margins."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.lines = name, text.split("\n")
        try:
            self.body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, why = getattr(error, "lineno", None) or len(self.lines), getattr(error, "msg", error)
            raise ProofError(f"{name} line {line}", f"is not valid Python: {why}", FIX) from error
        capture, stem = name == CAPTURE, name.rpartition("/")[2].removesuffix(".py")
        for line, problem in misplaced(self.body, ("forward", "backward") if capture else (stem,), heads=capture):
            raise ProofError(f"{name} line {line}", f"{problem}\n    {self.lines[line - 1].strip()}", FIX)
        self.functions = {node.name: node for node in self.body if isinstance(node, ast.FunctionDef)}

    def margin(self, line: int) -> Margin:
        """Return the margin of a line."""
        comment = _COMMENT.match(self.lines[line - 1])
        found = _MARGIN.match(comment[1]) if comment and comment[1] else None
        types, words = (_TYPE.findall(found[1]), _unescaped(found[2].strip())) if found else ([], "")
        return Margin(types, words, line)

    def types(self, names: Sequence[ast.expr]) -> dict[str, tuple[str, str, str]]:
        """Return the type of each bound name, from the margins: each line has one type per name that is used."""
        lines: dict[int, Iterator[tuple[str, str, str]]] = {}
        named = ((dotted(node.value if isinstance(node, ast.Starred) else node), node.lineno) for node in names)
        found = ((name, lines.setdefault(at, iter(self.margin(at).types))) for name, at in named if name != "_")
        return {name: next(line, ("", "", "")) for name, line in found}

    def arguments(self, name: str) -> list[tuple[str, Margin]]:
        """Return the names that a function unboxes, each with its margin."""
        match self.functions[name].body[0] if name in self.functions else None:
            case ast.Assign(targets=[ast.Tuple(elts=names)]):
                return [(ast.unparse(node), self.margin(node.lineno)) for node in names]
        raise ProofError(self.name, f"has no function {name}", FIX)


Place = tuple[tuple[Text, int], ...]
"""A line, followed by the line of the region that it calls, if any."""


def location_text(place: Place) -> tuple[str, str]:
    """Return the file and line numbers of a place, and the code of its lines with their module."""
    source = next((words for text, line in reversed(place) if (words := text.margin(line).words)), "")
    lines = "".join(f"\n    {text.lines[line - 1].partition('  #')[0].strip()}" for text, line in place)
    return ", ".join(f"{text.name} line {line}" for text, line in place), f"{lines}  # {source}" if source else lines


def refusal(place: Place, problem: str) -> ProofError:
    """Return the error for a problem at a place."""
    where, lines = location_text(place)
    return ProofError(where, f"{problem}{lines}", FIX)


def _unescaped(text: str) -> str:
    return re.sub(r"\\u\{([0-9a-f]+)\}", lambda match: chr(int(match[1], 16)), text)


def dotted(node: ast.expr | None) -> str:
    """Return a dotted name as it is written, such as `aten.mm.default`; "" for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def literal(node: ast.expr) -> str:
    """Return the head of a constant; it differs for 1, 1.0 and True, and for 0.0 and -0.0."""
    value = ast.literal_eval(node)
    return f"{type(value).__name__} {value!r}"


def param_of(text: str) -> ParamText:
    """Parse a line of the units: `layers.0.weight f32[4, 4] computed in bf16 unused`."""
    name, _, rest = text.partition(" ")
    dtypes = dict(re.findall(r"(computed|reduced|across|gathered) in (\w+)", rest))
    return ParamText(_unescaped(name), rest.partition("[")[0], rest.partition("]")[2].split(), **dtypes)


# -- syntax -----------------------------------------------------------------------------------------------------------

HEADS = {"axes", "hybrid", "stage", "shards", "units", "packed"}
"""Constants before the functions of the captured step."""


def misplaced(body: list[ast.stmt], functions: tuple[str, ...], *, heads: bool) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text that are not allowed, each with its problem.

    Args:
        body: The statements of the text.
        functions: The functions that it may define, each once.
        heads: True if it may define the constants in HEADS.
    """
    seen: set[str] = set()
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) if name in functions and name not in seen:
                yield from _in_function(statement)
                seen.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if heads and name in HEADS and _is_literal(value):
                pass
            case _:
                yield statement.lineno, "is not a part of a program"


def _in_function(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    if ast.unparse(function.args) != "box" or function.returns:
        yield function.lineno, "is not a function of a box"
    for decorator in function.decorator_list:
        if not _is_graph(decorator) and _said_of_loop(decorator) is None:
            yield decorator.lineno, "is decorated by something unknown"
    first, *rest = function.body
    if not _unboxes(first):
        yield first.lineno, "is not `(a, b,) = unbox(box)`, with which a function begins"
    if not rest or not isinstance(rest[-1], ast.Return):
        yield function.body[-1].lineno, "is not a return, which must end a function"
    for statement in rest[:-1]:
        match statement:
            case ast.Assign(targets=[target], value=ast.Call()) if _binds(target):
                pass
            case ast.Delete(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
                pass
            case ast.Expr(value=ast.Call()):
                pass
            case _:
                yield statement.lineno, "is not a statement of a program"


def _binds(target: ast.expr) -> bool:
    """Return True for a name, or several names, the last of which may be starred."""
    if not isinstance(target, ast.Tuple) or not target.elts:
        return isinstance(target, ast.Name)
    *names, last = target.elts
    last = last.value if isinstance(last, ast.Starred) else last
    return all(isinstance(name, ast.Name) for name in (*names, last))


def _unboxes(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=value) if ast.unparse(value) == "unbox(box)":
            return all(isinstance(name, ast.Name) for name in names)
    return False


def _is_graph(decorator: ast.expr) -> bool:
    match decorator:
        case ast.Call(func=ast.Name("cuda_graph"), args=[], keywords=[ast.keyword("fixed", ast.List() as fixed)]):
            return _is_literal(fixed)
    return False


def _said_of_loop(decorator: ast.expr) -> dict[str, Any] | None:
    match decorator:
        case ast.Call(func=ast.Name("chunked"), args=[], keywords=words) if all(
            _is_literal(one.value) for one in words
        ):
            said = {str(word.arg): ast.literal_eval(word.value) for word in words}
            fits = {"rows", "size", "takes", "gives"} <= said.keys() <= {"rows", "size", "takes", "gives", "factor"}
            return said if fits and said["rows"] > 0 < said["size"] else None
    return None


def loop_of(function: ast.FunctionDef) -> dict[str, Any] | None:
    """Return what `@chunked(rows=10, size=3, takes=[None, (0, 4)], gives=["sum"], factor="factor")` says; else None."""
    return next((said for one in function.decorator_list if (said := _said_of_loop(one))), None)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True
