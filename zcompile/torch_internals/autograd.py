"""Autograd: the running backward, its hooks, and versions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import compiled_autograd  # compiled autograd, and whether it is active
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import local_values

__all__ = ["compiled_autograd"]
"""Names re-exported unchanged from torch."""


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor: the number of writes to it and its views."""
    return tensor._version


def writes_to(tensors: Sequence[torch.Tensor]) -> int:
    """How often tensors were written to, all together: of DTensors by themselves, and by their local tensors."""
    locals_ = [local for tensor, local in zip(tensors, local_values(tensors), strict=True) if local is not tensor]
    with no_torch_function():
        return sum([tensor._version for tensor in (*tensors, *locals_)])


def within_function_transform() -> bool:
    """True within a transform of torch.func, such as grad or vmap; tensors made there belong to its level."""
    return peek_interpreter_stack() is not None


def within_transform() -> bool:
    """True within a transform of torch.func, or within forward-mode differentiation (dual numbers)."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def wants_gradient(accumulator: Node) -> bool:
    """Within a backward: True if it accumulates into this leaf; False with `inputs=` or `torch.autograd.grad`."""
    try:
        return bool(_will_engine_execute_node(accumulator))
    except RuntimeError:  # torch raises for a leaf that torch.autograd.grad was asked for
        return False


def is_asked_for(accumulator: Node) -> bool:
    """Within a backward that is restricted to some leaves: True if this leaf is among them."""
    try:
        return bool(_will_engine_execute_node(accumulator))
    except RuntimeError:  # torch raises for a leaf that torch.autograd.grad was asked for
        return True


def keeps_graph() -> bool:
    """True while a backward with `retain_graph=True` runs; outside of backwards torch itself would return True, too."""
    return backward_number() is not None and bool(_keeps_graph())


def backward_number() -> int | None:
    """A number that identifies the backward running in this thread; None outside of backwards."""
    number: int = _current_graph_task_id()
    return None if number < 0 else number


def recomputes() -> bool:
    """True if a backward in this thread is running forward code again, as activation checkpointing does.

    Such code runs with grad mode enabled or with saved-tensor hooks; hooks of a backward have neither.
    """
    if backward_number() is None:
        return False
    return torch.is_grad_enabled() or _top_saved_tensors_default_hooks(True) is not None


def within_compiled_autograd() -> bool:
    """True while torch's compiled autograd runs a captured backward."""
    return compiled_autograd.in_compiled_autograd_region


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward has finished, but not if it fails. FSDP uses the same queue."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def post_accumulate_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Hooks of `register_post_accumulate_grad_hook`; autograd does not run them for gradients that zcompile assigns."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def have_post_accumulate_hooks(parameters: Iterable[torch.Tensor | None]) -> bool:
    """True if any parameter has such hooks; without a Python call for each parameter."""
    with no_torch_function():
        return any(map(attrgetter("_post_accumulate_grad_hooks"), parameters))


def profiler_runs() -> bool:
    """True while a torch profiler is active; `record_function` costs microseconds even without one."""
    return torch.autograd.profiler._is_profiler_enabled
