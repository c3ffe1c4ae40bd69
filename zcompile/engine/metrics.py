"""Metrics: what a loss function gives beside the loss, `(loss, {"accuracy": tensor, ...})`, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zcompile.errors import OptionError
from zcompile.torch_internals.pytree import tree_leaves

StepResult = torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What a train step gives: the loss, or the loss and metrics, detached."""


def has_metrics(result: object) -> bool:
    """True for a loss with metrics beside it."""
    return type(result) is tuple and len(result) == 2 and type(result[1]) is dict


def split_results(result: Any) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """The loss, and metrics if there are."""
    return result if has_metrics(result) else (result, None)


def without_gradients(result: Any) -> Any:
    """What a loss function gives, with metrics that are detached; traced with it."""
    if not has_metrics(result):
        return result
    loss, metrics = result
    return loss, {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in metrics.items()}


def check_metrics(metrics: dict[Any, bool]) -> None:
    """Raise OptionError if a metric has a name that is no text, or is no tensor: True by its name."""
    for name, is_tensor in metrics.items():
        if not isinstance(name, str):
            raise OptionError("loss_fn", f"gives a metric called {name!r}", "name metrics with strings")
        if not is_tensor:
            problem = f"gives a metric {name!r} that is no tensor"
            raise OptionError("loss_fn", problem, "give a tensor, or keep what is none out of the metrics")


class FlatResults:
    """Lets a traced call give its loss and metrics one behind the other, and remembers the names of these."""

    def __init__(self) -> None:
        self._found: dict[Any, bool] | None = None

        def note(*metrics: tuple[Any, bool]) -> int:
            self._found = dict(metrics)
            return 0

        # Called while torch.compile traces, not by what it compiles: the names are in no graph.
        self._note = torch.compiler.assume_constant_result(note)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Those of the last call that was traced; None if it gives no metrics.

        Raises:
            OptionError: a metric has no name, or is no tensor.
        """
        if self._found is None:
            return None
        check_metrics(self._found)
        return tuple(self._found)

    def __call__(self, result: Any) -> Any:
        """A tensor as it is; of anything else the tensors in it, each in memory of its own."""
        if isinstance(result, torch.Tensor):
            return _plain(result)
        if has_metrics(result):
            self._note(*((name, isinstance(one, torch.Tensor)) for name, one in result[1].items()))
        leaves = [_plain(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return (*leaves[:1], *(leaf.detach().clone() for leaf in leaves[1:]))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
