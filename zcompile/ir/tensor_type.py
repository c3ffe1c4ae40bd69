"""The type of a value in a program: dtype and shape, printed as `f32[8, 256]`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "b8",
}
_LONG = {short: dtype for dtype, short in _SHORT.items()}
_TYPE = re.compile(r"(\w+)\[([^\]]*)\]")


@dataclass(frozen=True)
class Dim:
    """One dimension: its size, and its symbol if the size is dynamic (printed as `s0=8`)."""

    size: int
    symbol: str = ""

    def __str__(self) -> str:
        return f"{self.symbol}={self.size}" if self.symbol else str(self.size)

    @classmethod
    def parse(cls, text: str) -> Dim:
        symbol, _, size = text.strip().rpartition("=")
        return cls(int(size), symbol)


@dataclass(frozen=True)
class TensorType:
    """Dtype and dimensions of a tensor; a dynamic dimension has the size that was traced."""

    dtype: torch.dtype
    dims: tuple[Dim, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_text(self.dtype)}[{', '.join(map(str, self.dims))}]"

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """Parse the only type in `text`, such as `f32[8, 256]`."""
        (found,) = cls.parse_all(text)
        return found

    @classmethod
    def parse_all(cls, text: str) -> Iterator[TensorType]:
        for short, dims in _TYPE.findall(text):
            yield cls(dtype_of(short), tuple(Dim.parse(dim) for dim in dims.split(",") if dim.strip()))

    @classmethod
    def of(cls, value: Any) -> TensorType | None:
        """Return the type of a real or fake tensor; None for any other value."""
        if not isinstance(value, torch.Tensor):
            return None
        return cls(value.dtype, tuple(_dim(size) for size in value.shape))

    @classmethod
    def make(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorType:
        return cls(dtype, tuple(map(Dim, shape)))


def dtype_text(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as `bf16`."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype with a name that `dtype_text` gives.

    Raises:
        ValueError: no dtype has that name.
    """
    result = _LONG.get(text) or vars(torch).get(text)
    if not isinstance(result, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype")
    return result


def _dim(size: int | torch.SymInt) -> Dim:
    if isinstance(size, torch.SymInt):
        return Dim(size.node.hint if size.node.has_hint() else 1, str(size).replace(" ", ""))
    return Dim(int(size))


def human_bytes(count: float) -> str:
    """Format `count` bytes: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
