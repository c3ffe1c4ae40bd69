"""What `torch.compile(model, backend="zcompile")` finds by that name, and loads when it is called.

Where Dynamo compiles nothing of the model it never calls the backend, and each rank would train by itself. So from here
on, steps of optimizers are looked at; nothing else would ever tell.
"""

from __future__ import annotations

from weakref import WeakSet

import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from zcompile.torch_backend import compiler, refuse_unseen

__all__ = ["compiler"]

_OTHERS: WeakSet[Optimizer] = WeakSet()
"""Optimizers that hold nothing of a module which was given to the backend."""


def _before(optimizer: Optimizer, *_: object) -> None:
    if optimizer not in _OTHERS and dist.is_initialized() and dist.get_world_size() > 1:
        refuse_unseen(optimizer, (compiler,), _OTHERS)


register_optimizer_step_pre_hook(_before)
