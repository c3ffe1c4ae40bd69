"""GPU autocast for models that are traced on the CPU.

Which operations `torch.autocast` computes in float32 depends on the device: on GPUs layer norms, softmax, powers and
losses are among them, on CPUs only few of these. So the saved activations and their bytes differ. Every build of torch
knows which operations autocast treats on GPUs; how it casts them is taken from `ATen/autocast_mode.h`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zcompile.runtime.device import HOST
from zcompile.torch_internals.operators import OpOverload, autocast_operations, defaults_of, other_kernels
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only

_LOW = frozenset(
    {"_convolution", "convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d"}
    | {"conv_transpose3d", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "linear", "matmul", "einsum"}
    | {"mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul", "linalg_vecdot"}
    | {"linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell"}
    | {"rnn_relu_cell", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention"}
)
"""Operations computed in the low dtype."""
_WIDEST = frozenset(
    {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"}
    | {"scatter_add"}
)
"""Operations computed in the widest dtype of their arguments."""
_BY_OPTION = frozenset(
    {"prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum"}
)
"""Operations that get dtype=float32 unless a dtype is given. All operations in no list are computed in float32."""


@contextlib.contextmanager
def autocast_of(kind: str) -> Iterator[None]:
    """Let `torch.autocast("cpu", ...)` cast as on a device of this kind. Affects all threads."""
    if kind == HOST:
        yield
        return
    operations = autocast_operations(kind)
    kernels: dict[str, Callable[..., Any] | None] = dict.fromkeys(autocast_operations(HOST))  # None: no cast
    kernels |= {name: _kernel(operation) for name, operation in operations.items()}
    with other_kernels(HOST, kernels):
        yield


def _kernel(operation: OpOverload) -> Callable[..., Any]:
    """The autocast kernel of an operation: casts the arguments and calls it."""
    name = operation.overloadpacket.__name__

    def compute(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype(HOST)
        with torch.autocast(HOST, enabled=False):
            if name in _BY_OPTION:
                given = {**dict(zip(defaults_of(operation), args, strict=False)), **kwargs}
                if _is_cast(args[0]) and given.get("dtype") is None:
                    given["dtype"] = torch.float32
                return operation(**given)
            dtype = low if name in _LOW else torch.float32
            if name in _WIDEST and not any(_is_cast(one) and one.dtype is dtype for one in tree_leaves((args, kwargs))):
                dtype = low
            args, kwargs = tree_map_only(
                torch.Tensor, lambda one: one.to(dtype) if _is_cast(one) else one, (args, kwargs)
            )
            return operation(*args, **kwargs)

    return compute


def _is_cast(value: Any) -> bool:
    """True for values that autocast casts: floating-point tensors other than float64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
