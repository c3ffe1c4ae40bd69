"""offload_activations: move what is saved for the backward out of the device's memory, and back before it is needed.

    ya = region_0(a, x)                         ya = region_0(a, x)
    yb = region_0(b, ya)                        ya_stashed = stash(ya, away)
    ...                                         yb = region_0(b, ya)
    return [yb], [x, ya]                        ...
                                    ->          return [yb], [x, ya_stashed]

    db, gc = region_1(c, dy, yb)                ya_fetch = fetch(ya_stashed, away)
    da, gb = region_1(b, db, ya)                db, gc = region_1(c, dy, yb)
                                                ya_again = wait(ya_fetch)
                                                da, gb = region_1(b, db, ya_again)

Each is on its way out from the moment in which it is there, while the forward goes on, and on its way back `ahead`
regions before the one that reads it (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.2). What is small stays, and
what the last region makes or the backward's first one reads: it is needed at once.
"""

from __future__ import annotations

import torch
from torch import fx

from zcompile import ops
from zcompile.ops import Away, Call, Data, Fetch, Phase, Stash, WaitFetch, data, set_data
from zcompile.program import Program, after_items
from zcompile.saved import maker_of
from zcompile.tensor_type import TensorType

LEAST = 2**16
"""Bytes of what is worth a way out and back."""


def offload_activations(program: Program, *, ahead: int = 1, least: int = LEAST) -> Program:
    """A program that keeps what it saves of at least `least` bytes away, and fetches it `ahead` regions early."""
    program = program.copy()
    calls = program.nodes(Call, phase=Phase.BACKWARD)
    if not calls:
        return program
    large = [node for node in program.saved() if data(node).nbytes >= least and _is_read_later(node, calls)]
    found = [(node, call) for node in large if (call := maker_of(program, node))]
    if not found:
        return program
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        away = set_data(program.graph.create_node("placeholder", "away", name="away"), Data(Away()))
    for node, call in reversed(found):
        _move(program, node, call, away, calls, ahead)
    return program


def _is_read_later(node: fx.Node, calls: list[fx.Node]) -> bool:
    """True if regions of the backward behind the first read `node`, and nothing else does."""
    users = [user for user in node.users if data(user).phase is Phase.BACKWARD]
    return bool(users) and calls[0] not in users and all(user in calls for user in users)


def _move(program: Program, node: fx.Node, maker: fx.Node, away: fx.Node, calls: list[fx.Node], ahead: int) -> None:
    """Stash `node` as soon as it is there, and let the backward read what is fetched in its place."""
    users = [user for user in node.users if data(user).phase is Phase.BACKWARD]
    first = min(calls.index(user) for user in users)
    held = data(node)
    with program.graph.inserting_after(after_items(maker)):
        number = Data(Stash(), type=TensorType.make(torch.int64, ()), source=held.source)
        stashed = program.add(ops.stash, (node, away), number, f"{node.name}_stashed")
    stashed.meta["val"] = node.meta["val"].new_empty((), dtype=torch.int64, device="cpu")
    with program.graph.inserting_before(calls[max(first - ahead, 0)]):
        moving = Data(Fetch(), Phase.BACKWARD, held.type, held.source)
        fetch = program.add(ops.fetch, (stashed, away), moving, f"{node.name}_fetch")
    with program.graph.inserting_before(calls[first]):
        back = Data(WaitFetch(), Phase.BACKWARD, held.type, held.source, view=True)
        again = program.add(ops.wait, (fetch,), back, f"{node.name}_again")
    again.meta["val"] = node.meta.get("val")
    for user in users:
        user.replace_input_with(node, again)
