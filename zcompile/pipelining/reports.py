"""What pipelines show of themselves: what all ranks do, beside what other models show of theirs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import model_state, peak_bytes
from zcompile.cost.simulator import idle_share, simulate_pipeline
from zcompile.ir.actions import ActionTable
from zcompile.ir.parser import parse
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.report.explain import layout_line, stage_bytes
from zcompile.schedule.pipeline import Journal


@dataclass
class PipelineCode:
    """The programs of a pipeline, as this rank knows them.

    Attributes:
        hardware: What seconds are predicted for.
        journals: What passes did to this rank's.
        table: The actions of all ranks.
        texts: The programs of the ranks along the pipeline axis, as they are printed.
    """

    hardware: Hardware
    journals: Sequence[Journal]
    table: ActionTable
    texts: Sequence[str]

    @cached_property
    def programs_along(self) -> list[Program]:
        """Other ranks' by their texts, which do not say whether a backend fuses operations."""
        own = self.journals[0].entries[-1].after
        fuses = all(region.fuses for region in own.regions.values())
        return [_fusing(parse(text), fuses=fuses) for text in self.texts]

    def explain(self) -> str:
        """What each rank has, does, sends and holds, as predicted."""
        return explain_pipeline(self.programs_along, self.table, self.hardware)


def _fusing(program: Program, *, fuses: bool) -> Program:
    regions = {name: replace(region, fuses=fuses) for name, region in program.regions.items()}
    return replace(program, regions=regions)


def explain_pipeline(programs: Sequence[Program], table: ActionTable, hardware: Hardware) -> str:
    """What each rank along a pipeline axis has, does, sends and holds in a step, as predicted for `hardware`."""
    out = io.StringIO()
    console = Console(file=out, width=110)
    timelines = simulate_pipeline(programs, hardware)
    step = max(timeline.seconds for timeline in timelines)
    console.print(f"{table.stages} pipeline stages on {len(programs)} ranks, {table.microbatches} micro-batches")
    console.print(f"{layout_line(programs[0].layout)} (of the ranks that have the same stages)")
    idle = f"{idle_share(timelines):.1%} of the time of all ranks idle"
    console.print(f"predicted for {hardware.name}: {step * 1e3:.4g} ms a step, {idle}")
    shown = Table("rank", "stages", "units", "model state", "in flight", "sends", "peak beside it", "busy")
    for rank, (program, timeline) in enumerate(zip(programs, timelines, strict=True)):
        units = [unit.name for unit in program.layout.units]
        busy = (timeline.compute + timeline.optimizer) / step if step else 0.0
        shown.add_row(
            str(rank),
            ", ".join(map(str, table.stages_of(rank))),
            escape(units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"),
            human_bytes(model_state(program.layout).nbytes),
            str(table.in_flight(rank)),
            human_bytes(stage_bytes(program)),
            human_bytes(peak_bytes(program)),
            f"{busy:.0%}",
        )
    console.print(shown)
    for note in dict.fromkeys(note for program in programs for note in program.notes):
        console.print(note, soft_wrap=True, markup=False, highlight=False)
    return out.getvalue()
