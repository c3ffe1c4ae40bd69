"""The entry point of `torch.compile(model, backend="zcompile")`, which torch loads by that name.

If Dynamo compiles no graph of the model, it never calls the backend, and each rank would train alone. So importing this
module installs a check before every optimizer step; nothing else would notice.
"""

from __future__ import annotations

from weakref import WeakSet

import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from zcompile.torch_backend import compiler, refuse_unseen

__all__ = ["compiler"]

_OTHERS: WeakSet[Optimizer] = WeakSet()
"""Optimizers without parameters of a module that was given to the backend."""


def _before(optimizer: Optimizer, *_: object) -> None:
    if optimizer not in _OTHERS and dist.is_initialized() and dist.get_world_size() > 1:
        refuse_unseen(optimizer, (compiler,), _OTHERS)


register_optimizer_step_pre_hook(_before)
