"""Runs: the consecutive operations of one unit that become a region."""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import data
from zcompile.ir.ops import Item


def runs(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Maximal runs of one unit; glue joins the run before it, at the beginning the one after.

    What a divided backward leaves for later begins runs of its own.
    """
    runs: list[list[fx.Node]] = []
    home: dict[fx.Node, list[fx.Node]] = {}
    current, deferred = "", False
    for node in nodes:
        if isinstance(data(node).op, Item):
            home[node] = home[node.all_input_nodes[0]]
        else:
            unit = data(node).unit
            if not runs or (unit and current and unit != current) or data(node).deferred is not deferred:
                runs.append([])
                deferred, current = data(node).deferred, ""
            current = unit or current
            home[node] = runs[-1]
        home[node].append(node)
    return runs
