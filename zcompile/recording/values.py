"""Values of a recorded run: as JSON, with the bytes of tensors in files that are called by their digests.

No pickle: what is read back from a recording is numbers, and names that programs are printed with.
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
"""A value as JSON: its kind, and what it consists of."""
ALIGNMENT = 64
"""Kernels of the CPU may sum in another order where memory begins elsewhere within a cache line."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    shift: int
    """Bytes between the beginning of a cache line and the tensor's."""
    digest: str
    """Of its elements in the order of its dimensions, whatever its strides are."""
    nan: int
    inf: int
    place: str = ""
    """Where its bytes are: `file`; or `RUN CALL ITEM`, the line of an earlier run that gave it; nowhere, where its line
    computes it again."""

    @classmethod
    def of(cls, value: torch.Tensor) -> tuple[Tensor, memoryview]:
        """A tensor and its bytes.

        On CUDA this stands for every hazard of a recording: the copy is made on the current stream, behind the kernels
        that compute the value and, of what was received, behind the wait that has just run; and the host goes on when
        the copy has ended, so no later line can release, reduce in place or overwrite (an arena) what is being read.
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
        """Equal for tensors that a program cannot tell apart."""
        return self.dtype, self.shape, self.stride, self.device, self.shift, self.digest

    def has_bits_of(self, other: Tensor) -> bool:
        return (self.dtype, self.shape, self.digest) == (other.dtype, other.shape, other.digest)

    def made(self, content: bytes, device: torch.device) -> torch.Tensor:
        """The tensor again, in memory of its own that begins where the recorded one did within a cache line."""
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
        """True if elements may share memory, as those of a tensor that was expanded: they hold the same number."""
        last = 0
        for stride, size in sorted((s, n) for s, n in zip(self.stride, self.shape, strict=True) if n > 1):
            if stride <= last:
                return True
            last += stride * (size - 1)
        return False


@dataclass(frozen=True)
class RecordedUnit:
    """A unit as the program of one rank sees it, without groups: its parameters as they were."""

    unit: Unit
    tensors: Sequence[torch.Tensor]

    @property
    def shards(self) -> UnitShards:
        """Nothing that the program of one rank alone does with shards is done with these."""
        return cast(UnitShards, None)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors[index]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch calls so; raise ValueError if there is none."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def digest_of(content: bytes | memoryview) -> str:
    """The digest of bytes, as files are checked by it."""
    return hashlib.sha256(content).hexdigest()[:32]


def non_finite(value: torch.Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0, 0
    wide = value.float() if value.is_floating_point() and value.itemsize < 4 else value
    if bool(wide.isfinite().all()):
        return 0, 0
    return int(wide.isnan().sum()), int(wide.isinf().sum())


def described(value: Any, note: Callable[[torch.Tensor], Tensor]) -> Described:
    """A value that a program handles; `note` gives what is kept of each tensor."""

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
    """What `leaves_of(value)` are called, where a line binds `value` to `names`: the last may be `*rest`.

    Parameters and gradients by their own names, values of a list by their numbers.
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
    """A traced value of a region, as JSON: what kernels are chosen by. Sizes that vary are those that were traced.

    None for what was not traced, or has sizes that depend on data.
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
    """Norm, minimum and maximum of the elements of a tensor that are finite."""
    wide = value.detach().abs() if value.is_complex() else value.detach()
    wide = wide.to("cpu", torch.float64)
    finite = wide[wide.isfinite()]
    if not finite.numel():
        return 0.0, math.nan, math.nan
    return float(finite.norm()), float(finite.min()), float(finite.max())
