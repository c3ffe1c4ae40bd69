"""Facts: named properties of a program, each a generator of violations. The verifier is the loop over them.

A fact is what passes require and ensure; being checkable, it is also what proves the rewritten program right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from zcompile.derived import derived_values
from zcompile.errors import ProgramError
from zcompile.layout import Unit
from zcompile.memory import arena_bytes, live_bytes
from zcompile.ops import (
    Accumulate,
    AllGather,
    Arena,
    Call,
    Compute,
    Fetch,
    GatherAhead,
    Op,
    Parameter,
    Peers,
    Phase,
    Place,
    Reduce,
    Release,
    Results,
    Shards,
    Stash,
    Update,
    WaitFetch,
    WaitGather,
    WaitReduce,
    all_gather,
    all_reduce,
    data,
    gather_ahead,
    op_of,
    reduce_scatter,
)
from zcompile.packing import ALIGNMENT, Interval
from zcompile.places import lifetime, place_bytes
from zcompile.printer import MARK, render
from zcompile.program import PLACEHOLDERS, Program, reads_of
from zcompile.tensor_type import human_bytes


@dataclass(frozen=True, slots=True)
class Violation:
    """Where a fact fails (None: nowhere in particular), and how."""

    node: fx.Node | None
    message: str


@dataclass(frozen=True)
class Fact:
    """A property of programs. Two facts are one if their names are."""

    name: str
    violations: Callable[[Program], Iterator[Violation]] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.name


def verify(program: Program, facts: Iterable[Fact], where: str) -> None:
    """Check all `facts`.

    Raises:
        ProgramError: naming the fact, what is wrong, and the line with a mark in the printed program.
    """
    for fact in facts:
        for violation in fact.violations(program):
            raise ProgramError(
                f"{where}: {fact.name}",
                violation.message,
                f"mend the pass that ran last, or the program\n{_marked(program, violation.node)}",
            )


def _marked(program: Program, node: fx.Node | None) -> str:
    """The printed lines around `node`, its own with an arrow; nothing for no node."""
    lines = render(program, mark=node).splitlines() if node is not None else []
    at = [index for index, line in enumerate(lines) if line.endswith(MARK)]
    if not at:
        return ""
    shown = range(max(0, at[0] - 3), min(len(lines), at[-1] + 4))
    return "\n".join(f"{'-->' if i in at else '   '} {i + 1:4} {lines[i].removesuffix(MARK)}" for i in shown)


def _label(node: fx.Node) -> str:
    """What a message calls a node: a call by its region and units, anything else by its name."""
    op = data(node).op
    return f"{op.region} of {data(node).source}" if isinstance(op, Call) else node.name


# -- every program ----------------------------------------------------------------------------------------------------


def _well_formed(program: Program) -> Iterator[Violation]:
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield Violation(node, f"{_label(node)} uses {source.name} before it is there")
        seen.add(node)
        yield from _spelled_as_meant(node)
    for value in program.results.outputs:
        if isinstance(value, fx.Node) and isinstance(data(value).op, (Shards, AllGather, WaitGather)):
            yield Violation(value, f"{value.name} is returned, but is no value of the model's")


def _spelled_as_meant(node: fx.Node) -> Iterator[Violation]:
    """The text that runs comes from a node's target and arguments; facts and digest read its data."""
    op = data(node).op
    match op:
        case Reduce():
            given = node.kwargs.get("dtype"), node.kwargs.get("bucket"), _written_place(node)
            meant = op.dtype, op.bucket, op.at
            right = node.target is (reduce_scatter if op.scatter else all_reduce) and given == meant
        case AllGather() | GatherAhead():
            asked = bool(node.kwargs.get("keep", False)), node.kwargs.get("dtype"), _written_place(node)
            target, at = (all_gather, op.at) if isinstance(op, AllGather) else (gather_ahead, None)
            right = node.target is target and asked == (op.keep, op.dtype, at)
        case Call():
            right = node.args[0] == op.region
        case _:
            right = True
    if not right:
        yield Violation(node, f"{_label(node)} is written otherwise than its data says: {op}")


