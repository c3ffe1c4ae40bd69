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
from dataclasses import dataclass, replace

import torch
from torch import fx

from zcompile.cost.memory import live_bytes
from zcompile.ir.liveness import may_show
from zcompile.ir.operation import Data, Phase, data
from zcompile.ir.ops import Call, Fetch, Item, Offload, OffloadStore, Send, WaitFetch, WaitReceive
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items
from zcompile.ir.tensor_type import TensorType, human_bytes
from zcompile.passes.common.move_saved import LEAST, is_random_state


def offload_microbatches(
    program: Program, *, ahead: int = 1, least: int = LEAST, memory_limit: int | None = None
) -> Program:
    """A step that keeps what it saves from action to action, of at least `least` bytes, away.

    With `memory_limit`: as much as is needed, if that is enough, for the step to hold so many bytes at most.
    """
    program = program.copy()
    left = list(_saved_values(program, ahead, least))
    if not left:
        return program
    away, moved = program.add_placeholder("away", Data(OffloadStore(), Phase.STEP)), list[_Saved]()
    while chosen := left if memory_limit is None else _enough(program, left, memory_limit):
        for one in chosen:
            _move(program, one, away)
        moved += chosen
        left = [one for one in left if one not in moved]
    if not moved:
        program.graph.erase_node(away)
    gone, stay = (human_bytes(sum(one.nbytes for one in some)) for some in (moved, left))
    note = f"activations away: {len(moved)}, {gone}; {stay} stay that could be"
    return replace(program, notes=(*program.notes, note))


@dataclass(frozen=True)
class _Saved:
    """A value that an action saves, and later ones read.

    Attributes:
        node: It.
        nbytes: What it takes.
        behind: The line behind which it leaves.
        until: The last line of its own action that reads it.
        early: The line before which it is fetched.
        readers: The lines of other actions that read it, in order.
    """

    node: fx.Node
    nbytes: int
    behind: fx.Node
    until: fx.Node
    early: fx.Node
    readers: tuple[fx.Node, ...]


def _saved_values(program: Program, ahead: int, least: int) -> Iterator[_Saved]:
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
        maker = node.all_input_nodes[0] if isinstance(data(node).op, Item) else node
        reading = [user for user in (maker, *own) if user in place]
        until = max(reading, key=place.__getitem__) if reading else node
        first, last = place[readers[0]], place.get(until, place[readers[0]])
        if first - last > ahead + 1:
            yield _Saved(node, nbytes, after_items(maker), until, calls[first - ahead], tuple(readers))


def _bytes_of(node: fx.Node) -> int:
    """Bytes of what a region has made, or another stage sent; 0 of all else."""
    op = data(node).op
    if isinstance(op, WaitReceive):
        return data(node.all_input_nodes[0]).nbytes
    call = node.all_input_nodes[0] if isinstance(op, Item) else node
    return data(node).nbytes if node.op == "call_function" and isinstance(data(call).op, Call) else 0


def _is_alone(program: Program, node: fx.Node) -> bool:
    """True if its memory is its own, and a copy of it is as good: not of the state of a random number generator."""
    if isinstance(data(node).op, WaitReceive):
        return not any(may_show(program, user, node) for user in node.users if not isinstance(data(user).op, Send))
    call = node.all_input_nodes[0] if isinstance(data(node).op, Item) else node
    others = (other for other in (*call.users, *node.users) if other is not node)
    shown = any(may_show(program, other, node) for other in others if not isinstance(data(other).op, Send))
    return not shown and not is_random_state(program, node)


def _enough(program: Program, left: Sequence[_Saved], limit: int) -> list[_Saved]:
    """Those, the first made first, without which the line that holds the most would be within the limit."""
    live = live_bytes(program)
    peak, held = max(live.items(), key=lambda line: line[1])
    place, chosen = {line: index for index, line in enumerate(program.graph.nodes)}, list[_Saved]()
    for one in left:
        if held <= limit:
            break
        if place[one.until] < place[peak] < place[one.early]:
            chosen.append(one)
            held -= one.nbytes
    return chosen


def _move(program: Program, saved: _Saved, away: fx.Node) -> None:
    node, meta = saved.node, data(saved.node)
    with program.graph.inserting_after(saved.behind):
        number = TensorType.make(torch.int64, ())
        left = Data(Offload(), Phase.STEP, number, meta.source, action=meta.action)
        offloaded = program.add((node, away), left, f"{node.name}_offloaded")
    offloaded.meta["val"] = node.meta["val"].new_empty((), dtype=torch.int64, device="cpu")
    with program.graph.inserting_before(saved.early):
        coming = Data(Fetch(), Phase.STEP, meta.type, meta.source, action=data(saved.early).action)
        fetch = program.add((offloaded, away), coming, f"{node.name}_fetch")
    first = saved.readers[0]
    with program.graph.inserting_before(first):
        back = Data(WaitFetch(), Phase.STEP, meta.type, meta.source, view=True, action=data(first).action)
        again = program.add((fetch,), back, f"{node.name}_again")
    again.meta["val"] = node.meta.get("val")
    for reader in saved.readers:
        reader.replace_input_with(node, again)
