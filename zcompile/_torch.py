"""Every private name of torch that zcompile uses, and for what. The tests have run on torch 2.11 to 2.15.

Where releases differ, what a name can do is asked for, not the number of the release. Nothing outside this
module imports from a module of torch whose path has a part beginning with an underscore.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id, _will_engine_execute_node
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher  # kernels that can do with sizes that vary
from torch._dynamo import compiled_autograd  # backwards that are captured, and whether one runs
from torch._dynamo import patch_dynamo_config as patch_dynamo_config  # settings for what is traced within
from torch._dynamo.backends.common import aot_autograd  # the frontend's joint graph, mutation and aliasing handled
from torch._dynamo.callback import callback_handler  # called around each compilation
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext  # what torch.compile makes
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
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache  # raised by what is not to be kept
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing  # a graph compiled again for other parameters
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph  # a call of torch.compiler.nested_compile_region
from torch._inductor.output_code import OutputCode
from torch._ops import (  # kinds of call targets in an ATen graph, and where their names lead
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
)
from torch._ops import _OpNamespace as OpNamespace
from torch._prims.rng_prims import run_and_save_rng_state as saved_random  # (op, ...) -> generator's state, result
from torch._prims.rng_prims import run_with_rng_state as replayed_random  # (state, op, ...) -> the same result
from torch._prims_common import suggest_memory_format  # the format that the strides of a tensor come closest to
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # values of traced and of parsed programs
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as pipelining_schedules  # tables of actions
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.placement_types import (
    _StridedShard as StridedShard,  # rows of what another dimension gave
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # an `if` on a size of the data's own
from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys  # what `load_state_dict` gives back
from torch.optim.optimizer import Optimizer
from torch.optim.optimizer import _foreach_supported_types as optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as clipping_foreach_types
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only  # leaves of nested containers
from torch.utils._pytree import tree_leaves_with_path as leaves_by_path

__all__ = [
    "GRADIENT",
    "IGNORED_BY_DDP",
    "METADATA_TYPES",
    "STATE",
    "STATE_HOOKS",
    "BackendCompilerFailed",
    "BypassAOTAutogradCache",
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "InternalTorchDynamoError",
    "LoadedKeys",
    "OpNamespace",
    "OpOverload",
    "OpOverloadPacket",
    "OutputCode",
    "StridedShard",
    "TorchDispatchMode",
    "TorchRuntimeError",
    "Unsupported",
    "UserError",
    "add_all",
    "after_backward",
    "aot_autograd",
    "around_compiling",
    "attention_kernels",
    "autocast_operations",
    "backend_name",
    "backward_number",
    "backward_without_autocast",
    "buffers_of",
    "cached_steps",
    "captured",
    "chunk_cat",
    "close_connections",
    "compile_plainly",
    "compile_with_inductor",
    "compiled_autograd",
    "connect_hosts",
    "copy_all",
    "copyable",
    "default_partition",
    "default_store",
    "defaults_of",
    "expression_of",
    "flattened",
    "force_stride_order",
    "gather_group",
    "gather_together",
    "give_up",
    "gloo_of",
    "graph_obstacle",
    "group_timeout",
    "handed_on",
    "has_gradient_hooks",
    "has_step_pre_hooks",
    "have_post_accumulate_hooks",
    "hook_tables",
    "inductor_decompositions",
    "innermost_hooks",
    "invoke_subgraph",
    "is_asked_for",
    "is_fake",
    "is_persistent",
    "is_symbolic",
    "is_tangent",
    "joint_mesh",
    "keepable",
    "keeps_graph",
    "leaves_by_path",
    "load_post_hooks_of",
    "local_tensor",
    "min_cut_rematerialization_partition",
    "modes_aside",
    "modes_back",
    "modes_of_user",
    "modules_given_to",
    "namespace_of",
    "no_donated_buffers",
    "no_log_of_failures",
    "no_new_guards",
    "no_rematerialization",
    "no_step_hooks",
    "no_torch_function",
    "of_fixed_sizes",
    "operator_named",
    "other_kernels",
    "outside_modes",
    "parameters_of",
    "partitioner_budget",
    "partitioning",
    "patch_dynamo_config",
    "path_of_input",
    "pipeline_order",
    "post_accumulate_hooks",
    "prepare_inductor",
    "promise_no_donated_buffers",
    "python_writes",
    "random_state",
    "recomputes",
    "reduce_together",
    "register_pytree_node",
    "replace_state_dict",
    "replayed_random",
    "retracing",
    "root_mesh",
    "saved_random",
    "set_group_timeout",
    "size_of_expression",
    "steps_of_scale",
    "subclasses_dispatched",
    "submodules_of",
    "suggest_memory_format",
    "supports_foreach",
    "tracing_again",
    "tracing_context",
    "tree_leaves",
    "tree_map_only",
    "unhooked_step",
    "untraced_sizes",
    "version_of",
    "wants_gradient",
    "with_local",
    "within_compiled_autograd",
    "within_function_transform",
    "within_transform",
    "writes_arguments",
    "written_arguments",
]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, to read and to write: assignment by attribute would refuse tensors."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table of a module's own buffers, to read and to write."""
    return module._buffers


