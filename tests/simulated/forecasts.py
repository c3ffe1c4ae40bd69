"""The operations of a model's step as it is traced on a GPU, and as a plan for GPUs traces it on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import zcompile
from tests.models import batch, make
from zcompile import Program
from zcompile.engine.step_trace import Traced, intercepting
from zcompile.tools.tracing import trace
from zcompile.torch_internals.pytree import tree_leaves


def here(kind: str, dtype: torch.dtype) -> Counter[str]:
    """As it is planned."""
    return operations(trace(make(kind), batch(kind, 0, 0), dtype=dtype, device="cuda", fuses=False))


def on_a_gpu(rank: int, kind: str, dtype: torch.dtype) -> Counter[str]:
    """As it is compiled."""
    compiled = zcompile.compile(make(kind).cuda(), dtype=dtype, backend="eager")
    try:
        with intercepting():
            compiled(*[tensor.cuda() for tensor in batch(kind, 0, 0)])
    except Traced as found:
        return operations(found.program)
    raise AssertionError("a model that is called is traced")


ALIKE = frozenset(
    {"mm", "addmm", "native_layer_norm", "native_layer_norm_backward", "_log_softmax", "_log_softmax_backward_data"}
    | {"nll_loss_forward", "nll_loss_backward", "gelu", "gelu_backward", "embedding", "sum", "convolution", "tanh"}
)
"""Operations that are on GPUs what they are on CPUs; attention and batch norm have kernels of their own."""


def operations(program: Program) -> Counter[str]:
    """How often each operation computes a value of each type."""
    return Counter(
        f"{node.target} {kind_of(node.meta.get('val'))}"
        for node in program.graph.nodes
        if node.op == "call_function" and ALIKE.intersection(str(node.target).split("."))
    )


def kind_of(value: Any) -> str:
    """Dtypes and shapes of what an operation gives."""
    return " ".join(f"{one.dtype} {list(one.shape)}" for one in tree_leaves(value) if isinstance(one, torch.Tensor))
