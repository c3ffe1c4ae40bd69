"""Optimizer steps, step hooks, and GradScaler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.optimizer import _foreach_supported_types as optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as clipping_foreach_types

T = TypeVar("T", bound=type)


def supports_foreach(kind: T) -> T:
    """Register a DTensor subclass for the foreach kernels of optimizers and clipping, as torch does with DTensor."""
    lists: tuple[list[Any], ...] = (optimizer_foreach_types, clipping_foreach_types)
    for kinds in lists:
        if kind not in kinds:
            kinds.append(kind)
    return kind


def unhooked_step(optimizer: Optimizer) -> None:
    """Step `optimizer` without hooks, which are in a wrapper that torch puts around each class's `step`."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def no_step_hooks() -> dict[str, Any]:
    """Attributes of an optimizer without hooks, because a `step` that calls its base class's would run them again."""
    return {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def innermost_hooks(
    optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Register `before` as the last step pre-hook of `optimizer`, and `after` as the first post-hook."""
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(handles[-1].id, last=False)
    return handles


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """True if the optimizer has hooks of `register_step_pre_hook`."""
    return bool(optimizer._optimizer_step_pre_hooks)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """True if there are hooks before or after the optimizer's step, or any's, that are not zcompile's."""
    of_all = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own) or not all(hook.__module__.startswith("zcompile.") for hook in of_all)


def steps_of_scale(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Number of steps since the scale last changed, an int32 0-d tensor on the scaler's device, after `scale()`."""
    tracker = scaler._growth_tracker
    assert tracker is not None, "scale() initializes it"
    return tracker
