"""Fragments: modules whose calls run as programs of their own.

The whole model is one fragment as long as it can be traced into one graph. A module whose code breaks the graph is
split: its own code runs as plain Python, with its own parameters gathered for the call, and each of its submodules
becomes a fragment. So code that is not traced never meets a parameter without memory, whatever it reads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zcompile._torch import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    Unsupported,
    UserError,
    has_gradient_hooks,
)
from zcompile.calls import ModelCall
from zcompile.capture import Names
from zcompile.engine import Engine
from zcompile.errors import CaptureError, ParameterError, ZcompileError
from zcompile.report import Break, explain_breaks
from zcompile.runtime.executor import BoundUnit, Gradients, accumulate, all_gather, all_reduce, reduce_scatter
from zcompile.runtime.gradients import Delivery
from zcompile.sharding import Retired, Site

BREAKS = (Unsupported, UserError, InternalTorchDynamoError)
"""What torch.compile raises, before anything has run, where code cannot be traced into one graph."""


@dataclass
class Tree:
    """A sharded model's module tree: the places of its parameters, and its fragments."""

    model: nn.Module
    engine: Engine
    sites: Sequence[Site]
    retired: Retired

    def __post_init__(self) -> None:
        self.root = Fragment(self, self.model, "", lambda *args, **kwargs: self.model(*args, **kwargs))
        self.call: ModelCall | None = None
        self._paths = {id(module): path for path, module in self.model.named_modules()}
        self._fragments: dict[int, Fragment] = {id(self.model): self.root}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; what its backward needs is watched."""
        self.engine.delivery.forget()
        try:
            with self.engine.random_numbers(), self.engine.autocast():
                scaled = self.engine.computes_in_float16()
                self.call = call = ModelCall(self.engine.version, self.engine.delivery, scaled=scaled)
                result = self.root(*args, **kwargs)
        finally:
            self.call = None
        call.watch(result)
        return result

    def make_fragments(self, module: nn.Module) -> None:
        """Let calls of the submodules of `module` run as programs from now on."""
        for child in module.children():
            if _is_container(child):
                self.make_fragments(child)
            elif id(child) not in self._fragments and next(child.parameters(), None) is not None:
                fragment = Fragment(self, child, self._paths[id(child)], child.forward)
                self._fragments[id(child)] = fragment
                # An attribute of the instance, as wrappers of forward are commonly put on modules; hooks still run.
                object.__setattr__(child, "forward", _function(fragment))

    def names(self, fragment: Fragment) -> Names:
        """What the inputs of a graph of `fragment` are called."""
        return Names(
            {id(site.husk): site.name for site in self.sites},
            {id(buffer): name for name, buffer in self.model.named_buffers()},
            frozenset(self._paths.values()),
            tuple(inspect.signature(type(fragment.module).forward).parameters)[1:],
            fragment.path,
        )


class Fragment:
    """A module whose calls run as programs, or, once its code has broken the graph, as Python around fragments."""

    def __init__(self, tree: Tree, module: nn.Module, path: str, forward: Callable[..., Any]) -> None:
        self.tree, self.module, self.path, self.forward = tree, module, path, forward
        owners = {id(owner) for owner in module.modules()}
        self.sites = [site for site in tree.sites if id(site.owner) in owners]
        self.is_split = False
        self._traced = torch.compile(_fresh(_traced_call(module, forward)), backend=self._capture, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Collective.

        Raises:
            CaptureError: its graph cannot be sharded.
            ParameterError: a parameter was replaced, or is read where it is not full.
        """
        if not self.is_split:
            try:
                with self._husks_in_place(), _typed_errors():
                    return self._traced(*args, **kwargs)
            except BREAKS as error:
                self._split(error)
        with self._own_parameters_full():
            return self.forward(*args, **kwargs)

    def _capture(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that torch.compile calls, once for every graph."""
        for value in inputs:
            if name := self.tree.retired.get(id(value), (None, ""))[1]:
                found = "the model's code reads this parameter past its module, where it is empty now"
                raise ParameterError(name, found, "read it as an attribute of its module, not from a list or a closure")
        trainable = {site.name: site.shard.requires_grad for site in self.tree.sites}
        whole = self is self.tree.root
        return self.tree.engine.capture(module, inputs, self.tree.names(self), trainable, whole=whole)

    def _split(self, error: Exception) -> None:
        found = Break.of(self.path, type(self.module).__name__, error)
        breaks = self.tree.engine.breaks
        if all(found.where != known.where for known in breaks):
            warnings.warn(f"zcompile: {explain_breaks([found])}", stacklevel=2)
        breaks.append(found)
        self.is_split = True
        self.tree.make_fragments(self.module)

    # -- parameters in the module tree ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _husks_in_place(self) -> Iterator[None]:
        """Husks in the module's tree while a traced call runs; shards at all other times, also after an exception."""
        self._check(self.sites)
        try:
            for site in self.sites:
                site.husk.requires_grad_(site.shard.requires_grad)
                site.owner._parameters[site.key] = site.husk
            yield
        finally:
            for site in self.sites:
                site.owner._parameters[site.key] = site.shard

    @contextlib.contextmanager
    def _own_parameters_full(self) -> Iterator[None]:
        """The module's own parameters gathered, as leaves of autograd, while its code runs as plain Python."""
        owners = {id(owner) for owner in _owners(self.module)}
        own = [site for site in self.sites if id(site.owner) in owners]
        self._check(own)
        leaves = self._gathered(own)
        versions = {name: leaf._version for name, leaf in leaves.items()}
        try:
            for site in own:
                site.owner._parameters[site.key] = leaves[site.name]
            yield
        finally:
            for site in own:
                site.owner._parameters[site.key] = site.shard
        for name, leaf in leaves.items():
            if leaf._version != versions[name]:
                fix = "keep what changes in a buffer, or change parameters between steps"
                raise CaptureError(name, "the model's forward writes to this parameter", fix)

    def _gathered(self, own: Sequence[Site]) -> dict[str, nn.Parameter]:
        engine = self.tree.engine
        trainable = {site.name: site.shard.requires_grad for site in own}
        leaves: dict[str, nn.Parameter] = {}
        for unit in engine.layout.restricted(trainable).units:
            bound = BoundUnit(engine.shards[unit.name], unit)
            with torch.inference_mode(False), torch.no_grad():
                full = all_gather(bound, dtype=unit.compute_dtype).wait()
            made = {n: nn.Parameter(full[i], requires_grad=trainable[n]) for i, n in enumerate(unit.names)}
            leaves |= made
            call = self.tree.call
            if call is not None and torch.is_grad_enabled() and any(trainable[name] for name in unit.names):
                call.late.append(Leaves(bound, made, engine.delivery).reduce)
        return leaves

    def _check(self, sites: Sequence[Site]) -> None:
        for site in sites:
            if site.owner._parameters[site.key] is not site.shard:
                fix = "change its values in place: with torch.no_grad(): p.copy_(...)"
                raise ParameterError(site.name, "was replaced after zcompile.compile", fix)
            if has_gradient_hooks(site.shard):
                fix = "use register_post_accumulate_grad_hook, or change p.grad after the backward"
                raise ParameterError(site.name, "has a hook of register_hook, which would not run", fix)


def _is_container(module: nn.Module) -> bool:
    """True for what is never called: ModuleList, ModuleDict, ParameterList and their like."""
    return type(module).forward is nn.Module.forward


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and the containers that only its code can read."""
    yield module
    for child in module.children():
        if _is_container(child):
            yield from _owners(child)


@dataclass(frozen=True)
class Leaves:
    """Parameters of a unit, full for one call of plain Python, whose gradients autograd collects."""

    bound: BoundUnit
    tensors: dict[str, nn.Parameter]
    delivery: Delivery

    def reduce(self) -> Sequence[Gradients]:
        """Average over the ranks what autograd has collected; what one rank's code did not reach counts as zero."""
        communicator = self.bound.shards.communicator
        leaves = list(self.tensors.values())
        flags = torch.tensor([leaf.grad is not None for leaf in leaves], dtype=torch.int32, device=communicator.device)
        reached = communicator.any_rank(flags).tolist()
        with torch.no_grad():
            grads = [_gradient(leaf) if on_any else None for leaf, on_any in zip(leaves, reached, strict=True)]
            for leaf in leaves:
                leaf.grad = None
            if not self.delivery.synchronises:
                return [accumulate(self.bound, grads)]
            reduce = reduce_scatter if self.delivery.scatter else all_reduce
            return [reduce(self.bound, grads, dtype=self.bound.unit.reduction_dtype).wait()]


def _gradient(leaf: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _traced_call(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # Parameters are husks here: run as plain Python, the model's code would read memory that is not there.
        if not torch.compiler.is_compiling():
            fix = "leave torch.compile enabled (TORCHDYNAMO_DISABLE, torch.compiler.set_stance, disable)"
            raise CaptureError(type(module).__name__, "its forward was not compiled but called", fix)
        return forward(*args, **kwargs)

    return call


def _function(fragment: Fragment) -> Callable[..., Any]:
    """`fragment` as a function with the signature of the forward that it stands for."""

    @functools.wraps(fragment.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return fragment(*args, **kwargs)

    return forward


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a code object of its own: torch.compile counts recompilations by code object."""
    assert isinstance(function, types.FunctionType), "a plain function"
    code = function.__code__.replace(co_name=f"zcompile_{function.__name__}")
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Our own errors out of torch.compile's wrapping, and too many recompilations as a CaptureError."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(inner := error.inner_exception, ZcompileError):
            raise inner from None
        raise
    except FailOnRecompileLimitHit as error:
        found = "\n".join(line for line in str(error).splitlines() if line.strip())
        fix = "call it with fewer kinds of arguments, or raise torch._dynamo.config.recompile_limit"
        raise CaptureError("the model's forward", f"was traced too often: {found}", fix) from error
