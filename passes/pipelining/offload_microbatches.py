"""offload_microbatches: move what an action saves for a later one out of the device's memory, and back before that.

    # 0F0                                       # 0F0
    m0_y = region_0(a, m0_x)                    m0_y = region_0(a, m0_x)
    ...                                         m0_y_offloaded = offload(m0_y, away)
    # 0F1                                       ...
    m1_y = region_0(a, m1_x)                    # 0F1
    ...                                  ->     m1_y = region_0(a, m1_x)
    # 0B0                                       m0_y_fetch = fetch(m0_y_offloaded, away)
    m0_da = region_1(a, m0_dy, m0_y)            ...
                                                # 0B0
                                                m0_y_again = wait(m0_y_fetch)
                                                m0_da = region_1(a, m0_dy, m0_y_again)

Each leaves as soon as it is there, and comes back `ahead` regions before the first one of another action that reads it.
What is small stays, and what is read again so soon that it would come back at once, as on the last rank of 1F1B. With a
limit of memory no more is moved than the step needs to keep it (cf. Qi et al. 2024, "PipeOffload").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from zcompile.ir.liveness import may_show
from zcompile.ir.operation import data
from zcompile.ir.ops import Call, Send, WaitReceive, called
from zcompile.ir.program import Program
from zcompile.passes.common.move_saved import LEAST, Saved, away_at_peak, is_random_state, offload


def offload_microbatches(
    program: Program, *, ahead: int = 1, least: int = LEAST, memory_limit: int | None = None
) -> Program:
    """A step that keeps what it saves from action to action, of at least `least` bytes, away.

    With `memory_limit`: as much as is needed, if that is enough, for the step to hold so many bytes at most.
    """
    program = program.copy()

    def choose(left: list[Saved]) -> Sequence[Saved]:
        """Those, the first made first, without which the line that holds the most would be within the limit."""
        if memory_limit is None:
            return left
        (held, away), chosen = away_at_peak(program, left), list[Saved]()
        for one in away:
            if held <= memory_limit:
                break
            chosen.append(one)
            held -= one.nbytes
        return chosen

    return offload(program, list(_saved_values(program, ahead, least)), choose)


def _saved_values(program: Program, ahead: int, least: int) -> Iterator[Saved]:
    """What may be elsewhere between two actions."""
    calls = program.nodes(Call)
    place = {call: index for index, call in enumerate(calls)}
    returned = {*program.results.outputs}
    for node in program.graph.nodes:
        nbytes, action = _bytes_of(node), data(node).action
        if nbytes < least or node in returned or not _is_alone(program, node):
            continue
        own = [user for user in node.users if data(user).action == action]
        readers = sorted((user for user in node.users if user in place and user not in own), key=place.__getitem__)
        if not readers or len(own) + len(readers) < len(node.users):
            continue
        maker = called(node)
        reading = [user for user in (maker, *own) if user in place]
        until = max(reading, key=place.__getitem__) if reading else node
        first, last = place[readers[0]], place.get(until, place[readers[0]])
        if first - last > ahead + 1:
            yield Saved(node, nbytes, maker, until, calls[first - ahead], tuple(readers))


def _bytes_of(node: fx.Node) -> int:
    """Bytes of what a region has made, or another stage sent; 0 of all else."""
    op = data(node).op
    if isinstance(op, WaitReceive):
        return data(node.all_input_nodes[0]).nbytes
    return data(node).nbytes if node.op == "call_function" and isinstance(data(called(node)).op, Call) else 0


def _is_alone(program: Program, node: fx.Node) -> bool:
    """True if its memory is its own, and a copy of it is as good: not of the state of a random number generator."""
    if isinstance(data(node).op, WaitReceive):
        return not any(may_show(program, user, node) for user in node.users if not isinstance(data(user).op, Send))
    others = (other for other in (*called(node).users, *node.users) if other is not node)
    shown = any(may_show(program, other, node) for other in others if not isinstance(data(other).op, Send))
    return not shown and not is_random_state(program, node)
