"""Tracing a whole step: a model and its loss as one program, before the model has any memory.

Parameters are replaced by placeholders, with shapes but without memory, while torch.compile traces a call; what it
would compile is thrown away. So tracing a model of any size takes the memory of its graph only.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn

from zcompile.errors import CaptureError, ModelError
from zcompile.frontend.capture import Capture, Names, refuse_handed_on
from zcompile.frontend.dynamo import BREAKS, autocast, traceable, typed_errors
from zcompile.frontend.local_graphs import Local, on_locals
from zcompile.frontend.step_cache import Runner
from zcompile.ir.layout import Layout
from zcompile.ir.program import Program
from zcompile.model.sharding import placeholder_of
from zcompile.report.explain import Break
from zcompile.schedule.decision import Request
from zcompile.schedule.options import Options
from zcompile.torch_internals.dynamo import TorchRuntimeError, no_log_of_failures, python_writes
from zcompile.torch_internals.modules import buffers_of, parameters_of
from zcompile.torch_internals.pytree import tree_leaves


class Traced(BaseException):
    """There is a program: nothing is to be compiled.

    Not an Exception: neither torch.compile, which traces, nor a training script may catch it.
    """

    def __init__(self, program: Program, request: Request) -> None:
        super().__init__("a model was traced")
        self.program, self.request = program, request


_INTERCEPTING: ContextVar[bool] = ContextVar("zcompile_intercepting", default=False)


@contextlib.contextmanager
def intercepting() -> Iterator[None]:
    """Inside, the first compiled model that is called raises `Traced` instead of being compiled and run."""
    wanted = _INTERCEPTING.set(True)
    try:
        yield
    finally:
        _INTERCEPTING.reset(wanted)


def is_intercepting() -> bool:
    """True inside `intercepting`, where programs are only inspected."""
    return _INTERCEPTING.get()


def offer(program: Program, request: Callable[[], Request]) -> None:
    """A program is about to be compiled with `request`. Raises Traced inside `intercepting`."""
    if _INTERCEPTING.get():
        raise Traced(program, request())


@dataclass(frozen=True)
class CallSpec:
    """The call to trace, its arguments, and their names."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: tuple[str, ...] = ()

    def leaves(self) -> list[Any]:
        """All leaves of its arguments."""
        return tree_leaves((self.args, dict(self.kwargs)))


