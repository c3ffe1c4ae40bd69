"""Tracing a whole step: a model and its loss as one program, before any memory is there for the model.

Parameters are replaced by placeholders, which have shapes and no memory, while torch.compile traces a call; what it
would compile is thrown away. So a model of any size is traced in the memory of its graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zcompile._torch import TorchRuntimeError, buffers_of, no_log_of_failures, parameters_of, tree_leaves
from zcompile.engine.interception import Traced
from zcompile.errors import CaptureError
from zcompile.frontend.capture import Capture, Names, Runner
from zcompile.frontend.dynamo import BREAKS, traceable, typed_errors
from zcompile.frontend.local_graphs import Local, on_locals
from zcompile.ir.layout import Layout
from zcompile.ir.program import Program
from zcompile.model.sharding import placeholder_of
from zcompile.report.explain import Break
from zcompile.schedule.decision import Request
from zcompile.schedule.options import Options


@dataclass(frozen=True)
class Called:
    """What is traced: a call, what it is given, and what its arguments are called."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: tuple[str, ...] = ()

    def leaves(self) -> list[Any]:
        """All that it is given, containers taken apart."""
        return tree_leaves((self.args, dict(self.kwargs)))


def trace_call(model: nn.Module, layout: Layout, called: Called, device: torch.device, what: str) -> Program:
    """The program of a call, with its backward. The model is left as it was.

    Args:
        model: What the call runs; its parameters may be on meta.
        layout: How the program is laid out.
        called: The call; tensors among its arguments have memory, on `device`.
        device: What is traced for.
        what: The model, in messages.

    Raises:
        CaptureError: it cannot be traced into one graph.
    """

    def lower(traced: Program) -> Runner:
        options = Options()
        raise Traced(traced, Request(options, options.schedule))

    call = traceable(model, called.call, [type(model).__qualname__, str(layout)])
    with without_memory(model, layout, device) as placeholders, torch.enable_grad():
        names = Names(
            {id(made): name for name, (made, _) in placeholders.items()},
            {id(buffer): name for name, buffer in model.named_buffers()},
            frozenset(name for name, _ in model.named_modules()),
            called.arguments,
            leaves={id(leaf): number for number, leaf in enumerate(called.leaves()) if isinstance(leaf, torch.Tensor)},
        )
        locals_ = {id(made): local for made, local in placeholders.values() if local is not None}

        def capture(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return on_locals(module, inputs, names, locals_, lambda found: Capture(found, layout, lower))

        compiled = torch.compile(call, backend=capture, fullgraph=True, dynamic=False)
        return _first_traced(what, lambda: compiled("", *called.args, **called.kwargs))


def _first_traced(what: str, call: Callable[[], object]) -> Program:
    """The program that is traced while `call` runs."""
    try:
        with typed_errors(), no_log_of_failures():
            call()
    except Traced as found:
        return found.program
    except TorchRuntimeError as error:
        problem = f"cannot be computed with these arguments: {_reason(error)}"
        raise CaptureError(what, problem, "give one batch that it takes") from error
    except BREAKS as error:
        broken = Break.of("", what, error)
        raise CaptureError(broken.where, f"breaks the graph: {broken.reason}", "fix it") from error
    raise AssertionError("a backend is called for every graph")


def _reason(error: Exception) -> str:
    """What the operation has said that failed, out of what Dynamo says of it."""
    text = str(error).partition("got ")[2] or str(error)
    return text.strip().splitlines()[0]


@contextlib.contextmanager
def without_memory(
    model: nn.Module, layout: Layout, device: torch.device
) -> Iterator[dict[str, tuple[nn.Parameter, Local | None]]]:
    """Placeholders in place of the model's parameters, and zeros for buffers on meta, until the block ends."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    placeholders = {
        name: placeholder_of(parameter, layout.param(name).full_dtype, device)
        for name, parameter in model.named_parameters()
    }
    before = [(module, dict(parameters_of(module)), dict(buffers_of(module))) for module in model.modules()]
    try:
        for module, parameters, buffers in before:
            for key, parameter in parameters.items():
                if parameter is not None:
                    parameters_of(module)[key] = placeholders[own[id(parameter)]][0]
            for key, buffer in buffers.items():
                if buffer is not None and buffer.is_meta:
                    buffers_of(module)[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        yield placeholders
    finally:
        for module, parameters, buffers in before:
            parameters_of(module).update(parameters)
            buffers_of(module).update(buffers)
