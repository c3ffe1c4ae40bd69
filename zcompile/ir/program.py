"""The program: a step's forward and backward as one FX graph with typed data on every node.

Both phases share one graph: first the placeholders, then every node of the forward, then every node of the backward.
The values of the forward that the backward reads are the saved values. So a pass sees the whole step, and facts such as
"released exactly once" or the volume of communication hold over all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zcompile.ir.printer import render
from zcompile.ir.program_graph import ProgramGraph


@dataclass(frozen=True, repr=False)
class Program(ProgramGraph):
    """A step, or its forward or backward (see `phase`), that can be printed, checked and run.

    Programs are values: a pass copies, edits the copy's graph and returns it.
    """

    def __repr__(self) -> str:
        lines = sum(len(self.body(phase)) for phase in self.phases)
        layout, phases = self.layout, " and ".join(self.phases)
        return f"<Program of stage {layout.stage.number}, world {layout.world}: {phases}, {lines} lines; print it>"

    def __str__(self) -> str:
        return render(self)

    def text(self, *, regions: bool = False) -> str:
        """Return the printed program; with `regions`, preceded by its units and its regions, so that it parses."""
        return render(self, regions=regions, units=regions)
