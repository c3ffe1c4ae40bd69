"""The choice of shard="auto": what the two dimensions of a mesh divide, by the memory at hand and the measured links.

Nothing is traced by then, so nothing is known of compute and activations. What is counted is a step's communication, as
if none of it were hidden, and the optimizer's work on the shards; and the bytes of the model state, with what a step
adds to them that does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import model_state
from zcompile.cost.simulator import update_seconds
from zcompile.ir.layout import Layout, Unit
from zcompile.ir.operation import Traffic
from zcompile.ir.ops import AllGather, GatherOutside, Reduce, ReduceOutside
from zcompile.ir.tensor_type import human_bytes

STATE_SHARE = 0.5
"""Share of the memory at hand that model state may take; the rest is for activations, which are not known yet."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one way to divide takes on a rank."""

    shard: str
    seconds: float
    """Of a step's communication, and of the optimizer."""
    nbytes: int
    """Of the model state, and of the parameters that a step gathers at a time."""

    def __str__(self) -> str:
        return f"{self.shard} {self.seconds:.3g} s, {human_bytes(self.nbytes)}"


@dataclass(frozen=True, slots=True)
class ShardChoice:
    """The estimate that was chosen, and the others; `room`: bytes that they may take."""

    chosen: Estimate
    estimates: Sequence[Estimate]
    room: int

    def __str__(self) -> str:
        fits = "the fastest that fits" if self.chosen.nbytes <= self.room else "the smallest, as none fits"
        others = "; ".join(map(str, self.estimates))
        return f'shard="auto" is {self.chosen.shard!r}, {fits} {human_bytes(self.room)}: {others}'


def estimate(shard: str, layout: Layout, hardware: Hardware) -> Estimate:
    """What a step takes of a model that is laid out so."""
    sent = sum(
        times * hardware.collective_seconds(traffic.payload, traffic.axis, traffic.messages)
        for unit in layout.units
        for traffic, times in traffic_of(unit, layout)
    )
    state = model_state(layout)
    kept = state.copies if layout.away else state.nbytes  # the optimizer's state is where the shards are
    largest = sorted(layout.gathered_bytes(unit.name) for unit in layout.units)[-2:]
    passing = sum(layout.secondary_bytes(unit.name) for unit in layout.units) if layout.has_secondary else 0
    beside = sum(largest) + (0 if layout.keeps_secondary else passing) if layout.stage.parameters_sharded else 0
    return Estimate(shard, sent + update_seconds(state.gradients, hardware), kept + beside)


def traffic_of(unit: Unit, layout: Layout) -> Iterator[tuple[Traffic, int]]:
    """What the lines of a unit send in a step of one micro-batch, and how often; no unit stays full over the turn."""
    params = tuple(param.name for param in unit.params if param.trainable)
    if unit.is_sharded:
        gather = AllGather(unit.name, dtype=unit.compute_dtype)
        yield gather.traffic(_NO_NODE, layout), 2 if layout.stage.parameters_sharded else 1
    for axis in layout.outside if unit.is_sharded and layout.has_secondary else ():
        outside = GatherOutside(unit.name, axis.name, dtype=unit.compute_dtype, wire=unit.outer_gather_dtype)
        yield outside.traffic(_NO_NODE, layout), 1
    if params:
        yield Reduce(unit.name, params, scatter=True, dtype=unit.reduction_dtype).traffic(_NO_NODE, layout), 1
    for axis in layout.outside if params else ():
        dtypes = unit.reduction_dtype, unit.outer_dtype
        yield ReduceOutside(unit.name, params, axis.name, layout.has_secondary, *dtypes).traffic(_NO_NODE, layout), 1


_NO_NODE: Any = None
"""What a line sends does not depend on its place in a program."""


def choose(told: Sequence[Mapping[str, Any]]) -> ShardChoice:
    """The fastest that fits on every rank, of equals the smallest; where none fits, the smallest.

    Args:
        told: By rank, what `as_message` gives.
    """
    rows = zip(*(rank["estimates"] for rank in told), strict=True)
    found = [
        Estimate(row[0]["shard"], max(one["seconds"] for one in row), max(one["nbytes"] for one in row)) for row in rows
    ]
    room = min(rank["room"] for rank in told)
    fitting = [one for one in found if one.nbytes <= room]
    fastest = min(fitting, key=lambda one: (one.seconds, one.nbytes), default=None)
    return ShardChoice(fastest or min(found, key=lambda one: one.nbytes), found, room)


def as_message(estimates: Sequence[Estimate], room: int) -> dict[str, Any]:
    """What a rank tells the others."""
    return {"estimates": [asdict(one) for one in estimates], "room": room}


def room_in(free: float, limit: int | None) -> int:
    """Bytes that model state may take of the `free` ones, beside the memory limit of a step if there is one."""
    return max(int(free * STATE_SHARE if limit is None else free - limit), 0)
