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
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from zcompile.errors import ZcompileError
from zcompile.frontend.program_bytes import NotStorableError
from zcompile.frontend.python_numbers import varying_floats
from zcompile.torch_internals.aot_autograd import BypassAOTAutogradCache
from zcompile.torch_internals.inductor import OutputCode
from zcompile.torch_internals.operators import OpOverload, OpOverloadPacket, attention_kernels, namespace_of
from zcompile.torch_internals.sizes import FakeTensor


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
        """Bytes that another process can make the same step of.

        Raises:
            NotStorableError: something in the step cannot be kept beyond this process.
        """
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
    """Within, what AOTAutograd finds in its cache becomes a step by `restore`.

    Raises:
        ZcompileError: what `restore` raises.
    """
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
    held = (functools.reduce(getattr, str(node.target).split("."), module) for node in graph.find_nodes(op="get_attr"))
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
