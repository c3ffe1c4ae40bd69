"""Moving what is saved for the backward elsewhere, and back before it is read."""

from __future__ import annotations

import operator

import torch
from torch import fx

from zcompile.ir.liveness import may_show
from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import Call, Fetch, Item, Offload, WaitFetch
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.operators import saved_random

LEAST = 2**16
"""Bytes of what is worth a way out and back."""


def movable(program: Program, least: int) -> dict[fx.Node, fx.Node]:
    """What is saved of at least `least` bytes that can be elsewhere meanwhile, and the region that has made each.

    Regions of the backward behind the first read it, and nothing else does.
    """
    calls = program.nodes(Call, phase=Phase.BACKWARD)
    result = {}
    for node in program.saved() if calls else ():
        readers = _readers(node)
        read_later = readers and calls[0] not in readers and all(reader in calls for reader in readers)
        if read_later and data(node).nbytes >= least and (maker := maker_of(program, node)):
            result[node] = maker
    return result


def move(program: Program, node: fx.Node, maker: fx.Node, place: fx.Node, ahead: int, *, kept: int = 0) -> None:
    """Offload `node` at `place` as soon as it is there; the backward reads what is fetched `ahead` regions earlier.

    `kept`: bytes of the device's memory that it takes there.
    """
    readers, meta, early = _readers(node), data(node), fetched_at(program, node, ahead)
    first = _first_reader(program, node)
    with program.graph.inserting_after(after_items(maker)):
        number = Data(Offload(), type=TensorType.make(torch.int64, ()), source=meta.source, storage=kept)
        offloaded = program.add((node, place), number, f"{node.name}_offloaded")
    offloaded.meta["val"] = node.meta["val"].new_empty((), dtype=torch.int64, device="cpu")
    with program.graph.inserting_before(early):
        moving = Data(Fetch(), Phase.BACKWARD, meta.type, meta.source)
        fetch = program.add((offloaded, place), moving, f"{node.name}_fetch")
    with program.graph.inserting_before(first):
        back = Data(WaitFetch(), Phase.BACKWARD, meta.type, meta.source, view=True)
        again = program.add((fetch,), back, f"{node.name}_again")
    again.meta["val"] = node.meta.get("val")
    for reader in readers:
        reader.replace_input_with(node, again)


def fetched_at(program: Program, node: fx.Node, ahead: int) -> fx.Node:
    """The region of the backward before which `node` is fetched: `ahead` before the first that reads it."""
    calls = program.nodes(Call, phase=Phase.BACKWARD)
    return calls[max(calls.index(_first_reader(program, node)) - ahead, 0)]


def _first_reader(program: Program, node: fx.Node) -> fx.Node:
    readers = _readers(node)
    return next(call for call in program.nodes(Call, phase=Phase.BACKWARD) if call in readers)


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if data(user).phase is Phase.BACKWARD]


def maker_of(program: Program, node: fx.Node) -> fx.Node | None:
    """The region that has made `node`, which is saved for the backward, if a copy elsewhere lets its memory go.

    It does not where another value shows that memory. What the last region leaves, the backward's first takes at once.
    States of random number generators stay as they are: torch reads them from the beginning of their storage.
    """
    meta = data(node)
    call = node.all_input_nodes[0] if isinstance(meta.op, Item) else node
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
    region = program.regions[op_of(node.all_input_nodes[0] if isinstance(op, Item) else node, Call).region]
    made = region.outputs[op.index if isinstance(op, Item) else 0]
    return made.target is operator.getitem and made.args[1] == 0 and made.all_input_nodes[0].target is saved_random
