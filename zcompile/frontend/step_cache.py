"""The cache of steps: AOTAutograd's own cache, in torch's cache folder, with rewritten programs in its entries.

torch keys an entry by Dynamo's graph, its inputs, its configuration and its version, and looks it up before tracing: a
step found there is neither traced nor rewritten again. Steps are serialized to bytes; a tag in the key has what the
graph does not determine (names, layout, options, our own code).

Each rank looks up its own entries. Ranks that share a folder find each other's; whatever ranks must agree on, they
still compare before a program first communicates.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from zcompile.errors import ZcompileError
from zcompile.frontend.graph_edits import varying_floats
from zcompile.ir.ops import FUNCTIONS, region
from zcompile.torch_internals.aot_autograd import BypassAOTAutogradCache
from zcompile.torch_internals.inductor import OutputCode
from zcompile.torch_internals.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    attention_kernels,
    namespace_of,
    operator_named,
)
from zcompile.torch_internals.pytree import tree_map_only
from zcompile.torch_internals.sizes import (
    FakeTensor,
    FakeTensorMode,
    empty_laid_out,
    expression_of,
    is_symbolic,
    no_new_guards,
    size_of_expression,
)


class Runner(Protocol):
    """A rewritten step, executable with AOTAutograd's calling convention; may be a weak proxy."""

    saved: Sequence[fx.Node]
    """Values that the forward saves for the backward, tensors first, then sizes."""
    reread: Sequence[int]
    """Positions of inputs that are parameters which the backward reads. AOTAutograd saves them, after the saved
    tensors: a kept full parameter, or else a placeholder."""

    def forward(self, box: list[Any]) -> list[Any]: ...

    def backward(self, box: list[Any]) -> list[Any]: ...

    def content(self) -> bytes:
        """Serialize the step for another process; raise NotStorableError if that is not possible."""
        ...


@dataclass(frozen=True)
class StepCache:
    """How steps of a compiler are stored.

    Attributes:
        depends_on: All that a step depends on other than its graph and the names and layout of its parameters.
        restore: Creates a step from its serialized content.
    """

    depends_on: str
    restore: Callable[[bytes], Runner]


@dataclass
class Lookup:
    """One lookup in the cache, which restores the step of the entry once for both its forward and its backward."""

    restore: Callable[[bytes], Runner]
    runner: Runner | None = None


_LOOKUP: ContextVar[Lookup] = ContextVar("zcompile_lookup")


