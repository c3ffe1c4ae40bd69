"""Offloading saved activations, and fetching them back before they are read."""

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
"""Least bytes of a value that is worth offloading."""


@dataclass(frozen=True)
class Saved:
    """A value that can be offloaded after it is computed and fetched before it is read again.

    Attributes:
        node: The value.
        nbytes: Its size in bytes.
        maker: The line that computes it.
        until: The last line that reads it before it is offloaded.
        early: The line before which the fetch starts.
        readers: The lines that read it after the fetch, in order.
    """

    node: fx.Node
    nbytes: int
    maker: fx.Node
    until: fx.Node
    early: fx.Node
    readers: tuple[fx.Node, ...]


def movable(program: Program, least: int, ahead: int) -> list[Saved]:
    """Return the saved values of at least `least` bytes that can be offloaded, to be fetched `ahead` regions early.

    In the backward, only regions after the first one may read them.
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


def move(program: Program, saved: Saved, storage: fx.Node, *, kept: int = 0) -> None:
    """Offload a value to `storage` as soon as it is computed, and let its readers read the fetched value.

    `kept`: the bytes of device memory that it takes there.
    """
    node, meta, first = saved.node, data(saved.node), data(saved.readers[0])
    with program.graph.inserting_after(after_items(saved.maker)):
        number = TensorType.make(torch.int64, ())
        left = Data(Offload(), meta.phase, number, meta.source, storage=kept, action=meta.action)
        offloaded = program.add((node, storage), left, f"{node.name}_offloaded")
    offloaded.meta["val"] = node.meta["val"].new_empty((), dtype=torch.int64, device="cpu")
    with program.graph.inserting_before(saved.early):
        coming = Data(Fetch(), first.phase, meta.type, meta.source, action=data(saved.early).action)
        fetch = program.add((offloaded, storage), coming, f"{node.name}_fetch")
    with program.graph.inserting_before(saved.readers[0]):
        back = Data(WaitFetch(), first.phase, meta.type, meta.source, view=True, action=first.action)
        again = program.add((fetch,), back, f"{node.name}_again")
    again.meta["val"] = node.meta.get("val")
    for reader in saved.readers:
        reader.replace_input_with(node, again)


def offload(program: Program, left: list[Saved], choose: Callable[[list[Saved]], Sequence[Saved]]) -> Program:
    """Offload the values that `choose` picks out of `left`, called again until it picks none."""
    if not left:
        return program
    away, moved = program.add_placeholder("away", Data(OffloadStore(), program.phases[0])), list[Saved]()
    while chosen := choose(left):
        for value in chosen:
            move(program, value, away)
        moved += chosen
        left = [value for value in left if value not in moved]
    if not moved:
        program.graph.erase_node(away)
    gone, stay = (human_bytes(sum(value.nbytes for value in values)) for values in (moved, left))
    note = f"activations away: {len(moved)}, {gone}; {stay} stay that could be"
    return replace(program, notes=(*program.notes, note))


def away_at_peak(program: Program, left: Sequence[Saved]) -> tuple[int, list[Saved]]:
    """Return the peak bytes of the step, and the values of `left` that would be offloaded at the peak."""
    peak, held = max(live_bytes(program).items(), key=lambda line: line[1])
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    return held, [saved for saved in left if position[saved.until] < position[peak] < position[saved.early]]


def maker_of(program: Program, node: fx.Node) -> fx.Node | None:
    """Return the call that computed the saved value `node` if copying the value elsewhere frees its memory, else None.

    It does not if another value aliases that memory. Values of the last region are excluded, as the backward reads them
    at once, and so are random generator states, which torch reads from the beginning of their storage.
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
    """Return True if `node`, a result of a region, is the generator state that `saved_random` returns."""
    op = data(node).op
    region = program.regions[op_of(called(node), Call).region]
    made = region.outputs[op.index if isinstance(op, Item) else 0]
    return made.target is operator.getitem and made.args[1] == 0 and made.all_input_nodes[0].target is saved_random
