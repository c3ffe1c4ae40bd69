"""split_large: reduce gradients that are larger than a bucket in pieces.

With a bucket of 8 KiB and a gradient of 16 KiB:

    a_reduce = reduce_scatter(a, [ga])          ->      a_reduce = reduce_scatter(a, [ga], bucket=8192)

A gradient that does not divide evenly, or is cast, is copied before it is sent; on gloo with more than two ranks, the
other ranks' parts need memory until they are summed. In pieces, these take at most two buckets, for parameters of any
size: the constant-size buffers of ZeRO-R (Rajbhandari et al. 2020, section 6.2). No other gradient is copied.
"""

from __future__ import annotations

from dataclasses import replace

from zcompile.ir.operation import op_of
from zcompile.ir.ops import Reduce
from zcompile.ir.program import Program


def split_large(program: Program, *, bucket: int) -> Program:
    """Return a program that sets `bucket`, in bytes, on each reduce_scatter that has a larger message."""
    program = program.copy()
    for node in program.nodes(Reduce) if program.layout.sharded.size > 1 else ():
        op = op_of(node, Reduce)
        if op.scatter and max(message.nbytes for message in op.messages(program.layout)) > bucket:
            program.respell(node, replace(op, bucket=bucket))
    return program
