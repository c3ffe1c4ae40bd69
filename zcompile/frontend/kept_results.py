"""Which results of a training call are kept: with `chunk=` or `sequence=`, what only stands beside a loss is not.

A model that returns its logits beside the loss, as those of Transformers do, would have them as a whole, which nothing
but a reader of the logits needs. A stand-in takes their place, which refuses to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from zcompile.errors import ResultError
from zcompile.ir.operation import dependents, line_of
from zcompile.torch_internals.pytree import tree_leaves


class NotKept:
    """Takes the place of a tensor that no rank has as a whole; whatever reads it raises `error`."""

    def __init__(self, error: ResultError) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.error.subject}>"

    def __getattr__(self, name: str) -> NoReturn:
        raise self.__dict__.get("error") or AttributeError(name)

    def _refuse(self, *_: object) -> NoReturn:
        raise self.error

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise next(leaf.error for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __getitem__ = __len__ = __iter__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


def without_wide_results(
    module: fx.GraphModule, capture: Callable[[fx.GraphModule], Callable[..., Any]]
) -> Callable[..., Any]:
    """Capture one of Dynamo's graphs without its wide results; return a callable with stand-ins for them.

    Wide is a result with gradients that has more than half the elements of the largest value, and from which a number
    with gradients, the loss, is computed that is returned as well.
    """
    results: Any = module.graph.output_node().args[0]
    left_out = {index: NotKept(_error(index, node)) for index, node in _wide(module.graph, results)}
    if not left_out:
        return capture(module)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    graph.output(tuple(fx.map_arg(r, copies.__getitem__) for i, r in enumerate(results) if i not in left_out))
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    compiled, count = capture(made), len(results)

    def run(*args: Any) -> tuple[Any, ...]:
        kept = iter(compiled(*args))
        return tuple(left_out[index] if index in left_out else next(kept) for index in range(count))

    return run


def _wide(graph: fx.Graph, results: Sequence[Any]) -> list[tuple[int, fx.Node]]:
    given = {node: node.meta.get("example_value") for node in graph.nodes if node.op not in ("placeholder", "get_attr")}
    sizes = {node: value.numel() for node, value in given.items() if isinstance(value, torch.Tensor)}
    trained = [(i, r) for i, r in enumerate(results) if r in sizes and given[r].requires_grad]
    losses = {result for _, result in trained if given[result].dim() == 0}
    wide = [(i, r) for i, r in trained if r not in losses and sizes[r] * 2 > max(sizes.values())]
    return [(index, result) for index, result in wide if not losses.isdisjoint(dependents([result]))]


def _error(index: int, node: fx.Node) -> ResultError:
    line = line_of(node)
    problem = "was not kept: with chunk= or sequence= nothing that is as wide as this exists as a whole"
    fix = "read the loss alone, compute what you want of it within the model, or leave the option out"
    return ResultError(f"result {index} of the model{f' ({line})' if line else ''}", problem, fix)
