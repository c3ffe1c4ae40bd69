"""Operators: schemas, kernels, autocast, and collectives."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph  # calls of torch.compiler.nested_compile_region
from torch._ops import (  # types of call targets in an ATen graph
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
)
from torch._ops import _OpNamespace as OpNamespace
from torch._prims.rng_prims import run_and_save_rng_state as saved_random  # (op, ...) -> generator state, result
from torch._prims.rng_prims import run_with_rng_state as replayed_random  # (state, op, ...) -> the same result
from torch._prims_common import suggest_memory_format  # the memory format nearest to a tensor's strides
from torch._subclasses.fake_tensor import FakeTensor  # values of traced and parsed programs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # leaves of nested containers

__all__ = [
    "HigherOrderOperator",
    "OpNamespace",
    "OpOverload",
    "OpOverloadPacket",
    "invoke_subgraph",
    "replayed_random",
    "saved_random",
    "suggest_memory_format",
]
"""Names re-exported unchanged from torch."""


def writes_arguments(operation: OpOverload) -> bool:
    """True for an operation that writes to its arguments."""
    return bool(operation._schema.is_mutable)


def written_arguments(operation: OpOverload) -> list[tuple[int, str]]:
    """The index and name of each argument that an operation writes to."""
    arguments = enumerate(operation._schema.arguments)
    return [(place, argument.name) for place, argument in arguments if argument.is_write]


def defaults_of(operation: OpOverload) -> dict[str, Any]:
    """The names of an operation's arguments in order, with defaults."""
    return {argument.name: argument.default_value for argument in operation._schema.arguments}


def operator_named(name: str) -> Any:
    """The operation named, for instance, `aten::add.Tensor`, or the higher-order operation `cond`."""
    if "::" not in name:
        return getattr(torch.ops.higher_order, name)
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def namespace_of(operation: OpOverload | OpOverloadPacket) -> str:
    """The namespace of an operator: `aten` for `aten::add`."""
    name: str = operation.name() if isinstance(operation, OpOverload) else operation._qualified_op_name
    return name.partition("::")[0]


def attention_kernels() -> tuple[int, ...]:
    """The enabled kernels of scaled_dot_product_attention, its reduction setting, and the order of priority."""
    kinds = ("math", "flash", "mem_efficient", "cudnn", "overrideable")
    enabled = (bool(getattr(torch._C, f"_get_{kind}_sdp_enabled")()) for kind in kinds)
    return *enabled, torch._C._get_math_sdp_allow_fp16_bf16_reduction(), *torch._C._get_sdp_priority_order()


def autocast_operations(kind: str) -> dict[str, OpOverload]:
    """The ATen operations with an autocast kernel for this kind of device, by name without `aten::`."""
    key = _autocast_key(kind)
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    treated = [name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    found = {}
    for name in (name.removeprefix("aten::") for name in treated):
        packet, _, overload = name.partition(".")
        found[name] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


@contextlib.contextmanager
def other_kernels(kind: str, kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace autocast kernels of ATen operations for this kind of device, in all threads. None: no cast.

    The public `torch.library.Library` has no public way to remove the kernels again.
    """
    with warnings.catch_warnings(), torch.library._scoped_library("aten", "IMPL") as library:
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, kernel in kernels.items():
            library.impl(name, kernel or torch.library.fallthrough_kernel, _autocast_key(kind))
        yield


def _autocast_key(kind: str) -> str:
    return f"Autocast{kind.upper()}"


def random_state(drawn: Any) -> torch.Tensor:
    """A fake tensor for the state of the generator that drew these fake numbers."""
    tensor = next(leaf for leaf in tree_leaves(drawn) if isinstance(leaf, FakeTensor))
    generator = torch if tensor.device.type == "cpu" else torch.get_device_module(tensor.device)
    state: torch.Tensor = tensor.fake_mode.from_tensor(generator.get_rng_state(), static_shapes=True)
    return state


def is_collective(target: object) -> bool:
    """True for what communicates within regions: functional collectives and their waits, or operators of `zcompile`."""
    return isinstance(target, OpOverload) and target.namespace in (
        "_c10d_functional",
        "_c10d_functional_autograd",
        "zcompile",
    )


def is_wait_for_collective(operation: OpOverload) -> bool:
    """True for one that waits for a collective that another operation has started."""
    return operation.overloadpacket.__name__ in ("wait_tensor", "wait_all_to_all")


def _is_known(operation: OpOverload) -> bool:
    """True for one whose results are there once it returns: a wait, or an operator that waits for what it sends."""
    starts = operation.overloadpacket.__name__.startswith("start_")
    return (operation.namespace == "zcompile" and not starts) or is_wait_for_collective(operation)


def _read(operation: OpOverload) -> int:
    """How many of its results are read; of attention in a ring, those that lead its results."""
    leading = 3 if operation.overloadpacket.__name__.endswith("_backward") else 2
    return min(len(operation._schema.returns), leading)


class CollectiveCalls(TorchDispatchMode):
    """While regions run, compiled or not: collects `note(known, result)` for each collective in them.

    A result is known after its wait, before that only its layout is.
    """

    def __init__(self, note: Callable[[bool, torch.Tensor], Any]) -> None:
        super().__init__()
        self.note = note
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_collective(func):
            own = func.namespace == "zcompile" and isinstance(result, tuple)
            given = result[: _read(func)] if own else result if isinstance(result, (list, tuple)) else [result]
            self.results += [self.note(_is_known(func), one) for one in given]
        return result


class GivenCollectives(TorchDispatchMode):
    """While regions run, compiled or not: replaces collectives by `results`, in order, and runs none.

    Only results of waits need values; results of the collectives before them need only the layout.
    """

    def __init__(self, results: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_collective(func):
            return func(*args, **(kwargs or {}))
        name, first, returns = func.overloadpacket.__name__, args[0], func._schema.returns
        if func.namespace == "zcompile":
            read = [next(self.results) for _ in range(_read(func))]
            numbers = [0 if "int" in str(one.type) else None for one in returns[len(read) :]]
            return read[0] if len(returns) == 1 else (*read, *numbers)
        several = isinstance(first, (list, tuple))
        given = [next(self.results) for _ in (first if several else [first])]
        if name == "wait_tensor":  # write to the argument, too: compiled code may continue with it
            return first.copy_(given[0])
        return first if name.endswith("_") else given if several else given[0]
