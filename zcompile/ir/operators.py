"""The names that may appear in a printed program: operators, functions of sizes, dtypes, and nothing else.

A text is untrusted input: no other name is looked up, and nothing is called.
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
"""Pure functions of the module `operator`; the others write to their arguments, call them, or look up attributes."""


def known(name: str) -> Any:
    """Return the object that a dotted name in a printed program refers to; None if the name is not allowed."""
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
    """Return True for a pure function, other than a torch operator, that may appear in a program."""
    module, name = str(getattr(function, "__module__", "")).removeprefix("_"), getattr(function, "__name__", "")
    return module in ("operator", "math", "torch") and known(f"{module}.{name}") is function


def _operator(namespace: str, packet: str, overload: str) -> OpOverload | None:
    ops = getattr(torch.ops, namespace, None)
    overloads = getattr(ops, packet, None) if isinstance(ops, OpNamespace) else None
    found = getattr(overloads, overload, None) if isinstance(overloads, OpOverloadPacket) else None
    return found if isinstance(found, OpOverload) else None


def _of_torch(attribute: str) -> Any:
    """Return a dtype, layout, memory format, or function of symbolic sizes; None for any other attribute."""
    result = vars(torch).get(attribute)
    if isinstance(result, (torch.dtype, torch.layout, torch.memory_format)):
        return result
    return result if attribute.startswith(("sym_", "_sym_")) and callable(result) else None
