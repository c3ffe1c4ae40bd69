"""receive_ahead: start receives early, so that compute hides them.

    m0_h = wait(m0_h_recv)                          m0_h = wait(m0_h_recv)
    m0_y = region_0(c, m0_h)                        m1_h_recv = recv(pp, "f32[8, 4]", source=0)
    m1_h_recv = recv(pp, "f32[8, 4]", source=0)  -> m0_y = region_0(c, m0_h)
    m1_h = wait(m1_h_recv)                          m1_h = wait(m1_h_recv)

At most `depth` messages from each rank are in flight, and take memory before they are needed. They are still received
in the order in which they are sent. The first `depth` receives from each rank start at the beginning of the step.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zcompile.ir.operation import data, op_of, set_data
from zcompile.ir.ops import Receive, wait_of
from zcompile.ir.program import Program


def receive_ahead(program: Program, *, depth: int = 1) -> Program:
    """Start each receive right after the wait for the message `depth` earlier from the same rank."""
    program = program.copy()
    queues: dict[int, list[fx.Node]] = {}
    for node in program.nodes(Receive):
        queues.setdefault(op_of(node, Receive).source, []).append(node)
    for received in queues.values():
        for index, node in enumerate(received):
            if index < depth:
                _move_to_begin(program, node)
            else:
                # Receives from a rank must keep the order of its sends, while waits may be in another order.
                _move_after(program, node, [wait_of(received[index - depth]), received[index - 1]])
    return program


def _move_to_begin(program: Program, node: fx.Node) -> None:
    begin = next(line for line in program.graph.nodes if line.op != "placeholder" and not _is_of_begin(line))
    if node is not begin:
        begin.prepend(node)
    set_data(node, replace(data(node), action=""))


def _is_of_begin(node: fx.Node) -> bool:
    return isinstance(data(node).op, Receive) and data(node).action == ""


def _move_after(program: Program, node: fx.Node, lines: list[fx.Node]) -> None:
    """Move `node` to just after the last of `lines`, if that is an earlier line."""
    position = {line: index for index, line in enumerate(program.graph.nodes)}
    last = max(lines, key=position.__getitem__)
    if position[last] < position[node]:
        last.append(node)
        set_data(node, replace(data(node), action=data(last).action))
