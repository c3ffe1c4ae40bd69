"""Axes: the dimensions of the mesh of ranks that a program runs on, one for each way in which ranks differ."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum


class AxisKind(StrEnum):
    """What ranks that differ along an axis have."""

    SHARD = "shard"
    """Other data, and other shards of the same parameters."""
    REPLICATE = "replicate"
    """Other data, and the same shards, or other parts of them: see `zcompile.ir.layout.Hybrid`."""
    TENSOR = "tensor"
    """The same data, and other parts of each parameter."""
    PIPELINE = "pipeline"
    """The same data, and other layers."""


DATA = "dp"
"""What the axis of data parallelism is called where its mesh has no names."""
_TEXT = re.compile(rf"({'|'.join(AxisKind)}) ([1-9]\d*)(?:, stride ([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of the mesh. Printed as `shard 4, stride 2`.

    Attributes:
        name: As in the mesh: "dp".
        kind: What its ranks have.
        size: How many ranks differ in it alone.
        stride: How far each of them is from the next, in ranks of the whole mesh. It says which links join them: see
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
        """What `str` gave.

        Raises:
            ValueError: it is no axis.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no axis, such as 'shard 4, stride 2'")
        return cls(name, AxisKind(match[1]), int(match[2]), int(match[3] or 1))

    def ranks(self, rank: int) -> range:
        """The ranks that differ from `rank` in this axis alone, it included."""
        first = rank - rank // self.stride % self.size * self.stride
        return range(first, first + self.size * self.stride, self.stride)


def axes_of(
    world: int, tensor_parallel: int = 1, names: tuple[str, str] = (DATA, "tp"), replicas: int = 1
) -> tuple[Axis, ...]:
    """Data parallelism over `world` ranks, each of them `tensor_parallel` neighbours that have parts of the model.

    `replicas`: how often the shards repeat, neighbours having different ones; it divides the world.
    """
    assert world % replicas == 0, "replicas have as many ranks each"
    shards = world // replicas
    data = [Axis(names[0], AxisKind.SHARD, shards, tensor_parallel)]
    if replicas > 1:
        outer = Axis(str(AxisKind.REPLICATE), AxisKind.REPLICATE, replicas, shards * tensor_parallel)
        data = [outer, replace(data[0], name=str(AxisKind.SHARD))]
    return (*data, Axis(names[1], AxisKind.TENSOR, tensor_parallel)) if tensor_parallel > 1 else tuple(data)
