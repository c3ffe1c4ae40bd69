"""Facts of memory: what is held at once, where it is, and what is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from zcompile.cost.memory import arena_bytes, live_bytes
from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.arena_places import lifetime, place_bytes
from zcompile.ir.captured_regions import is_of_graph, outlives
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import (
    Accumulate,
    AllGather,
    ByteRange,
    Call,
    Reduce,
    Release,
    Results,
    WaitGather,
)
from zcompile.ir.packing import ALIGNMENT, Interval
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes


def _places_disjoint(program: Program) -> Iterator[Violation]:
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    alive: list[tuple[fx.Node, ByteRange, Interval]] = []
    size = arena_bytes(program)
    for node in program.nodes(AllGather, Reduce):
        op = data(node).op
        if not isinstance(op, (AllGather, Reduce)) or op.at is None:
            continue
        start, stop = op.at
        mine, wanted = lifetime(node, position), place_bytes(program, node)
        if stop - start < wanted or start < 0 or stop > size or start % ALIGNMENT:
            problem = f"{node.name} has the bytes [{start}, {stop}) of an arena of {size}"
            yield Violation(node, f"{problem}; it needs {wanted}, at a multiple of {ALIGNMENT}")
        alive = [before for before in alive if before[-1].end >= mine.start]
        for other, (begin, end), _ in alive:
            if begin < stop and start < end:
                yield Violation(node, f"{node.name} has bytes of the arena that {other.name} still needs")
        alive.append((node, op.at, mine))


def _results_owned(program: Program) -> Iterator[Violation]:
    for user in program.nodes(Reduce, Accumulate, Results):
        for value in outlives(program, user):
            if is_of_graph(program, value):
                problem = f"{value.name} outlives the step, and the next one's CUDA graphs write to its memory"
                yield Violation(user, f"{label(user)} takes {value.name}: {problem}")


def _full_arguments(call: fx.Node) -> list[fx.Node]:
    return [arg for arg in call.all_input_nodes if isinstance(data(arg).op, WaitGather)]


PLACES_DISJOINT = Fact("places in the arena disjoint while they are needed", _places_disjoint)
RESULTS_OWNED = Fact("nothing that outlives a step in the memory of CUDA graphs", _results_owned)


def memory_bounded(limit: int) -> Fact:
    """A step holds at most `limit` bytes beside shards and optimizer state, as `zcompile.cost.memory` counts them."""

    def violations(program: Program) -> Iterator[Violation]:
        node, most = max(live_bytes(program).items(), key=lambda item: item[1])
        if most > limit:
            yield Violation(node, f"the step holds {human_bytes(most)} there; {human_bytes(limit)} are allowed")

    return Fact(f"at most {human_bytes(limit)} held", violations)


def buffers_bounded(bucket: int) -> Fact:
    """What reductions copy to send it is copied at most `bucket` bytes at a time."""
    return Fact(f"buffers of at most {human_bytes(bucket)}", _buffers_bounded(bucket))


def _buffers_bounded(bucket: int) -> Callable[[Program], Iterator[Violation]]:
    def violations(program: Program) -> Iterator[Violation]:
        for node in program.nodes(Reduce) if program.layout.sharded.size > 1 else ():
            op = op_of(node, Reduce)
            sizes = [message.nbytes for message in op.messages(program.layout)]
            if op.scatter and max(sizes) > bucket and (op.bucket is None or op.bucket > bucket):
                problem = f"{node.name} may copy {human_bytes(max(sizes))} to send it"
                yield Violation(node, f"{problem}; {human_bytes(bucket)} are allowed")

    return violations


def units_bounded(prefetch: int) -> Fact:
    """At most `prefetch` units are full beside those that a region reads while it runs; one more if it reads none."""
    return Fact(f"at most {prefetch} + 1 units full at once", _units_bounded(prefetch))


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
                    problem = (
                        f"while {node.name} computes, {len(ahead)} units beside its own are full: {', '.join(ahead)}"
                    )
                    yield Violation(node, f"{problem}; prefetch={prefetch} allows {prefetch}")

    return violations
