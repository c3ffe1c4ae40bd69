"""Dynamo: captures, errors, and its state of the traced frame."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo import patch_dynamo_config as patch_dynamo_config  # settings within traced code
from torch._dynamo.callback import callback_handler  # called around each compilation
from torch._dynamo.eval_frame import (  # results of torch.compile
    OptimizedModule,
    _TorchDynamoContext,
)
from torch._dynamo.exc import (  # errors of a capture
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.symbolic_convert import InstructionTranslator  # the frame being traced
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import NewGlobalVariable
from torch._guards import TracingContext
from torch._guards import tracing as retracing  # to compile a graph again, for other parameters or a late backward

from zcompile.torch_internals.operators import replayed_random, saved_random

__all__ = [
    "BackendCompilerFailed",
    "FailOnRecompileLimitHit",
    "InternalTorchDynamoError",
    "TorchRuntimeError",
    "Unsupported",
    "UserError",
    "patch_dynamo_config",
    "retracing",
]
"""Names re-exported unchanged from torch."""


_MANY = 256
"""Sizes that a call may be traced with, one after the other, where each is a graph of its own."""


def traced_whole(call: Callable[..., Any], backend: Callable[..., Any], *, static: bool = False) -> Callable[..., Any]:
    """Return `torch.compile` of a call as one graph; if `static`, as one for each size.

    Before it had `recompile_limit`, torch compiled no more than eight of these.
    """
    if not static:
        return torch.compile(call, backend=backend, fullgraph=True)
    many: dict[str, Any] = (
        {"recompile_limit": _MANY} if "recompile_limit" in signature(torch.compile).parameters else {}
    )
    compiled: Callable[..., Any] = torch.compile(call, backend=backend, fullgraph=True, dynamic=False, **many)
    return compiled


def handed_on() -> set[int]:
    """Within a call of a backend: ids of input tensors that the traced code returns or stores unchanged.

    They are not outputs of the graph, because Dynamo reloads them from their sources. `x.data` counts as `x`.
    """
    frame, found = InstructionTranslator.current_tx(), set[int]()
    effects = frame.output.side_effects
    given = {id(variable.unwrap()): identity for identity, variable in effects.id_to_variable.items()}

    def see(variable: Any) -> None:
        # `isinstance` would realize a lazy variable, which adds an input to the graph.
        if issubclass(type(variable), LazyVariableTracker):
            found.add(id(variable.peek_value()))
        elif issubclass(type(variable), TensorVariable) and variable.source is not None:
            node = variable.as_proxy().node
            while node.op != "placeholder" and node.all_input_nodes:
                node = node.all_input_nodes[0]
            read = node.meta.get("grapharg")  # None if the graph does not read it
            found.add(given.get(id(variable), 0) if read is None else id(read.example))

    written = [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]
    stored = [effects.store_attr_mutations.get(variable) for variable in written]
    VariableTracker.visit(see, [frame.stack, written, stored])
    return found


def python_writes() -> Iterator[tuple[int, str]]:
    """Within a call of a backend: writes of the traced code to Python objects, which Dynamo performs at run time.

    Yields the id of the object and the attribute for each write; "" for items of a container. Values that are set back,
    as Transformers' models do with a global flag, do not count.
    """
    output = InstructionTranslator.current_tx().output
    effects, scope = output.side_effects, output.global_scope
    for identity, variable in effects.id_to_variable.items():
        is_new = variable.source is None or isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))
        if is_new or not effects.is_modified(variable):
            continue
        for name, stored in effects.store_attr_mutations.get(variable, {"": None}).items():
            if stored is None or (stored.is_python_constant() and not _has(variable, name, stored, scope)):
                yield identity, name


def _has(variable: Any, name: str, stored: Any, scope: dict[str, Any]) -> bool:
    """True if the attribute of a variable's object, or the global variable in `scope`, already has the stored value."""
    now = stored.as_python_constant()
    try:
        if isinstance(variable, NewGlobalVariable) and variable.source is not None:
            before = eval(name_of_source(variable.source), {"G": scope})
        else:
            before = object.__getattribute__(variable.value, name)
    except (AttributeError, KeyError):
        return False
    return type(now) is type(before) and bool(now == before)


def name_of_source(source: Any) -> str:
    """A Python expression for the source of a value in Dynamo."""
    name: Any = source.name
    return str(name() if callable(name) else name)  # `name` is a method up to torch 2.11


def tracing_context() -> Any:
    """Dynamo's context of the graph being compiled: symbols of dynamic sizes, and fake inputs. None outside."""
    return TracingContext.try_get()


