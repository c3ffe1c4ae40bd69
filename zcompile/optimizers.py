"""Optimizers: refused over parameters from before `compile`, and watched, so that their steps are known."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zcompile.errors import OptimizerError
from zcompile.sharding import Retired

if TYPE_CHECKING:
    from zcompile.compiled import CompiledModule


def watch_optimizers(compiled: CompiledModule, retired: Retired) -> None:
    """Refuse optimizers over parameters from before `compile`, and take note of steps of the ones there are now.

    torch's hooks on optimizers are for all of the process; these go with the compiled module.
    """
    current = {id(parameter) for parameter in compiled.parameters()}
    freshness = compiled._engine.freshness

    def refuse(optimizer: Optimizer, *_: object) -> None:
        for param in _parameters_of(optimizer):
            if id(param) in retired:
                name, kind = retired[id(param)][1], type(optimizer).__name__
                found = f"{kind} holds this parameter from before zcompile.compile; it has no memory any more"
                raise OptimizerError(name, found, f"build it afterwards: {kind}(compiled.parameters(), ...)")

    def note(optimizer: Optimizer, *_: object) -> None:
        if any(id(param) in current for param in _parameters_of(optimizer)):
            freshness.step()

    for handle in (register_optimizer_step_pre_hook(refuse), register_optimizer_step_post_hook(note)):
        weakref.finalize(compiled, handle.remove)


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
