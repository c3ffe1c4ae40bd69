"""The parameters that users hold: DTensors that refuse arithmetic whose result would be silently wrong.

A sum over a `Shard(0)` DTensor is a `Partial` with this rank's part, and torch reads such a scalar as it is: `item()`,
or adding it to a loss, gives another number on every rank.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Placement

from zcompile.errors import BackwardError, ParameterError
from zcompile.runtime.tensors.draws import ALONG, OF_WHOLE
from zcompile.runtime.tensors.explained import (
    ExplainedDTensor,
    drawn,
    explain_results,
    explained,
    explainer,
    first_held,
    laid_out_like,
    made_whole,
    needs_all,
    unknown,
    waits_of,
    watched,
    with_rows,
)
from zcompile.runtime.tensors.owned import check_owned, keep_owner, owner_of, part_of
from zcompile.runtime.tensors.placement import Placing
from zcompile.runtime.waits import Waits
from zcompile.torch_internals.autograd import after_backward
from zcompile.torch_internals.dispatch import GET_GRADIENT, SET_GRADIENT, STATE, no_torch_function
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.optimizers import supports_foreach
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only


class ParameterReader(Protocol):
    """Knows whether the model's own code is running."""

    def full(self, parameter: ShardedParameter, /) -> torch.Tensor | None:
        """All of `parameter` if it is; otherwise None."""

    def kind(self, parameter: ShardedParameter, /) -> torch.Tensor | None:
        """A tensor with its dtype and device then, without gathering."""


