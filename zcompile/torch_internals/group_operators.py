"""Operators that change how a value is divided over the ranks of a group, for graphs: `torch.ops.zcompile`.

Each waits for what it sends, and gives memory of its own, in which dimensions lie in `order`, the outermost first:
views that graphs take of the whole can be taken of parts. `group` is the name of a process group, and `size` how many
ranks it has; a rank has the part of a dimension that its number in the group says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


@torch.library.custom_op("zcompile::shard", mutates_args=())
def shard(x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str) -> Tensor:
    """Return this rank's part of a value that all ranks have, of each of `outer` runs of all parts along `dim`."""
    rank = _group(group).rank()

    def sharded(y: Tensor, at: Sequence[int]) -> Tensor:
        mine: Tensor = y.unflatten(at[0], (outer, size, -1)).select(at[0] + 1, rank).flatten(at[0], at[0] + 1).clone()
        return mine

    return _in_memory(x, order, [dim], sharded)


@torch.library.custom_op("zcompile::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str) -> Tensor:
    """Return the value of which each rank has a part, of each of `outer` runs of all parts along `dim`."""

    def gathered(y: Tensor, at: Sequence[int]) -> Tensor:
        parts = y.new_empty((size, *y.shape))
        dist.all_gather_into_tensor(parts.view(-1), y.view(-1), group=_group(group))
        return torch.stack([part.unflatten(at[0], (outer, -1)) for part in parts], at[0] + 1).flatten(at[0], at[0] + 2)

    return _in_memory(x, order, [dim], gathered)


@torch.library.custom_op("zcompile::all_to_all", mutates_args=())
def all_to_all(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    """Return this rank's part along `shard_dim` of a value of which each rank has a part along `gather_dim`."""

    def exchanged(y: Tensor, at: Sequence[int]) -> Tensor:
        sent = torch.stack(y.chunk(size, at[1]))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=_group(group))
        return torch.cat(received.unbind(), at[0])

    return _in_memory(x, order, [gather_dim, shard_dim], exchanged)


@torch.library.custom_op("zcompile::all_reduce", mutates_args=())
def all_reduce(x: Tensor, size: int, group: str) -> Tensor:
    """Return the sum of the ranks' values."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group(group))
    return total


@shard.register_fake
def _(x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str) -> Tensor:
    return _in_memory(x, order, [dim], lambda y, at: y.new_empty(_resized(y, at[0], size, 1)))


@all_gather.register_fake
def _(x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str) -> Tensor:
    return _in_memory(x, order, [dim], lambda y, at: y.new_empty(_resized(y, at[0], 1, size)))


@all_to_all.register_fake
def _(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    def made(y: Tensor, at: Sequence[int]) -> Tensor:
        shape = _resized(y, at[0], 1, size)
        shape[at[1]] //= size
        return y.new_empty(shape)

    return _in_memory(x, order, [gather_dim, shard_dim], made)


@all_reduce.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _in_memory(
    x: Tensor, order: Sequence[int], dims: Sequence[int], make: Callable[[Tensor, Sequence[int]], Tensor]
) -> Tensor:
    """Return what `make` makes of `x` with its dimensions in `order`, and of `dims` there, in the order as before."""
    back = [order.index(dim) for dim in range(x.dim())]
    return make(x.permute(*order).contiguous(), [back[dim] for dim in dims]).permute(*back)


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # of torch 2.13, a type of its own


def _resized(x: Tensor, dim: int, now: int, then: int) -> list[int]:
    shape = [*x.shape]
    shape[dim] = shape[dim] // now * then
    return shape
