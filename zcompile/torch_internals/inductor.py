"""Inductor: compiling graphs, and their generated code."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch._ops import HigherOrderOperator, OpOverload  # the types of call targets in an ATen graph

from zcompile.torch_internals.dynamo import quiet
from zcompile.torch_internals.operators import is_wait_for_collective

__all__ = ["OutputCode"]
"""Names re-exported unchanged from torch."""


def compile_with_inductor(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile an ATen graph with fake inputs by Inductor; the result takes a list of arguments, and empties it.

    `torch._inductor.standalone_compile` is documented, but in a private module.
    """
    compiled = _standalone(graph_module, example_inputs)
    # The functions that `_boxed_inside` skips prepend the module's own tensors, so they are kept if there are any.
    if any(True for _ in itertools.chain(graph_module.parameters(), graph_module.buffers())):
        return lambda box: compiled(*box)
    return _boxed_inside(compiled, is_plain=_is_plain(graph_module.graph))


_ARTIFACTS = "torch._inductor.standalone_compile"
"""The logger that warns if an artifact cannot be saved; zcompile saves none."""


def _options(graph: fx.Graph) -> dict[str, Any]:
    """Return how Inductor compiles a region.

    No CUDA graphs: the addresses of full parameters change in each step, and a graph would read the old ones. Where
    ranks communicate, operations keep their order, in which compute hides that.
    """
    waits = any(isinstance(node.target, OpOverload) and is_wait_for_collective(node.target) for node in graph.nodes)
    unordered = ("triton.cudagraphs", *(("reorder_for_locality", "reorder_for_peak_memory") if waits else ()))
    return {"config_patches": dict.fromkeys(unordered, False)}


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
    options = _options(graph_module.graph)
    with quiet(_ARTIFACTS):
        return standalone_compile(graph_module, example_inputs, dynamic_shapes="from_graph", options=options)


def _boxed_inside(compiled: Any, *, is_plain: bool) -> Callable[[list[Any]], Any]:
    """The inner function of standalone_compile's result: it takes a list and frees arguments after their last use.

    The result itself takes positional arguments and keeps them alive. If torch's wrappers are not as expected, this
    does the same. `is_plain`: see `_is_plain`; then what is called after the first time is Inductor's own function.
    """
    wrappers: list[Any] = []
    function: Any = getattr(compiled, "_compiled_fn", None)
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        wrappers.append(function)
        function = inner
    names = [getattr(wrapper, "__qualname__", type(wrapper).__name__) for wrapper in wrappers]
    if _POSITIONAL not in names:
        return lambda box: compiled(*box)
    outside = len(names) - names[::-1].index(_POSITIONAL)
    boxed: Callable[[list[Any]], Any] = [*wrappers, function][outside]
    known = is_plain and _PASSING_ON.issuperset(names[outside:]) and isinstance(function, CompiledFxGraph)
    return _direct(boxed, function) if known else boxed


_POSITIONAL = "aot_module_simplified.<locals>.forward"
"""AOTAutograd's function that takes positional arguments."""
_PASSING_ON = {"_create_runtime_wrapper.<locals>.runtime_wrapper", "SerializableCompiledFunction"}
"""AOTAutograd's functions around a graph without gradients that only pass values on if the graph is plain."""


def _direct(boxed: Callable[[list[Any]], Any], code: CompiledFxGraph) -> Callable[[list[Any]], Any]:
    """`boxed` in the first call, in which torch stores what it has tuned, then the generated function inside `code`.

    Between them some 25 Python functions are called for each region and step, which look up gradient modes, profilers
    and caches (torch 2.13). Programs run without gradients.
    """
    call: Callable[[list[Any]], Any] | None = None

    def run(box: list[Any]) -> Any:
        nonlocal call
        if call is not None:
            return call(box)
        results = boxed(box)
        call = code.current_callable
        return results

    return run


def _is_plain(graph: fx.Graph) -> bool:
    """True if a graph writes to nothing, and no result is an input or a view of one: AOTAutograd makes these anew."""
    views = set(graph.find_nodes(op="placeholder"))
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        of_operator = isinstance(node.target, OpOverload)
        if isinstance(node.target, HigherOrderOperator) or (of_operator and node.target._schema.is_mutable):
            return False
        if (not of_operator or node.target.is_view) and not views.isdisjoint(node.all_input_nodes):
            views.add(node)
    return views.isdisjoint(graph.output_node().all_input_nodes)


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


def loss_decompositions(*, fuses: bool, chunks: bool = False) -> Mapping[Any, Callable[..., Any]] | None:
    """What is decomposed as a step is traced; None for nothing.

    `fuses`: for a step that Inductor compiles, and decomposes anyway. torch's partitioner recomputes no `_log_softmax`,
    but what it consists of: under autocast the logits are saved as they are multiplied, in 16 bits, in place of their
    log-probabilities in 32. `chunks`: for losses that are computed in chunks of rows, and means of all chunks.
    """
    if not fuses and not chunks:
        return None
    aten = torch.ops.aten
    losses = [aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward]
    losses += [aten._log_softmax, aten._log_softmax_backward_data] if fuses else []
    losses += [getattr(aten, name) for name in _OF_ROWS] if chunks else []
    table: dict[Any, Callable[..., Any]] = {**get_decompositions(losses)}
    table |= {aten.mean.default: _mean} if chunks else {}
    return table if fuses else {**table, aten.nll_loss_backward.default: _nll_loss_backward}


def _nll_loss_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a mean as that of a sum, by torch's kernel, which passes once over what is wide."""
    result: torch.Tensor = NotImplemented
    if reduction == _MEAN:
        rest = (log_probabilities, targets, weight, _SUM, ignored, total_weight)
        result = torch.ops.aten.nll_loss_backward(gradient / total_weight, *rest)
    return result


_MEAN, _SUM = 1, 2
"""Reductions of losses, as torch numbers them."""


def _mean(given: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A sum of all elements, and a division; as in torch's kernel, 16-bit elements are added up in 32 bits."""
    result = dtype or given.dtype
    added = given.sum(dtype=torch.float32 if result.itemsize < 4 else result)
    return (added / given.numel()).to(result)


_OF_ROWS = [
    f"{loss}{half}"
    for loss in ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss")
    for half in ("", "_backward")
]
"""Losses that one operation computes of all rows, and reduces."""


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions of operations."""
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
    return table
