"""The physical floor: the time below which no step can fall, whatever library runs it.

    bytes    = 2 Ψ (N-1)/N · 4        what a rank must send, at any stage
    wire     = bytes / rate           at the rate that plain TCP reaches on this link, both directions at once
    compute  = a step of the compiled model and its optimizer on both ranks at once, without communication
    moving   = processor seconds that both ends, kernel included, need to exchange these bytes over plain TCP
    busy     = (N · compute + moving) / cores
    floor    = max(wire, compute, busy)

Averages and parameters that others hold must be sent once, whatever is sharded. What is sharded at stage 3 is gathered
a second time only for the sake of memory, so that is not in the floor.

Ψ is the number of parameters, N the ranks, all on one machine, each computing with one thread. On two ranks and two
cores busy is compute + moving / 2. All of it is measured in each round of the run. It leaves out what has to be paid as
well but differs between libraries: adding gradients up, copies, and what cannot overlap at both ends of a step.
"""

from __future__ import annotations

from benchmarks.common.configurations import COMPUTE
from benchmarks.speed.results import LinkResult

RANKS = 2
ITEM = 4  # bytes of a parameter
FORMULA = "floor = max(bytes / rate, compute, (ranks · compute + moving) / cores), bytes = 2Ψ(N-1)/N · 4"


def traffic(parameters: int, ranks: int = RANKS) -> int:
    """Bytes that a rank must send in a step."""
    return 2 * parameters * ITEM * (ranks - 1) // ranks


def lowest(wire: float, compute: float, moving: float, cores: int, ranks: int = RANKS) -> float:
    """Seconds, from seconds: bytes on the wire, a rank's compute, and processor time of moving the bytes."""
    return max(wire, compute, (ranks * compute + moving) / cores)


def floors(result: LinkResult, parameters: int, cores: int) -> dict[str, float]:
    """The floor in each turn in which compute and the line were measured, in seconds."""
    compute = result.healthy(COMPUTE)
    if compute is None:
        return {}
    nbytes = traffic(parameters)
    return {
        turn: lowest(nbytes / result.line.rate[turn], seconds, nbytes * result.line.moving[turn], cores)
        for turn, seconds in compute.seconds.items()
        if turn in result.line.rate
    }
