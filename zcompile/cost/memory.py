"""Memory: the bytes that a step holds at each line of its program, predicted.

Counted are values between regions and within them, full parameters and reduced gradients: what a step takes beside the
shards and the optimizer's state. Not counted are what single operations take while they run, what messages are
copied into to be sent or summed, two buckets at most, and activations that are on their way out, two at most.

Sizes that vary between calls count as in the call that was traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from zcompile.ir.program import Program
from zcompile.ir.region import Region

Freed = tuple[tuple[fx.Node, ...], int]
"""Placeholders of a region that show one memory, and its bytes."""


class MemoryKind(StrEnum):
    """What a step holds beside the shards and the optimizer's state."""

    FULL = "full parameters"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"
    """Arenas and stacks, which are there all the time."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What a rank holds at the peak of a step, in bytes."""

    parameters: int
    """Its shards, in all of the step."""
    optimizer: int
    """Two moments (Adam), in all of the step."""
    held: Mapping[MemoryKind, int]
    """What is held with them at the peak of the step."""

    @property
    def nbytes(self) -> int:
        """The peak, everything included."""
        return self.parameters + self.optimizer + sum(self.held.values())

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak, by what they are for."""
        held = {str(kind): nbytes for kind, nbytes in self.held.items()}
        return {"shards": self.parameters, "optimizer state": self.optimizer, **held}


def live_bytes(program: Program) -> dict[fx.Node, int]:
    """The most bytes alive while each line of the step runs, in order; where values are views, an upper bound."""
    return {node: sum(held.values()) for node, held in live_by_kind(program).items()}


def live_by_kind(program: Program) -> dict[fx.Node, dict[MemoryKind, int]]:
    """`live_bytes` by what the bytes are. What a region holds while it runs counts as activations."""
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
    """What is there when `line` has run: the lines that have made it, what it is, and its bytes, the largest first.

    What a region holds for itself while it runs comes on top.
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
    return sorted(alive, key=lambda one: -one[2])


def _kind_of(node: fx.Node) -> MemoryKind:
    """What the memory is that a line takes or gives back."""
    match data(node).op.role:
        case Role.GATHER | Role.FREE:
            return MemoryKind.FULL
        case Role.REDUCE | Role.UPDATE:
            return MemoryKind.GRADIENTS
    reduced = any(isinstance(data(user).op, (Reduce, Accumulate, Sum)) for user in node.users)
    return MemoryKind.GRADIENTS if reduced or isinstance(data(node).op, SumAverages) else MemoryKind.ACTIVATIONS


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of the model state that a rank keeps from step to step, the moments those of Adam.

    In mixed precision with Ψ parameters on N ranks at most (4 + 4 + 8)Ψ/N in stage 3: as many as the (2 + 2 + 12)Ψ/N of
    ZeRO (Rajbhandari et al. 2020, section 3.1), whose master copy in float32 the shards are.
    """

    parameters: int
    copies: int
    """Full parameters that stages 0 to 2 keep beside the shards, or secondary shards, in the dtype computed with."""
    gradients: int
    moments: int

    @property
    def nbytes(self) -> int:
        return self.parameters + self.copies + self.gradients + self.moments


def model_state(layout: Layout) -> ModelStateBytes:
    """What a rank keeps of a model laid out so, gradients between the backward and the optimizer's step included.

    Where some own more than others, it is the rank that keeps most.
    """
    shards = most_kept(layout.params, layout.shards)
    trained = most_kept(layout.trainable.values(), layout.shards)
    kept = () if layout.stage.parameters_sharded else layout.units
    copies = sum(layout.gathered_bytes(unit.name) for unit in kept)
    copies += sum(layout.secondary_bytes(unit.name) for unit in layout.units) if layout.keeps_secondary else 0
    return ModelStateBytes(shards, copies, trained, 2 * trained)


def most_kept(params: Iterable[Param], ranks: int) -> int:
    """Bytes of the shards of `params` on the rank, of those that shard, that keeps most."""
    owned = dict.fromkeys(range(ranks), 0)
    divided = 0
    for param in params:
        if param.owner is None:
            divided += param.shard_numel * param.dtype.itemsize
        else:
            owned[param.owner] += param.nbytes
    return divided + max(owned.values())


def arena_bytes(program: Program) -> int:
    """Bytes of the arena that the program's lines have places in."""
    return sum(found.nbytes for node in program.nodes(Arena) if (found := data(node).type))


def stack_bytes(program: Program) -> int:
    """Bytes of the stack that saved activations are copied onto."""
    return sum(data(node).nbytes for node in program.nodes(Store))


def _freed_within(program: Program, call: fx.Node, ends: Mapping[fx.Node, fx.Node]) -> list[Freed]:
    """What `call` frees within its region, because nobody needs it behind it."""
    region, given = program.regions[op_of(call, Call).region], call.args[1:]
    taken = zip(region.graph.find_nodes(op="placeholder"), region.takes, strict=True)
    values = {placeholder: given[argument] for placeholder, (argument, item) in taken if item is None}
    freed = []
    for value in dict.fromkeys(values.values()):
        if isinstance(value, fx.Node) and ends.get(value) is call:
            shown = tuple(p for p, other in values.items() if other is value or may_show(program, other, value))
            freed.append((shown, data(value).nbytes))
    return freed


def region_bytes(region: Region, freed: Sequence[Freed] = ()) -> int:
    """The most bytes that a region holds while it runs, its results included, its arguments not.

    Bytes of arguments that are `freed` behind their last use are taken off from there on.
    """
    nodes = list(region.graph.nodes)
    last = {node: index for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[owner_of(source)] = len(nodes) if isinstance(data(node).op, Results) else index
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


def peak_bytes(program: Program) -> int:
    """The most bytes that a step holds beside the shards and the optimizer's state."""
    return max(live_bytes(program).values(), default=0)
