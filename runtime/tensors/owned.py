"""Tensors that one rank owns whole: parameters with an owner, their gradients, and optimizer state in their shape.

    weight [8, 6], owner 1          rank 0: [0, 6]          rank 1: [8, 6]          rank 2: [0, 6]

To torch such a DTensor is `Shard(0)` with empty shards on the other ranks. That is right for functions that treat each
element by itself, and for norms: clipping, GradScaler and AdamW work on it unchanged. All others in torch compute from
the shape which rows a rank has, which would be wrong here; they are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zcompile.errors import ParameterError
from zcompile.torch_internals.dtensor import StridedShard, local_tensor, with_local

_QUERIES = (
    "__get__ __set__ __delete__ __len__ __repr__ __hash__ __format__ dim ndimension size stride numel nelement"
    " element_size is_floating_point is_complex is_contiguous data_ptr storage_offset untyped_storage get_device"
    " is_shared is_pinned register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ detach detach_"
)
_MOVES = "clone to cpu float double half bfloat16 type_as contiguous zeros_like empty_like ones_like full_like copy"
_OF_ELEMENTS = (
    "abs add sub subtract rsub mul multiply div divide true_divide neg negative pow square sqrt rsqrt reciprocal exp"
    " expm1 log log1p log2 log10 sign lerp addcmul addcdiv clamp clip clamp_min clamp_max minimum maximum isfinite"
    " isinf isnan nan_to_num eq ne lt le gt ge masked_fill where floor ceil round trunc tanh sigmoid logical_not"
    " logical_and logical_or zero fill"
)
_OPERATORS = "add sub mul truediv pow neg abs eq ne lt le gt ge"
_SUMS = "sum norm linalg_vector_norm"
_KNOWN = frozenset(
    [*_QUERIES.split(), *_SUMS.split()]
    + [f"{name}{place}" for name in f"{_MOVES} {_OF_ELEMENTS}".split() for place in ("", "_")]
    + [f"__{before}{name}__" for name in _OPERATORS.split() for before in ("", "i", "r")]
)
"""Functions whose result on a rank depends only on its own part of the arguments."""
_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
"""Prefixes of such functions for lists of tensors."""
_FIX = "take its full_tensor() on every rank, or compute it in an optimizer's step, which has it whole on its owner"


def owner_of(tensor: object) -> int | None:
    """The rank, of those that shard, that owns a tensor whole; None if its rows are divided, or every rank has it."""
    return getattr(tensor, "zcompile_owner", None) if isinstance(tensor, DTensor) else None


def set_owner(tensor: DTensor, owner: int | None) -> None:
    """Set the rank that owns `tensor`, whose class must support it."""
    if owner is not None:
        tensor.zcompile_owner = owner  # type: ignore[attr-defined]


def is_here(tensor: DTensor) -> bool:
    """True on the rank that owns `tensor`."""
    return tensor.device_mesh.get_local_rank(_dimension(tensor)) == owner_of(tensor)


def check_owned(func: Callable[..., Any], args: Sequence[Any]) -> int | None:
    """The owner of the first of such tensors among arguments, if there are any: `func` may then be called.

    Raises:
        ParameterError: it would have to know which rows a rank has.
    """
    owned = [one for one in _flat(args) if owner_of(one) is not None]
    if not owned:
        return None
    name = getattr(func, "__name__", "an operation")
    if name.startswith(_LISTS):
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        together: list[Sequence[Any]] = list(itertools.zip_longest(*lists))
    elif name in _KNOWN and "nuc" not in [arg for arg in args if isinstance(arg, str)]:  # a norm of matrices
        together = [[one for one in _flat(args) if name not in ("__get__", "__set__")]]
    else:
        refuse(owned[0], name)
    for some in together:
        # One that every rank has would be divided by rows to go with it. A number goes with anything.
        owners = {owner_of(one) for one in some if isinstance(one, DTensor) and one.ndim}
        if len(owners) > 1:
            fix = "let both be whole on one rank, as what an optimizer makes of a parameter is, or take full_tensor()"
            refuse(owned[0], name, "takes it together with a tensor that other ranks have", fix)
    return owner_of(owned[0])


def keep_owner(
    result: Any, args: Sequence[Any], func: Callable[..., Any], explain: Callable[[DTensor], object]
) -> None:
    """Mark results of `func` on owned tensors as owned, too; `explain` gives a DTensor a class that supports it.

    Raises:
        ParameterError: a result is divided in another way.
    """
    first = next(one for one in _flat(args) if owner_of(one) is not None)
    for index, one in enumerate(result if isinstance(result, (list, tuple)) else [result]):
        if not isinstance(one, DTensor) or owner_of(one) is not None or not any(p.is_shard() for p in one.placements):
            continue
        like = _like(args, index, first)
        if one.placements != like.placements or one.shape != like.shape:
            refuse(first, getattr(func, "__name__", "an operation"))
        if owner_of(like) is not None:
            explain(one)
            set_owner(one, owner_of(like))


def refuse(tensor: DTensor, name: str, problem: str = "", fix: str = _FIX) -> NoReturn:
    """Raise ParameterError for an unsupported operation."""
    called = getattr(tensor, "zcompile_name", "a gradient or a state of a parameter")
    why = f"is whole on rank {owner_of(tensor)} of those that shard, and {name} {problem or 'needs other rows'}"
    raise ParameterError(called, why, fix)


def sent_by_owner(tensor: DTensor, device: torch.device | None = None) -> torch.Tensor:
    """All of it on every rank, in new memory on `device`, that of the mesh's collectives. Collective."""
    mine, dimension = local_tensor(tensor).detach(), _dimension(tensor)
    place = device or mine.device
    full = mine.to(place, copy=True) if is_here(tensor) else torch.empty(tensor.shape, dtype=mine.dtype, device=place)
    if full.numel() and tensor.device_mesh.size(dimension) > 1:
        sent = full.contiguous().view(-1).view(torch.uint8)  # gloo knows few dtypes
        dist.broadcast(sent, group=tensor.device_mesh.get_group(dimension), group_src=owner_of(tensor))
        full = sent.view(mine.dtype).view(tensor.shape)
    return full


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def chunks_of(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """This rank's chunks of it."""
    return [ChunkStorageMetadata(_origin(tensor), tensor.size())] if is_here(tensor) else []


def write_items_of(name: str, tensor: DTensor) -> list[WriteItem]:
    """The items that this rank writes of it."""
    data = [
        TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
        for chunk in chunks_of(tensor)
    ]
    where = MetadataIndex(name, _origin(tensor))
    return [WriteItem(index=where, type=WriteItemType.SHARD, tensor_data=one) for one in data]


def _origin(tensor: DTensor) -> torch.Size:
    return torch.Size([0] * tensor.ndim)


# -- arguments --------------------------------------------------------------------------------------------------------


def _dimension(tensor: DTensor) -> int:
    """The mesh dimension along which one rank owns it."""
    return next(dim for dim, placement in enumerate(tensor.placements) if placement.is_shard())


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        yield from arg if isinstance(arg, (list, tuple)) else (arg,)


def _like(args: Sequence[Any], index: int, first: DTensor) -> DTensor:
    """The argument that corresponds to the result at `index`."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and index < len(arg)]
    return next((arg[index] for arg in lists if isinstance(arg[index], DTensor)), first)


# -- parts ------------------------------------------------------------------------------------------------------------


Placement = Any
"""A `Shard`, `Replicate` or `Partial` of torch.distributed.tensor, or a `StridedShard`; their base class is private."""


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """`local`, this rank's part, as a DTensor that aliases it, on the device of the mesh or another."""
    stride = contiguous_stride(shape)
    away = local.device.type != mesh.device_type  # `from_local` would copy it
    like = torch.empty_like(local, device="meta") if away else local
    made = DTensor.from_local(like, mesh, placements, run_check=False, shape=shape, stride=stride)
    return with_local(made, local) if away else made


def part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a plain tensor, divided like `like`; a view of it."""
    mesh, placements = like.device_mesh, like.placements
    if owner_of(like) is not None:
        return whole if is_here(like) else whole[:0]
    for dim in reversed(range(mesh.ndim)):  # the last mesh dimension divides first, see `ModelParallel.sharded`
        if isinstance(placement := placements[dim], (Shard, StridedShard)):
            size, at = mesh.size(dim), placement.dim
            each, rank = -(-whole.shape[at] // size), mesh.get_local_rank(dim)
            start, stop = (min(index * each, whole.shape[at]) for index in (rank, rank + 1))
            whole = whole.narrow(at, start, stop - start)
    return whole


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