def load_post_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The table of the hooks that run when a module has been loaded."""
    return module._load_state_dict_post_hooks


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of the modules right below a module."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """True for a buffer that is part of the module's state dict."""
    return buffer not in module._non_persistent_buffers_set


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, or a view of it."""
    return tensor._version


def within_function_transform() -> bool:
    """True within torch.func.grad, vmap and the like, whose levels tensors that are made there belong to."""
    return peek_interpreter_stack() is not None


def is_tangent(placeholder: fx.Node) -> bool:
    """True for an input of a joint graph that is the gradient of an output."""
    return isinstance(placeholder.meta.get("desc"), TangentAOTInput)


def within_transform() -> bool:
    """The same, and True where dual numbers are, of forward-mode differentiation."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def writes_arguments(operation: OpOverload) -> bool:
    """True for an operation that changes what it is given."""
    return bool(operation._schema.is_mutable)


def written_arguments(operation: OpOverload) -> list[tuple[int, str]]:
    """The arguments that an operation changes, each by its place and its name."""
    arguments = enumerate(operation._schema.arguments)
    return [(place, argument.name) for place, argument in arguments if argument.is_write]


def defaults_of(operation: OpOverload) -> dict[str, Any]:
    """The arguments of an operation in order, each with its default."""
    return {argument.name: argument.default_value for argument in operation._schema.arguments}


def operator_named(name: str) -> Any:
    """The operation that calls itself `aten::add.Tensor`, or the higher-order one that calls itself `cond`.

    Raises:
        AttributeError: nothing has registered it in this process.
    """
    if "::" not in name:
        return getattr(torch.ops.higher_order, name)
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def namespace_of(operation: OpOverload | OpOverloadPacket) -> str:
    """Of an operator `aten::add`: `aten`."""
    name: str = operation.name() if isinstance(operation, OpOverload) else operation._qualified_op_name
    return name.partition("::")[0]


def attention_kernels() -> tuple[int, ...]:
    """Which kernels of scaled_dot_product_attention may be chosen, and which first: see `torch.nn.attention`."""
    kinds = ("math", "flash", "mem_efficient", "cudnn", "overrideable")
    enabled = (bool(getattr(torch._C, f"_get_{kind}_sdp_enabled")()) for kind in kinds)
    return *enabled, torch._C._get_math_sdp_allow_fp16_bf16_reduction(), *torch._C._get_sdp_priority_order()


