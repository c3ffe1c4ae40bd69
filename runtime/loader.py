"""The loader: compiles a printed program's text into a function."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zcompile.runtime.executor import OPERATIONS
from zcompile.runtime.recorder import Track


def load(
    text: str,
    name: str,
    regions: Mapping[str, Callable[[list[Any]], Any]],
    filename: str,
    track: Track | None = None,
    *,
    operations: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[[list[Any]], Any]:
    """Compile the function `name` of a printed program, which calls `regions`; `track` records its lines when they run.

    `operations`: the other functions that it calls, by default the runtime's.

    Regions take their arguments in a list and empty it: values that die at the call are freed within, after their last
    use.

    The text is registered with `linecache` under `filename`, so that tracebacks show the program's own lines.
    """
    functions = {**(OPERATIONS if operations is None else operations), **regions}
    if track is not None:
        functions = {called: track.timed(function) for called, function in functions.items()}
    namespace: dict[str, Any] = {"torch": torch, **functions}
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    tree = _Boxing(frozenset(regions)).visit(ast.parse(text, filename))
    exec(compile(ast.fix_missing_locations(tree), filename, "exec"), namespace)
    function: Callable[[list[Any]], Any] = namespace[name]
    return function if track is None else functools.partial(track.run, function)


class _Boxing(ast.NodeTransformer):
    """Calls regions with a list: `y = region_0(a, *x); del x` becomes `Box = [a, *x]; del x; y = region_0(Box)`.

    So only the region holds what is deleted after its call.
    """

    def __init__(self, regions: frozenset[str]) -> None:
        self.regions = regions

    def visit_FunctionDef(self, function: ast.FunctionDef) -> ast.FunctionDef:
        """Box the calls in the function's body."""
        body: list[ast.stmt] = []
        left = list(function.body)
        while left:
            statement = left.pop(0)
            call = self._region_call(statement)
            if call is None:
                body.append(statement)
                continue
            plain = (argument.value if isinstance(argument, ast.Starred) else argument for argument in call.args)
            given = {argument.id for argument in plain if isinstance(argument, ast.Name)}
            dead: list[ast.stmt] = []
            while left and isinstance(deletion := left[0], ast.Delete):
                if not all(isinstance(target, ast.Name) and target.id in given for target in deletion.targets):
                    break
                dead.append(left.pop(0))
            box = ast.Assign([ast.Name(_BOX, ast.Store())], ast.List(call.args, ast.Load()))
            call.args = [ast.Name(_BOX, ast.Load())]
            body += [ast.copy_location(box, statement), *dead, statement]
        function.body = body
        return function

    def _region_call(self, statement: ast.stmt) -> ast.Call | None:
        match statement:
            case ast.Assign(value=ast.Call(func=ast.Name(id=name)) as call) if name in self.regions:
                return call
        return None


_BOX = "Box"
"""No value of a program has this name: theirs are lower case."""
