"""Side effects of the operations of a traced graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zcompile.torch_internals.operators import (
    HigherOrderOperator,
    OpOverload,
    defaults_of,
    is_wait_for_collective,
    writes_arguments,
)
from zcompile.torch_internals.ring_attention import kernel_of


def is_pure(node: fx.Node) -> bool:
    """Return True for an operation that may be recomputed: it gives the same numbers, if need be by replaying draws."""
    target = node.target
    if not isinstance(target, OpOverload) or is_collective(node) or is_wait(node):
        return False
    return not writes_arguments(target) and (not is_random(node) or target.namespace == "aten")


def is_collective(node: fx.Node) -> bool:
    """Return True for a collective of the model's own code, such as DTensor's."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COMMUNICATING and not is_wait(node)


def changes_division(node: fx.Node) -> bool:
    """Return True for an operation that changes how a value is divided over the ranks of a sequence."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "zcompile"


def is_ring(node: fx.Node) -> bool:
    """Return True for attention to tokens that ranks divide, which both computes and communicates."""
    return kernel_of(node.target) is not None


def group_of(node: fx.Node) -> Any:
    """Return the group of a collective, or its name, which is the last argument."""
    return node.kwargs.get("group", node.args[-1] if node.args else None)


_COMMUNICATING = ("_c10d_functional", "_dtensor", "zcompile")
"""The second has `shard_dim_alltoall`, with which DTensors on GPUs change the dimension that they are sharded on."""


def is_wait(node: fx.Node) -> bool:
    """Return True for the wait for such a collective."""
    return isinstance(node.target, OpOverload) and is_wait_for_collective(node.target)


def is_opaque(target: object) -> bool:
    """Return True for an operation whose schema may not declare all its effects: custom or higher-order.

    ATen's batch normalization writes running statistics that its schema does not declare.
    """
    if not isinstance(target, OpOverload):
        return isinstance(target, HigherOrderOperator)
    return target.namespace not in ("aten", "prims", "zcompile") or target.overloadpacket.__name__ in _UNDECLARED


_UNDECLARED = frozenset({"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})


def is_random(node: fx.Node) -> bool:
    """Return True for an operation that draws random numbers; attention does so only with dropout."""
    return draws(node.target, node.args, node.kwargs)


def draws(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operation draws random numbers with these arguments."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    defaults = defaults_of(target)
    given = {**dict(zip(defaults, args, strict=False)), **kwargs}
    return bool({**defaults, **given}.get("dropout_p", 1.0))
