"""Predicts the bytes that a step holds at each line of its program.

Values between and within regions, full parameters and reduced gradients count: all that a step holds in addition to
shards and optimizer state. Temporaries of single operations do not count, nor do buffers into which messages are copied
to be sent or summed (at most two buckets), nor activations that are being offloaded (at most two).

Dynamic sizes count as in the traced call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import fx

from zcompile.cost.fusion import is_stored
from zcompile.ir.layout import Layout, Param
from zcompile.ir.liveness import last_needs, may_show, owner_of
from zcompile.ir.operation import Role, data, op_of
from zcompile.ir.ops import (
    Accumulate,
    Arena,
    Call,
    Item,
    Reduce,
    Results,
    Store,
    Sum,
    SumAverages,
    items_of,
    reductions_of,
    values_of,
)
from zcompile.ir.placement import Divided
from zcompile.ir.program import Program
from zcompile.ir.region import Region

Freed = tuple[tuple[fx.Node, ...], int]
"""Placeholders of a region that share memory, and its bytes."""


class MemoryKind(StrEnum):
    """What a step holds memory for, in addition to shards and optimizer state."""

    FULL = "full parameters"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"
    """Arenas and stacks, which are allocated permanently."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a rank at the peak of a step, in bytes."""

    parameters: int
    """Its shards, held throughout."""
    optimizer: int
    """Two moments (Adam), held throughout."""
    held: Mapping[MemoryKind, int]
    """All other memory at the peak, by kind."""

    @property
    def nbytes(self) -> int:
        """Total bytes at the peak."""
        return self.parameters + self.optimizer + sum(self.held.values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes at the peak by kind, shards and optimizer state included."""
        held = {str(kind): nbytes for kind, nbytes in self.held.items()}
        return {"shards": self.parameters, "optimizer state": self.optimizer, **held}


def live_bytes(program: Program) -> dict[fx.Node, int]:
    """Return the peak of live bytes while each line of the step runs, in order; an upper bound if values are views."""
    return {node: sum(held.values()) for node, held in live_by_kind(program).items()}


def live_by_kind(program: Program) -> dict[fx.Node, dict[MemoryKind, int]]:
    """Return `live_bytes` by kind of memory. Memory of a running region counts as activations."""
    ends = last_needs(program)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node, end in ends.items():
        dead.setdefault(end, []).append(node)
    live, result = dict.fromkeys(MemoryKind, 0), {}
    live[MemoryKind.BUFFERS] = arena_bytes(program) + stack_bytes(program)
    for node in program.graph.nodes:
        op = data(node).op
        if isinstance(op, Call):
            freed = _freed_within(program, node, ends)
            gained = dict.fromkeys(MemoryKind, 0)
            for value in values_of(node):
                gained[_kind_of(value)] += data(value).nbytes
            left = sum(gained.values()) - sum(nbytes for _, nbytes in freed)
            most = max(left, region_bytes(program.regions[op.region], freed))
            result[node] = {**live, MemoryKind.ACTIVATIONS: live[MemoryKind.ACTIVATIONS] + most}
            live = {kind: nbytes + gained[kind] for kind, nbytes in live.items()}
        elif node.op == "call_function" and not isinstance(op, Item):
            live[_kind_of(node)] += program.memory(node)
            result[node] = dict(live)
        for value in dead.get(node, ()):
            live[_kind_of(value)] -= data(value).nbytes
    return result


def alive_at(program: Program, line: fx.Node) -> list[tuple[fx.Node, MemoryKind, int]]:
    """Return the memory that is live after `line`: the lines that allocated it, its kinds and bytes, largest first.

    Memory that a region uses internally while it runs is not included.
    """
    ends, position = last_needs(program), {node: index for index, node in enumerate(program.graph.nodes)}
    result: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if position[node] > position[line]:
            break
        match data(node).op.role:
            case Role.GATHER | Role.REDUCE:
                result[node] = program.memory(node)
            case Role.FREE:
                result.pop(node.all_input_nodes[0].all_input_nodes[0], None)
            case Role.UPDATE:
                for reduction in reductions_of(node.all_input_nodes[1]):
                    result.pop(reduction, None)
        if isinstance(data(node).op, SumAverages):
            for reduction in reductions_of(node.all_input_nodes[2]):
                result.pop(reduction, None)
        if node in ends and not items_of(node) and position[ends[node]] >= position[line]:
            result[node] = data(node).nbytes
    alive = [(node, _kind_of(node), nbytes) for node, nbytes in result.items() if nbytes > 0]
    return sorted(alive, key=lambda entry: -entry[2])


def _kind_of(node: fx.Node) -> MemoryKind:
    """Return the kind of memory that a line allocates or frees."""
    match data(node).op.role:
        case Role.GATHER | Role.FREE:
            return MemoryKind.FULL
        case Role.REDUCE | Role.UPDATE:
            return MemoryKind.GRADIENTS
    reduced = any(isinstance(data(user).op, (Reduce, Accumulate, Sum)) for user in node.users)
    return MemoryKind.GRADIENTS if reduced or isinstance(data(node).op, SumAverages) else MemoryKind.ACTIVATIONS


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of model state that a rank keeps from step to step, with the moments of Adam.

    In mixed precision with Ψ parameters on N ranks, stage 3 takes at most (4 + 4 + 8)Ψ/N: as much as ZeRO's
    (2 + 2 + 12)Ψ/N (Rajbhandari et al. 2020, section 3.1), as the shards are the float32 master copy.
    """

    parameters: int
    copies: int
    """Full parameters that stages 0 to 2 keep in addition to shards, or secondary shards, in the compute dtype."""
    gradients: int
    moments: int

    @property
    def nbytes(self) -> int:
        return self.parameters + self.copies + self.gradients + self.moments


def model_state(layout: Layout) -> ModelStateBytes:
    """Return the bytes of model state of a rank, gradients between backward and optimizer step included.

    If ranks own different amounts, this is the rank that keeps most.
    """
    shards = most_kept(layout.params, layout.shards)
    trained = most_kept(layout.trainable.values(), layout.shards)
    kept = () if layout.stage.parameters_sharded else layout.units
    copies = sum(layout.gathered_bytes(unit.name) for unit in kept)
    copies += sum(layout.secondary_bytes(unit.name) for unit in layout.units) if layout.keeps_secondary else 0
    return ModelStateBytes(shards, copies, trained, 2 * trained)


def most_kept(params: Iterable[Param], ranks: int) -> int:
    """Return the bytes of the shards of `params` on the sharding rank that keeps most."""
    owned = dict.fromkeys(range(ranks), 0)
    divided = 0
    for param in params:
        if param.owner is None:
            divided += param.shard_numel * param.dtype.itemsize
        else:
            owned[param.owner] += param.nbytes
    return divided + max(owned.values())


def arena_bytes(program: Program) -> int:
    """Return the bytes of the program's arena."""
    return sum(found.nbytes for node in program.nodes(Arena) if (found := data(node).type))


def stack_bytes(program: Program) -> int:
    """Return the bytes of saved activations on the program's stack."""
    return sum(data(node).nbytes for node in program.nodes(Store))


def _freed_within(program: Program, call: fx.Node, ends: Mapping[fx.Node, fx.Node]) -> list[Freed]:
    """Return the arguments that `call` frees within its region, as no later line needs them."""
    region, given = program.regions[op_of(call, Call).region], call.args[1:]
    taken = zip(region.graph.find_nodes(op="placeholder"), region.takes, strict=True)
    values = {placeholder: given[argument] for placeholder, (argument, item) in taken if item is None}
    freed = []
    for value in dict.fromkeys(values.values()):
        if isinstance(value, fx.Node) and ends.get(value) is call:
            aliases = tuple(p for p, other in values.items() if other is value or may_show(program, other, value))
            freed.append((aliases, data(value).nbytes))
    return freed


def region_bytes(region: Region, freed: Sequence[Freed] = ()) -> int:
    """Return the peak bytes of a running region, results included, arguments excluded.

    Arguments in `freed` are freed after their last use, which lowers the count from there on.
    """
    if region.rows is not None:
        return _loop_bytes(region)
    nodes = list(region.graph.nodes)
    last = _last_reads(region, nodes)
    live = most = 0
    ending: dict[int, int] = {}
    for placeholders, nbytes in freed:
        end = max(last[placeholder] for placeholder in placeholders)
        ending[end] = ending.get(end, 0) + nbytes
    for index, node in enumerate(nodes):
        meta = data(node)
        if node.op == "call_function" and meta.nbytes and (not region.fuses or is_stored(node)):
            live += meta.nbytes
            ending[last[node]] = ending.get(last[node], 0) + meta.nbytes
        most = max(most, live)
        live -= ending.get(index, 0)
    return most


def _last_reads(region: Region, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Map each value to the index of the operation that reads its memory last.

    What a compiler fuses is computed where the operation that it is fused into is, and reads its arguments there.
    """
    index = {node: number for number, node in enumerate(nodes)}
    computed, last = dict(index), dict(index)
    for node in reversed(nodes):
        if isinstance(data(node).op, Results):
            computed[node] = len(nodes)
        elif data(node).view or (region.fuses and node.op == "call_function" and not is_stored(node)):
            computed[node] = max((computed[user] for user in node.users), default=index[node])
        for source in node.all_input_nodes:
            last[owner_of(source)] = max(last[owner_of(source)], computed[node])
    return last


def _loop_bytes(region: Region) -> int:
    """Return the peak bytes of a loop over rows: what its turns are joined to or added up in, and one turn.

    A turn has copies of the rows that are not together in memory, and what it gives until that is joined. With a single
    turn there is nothing to join to yet.
    """
    loop, numbers = region.rows, range(len(region.outputs))
    assert loop is not None, "a region that a loop runs"
    given = zip(region.graph.find_nodes(op="placeholder"), loop.takes, strict=True)
    copies = sum(data(node).nbytes for node, place in given if isinstance(place, Divided) and place != Divided(0))
    kept = sum(loop.held(region.result_type(number), loop.gives[number]) for number in numbers)
    turn = copies + region_bytes(replace(region, rows=None))
    if loop.size < loop.rows:
        return kept + turn
    return max(turn, kept + sum(data(value).nbytes for value in region.outputs))


def peak_bytes(program: Program) -> int:
    """Return the peak bytes that a step holds in addition to shards and optimizer state."""
    return max(live_bytes(program).values(), default=0)
