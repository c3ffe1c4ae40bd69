"""Dynamo: captures, what it can raise, and what it knows of a frame."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo import patch_dynamo_config as patch_dynamo_config  # settings for what is traced within
from torch._dynamo.callback import callback_handler  # called around each compilation
from torch._dynamo.eval_frame import (  # what torch.compile makes
    OptimizedModule,
    _TorchDynamoContext,
)
from torch._dynamo.exc import (  # what a capture can raise
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.symbolic_convert import InstructionTranslator  # what of a frame is being traced
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import NewGlobalVariable
from torch._guards import TracingContext
from torch._guards import tracing as retracing  # a graph compiled again for other parameters, as for late backwards

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
"""What is passed on from torch as it is."""


def handed_on() -> set[int]:
    """To a backend that is called: identities of tensors that the traced code returns or stores as it was given them.

    The graph has none of them as a result, for Dynamo takes them from where they came from; `.data` counts as what it
    is of.
    """
    frame, found = InstructionTranslator.current_tx(), set[int]()
    effects = frame.output.side_effects
    given = {id(variable.unwrap()): identity for identity, variable in effects.id_to_variable.items()}

    def see(variable: Any) -> None:
        # `isinstance` would make an input of the graph of what nothing has read yet.
        if issubclass(type(variable), LazyVariableTracker):
            found.add(id(variable.peek_value()))
        elif issubclass(type(variable), TensorVariable) and variable.source is not None:
            node = variable.as_proxy().node
            while node.op != "placeholder" and node.all_input_nodes:
                node = node.all_input_nodes[0]
            read = node.meta.get("grapharg")  # none where the graph does not read it
            found.add(given.get(id(variable), 0) if read is None else id(read.example))

    written = [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]
    stored = [effects.store_attr_mutations.get(variable) for variable in written]
    VariableTracker.visit(see, [frame.stack, written, stored])
    return found


def python_writes() -> Iterator[tuple[int, str]]:
    """To a backend that is called: what the traced code writes but tensors, which is done where it is run, not here.

    Of each write the identity of the object, and the attribute; no name for what a container has. What code sets back
    to what it was, as Transformers' models do with a global flag, is no write.
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
    """True if the object of a variable, or a global variable, which is read in `scope`, is already as it is stored."""
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
    """Where Dynamo has found a value, as Python."""
    name: Any = source.name
    return str(name() if callable(name) else name)  # a method up to torch 2.11


def tracing_context() -> Any:
    """What Dynamo knows of the graph that it compiles now: symbols of varying sizes, and the fake tensors of inputs."""
    return TracingContext.try_get()


@dataclass(frozen=True)
class AroundCompiling:
    """Calls before and after each compilation of Dynamo's; `torch.compiler.reset()` forgets them."""

    start: Callable[..., None]
    end: Callable[..., None]

    def ensure(self) -> None:
        """Register the calls, unless they are."""
        if self.start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self.start)
            callback_handler.register_end_callback(self.end)

    def remove(self) -> None:
        if self.start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self.start)
            callback_handler.remove_end_callback(self.end)


def modules_given_to(backends: Sequence[object]) -> Iterator[torch.nn.Module]:
    """The modules that `torch.compile` was called with, themselves or by a method of theirs, and one of `backends`.

    They are looked for among all objects that live, which takes a tenth of a second.
    """
    # By their identity: a metaclass may leave its classes without a hash.
    kinds = {id(FunctionType), *map(id, _subclasses(OptimizedModule))}
    for found in [found for found in gc.get_objects() if id(type(found)) in kinds]:
        contexts: Iterable[Any] = ()
        module = None
        if type(found) is not FunctionType:
            module, contexts = found._orig_mod, [found.dynamo_ctx]
        elif "_torchdynamo_orig_callable" in vars(found):  # module.compile(), forward
            module = _owner(vars(found)["_torchdynamo_orig_callable"])
            contexts = [cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell)]
        if isinstance(module, torch.nn.Module) and any(_backend_of(context) in backends for context in contexts):
            yield module


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    """`kind` and all below it."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _owner(method: Any) -> Any:
    """Whose method it is, past the functions that Dynamo wraps around it; None of a function."""
    while method is not None and not isinstance(getattr(method, "__self__", None), torch.nn.Module):
        method = getattr(method, "__wrapped__", None)
    return getattr(method, "__self__", None)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _backend_of(context: Any) -> Any:
    """The backend in what Dynamo makes of it, past its wrappers and that of `torch.compile`; None of anything else."""
    if not isinstance(context, _TorchDynamoContext):
        return None
    inner: Any = context.callback
    while hasattr(inner, "_torchdynamo_orig_backend"):
        inner = inner._torchdynamo_orig_backend
    return getattr(inner, "compiler_fn", inner)


def compile_plainly(module: fx.GraphModule, inputs: Sequence[Any], backend: str) -> Callable[..., Any]:
    """A graph of Dynamo's as `torch.compile` compiles it by itself."""
    if backend == "eager":
        return module.forward
    from torch._inductor.compile_fx import compile_fx

    return cast(Callable[..., Any], compile_fx(module, list(inputs)))


def graph_obstacle(graph: fx.Graph) -> str:
    """Why an ATen graph cannot be captured as a CUDA graph; empty if it can."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    # What keeps or replays a generator's state reads it on the host.
    ours = next((node for node in graph.nodes if node.target in (saved_random, replayed_random)), None)
    holder: Any = SimpleNamespace(graph=graph)  # of the module, torch reads no more
    node = ours or get_first_incompatible_cudagraph_node(holder)
    return f"CUDA graphs cannot have {node.target}" if node is not None else ""


def captured(
    run: Callable[[list[Any]], list[Any]], sizes: Collection[int], fixed: Collection[int], results: int, device: int
) -> Callable[[list[Any]], list[Any]]:
    """`run`, which empties the list that it is called with, as nodes of torch's tree of CUDA graphs for a device.

    The first call warms up. A node is recorded for each path on which it is called again, and replayed from then on.

    Args:
        run: It takes tensors of the device, and sizes.
        sizes: The arguments that are sizes; for others than before, new nodes are recorded.
        fixed: The arguments that lie at the same place in each step. A node for which one does not is recorded anew.
        results: How many tensors it gives. Once Python holds none that a path has given, the next one overwrites them.
        device: The index of the device.
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
    """While a graph is traced: torch raises the error of an operation that cannot be computed, without logging it."""
    return quiet("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Nothing is logged by one logger."""
    logger = logging.getLogger(name)
    logger.addFilter(_refuse)
    try:
        yield
    finally:
        logger.removeFilter(_refuse)


def _refuse(_: logging.LogRecord) -> bool:
    return False
