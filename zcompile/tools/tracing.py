"""Tracing without training: a model's program before any pass, without ranks, a group, or memory for the model.

Parameters are replaced by placeholders, which have shapes and no memory, while torch.compile traces the model; what it
would compile is thrown away. So a model of any size on meta is traced in the memory of its graph.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile._torch import (
    TorchRuntimeError,
    buffers_of,
    local_tensor,
    no_log_of_failures,
    parameters_of,
    tree_map_only,
)
from zcompile.engine.interception import Traced
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.frontend.capture import Capture, Names, Runner
from zcompile.frontend.dynamo import BREAKS, autocast, traceable, typed_errors
from zcompile.frontend.local_graphs import Local, on_locals
from zcompile.ir.layout import STAGES, Layout
from zcompile.ir.program import Program
from zcompile.model.sharding import placeholder_of
from zcompile.model.tensor_kinds import check_kinds
from zcompile.model.tensor_parallel import check_divided
from zcompile.model.units import Precision, axes_over, make_layout
from zcompile.report.explain import Break
from zcompile.runtime.device import HOST
from zcompile.runtime.tensors.placement import Placing
from zcompile.schedule.decision import Request
from zcompile.schedule.options import Options
from zcompile.tools.gpu_autocast import autocast_of


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
) -> Program:
    """The program of `model(*args, **kwargs)` and its backward, laid out for stage 3 in a world of one.

    The model, and tensors among the arguments, may be on meta: they are traced as if on the CPU, without values, and
    with a `dtype` of 16 bits in the dtypes that autocast chooses on a `device` of this kind. The model is left as it
    was. Of one that `parallelize_module` has divided, the program is that of this rank's part.

    Raises:
        ModelError: the model has no parameters, is sharded already, or is divided otherwise than by tensor parallelism,
            over a mesh that is not on CPUs, or one whose ranks are not neighbours.
        CaptureError: it cannot be traced into one graph, or takes no gradient.
        OptionError: `units` match no modules or `whole` no parameters, or the arguments do not fit.
    """
    if next(model.parameters(), None) is None:
        raise ModelError(type(model).__name__, "has no parameters", "give a model that has something to train")
    check_kinds(model)
    _check_neighbours(check_divided(model))
    layout = make_layout(model, STAGES[3], axes_over(model, 1), units, Precision(dtype, reduce_dtype), whole)

    def lower(traced: Program) -> Runner:
        options = Options(dtype=dtype, reduce_dtype=reduce_dtype)
        raise Traced(traced, Request(options, options.schedule))

    signature = inspect.signature(type(model).forward)
    _check_arguments(model, signature, args, dict(kwargs or {}))
    given = tree_map_only(torch.Tensor, _on_cpu, (tuple(args), dict(kwargs or {})))
    call = traceable(model, lambda *a, **k: model(*a, **k), [type(model).__qualname__, str(layout)])
    in_low_precision = autocast(HOST, dtype)
    with _without_memory(model, layout) as placeholders, torch.enable_grad(), autocast_of(device), in_low_precision:
        names = Names(
            {id(made): name for name, (made, _) in placeholders.items()},
            {id(buffer): name for name, buffer in model.named_buffers()},
            frozenset(name for name, _ in model.named_modules()),
            tuple(signature.parameters)[1:],
        )
        locals_ = {id(made): local for made, local in placeholders.values() if local is not None}

        def capture(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return on_locals(module, inputs, names, locals_, lambda called: Capture(called, layout, lower))

        compiled = torch.compile(call, backend=capture, fullgraph=True, dynamic=False)
        program = _first_traced(type(model).__name__, lambda: compiled("", *given[0], **given[1]))
    if not program.has_backward:
        fix = "let its forward return a loss, or outputs that depend on parameters with requires_grad"
        raise CaptureError(type(model).__name__, "has no backward: what it returns has no gradient", fix)
    return program


def _check_arguments(
    model: nn.Module, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise OptionError for arguments that the model's forward does not take."""
    if not isinstance(args, (tuple, list)):
        raise OptionError("args", f"is a {type(args).__name__}", "give a tuple of what the model is called with: (x,)")
    try:
        signature.bind(model, *args, **kwargs)
    except TypeError as error:
        fix = "give one batch: what the model is called with"
        raise OptionError("args", f"do not fit the forward of {type(model).__name__}: {error}", fix) from error


def _reason(error: Exception) -> str:
    """What the operation has said that failed, out of what Dynamo says of it."""
    text = str(error).partition("got ")[2] or str(error)
    return text.strip().splitlines()[0]


def _first_traced(name: str, call: Callable[[], object]) -> Program:
    """The program that is traced while `call` calls the model of this name."""
    try:
        with typed_errors(), no_log_of_failures():
            call()
    except Traced as found:
        return found.program
    except TorchRuntimeError as error:
        what = f"cannot be computed with these arguments: {_reason(error)}"
        raise CaptureError(name, what, "give one batch that it takes") from error
    except BREAKS as error:
        broken = Break.of("", name, error)
        raise CaptureError(broken.where, f"breaks the graph: {broken.reason}", "fix it to plan it") from error
    raise AssertionError("a backend is called for every graph")


def _check_neighbours(mesh: DeviceMesh | None) -> None:
    """Raise ModelError for a tensor-parallel mesh whose program cannot be traced here."""
    if mesh is None:
        return
    if mesh.device_type != "cpu":
        fix = "divide it over a mesh of the same shape on CPUs: init_device_mesh('cpu', ...), be the group a fake one"
        raise ModelError("the model", f"is divided over a mesh of {mesh.device_type}, and traced on the CPU", fix)
    if (mesh.mesh.diff() != 1).any():
        fix = "let the data-parallel dimension come first: init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        raise ModelError("the model", f"is divided over {mesh}, whose ranks are no neighbours", fix)


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    """`value`; one on meta as zeros on the CPU."""
    if not value.is_meta:
        return value
    if isinstance(value, DTensor):
        local, placing = _on_cpu(local_tensor(value)), Placing(value.device_mesh, value.placements, value.shape)
        return placing.place(local).requires_grad_(value.requires_grad)
    return torch.zeros(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)


@contextlib.contextmanager
def _without_memory(model: nn.Module, layout: Layout) -> Iterator[dict[str, tuple[nn.Parameter, Local | None]]]:
    """Placeholders in place of the model's parameters, and memory for buffers on meta, until the block ends."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    placeholders = {
        name: placeholder_of(parameter, layout.param(name).full_dtype, torch.device(HOST))
        for name, parameter in model.named_parameters()
    }
    before = [(module, dict(parameters_of(module)), dict(buffers_of(module))) for module in model.modules()]
    try:
        for module, parameters, buffers in before:
            for key, parameter in parameters.items():
                if parameter is not None:
                    parameters_of(module)[key] = placeholders[own[id(parameter)]][0]
            buffers_of(module).update(
                {key: buffer if buffer is None else _on_cpu(buffer) for key, buffer in buffers.items()}
            )
        yield placeholders
    finally:
        for module, parameters, buffers in before:
            parameters_of(module).update(parameters)
            buffers_of(module).update(buffers)
