"""Steps of optimizers, their hooks, and scales of gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.optim.optimizer import Optimizer
from torch.optim.optimizer import _foreach_supported_types as optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as clipping_foreach_types

T = TypeVar("T", bound=type)


def supports_foreach(kind: T) -> T:
    """Tell optimizers and clipping that foreach kernels take this kind of DTensor, as torch tells them of DTensor."""
    lists: tuple[list[Any], ...] = (optimizer_foreach_types, clipping_foreach_types)
    for kinds in lists:
        if kind not in kinds:
            kinds.append(kind)
    return kind


def unhooked_step(optimizer: Optimizer) -> None:
    """A step of `optimizer` without the hooks around it: torch wraps the step of every class of optimizers once."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def no_step_hooks() -> dict[str, Any]:
    """Attributes of an optimizer without hooks of its own: a `step` that calls its base class's meets them again."""
    return {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def innermost_hooks(
    optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Have `before` run last of all hooks before a step of `optimizer`, and `after` first of those after it."""
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(handles[-1].id, last=False)
    return handles


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """True if `register_step_pre_hook` was called on the optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks)


def steps_of_scale(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """For how many steps a scale that is in use has stood, int32 [], on the scaler's device."""
    tracker = scaler._growth_tracker
    assert tracker is not None, "scale() makes it"
    return tracker