def autocast_operations(kind: str) -> dict[str, OpOverload]:
    """The operations that autocast treats on devices of this kind, by their names in a library of ATen's."""
    key = _autocast_key(kind)
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    treated = [name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    found = {}
    for name in (name.removeprefix("aten::") for name in treated):
        packet, _, overload = name.partition(".")
        found[name] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


@contextlib.contextmanager
def other_kernels(kind: str, kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Inside, autocast on devices of this kind does this to operations of ATen's; to those without a kernel, nothing.

    For all threads. `torch.library.Library` without the name with which it can be taken back is public.
    """
    with warnings.catch_warnings(), torch.library._scoped_library("aten", "IMPL") as library:
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, kernel in kernels.items():
            library.impl(name, kernel or torch.library.fallthrough_kernel, _autocast_key(kind))
        yield


def _autocast_key(kind: str) -> str:
    return f"Autocast{kind.upper()}"


METADATA_TYPES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        [
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ]
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset({"MEM_FORMAT_ENCODING", "TensorProperties"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePosixPath"}),  # Python 3.13
}
"""What the `.metadata` of torch.distributed.checkpoint is pickled from beside dtypes, by module; torch 2.1 and newer.

None of these does more than to keep what it is given.
"""


def no_donated_buffers() -> contextlib.AbstractContextManager[None]:
    """While a graph is traced: do not promise compilers the memory of saved tensors.

    We give none away, and the promise would forbid `backward(retain_graph=True)`.
    """
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(donated_buffer=False)
    return patched


def no_rematerialization() -> contextlib.AbstractContextManager[None]:
    """While a graph is traced: compute nothing again in graphs without a backward.

    torch 2.13 would, by the marks of `torch.utils.checkpoint`, and refuses graphs that draw random numbers.
    """
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    options = {name: False} if hasattr(functorch_config, name) else {}
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(options)
    return patched


def backward_without_autocast() -> contextlib.AbstractContextManager[None]:
    """While a graph is traced: its backward casts nothing, as in eager mode, where backwards run outside of autocast.

    torch would trace it under the autocast of the call, and compute in low precision what the forward has not.
    """
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(backward_pass_autocast="off")
    return patched


def keepable(compiler: Callable[..., OutputCode]) -> Callable[..., OutputCode]:
    """`compiler`, with AOTAutograd told that it may keep what it gives in its cache."""
    kept: Callable[..., OutputCode] = SerializableAOTDispatchCompiler(OutputCode, compiler)
    return kept


@contextlib.contextmanager
def cached_steps(tag: str) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """While a graph is traced: AOTAutograd's cache keeps entries whole, under keys that include `tag`.

    Gives what everything else that is compiled meanwhile is to run under: torch's configuration as it was.
    """
    config: Any = torch.compiler.config
    own, bundled = config.cache_key_tag, functorch_config.bundled_autograd_cache
    early = functorch_config.force_non_lazy_backward_lowering

    @contextlib.contextmanager
    def outside() -> Iterator[None]:
        usual = functorch_config.patch(bundled_autograd_cache=bundled, force_non_lazy_backward_lowering=early)
        with config.patch(cache_key_tag=own), usual:
            yield

    # An entry is written as soon as the backward is compiled: now, not in the first backward, when this has ended.
    kept = functorch_config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True)
    with config.patch(cache_key_tag=f"{own} {tag}"), kept:
        yield outside


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """No mode sees the operations inside: neither a tracer, whose tensors are not real, nor one of the user's."""
    outside: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return outside


def untraced_sizes() -> contextlib.AbstractContextManager[Any]:
    """While a graph is traced: what is done with varying sizes inside is no operation of the graph."""
    outside: contextlib.AbstractContextManager[Any] = disable_proxy_modes_tracing()
    return outside


def partitioner_budget(share: float) -> contextlib.AbstractContextManager[None]:
    """While torch compiles: the share of activations that its own partitioner saves, 0 to 1; for comparisons."""
    patched: contextlib.AbstractContextManager[None] = functorch_config.patch(activation_memory_budget=share)
    return patched


@contextlib.contextmanager
def partitioning(values: Iterable[Any]) -> Iterator[None]:
    """While torch partitions a graph of these fake values: states of generators are saved like other values.

    On GPUs it would add generators to the inputs of both graphs, which only torch's own runtime wrapper passes.
    Fakes of states are made by what is known of the graph that Dynamo compiles; where it compiles none, torch is told.
    """
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    known = contextlib.nullcontext() if TracingContext.try_get() or mode is None else tracing(TracingContext(mode))
    with known, functorch_config.patch(graphsafe_rng_functionalization=False):
        yield


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
            source: Any = variable.source.name
            before = eval(source() if callable(source) else source, {"G": scope})  # a method up to torch 2.11
        else:
            before = object.__getattribute__(variable.value, name)
    except (AttributeError, KeyError):
        return False
    return type(now) is type(before) and bool(now == before)


def tracing_context() -> Any:
    """What Dynamo knows of the graph that it compiles now: symbols of varying sizes, and the fake tensors of inputs."""
    return TracingContext.try_get()


@dataclass(frozen=True)
class AroundCompiling:
    """Calls around each compilation of Dynamo's; `torch.compiler.reset()` forgets them."""

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


def around_compiling(before: Callable[[], None], after: Callable[[], None]) -> AroundCompiling:
    """Call `before` when Dynamo begins to compile, and `after` when it has ended."""
    calls = AroundCompiling(lambda *_: before(), lambda *_: after())
    calls.ensure()
    return calls


def expression_of(size: torch.SymInt) -> Any:
    """A size that varies, as an expression of sizes of inputs."""
    return size.node.expr


def size_of_expression(expression: Any, *, mode: FakeTensorMode) -> Any:
    """The size of `expression_of` in another run of the tracer, that of `mode`.

    Raises:
        ValueError: the run knows of no such sizes of inputs.
    """
    known = mode.shape_env.backed_var_to_val if mode.shape_env is not None else {}
    if mode.shape_env is None or not expression.free_symbols <= known.keys():
        raise ValueError(f"{expression} is of sizes that do not vary here")
    return mode.shape_env.create_symintnode(expression, hint=int(expression.xreplace(known)))


def no_new_guards(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Within, what is looked at of sizes that vary says nothing of which the traced code is for."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    suppressed: contextlib.AbstractContextManager[None] = mode.shape_env.suppress_guards()
    return suppressed


def of_fixed_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """While Dynamo compiles: a fake of a tensor that it has not seen. AOTAutograd's own would have sizes that vary."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return tensor
    fake: torch.Tensor = context.fake_mode.from_tensor(tensor, static_shapes=True)
    return fake


def retracing(context: Any) -> contextlib.AbstractContextManager[Any]:
    """Compile once more a graph that Dynamo has compiled with `context`, as AOTAutograd does for late backwards."""
    return tracing(context)


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

    compiled: Any = compile_fx(module, list(inputs))
    run: Callable[..., Any] = compiled
    return run


def kinds_left_undefined(node: Any, results: int | None) -> Sequence[Any] | None:
    """Let the backward of a compiled function have None, not zeros, where no gradient comes to one of its results.

    Returns shape, dtype and device of these; None where that cannot be: they are not as many.
    """
    kinds: Sequence[Any] = node._input_metadata
    if len(kinds) != results:
        return None
    node.set_materialize_grads(False)
    return kinds


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


STATE = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "is_leaf", "grad_fn", "_version", "_backward_hooks", "_post_accumulate_grad_hooks")
)
"""Functions that `__torch_function__` is called with for what has nothing to do with a tensor's values."""
_GRAD: Any = torch.Tensor.grad
GRADIENT = frozenset({_GRAD.__get__, _GRAD.__set__})
"""Those for reads and writes of `.grad`."""


no_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = DisableTorchFunctionSubclass
"""Inside, a tensor subclass's `__torch_function__` is not called."""


@contextlib.contextmanager
def subclasses_dispatched() -> Iterator[None]:
    """Inside, operations on DTensors are DTensor's, also where torch reads numbers for `torch.tensor([number])`.

    There it leaves the classes of tensors out, and would read memory that a DTensor does not have.
    """
    with torch._C._PreserveDispatchKeyGuard():
        for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def modes_of_user() -> list[TorchDispatchMode]:
    """The dispatch modes that are active, the outermost first; none where torch's own tracing is among them."""
    found = _get_current_dispatch_mode_stack()
    return [] if any(mode.is_infra_mode() for mode in found) else found


@contextlib.contextmanager
def modes_aside(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Inside, these dispatch modes, all that are active, are not: under any of them torch.compile compiles nothing.

    They are left and entered again as their base class does: their own methods would begin their counts anew.
    """
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)


@contextlib.contextmanager
def modes_back(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Inside `modes_aside`, they are active."""
    for mode in modes:
        TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            TorchDispatchMode.__exit__(mode, None, None, None)


T = TypeVar("T", bound=type)


def supports_foreach(kind: T) -> T:
    """Tell optimizers and clipping that foreach kernels take this kind of DTensor, as torch tells them of DTensor."""
    lists: tuple[list[Any], ...] = (optimizer_foreach_types, clipping_foreach_types)
    for kinds in lists:
        if kind not in kinds:
            kinds.append(kind)
    return kind


def promise_no_donated_buffers() -> None:
    """While a backward is compiled: write down that none was donated. Left out, it counts as some at the next one."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


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


def sequence_number(node: fx.Node) -> int | None:
    """Of an operation of a traced graph: equal in the forward and in what computes its gradient; None if not known."""
    number = node.meta.get("seq_nr", -1)
    return number if number >= 0 else None


def path_of_input(node: fx.Node) -> str:
    """Where a parameter among the inputs of Dynamo's graph hangs in the module tree of the traced code."""
    argument = node.meta.get("grapharg")
    name = argument.source.name if argument is not None else ""
    source: str = name() if callable(name) else name  # a method before torch 2.12
    return ".".join(re.findall(r"_(?:modules|parameters)\['([^']+)'\]", source)) or str(node.target)


def compile_with_inductor(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile an ATen graph of fake inputs by Inductor; the result is called with a list, which it empties.

    `torch._inductor.standalone_compile` is documented, but lives in a private module.
    """
    from torch._inductor import standalone_compile  # importing Inductor takes a second; eager users do not pay for it

    # "from_graph" looks for the fake mode, whose symbols name the varying sizes, where Dynamo leaves it.
    for node in graph_module.graph.output_node().all_input_nodes:
        node.meta["example_value"] = node.meta["val"]
    with _quiet(_ARTIFACTS):
        compiled: Callable[..., Any] = standalone_compile(
            graph_module, example_inputs, dynamic_shapes="from_graph", options=_REGIONS
        )
    # torch puts a module's own tensors in front of the list in the function that is left out.
    own = any(True for _ in itertools.chain(graph_module.parameters(), graph_module.buffers()))
    return _boxed_inside(compiled) if not own else lambda box: compiled(*box)


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


_ARTIFACTS = "torch._inductor.standalone_compile"
"""The logger that warns where an artifact cannot be saved, which is nobody's concern: we save none."""
_REGIONS = {"config_patches": {"triton.cudagraphs": False}}
"""A region reads full parameters, which are somewhere else in each step: a CUDA graph would read what was there."""


def inductor_code(graph_module: fx.GraphModule, example_inputs: list[Any]) -> str:
    """The code that Inductor writes for an ATen graph of fake inputs: Python, with kernels in C++ or Triton in it.

    `torch._inductor.utils.get_code` is what torch's own tests look at generated code with.
    """
    from torch._inductor import config, standalone_compile
    from torch._inductor.utils import get_code

    for node in graph_module.graph.output_node().all_input_nodes:
        node.meta["example_value"] = node.meta["val"]
    with _quiet(_ARTIFACTS), config.patch(force_disable_caches=True):
        found = get_code(
            standalone_compile, graph_module, example_inputs, dynamic_shapes="from_graph", options=_REGIONS
        )
    return "\n".join(found)


def _boxed_inside(compiled: Any) -> Callable[[list[Any]], Any]:
    """What standalone_compile's result calls with a list, which is emptied: arguments are freed behind their last use.

    The result itself takes positional arguments and holds them. Where torch has wrapped it otherwise, so does this.
    """
    found = None
    function = getattr(compiled, "_compiled_fn", None)
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if getattr(function, "__qualname__", "") == "aot_module_simplified.<locals>.forward":
            found = inner
        function = inner
    return found or (lambda box: compiled(*box))


def prepare_inductor(device: torch.device) -> Callable[[], None]:
    """Let Inductor compile a kernel that does nothing in a thread, while models are traced.

    Before its first kernel for the CPU it asks gcc which vector instructions it and the processor know, for 6 to 10 s
    where caches are empty, and precompiles its headers, or preprocesses them to know that it has. Should the thread
    fail, so will the compilation of regions, which reports it. The result waits for the thread: what it asks keeps its
    answers without a lock, so nothing may be compiled meanwhile.
    """
    if device.type != "cpu":
        return lambda: None
    # All that is imported is imported here: its modules import each other, which two threads must not do at once.
    from torch._inductor import codecache, compile_fx, cpp_builder, cpu_vec_isa  # noqa: F401

    def compile_kernel() -> None:
        source = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'
        with contextlib.suppress(Exception):
            codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], source)

    thread = threading.Thread(target=compile_kernel, name="zcompile prepare", daemon=True)
    thread.start()
    return thread.join


def force_stride_order() -> OpOverload:
    """Inductor's own operation, (tensor, strides) -> the tensor in memory of that order, which may be its own."""
    from torch._inductor.inductor_prims import force_stride_order as force

    operation: OpOverload = force
    return operation


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """What Inductor replaces operations by before it compiles a graph."""
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
    return table


@contextlib.contextmanager
def tracing_again(values: Sequence[Any]) -> Iterator[None]:
    """Trace a graph of these fake values once more, sizes that vary included, as AOTAutograd does."""
    modes = {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_python_dispatcher())
        for mode in modes.values():
            stack.enter_context(mode)
            if mode.shape_env is not None:  # sizes that depend on data get new symbols, which nobody is to bind
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


def no_log_of_failures() -> contextlib.AbstractContextManager[None]:
    """While a graph is traced: torch raises the error of an operation that cannot be computed, without logging it."""
    return _quiet("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Nothing is logged by one logger."""
    logger = logging.getLogger(name)
    logger.addFilter(_refuse)
    try:
        yield
    finally:
        logger.removeFilter(_refuse)


def _refuse(_: logging.LogRecord) -> bool:
    return False


def random_state(drawn: Any) -> torch.Tensor:
    """A fake of the state of the generator that drew these fake numbers."""
    tensor = next(leaf for leaf in tree_leaves(drawn) if isinstance(leaf, FakeTensor))
    generator = torch if tensor.device.type == "cpu" else torch.get_device_module(tensor.device)
    state: torch.Tensor = tensor.fake_mode.from_tensor(generator.get_rng_state(), static_shapes=True)
    return state


def default_store() -> dist.Store:
    """The store behind the default process group: ranks meet there without a collective, with a deadline."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the ranks of a group may wait for each other: the timeout given to `init_process_group`."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


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


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """True if the user has called `register_hook` on it: such hooks see gradients that autograd carries, not ours."""
    if not (hooks := parameter._backward_hooks):
        return False
    return any(not getattr(hook, "is_own", False) and hook.__module__ != _COUNTS_BYTES for hook in hooks.values())


_COUNTS_BYTES = "torch.distributed._tools.mem_tracker"
"""Its hooks count the bytes of a gradient; it has a second one on the same parameters, which runs."""


def hook_tables(modules: Iterable[torch.nn.Module]) -> list[Mapping[int, Callable[..., Any]]]:
    """Where hooks of calls and of their backwards are: those of all modules there are, then those of `modules`."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    everywhere = [getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds]
    return [*everywhere, *(getattr(module, f"_{kind}_hooks") for module in modules for kind in kinds)]


IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: the names that DistributedDataParallel is to leave alone, which it reads first of all."""
STATE_HOOKS = tuple(
    f"_{kind}_hooks" for kind in ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
)
"""Attributes of a module: the tables of its hooks of state dicts, and of loading them."""


def replace_state_dict(module: torch.nn.Module, convert: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Let `module.state_dict()` give what `convert` makes of it; the public hook may only change it in place."""
    module._register_state_dict_hook(lambda _, state, *__: convert(state))


def unhooked_step(optimizer: Optimizer) -> None:
    """A step of `optimizer` without the hooks around it: torch wraps the step of every class of optimizers once."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def no_step_hooks() -> dict[str, Any]:
    """Attributes of an optimizer without hooks of its own: a `step` that calls its base class's meets them again."""
    return {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def innermost_hooks(
    optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Have `before` run last of all hooks before a step of `optimizer`, and `after` first of those after it."""
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(handles[-1].id, last=False)
    return handles


def has_step_pre_hooks(optimizer: Optimizer) -> bool:
    """True if `register_step_pre_hook` was called on the optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of a group for tensors on `device`; a RuntimeError if it has none."""
    name: str = group._get_backend(device).name()
    return name.lower()


def is_fake(group: dist.ProcessGroup) -> bool:
    """True if the other ranks of a group are not there: its backend is torch's "fake", alone or beside another."""
    return "fake" in {backend_name(group, device) for device in group._device_types}


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the ranks of a gloo group wait for each other as long as `timeout` from now on."""
    # torch 2.14 made it public, and its old name warns.
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def gloo_of(group: dist.ProcessGroup) -> Any:
    """The gloo backend of a group, which sends and receives tensors of the host."""
    return group._get_backend(torch.device("cpu"))


def connect_hosts(name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo backend that connects the hosts of `size` ranks, which meet by `name`; a RuntimeError if they do not.

    It is no group of torch's, which counts these: ranks that have not made equally many would not find each other.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(name, default_store()), rank, size, timeout)


def gather_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Where the gathers of a group go. Where it is all ranks', on NCCL: a group of their own, one for all who ask.

    On the stream of one group a gather would wait for the reductions before it. Its stream has a high priority, too: a
    gather is waited for by the next kernels, which would else be scheduled before it. New groups are made by all ranks
    of a world together, so other groups than its keep their one. Collective over the ranks when first called.
    """
    if backend_name(group, device) != dist.Backend.NCCL or group.size() != dist.get_world_size():
        return group
    for made in dist.distributed_c10d._world.pg_names:
        if made.group_desc == _GATHERS:
            return made
    options, timeout = dist.ProcessGroupNCCL.Options(), group_timeout(group, device)
    options.is_high_priority_stream, options._timeout = True, timeout
    new: dist.ProcessGroup = dist.new_group(
        timeout=timeout, backend=dist.Backend.NCCL, pg_options=options, group_desc=_GATHERS
    )
    return new


_GATHERS = "zcompile: gathers"


def gather_together(
    group: dist.ProcessGroup, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> dist.Work:
    """all_gather of several tensors by one launch."""
    work: dist.Work = group.allgather_into_tensor_coalesced(list(fulls), list(shards))
    return work


def reduce_together(
    group: dist.ProcessGroup, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType
) -> dist.Work:
    """reduce_scatter of several tensors by one launch."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]  # as torch's own functions take either
    work: dist.Work = group.reduce_scatter_tensor_coalesced(list(shards), list(fulls), options)
    return work


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor to its target, which may be of another dtype or device; on GPUs by as few kernels as can be."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def add_all(sums: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add each tensor to its sum, in place, by few kernels on a GPU."""
    torch._foreach_add_(list(sums), list(others))


def chunk_cat(tensors: Sequence[torch.Tensor], chunks: int, out: torch.Tensor) -> None:
    """Each tensor's rows in `chunks` parts, as `Shard(0)` divides, padded with zeros; `out`: these by part, flat."""
    torch._chunk_cat(list(tensors), 0, chunks, out=out)


def close_connections(backend: Any, rank: int, size: int) -> None:
    """End whatever waits for a message on a gloo backend: one that times out closes this process's connections."""
    for other in range(size):
        # Waiting for a rank that has died fails at once and closes nothing, so one that lives has to be found.
        if other != rank:
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], other, _NEVER).wait(timedelta(milliseconds=1))


_NEVER = (1 << 31) - 1
"""The tag of a message that nobody sends."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, without autograd: all of it or, of a DTensor, the local tensor itself.

    That has a version counter of its own, and `to_local()` costs 10 us.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def mesh_size(tensor: torch.Tensor) -> int:
    """Ranks of the mesh that a DTensor lies on; 1 for a plain tensor."""
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1


def give_up(parameter: torch.nn.Parameter) -> None:
    """Let go of a parameter's memory: of a DTensor that of the local tensor."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if isinstance(parameter, DTensor):
        parameter._local_tensor = empty
    else:
        parameter.data = empty


def joint_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh of two dimensions that `first` and `second` are dimensions of; a RuntimeError if there is none."""
    return DeviceMesh._concatenate([first, second])


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced or flattened from; itself if from none."""
    return mesh._get_root_mesh()


def with_joined_dims(mesh: DeviceMesh, joined: DeviceMesh, last: DeviceMesh) -> DeviceMesh:
    """`mesh` with all dimensions but the last as one, by the groups of `joined`, which they are, and of `last`."""
    names = (*(joined.mesh_dim_names or ("dp",)), *(last.mesh_dim_names or ("tp",)))
    groups = [joined.get_group(), last.get_group()]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh.flatten(0, -2), mesh_dim_names=names)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of a mesh as one dimension. Collective over the mesh that it was sliced from.

    `_flatten` takes it that this is all ranks there are: where others do the same with theirs at once, as the stages of
    a pipeline do, it calls both groups alike, and they meet in each other's connections.
    """
    if root_mesh(mesh).size() == dist.get_world_size():
        return mesh._flatten()
    group = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    return DeviceMesh.from_group(group, mesh.device_type)


def pipeline_order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """The actions of a schedule of torch.distributed.pipelining by rank, as torch prints them; `F;B` pairs one by one.

    Raises:
        ValueError: it is not for so many micro-batches.
    """
    count = ranks * stages_per_rank
    own = [
        SimpleNamespace(stage_index=rank, group_rank=0, group_size=ranks, num_stages=count, submod=None)
        for rank in range(stages_per_rank)
    ]
    with _quiet(pipelining_schedules.__name__):
        made: Any = pipelining_schedules.get_schedule_class(schedule)(own, microbatches, None)
    return [
        [str(one) for action in row if action is not None for one in action.sub_actions or (action,)]
        for row in made.pipeline_order.values()
    ]


def steps_of_scale(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """For how many steps a scale that is in use has stood, int32 [], on the scaler's device."""
    tracker = scaler._growth_tracker
    assert tracker is not None, "scale() makes it"
    return tracker


def forget_meshes() -> None:
    """Let what DTensor remembers of operations go: the meshes in it may have groups that are destroyed.

    A mesh equals another of the same ranks and names, whatever its groups, so an operation on a new one would give what
    was remembered of the old one.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    others = [
        getattr(type(propagator), "_propagate_tensor_meta_cached", None),
        getattr(_redistribute, "_gen_transform_infos", None),
        MeshTopoInfo.build_from_mesh,
    ]
    for function in others:
        getattr(function, "cache_clear", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor laid out like `tensor` over another local tensor, which may be on another device than the mesh."""
    return DTensor(local, tensor._spec, requires_grad=False)


def copyable(tensor: DTensor) -> DTensor:
    """The same DTensor, over the same memory, for torch's own copies: copy.deepcopy, torch.distributed.checkpoint.

    They read the storage of the DTensor itself, which has none, where its local tensor begins inside its own storage.
    """
    local = local_tensor(tensor)
    outside = with_local(tensor, local.as_strided(local.shape, local.stride(), 0))
    outside._local_tensor = local
    return outside


def is_symbolic(value: object) -> bool:
    """True for a size that varies between runs."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_collective(target: object) -> bool:
    """True for a collective, or a wait for one, within a region: those that DTensors make."""
    return isinstance(target, OpOverload) and target.namespace in ("_c10d_functional", "_c10d_functional_autograd")


class CollectiveCalls(TorchDispatchMode):
    """While regions run, compiled ones too: what is noted of the result of each of their collectives.

    Args:
        note: Given the name of an operation and the tensor that it gave.
    """

    def __init__(self, note: Callable[[str, torch.Tensor], Any]) -> None:
        super().__init__()
        self.note = note
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_collective(func):
            given = result if isinstance(result, (list, tuple)) else [result]
            self.results += [self.note(func.overloadpacket.__name__, one) for one in given]
        return result


class GivenCollectives(TorchDispatchMode):
    """While regions run, compiled ones too: collectives do nothing, and give what `results` say, in order.

    Args:
        results: One at a time; what a wait gives is the value, anything before it only laid out alike.
    """

    def __init__(self, results: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_collective(func):
            return func(*args, **(kwargs or {}))
        name, first = func.overloadpacket.__name__, args[0]
        several = isinstance(first, (list, tuple))
        given = [next(self.results) for _ in (first if several else [first])]
        if name == "wait_tensor":  # what compiled code goes on with may be its argument
            return first.copy_(given[0])
        return first if name.endswith("_") else given if several else given[0]