@dataclass(frozen=True)
class AroundCompiling:
    """Callbacks before and after each compilation by Dynamo; `torch.compiler.reset()` removes them."""

    start: Callable[..., None]
    end: Callable[..., None]

    def ensure(self) -> None:
        """Register the callbacks if they are not registered."""
        if self.start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self.start)
            callback_handler.register_end_callback(self.end)

    def remove(self) -> None:
        if self.start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self.start)
            callback_handler.remove_end_callback(self.end)


def modules_given_to(backends: Sequence[object]) -> Iterator[torch.nn.Module]:
    """The modules that `torch.compile` was called on, directly or by a method, with one of `backends`.

    Searches what refers to their contexts, which takes about 0.1 s. A list of all live objects would also hold tuples
    that other threads are building, in which Python then raises SystemError.
    """
    contexts = [
        context for context in gc.get_referrers(*_subclasses(_TorchDynamoContext)) if _backend_of(context) in backends
    ]
    if not contexts:
        return
    for found in gc.get_referrers(*_subclasses(OptimizedModule)):
        if isinstance(found, OptimizedModule) and found.dynamo_ctx in contexts:
            yield found._orig_mod
    closures = gc.get_referrers(*(cell for cell in gc.get_referrers(*contexts) if isinstance(cell, CellType)))
    for found in gc.get_referrers(*(closure for closure in closures if isinstance(closure, tuple))):
        if isinstance(found, FunctionType) and "_torchdynamo_orig_callable" in vars(found):  # module.compile(), forward
            module = _owner(vars(found)["_torchdynamo_orig_callable"])
            if isinstance(module, torch.nn.Module):
                yield module


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    """`kind` and all its subclasses."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _owner(method: Any) -> Any:
    """The module that a method, which Dynamo may have wrapped, belongs to; None for a function."""
    while method is not None and not isinstance(getattr(method, "__self__", None), torch.nn.Module):
        method = getattr(method, "__wrapped__", None)
    return getattr(method, "__self__", None)


def _backend_of(context: Any) -> Any:
    """The backend in a context of torch.compile, without wrappers; None for any other object."""
    if not isinstance(context, _TorchDynamoContext):
        return None
    inner: Any = context.callback
    while hasattr(inner, "_torchdynamo_orig_backend"):
        inner = inner._torchdynamo_orig_backend
    return getattr(inner, "compiler_fn", inner)


def compile_plainly(module: fx.GraphModule, inputs: Sequence[Any], backend: str) -> Callable[..., Any]:
    """Compile a graph of Dynamo's as `torch.compile` itself does."""
    if backend == "eager":
        return module.forward
    from torch._inductor.compile_fx import compile_fx

    return cast(Callable[..., Any], compile_fx(module, list(inputs)))


def graph_obstacle(graph: fx.Graph) -> str:
    """Why an ATen graph cannot be captured as a CUDA graph; empty if it can be captured."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    # Operations that save or replay a generator's state read it on the host.
    ours = next((node for node in graph.nodes if node.target in (saved_random, replayed_random)), None)
    holder: Any = SimpleNamespace(graph=graph)  # torch reads only this attribute of the module
    node = ours or get_first_incompatible_cudagraph_node(holder)
    return f"CUDA graphs cannot have {node.target}" if node is not None else ""


def captured(
    run: Callable[[list[Any]], list[Any]], sizes: Collection[int], fixed: Collection[int], results: int, device: int
) -> Callable[[list[Any]], list[Any]]:
    """Capture `run`, which empties the list that it is called with, in torch's CUDA graph trees.

    The first call warms up. Later calls record a node for each new path in the tree, and replay it from then on.

    Args:
        run: Takes tensors on the device, and sizes.
        sizes: Indices of arguments that are sizes; new values are recorded as new nodes.
        fixed: Indices of arguments with the same address in each step; a node is recorded again if an address changes.
        results: Number of returned tensors. Hazard: later replays overwrite them once Python holds none of a path's.
        device: Index of the device.
    """
    from torch._inductor.cudagraph_trees import cudagraphify_impl

    count = max([-1, *sizes, *fixed]) + 1
    pattern: list[Any] = [0 if index in sizes else None for index in range(count)]
    call: Callable[[list[Any]], list[Any]] = cudagraphify_impl(
        run,
        pattern,
        sorted(fixed),
        device_index=device,
        is_backward=False,
        is_inference=False,
        stack_traces=[None] * results,
    )
    return call


def no_log_of_failures() -> contextlib.AbstractContextManager[None]:
    """While a graph is traced: do not log errors of operations, which torch raises as well."""
    return quiet("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silence one logger."""
    logger = logging.getLogger(name)
    logger.addFilter(_refuse)
    try:
        yield
    finally:
        logger.removeFilter(_refuse)


def _refuse(_: logging.LogRecord) -> bool:
    return False