class RefusedError(BaseException):
    """The step of a found entry is refused. Not an Exception, which torch would treat as a damaged entry."""

    def __init__(self, reason: ZcompileError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextlib.contextmanager
def looking(restore: Callable[[bytes], Runner]) -> Iterator[None]:
    """Let AOTAutograd restore steps that it finds in its cache with `restore`; errors of that are propagated."""
    before = _LOOKUP.set(Lookup(restore))
    try:
        yield
    except RefusedError as refused:
        raise refused.reason from refused.reason.__cause__
    finally:
        _LOOKUP.reset(before)


_OF_TORCH = frozenset({"aten", "prim", "prims", "_c10d_functional"})
"""Namespaces of operators that come with torch."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def can_be_kept(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return True if the graph and the types of its inputs determine the result of tracing.

    They do not for custom operators and tensor classes, and for graphs that hold tensors. And torch's key does not
    include which inputs share memory, in which case AOTAutograd writes to all of them, nor the values of floats, which
    may be constants of the traced graph.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if any(type(value) not in _PLAIN for value in tensors):
        return False
    storages = {StorageWeakRef(value.untyped_storage()) for value in tensors}
    return len(storages) == len(tensors) and all(map(_is_of_torch, nested_in(module)))


def _is_of_torch(module: fx.GraphModule) -> bool:
    """Return True if a graph calls only operators of torch, and holds nothing but graphs."""
    graph = module.graph
    held = (operator.attrgetter(str(node.target))(module) for node in graph.find_nodes(op="get_attr"))
    if graph.find_nodes(op="call_module") or not all(isinstance(value, fx.GraphModule) for value in held):
        return False
    if varying_floats(graph):
        return False
    called = (node.target for node in graph.nodes if isinstance(node.target, (OpOverload, OpOverloadPacket)))
    return all(namespace_of(value) in _OF_TORCH for value in called)


def nested_in(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph and the graphs that it calls."""
    return [graph for graph in module.modules() if isinstance(graph, fx.GraphModule)]


def global_state() -> str:
    """Return the global state that affects tracing and that torch's own key may not include."""
    state = attention_kernels(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    return f"{state} {torch.get_default_dtype()} {torch.is_inference_mode_enabled()}"


@functools.cache
def own_source() -> str:
    """Return a digest of zcompile's source, so that another version's entries are not used."""
    digest = hashlib.sha256(version("zcompile").encode())
    for package in ("zcompile", "zcompile.passes", "zcompile.runtime"):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()


class ForwardCode(OutputCode):
    """The forward of a step, in the form that AOTAutograd expects of compilers; its entry has the whole step."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._content = runner, b""
        self._boxed_call = True  # on the instance: Dynamo's wrappers copy instance attributes only

    def __call__(self, inputs: Any) -> list[Any]:
        return self._runner.forward(inputs)

    def prepare_for_serialization(self) -> None:
        try:
            self._content = self._runner.content()
        except NotStorableError as error:
            raise BypassAOTAutogradCache(str(error)) from error
        del self._runner  # only of the copy that is serialized

    def post_compile(self, *_: object) -> None:
        lookup = _LOOKUP.get()
        try:
            self._runner = lookup.runner = lookup.restore(self._content)
        except ZcompileError as error:
            raise RefusedError(error) from error
        self._content = b""


class BackwardCode(OutputCode):
    """The backward of a step; its entry is empty, as the forward's has the whole step."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._boxed_call = runner, True

    def __call__(self, inputs: Any) -> list[Any]:
        return self._runner.backward(inputs)

    def prepare_for_serialization(self) -> None:
        del self._runner

    def post_compile(self, *_: object) -> None:
        runner = _LOOKUP.get().runner
        assert runner is not None, "the forward comes first"
        self._runner = runner


# -- serialization of programs ----------------------------------------------------------------------------------------
#
# Pickles graphs, fake values and operators, too. Dynamic sizes are expressions of sizes of inputs, which have the same
# symbols in every run of the tracer. torch's own pickler of graphs takes only graph modules.


_STAND_INS = {**FUNCTIONS, "region": region}
_NAMES = {id(stand_in): name for name, stand_in in _STAND_INS.items()}
_KEPT = ("val", "zcompile", "partitioner_tag", "recompute", "ac_graph_id", "has_backward_hook", "seq_nr")
"""Keys of node meta that passes, including torch's partitioner, read; the origin of a node is in its data."""


class NotStorableError(Exception):
    """A program has a part that cannot be serialized."""


def dumped(value: Any) -> bytes:
    """Serialize a value made of programs, graphs and picklable objects; raise NotStorableError for anything else."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5).dump(value)
    except NotStorableError:
        raise
    except Exception as error:  # parts of the value raise errors of their own
        raise NotStorableError(str(error)) from error
    return stream.getvalue()


def loaded(content: bytes, mode: FakeTensorMode) -> Any:
    """Deserialize a value, with fake tensors created in `mode`.

    Unpickling executes code: the bytes must come from a folder that only this user can write. Raise ValueError for
    symbols of sizes that do not exist in this run of the tracer.
    """
    with no_new_guards(mode):
        return _Unpickler(content, mode).load()


@dataclass(frozen=True, slots=True)
class _Number:
    """A node's index in its graph, in place of the node."""

    number: int


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case FakeTensor():
                return _fake, _described(obj)
            case OpOverload() | HigherOrderOperator():
                return operator_named, (obj.name(),)
            case fx.Graph():
                return _graph_of, (_nodes(obj),)
            case fx.GraphModule():
                return _module_of, (obj.graph, _children(obj))
            case torch.SymInt():
                return size_of_expression, (expression_of(obj),)
            case fx.Node():
                raise NotStorableError(f"{obj} is outside its graph")
        if callable(obj) and (name := _NAMES.get(id(obj))):
            return _stand_in, (name,)
        if is_symbolic(obj):
            raise NotStorableError(f"{obj} is not a size")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, mode: FakeTensorMode) -> None:
        super().__init__(io.BytesIO(content))
        self._mode = mode

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        return functools.partial(found, mode=self._mode) if found in (_fake, size_of_expression) else found


def _stand_in(name: str) -> Any:
    return _STAND_INS[name]


def _described(value: FakeTensor) -> tuple[Any, ...]:
    shape, stride, offset = tuple(value.shape), tuple(value.stride()), value.storage_offset()
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise NotStorableError(f"a value of layout {value.layout}")
    return shape, stride, offset, value.dtype, value.device, value.requires_grad


def _fake(
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    *,
    mode: FakeTensorMode,
) -> torch.Tensor:
    with mode, torch.no_grad():
        made = empty_laid_out(shape, stride, offset, dtype, device)
    return made.requires_grad_(requires_grad) if requires_grad else made


def _nodes(graph: fx.Graph) -> list[tuple[Any, ...]]:
    numbers = {node: _Number(index) for index, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        args, kwargs = tree_map_only(fx.Node, numbers.__getitem__, (node.args, node.kwargs))
        meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        rows.append((node.op, node.target, args, kwargs, node.name, meta))
    return rows


def _graph_of(rows: Sequence[tuple[Any, ...]]) -> fx.Graph:
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, target, args, kwargs, name, meta in rows:
        given, named = tree_map_only(_Number, lambda ref: nodes[ref.number], (args, kwargs))
        node = graph.create_node(op, target, given, named, name=name)
        node.meta = meta
        nodes.append(node)
    return graph


def _children(module: fx.GraphModule) -> Mapping[str, fx.GraphModule]:
    children = {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
    held = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if held or len(children) < len(list(module.children())):
        raise NotStorableError(f"a graph holds {held or 'modules'}")
    return children


def _module_of(graph: fx.Graph, children: Mapping[str, fx.GraphModule]) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return fx.GraphModule(root, graph)
