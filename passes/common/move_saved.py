"""Moving what is saved for the backward elsewhere, and back before it is read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from zcompile.cost.memory import live_bytes
from zcompile.ir.liveness import may_show
from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import Call, Fetch, Item, Offload, OffloadStore, WaitFetch, called
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items
from zcompile.ir.tensor_type import TensorType, human_bytes
from zcompile.torch_internals.operators import saved_random

LEAST = 2**16
"""Bytes of what is worth a way out and back."""


@dataclass(frozen=True)
class Saved:
    """A value that may be elsewhere from where it is made until it is read again.

    Attributes:
        node: The value.
        nbytes: What it takes.
        maker: The line that has made it.
        until: The last line that reads it before it is gone.
        early: The line before which it is fetched.
        readers: The lines that read it again, in order.
    """

    node: fx.Node
    nbytes: int
    maker: fx.Node
    until: fx.Node
    early: fx.Node
    readers: tuple[fx.Node, ...]


def movable(program: Program, least: int, ahead: int) -> list[Saved]:
    """What is saved of at least `least` bytes that can be elsewhere meanwhile, and be fetched `ahead` regions early.

    Regions of the backward behind the first read it, and nothing else does.
    """
    calls, result = program.nodes(Call, phase=Phase.BACKWARD), []
    for node in program.saved() if calls else ():
        users = [user for user in node.users if data(user).phase is Phase.BACKWARD]
        readers = tuple(call for call in calls if call in users)
        read_later = readers and calls[0] not in readers and len(readers) == len(users)
        if read_later and data(node).nbytes >= least and (maker := maker_of(program, node)):
            early = calls[max(calls.index(readers[0]) - ahead, 0)]
            result.append(Saved(node, data(node).nbytes, maker, maker, early, readers))
    return result


def move(program: Program, saved: Saved, place: fx.Node, *, kept: int = 0) -> None:
    """Offload a value at `place` as soon as it is there, and let its readers have what is fetched.

    `kept`: bytes of the device's memory that it takes there.
    """
    node, meta, first = saved.node, data(saved.node), data(saved.readers[0])
    with program.graph.inserting_after(after_items(saved.maker)):
        number = TensorType.make(torch.int64, ())
        left = Data(Offload(), meta.phase, number, meta.source, storage=kept, action=meta.action)
        offloaded = program.add((node, place), left, f"{node.name}_offloaded")
    offloaded.meta["val"] = node.meta["val"].new_empty((), dtype=torch.int64, device="cpu")
    with program.graph.inserting_before(saved.early):
        coming = Data(Fetch(), first.phase, meta.type, meta.source, action=data(saved.early).action)
        fetch = program.add((offloaded, place), coming, f"{node.name}_fetch")
    with program.graph.inserting_before(saved.readers[0]):
        back = Data(WaitFetch(), first.phase, meta.type, meta.source, view=True, action=first.action)
        again = program.add((fetch,), back, f"{node.name}_again")
    again.meta["val"] = node.meta.get("val")
    for reader in saved.readers:
        reader.replace_input_with(node, again)


def offload(program: Program, left: list[Saved], choose: Callable[[list[Saved]], Sequence[Saved]]) -> Program:
    """`program` with what `choose` takes of what is left, time after time, moved out of the device's memory."""
    if not left:
        return program
    away, moved = program.add_placeholder("away", Data(OffloadStore(), program.phases[0])), list[Saved]()
    while chosen := choose(left):
        for one in chosen:
            move(program, one, away)
        moved += chosen
        left = [one for one in left if one not in moved]
    if not moved:
        program.graph.erase_node(away)
    gone, stay = (human_bytes(sum(one.nbytes for one in some)) for some in (moved, left))
    note = f"activations away: {len(moved)}, {gone}; {stay} stay that could be"
    return replace(program, notes=(*program.notes, note))


def away_at_peak(program: Program, left: Sequence[Saved]) -> tuple[int, list[Saved]]:
    """The most bytes that a line of the step holds, and what of `left` would be elsewhere there."""
    peak, held = max(live_bytes(program).items(), key=lambda line: line[1])
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    return held, [one for one in left if place[one.until] < place[peak] < place[one.early]]


def maker_of(program: Program, node: fx.Node) -> fx.Node | None:
    """The region that has made `node`, which is saved for the backward, if a copy elsewhere lets its memory go.

    It does not where another value shows that memory. What the last region leaves, the backward's first takes at once.
    States of random number generators stay as they are: torch reads them from the beginning of their storage.
    """
    meta, call = data(node), called(node)
    if meta.phase is not Phase.FORWARD or not isinstance(data(call).op, Call) or not meta.nbytes:
        return None
    if is_random_state(program, node):
        return None
    shown = any(may_show(program, other, node) for other in (*call.users, *node.users) if other is not node)
    last = program.nodes(Call, phase=Phase.FORWARD)[-1]
    return None if shown or call is last or node in program.results.outputs else call


def is_random_state(program: Program, node: fx.Node) -> bool:
    """True for the first result of what saves the state of a random number generator and draws; `node`: of a region."""
    op = data(node).op
    region = program.regions[op_of(called(node), Call).region]
    made = region.outputs[op.index if isinstance(op, Item) else 0]
    return made.target is operator.getitem and made.args[1] == 0 and made.all_input_nodes[0].target is saved_random
