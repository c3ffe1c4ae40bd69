"""Axes: the dimensions of the mesh of ranks that a program runs on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum


class AxisKind(StrEnum):
    """What differs between the ranks along an axis."""

    SHARD = "shard"
    """Data, and shards of the same parameters."""
    REPLICATE = "replicate"
    """Data; shards are the same, or divided further: see `zcompile.ir.layout.Hybrid`."""
    TENSOR = "tensor"
    """Parts of each parameter; data is the same."""
    SEQUENCE = "sequence"
    """Tokens of the same data. These ranks are among those of the axes of data, too, which have shards."""
    PIPELINE = "pipeline"
    """Layers; data is the same."""


DATA = "dp"
"""The name of the data-parallel axis if its mesh has no names."""
_TEXT = re.compile(rf"({'|'.join(AxisKind)}) ([1-9]\d*)(?:, stride ([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of the mesh, printed as `shard 4, stride 2`.

    Attributes:
        name: The name of the mesh dimension, such as "dp".
        kind: What differs between its ranks.
        size: The number of ranks along it.
        stride: The distance between neighbors, in ranks of the whole mesh. It determines which links join them: see
            `zcompile.cost.hardware`.
    """

    name: str
    kind: AxisKind
    size: int
    stride: int = 1

    def __str__(self) -> str:
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        return f"{self.kind} {self.size}{stride}"

    @classmethod
    def parse(cls, name: str, text: str) -> Axis:
        """Parse an axis as printed by `str`.

        Raises:
            ValueError: `text` is not an axis.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an axis, such as 'shard 4, stride 2'")
        return cls(name, AxisKind(match[1]), int(match[2]), int(match[3] or 1))

    def ranks(self, rank: int) -> range:
        """Return the group of `rank` along this axis: the ranks that differ in it alone, including `rank`."""
        first = rank - rank // self.stride % self.size * self.stride
        return range(first, first + self.size * self.stride, self.stride)


def axes_of(
    world: int, tensor_parallel: int = 1, names: tuple[str, str] = (DATA, "tp"), replicas: int = 1
) -> tuple[Axis, ...]:
    """Return the axes of `world` data-parallel ranks, each of which is `tensor_parallel` adjacent ranks.

    `replicas`: how many times the shards are repeated; adjacent ranks have different shards. It must divide `world`.
    """
    assert world % replicas == 0, "all replicas have the same number of ranks"
    shards = world // replicas
    data = [Axis(names[0], AxisKind.SHARD, shards, tensor_parallel)]
    if replicas > 1:
        outer = Axis(str(AxisKind.REPLICATE), AxisKind.REPLICATE, replicas, shards * tensor_parallel)
        data = [outer, replace(data[0], name=str(AxisKind.SHARD))]
    return (*data, Axis(names[1], AxisKind.TENSOR, tensor_parallel)) if tensor_parallel > 1 else tuple(data)
