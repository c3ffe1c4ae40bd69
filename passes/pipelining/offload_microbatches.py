"""offload_microbatches: offload values that an action saves for a later action, and fetch them back before that.

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

Each value is offloaded as soon as it is computed, and fetched `ahead` regions before the first region of another action
that reads it. Small values stay, and so do values that would be fetched back at once, as on the last rank of 1F1B. With
a memory limit, no more is moved than is needed to stay within it (cf. Qi et al. 2024, "PipeOffload").
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
    """Return a step that offloads values of at least `least` bytes that it saves from one action for another.

    With `memory_limit`, in bytes, values are offloaded only until the step's peak is within it, if it can be.
    """
    program = program.copy()

    def choose(left: list[Saved]) -> Sequence[Saved]:
        """Choose all values, or the earliest that must be offloaded to bring the peak within the limit."""
        if memory_limit is None:
            return left
        (held, away), chosen = away_at_peak(program, left), list[Saved]()
        for value in away:
            if held <= memory_limit:
                break
            chosen.append(value)
            held -= value.nbytes
        return chosen

    return offload(program, list(_saved_values(program, ahead, least)), choose)


def _saved_values(program: Program, ahead: int, least: int) -> Iterator[Saved]:
    """Yield the values that can be offloaded between two actions."""
    calls = program.nodes(Call)
    order = {call: index for index, call in enumerate(calls)}
    returned = {*program.results.outputs}
    for node in program.graph.nodes:
        nbytes, action = _bytes_of(node), data(node).action
        if nbytes < least or node in returned or not _is_alone(program, node):
            continue
        own = [user for user in node.users if data(user).action == action]
        readers = sorted((user for user in node.users if user in order and user not in own), key=order.__getitem__)
        if not readers or len(own) + len(readers) < len(node.users):
            continue
        maker = called(node)
        reading = [user for user in (maker, *own) if user in order]
        until = max(reading, key=order.__getitem__) if reading else node
        first, last = order[readers[0]], order.get(until, order[readers[0]])
        if first - last > ahead + 1:
            yield Saved(node, nbytes, maker, until, calls[first - ahead], tuple(readers))


def _bytes_of(node: fx.Node) -> int:
    """Return the bytes of a value that a region computed or another stage sent; 0 for any other node."""
    op = data(node).op
    if isinstance(op, WaitReceive):
        return data(node.all_input_nodes[0]).nbytes
    return data(node).nbytes if node.op == "call_function" and isinstance(data(called(node)).op, Call) else 0


def _is_alone(program: Program, node: fx.Node) -> bool:
    """Return True if no other value aliases the memory of `node`, and it is no random generator state."""
    if isinstance(data(node).op, WaitReceive):
        return not any(may_show(program, user, node) for user in node.users if not isinstance(data(user).op, Send))
    others = (other for other in (*called(node).users, *node.users) if other is not node)
    shown = any(may_show(program, other, node) for other in others if not isinstance(data(other).op, Send))
    return not shown and not is_random_state(program, node)
