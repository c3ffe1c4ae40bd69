"""Inductor: graphs compiled to code, and what it asks for."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor.output_code import OutputCode
from torch._ops import OpOverload  # kinds of call targets in an ATen graph, and where their names lead

from zcompile.torch_internals.dynamo import quiet

__all__ = ["OutputCode"]
"""What is passed on from torch as it is."""


def compile_with_inductor(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile an ATen graph of fake inputs by Inductor; the result is called with a list, which it empties.

    `torch._inductor.standalone_compile` is documented, but lives in a private module.
    """
    compiled = _standalone(graph_module, example_inputs)
    # torch puts a module's own tensors in front of the list in the function that is left out.
    own = any(True for _ in itertools.chain(graph_module.parameters(), graph_module.buffers()))
    return _boxed_inside(compiled) if not own else lambda box: compiled(*box)


_ARTIFACTS = "torch._inductor.standalone_compile"
"""The logger that warns where an artifact cannot be saved, which is nobody's concern: we save none."""


_REGIONS = {"config_patches": {"triton.cudagraphs": False}}
"""A region reads full parameters, which are somewhere else in each step: a CUDA graph would read what was there."""


def inductor_code(graph_module: fx.GraphModule, example_inputs: list[Any]) -> str:
    """The code that Inductor writes for an ATen graph of fake inputs: Python, with kernels in C++ or Triton in it.

    `torch._inductor.utils.get_code` is what torch's own tests look at generated code with.
    """
    from torch._inductor import config
    from torch._inductor.utils import get_code

    with config.patch(force_disable_caches=True):
        return "\n".join(get_code(_standalone, graph_module, example_inputs))


def _standalone(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    from torch._inductor import standalone_compile  # importing Inductor takes a second; eager users do not pay for it

    # "from_graph" looks for the fake mode, whose symbols name the varying sizes, where Dynamo leaves it.
    for node in graph_module.graph.output_node().all_input_nodes:
        node.meta["example_value"] = node.meta["val"]
    with quiet(_ARTIFACTS):
        return standalone_compile(graph_module, example_inputs, dynamic_shapes="from_graph", options=_REGIONS)


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
