"""Steps of tests' own models, traced once in a process and not by every rank of every test.

Within `sharing`, the first call of a compiled model is traced without running, and what Dynamo and AOTAutograd have
found is kept: that call, and others of an equal model with equal arguments, go on from there. Its passes run, unless a
rank before has run the same ones, and its program is loaded, run and differentiated as any other. What is not known to
be all that a trace depends on is traced: models with hooks, buffers, sizes that vary or attributes that are no plain
values.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from zcompile.engine.calls.fragments import Fragment
from zcompile.engine.calls.interceptors import MethodInterceptor
from zcompile.engine.lowering import CompiledStep
from zcompile.engine.rewritten import Rewritten
from zcompile.engine.step_trace import Traced, intercepting
from zcompile.frontend.dynamo import traceable
from zcompile.frontend.links import linked, without_placeholders
from zcompile.frontend.step_cache import global_state
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Input, Kind, Parameter
from zcompile.ir.program import Program
from zcompile.schedule.pipeline import Journal
from zcompile.torch_internals.autograd import keeps_graph
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only
from zcompile.torch_internals.sizes import is_symbolic

PLAIN = (bool, int, float, str, bytes, type(None))
Key = tuple[Any, ...]
_TRACES: dict[Key, Trace | None] = {}
_REWRITTEN: dict[Key, Rewritten] = {}


@dataclass(frozen=True)
class Trace:
    """A traced step."""

    program: Program
    inputs: Sequence[str | int]
    """For each input of the forward, the parameter, or the place among the tensors that the call is given."""
    result: Any
    """What the call gives, with a `Place` for each tensor."""
    differentiable: Sequence[bool]
    """Of the results of the forward."""


@dataclass(frozen=True)
class Place:
    """Which result of the forward it is."""

    number: int


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Within, what calls of compiled models trace is kept, and taken where it is there."""
    made = Fragment.__init__

    def init(fragment: Fragment, *args: Any, **kwargs: Any) -> None:
        made(fragment, *args, **kwargs)
        fragment._traced = Sharing(fragment, fragment._traced)  # type: ignore[assignment]

    with mock.patch.object(Fragment, "__init__", init):
        yield


