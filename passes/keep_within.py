"""keep_within: keep further units full from the forward to the backward, as far as a limit of memory allows.

Each one kept saves its second gather and costs its full bytes from its forward to its backward. Those nearest to the
turn, which stay for the shortest time, are kept first; one that does not fit is passed over.
"""

from __future__ import annotations

from torch import fx

from zcompile.errors import OptionError
from zcompile.memory import peak_bytes
from zcompile.ops import AllGather, Phase, WaitGather, op_of
from zcompile.passes.keep_full import keep
from zcompile.program import Program
from zcompile.tensor_type import human_bytes


def keep_within(program: Program, *, memory_limit: int) -> Program:
    """A program that holds at most `memory_limit` bytes beside shards and optimizer state (see `zcompile.memory`).

    Raises:
        OptionError: it holds more already.
    """
    least = peak_bytes(program)
    if least > memory_limit:
        found = f"{human_bytes(memory_limit)} is less than the {human_bytes(least)} that this step takes"
        raise OptionError("memory_limit", found, f"give at least {least} bytes, a smaller prefetch, or a smaller batch")
    for unit in _gathered_again(program):
        trial = program.copy()
        keep(trial, *_twice(trial, unit))
        if peak_bytes(trial) <= memory_limit:
            program = trial
    return program


def _gathered_again(program: Program) -> list[str]:
    """Units that are gathered once in the forward and once more in the backward, in the backward's order."""
    again = [op_of(node, AllGather).unit for node in program.nodes(AllGather, phase=Phase.BACKWARD)]
    before = [op_of(node, AllGather).unit for node in program.nodes(AllGather, phase=Phase.FORWARD)]
    return [unit for unit in again if before.count(unit) == again.count(unit) == 1]


def _twice(program: Program, unit: str) -> list[fx.Node]:
    """The full parameters of `unit`, gathered in the forward and again in the backward."""
    return [node for node in program.nodes(WaitGather) if op_of(node, WaitGather).unit == unit]
