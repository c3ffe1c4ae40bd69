"""Facts of what is communicated: gathers, reductions, updates, and what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.layout import Unit
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import (
    Accumulate,
    AllGather,
    Call,
    GatherAhead,
    Reduce,
    Release,
    Results,
    Shards,
    Update,
    WaitGather,
    WaitReduce,
)
from zcompile.ir.program import Program
from zcompile.ir.program_graph import reads_of


def _gathered_before_use(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Call):
        arguments = [argument for argument in node.args[1:] if isinstance(argument, fx.Node)]
        for argument, unit in zip(arguments, op_of(node, Call).units, strict=False):
            found = data(argument).op
            if found == Shards(unit) and not program.layout.must_gather(unit):
                continue
            if isinstance(found, Shards):
                yield Violation(node, f"{label(node)} reads {unit} before it is gathered")
            elif isinstance(found, AllGather):
                yield Violation(node, f"{label(node)} reads {unit} without waiting for {argument.name}")
            elif not isinstance(found, WaitGather) or _gathered_unit(argument) != unit:
                yield Violation(node, f"{label(node)} reads {unit}, but is given {argument.name}")
    for node in program.nodes(AllGather):
        op, casts = op_of(node, AllGather), program.layout.unit(op_of(node, AllGather).unit).compute_dtype
        if op.dtype != casts:
            yield Violation(node, f"{node.name} casts {op.unit} to {op.dtype}; want {casts}")
    for node in program.nodes(WaitGather):
        gathered, wanted = _gathered_unit(node), op_of(node, WaitGather).unit
        if gathered != wanted:
            yield Violation(node, f"{node.name} waits for {gathered}, not for {wanted}")


def _gathered_unit(wait: fx.Node) -> str | None:
    """The unit whose shards the gather behind `wait` really reads."""
    gather = wait.all_input_nodes[0] if wait.all_input_nodes else None
    if gather is None or not isinstance(data(gather).op, AllGather):
        return None
    shards = data(gather.all_input_nodes[0]).op
    return shards.unit if isinstance(shards, Shards) and shards.unit == op_of(gather, AllGather).unit else None


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
    for release in program.nodes(Release):
        if not isinstance(data(release.all_input_nodes[0]).op, WaitGather):
            yield Violation(release, f"{release.all_input_nodes[0].name} is released, but is not a full parameter")


def _unused_after_release(program: Program) -> Iterator[Violation]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for release in program.nodes(Release):
        full = release.all_input_nodes[0]
        for user in full.users:
            if position[user] > position[release] and not isinstance(data(user).op, (Release, Results)):
                yield Violation(user, f"{label(user)} uses {full.name} after its release")


def _reduced_once(program: Program) -> Iterator[Violation]:
    scatter = program.layout.stage.optimizer_sharded
    for name in program.results.gradients:
        yield Violation(None, f"the gradient of {name} is returned unreduced")
    count: Counter[str] = Counter()
    for node in program.nodes(Reduce):
        op = op_of(node, Reduce)
        count.update(op.params)
        yield from _reduce_violations(program, node, op, scatter)
    used = [node.all_input_nodes[1] for node in program.nodes(Update)]
    delivered = [name for node in (*program.results.reduced, *used) for name in op_of(node, WaitReduce).params]
    expected = program.differentiated()
    for name in sorted({*count, *delivered, *expected}):
        if count[name] != (name in expected):
            problem = (
                f"the gradient of {name} is reduced {count[name]} times; want {'once' if name in expected else 'none'}"
            )
            yield Violation(_reduction_of(program, name), problem)
        if count[name] != delivered.count(name):
            yield Violation(
                _reduction_of(program, name),
                f"the reduced gradient of {name} is returned {delivered.count(name)} times",
            )


def _accumulated_once(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Reduce):
        yield Violation(node, f"{node.name} communicates, though gradients are to be held back")
    held = [op_of(node, Accumulate).params for node in program.results.reduced]
    count = Counter(name for params in held for name in params)
    expected = program.differentiated()
    for name in sorted({*count, *expected}):
        if count[name] != (name in expected):
            wanted = "once" if name in expected else "none"
            yield Violation(None, f"the gradient of {name} is held back {count[name]} times; want {wanted}")


def _reduce_violations(program: Program, node: fx.Node, op: Reduce, scatter: bool) -> Iterator[Violation]:
    unit = program.layout.unit(op.unit)
    if data(node.all_input_nodes[0]).op != Shards(op.unit):
        yield Violation(node, f"{node.name} reduces {op.unit}, but is given {node.all_input_nodes[0].name}")
    if op.scatter is not scatter:
        yield Violation(
            node, f"stage {program.layout.stage.number} wants {'reduce_scatter' if scatter else 'all_reduce'}"
        )
    for name in op.params:
        param = program.layout.param(name)
        if not param.trainable:
            yield Violation(node, f"{name} is frozen; its gradient is not reduced")
        if param.reduction_dtype not in (None, op.dtype):
            yield Violation(node, f"the gradient of {name} is reduced in {op.dtype}; want {param.reduction_dtype}")
    grads = node.args[1]
    given = tuple(p.name for p, grad in zip(unit.params, grads, strict=True) if grad is not None)  # type: ignore[arg-type]
    if given != op.params:
        yield Violation(node, f"{node.name} is given the gradients of {given}, not of {op.params}")
    for param, grad in zip(unit.params, grads, strict=True):  # type: ignore[arg-type]
        found = data(grad).type if isinstance(grad, fx.Node) else None
        if found and (found.shape != param.shape or grads.count(grad) > 1):  # type: ignore[union-attr]
            yield Violation(node, f"{grad.name} is given as the gradient of {param.name}, {list(param.shape)}")
    waits = [user for user in node.users if isinstance(data(user).op, WaitReduce)]
    if len(waits) != 1:
        yield Violation(node, f"{node.name} is waited for {len(waits)} times; want once")


def _updated_once(program: Program) -> Iterator[Violation]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for node in program.results.reduced:
        yield Violation(node, f"{node.name} is returned; want it used for an update")
    for node in program.nodes(Update):
        op, (shards, grads) = op_of(node, Update), node.all_input_nodes
        if data(grads).op != WaitReduce(op.unit, op.params) or data(shards).op != Shards(op.unit):
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


def _reduction_of(program: Program, param: str) -> fx.Node | None:
    return next((node for node in reversed(program.nodes(Reduce)) if param in op_of(node, Reduce).params), None)


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
    if len({(param.dtype, param.compute_dtype, param.reduction_dtype, bool(param.shards)) for param in params}) > 1:
        yield Violation(None, f"a message of {unit.name} mixes dtypes or whole and sharded: {[p.name for p in params]}")
    if list(message) != list(range(message[0], message[0] + len(message))):
        yield Violation(None, f"a message of {unit.name} is not one run of its shards' memory: {message}")


def _volume_right(program: Program) -> Iterator[Violation]:
    """A gather once a phase at most and a reduction once: 2Ψ, or 3Ψ under stage 3."""
    if not (stage := program.layout.stage).optimizer_sharded:
        return
    for phase in Phase if stage.parameters_sharded else (None,):
        found = program.nodes(AllGather, phase=phase)
        for unit in program.layout.units:
            gathers = [node for node in found if op_of(node, AllGather).unit == unit.name]
            uses = _separate_uses(program, unit.name, phase) if stage.parameters_sharded else 1
            if len(gathers) > uses:
                yield Violation(gathers[-1], f"{unit.name} is gathered {len(gathers)} times; want {uses}")


def _separate_uses(program: Program, unit: str, phase: Phase | None) -> int:
    """How often in `phase` regions that read `unit` begin after ones that do not."""
    reads = [unit in op_of(node, Call).units for node in program.nodes(Call, phase=phase)]
    return sum(now and not before for before, now in zip([False, *reads], reads, strict=False))


GATHERED_BEFORE_USE = Fact("full parameters gathered and waited for before use", _gathered_before_use)
RELEASED_ONCE = Fact("gathers released exactly once", _released_once)
UNUSED_AFTER_RELEASE = Fact("nothing used after release", _unused_after_release)
REDUCED_ONCE = Fact("trainable gradients reduced exactly once", _reduced_once)
ACCUMULATED_ONCE = Fact("trainable gradients held back exactly once", _accumulated_once)
UPDATED_ONCE = Fact("reduced gradients used for updates, after the last read", _updated_once)
GATHERED_AHEAD = Fact("gathers for the next step started after updates", _gathered_ahead)
WAITS_SUNK = Fact("waits of reductions sunk", _waits_sunk)
MESSAGES_PACKED = Fact("messages packed", _messages_packed)
VOLUME_RIGHT = Fact("communication volume of the stage", _volume_right)
