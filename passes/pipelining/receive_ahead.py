"""receive_ahead: start receiving early, so that what another stage sends arrives beside compute.

    m0_h = wait(m0_h_recv)                          m0_h = wait(m0_h_recv)
    m0_y = region_0(c, m0_h)                        m1_h_recv = recv(pp, "f32[8, 4]", source=0)
    m1_h_recv = recv(pp, "f32[8, 4]", source=0)  -> m0_y = region_0(c, m0_h)
    m1_h = wait(m1_h_recv)                          m1_h = wait(m1_h_recv)

At most `depth` messages of each other rank are on their way, and take memory before they are needed; the order in which
they are received stays that in which they are sent. What is needed first is received from the beginning on.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zcompile.ir.operation import data, op_of, set_data
from zcompile.ir.ops import Receive, wait_of
from zcompile.ir.program import Program


def receive_ahead(program: Program, *, depth: int = 1) -> Program:
    """Move the start of each message behind the end of the one `depth` before it, of the same rank."""
    program = program.copy()
    queues: dict[int, list[fx.Node]] = {}
    for node in program.nodes(Receive):
        queues.setdefault(op_of(node, Receive).source, []).append(node)
    for received in queues.values():
        for index, node in enumerate(received):
            if index < depth:
                _move_to_begin(program, node)
            else:
                # Waits may come in another order than messages do, where one of these is needed later.
                _move_after(program, node, [wait_of(received[index - depth]), received[index - 1]])
    return program


def _move_to_begin(program: Program, node: fx.Node) -> None:
    begin = next(one for one in program.graph.nodes if one.op != "placeholder" and not _is_of_begin(one))
    if node is not begin:
        begin.prepend(node)
    set_data(node, replace(data(node), action=""))


def _is_of_begin(node: fx.Node) -> bool:
    return isinstance(data(node).op, Receive) and data(node).action == ""


def _move_after(program: Program, node: fx.Node, lines: list[fx.Node]) -> None:
    """Move a line behind the last of `lines`, if that is in front of it."""
    position = {one: index for index, one in enumerate(program.graph.nodes)}
    last = max(lines, key=position.__getitem__)
    if position[last] < position[node]:
        last.append(node)
        set_data(node, replace(data(node), action=data(last).action))
