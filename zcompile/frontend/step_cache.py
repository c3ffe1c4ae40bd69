"""The cache of steps: AOTAutograd's own, in torch's cache folder, whose entries have rewritten programs in them.

torch keys an entry by Dynamo's graph, its inputs, its configuration and its version, and looks one up before it traces
the graph: what is found there is neither traced nor rewritten again. A step keeps what it is in bytes; what the graph
alone does not tell (names, layout, options, our own code) is a tag that the key gets.

Ranks look on their own. What one has written the others find where they share a folder; all that they must have in
common, they still compare before a program first communicates.
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
    """A rewritten step that runs, with AOTAutograd's calling convention; it may be a weak proxy."""

    saved: Sequence[fx.Node]
    """Values that the forward hands to the backward, tensors first, then sizes."""
    reread: Sequence[int]
    """Inputs, by position, that are parameters which the backward reads: AOTAutograd is told that they are saved,
    after the saved tensors; what it carries is the full parameter where it is kept, and a placeholder elsewhere."""

    def forward(self, box: list[Any]) -> list[Any]: ...

    def backward(self, box: list[Any]) -> list[Any]: ...

    def content(self) -> bytes:
        """Bytes that another process can make the same step of; raise NotStorableError where there are none."""
        ...


@dataclass(frozen=True)
class StepCache:
    """How steps of a compiler are kept.

    Attributes:
        depends_on: All that a step depends on beside its graph and the names and layout of its parameters.
        restore: Makes a step of its content.
    """

    depends_on: str
    restore: Callable[[bytes], Runner]


@dataclass
class Lookup:
    """One look into the cache; it makes the step of the entry that is found, once for its forward and backward."""

    restore: Callable[[bytes], Runner]
    runner: Runner | None = None


_LOOKUP: ContextVar[Lookup] = ContextVar("zcompile_lookup")


class RefusedError(BaseException):
    """An entry was found, and the step is refused: no Exception, which torch would take for a damaged entry."""

    def __init__(self, reason: ZcompileError) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextlib.contextmanager
def looking(restore: Callable[[bytes], Runner]) -> Iterator[None]:
    """Within, what AOTAutograd finds in its cache becomes a step by `restore`; what that raises is raised."""
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
    """True if the graph and the kinds of its inputs tell all that tracing it depends on.

    They do not tell what operators and tensor classes of the user's own compute, nor the numbers in tensors that the
    graph holds; torch's key says nothing of inputs that share memory, by which AOTAutograd writes to all of them, nor
    of the floats that a trace was for, which may be numbers of its graph.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if any(type(value) not in _PLAIN for value in tensors):
        return False
    places = {StorageWeakRef(value.untyped_storage()) for value in tensors}
    return len(places) == len(tensors) and all(map(_is_of_torch, nested_in(module)))


def _is_of_torch(module: fx.GraphModule) -> bool:
    """True if a graph calls operators of torch alone, and holds nothing but graphs."""
    graph = module.graph
    held = (operator.attrgetter(str(node.target))(module) for node in graph.find_nodes(op="get_attr"))
    if graph.find_nodes(op="call_module") or not all(isinstance(one, fx.GraphModule) for one in held):
        return False
    if varying_floats(graph):
        return False
    called = (node.target for node in graph.nodes if isinstance(node.target, (OpOverload, OpOverloadPacket)))
    return all(namespace_of(one) in _OF_TORCH for one in called)


def nested_in(module: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph, and those that it calls."""
    return [one for one in module.modules() if isinstance(one, fx.GraphModule)]


def global_state() -> str:
    """What torch traces operations by beside their arguments, as far as its own keys may leave it out."""
    state = attention_kernels(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled
    return f"{state} {torch.get_default_dtype()} {torch.is_inference_mode_enabled()}"


@functools.cache
def own_source() -> str:
    """A digest of the code of zcompile: what another version has kept is not this one's."""
    digest = hashlib.sha256(version("zcompile").encode())
    for package in ("zcompile", "zcompile.passes", "zcompile.runtime"):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()


class ForwardCode(OutputCode):
    """The forward of a step, as AOTAutograd takes code that compilers give it; its entry has the whole step."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._content = runner, b""
        self._boxed_call = True  # of the object: Dynamo's wrappers copy what it has, not what its class has

    def __call__(self, inputs: Any) -> list[Any]:
        return self._runner.forward(inputs)

    def prepare_for_serialization(self) -> None:
        try:
            self._content = self._runner.content()
        except NotStorableError as error:
            raise BypassAOTAutogradCache(str(error)) from error
        del self._runner  # of the copy that is written

    def post_compile(self, *_: object) -> None:
        lookup = _LOOKUP.get()
        try:
            self._runner = lookup.runner = lookup.restore(self._content)
        except ZcompileError as error:
            raise RefusedError(error) from error
        self._content = b""


class BackwardCode(OutputCode):
    """The backward of a step, of which its entry has nothing."""

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


# -- programs as bytes ------------------------------------------------------------------------------------------------
#
# What `pickle` knows, and graphs, values and operators as well. Sizes that vary are expressions of those of the inputs,
# which the tracer gives the same names in every run. torch's own pickler of graphs takes graph modules alone.


_STAND_INS = {**FUNCTIONS, "region": region}
_NAMES = {id(stand_in): name for name, stand_in in _STAND_INS.items()}
_KEPT = ("val", "zcompile", "partitioner_tag", "recompute", "ac_graph_id", "has_backward_hook", "seq_nr")
"""What passes, torch's partitioner among them, read of a node; where it came from is in its data."""


class NotStorableError(Exception):
    """What a program holds cannot be kept beyond this process."""


def dumped(value: Any) -> bytes:
    """Bytes of a value made of programs, graphs, and what can be pickled; raise NotStorableError for anything else."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5).dump(value)
    except NotStorableError:
        raise
    except Exception as error:  # as the parts of it have their own
        raise NotStorableError(str(error)) from error
    return stream.getvalue()


def loaded(content: bytes, mode: FakeTensorMode) -> Any:
    """The value that has these bytes, traced values made in `mode`.

    What the bytes say is executed: they must come from a folder that only this user can write. Raise ValueError for
    sizes that are not among those that vary in this run of the tracer.
    """
    with no_new_guards(mode):
        return _Unpickler(content, mode).load()


@dataclass(frozen=True, slots=True)
class _Number:
    """A node's number in its graph, in its place."""

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
                raise NotStorableError(f"{obj} stands outside of its graph")
        if callable(obj) and (name := _NAMES.get(id(obj))):
            return _stand_in, (name,)
        if is_symbolic(obj):
            raise NotStorableError(f"{obj} is no size")
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
        given, named = tree_map_only(_Number, lambda one: nodes[one.number], (args, kwargs))
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
