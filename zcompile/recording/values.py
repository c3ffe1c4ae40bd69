"""Values of a recorded run as JSON, with the bytes of tensors in files named by their digests.

Without pickle: a recording contains only numbers, and names that are printed in programs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from zcompile.ir.layout import Unit
from zcompile.runtime.executor import BoundUnit, Gradients, InsideAverages
from zcompile.runtime.shards import Full, UnitShards
from zcompile.torch_internals.sizes import is_symbolic

Described = dict[str, Any]
"""A value as JSON: its kind and contents."""
ALIGNMENT = 64
"""Bytes of a cache line. CPU kernels may sum in another order if memory has another offset within a cache line."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """The description of a tensor, without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    shift: int
    """Offset of its memory within a cache line, in bytes."""
    digest: str
    """Digest of its elements in row-major order, whatever its strides are."""
    nan: int
    inf: int
    place: str = ""
    """Where its bytes are: "file"; "RUN CALL ITEM", a result of an earlier run; or "", if its line recomputes it."""

    @classmethod
    def of(cls, value: torch.Tensor) -> tuple[Tensor, memoryview]:
        """The description of a tensor, and its bytes.

        On CUDA, the blocking copy rules out all hazards of recording. It runs on the current stream, after the kernels
        that compute the value and, for received values, after the wait. The host continues only after the copy, so no
        later line can release, reduce in place or overwrite (in an arena) the memory being read.
        """
        host = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
        content = host.view(torch.uint8).numpy().data if host.numel() else memoryview(b"")
        nan, inf = non_finite(host)
        shift = value.data_ptr() % ALIGNMENT
        shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        kind = str(value.dtype).removeprefix("torch.")
        return cls(kind, shape, stride, str(value.device), shift, digest_of(content), nan, inf), content

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Tensor:
        fields = {**described, "shape": tuple(described["shape"]), "stride": tuple(described["stride"])}
        return cls(**{name: field for name, field in fields.items() if name != "kind"})

    def described(self) -> Described:
        return {"kind": "tensor", **asdict(self)}

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for tensors that a program cannot distinguish."""
        return self.dtype, self.shape, self.stride, self.device, self.shift, self.digest

    def has_bits_of(self, other: Tensor) -> bool:
        return (self.dtype, self.shape, self.digest) == (other.dtype, other.shape, other.digest)

    def made(self, content: bytes, device: torch.device) -> torch.Tensor:
        """Make the tensor in new memory with the recorded strides and offset within a cache line."""
        dtype = dtype_named(self.dtype)
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        value = flat.reshape(self.shape).to(device)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        if not value.numel():
            return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)
        memory = torch.empty(extent * dtype.itemsize + 2 * ALIGNMENT, dtype=torch.uint8, device=device)
        start = (self.shift - memory.data_ptr()) % ALIGNMENT
        place = memory[start : start + extent * dtype.itemsize].view(dtype)
        result = place.as_strided(self.shape, self.stride)
        if self._overlaps():
            places = torch.arange(extent, device=device).as_strided(self.shape, self.stride)
            place[places.reshape(-1)] = value.reshape(-1)
            return result
        return result.copy_(value)

    def _overlaps(self) -> bool:
        """True if elements may share memory, as in an expanded tensor."""
        last = 0
        for stride, size in sorted((s, n) for s, n in zip(self.stride, self.shape, strict=True) if n > 1):
            if stride <= last:
                return True
            last += stride * (size - 1)
        return False


@dataclass(frozen=True)
class RecordedUnit:
    """A unit in a replay: recorded parameters, without process groups."""

    unit: Unit
    tensors: Sequence[torch.Tensor]

    @property
    def shards(self) -> UnitShards:
        """None, cast for type checkers: a replay does nothing with shards."""
        return cast(UnitShards, None)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors[index]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of this name in torch. Raises ValueError if there is none."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found


def digest_of(content: bytes | memoryview) -> str:
    """The digest by which files are named and checked."""
    return hashlib.sha256(content).hexdigest()[:32]


def non_finite(value: torch.Tensor) -> tuple[int, int]:
    """The numbers of NaN and of infinite elements."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0, 0
    wide = value.float() if value.is_floating_point() and value.itemsize < 4 else value
    if bool(wide.isfinite().all()):
        return 0, 0
    return int(wide.isnan().sum()), int(wide.isinf().sum())


def described(value: Any, note: Callable[[torch.Tensor], Tensor]) -> Described:
    """Describe a value of a program; `note` describes its tensors."""

    def listed(values: Sequence[Any]) -> list[Described]:
        return [described(one, note) for one in values]

    match value:
        case torch.Tensor():
            return note(value).described()
        case None:
            return {"kind": "none"}
        case bool() | int() | float():
            return {"kind": "number", "value": value}
        case list() | tuple():
            return {"kind": "list", "items": listed(value)}
        case Gradients() | InsideAverages():
            parts = value.tensors if isinstance(value, Gradients) else value.parts()
            held = isinstance(value, Gradients) and value.held
            return {"kind": "gradients", "names": list(parts), "held": held, "items": listed(list(parts.values()))}
        case BoundUnit():
            own = [value.shards.local(param) for param in value.unit.params]
            return {"kind": "unit", "unit": value.unit.name, "names": list(value.unit.names), "items": listed(own)}
        case Full() | RecordedUnit():
            kind, names = "full" if isinstance(value, Full) else "unit", list(value.unit.names)
            return {"kind": kind, "unit": value.unit.name, "names": names, "items": listed(value.tensors)}
    return {"kind": "other"}


def leaves_of(value: Described) -> Iterator[Described]:
    """The tensors and numbers of a described value, in order."""
    for item in value.get("items", ()):
        yield from leaves_of(item)
    if value["kind"] in ("tensor", "number"):
        yield value


def labels_of(value: Described, names: Sequence[str]) -> Iterator[str]:
    """Names of `leaves_of(value)` in a line that binds `value` to `names`, of which the last may be `*rest`.

    Parameters and gradients have their own names, and items of a list have their index.
    """
    if value["kind"] in ("tensor", "number"):
        yield names[0]
    several = len(names) > 1 or names[0].startswith("*")
    for index, item in enumerate(value.get("items", ())):
        name = names[min(index, len(names) - 1)] if several else f"{names[0]}[{index}]"
        if name.startswith("*"):
            name = f"{name[1:]}[{index - len(names) + 1}]"
        yield from labels_of(item, [value["names"][index] if "names" in value else name])


def described_fake(value: Any) -> Any:
    """The layout of a region's traced value as JSON, by which kernels are chosen. Dynamic sizes have the traced values.

    None for values that were not traced, or have data-dependent sizes.
    """
    if isinstance(value, (tuple, list)):
        return [described_fake(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [*value.shape, *value.stride(), value.storage_offset()]
    if not all(size.node.has_hint() for size in sizes if is_symbolic(size)):
        return None
    known = [int(size.node.hint) if is_symbolic(size) else int(size) for size in sizes]
    rank = value.dim()
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": known[:rank],
        "stride": known[rank : 2 * rank],
        "offset": known[-1],
        "device": str(value.device),
        "varies": any(is_symbolic(size) for size in sizes),
    }


def norm_of(value: torch.Tensor) -> tuple[float, float, float]:
    """Norm, minimum and maximum of the finite elements of a tensor; 0 and NaN if there are none."""
    wide = value.detach().abs() if value.is_complex() else value.detach()
    wide = wide.to("cpu", torch.float64)
    finite = wide[wide.isfinite()]
    if not finite.numel():
        return 0.0, math.nan, math.nan
    return float(finite.norm()), float(finite.min()), float(finite.max())
