"""A sharded parameter without memory of its own, which only graphs of `torch.compile` can read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.errors import ParameterError
from zcompile.runtime.device import KINDS
from zcompile.runtime.gradients.delivery import read_outside
from zcompile.runtime.shards import Freshness, UnitShards
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import copyable
from zcompile.torch_internals.dynamo import tracing_context
from zcompile.torch_internals.pytree import tree_leaves

_VALUES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag"))
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OF_KIND = frozenset(
    "__dir__ __get__ __hash__ __len__ __set__ _has_compatible_shallow_copy_type data_ptr dim element_size "  # noqa: SIM905
    "empty_like full_like get_device is_complex is_contiguous is_floating_point is_pinned is_same_size is_shared "
    "is_signed ndimension nelement new_empty new_full new_ones new_zeros numel ones_like rand_like randint_like "
    "randn_like register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride "
    "untyped_storage zeros_like".split()
)
"""Names of functions that do not read values."""
_CONVERSIONS = frozenset({"to", "float", "double", "half", "bfloat16", *KINDS})
_OF_GRADIENTS = frozenset({torch.autograd.backward, torch.autograd.grad})


class GraphParameter(nn.Parameter):
    """A user's parameter whose memory was given up. Access to its values outside traced code raises an error.

    `state_dict()` of a module calls `detach()` on it, and `load_state_dict` calls `copy_`: both act on the shard.
    """

    zcompile_name: str
    zcompile_unit: UnitShards
    zcompile_freshness: Freshness

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` if it is traced or does not access values; raise ParameterError if it reads or writes them."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # must be first: Dynamo traces this function
            return super().__torch_function__(func, types, args, kwargs)
        of_kind = func.__name__ in _OF_KIND and func not in _VALUES and func != _SET_DATA
        if of_kind or func in _OF_GRADIENTS or tracing_context() is not None:  # the last: queries of Dynamo itself
            with no_torch_function():
                return func(*args, **kwargs)
        if func in _OF_SHARDS and isinstance(args[0], GraphParameter):
            return _OF_SHARDS[func](*args)
        if func.__name__ in _CONVERSIONS:
            return _converted(func, *args, **kwargs)
        if func == _SET_DATA and args[0] is args[1]:  # a conversion of the module that changes nothing
            return None
        held = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GraphParameter))
        written = func == _SET_DATA or (func.__name__.endswith("_") and not func.__name__.endswith("__"))
        if written and args[0] is held:
            fix = "write before the first call, through model.load_state_dict, or to backend.shards()[name]"
            raise ParameterError(held.zcompile_name, "was written to, where it has no memory any more", fix)
        raise read_outside(held.zcompile_name)

    def __deepcopy__(self, _: object) -> NoReturn:
        fix = "copy the model before its first compiled call, or its state_dict()"
        raise ParameterError(self.zcompile_name, "cannot be copied: it has no memory, its shard has", fix)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GraphParameter({self.zcompile_name!r}, {list(self.shape)})"

    @property
    def zcompile_shard(self) -> nn.Parameter:
        """The shard, which the optimizer steps."""
        return self.zcompile_unit.parameters[self.zcompile_name]


def give_to_graphs(
    parameter: nn.Parameter, name: str, unit: UnitShards, freshness: Freshness, memory: torch.Tensor
) -> None:
    """Give up the memory of `parameter`, which `unit` has sharded as `name`.

    `memory` replaces it, with at least as many elements: code that bypasses torch's dispatch, such as extensions, reads
    that.
    """
    parameter.data = memory[: parameter.numel()].view(parameter.shape)
    parameter.__class__ = _class_of(type(parameter))
    assert isinstance(parameter, GraphParameter)
    parameter.zcompile_name, parameter.zcompile_unit, parameter.zcompile_freshness = name, unit, freshness


@functools.cache
def _class_of(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return a GraphParameter class that is also a subclass of `kind`, the class of the user's parameter."""
    return GraphParameter if kind is nn.Parameter else type(kind.__name__, (GraphParameter, kind), {})


def _converted(func: Callable[..., Any], parameter: GraphParameter, *args: Any, **kwargs: Any) -> GraphParameter:
    """Return the parameter itself if it has that dtype and device already, else raise ParameterError."""
    with no_torch_function():
        converted: object = func(parameter, *args, **kwargs)
    if converted is not parameter:
        problem = "cannot be converted, copied or moved: it has no memory, its shard has"
        raise ParameterError(parameter.zcompile_name, problem, "convert the model before its first compiled call")
    return parameter


def _detach(parameter: GraphParameter) -> DTensor:
    detached = copyable(cast(DTensor, parameter.zcompile_shard.detach()))
    parameter.zcompile_freshness.give([detached])
    return detached


def _copy(parameter: GraphParameter, value: torch.Tensor, *_: object) -> GraphParameter:
    """Write `value`, a full tensor or a shard, into the shard."""
    unit, name = parameter.zcompile_unit, parameter.zcompile_name
    with torch.no_grad():
        parameter.zcompile_shard.copy_(value if isinstance(value, DTensor) else unit.shard_of(name, value))
    return parameter


_OF_SHARDS: dict[Callable[..., Any], Callable[..., Any]] = {torch.Tensor.detach: _detach, torch.Tensor.copy_: _copy}
