"""What the names in a printed program stand for: operators, functions of sizes, dtypes; and nothing else.

A text may come from anywhere. So no name is looked up that is not one of these, and nothing is called.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from zcompile.torch_internals.operators import HigherOrderOperator, OpNamespace, OpOverload, OpOverloadPacket

_OPERATORS = frozenset(
    {"abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "inv", "invert", "is_", "is_not", "le"}
    | {"lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv"}
    | {"truth", "xor"}
)
"""What of the module `operator` computes with values; the rest writes to what it is given, calls it, or looks up
attributes."""


def known(name: str) -> Any:
    """What a dotted name stands for in a printed program; None if it may not stand there."""
    first, *rest = name.split(".")
    match first, rest:
        case "aten", [packet, overload]:
            return _operator("aten", packet, overload)
        case "ops", ["higher_order", operation]:
            found = getattr(torch.ops.higher_order, operation, None)
            return found if isinstance(found, HigherOrderOperator) else None
        case "ops", [namespace, packet, overload]:
            return _operator(namespace, packet, overload)
        case "operator", [function] if function in _OPERATORS:
            return getattr(operator, function)
        case "math", [function] if not function.startswith("_"):
            return getattr(math, function, None)
        case "torch", [attribute]:
            return _of_torch(attribute)
    return None


def is_known(function: object) -> bool:
    """True for a function, no operation of torch's, that may stand in a program: it computes, and does nothing else."""
    module, name = str(getattr(function, "__module__", "")).removeprefix("_"), getattr(function, "__name__", "")
    return module in ("operator", "math", "torch") and known(f"{module}.{name}") is function


def _operator(namespace: str, packet: str, overload: str) -> OpOverload | None:
    inside = getattr(torch.ops, namespace, None)
    among = getattr(inside, packet, None) if isinstance(inside, OpNamespace) else None
    found = getattr(among, overload, None) if isinstance(among, OpOverloadPacket) else None
    return found if isinstance(found, OpOverload) else None


def _of_torch(attribute: str) -> Any:
    """A dtype, layout or memory format, or a function of sizes that vary."""
    result = vars(torch).get(attribute)
    if isinstance(result, (torch.dtype, torch.layout, torch.memory_format)):
        return result
    return result if attribute.startswith(("sym_", "_sym_")) and callable(result) else None
