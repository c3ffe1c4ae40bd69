"""Messages: their layout, and how parameters and gradients are packed and unpacked.

A message holds, for each rank, the padded shards of all its parameters end to end: [size, total], flat. A single
parameter that divides evenly and is not cast needs no copy. Parameters that one rank owns are sent whole, end to end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from zcompile.ir.layout import Param
from zcompile.runtime.arena import Places
from zcompile.runtime.device import is_gpu
from zcompile.runtime.groups import AxisCommunicator
from zcompile.torch_internals.distributed import chunk_cat, copy_all


def sent_in_place(
    sent: list[torch.Tensor],
    arrived: list[torch.Tensor],
    owners: list[int | None],
    communicator: AxisCommunicator,
    *,
    always: bool,
) -> list[torch.Tensor]:
    """What to send: this rank's slot in `arrived` if the message is cast, has an owner, or `always`; else the shard.

    `owners`: the rank that sends a whole message; None where each rank sends its part.
    """
    own = [_slot(full, owner, communicator) for full, owner in zip(arrived, owners, strict=True)]
    copied = [
        always or owner is not None or shard.dtype is not full.dtype
        for shard, full, owner in zip(sent, arrived, owners, strict=True)
    ]
    copy_all([*itertools.compress(own, copied)], [*itertools.compress(sent, copied)])
    return [place if copies else shard for place, shard, copies in zip(own, sent, copied, strict=True)]


def _slot(full: torch.Tensor, owner: int | None, communicator: AxisCommunicator) -> torch.Tensor:
    """The part of a message that this rank sends."""
    if owner is None:
        return full.view(communicator.size, -1)[communicator.rank]
    return full if owner == communicator.rank else full[:0]


def piece_inside(
    param: Param, grad: torch.Tensor, dtype: torch.dtype, size: int, start: int, stop: int, *, packed: bool
) -> torch.Tensor:
    """Elements [start, stop) of the part of a gradient that each of `size` inner ranks gets, [size, stop - start].

    That part is a padded shard or, end to end, those of a rank's outer group: of every `size`-th rank.
    """
    each, found = param.shard_numel, []
    for first in range(start // each, -(-stop // each)):
        begin, end = (min(max(edge - first * each, 0), each) for edge in (start, stop))
        ranks = range(first * size, (first + 1) * size)
        found.append(piece_of(param, grad, dtype, ranks, begin, end, packed=packed))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def piece_of(
    param: Param, grad: torch.Tensor, dtype: torch.dtype, ranks: range, start: int, stop: int, *, packed: bool
) -> torch.Tensor:
    """Elements [start, stop) of some ranks' padded shards of a gradient, [ranks, stop - start]: whole rows of dim 0."""
    if not packed:
        return grad.view(param.shards, -1)[ranks.start : ranks.stop, start:stop]
    row = param.row_numel
    begin, end = start // row, stop // row
    rows = torch.empty(len(ranks), end - begin, *param.shape[1:], dtype=dtype, device=grad.device)
    mine = grad[ranks.start * param.rows : ranks.stop * param.rows]
    whole = len(mine) // param.rows
    if whole:  # the ranks that have as many rows as the first: one kernel for all of them
        rows[:whole].copy_(mine[: whole * param.rows].unflatten(0, (whole, param.rows))[:, begin:end])
    if whole < len(ranks):
        rest = mine[whole * param.rows :][begin:end]
        rows[whole, : len(rest)].copy_(rest)
        rows[whole, len(rest) :].zero_()
        rows[whole + 1 :].zero_()
    return rows.view(len(ranks), -1)


def flattened(grad: torch.Tensor | None) -> torch.Tensor:
    """A gradient as contiguous 1-D: a view, except of an expanded scalar, which can be neither sent nor added to."""
    assert grad is not None, "messages hold parameters with gradients only"
    return grad.reshape(-1).contiguous()


def joined(grads: Sequence[torch.Tensor | None], dtype: torch.dtype | None) -> torch.Tensor:
    """Gradients end to end, 1-D; a view of a single contiguous one of the right dtype."""
    flat = [flattened(grad).to(dtype or grad.dtype) for grad in grads if grad is not None]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def pack(
    params: Sequence[Param],
    grads: Sequence[torch.Tensor | None],
    size: int,
    dtype: torch.dtype | None,
    places: Places,
) -> torch.Tensor:
    """Gradients as reduce_scatter sends them: for each rank the padded shards of all parameters, [size, total] flat.

    A single gradient that divides evenly and needs no cast is sent as it is, unless it is an expanded scalar.
    """
    given = [grad for grad in grads if grad is not None]
    first = given[0]
    if len(params) == 1 and params[0].padded_numel == params[0].numel and dtype in (None, first.dtype):
        return flattened(first)
    total = sum([param.shard_numel for param in params])
    packed = places.empty(size * total, dtype or first.dtype).view(size, total)
    if is_gpu(packed.device) and all((grad.dtype, packed.dtype) in _PACKED_AT_ONCE for grad in given):
        chunk_cat(given, size, packed)
        return packed.view(-1)
    offset = 0
    for param, grad in zip(params, given, strict=True):
        _copy_rows(packed[:, offset : offset + param.shard_numel], grad.reshape(-1))
        offset += param.shard_numel
    return packed.view(-1)


_PACKED_AT_ONCE = {
    *((dtype, dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    (torch.bfloat16, torch.float32),
}
"""The (from, to) dtypes that CUDA's `_chunk_cat` packs; it supports no other casts."""


def _copy_rows(target: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill `target`, [size, width], row by row from `flat`, and the rest with zeros."""
    width = target.shape[1]
    whole = flat.numel() // width if width else 0
    target[:whole].copy_(flat[: whole * width].view(whole, width))
    target[whole:].zero_()
    if rest := flat.numel() - whole * width:
        target[whole, :rest].copy_(flat[whole * width :])


def unpack(arrived: torch.Tensor, params: Sequence[Param], places: Places | None) -> list[torch.Tensor]:
    """Full parameters of a gathered message: a single one is a view of it, several are copied out."""
    if len(params) == 1:
        return [arrived[: params[0].numel].view(params[0].shape)]
    if params[0].owner is not None:
        wholes = arrived.split([param.numel for param in params])
        return [whole.view(param.shape) for whole, param in zip(wholes, params, strict=True)]
    size = max(params[0].shards, 1)
    rows = arrived.view(size, -1)
    widths = [param.shard_numel for param in params]
    parts = rows.split(widths, dim=1)
    # In a world of one the parts are the shards themselves, contiguous already: nothing is copied.
    if size > 1:
        places = places or Places(None, arrived.device)
        parts = tuple(places.empty(part.numel(), part.dtype).view_as(part) for part in parts)
        torch.split_with_sizes_copy(rows, widths, dim=1, out=parts)
    apart = [part.reshape(-1) for part in parts]
    return [flat[: param.numel].view(param.shape) for flat, param in zip(apart, params, strict=True)]
