"""Predicts fusion: which values of a region a fusing compiler keeps in registers and never writes to memory.

An operation fuses if its result depends on its arguments elementwise, or by reductions over a dimension. A value that
such an operation computes, and that only such operations read, need not be stored. Inductor's decisions depend on much
more; what matters here are the large values that must be stored: operands and results of matrix products.
"""

from __future__ import annotations

import torch
from torch import fx

from zcompile.ir.operation import data
from zcompile.ir.ops import Call, Compute, Item, Results

aten = torch.ops.aten
_FUSING = frozenset(
    {
        aten._log_softmax,
        aten._log_softmax_backward_data,
        aten._softmax,
        aten._softmax_backward_data,
        aten._to_copy,
        aten._unsafe_view,
        aten.amax,
        aten.any,
        aten.argmax,
        aten.clone,
        aten.embedding,
        aten.full,
        aten.full_like,
        aten.gather,
        aten.index_select,
        aten.mean,
        aten.native_dropout,
        aten.native_dropout_backward,
        aten.native_layer_norm,
        aten.nll_loss_forward,
        aten.nll_loss_backward,
        aten.ones_like,
        aten.scalar_tensor,
        aten.scatter,
        aten.sum,
        aten.var_mean,
        aten.where,
        aten.zeros_like,
    }
)
"""Fusing operations that torch does not tag as pointwise."""


def fuses(node: fx.Node) -> bool:
    """Return True for an operation that a compiler fuses with its neighbors."""
    if isinstance(data(node).op, Item):
        return fuses(node.all_input_nodes[0])
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or getattr(node.target, "overloadpacket", None) in _FUSING


def is_stored(node: fx.Node) -> bool:
    """Return True for a value that is written to memory, as an operation that does not fuse computes or reads it."""
    return not fuses(node) or not all(_reads_elements(user) for user in node.users)


def _reads_elements(user: fx.Node) -> bool:
    """Return True if `user` can read its argument from a register, directly or through a view."""
    meta = data(user)
    if isinstance(meta.op, (Call, Results)):
        return False
    if meta.view or isinstance(meta.op, Item):
        return all(_reads_elements(later) for later in user.users)
    return isinstance(meta.op, Compute) and fuses(user)
