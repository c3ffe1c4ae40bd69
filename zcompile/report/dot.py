"""Drawing: the outer program as a graph in graphviz's language."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import jinja2
from torch import fx

from zcompile.cost.hardware import Hardware
from zcompile.cost.roofline import line_seconds
from zcompile.ir.operation import Role, data
from zcompile.ir.ops import Call, Communication, Item, Results
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes

_TEMPLATE = """\
digraph program {
    rankdir=TB; newrank=true; nodesep=0.25; ranksep=0.3; bgcolor=transparent
    node [fontname="Helvetica", fontsize=10, style="filled,rounded", shape=box, color="#606060"]
    edge [color="#808080", arrowsize=0.6]
{%- for title, nodes in clusters.items() %}
    subgraph {{ "cluster_" ~ title }} {
        label={{ quote(title) }}; fontname="Helvetica"; color="#b0b0b0"
{%- for node in nodes %}
        {{ quote(node.name) }} [label={{ quote(node.label) }}, fillcolor="{{ node.color }}"]
{%- endfor %}
    }
{%- endfor %}
{%- for start, end, style in edges %}
    {{ quote(start) }} -> {{ quote(end) }}{{ style }}
{%- endfor %}
}
"""
_COLORS = {
    Role.COMPUTE: "#9ecae1",
    Role.GATHER: "#a1d99b",
    Role.REDUCE: "#fdae6b",
    Role.FREE: "#e0e0e0",
    Role.UPDATE: "#bcbddc",
}


@dataclass(frozen=True, slots=True)
class _Box:
    name: str
    label: str
    color: str


def dot_text(program: Program, hardware: Hardware) -> str:
    """The program in DOT: regions, communications and what they take, forward and backward apart.

    Times are those of `hardware`. Dashed edges are the order in which collectives are issued.
    """
    shown = [node for node in program.graph.nodes if _is_shown(node)]
    clusters = {
        str(phase): [_box(program, node, hardware) for node in shown if data(node).phase is phase]
        for phase in program.phases
    }
    edges = dict.fromkeys((_source(one).name, node.name, "") for node in shown for one in node.all_input_nodes)
    order = itertools.pairwise(node.name for node in shown if isinstance(data(node).op, Communication))
    edges |= dict.fromkeys((one, other, " [style=dashed, constraint=false]") for one, other in order)
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(_TEMPLATE)
    return template.render(clusters=clusters, edges=edges, quote=json.dumps)


def _is_shown(node: fx.Node) -> bool:
    """True for lines that do something, and for what they take; the results of a call are in its box."""
    return not isinstance(data(node).op, (Item, Results)) and bool(node.users or node.op == "call_function")


def _source(node: fx.Node) -> fx.Node:
    while isinstance(data(node).op, Item):
        node = node.all_input_nodes[0]
    return node


def _box(program: Program, node: fx.Node, hardware: Hardware) -> _Box:
    meta = data(node)
    lines = [node.name]
    if isinstance(meta.op, Call):
        lines = [f"{meta.op.region} of {meta.source or 'the root'}"]
    if node.op == "call_function":
        if seconds := line_seconds(program, node, hardware):
            lines.append(f"{seconds * 1e3:.3g} ms")
        if nbytes := program.memory(node):
            lines.append(f"{'+' if nbytes > 0 else '-'}{human_bytes(abs(nbytes))}")
    elif meta.type:
        lines.append(str(meta.type))
    return _Box(node.name, "\n".join(lines), _COLORS.get(meta.op.role, "#ffffff"))
