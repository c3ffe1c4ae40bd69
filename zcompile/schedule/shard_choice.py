"""Chooses for shard="auto" how to shard over the two dimensions of a mesh, by available memory and measured links.

Nothing is traced yet, so compute and activations are unknown. The time of a step counts its communication, as if none
were hidden, and the optimizer; its memory counts model state, and what a step adds to it regardless of the batch.
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
"""Share of available memory that model state may take; the rest is for activations, which are not known yet."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated time and memory of a rank for one value of `shard=`."""

    shard: str
    seconds: float
    """Seconds of a step's communication and of the optimizer."""
    nbytes: int
    """Bytes of model state, and of the parameters that are gathered at the same time."""

    def __str__(self) -> str:
        return f"{self.shard} {self.seconds:.3g} s, {human_bytes(self.nbytes)}"


@dataclass(frozen=True, slots=True)
class ShardChoice:
    """The chosen estimate and all estimates; `room`: the bytes that are available."""

    chosen: Estimate
    estimates: Sequence[Estimate]
    room: int

    def __str__(self) -> str:
        fits = "the fastest that fits" if self.chosen.nbytes <= self.room else "the smallest, as none fits"
        others = "; ".join(map(str, self.estimates))
        return f'shard="auto" is {self.chosen.shard!r}, {fits} {human_bytes(self.room)}: {others}'


def estimate(shard: str, layout: Layout, hardware: Hardware) -> Estimate:
    """Return the estimate for a model with this layout."""
    sent = sum(
        times * hardware.collective_seconds(traffic.payload, traffic.axis, traffic.messages)
        for unit in layout.units
        for traffic, times in traffic_of(unit, layout)
    )
    state = model_state(layout)
    kept = state.copies if layout.away else state.nbytes  # the optimizer's state is where the shards are
    largest = sorted(layout.gathered_bytes(unit.name) for unit in layout.units)[-2:]
    passing = sum(layout.secondary_bytes(unit.name) for unit in layout.units) if layout.has_secondary else 0
    gathered = sum(largest) + (0 if layout.keeps_secondary else passing) if layout.stage.parameters_sharded else 0
    return Estimate(shard, sent + update_seconds(state.gradients, hardware), kept + gathered)


def traffic_of(unit: Unit, layout: Layout) -> Iterator[tuple[Traffic, int]]:
    """Yield what the lines of a unit send in a step, and how often, if no unit stays full over the turn."""
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
"""In place of a node: what a line sends does not depend on its position in a program."""


def choose(messages: Sequence[Mapping[str, Any]]) -> ShardChoice:
    """Return the fastest choice that fits on every rank, the smallest if tied; if none fits, the smallest.

    Args:
        messages: The results of `as_message` of all ranks.
    """
    rows = zip(*(rank["estimates"] for rank in messages), strict=True)
    worst = [Estimate(row[0]["shard"], max(e["seconds"] for e in row), max(e["nbytes"] for e in row)) for row in rows]
    room = min(rank["room"] for rank in messages)
    fitting = [estimate for estimate in worst if estimate.nbytes <= room]
    fastest = min(fitting, key=lambda estimate: (estimate.seconds, estimate.nbytes), default=None)
    return ShardChoice(fastest or min(worst, key=lambda estimate: estimate.nbytes), worst, room)


def as_message(estimates: Sequence[Estimate], room: int) -> dict[str, Any]:
    """Return what a rank sends to the others, JSON-serializable."""
    return {"estimates": [asdict(estimate) for estimate in estimates], "room": room}


def room_in(free: float, limit: int | None) -> int:
    """Return the bytes of `free` that model state may take; with a memory limit for the step, what that leaves."""
    return max(int(free * STATE_SHARE if limit is None else free - limit), 0)
