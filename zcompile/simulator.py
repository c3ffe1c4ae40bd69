"""The simulator: how long a step takes if regions and messages take what the cost model says.

Two lanes: lines run one after the other, messages one after the other in the order of their launch. A line that waits
for a message ends when that has arrived.
"""

from __future__ import annotations

from torch import fx

from zcompile.cost import Hardware, flops_of, seconds_of
from zcompile.ops import AllGather, Call, Reduce, WaitGather, WaitReduce, data
from zcompile.program import Program


def step_seconds(program: Program, hardware: Hardware) -> float:
    """Seconds from the first line of the forward to the last of the backward, both runs one after the other."""
    now = wire = 0.0
    arrival: dict[fx.Node, float] = {}
    cost: dict[str, float] = {}
    for node in program.graph.nodes:
        match data(node).op:
            case AllGather() | Reduce():
                wire = max(now, wire) + _flight(program, node, hardware)
                arrival[node] = wire
            case WaitGather() | WaitReduce():
                now = max(now, arrival[node.all_input_nodes[0]])
            case Call(region):
                if region not in cost:
                    cost[region] = seconds_of(*flops_of(node, program.regions), 0, hardware)
                now += cost[region]
    return now


def _flight(program: Program, node: fx.Node, hardware: Hardware) -> float:
    """Seconds of a communication: the latency of each of its messages, and its bytes."""
    return program.message_count(node) * hardware.latency + program.wire_bytes(node) / hardware.bandwidth
