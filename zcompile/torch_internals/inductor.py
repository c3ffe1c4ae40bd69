"""Inductor: compiling graphs, and their generated code."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor.output_code import OutputCode
from torch._ops import OpOverload  # the type of call targets in an ATen graph

from zcompile.torch_internals.dynamo import quiet

__all__ = ["OutputCode"]
"""Names re-exported unchanged from torch."""


def compile_with_inductor(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile an ATen graph with fake inputs by Inductor; the result takes a list of arguments, and empties it.

    `torch._inductor.standalone_compile` is documented, but in a private module.
    """
    compiled = _standalone(graph_module, example_inputs)
    # The function that `_boxed_inside` skips would prepend the module's own tensors, so it is kept if there are any.
    own = any(True for _ in itertools.chain(graph_module.parameters(), graph_module.buffers()))
    return _boxed_inside(compiled) if not own else lambda box: compiled(*box)


_ARTIFACTS = "torch._inductor.standalone_compile"
"""The logger that warns if an artifact cannot be saved; zcompile saves none."""


_REGIONS = {"config_patches": {"triton.cudagraphs": False}}
"""No CUDA graphs: the addresses of full parameters change in each step, and a graph would read the old ones."""


def inductor_code(graph_module: fx.GraphModule, example_inputs: list[Any]) -> str:
    """The code that Inductor generates for an ATen graph with fake inputs: Python with C++ or Triton kernels.

    torch's own tests use `torch._inductor.utils.get_code` for this.
    """
    from torch._inductor import config
    from torch._inductor.utils import get_code

    with config.patch(force_disable_caches=True):
        return "\n".join(get_code(_standalone, graph_module, example_inputs))


def _standalone(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    from torch._inductor import standalone_compile  # imported lazily: it takes a second, which eager users do not need

    # "from_graph" takes the fake mode, with the symbols of dynamic sizes, from Dynamo's metadata.
    for node in graph_module.graph.output_node().all_input_nodes:
        node.meta["example_value"] = node.meta["val"]
    with quiet(_ARTIFACTS):
        return standalone_compile(graph_module, example_inputs, dynamic_shapes="from_graph", options=_REGIONS)


def _boxed_inside(compiled: Any) -> Callable[[list[Any]], Any]:
    """The inner function of standalone_compile's result: it takes a list and frees arguments after their last use.

    The result itself takes positional arguments and keeps them alive. If torch's wrappers are not as expected, this
    does the same.
    """
    found = None
    function = getattr(compiled, "_compiled_fn", None)
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if getattr(function, "__qualname__", "") == "aot_module_simplified.<locals>.forward":
            found = inner
        function = inner
    return found or (lambda box: compiled(*box))


def prepare_inductor(device: torch.device) -> Callable[[], None]:
    """Compile an empty kernel with Inductor in a thread, while models are traced; returns a function that waits for it.

    Before its first CPU kernel, Inductor asks gcc for supported vector instructions, which takes 6 to 10 s if caches
    are empty, and precompiles or preprocesses its headers. If the thread fails, so will the compilation of regions,
    which reports the error. Hazard: Inductor caches the answers without a lock, so wait before compiling anything.
    """
    if device.type != "cpu":
        return lambda: None
    # Import here, not in the thread: two threads must not import Inductor's modules, which import each other, at once.
    from torch._inductor import codecache, compile_fx, cpp_builder, cpu_vec_isa  # noqa: F401

    def compile_kernel() -> None:
        source = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'
        with contextlib.suppress(Exception):
            codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], source)

    thread = threading.Thread(target=compile_kernel, name="zcompile prepare", daemon=True)
    thread.start()
    return thread.join


def force_stride_order() -> OpOverload:
    """Inductor's own operation (tensor, strides) -> tensor with strides of that order; may return its argument."""
    from torch._inductor.inductor_prims import force_stride_order as force

    operation: OpOverload = force
    return operation


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions of operations."""
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
    return table
