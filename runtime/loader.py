"""The loader: compiles a printed program's text into a function."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Mapping, Set
from time import perf_counter
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
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)

    timed = frozenset() if track is None else functions.keys()
    tree = ast.fix_missing_locations(_Prepared(regions.keys(), timed).visit(ast.parse(text, filename)))
    code = compile(tree, filename, "exec")

    def loaded(called: Mapping[str, Callable[..., Any]]) -> Callable[[list[Any]], Any]:
        stamp = None if track is None else track.stamps.append
        namespace: dict[str, Any] = {"torch": torch, _STAMP: stamp, _NOW: perf_counter, **called}
        exec(code, namespace)
        function: Callable[[list[Any]], Any] = namespace[name]
        return function

    if track is None:
        return loaded(functions)
    shown = functools.cache(lambda: loaded({called: track.shown(one) for called, one in functions.items()}))
    return functools.partial(track.run, loaded(functions), shown)


class _Prepared(ast.NodeTransformer):
    """Calls regions with a list, and takes the time after each line that calls one of the functions `timed`.

    `y = region_0(a, *x); del x` becomes `Box = [a, *x]; del x; y = region_0(Box); Stamp(Now())`, so that only the
    region holds what is deleted after its call.
    """

    def __init__(self, regions: Set[str], timed: Set[str]) -> None:
        self.regions, self.timed = regions, timed

    def visit_FunctionDef(self, function: ast.FunctionDef) -> ast.FunctionDef:
        """Box the calls in the function's body."""
        body: list[ast.stmt] = []
        left = list(function.body)
        while left:
            statement = left.pop(0)
            call = self._region_call(statement)
            if call is None:
                body += [statement, *self._stamp(statement)]
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
            body += [ast.copy_location(box, statement), *dead, statement, *self._stamp(statement)]
        function.body = body
        return function

    def _stamp(self, statement: ast.stmt) -> list[ast.stmt]:
        if self.timed.isdisjoint(node.id for node in ast.walk(statement) if isinstance(node, ast.Name)):
            return []
        return ast.increment_lineno(ast.parse(f"{_STAMP}({_NOW}())"), statement.lineno - 1).body

    def _region_call(self, statement: ast.stmt) -> ast.Call | None:
        match statement:
            case ast.Assign(value=ast.Call(func=ast.Name(id=name)) as call) if name in self.regions:
                return call
        return None


_BOX, _STAMP, _NOW = "Box", "Stamp", "Now"
"""No value of a program has these names: theirs are lower case."""
