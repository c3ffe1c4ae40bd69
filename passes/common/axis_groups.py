"""Groups of the ranks along an axis, as placeholders that programs are lent."""

from __future__ import annotations

from torch import fx

from zcompile.ir.axis import Axis
from zcompile.ir.operation import Data, op_of
from zcompile.ir.ops import Group
from zcompile.ir.program import Program
from zcompile.ir.spelling import identifier


def group_of(program: Program, axis: Axis) -> fx.Node:
    """The placeholder for the ranks along `axis`, which is put in if there is none."""
    found = next((node for node in program.nodes(Group) if op_of(node, Group).axis == axis.name), None)
    return found or program.add_placeholder(identifier(axis.name), Data(Group(axis.name)))