def _written_place(node: fx.Node) -> tuple[object, ...] | None:
    """The bytes of the arena that a line's text names."""
    match node.kwargs.get("at"):
        case (fx.Node() as arena, start, stop) if isinstance(data(arena).op, Arena):
            return start, stop
        case None:
            return None
        case other:
            return (other,)


# -- phases, units, regions -------------------------------------------------------------------------------------------


def _phases_split(program: Program) -> Iterator[Violation]:
    derived = derived_values(program)
    seen_backward = False
    for node in program.graph.nodes:
        held = data(node)
        if isinstance(held.op, PLACEHOLDERS):
            continue
        seen_backward |= held.phase is Phase.BACKWARD
        if seen_backward and held.phase is Phase.FORWARD:
            yield Violation(node, f"{node.name} belongs to the forward but stands in the backward")
        for source in node.all_input_nodes:
            crosses = data(source).phase is Phase.FORWARD and held.phase is Phase.BACKWARD
            if crosses and source in derived and not isinstance(held.op, Results):
                yield Violation(node, f"{source.name} is derived from a parameter, yet saved for {node.name}")


def _units_assigned(program: Program) -> Iterator[Violation]:
    derived = derived_values(program)
    for node in program.nodes(Compute):
        for source in node.all_input_nodes:
            op = data(source).op
            if isinstance(op, Parameter) and node not in derived and not data(node).unit:
                yield Violation(node, f"{node.name} reads {op.name} and belongs to no unit")


def _regions_outlined(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Compute, Parameter):
        yield Violation(node, f"{node.name} stands outside a region")
    for node in program.nodes(Call):
        op = op_of(node, Call)
        if op.region not in program.regions:
            yield Violation(node, f"{node.name} calls {op.region}, which is not there")
        else:
            yield from _mistaken_arguments(program, node, op)


def _mistaken_arguments(program: Program, node: fx.Node, op: Call) -> Iterator[Violation]:
    """Parameters given to a region whose shape or dtype is not the one it was traced with."""
    found = program.regions[op.region]
    for inner, (argument, item) in zip(found.graph.find_nodes(op="placeholder"), found.takes, strict=True):
        wanted = data(inner).type
        if item is None or wanted is None:
            continue
        param = program.layout.unit(op.units[argument]).params[item]
        if (param.shape, param.full_dtype) != (wanted.shape, wanted.dtype):
            yield Violation(node, f"{_label(node)} takes {param.name} where it was traced with {wanted}")


# -- gathers ----------------------------------------------------------------------------------------------------------


def _gathered_before_use(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Call):
        arguments = [argument for argument in node.args[1:] if isinstance(argument, fx.Node)]
        for argument, unit in zip(arguments, op_of(node, Call).units, strict=False):
            found = data(argument).op
            if found == Shards(unit) and not program.layout.must_gather(unit):
                continue
            if isinstance(found, Shards):
                yield Violation(node, f"{_label(node)} reads {unit} before it is gathered")
            elif isinstance(found, AllGather):
                yield Violation(node, f"{_label(node)} reads {unit} without waiting for {argument.name}")
            elif not isinstance(found, WaitGather) or _gathered_unit(argument) != unit:
                yield Violation(node, f"{_label(node)} reads {unit}, but is given {argument.name}")
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
        releases = [user for user in waits[0].users if isinstance(data(user).op, Release)]
        want = 0 if op_of(gather, AllGather).keep and not program.layout.stage.parameters_sharded else 1
        if len(releases) != want:
            found = f"{len(releases)} releases of {waits[0].name}"
            yield Violation(gather, f"{found}; want {(want and 'one, after its last use') or 'none, it is kept'}")
    for release in program.nodes(Release):
        if not isinstance(data(release.all_input_nodes[0]).op, WaitGather):
            yield Violation(release, f"{release.all_input_nodes[0].name} is released, but is not a full parameter")