class Sharing:
    """Calls of one fragment."""

    def __init__(self, fragment: Fragment, traced: Callable[..., Any]) -> None:
        self.fragment, self.traced = fragment, traced
        self.bound: dict[Key, Callable[..., Any]] = {}
        self.sizes: set[Key] = set()

    def __call__(self, watched: str, *args: Any, **kwargs: Any) -> Any:
        self.sizes.add(tuple(one.shape for one in given_in(args, kwargs)))
        key = None if self.fragment.path or len(self.sizes) > 1 else self.key(watched, args, kwargs)
        if key is not None and key not in _TRACES:
            _TRACES[key] = self.record(watched, args, kwargs)
        if key is None or (trace := _TRACES[key]) is None:
            return self.traced(watched, *args, **kwargs)
        return self.call(key, trace, given_in(args, kwargs))

    # -- what a trace depends on ----------------------------------------------------------------------------------

    def key(self, watched: str, args: Any, kwargs: Any) -> Key | None:
        """All that a trace depends on; None if that is not known."""
        if os.environ.get("ZCOMPILE_CACHE") != "0" or self.fragment.tree.engine.options.backend != "eager":
            return None  # a test of the cache, or kernels for strides that AOTAutograd sees to
        if not watched.endswith("hooks ") or torch.is_inference_mode_enabled():
            return None
        reads = set[str]()
        if not is_known(self.fragment.forward, self.fragment, reads):
            return None
        model, given = described_model(self.fragment.module), described_arguments((args, kwargs))
        sharded = str([site.name for site in self.fragment.sites])  # others are ignored
        return None if model is None or given is None else (model, given, str(sorted(reads)), sharded)

    # -- the first call -------------------------------------------------------------------------------------------

    def record(self, watched: str, args: Any, kwargs: Any) -> Trace | None:
        """The trace of a call, in which nothing runs and nobody is waited for; None if it cannot be shared."""
        fragment, inputs, found = self.fragment, list[Any](), list[Program]()
        outputs = list[torch.Tensor]()

        def backend(module: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            inputs.extend(given)
            with intercepting():
                try:
                    fragment._capture(module, given)
                except Traced as traced:
                    found.append(traced.program)
            outputs.extend(stand_ins(found[0]))
            return lambda *_: outputs

        call = traceable(fragment.module, fragment.forward, ["recorded"])
        try:
            result = torch.compile(call, backend=backend, fullgraph=True)(watched, *args, **kwargs)
        except Exception:  # what it is, the call itself says
            return None
        return self.trace_of(found[0], inputs, outputs, given_in(args, kwargs), result)

    def trace_of(
        self, program: Program, inputs: list[Any], outputs: list[Any], given: list[Any], result: Any
    ) -> Trace | None:
        names = {id(site.placeholder): site.name for site in self.fragment.sites}
        places = {id(one): place for place, one in enumerate(given)}
        read = list[str | int]()
        for node in program.nodes(Parameter, Input):
            op = data(node).op
            if isinstance(op, Input) and op.kind is not Kind.DATA:
                continue
            index = getattr(node.meta.get("desc"), "idx", None)
            value = inputs[index] if index is not None else None
            place = names.get(id(value), places.get(id(value)))
            if place is None or (isinstance(op, Input) and op.mutated):
                return None
            read.append(place)
        if any(is_symbolic(node.meta.get("val")) for node in program.nodes(Input)):
            return None
        of = {id(one): Place(number) for number, one in enumerate(outputs)}
        if not all(isinstance(leaf, PLAIN) or id(leaf) in of for leaf in tree_leaves(result)):
            return None
        tangents = {
            op_of(node, Input).result for node in program.nodes(Input) if op_of(node, Input).kind is Kind.TANGENT
        }
        differentiable = [place in tangents for place in range(len(outputs))]
        return Trace(program, read, tree_map_only(torch.Tensor, lambda one: of[id(one)], result), differentiable)

    # -- calls behind it ------------------------------------------------------------------------------------------

    def call(self, key: Key, trace: Trace, given: list[Any]) -> Any:
        if key not in self.bound:
            self.bound[key] = self.bind(key, trace)
        placeholders = {site.name: site.placeholder for site in self.fragment.sites}
        inputs = [placeholders[one] if isinstance(one, str) else given[one] for one in trace.inputs]
        outputs = self.bound[key](*inputs)
        return tree_map_only(Place, lambda place: outputs[place.number], trace.result)

    def bind(self, key: Key, trace: Trace) -> Callable[..., Any]:
        fragment = self.fragment
        compiler, updater = fragment.tree.engine, fragment.updater
        runtime = compiler.runtime
        trainable = {site.name: site.shard.requires_grad for site in fragment.tree.sites}
        traced = replace(trace.program, layout=runtime.layout.with_trainable(trainable))
        request = compiler._request(traced, updater)
        shared = (*key, repr(runtime.layout), repr(request), updater is not None)

        def rewritten(journal: Journal) -> Rewritten:
            if compiler.options.passes or compiler._undecided(request, traced):
                return compiler._rewritten(traced, updater, journal)
            if shared not in _REWRITTEN:
                _REWRITTEN[shared] = compiler._rewritten(traced, updater, journal)
            return _REWRITTEN[shared]

        step = compiler._in_step(rewritten, updater)
        count = len(trace.differentiable)
        differentiates = torch.is_grad_enabled()

        def run(*inputs: Any) -> Any:
            if not differentiates:
                return step.forward(list(inputs))[:count]
            return CompiledFunctionOfTest.apply(step, trace.differentiable, *inputs)

        sites = {site.name: site for site in fragment.sites}
        examples = [sites[one].placeholder if isinstance(one, str) else one for one in trace.inputs]
        placed = without_placeholders(run, [place for place, one in enumerate(trace.inputs) if isinstance(one, str)])
        return linked(placed, examples, {id(site.placeholder): site.shard for site in fragment.sites})


class CompiledFunctionOfTest(torch.autograd.Function):
    """What AOTAutograd makes of a step, without what it makes of results that share memory."""

    @staticmethod
    def forward(ctx: Any, step: CompiledStep, differentiable: Sequence[bool], *inputs: Any) -> Any:
        made = step.forward(list(inputs))
        outputs, ctx.saved, ctx.step = made[: len(differentiable)], made[len(differentiable) :], step
        ctx.mark_non_differentiable(*(one for one, is_so in zip(outputs, differentiable, strict=True) if not is_so))
        ctx.differentiable = differentiable
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sizes = sum(is_symbolic(node.meta.get("val")) for node in ctx.step.saved)
        box = ctx.saved[len(ctx.saved) - sizes :] + ctx.saved[: len(ctx.saved) - sizes]
        if not keeps_graph():
            ctx.saved = None
        box += [one for one, is_so in zip(gradients, ctx.differentiable, strict=True) if is_so]
        return None, None, *ctx.step.backward(box)


def stand_ins(program: Program) -> list[torch.Tensor]:
    """Tensors like the results of a program."""
    values = [node.meta["val"] for node in program.results.outputs]
    return [torch.empty(value.shape, dtype=value.dtype) for value in values]


def given_in(args: Any, kwargs: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def kind_of(value: Any) -> Any:
    """What a trace knows of an argument; None if that is not known."""
    if isinstance(value, PLAIN):
        return repr(value)
    if type(value) not in (torch.Tensor, nn.Parameter) or value.device.type != "cpu":
        return None if not isinstance(value, nn.Parameter) else (tuple(value.shape), str(value.dtype))
    return tuple(value.shape), value.stride(), str(value.dtype), value.requires_grad, value.is_inference()


def is_known(called: Any, fragment: Fragment, reads: set[str]) -> bool:
    """Add to `reads` what is called of a fragment: a method, or a loss with the model; False if that is not known."""
    if called is fragment.module or called is fragment.tree:
        return True
    if isinstance(called, tuple):
        return all(is_known(one, fragment, reads) for one in called)
    if isinstance(called, types.MethodType):
        reads.add(called.__name__)
        return called.__self__ is fragment.module
    if isinstance(called, types.FunctionType) and called.__module__.startswith("zcompile"):
        return all(is_known(cell.cell_contents, fragment, reads) for cell in called.__closure__ or ())
    return reads_of(called, reads, set())


def described_model(model: nn.Module) -> str | None:
    """What a trace knows of a model; None if that is not known."""
    modules = [(path, described(module)) for path, module in model.named_modules()]
    parameters = [(name, kind_of(p), type(p), p.requires_grad) for name, p in model.named_parameters()]
    shared = [*model.named_parameters(remove_duplicate=False)]
    ties = [[other for other, q in shared if q is p] for _, p in shared]
    return None if any(one is None for _, one in modules) else str((modules, parameters, ties))


def described_arguments(arguments: Any) -> str | None:
    """What a trace knows of arguments, and of torch's modes; None if that is not known."""
    if None in map(kind_of, tree_leaves(arguments)):
        return None
    given = tree_map_only(torch.Tensor, kind_of, arguments)
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return str((given, modes, global_state()))


def described(module: nn.Module) -> Any:
    """What a trace knows of a module beside its parameters; None if that is not known."""
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, MethodInterceptor)}
    flat = tree_leaves(list(own.values()))
    if any(True for _ in module.buffers(recurse=False)) or not all(isinstance(value, PLAIN) for value in flat):
        return None
    reads = constants_of(type(module))
    return None if reads is None else (type(module).__qualname__, str(own), reads)


