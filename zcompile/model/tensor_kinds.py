"""Which tensors of a model can be sharded: plain ones, and DTensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zcompile.errors import ModelError

_OF_EVERY_CLASS = frozenset(vars(type("Empty", (), {})))
_HARMLESS = _OF_EVERY_CLASS | {"__init__", "__new__", "__repr__", "__annotations__", "__annotate_func__", "__slots__"}


def check_kinds(model: nn.Module) -> None:
    """Refuse tensors of `model` that are more than their elements, such as quantised weights.

    Raises:
        ModelError: there is one: as a shard it would be a plain tensor of its dequantised values, without a word.
    """
    for name, tensor in _tensors(model):
        check_kind(name, tensor)


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """The same of one tensor that is called `name`."""
    if is_lazy(tensor):
        fix = "call the plain model with a batch before zcompile.compile, which gives it one"
        raise ModelError(name, "has no shape yet", fix)
    if not isinstance(tensor, DTensor) and (changed := _changed(type(tensor))):
        kind = type(tensor)
        problem = f"is a {kind.__module__}.{kind.__qualname__}, a subclass of Tensor with a {changed} of its own"
        fix = "keep what it consists of in plain buffers (of int8, say, and a scale), and compute with them in forward"
        raise ModelError(name, problem, fix)


def _changed(kind: type[torch.Tensor]) -> str:
    """What a class does otherwise than Tensor; empty if nothing."""
    for base in kind.__mro__:
        if base in (nn.Parameter, torch.Tensor):
            return ""
        for name in vars(base):
            if name not in _HARMLESS and (hasattr(torch.Tensor, name) or name == "__tensor_flatten__"):
                return name
    return ""


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and other attributes."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}" if path else key, value
