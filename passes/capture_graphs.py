"""capture_graphs: mark regions for capture as CUDA graphs, and copy values that outlive a step out of graph memory.

    y = region_0(a_full, x)                     y = region_0(a_full, x)       # captured; a_full has a fixed address
    return [y], ...                     ->      y_copy = copy(y, strided=True)
                                                return [y_copy], ...

A graph reads and writes the same addresses on every replay. Parameters that are gathered into the arena, or kept full,
have the same address in every step, and torch's CUDA-graph trees check that they do; other arguments are copied to the
graph's own inputs. Results are in memory that the graphs of a step share and the next step overwrites. So a program's
outputs are copied, and so are gradients that are not packed or scattered into other memory.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zcompile.ir.captured_regions import captured_regions, is_of_graph, outlives
from zcompile.ir.operation import data
from zcompile.ir.ops import Accumulate, Copy, Reduce, Results
from zcompile.ir.program import Program
from zcompile.passes.common.lines import copy_of


def capture_graphs(program: Program) -> Program:
    """Return a program whose regions are captured; a note gives the reason for each region that is not."""
    program = program.copy()
    found = captured_regions(program)
    fixed = {name: numbers for name, numbers in found.items() if not isinstance(numbers, str)}
    regions = {name: replace(region, fixed=fixed.get(name)) for name, region in program.regions.items()}
    left_out = [f"{name} ({reason})" for name, reason in found.items() if isinstance(reason, str)]
    note = f"CUDA graphs: {len(regions) - len(left_out)} of {len(regions)} regions"
    note += f"; not {', '.join(left_out)}" if left_out else ""
    return copy_out(replace(program, regions=regions, notes=(*program.notes, note)))


def copy_out(program: Program) -> Program:
    """Return a program in which no value that outlives a step is in the memory of a graph."""
    program = program.copy()
    copies = dict[tuple[fx.Node, bool], fx.Node]()
    for user in program.nodes(Reduce, Accumulate, Results):
        strided = isinstance(data(user).op, Results)
        for value in outlives(program, user):
            if is_of_graph(program, value):
                if (value, strided) not in copies:
                    meta = replace(data(value), op=Copy(strided=strided), view=False, storage=0)
                    copies[value, strided] = copy_of(program, value, meta, "copy")
                user.replace_input_with(value, copies[value, strided])
    return program
