"""Facts about communication: gathers, reductions, updates, and their messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.layout import Unit
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import (
    AllGather,
    Averaging,
    Call,
    GatherAhead,
    Gathering,
    GatherOutside,
    Reduce,
    ReduceOutside,
    Release,
    Shards,
    SumAverages,
    Update,
    WaitGather,
    WaitReduce,
    WaitSecondary,
)
from zcompile.ir.program import Program
from zcompile.ir.program_graph import reads_of


def _gathered_before_use(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Call):
        for argument in node.all_input_nodes:
            found = data(argument).op
            if isinstance(found, Shards) and program.layout.must_gather(found.unit):
                yield Violation(node, f"{label(node)} reads {found.unit} before it is gathered")
            elif isinstance(found, Gathering):
                yield Violation(node, f"{label(node)} reads {found.unit} without waiting for {argument.name}")
    for node in program.nodes(Gathering):
        op = op_of(node, Gathering)
        if op.dtype != (casts := program.layout.unit(op.unit).compute_dtype):
            yield Violation(node, f"{node.name} says that it casts {op.unit} to {op.dtype}; want {casts}")


def _released_once(program: Program) -> Iterator[Violation]:
    for gather in program.nodes(AllGather):
        waits = [user for user in gather.users if isinstance(data(user).op, WaitGather)]
        if len(waits) != 1:
            yield Violation(gather, f"{gather.name} is waited for {len(waits)} times; want once")
            continue
        if op_of(gather, AllGather).keep and program.layout.stage.parameters_sharded:
            problem = f"{gather.name} keeps {op_of(gather, AllGather).unit} full beyond the step"
            yield Violation(gather, f"{problem}; stage {program.layout.stage.number} gathers it anew")
            continue
        releases = [user for user in waits[0].users if isinstance(data(user).op, Release)]
        want = 0 if op_of(gather, AllGather).keep else 1
        if len(releases) != want:
            problem = f"{len(releases)} releases of {waits[0].name}"
            yield Violation(gather, f"{problem}; want {(want and 'one, after its last use') or 'none, it is kept'}")
    for gather in program.nodes(GatherOutside):
        if (count := sum(isinstance(data(user).op, WaitSecondary) for user in gather.users)) != 1:
            yield Violation(gather, f"{gather.name} is waited for {count} times; want once")
    for release in program.nodes(Release):
        if not isinstance(data(release.all_input_nodes[0]).op, WaitGather):
            yield Violation(release, f"{release.all_input_nodes[0].name} is released, but is not a full parameter")


def _reduced_once(program: Program) -> Iterator[Violation]:
    for name in program.results.gradients:
        yield Violation(None, f"the gradient of {name} is returned unreduced")
    used = [node.all_input_nodes[1] for node in program.nodes(Update, ReduceOutside)]
    used += [averages for node in program.nodes(SumAverages) for averages in node.all_input_nodes[1:]]
    delivered = Counter([*program.results.reduced, *used])
    for node in program.nodes(Averaging):
        op = op_of(node, Averaging)
        if op.dtype != (casts := program.layout.unit(op.unit).reduction_dtype):
            yield Violation(node, f"{node.name} says that it casts gradients of {op.unit} to {op.dtype}; want {casts}")
        if isinstance(op, Reduce) and not op.scatter and (op.bucket is not None or op.at is not None):
            yield Violation(node, f"{node.name} sends to all as a whole; it takes no bucket and no place")
        waits = [user for user in node.users if isinstance(data(user).op, WaitReduce)]
        if len(waits) != 1:
            yield Violation(node, f"{node.name} is waited for {len(waits)} times; want once")
        elif delivered[waits[0]] != 1:
            yield Violation(waits[0], f"{waits[0].name} is returned, or used, {delivered[waits[0]]} times; want once")


def _updated_once(program: Program) -> Iterator[Violation]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for node in program.results.reduced:
        yield Violation(node, f"{node.name} is returned; want it used for an update")
    for node in program.nodes(Update):
        op, (shards, grads) = op_of(node, Update), node.all_input_nodes
        averages = WaitReduce(op.unit, op.params), SumAverages(op.unit, op.params)
        if data(grads).op not in averages or data(shards).op != Shards(op.unit):
            yield Violation(node, f"{node.name} updates {op.unit}, but is given {shards.name} and {grads.name}")
        for read in reads_of(shards):
            if position[read] > position[node]:
                yield Violation(read, f"{label(read)} reads {op.unit} after its update")


def _gathered_ahead(program: Program) -> Iterator[Violation]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    updated = {op_of(node, Update).unit: node for node in program.nodes(Update)}
    first = {op_of(node, AllGather).unit: node for node in reversed(program.nodes(AllGather, phase=Phase.FORWARD))}
    for node in program.nodes(GatherAhead):
        op = op_of(node, GatherAhead)
        if op.unit not in first or op_of(first[op.unit], AllGather) != AllGather(op.unit, op.keep, op.dtype):
            yield Violation(node, f"{node.name} gathers {op.unit} as no forward does")
        if op.unit in updated and position[updated[op.unit]] > position[node]:
            yield Violation(node, f"{node.name} gathers {op.unit} before its update")
        if data(shards := node.all_input_nodes[0]).op != Shards(op.unit):
            yield Violation(node, f"{node.name} gathers {op.unit}, but is given {shards.name}")
    for unit, times in Counter(op_of(node, GatherAhead).unit for node in program.nodes(GatherAhead)).items():
        if times > 1:
            yield Violation(None, f"{unit} is gathered ahead {times} times; want once")


def _waits_sunk(program: Program) -> Iterator[Violation]:
    for node in program.nodes(WaitReduce):
        reduce = node.all_input_nodes[0]
        if reduce.next is node and node.next in program.nodes(Call):
            yield Violation(node, f"{node.name} waits at once, though compute follows that could hide it")


def _messages_packed(program: Program) -> Iterator[Violation]:
    for unit in program.layout.units:
        sent = [index for message in unit.messages for index in message]
        if sorted(sent) != list(range(len(unit.params))):
            yield Violation(None, f"the messages of {unit.name} are {unit.messages}; want every parameter once")
        for message in unit.messages:
            yield from _message_violations(unit, message)


def _message_violations(unit: Unit, message: tuple[int, ...]) -> Iterator[Violation]:
    params = [unit.params[index] for index in message]
    dtypes = ((p.dtype, p.compute_dtype, p.reduction_dtype, p.outer_gather_dtype) for p in params)
    kinds = {(*own, bool(p.shards), p.owner) for own, p in zip(dtypes, params, strict=True)}
    if len(kinds) > 1:
        names = [param.name for param in params]
        yield Violation(None, f"a message of {unit.name} mixes dtypes, owners, or whole and sharded: {names}")
    if list(message) != list(range(message[0], message[0] + len(message))):
        yield Violation(None, f"a message of {unit.name} is not one run of its shards' memory: {message}")


def _volume_right(program: Program) -> Iterator[Violation]:
    """At most one gather per phase and separate use, for 2Ψ, or 3Ψ under stage 3; along the outer axis one per step."""
    if not (stage := program.layout.stage).optimizer_sharded:
        return
    outside = Counter(op_of(node, GatherOutside).unit for node in program.nodes(GatherOutside))
    if (name := next((name for name, times in outside.items() if times > 1), None)) is not None:
        yield Violation(None, f"{name} is gathered outside {outside[name]} times; want once")
    for phase in program.phases if stage.parameters_sharded else (None,):
        found = program.nodes(AllGather, phase=phase)
        for unit in program.layout.units:
            gathers = [node for node in found if op_of(node, AllGather).unit == unit.name]
            uses = _separate_uses(program, unit.name, phase) if stage.parameters_sharded else 1
            if len(gathers) > uses:
                yield Violation(gathers[-1], f"{unit.name} is gathered {len(gathers)} times; want {uses}")


def _separate_uses(program: Program, unit: str, phase: Phase | None) -> int:
    """Return the number of runs of consecutive calls in `phase` that read `unit`."""
    reads = [unit in op_of(node, Call).units for node in program.nodes(Call, phase=phase)]
    return sum(now and not before for before, now in zip([False, *reads], reads, strict=False))


GATHERED_BEFORE_USE = Fact("full parameters gathered and waited for before use", _gathered_before_use)
RELEASED_ONCE = Fact("gathers released exactly once", _released_once)
REDUCED_ONCE = Fact("gradients reduced, and reductions waited for and used once", _reduced_once)
UPDATED_ONCE = Fact("reduced gradients used for updates, after the last read", _updated_once)
GATHERED_AHEAD = Fact("gathers for the next step started after updates", _gathered_ahead)
WAITS_SUNK = Fact("waits of reductions sunk", _waits_sunk)
MESSAGES_PACKED = Fact("messages packed", _messages_packed)
VOLUME_RIGHT = Fact("communication volume of the stage", _volume_right)