class StepTrace:
    """The program of a call, with its backward, and a check whether it would be traced the same again.

    The model is left unchanged.

    Args:
        model: The model that the call runs; its parameters may be on meta.
        layout: The layout of the program.
        called: The call; tensors among its arguments have memory, on `device`.
        device: The device to trace for.
        what: Names the model in messages.
        dtype: The autocast dtype; None for the model's own.
        like: The trace of a training step of a model that has been sharded since: this one has no gradients.
        options: Those of `Capture` that change the step as it is traced.

    Raises:
        CaptureError: it cannot be traced into one graph.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        called: CallSpec,
        device: torch.device,
        what: str,
        dtype: torch.dtype | None = None,
        like: StepTrace | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._layout, self._device, self._what, self._dtype = model, layout, device, what, dtype
        self._options = options or {}
        self._trains = like is None
        self._placeholders: dict[str, tuple[nn.Parameter, Local | None]]
        if like is not None:
            self._placeholders = like._placeholders
        else:
            self._placeholders = {
                name: placeholder_of(parameter, layout.param(name).full_dtype, device)
                for name, parameter in model.named_parameters()
            }
        self._called = called
        self._found: list[Program] = []
        self.writes: list[str] = []
        """Non-tensors that the code writes, in attributes, lists and the like: these writes are not made."""
        call = traceable(model, called.call, [type(model).__qualname__, str(layout)])
        self._compiled = torch.compile(call, backend=self._capture, fullgraph=True, dynamic=False)
        self._run(called)
        (self.program,) = self._found
        self._found.clear()

    def others(self, called: CallSpec) -> list[torch.Tensor]:
        """Tensors that the same call reads now, other than arguments, parameters and buffers: those in closures.

        By `Input.leaf` they are numbered after the call's own. Checks what torch.compile guards on: attributes, global
        variables, shapes.

        Raises:
            ModelError: it would be traced differently.
        """
        unknown = self._run(called)
        retraced, self._found = self._found, []
        for found in retraced:
            if difference := changed_line(str(self.program), str(found)) or self._changed_constant(found):
                problem = f"computes something else than at the first step: {difference}"
                raise ModelError(self._what, problem, "make a new train step of the model as it is to be trained")
        return unknown

    def _changed_constant(self, found: Program) -> str:
        """A changed tensor that the code makes of numbers, which the text only names; empty if there is none."""
        before, now = self.program.constants, found.constants
        changed = (name for name, value in now.items() if not torch.equal(value, before[name]))
        name = next(changed, None)
        return "" if name is None else f"{name}: {now[name].tolist()} in place of {before[name].tolist()}"

    def _unknown(self, inputs: Sequence[Any], called: CallSpec) -> list[torch.Tensor]:
        known = {id(made) for made, _ in self._placeholders.values()}
        known |= {id(local.leaf) for _, local in self._placeholders.values() if local is not None}
        known |= {id(buffer) for buffer in self._model.buffers()} | {id(leaf) for leaf in called.leaves()}
        return [value for value in inputs if isinstance(value, torch.Tensor) and id(value) not in known]

    def _run(self, called: CallSpec) -> list[torch.Tensor]:
        """Let torch.compile look at the call, and trace it if it has to; returns what `others` does."""
        self._called = called
        try:
            with (
                without_memory(self._model, self._placeholders, self._device),
                torch.set_grad_enabled(self._trains),
                autocast(self._device.type, self._dtype),
                typed_errors(),
                no_log_of_failures(),
            ):
                self._compiled("", *called.args, **called.kwargs)
        except _WouldRun as found:
            return found.unknown
        except TorchRuntimeError as error:
            problem = f"cannot be computed with these arguments: {_reason(error)}"
            raise CaptureError(self._what, problem, "give one batch that it takes") from error
        except BREAKS as error:
            broken = Break.of("", self._what, error)
            raise CaptureError(broken.where, f"breaks the graph: {broken.reason}", "fix it") from error
        raise AssertionError("the compiled function never returns")

    def _capture(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: what would be compiled is thrown away."""
        self.writes = list(_writes(self._model))
        leaves = [*self._called.leaves(), *self._unknown(inputs, self._called)]
        names = Names(
            {id(made): name for name, (made, _) in self._placeholders.items()},
            {id(buffer): name for name, buffer in self._model.named_buffers()},
            frozenset(name for name, _ in self._model.named_modules()),
            self._called.arguments,
            leaves={id(leaf): number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)},
        )
        refuse_handed_on(names)
        locals_ = {id(made): local for made, local in self._placeholders.values() if local is not None}
        options = Options()

        def lower(traced: Program) -> Runner:
            raise Traced(traced, Request(options, options.schedule))

        try:
            capturing = partial(Capture, layout=self._layout, lower=lower, **self._options)
            on_locals(module, inputs, names, locals_, capturing)
        except Traced as found:
            self._found.append(found.program)

        def give(*given: Any) -> NoReturn:
            raise _WouldRun(self._unknown(given, self._called))  # while placeholders are in place

        return give


def _writes(model: nn.Module) -> Iterator[str]:
    """The places of Python values that traced code changes; to be called in a backend."""
    modules = {id(module): (path, module) for path, module in model.named_modules()}
    held = {id(value): (path, key) for path, module in modules.values() for key, value in vars(module).items()}
    for identity, name in python_writes():
        path, key = held.get(identity, ("", name or "a list, dict or the like"))
        if identity in modules:
            (path, _), key = modules[identity], name
        yield f"{path}.{key}".removeprefix(".")


class _WouldRun(BaseException):
    """A graph would run now, with these tensors in addition to known ones."""

    def __init__(self, unknown: list[torch.Tensor]) -> None:
        super().__init__("a graph would run")
        self.unknown = unknown


def changed_line(before: str, after: str) -> str:
    """The first line in which two texts differ, old and new; empty if they are equal."""
    for one, other in itertools.zip_longest(before.splitlines(), after.splitlines(), fillvalue=""):
        if one != other:
            return f"{other.strip()!r} in place of {one.strip()!r}"
    return ""


def _reason(error: Exception) -> str:
    """The message of the operation that failed, taken from Dynamo's message."""
    text = str(error).partition("got ")[2] or str(error)
    return text.strip().splitlines()[0]


@contextlib.contextmanager
def without_memory(
    model: nn.Module, placeholders: Mapping[str, tuple[nn.Parameter, Local | None]], device: torch.device
) -> Iterator[None]:
    """Placeholders in place of the model's parameters, and zeros for buffers on meta, until the block ends."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    before = [(module, dict(parameters_of(module)), dict(buffers_of(module))) for module in model.modules()]
    try:
        for module, parameters, buffers in before:
            for key, parameter in parameters.items():
                if parameter is not None:
                    parameters_of(module)[key] = placeholders[own[id(parameter)]][0]
            for key, buffer in buffers.items():
                if buffer is not None and buffer.is_meta:
                    buffers_of(module)[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        yield
    finally:
        for module, parameters, buffers in before:
            parameters_of(module).update(parameters)
            buffers_of(module).update(buffers)
