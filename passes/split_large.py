"""split_large: let what is too large for a buffer be reduced in pieces.

With a bucket of 8 KiB, of a gradient of 16 KiB:

    a_reduce = reduce_scatter(a, [ga])          ->      a_reduce = reduce_scatter(a, [ga], bucket=8192)

A gradient that does not divide evenly, or is cast, is copied before it is sent; on gloo with more than two ranks the
parts of others need memory until they are summed. In pieces they take no more than two buckets, whatever the size of
the parameter: the constant-size buffers of ZeRO-R (Rajbhandari et al. 2020, section 6.2). A gradient that needs no copy
is sent as it lies.
"""

from __future__ import annotations

from dataclasses import replace

from zcompile.ir.operation import op_of
from zcompile.ir.ops import Reduce
from zcompile.ir.program import Program


def split_large(program: Program, *, bucket: int) -> Program:
    """A program whose scattered reductions that have a message of more than `bucket` bytes know it."""
    program = program.copy()
    for node in program.nodes(Reduce) if program.layout.sharded.size > 1 else ():
        op = op_of(node, Reduce)
        if op.scatter and max(message.nbytes for message in op.messages(program.layout)) > bucket:
            program.respell(node, replace(op, bucket=bucket))
    return program
