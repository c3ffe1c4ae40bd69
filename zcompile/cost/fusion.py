"""Fusion, foretold: which values of a region a compiler that fuses keeps in registers and never writes to memory.

An operation fuses if its result depends element by element, or by sums over a dimension, on what it reads. A value that
such an operation gives, and that nothing but such operations read, need not be stored. Inductor decides by much more
than that; what matters here are the large values that must exist: those that matrix products give and take.
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
        aten.sum,
        aten.var_mean,
        aten.where,
        aten.zeros_like,
    }
)
"""Beside those that torch itself tags as pointwise."""


def fuses(node: fx.Node) -> bool:
    """True for an operation that a compiler merges with its neighbours."""
    if isinstance(data(node).op, Item):
        return fuses(node.all_input_nodes[0])
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or getattr(node.target, "overloadpacket", None) in _FUSING


def is_stored(node: fx.Node) -> bool:
    """True for a value that is written to memory: one that is read by what does not fuse, or given by it."""
    return not fuses(node) or not all(_reads_elements(user) for user in node.users)


def _reads_elements(user: fx.Node) -> bool:
    """True if `user` can take its argument out of a register, itself or through a view."""
    meta = data(user)
    if isinstance(meta.op, (Call, Results)):
        return False
    if meta.view or isinstance(meta.op, Item):
        return all(_reads_elements(later) for later in user.users)
    return isinstance(meta.op, Compute) and fuses(user)
