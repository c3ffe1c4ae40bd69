"""Replication: which terms are the same on all ranks of a tensor-parallel group, found out from the traced step.

Marked, when a step is traced, are arguments of the call, undivided parameters, buffers, and collectives that give all
ranks one result. What operations without random numbers make of these is the same, too; marks of passes do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from zcompile._torch import OpOverload, writes_arguments
from zcompile.ir.operation import data
from zcompile.ir.ops import Input, Parameter
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_collective
from zcompile.proof.rules import CONSTANT, LIST, Key
from zcompile.proof.steps import Value
from zcompile.proof.terms import ITEM, Terms


def marked(traced: Program, values: Mapping[fx.Node, Value]) -> frozenset[int]:
    """The terms that a traced step begins with, or that its collectives give, and that are marked as replicated."""
    origins = (n for n in traced.graph.nodes if isinstance(data(n).op, (Input, Parameter)) or is_collective(n))
    return frozenset(term for n in origins if data(n).replicated and isinstance(term := values[n], int))


def is_replicated(term: int, origins: Collection[int], terms: Terms) -> bool:
    """True if a term is made of `origins` alone, by operations that give all ranks the same for the same."""
    known: set[int] = set()
    for part in terms.below([term]):
        key = terms.keys[part]
        if part in origins or (_is_function(key) and all(one in known for one in key[1:] if type(one) is int)):
            known.add(part)
    return term in known


def _is_function(key: Key) -> bool:
    """True for what follows from its parts; memory that is not written yet holds what was there before."""
    head = key[0]
    if not isinstance(head, OpOverload):
        return head in (CONSTANT, LIST, ITEM)
    name = head.overloadpacket.__name__
    own = head.namespace in ("aten", "prims") or name == "wait_tensor"
    return own and "draw=" not in key and "empty" not in name and not writes_arguments(head)
