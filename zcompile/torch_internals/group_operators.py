"""Operators that change how a value is divided over the ranks of a group, for graphs: `torch.ops.zcompile`.

Each waits for what it sends, unless its name says otherwise, and gives memory of its own, in which dimensions lie in
`order`, the outermost first: views that graphs take of the whole can be taken of parts. `group` is the name of a
process group, and `size` how many ranks it has; a rank has the part of a dimension that its number in the group says,
or in zig-zag order, two halves of a part: see `zcompile.torch_internals.ring_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The second is deprecated in torch 2.13."""


@torch.library.custom_op("zcompile::shard", mutates_args=())
def shard(x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str, *, zigzag: bool = False) -> Tensor:
    """Return this rank's part of a value that all ranks have, of each of `outer` runs of all parts along `dim`."""
    rank = group_of_name(group).rank()
    mine = (rank, 2 * size - 1 - rank) if zigzag else (rank,)

    def sharded(y: Tensor, at: Sequence[int]) -> Tensor:
        chunks = y.unflatten(at[0], (outer, len(mine) * size, -1)).unbind(at[0] + 1)
        return torch.stack([chunks[number] for number in mine], at[0] + 1).flatten(at[0], at[0] + 2)

    return _in_memory(x, order, [dim], sharded)


@torch.library.custom_op("zcompile::all_gather", mutates_args=())
def all_gather(
    x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str, *, zigzag: bool = False
) -> Tensor:
    """Return the value of which each rank has a part, of each of `outer` runs of all parts along `dim`."""

    def gathered(y: Tensor, at: Sequence[int]) -> Tensor:
        parts = y.new_empty((size, *y.shape))
        _all_gather(parts.view(-1), y.view(-1), group=group_of_name(group))
        chunks = parts.unflatten(at[0] + 1, (outer, 1 + zigzag, -1)).unbind(at[0] + 2)
        in_order = [*chunks[0].unbind(), *(chunks[1].flip(0).unbind() if zigzag else ())]
        return torch.stack(in_order, at[0] + 1).flatten(at[0], at[0] + 2)

    return _in_memory(x, order, [dim], gathered)


@torch.library.custom_op("zcompile::all_to_all", mutates_args=())
def all_to_all(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    """Return this rank's part along `shard_dim` of a value of which each rank has a part along `gather_dim`."""
    arrived: Tensor = start_all_to_all(x, gather_dim, shard_dim, size, order, group)
    return wait_all_to_all(arrived, gather_dim, shard_dim, size, order, group)  # type: ignore[no-any-return]


@torch.library.custom_op("zcompile::start_all_to_all", mutates_args=())
def start_all_to_all(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    """Return memory in which the parts of `all_to_all` arrive, with dimensions in `order`, one after another.

    What is sent is a copy that the asynchronous work keeps, so that `x` may be freed or reused meanwhile.
    """
    sent = torch.stack(x.permute(*order).contiguous().chunk(size, order.index(shard_dim)))
    arriving: Tensor = torch.ops._c10d_functional.all_to_all_single(sent, [1] * size, [1] * size, group)
    return arriving


@torch.library.custom_op("zcompile::wait_all_to_all", mutates_args=())
def wait_all_to_all(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    """Return what `all_to_all` does, from the parts that `start_all_to_all` with the same arguments lets arrive.

    On CUDA the current stream waits, so that it reads, and may reuse, their memory after they have arrived.
    """
    arrived = torch.ops._c10d_functional.wait_tensor(x)
    back = [order.index(dim) for dim in range(len(order))]
    return torch.cat(arrived.unbind(), back[gather_dim]).permute(*back)


@torch.library.custom_op("zcompile::all_reduce", mutates_args=())
def all_reduce(x: Tensor, size: int, group: str) -> Tensor:
    """Return the sum of the ranks' values."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_of_name(group))
    return total


@shard.register_fake
def _(x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str, *, zigzag: bool = False) -> Tensor:
    return _in_memory(x, order, [dim], lambda y, at: y.new_empty(_resized(y, at[0], size, 1)))


@all_gather.register_fake
def _(x: Tensor, dim: int, outer: int, size: int, order: list[int], group: str, *, zigzag: bool = False) -> Tensor:
    return _in_memory(x, order, [dim], lambda y, at: y.new_empty(_resized(y, at[0], 1, size)))


@all_to_all.register_fake
def _(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    def made(y: Tensor, at: Sequence[int]) -> Tensor:
        shape = _resized(y, at[0], 1, size)
        shape[at[1]] //= size
        return y.new_empty(shape)

    return _in_memory(x, order, [gather_dim, shard_dim], made)


@start_all_to_all.register_fake
def _(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    shape = _resized(x, shard_dim, size, 1)
    return x.new_empty((size, *(shape[dim] for dim in order)))


@wait_all_to_all.register_fake
def _(x: Tensor, gather_dim: int, shard_dim: int, size: int, order: list[int], group: str) -> Tensor:
    back = [order.index(dim) for dim in range(len(order))]
    shape = _resized(x[0], back[gather_dim], 1, size)
    return x.new_empty(shape).permute(*back)


@all_reduce.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _in_memory(
    x: Tensor, order: Sequence[int], dims: Sequence[int], make: Callable[[Tensor, Sequence[int]], Tensor]
) -> Tensor:
    """Return what `make` makes of `x` with its dimensions in `order`, and of `dims` there, in the order as before."""
    back = [order.index(dim) for dim in range(x.dim())]
    return make(x.permute(*order).contiguous(), [back[dim] for dim in dims]).permute(*back)


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the process group of this name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]  # of torch 2.13, a type of its own


def _resized(x: Tensor, dim: int, now: int, then: int) -> list[int]:
    shape = [*x.shape]
    shape[dim] = shape[dim] // now * then
    return shape