def _unused_after_release(program: Program) -> Iterator[Violation]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    for release in program.nodes(Release):
        full = release.all_input_nodes[0]
        for user in full.users:
            if position[user] > position[release] and not isinstance(data(user).op, (Release, Results)):
                yield Violation(user, f"{_label(user)} uses {full.name} after its release")


# -- reductions -------------------------------------------------------------------------------------------------------


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
            found = (
                f"the gradient of {name} is reduced {count[name]} times; want {'once' if name in expected else 'none'}"
            )
            yield Violation(_reduction_of(program, name), found)
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
                yield Violation(read, f"{_label(read)} reads {op.unit} after its update")


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


# -- schedule ---------------------------------------------------------------------------------------------------------


def _units_bounded(prefetch: int) -> Callable[[Program], Iterator[Violation]]:
    def violations(program: Program) -> Iterator[Violation]:
        if not program.layout.stage.parameters_sharded:
            return
        live: dict[str, fx.Node] = {}
        for node in program.graph.nodes:
            op = data(node).op
            if isinstance(op, AllGather):
                live[node.name] = node
            elif isinstance(op, Release):
                live.pop(node.all_input_nodes[0].all_input_nodes[0].name, None)
            elif isinstance(op, Call):
                read = {arg.all_input_nodes[0].name for arg in _full_arguments(node)}
                ahead = [name for name in live if name not in read]
                if len(ahead) > prefetch + (not read):
                    found = (
                        f"while {node.name} computes, {len(ahead)} units beside its own are full: {', '.join(ahead)}"
                    )
                    yield Violation(node, f"{found}; prefetch={prefetch} allows {prefetch}")

    return violations


def _full_arguments(call: fx.Node) -> list[fx.Node]:
    return [arg for arg in call.all_input_nodes if isinstance(data(arg).op, WaitGather)]


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


def _buffers_bounded(bucket: int) -> Callable[[Program], Iterator[Violation]]:
    def violations(program: Program) -> Iterator[Violation]:
        for node in program.nodes(Reduce) if program.layout.world > 1 else ():
            op, sizes = op_of(node, Reduce), program.message_bytes(node)
            if op.scatter and max(sizes) > bucket and (op.bucket is None or op.bucket > bucket):
                found = f"{node.name} may copy {human_bytes(max(sizes))} to send it"
                yield Violation(node, f"{found}; {human_bytes(bucket)} are allowed")

    return violations


def _places_disjoint(program: Program) -> Iterator[Violation]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    alive: list[tuple[fx.Node, Place, Interval]] = []
    size = arena_bytes(program)
    for node in program.nodes(AllGather, Reduce):
        op = data(node).op
        if not isinstance(op, (AllGather, Reduce)) or op.at is None:
            continue
        start, stop = op.at
        mine, wanted = lifetime(node, position), place_bytes(program, node)
        if stop - start < wanted or start < 0 or stop > size or start % ALIGNMENT:
            found = f"{node.name} has the bytes [{start}, {stop}) of an arena of {size}"
            yield Violation(node, f"{found}; it needs {wanted}, at a multiple of {ALIGNMENT}")
        alive = [before for before in alive if before[-1].end >= mine.start]
        for other, (begin, end), _ in alive:
            if begin < stop and start < end:
                yield Violation(node, f"{node.name} has bytes of the arena that {other.name} still needs")
        alive.append((node, op.at, mine))


