"""The outer program as a networkx graph, with the cost of each line."""

from __future__ import annotations

import itertools

import networkx as nx

from zcompile.cost.hardware import CPU, Hardware
from zcompile.cost.roofline import flops_of, line_seconds
from zcompile.ir.operation import data
from zcompile.ir.ops import Communication, Placeholder
from zcompile.ir.program import Program


def dag(program: Program, hardware: Hardware = CPU) -> nx.DiGraph[str]:
    """Return the outer program as a networkx graph.

    Nodes are the names of the program's values, with the attributes `op`, `phase`, `source`, `bytes` (allocated by the
    line), `flops` and `seconds` (by the roofline or the alpha-beta model of `hardware`). Edges are data dependencies;
    edges with `order=True` join each collective to the next one that is issued.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    order: list[str] = []
    for node in program.graph.nodes:
        meta = data(node)
        if meta.phase not in program.phases and not isinstance(meta.op, Placeholder):
            continue
        graph.add_node(
            node.name,
            op=type(meta.op).__name__,
            phase=str(meta.phase),
            source=meta.source,
            bytes=program.memory(node),
            flops=flops_of(node, program.regions),
            seconds=line_seconds(program, node, hardware),
        )
        graph.add_edges_from((source.name, node.name) for source in node.all_input_nodes if source.name in graph)
        if isinstance(meta.op, Communication):
            order.append(node.name)
    graph.add_edges_from(itertools.pairwise(order), order=True)
    return graph
