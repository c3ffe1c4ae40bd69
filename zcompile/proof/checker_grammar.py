"""The form of a dump's texts: what may stand in them, statement by statement, and which functions may be called.

Whatever else Python would do, when it defines a function, binds a name or calls something, does not stand in a program.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

HEADS = {"axes", "hybrid", "stage", "shards", "units", "packed"}
"""What is said before the functions of the captured step."""
_PURE = frozenset(
    {"abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "inv", "invert", "is_", "is_not", "le"}
    | {"lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv"}
    | {"truth", "xor"}
)
"""What of the module `operator` computes with values, and writes to none."""


def misplaced(body: list[ast.stmt], functions: tuple[str, ...], *, heads: bool) -> Iterator[tuple[int, str]]:
    """Lines of a text that may not stand there, and what they are.

    Args:
        body: All of the text.
        functions: The functions that it may have, each once.
        heads: True if constants may stand before them.
    """
    seen: set[str] = set()
    for one in body:
        match one:
            case ast.FunctionDef(name=name) if name in functions and name not in seen:
                yield from _in_function(one)
                seen.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if heads and name in HEADS and _is_literal(value):
                pass
            case _:
                yield one.lineno, "is no part of a program"


def is_function_of_values(name: str) -> bool:
    """True for the dotted name of a function that may be called in a program: an operation, or one of sizes.

    Which operations there are, the captured step says.
    """
    match name.split("."):
        case ["aten", _, _] | ["ops", "higher_order", _] | ["ops", _, _, _]:
            return True
        case ["operator", function]:
            return function in _PURE
        case ["math", function]:
            return not function.startswith("_") and callable(getattr(math, function, None))
        case ["torch", function]:
            return function.startswith(("sym_", "_sym_"))
    return False


def packet_of(head: str) -> str:
    """The name of an operation without its library and overload."""
    parts = head.split("|")[0].split(".")
    return parts[2 if parts[0] == "ops" else 1] if len(parts) > 1 else ""


def _in_function(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    if ast.unparse(function.args) != "box" or function.returns:
        yield function.lineno, "is no function of a box"
    for decorator in function.decorator_list:
        if not _is_graph(decorator):
            yield decorator.lineno, "is decorated by something unknown"
    first, *rest = function.body
    if not _unboxes(first):
        yield first.lineno, "is not `(a, b,) = unbox(box)`, with which a function begins"
    if not rest or not isinstance(rest[-1], ast.Return):
        yield function.body[-1].lineno, "is no return, with which a function ends"
    for one in rest[:-1]:
        match one:
            case ast.Assign(targets=[target], value=ast.Call()) if _binds(target):
                pass
            case ast.Delete(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
                pass
            case ast.Expr(value=ast.Call()):
                pass
            case _:
                yield one.lineno, "is no statement of a program"


def _binds(target: ast.expr) -> bool:
    """True for a name, or several, of which the last may take all that is left."""
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


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True
