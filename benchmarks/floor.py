"""The physical floor: the time below which no step can fall, whatever library runs it.

    bytes    = c Ψ (N-1)/N · 4        what a rank must send; c = 2 at stages 0 to 2, 3 at stage 3
    wire     = bytes / rate           at the rate that plain TCP reaches on this link, both directions at once
    compute  = a step of the compiled model and its optimizer on both ranks at once, without communication
    moving   = processor seconds that both ends, kernel included, need to exchange these bytes over plain TCP
    busy     = (N · compute + moving) / cores
    floor    = max(wire, compute, busy)

Ψ is the number of parameters, N the ranks, all on one machine, each computing with one thread. On two ranks and two
cores busy is compute + moving / 2. All of it is measured in each round of the run. It leaves out what has to be paid as
well but differs between libraries: adding gradients up, copies, and what cannot overlap at both ends of a step.
"""

from __future__ import annotations

from benchmarks.configurations import COMPUTE
from benchmarks.results import LinkResult

RANKS = 2
ITEM = 4  # bytes of a parameter
FORMULA = "floor = max(bytes / rate, compute, (ranks · compute + moving) / cores), bytes = 2Ψ(N-1)/N · 4, 3Ψ at stage 3"


def traffic(stage: int, parameters: int, ranks: int = RANKS) -> int:
    """Bytes that a rank must send in a step: a reduction costs Ψ twice unless half of it is the gather of a shard."""
    return (3 if stage == 3 else 2) * parameters * ITEM * (ranks - 1) // ranks


def lowest(wire: float, compute: float, moving: float, cores: int, ranks: int = RANKS) -> float:
    """Seconds, from seconds: bytes on the wire, a rank's compute, and processor time of moving the bytes."""
    return max(wire, compute, (ranks * compute + moving) / cores)


def floors(result: LinkResult, stage: int, parameters: int, cores: int) -> dict[str, float]:
    """The floor of `stage` in each turn in which compute and the line were measured, in seconds."""
    compute = result.healthy(COMPUTE)
    if compute is None:
        return {}
    nbytes = traffic(stage, parameters)
    return {
        turn: lowest(nbytes / result.line.rate[turn], seconds, nbytes * result.line.moving[turn], cores)
        for turn, seconds in compute.seconds.items()
        if turn in result.line.rate
    }
