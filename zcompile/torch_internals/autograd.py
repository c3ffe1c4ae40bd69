"""Autograd: what a backward is for, its hooks, and versions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import compiled_autograd  # backwards that are captured, and whether one runs
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import local_values

__all__ = ["compiled_autograd"]
"""What is passed on from torch as it is."""


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, or a view of it."""
    return tensor._version


def writes_to(tensors: Sequence[torch.Tensor]) -> int:
    """How often tensors were written to, all together: of DTensors by themselves, and by their local tensors."""
    locals_ = [local for tensor, local in zip(tensors, local_values(tensors), strict=True) if local is not tensor]
    with no_torch_function():
        return sum([tensor._version for tensor in (*tensors, *locals_)])


def within_function_transform() -> bool:
    """True within torch.func.grad, vmap and the like, whose levels tensors that are made there belong to."""
    return peek_interpreter_stack() is not None


def within_transform() -> bool:
    """The same, and True where dual numbers are, of forward-mode differentiation."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def wants_gradient(accumulator: Node) -> bool:
    """Within a backward: true if it brings gradients to this leaf, which `torch.autograd.grad` and `inputs=` do not."""
    try:
        return bool(_will_engine_execute_node(accumulator))
    except RuntimeError:  # torch.autograd.grad was asked for this very leaf
        return False


def is_asked_for(accumulator: Node) -> bool:
    """Within a backward that gives gradients of some leaves alone: true if this leaf is one of them."""
    try:
        return bool(_will_engine_execute_node(accumulator))
    except RuntimeError:  # as torch says of the leaves that torch.autograd.grad was asked for
        return True


def keeps_graph() -> bool:
    """True while a backward with `retain_graph=True` runs; outside of backwards torch would say so, too."""
    return backward_number() is not None and bool(_keeps_graph())


def backward_number() -> int | None:
    """A number of its own for the backward that runs in this thread; None outside of one."""
    number: int = _current_graph_task_id()
    return None if number < 0 else number


def recomputes() -> bool:
    """True where a backward that runs in this thread runs code of a forward again, as activation checkpointing does.

    Such code is run with gradients, or for what it saves; hooks of a backward are not.
    """
    if backward_number() is None:
        return False
    return torch.is_grad_enabled() or _top_saved_tensors_default_hooks(True) is not None


def within_compiled_autograd() -> bool:
    """True while torch's compiled autograd runs a backward that it has captured."""
    return compiled_autograd.in_compiled_autograd_region


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that runs now has come to its end; not if it fails. FSDP relies on it too."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def post_accumulate_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What `register_post_accumulate_grad_hook` has registered: autograd does not see gradients that we deliver."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def have_post_accumulate_hooks(parameters: Iterable[torch.Tensor | None]) -> bool:
    """True if any parameter has such hooks; without a call of Python's for each."""
    with no_torch_function():
        return any(map(attrgetter("_post_accumulate_grad_hooks"), parameters))


def profiler_runs() -> bool:
    """True while a profiler of torch's is on; a range of `record_function` costs microseconds in any case."""
    return torch.autograd.profiler._is_profiler_enabled
