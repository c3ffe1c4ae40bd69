"""Facts about memory: how much is held at once, where it is, and how long its content is valid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import fx

from zcompile.cost.memory import arena_bytes, live_bytes
from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.arena_places import lifetime, place_bytes
from zcompile.ir.captured_regions import is_of_graph, outlives
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import (
    Accumulate,
    AllGather,
    ByteRange,
    Call,
    Fetch,
    Input,
    Placeholder,
    Reduce,
    ReduceOutside,
    Release,
    Results,
    Sum,
    SumAverages,
    WaitGather,
)
from zcompile.ir.packing import ALIGNMENT, Interval
from zcompile.ir.program import Program
from zcompile.ir.shared_memory import Memory, memory_of_values
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
        interval, wanted = lifetime(node, position), place_bytes(program, node)
        if stop - start < wanted or start < 0 or stop > size or start % ALIGNMENT:
            problem = f"{node.name} has the bytes [{start}, {stop}) of an arena of {size}"
            yield Violation(node, f"{problem}; it needs {wanted}, at a multiple of {ALIGNMENT}")
        alive = [before for before in alive if before[-1].end >= interval.start]
        for other, (begin, end), _ in alive:
            if begin < stop and start < end:
                yield Violation(node, f"{node.name} has bytes of the arena that {other.name} still needs")
        alive.append((node, op.at, interval))


def _results_owned(program: Program) -> Iterator[Violation]:
    for user in program.nodes(Reduce, Accumulate, Results):
        for value in outlives(program, user):
            if is_of_graph(program, value):
                problem = f"{value.name} outlives the step, and the next one's CUDA graphs write to its memory"
                yield Violation(user, f"{label(user)} takes {value.name}: {problem}")


def _owned(program: Program) -> Iterator[Violation]:
    memory, gone = memory_of_values(program), dict[Memory, str]()
    inputs = [node for node in program.nodes(Input) if data(node).op.mutated]  # type: ignore[attr-defined]
    overwritten = {memory[node]: f"the forward writes to {node.name}" for node in inputs}
    for node in program.graph.nodes:
        op, in_backward = data(node).op, data(node).phase is Phase.BACKWARD
        known = gone | overwritten if overwritten and in_backward and not isinstance(op, Results) else gone
        for value in node.all_input_nodes if known else ():
            if (why := known.get(memory[value])) is not None:
                yield Violation(node, f"{label(node)} uses {value.name} after its memory has gone: {why}")
        if isinstance(op, Release):
            gone[memory[node.all_input_nodes[0]]] = f"{node.all_input_nodes[0].name} is released"
        elif isinstance(op, Fetch):
            gone[memory[node.all_input_nodes[0]]] = f"{node.name} brings it back, and who keeps it lets it go"
        elif isinstance(op, ReduceOutside):
            gone[memory[node.all_input_nodes[1]]] = f"{node.name} works in it"
        elif isinstance(op, (Sum, Reduce, Accumulate)):
            yield from _taken(node, memory, gone)
        elif isinstance(op, SumAverages):
            gone |= {memory[averages]: f"{node.name} works in it" for averages in node.all_input_nodes[1:]}


def _taken(node: fx.Node, memory: dict[fx.Node, Memory], gone: dict[Memory, str]) -> Iterator[Violation]:
    """Check that no other value uses the gradients of a line, which overwrites or keeps their memory."""
    given, *others = ([grad for grad in _listed(argument) if isinstance(grad, fx.Node)] for argument in node.args[1:])
    added = [gradient for gradients in others for gradient in gradients]
    for gradient in given:
        maker = memory[gradient].line
        if isinstance(data(maker).op, Placeholder) or data(maker).phase is Phase.FORWARD:
            yield Violation(node, f"{node.name} works in the memory of {maker.name}, which is not its own; want a copy")
        if sum(memory[other] == memory[gradient] for other in (*given, *added)) > 1:
            yield Violation(node, f"{node.name} is given the memory of {gradient.name} twice; want a copy")
    gone |= {memory[gradient]: f"{node.name} works in it" for gradient in given}
    gone |= {memory[grad]: f"{node.name} lets it go" for grad in added if data(memory[grad].line).phase is Phase.STEP}


def _listed(argument: Any) -> Sequence[Any]:
    """Return the gradients in a list argument; for a sum, which is a single value, a list of it."""
    return argument if isinstance(argument, (list, tuple)) else [argument]


PLACES_DISJOINT = Fact("places in the arena disjoint while they are needed", _places_disjoint)
RESULTS_OWNED = Fact("nothing that outlives a step in the memory of CUDA graphs", _results_owned)
OWNED = Fact("memory used only while it holds what it did", _owned)


def memory_bounded(limit: int) -> Fact:
    """A step holds at most `limit` bytes, as `zcompile.cost.memory` counts them, without shards and optimizer state."""
    return Fact(f"at most {human_bytes(limit)} held", partial(_memory_bounded, limit))


def _memory_bounded(limit: int, program: Program) -> Iterator[Violation]:
    node, most = max(live_bytes(program).items(), key=lambda item: item[1])
    if most > limit:
        yield Violation(node, f"the step holds {human_bytes(most)} there; {human_bytes(limit)} are allowed")


def buffers_bounded(bucket: int) -> Fact:
    """Reductions copy gradients to send them in pieces of at most `bucket` bytes."""
    return Fact(f"buffers of at most {human_bytes(bucket)}", partial(_buffers_bounded, bucket))


def _buffers_bounded(bucket: int, program: Program) -> Iterator[Violation]:
    for node in program.nodes(Reduce) if program.layout.sharded.size > 1 else ():
        op = op_of(node, Reduce)
        sizes = [message.nbytes for message in op.messages(program.layout)]
        if op.scatter and max(sizes) > bucket and (op.bucket is None or op.bucket > bucket):
            problem = f"{node.name} may copy {human_bytes(max(sizes))} to send it"
            yield Violation(node, f"{problem}; {human_bytes(bucket)} are allowed")


def units_bounded(prefetch: int) -> Fact:
    """While a region runs, at most `prefetch` units are full that it does not read; one more if it reads none."""
    return Fact(f"at most {prefetch} + 1 units full at once", partial(_units_bounded, prefetch))


def _units_bounded(prefetch: int, program: Program) -> Iterator[Violation]:
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
            full = (argument for argument in node.all_input_nodes if isinstance(data(argument).op, WaitGather))
            read = {argument.all_input_nodes[0].name for argument in full}
            ahead = [name for name in live if name not in read]
            if len(ahead) > prefetch + (not read):
                problem = f"while {node.name} computes, {len(ahead)} other units are full: {', '.join(ahead)}"
                yield Violation(node, f"{problem}; prefetch={prefetch} allows {prefetch}")
