"""Tracing without training: a model's program before any pass, without ranks, a group, or memory for the model.

While torch.compile traces the model, its parameters are replaced by placeholders without memory; nothing is compiled.
So tracing a model on meta, of any size, takes only the memory of its graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile.engine.step_trace import CallSpec, StepTrace
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.frontend.dynamo import autocast
from zcompile.ir.layout import STAGES
from zcompile.ir.program import Program
from zcompile.model.sharding import check_kinds
from zcompile.model.tensor_parallel import check_divided
from zcompile.model.units import Precision, axes_over, make_layout
from zcompile.runtime.device import HOST
from zcompile.runtime.tensors.placement import Placing
from zcompile.tools.gpu_autocast import autocast_of
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.inductor import loss_decompositions
from zcompile.torch_internals.pytree import tree_map_only


def trace(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    units: Sequence[str] | None = None,
    whole: Sequence[str] | None = None,
    device: str = HOST,
    loss_fn: Callable[..., Any] | None = None,
    results: Callable[[Any], Any] | None = None,
    fuses: bool = True,
    chunks: bool = False,
) -> Program:
    """Trace `model(*args, **kwargs)` and its backward into a program, laid out for stage 3 in a world of one.

    With `loss_fn`, traces `loss_fn(model, *args, **kwargs)`; with `results`, `results` applied to the returned value.

    The model and tensor arguments may be on meta; they are traced as if on the CPU, without values. With a 16-bit
    `dtype`, operations use the dtypes of autocast on `device`, a kind such as "cuda". `fuses` is false for a step of
    `backend="eager"`, and `chunks` true for one with `chunk=`. The model is not changed. For a model that
    `parallelize_module` has divided, the program is that of this rank.

    Raises:
        ModelError: the model has no parameters, is sharded already, or has DTensors other than by tensor parallelism,
            on a mesh of another device than the CPU, or on a mesh whose ranks are not consecutive.
        CaptureError: it cannot be traced into one graph, or has no gradient.
        OptionError: `units` match no modules, `whole` matches no parameters, or the arguments do not fit.
    """
    if next(model.parameters(), None) is None:
        raise ModelError(type(model).__name__, "has no parameters", "give a model with parameters to train")
    check_kinds(model)
    _check_neighbours(check_divided(model))
    layout = make_layout(model, STAGES[3], axes_over(model, 1), units, Precision(dtype, reduce_dtype), whole)

    signature = inspect.signature(type(model).forward if loss_fn is None else loss_fn)
    _check_arguments(model, signature, args, dict(kwargs or {}))
    given = tree_map_only(torch.Tensor, _on_cpu, (tuple(args), dict(kwargs or {})))
    call: Callable[..., Any] = model if loss_fn is None else partial(loss_fn, model)
    names = tuple(signature.parameters)[1:]
    called = CallSpec(lambda *a, **k: results(call(*a, **k)) if results else call(*a, **k), given[0], given[1], names)
    with autocast_of(device), autocast(HOST, dtype):
        given = model, layout, called, torch.device(HOST), type(model).__name__
        options = {"decompositions": loss_decompositions(fuses=fuses, chunks=chunks)}
        program = StepTrace(*given, options=options).program
    if not program.has_backward:
        fix = "let it return a loss, or outputs that depend on parameters with requires_grad"
        raise CaptureError(type(model).__name__, "has no backward: its output does not require grad", fix)
    return program


def _check_arguments(
    model: nn.Module, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise OptionError for arguments that the model's forward does not take."""
    if not isinstance(args, (tuple, list)):
        raise OptionError("args", f"is a {type(args).__name__}", "give a tuple of positional arguments: (x,)")
    try:
        signature.bind(model, *args, **kwargs)
    except TypeError as error:
        fix = "give the arguments of a call with one batch"
        raise OptionError("args", f"do not fit the forward of {type(model).__name__}: {error}", fix) from error


def _check_neighbours(mesh: DeviceMesh | None) -> None:
    """Raise ModelError for a tensor-parallel mesh whose program cannot be traced here."""
    if mesh is None:
        return
    if mesh.device_type != "cpu":
        fix = "use a CPU mesh of the same shape, init_device_mesh('cpu', ...), which may be over a fake group"
        raise ModelError("the model", f"is parallelized on a {mesh.device_type} mesh, and traced on the CPU", fix)
    if (mesh.mesh.diff() != 1).any():
        fix = "put the data-parallel dimension first: init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        raise ModelError("the model", f"is parallelized on {mesh}, whose ranks are not consecutive", fix)


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """`value`, or zeros on the CPU if it is on meta."""
    if not value.is_meta:
        return value
    if isinstance(value, DTensor):
        local, placing = _on_cpu(local_tensor(value)), Placing(value.device_mesh, value.placements, value.shape)
        return placing.place(local).requires_grad_(value.requires_grad)
    return torch.zeros(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
