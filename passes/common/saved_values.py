"""What is saved for the backward, and may be kept elsewhere meanwhile."""

from __future__ import annotations

import operator

from torch import fx

from zcompile._torch import saved_random
from zcompile.ir.liveness import may_show
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Call, Item
from zcompile.ir.program import Program


def maker_of(program: Program, node: fx.Node) -> fx.Node | None:
    """The region that has made `node`, which is saved for the backward, if a copy elsewhere lets its memory go.

    It does not where another value shows that memory. What the last region leaves, the backward's first takes at once.
    States of random number generators stay as they are: torch reads them from the beginning of their storage.
    """
    meta = data(node)
    call = node.all_input_nodes[0] if isinstance(meta.op, Item) else node
    if meta.phase is not Phase.FORWARD or not isinstance(data(call).op, Call) or not meta.nbytes:
        return None
    if is_random_state(program, node):
        return None
    shown = any(may_show(program, other, node) for other in (*call.users, *node.users) if other is not node)
    last = program.nodes(Call, phase=Phase.FORWARD)[-1]
    return None if shown or call is last or node in program.results.outputs else call


def is_random_state(program: Program, node: fx.Node) -> bool:
    """True for the first result of what saves the state of a random number generator and draws; `node`: of a region."""
    op = data(node).op
    region = program.regions[op_of(node.all_input_nodes[0] if isinstance(op, Item) else node, Call).region]
    made = region.outputs[op.index if isinstance(op, Item) else 0]
    return made.target is operator.getitem and made.args[1] == 0 and made.all_input_nodes[0].target is saved_random
