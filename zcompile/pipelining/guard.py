"""What the program of a step counts on: it was traced once, and runs for what is as it was then."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zcompile.engine.module_guards import HookWatch, TreeWatch
from zcompile.engine.step_trace import Called
from zcompile.errors import ModelError, OptionError

_AGAIN = "make a new train step of the model as it is to be trained"


class StepGuard:
    """A model, and the first micro-batch that a step of it was traced with."""

    def __init__(self, model: nn.Module, called: Called) -> None:
        self._model, self._tree, self._hooks = model, TreeWatch(model), HookWatch(model, itself=True)
        self._flags, self._text = _flags(model), self._hooks.text(0)
        self._batch = [_kind(leaf) for leaf in called.leaves()]

    def check(self, called: Called) -> None:
        """Return if nothing has changed that was traced.

        Raises:
            OptionError: the batch has tensors of other shapes or dtypes, or other constants.
            ModelError: the model has other modules, modes, frozen parameters or hooks.
        """
        batch = [_kind(leaf) for leaf in called.leaves()]
        if batch != self._batch:
            problem = f"has micro-batches of {', '.join(batch)}, and was traced with {', '.join(self._batch)}"
            raise OptionError(
                "batch", problem, "give batches of one size: a pipeline's program is for that of the first"
            )
        if self._tree.has_changed() or self._hooks.text(0) != self._text:
            raise ModelError(type(self._model).__name__, "has other modules or hooks than at the first step", _AGAIN)
        flags = _flags(self._model)
        for name, flag in flags.items():
            if flag != self._flags.get(name):
                subject = name or type(self._model).__name__
                raise ModelError(subject, f"is {flag} now, and was {self._flags.get(name)} at the first step", _AGAIN)


def _flags(model: nn.Module) -> dict[str, str]:
    """In which mode modules are, and which parameters are trained."""
    modes = {path: "training" if module.training else "evaluating" for path, module in model.named_modules()}
    trained = {name: "trained" if one.requires_grad else "frozen" for name, one in model.named_parameters()}
    return {**modes, **trained}


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