def _fetched_before_use(program: Program) -> Iterator[Violation]:
    allowed: dict[type[Op], tuple[type[Op], ...]] = {Stash: (Fetch,), Fetch: (WaitFetch,)}
    for node in program.nodes(Stash, Fetch):
        wanted = allowed[type(data(node).op)]
        for user in node.users:
            if not isinstance(data(user).op, wanted):
                yield Violation(user, f"{_label(user)} reads {node.name}, which stands for an activation on its way")
        if isinstance(data(node).op, Stash):
            continue
        stashed, place = node.all_input_nodes
        if data(stashed).op != Stash():
            yield Violation(node, f"{node.name} fetches {stashed.name}, which has not been stashed")
        elif stashed.all_input_nodes[1] is not place:
            found = f"{node.name} fetches {stashed.name} from {place.name}"
            yield Violation(node, f"{found}; it is stashed in {stashed.all_input_nodes[1].name}")
    for node in program.nodes(WaitFetch):
        fetched = node.all_input_nodes[0].all_input_nodes[0].all_input_nodes[0]
        if data(fetched).type != data(node).type:
            yield Violation(node, f"{node.name} is {data(node).type}, and {fetched.name} was stashed for it")


def _parts_replicated(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Stash):
        value, place = node.all_input_nodes
        if isinstance(data(place).op, Peers) and not data(value).replicated:
            yield Violation(node, f"{value.name} is not known to be the same on all peers, and each would keep a part")


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


WELL_FORMED = Fact("values defined before use, operations written as meant", _well_formed)
PHASES_SPLIT = Fact("phases split, parameters read again and never saved", _phases_split)
UNITS_ASSIGNED = Fact("reads of parameters assigned to units", _units_assigned)
REGIONS_OUTLINED = Fact("compute outlined into regions", _regions_outlined)
GATHERED_BEFORE_USE = Fact("full parameters gathered and waited for before use", _gathered_before_use)
RELEASED_ONCE = Fact("gathers released exactly once", _released_once)
UNUSED_AFTER_RELEASE = Fact("nothing used after release", _unused_after_release)
REDUCED_ONCE = Fact("trainable gradients reduced exactly once", _reduced_once)
ACCUMULATED_ONCE = Fact("trainable gradients held back exactly once", _accumulated_once)
UPDATED_ONCE = Fact("reduced gradients used for updates, after the last read", _updated_once)
GATHERED_AHEAD = Fact("gathers for the next step started after updates", _gathered_ahead)
WAITS_SUNK = Fact("waits of reductions sunk", _waits_sunk)
MESSAGES_PACKED = Fact("messages packed", _messages_packed)
PLACES_DISJOINT = Fact("places in the arena disjoint while they are needed", _places_disjoint)
FETCHED_BEFORE_USE = Fact("activations fetched and waited for before use", _fetched_before_use)
PARTS_REPLICATED = Fact("parts kept of what all peers have", _parts_replicated)
VOLUME_RIGHT = Fact("communication volume of the stage", _volume_right)


def memory_bounded(limit: int) -> Fact:
    """A step holds at most `limit` bytes beside shards and optimizer state, as `zcompile.memory` counts them."""

    def violations(program: Program) -> Iterator[Violation]:
        node, most = max(live_bytes(program).items(), key=lambda item: item[1])
        if most > limit:
            yield Violation(node, f"the step holds {human_bytes(most)} there; {human_bytes(limit)} are allowed")

    return Fact(f"at most {human_bytes(limit)} held", violations)


def in_training(fact: Fact) -> Fact:
    """`fact` of programs with a backward; without one nothing is saved, so that no checkpoint could bring it about."""

    def violations(program: Program) -> Iterator[Violation]:
        if program.has_backward:
            yield from fact.violations(program)

    return Fact(f"{fact.name} in training", violations)


def buffers_bounded(bucket: int) -> Fact:
    """What reductions copy to send it is copied at most `bucket` bytes at a time."""
    return Fact(f"buffers of at most {human_bytes(bucket)}", _buffers_bounded(bucket))


def units_bounded(prefetch: int) -> Fact:
    """At most `prefetch` units are full beside those that a region reads while it runs; one more if it reads none."""
    return Fact(f"at most {prefetch} + 1 units full at once", _units_bounded(prefetch))