@supports_foreach
class ShardedParameter(ExplainedDTensor):
    """A sharded `nn.Parameter`. Optimizers, clipping and checkpoints work on it as on any DTensor."""

    zcompile_name: str
    zcompile_unseen: int = 0
    """Writes that version counters miss: operations on lists of tensors do not bump a DTensor's."""
    zcompile_exposed: bool = False
    """True once its `.data` or `to_local()` was taken, through which it can be written to at any time."""
    zcompile_shown: ShardedParameter | None = None
    """The parameter that this aliases, as a result of `detach()` does; writes are noted there."""
    zcompile_reader: weakref.ref[ParameterReader] | None = None
    """Gives the full parameter to the model's own code when that runs as plain Python."""

    def __deepcopy__(self, _: object) -> ShardedParameter:
        """A parameter with memory of its own; torch's deepcopy fails on a view of a larger storage."""
        copied = torch.nn.Parameter(laid_out_like(self, local_tensor(self).clone()), requires_grad=self.requires_grad)
        return sharded(copied, self.zcompile_name, waits_of(self))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows, as DTensor's `to_local()`. Writes to them are gathered by the next call."""
        _source_parameter(self).zcompile_exposed = True
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """All of it on every rank. Collective, as is its backward, which averages the gradient over the ranks.

        DTensor's would take the gradient to be the same on all ranks, and drop those of the others' data.
        """
        if grad_placements is None and (full := _full(self)) is not None:
            return full
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled():
            return _Full.apply(self)  # type: ignore[no-any-return]
        return super().full_tensor(grad_placements=grad_placements)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; sums over the shards are reduced at once, by a small message. Collective.

        In the model's own code, if that runs as plain Python, `func` gets full parameters. Collective.

        Raises:
            ParameterError: the result is differentiable, a term of a loss outside of the model's call; or `func` mixes
                the parameter with a plain tensor, or assigns one to its `.data`; or torch cannot divide what it writes.
            GroupError: names the ranks that have not come, and the calling line.
            BackwardError: `torch.autograd.grad` asks for a gradient that a model's backward delivers to `.grad`.
        """
        is_plain = func in STATE or (func == GET_GRADIENT and args[0].zcompile_owner is None)
        if is_plain or (func == SET_GRADIENT and (args[1] is None or owner_of(args[0]) is owner_of(args[1]) is None)):
            with no_torch_function():
                return func(*args)
        if func == _SET_DATA:  # a new object each time
            if (full := _full(args[0])) is not None:
                full.data = args[1]  # the write is noticed
                return None
            return _assign(*args)
        if func == _GET_DATA and (full := _full(args[0])) is not None:
            return full.detach()  # writes to it are noticed
        if func in _KINDS and (reader := _reader(args[0])) is not None and (kind := reader.kind(args[0])) is not None:
            return func(kind)
        if func is torch.autograd.grad:
            _check_asked(*args[:2])
        name = getattr(func, "__name__", "")
        if (read := _read(func, name, args, kwargs or {})) is not None:
            return func(*read[0], **read[1])
        if name in OF_WHOLE or (name in ALONG and (len(args) > 1 or kwargs)):
            return drawn(func, args, kwargs or {})
        if func == torch.Tensor.__dlpack__:  # torch would export the memory of the whole, which does not exist
            raise _refusal(args, func, _READ_OUTSIDE)
        held = first_held(args)
        args, given = with_rows(func, args, kwargs or {}), (*args, *(kwargs or {}).values())
        owner = check_owned(func, given)
        try:
            with explained(func, args), no_torch_function():
                result = _called(func, args, kwargs or {})
            _note_write(func, args)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                raise _refusal(args, func) from error
            if "require placement changes" in str(error) and (undivided := _undivided(args, func)) is not None:
                raise undivided from error
            if "not supported for tensor subclasses" in str(error) or "Empty tensor not supported" in str(error):
                raise _refusal(args, func, _READ_OUTSIDE) from None
            if needs_all(error):
                raise unknown(func, held) from error
            raise
        if owner is not None:
            keep_owner(result, given, func, explainer(given))
        same = func in _SAME_VALUES and isinstance(args[0], ShardedParameter) and isinstance(result, DTensor)
        if same and result.grad_fn is None:
            shown = sharded(result, args[0].zcompile_name, waits_of(args[0]))
            if func in _SAME_MEMORY:
                shown.zcompile_shown = _source_parameter(args[0])
            return shown
        is_attribute = name == "__get__" and func not in _VIEWS  # such as `.grad`, which is returned as it is
        if isinstance(result, (torch.Tensor, list, tuple)) and not is_attribute:
            if any(isinstance(leaf, DTensor) and leaf.grad_fn is not None for leaf in tree_leaves(result)):
                raise _refusal(args, func)
            whole = functools.partial(made_whole, tensor=held, what="a sum over a parameter's shards")
            result = tree_map_only(DTensor, whole, result)
            if held is not None:
                explain_results(func, result, given, waits_of(held))
        return result


class _Full(torch.autograd.Function):
    """A full parameter, whose gradient is the average over all ranks' data."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter) -> torch.Tensor:
        ctx.parameter = parameter
        return ExplainedDTensor.full_tensor(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        parameter = ctx.parameter
        mesh, total = parameter.device_mesh, grad.clone(memory_format=torch.contiguous_format)
        with watched(parameter, "the gradient of full_tensor()"):
            for dim in range(mesh.ndim):
                dist.all_reduce(total, group=mesh.get_group(dim))
        if owner_of(parameter) is not None:
            # Autograd puts a plain DTensor into `.grad`, where `no_torch_function` would read it as divided by rows.
            after_backward(lambda: _keep_owner_of_gradient(parameter))
        return Placing.of(parameter).place(part_of(total.div_(mesh.size()), parameter).clone())


def _keep_owner_of_gradient(parameter: ShardedParameter) -> None:
    _ = parameter.grad  # read through `__torch_function__`, which marks it as owned


def _check_asked(outputs: Any, inputs: Sequence[Any]) -> None:
    if (asked := next((one for one in inputs if isinstance(one, ShardedParameter)), None)) is not None:
        check_asked(asked.zcompile_name, outputs)


def _reader(tensor: object) -> ParameterReader | None:
    held = isinstance(tensor, ShardedParameter) and tensor.zcompile_reader
    return held() if held else None


def _full(tensor: object) -> torch.Tensor | None:
    """All of a parameter if the model's own code reads it; otherwise None."""
    reader = _reader(tensor)
    return None if reader is None else reader.full(cast("ShardedParameter", tensor))


def _read(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of `func` with full parameters, if the model's own code computes with them; otherwise None."""
    held = first_held((*args, *kwargs.values()))
    if (name in _ABOUT and func not in _VIEWS) or _full(held) is None:
        return None
    given: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(ShardedParameter, _or_itself, (args, kwargs))
    return given


def _or_itself(parameter: ShardedParameter) -> torch.Tensor:
    return parameter if (full := _full(parameter)) is None else full


_KINDS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("dtype", "device"))
_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_ABOUT = frozenset(
    "__get__ __set__ __delete__ __len__ __repr__ __format__ __hash__ __reduce_ex__ __deepcopy__ __dlpack_device__ "  # noqa: SIM905
    "size dim ndimension numel nelement stride storage_offset element_size is_floating_point is_complex is_signed "
    "is_contiguous is_inference is_pinned is_shared is_same_size get_device has_names data_ptr storage untyped_storage "
    "register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad backward".split()
)
"""Functions that query a parameter without reading its values."""


def _called(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of `func`; two calls if it writes lists that mix DTensors and plain tensors, such as buffers.

    DTensor refuses such lists before anything is written.
    """
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error) or not _writes_lists(func):
            raise
        lists = [arg for arg in args if isinstance(arg, (list, tuple))]
        tensors = [one for one in lists if all(isinstance(value, torch.Tensor) for value in one)]
        kinds = [[isinstance(value, DTensor) for value in one] for one in tensors]
        if any(kind != kinds[0] for kind in kinds):
            raise
        for wanted in (True, False):
            chosen = [
                [value for value, kind in zip(arg, kinds[0], strict=True) if kind is wanted]
                if any(arg is one for one in lists)
                else arg
                for arg in args
            ]
            func(*chosen, **kwargs)
        return None


def _writes_lists(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SAME_MEMORY = frozenset({torch.Tensor.detach, _GET_DATA})
_SAME_VALUES = _SAME_MEMORY | {torch.Tensor.cpu, torch.Tensor.float, torch.Tensor.to}
"""Functions that return the parameter's values to be read: trackers call `detach().cpu().numpy()`."""


def _assign(param: ShardedParameter, value: torch.Tensor) -> None:
    """`param.data = value`: copies into the shard's own memory, from which it is gathered.

    Raises:
        ParameterError: `value` is not divided like the parameter.
    """
    where = (value.device_mesh, value.placements, owner_of(value)) if isinstance(value, DTensor) else None
    if (
        where != (param.device_mesh, param.placements, owner_of(param))
        or value.dtype is not param.dtype
        or value.shape != param.shape
    ):
        problem = f"is a shard, and its .data would be {value.dtype} {list(value.shape)}, which does not fit it"
        raise ParameterError(param.zcompile_name, problem, "write in place, under torch.no_grad(): param.copy_(value)")
    local_tensor(param).copy_(local_tensor(value))


def _note_write(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Note writes to parameters by `func`, now or later, that version counters miss."""
    if func == _GET_DATA:
        _source_parameter(args[0]).zcompile_exposed = True
        return
    if _writes_lists(func):
        for tensor in tree_leaves(args):
            if isinstance(tensor, ShardedParameter):
                _source_parameter(tensor).zcompile_unseen += 1


def _source_parameter(tensor: ShardedParameter) -> ShardedParameter:
    """The parameter that `tensor` aliases."""
    return tensor if tensor.zcompile_shown is None else tensor.zcompile_shown


def sharded(tensor: torch.Tensor, name: str, waits: Waits | None = None) -> ShardedParameter:
    """`tensor` as a ShardedParameter, by its class: nn.Parameter would make a DTensor of it."""
    tensor.__class__ = ShardedParameter
    assert isinstance(tensor, ShardedParameter), "its class was set"
    tensor.zcompile_name = name
    tensor.zcompile_waits = None if waits is None else weakref.ref(waits)
    return tensor


def _undivided(args: Any, func: Callable[..., Any]) -> ParameterError | None:
    """The error for writing to a parameter with fewer rows than ranks, which torch cannot divide like it."""
    tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, ShardedParameter))
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    ranks = math.prod(size for size, placement in sizes if placement.is_shard())
    if not tensor.ndim or len(tensor) >= ranks:
        return None
    called, rows = getattr(func, "__name__", "an operation"), f"of shape {list(tensor.shape)} by rows on {ranks} ranks"
    problem = f"{called} writes a tensor that torch cannot divide as this parameter is, {rows}"
    fix = "keep it whole on one rank, with whole= in zcompile.compile, or take an optimizer that works by elements"
    return ParameterError(tensor.zcompile_name, problem, fix)


_READ_OUTSIDE = "take its full_tensor() on every rank, or its to_local()"


def _refusal(args: Any, func: Callable[..., Any], fix: str = "") -> ParameterError:
    tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, ShardedParameter))
    called = getattr(func, "__name__", "an operation")
    problem = f"{called} reads this parameter outside of a program, where it is sharded"
    usual = "compute it in the forward of the module that owns it, or take its full_tensor() on every rank"
    return ParameterError(tensor.zcompile_name, problem, fix or usual)


# -- gradients that are asked for -------------------------------------------------------------------------------------
#
# Programs reduce gradients and deliver them when the backward has ended, past autograd. So autograd would take a
# parameter for one that was not used, and `torch.autograd.grad` would return None, or zeros.


_MARK = "zcompile"


def mark(node: Node) -> None:
    """Note that gradients of parameters behind this node are delivered to `.grad`."""
    _notes_of(node)[_MARK] = True


def check_asked(name: str, outputs: Any) -> None:
    """Let `torch.autograd.grad` pass for outputs that involve no model, such as a parameter's `full_tensor()`.

    Raises:
        BackwardError: there is a model's call behind `outputs`.
    """
    if any(_MARK in _notes_of(node) for node in _backward_nodes(outputs)):
        raise single_gradient_error(name)


def single_gradient_error(name: str) -> BackwardError:
    """The error for asking for the gradient of one parameter only."""
    problem = "torch.autograd.grad, or backward(inputs=...), asks for its gradient, which goes only to .grad, averaged"
    fix = "call loss.backward(retain_graph=True), read .grad and set it to None, for one loss after the other"
    return BackwardError(name, problem, fix)


def _backward_nodes(outputs: Any) -> Iterator[Node]:
    left = [one.grad_fn for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]
    seen = set[Node]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def _notes_of(node: Any) -> dict[str, Any]:
    notes: dict[str, Any] = node.metadata  # torch's own stub takes it for a method
    return notes