def constants_of(kind: type[nn.Module]) -> list[str] | None:
    """The code of a class, and the constants that it reads outside of itself; None if it reads anything else."""
    reads = set[str]()
    return sorted(reads) if reads_of(kind, reads, set()) else None


def reads_of(value: Any, reads: set[str], seen: set[int]) -> bool:
    """Add to `reads` code, and the constants that it reads outside of itself; False if what it reads is not a constant.

    `value`: a class, a function, or what a name of a module stands for.
    """
    if (
        id(value) in seen
        or isinstance(value, types.ModuleType)
        or getattr(value, "__module__", None) in sys.builtin_module_names
    ):
        return True
    seen.add(id(value))
    if (getattr(value, "__module__", None) or "").partition(".")[0] in ("torch", "typing", "math", "functools"):
        return True
    if isinstance(value, type):
        # Not what is torch's: Transformers gives methods of its own to nn.Module.
        ours = [base for base in value.__mro__ if base.__module__.partition(".")[0] != "torch"]
        held = (one for base in ours for one in vars(base).values())
        found = (getattr(one, "__func__", getattr(one, "fget", one)) for one in held)  # of methods and properties
        parts = [one for one in found if isinstance(one, types.FunctionType)]
        of_tests = [base for base in ours if base.__module__.partition(".")[0] == "tests"]
        return bool(of_tests) and all(reads_of(one, reads, seen) for one in parts)
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if set(value.__code__.co_freevars) - {"__class__"} or not all(isinstance(one, PLAIN) for one in defaults):
            return False
        reads.add(f"{value.__module__}.{value.__qualname__} {hash(value.__code__)} {defaults}")
        named = {name: value.__globals__[name] for name in value.__globals__.keys() & names_in(value.__code__)}
        reads |= {f"{name}={one!r}" for name, one in named.items() if isinstance(one, PLAIN)}
        return all(reads_of(one, reads, seen) for one in named.values())
    return isinstance(value, PLAIN)


def names_in(code: types.CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))
