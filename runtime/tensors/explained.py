"""DTensors whose torch collectives report which ranks they wait for, and name those that stayed away.

`clip_grad_norm_`, `full_tensor()` and the like use torch's collectives outside of programs: a rank that leaves one out
would leave the others with an error of gloo's that names neither ranks nor calls.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.multiprocessing.reductions import StorageWeakRef

from zcompile.errors import ParameterError
from zcompile.runtime.tensors.draws import ALONG, OF_WHOLE, Draw
from zcompile.runtime.tensors.owned import (
    check_owned,
    chunks_of,
    keep_owner,
    owner_of,
    refuse,
    sent_by_owner,
    set_owner,
    write_items_of,
)
from zcompile.runtime.waits import Waits, is_of_collective
from zcompile.torch_internals.dispatch import no_torch_function, subclasses_dispatched
from zcompile.torch_internals.dtensor import all_laid_out_like, copyable, local_tensor, with_local
from zcompile.torch_internals.optimizers import supports_foreach
from zcompile.torch_internals.pytree import tree_leaves


@supports_foreach
class ExplainedDTensor(DTensor):
    """A sharded gradient, or a sum over shards. Copies and pickles of it are plain DTensors."""

    zcompile_waits: weakref.ref[Waits] | None = None
    """Those of the model's ranks. Weak: a cycle through tensors that autograd holds would never be freed."""
    zcompile_owner: int | None = None
    """The rank that owns all of it, if there is one: see `runtime.tensors.owned`."""
    zcompile_copied: bool = False
    """True for a view of rows that this rank lacks, which torch has gathered into a copy: writes would be lost."""

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As DTensor's. Collective.

        Raises:
            GroupError: names the ranks that have not come, and the calling line.
            ParameterError: one rank owns it, and `placements` are not all `Replicate`.
        """
        if self.zcompile_owner is not None:
            wanted = kwargs.get("placements", args[1] if len(args) > 1 else None)
            if wanted is None or any(not isinstance(placement, Replicate) for placement in wanted):
                refuse(self, "redistribute")
            return DTensor.from_local(self.full_tensor(), self.device_mesh, list(wanted), run_check=False)
        with watched(self, "redistribute"):
            return super().redistribute(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As DTensor's. Collective.

        Raises:
            GroupError: names the ranks that have not come, and the calling line.
        """
        with watched(self, "full_tensor"):
            if self.zcompile_owner is not None:
                return sent_by_owner(self)
            return super().full_tensor(grad_placements=grad_placements)

    def __deepcopy__(self, _: object) -> DTensor:
        """A copy with memory of its own; torch's deepcopy fails on a view of a larger storage."""
        return laid_out_like(self, local_tensor(self).clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain DTensor, for readers without zcompile.

        Raises:
            ParameterError: one rank owns it, which a plain DTensor cannot express.
        """
        if self.zcompile_owner is not None:
            refuse(self, "pickling", fix="save its full_tensor(), or the model by compiled.save_checkpoint(folder)")
        return copyable(self).__reduce_ex__(protocol)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """The parts that torch.distributed.checkpoint writes on this rank."""
        items: list[Any] = super().__create_write_items__(fqn, object) if self.zcompile_owner is None else []
        return items if self.zcompile_owner is None else write_items_of(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        """The parts that torch.distributed.checkpoint reads on this rank."""
        if self.zcompile_owner is not None:
            return chunks_of(self)
        chunks: list[Any] = super().__create_chunk_list__()
        return chunks

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The memory that torch.distributed.checkpoint writes from and reads into."""
        return local_tensor(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; sums over shards in its result are explained, and reduced when they are read.

        Raises:
            GroupError: names the ranks that have not come, and the calling line.
            ParameterError: some of its arguments are plain tensors, or it does not support tensors that a rank owns.
        """
        if func in _READS and (number := _number_of(args[0])) is not None:
            return func(number, *args[1:], **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in OF_WHOLE or (name in ALONG and (len(args) > 1 or kwargs)):
            return drawn(func, args, kwargs or {})
        held = first_held(args)
        if held is not None and held.zcompile_copied:
            check_not_written(func, args, kwargs or {})
        args, given = with_rows(func, args, kwargs or {}), (*args, *(kwargs or {}).values())
        owner = check_owned(func, given)
        try:
            with explained(func, args), no_torch_function():
                result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if needs_all(error):
                raise unknown(func, held) from error
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            problem = f"are sharded in part: {getattr(func, '__name__', 'an operation')} is given plain tensors, too"
            fix = "use every parameter within what is compiled: the gradients of other parameters are not averaged"
            raise ParameterError("gradients", problem, fix) from error
        if held is not None:
            if name in _NORMS and isinstance(result, DTensor):
                # Reduce it now: torch would take a sum of such partial norms for a sum of norms.
                result = made_whole(result, held, "norm")
            explain_results(func, result, given, waits_of(held))
            if owner is not None:
                keep_owner(result, given, func, explainer(given))
        return result


def explain(tensor: DTensor, waits: Waits | None) -> ExplainedDTensor:
    """Turn `tensor` itself into one whose collectives are explained."""
    tensor.__class__ = ExplainedDTensor
    assert isinstance(tensor, ExplainedDTensor), "its class was set"
    tensor.zcompile_waits = None if waits is None else weakref.ref(waits)
    return tensor


def gradients_like(
    parameters: Sequence[ExplainedDTensor], parts: Sequence[torch.Tensor], waits: Waits | None
) -> list[ExplainedDTensor]:
    """Gradients of parameters, aliasing `parts`, this rank's parts of the same shapes and dtypes."""
    made: list[Any] = all_laid_out_like(parameters, parts, ExplainedDTensor)
    reference = None if waits is None else weakref.ref(waits)
    for gradient, parameter in zip(made, parameters, strict=True):
        gradient.zcompile_waits = reference
        gradient.zcompile_owner = parameter.zcompile_owner
    return made


def explain_results(func: Callable[..., Any], result: Any, given: Sequence[Any], waits: Waits | None) -> None:
    """Explain the results of `func`: what is computed from them may be a sum over shards.

    Of operations on lists, which optimizers use, only such sums. State that an optimizer step creates stays plain
    DTensors, and so do its views: some compile their steps, and torch.compile expects that class.
    """
    name = getattr(func, "__name__", "")
    alone = not name.startswith("_foreach_")
    if alone and (waits is None or waits.reporting.stepping):
        alone = not name.endswith("_like")
        if alone and name not in _SAME_SHAPE and isinstance(result, DTensor):
            memory = _memory_of(result)  # not the address, which is 0 on a rank without rows
            alone = all(_memory_of(one) != memory for one in given if isinstance(one, DTensor))
    for one in result if isinstance(result, (list, tuple)) else [result]:
        is_new = type(one) is DTensor and one.grad_fn is None and not any(one is arg for arg in given)
        if is_new and (alone or any(placement.is_partial() for placement in one.placements)):
            explain(one, waits).zcompile_copied = name in _VIEWS and _is_copy(one, given)


_VIEWS = frozenset("__getitem__ select narrow chunk split tensor_split unbind unsafe_chunk diagonal __iter__".split())  # noqa: SIM905
"""Functions that return views of some rows, given plain tensors."""


def _is_copy(view: DTensor, given: Sequence[Any]) -> bool:
    """True if an expected view of `given` is a copy. Indexing by tensors and lists always copies."""
    parts = [part for arg in given[1:] for part in (arg if isinstance(arg, tuple) else (arg,))]
    if any(isinstance(part, (list, torch.Tensor)) for part in parts):
        return False
    return all(_memory_of(one) != _memory_of(view) for one in given if isinstance(one, DTensor))


def made_whole(result: DTensor, tensor: ExplainedDTensor | None, what: str) -> DTensor:
    """A sum over the shards of `tensor`, or a norm, after adding its parts. Collective if there are parts."""
    if tensor is None or not any(placement.is_partial() for placement in result.placements):
        return result
    with watched(tensor, what):
        return result.redistribute(placements=[Replicate() if p.is_partial() else p for p in result.placements])


def _memory_of(tensor: DTensor) -> StorageWeakRef:
    return StorageWeakRef(local_tensor(tensor).untyped_storage())


_SAME_SHAPE = ("detach", "to", "float", "double", "cpu")
"""Functions that may return the same memory, for results that are read like their argument."""


def _number_of(tensor: object) -> torch.Tensor | None:
    """The value of a one-element tensor, on every rank; None for anything else. Collective for a sum over shards.

    torch would read this rank's part of the sum. The only element of a shard is read where it is, as torch does.
    """
    if not isinstance(tensor, ExplainedDTensor) or tensor.numel() != 1 or tensor.grad_fn is not None:
        return None
    if any(placement.is_shard() for placement in tensor.placements):
        return None
    with subclasses_dispatched():
        return tensor.full_tensor()


_READING = (
    "item tolist numpy is_nonzero __array__ __float__ __int__ __bool__ __index__ __complex__ __format__".split()  # noqa: SIM905
)
_READS = frozenset(getattr(torch.Tensor, name) for name in _READING) | {torch.is_nonzero}
"""Functions that read the value of a one-element tensor."""


def with_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of a norm or an extreme; a tensor without rows on this rank gets neutral elements."""
    name = getattr(func, "__name__", "")
    if name not in _FILLS or (name in _COMPARES and (len(args) > 1 or kwargs)):
        return args
    place, fill = (2 if name in _NORMS else 1), _FILLS[name]
    if name in _NORMS and _is_negative(args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))):
        fill = 2
    dims = None if name.startswith("_foreach_") else args[place] if len(args) > place else kwargs.get("dim")

    def filled(one: Any) -> Any:
        if not isinstance(one, DTensor) or local_tensor(one).numel() or not one.numel():
            return one
        sizes, limits = local_tensor(one).shape, _limits(one.dtype)
        along = range(len(sizes)) if dims in (None, (), []) else [dims] if isinstance(dims, int) else dims
        if all(sizes[dim] for dim in along):  # without rows, as the result will be
            return one
        return laid_out_like(one, local_tensor(one).new_full([max(size, 1) for size in sizes], limits[fill]))

    return tuple(type(arg)(map(filled, arg)) if type(arg) in (list, tuple) else filled(arg) for arg in args)


def _is_negative(order: object) -> bool:
    """True for the order of a norm that takes the least element, or is dominated by it."""
    return isinstance(order, (int, float)) and order < 0


def _limits(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The least number of a dtype, zero, and the largest number."""
    if dtype.is_floating_point or dtype.is_complex:
        return -math.inf, 0.0, math.inf
    return (False, False, True) if dtype is torch.bool else (torch.iinfo(dtype).min, 0, torch.iinfo(dtype).max)


_NORMS = ("norm", "linalg_vector_norm", "_foreach_norm")
_COMPARES = ("max", "min")
"""Functions that also take another tensor, or a dimension, along which torch gathers all rows."""
_FILLS = {
    **dict.fromkeys(_NORMS, 1),
    **dict.fromkeys(("max", "amax", "_foreach_max"), 0),
    **dict.fromkeys(("min", "amin"), 2),
}
"""The index in `_limits` of the neutral element."""


def drawn(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of `func`, which draws random numbers; see `runtime.tensors.draws`."""
    first = next(leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, ExplainedDTensor))
    name = func.__name__
    check_not_written(func, args, kwargs)
    return Draw(name, first, lambda: watched(first, name), explainer([first])).result(func, args, kwargs)


def needs_all(error: RuntimeError) -> bool:
    """True for errors that torch raises if it does not support an operation on shards."""
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _OF_SHARDS)


_OF_SHARDS = ("Sharding propagation failed", "sharded dim", "unevenly sharded", "tensor subclasses")


def unknown(func: Callable[..., Any], tensor: object) -> ParameterError:
    """The error for an operation that torch does not support on shards."""
    name = getattr(func, "__name__", "an operation")
    called = getattr(tensor, "zcompile_name", "a gradient, or what was made of a shard")
    fix = "take its full_tensor() on every rank; give a parameter its values before zcompile.compile"
    return ParameterError(called, f"{name} needs all of a tensor that is sharded", fix)


def check_not_written(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse to write to rows that were gathered to be read.

    Raises:
        ParameterError: `func` writes to the first of `args`.
    """
    name, first = getattr(func, "__name__", ""), args[0] if args else None
    writes = name.endswith("_") and (not name.endswith("__") or name == "__setitem__" or name.startswith("__i"))
    if writes and name != "__index__" and isinstance(first, ExplainedDTensor) and first.zcompile_copied:
        problem = f"{name} writes to a part of a tensor that other ranks have a part of: a copy, and the write is lost"
        raise ParameterError("a view of a shard", problem, "write by indices, tensor[rows] = values, on every rank")


def explainer(args: Sequence[Any]) -> Callable[[DTensor], object]:
    """Explains results with the waits of the first such tensor in `args`."""
    tensor = first_held(args)
    waits = None if tensor is None else waits_of(tensor)
    return lambda made: explain(made, waits)


def laid_out_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor divided like `tensor` over another local tensor."""
    made = with_local(tensor, local)
    if (owner := owner_of(tensor)) is not None:
        explain(made, waits_of(tensor) if isinstance(tensor, ExplainedDTensor) else None)
        set_owner(made, owner)
    return made


def waits_of(tensor: ExplainedDTensor) -> Waits | None:
    """The waits of a tensor; None if there is no rank to name: on one rank, or once the model is gone."""
    return None if tensor.zcompile_waits is None else tensor.zcompile_waits()


@contextlib.contextmanager
def explained(func: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Around an operation on such tensors. If it may sum over ranks, because of a `Partial`, report long waits, too.

    Raises:
        GroupError: names the ranks that have not come, and the calling line.
    """
    tensor, name = first_held(args), getattr(func, "__name__", "an operation")
    if tensor is None or (waits := waits_of(tensor)) is None:
        yield
    elif any(placement.is_partial() for placement in tensor.placements) and name != "__get__":
        with watched(tensor, name):
            yield
    else:
        try:
            yield
        except RuntimeError as error:
            if not is_of_collective(error):
                raise
            raise waits.explanation(error, name, _others(tensor, waits)) from error


def watched(tensor: ExplainedDTensor, name: str) -> contextlib.AbstractContextManager[None]:
    """Around a collective of all ranks of `tensor`."""
    if (waits := waits_of(tensor)) is None:
        return contextlib.nullcontext()
    return waits.watched(name, _others(tensor, waits))


def first_held(args: Sequence[Any]) -> ExplainedDTensor | None:
    """The first `ExplainedDTensor` among arguments, which may be lists of them."""
    for arg in args:
        for one in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(one, ExplainedDTensor):
                return one
    return None


def _others(tensor: ExplainedDTensor, waits: Waits) -> list[int]:
    return [rank for rank in tensor.device_mesh.mesh.flatten().tolist() if rank != waits.rank]
