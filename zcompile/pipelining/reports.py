"""Reports of pipelines: the common reports of compiled models, and what all ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rich.markup import escape
from rich.table import Table

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import model_state, peak_bytes
from zcompile.cost.simulator import idle_share, simulate_pipeline
from zcompile.cost.text_console import TextConsole
from zcompile.ir.actions import ActionTable
from zcompile.ir.parser import parse
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.report.explain import layout_line, stage_bytes
from zcompile.schedule.pipeline import Journal


@dataclass
class PipelineCode:
    """The programs of a pipeline, as known on this rank.

    Attributes:
        hardware: The hardware that times are predicted for.
        journals: The passes on this rank's program.
        table: The actions of all ranks.
        texts: The printed programs of the ranks along the pipeline axis.
    """

    hardware: Hardware
    journals: Sequence[Journal]
    table: ActionTable
    texts: Sequence[str]

    @cached_property
    def programs_along(self) -> list[Program]:
        """The parsed programs of the ranks along the axis. Texts lack `fuses`, which is taken from this rank's."""
        own = self.journals[0].entries[-1].after
        fuses = all(region.fuses for region in own.regions.values())
        return [_fusing(parse(text), fuses=fuses) for text in self.texts]

    def explain(self) -> str:
        """See `explain_pipeline`."""
        return explain_pipeline(self.programs_along, self.table, self.hardware)


def _fusing(program: Program, *, fuses: bool) -> Program:
    regions = {name: replace(region, fuses=fuses) for name, region in program.regions.items()}
    return replace(program, regions=regions)


def explain_pipeline(programs: Sequence[Program], table: ActionTable, hardware: Hardware) -> str:
    """A table of the stages, memory, messages and busy time of each pipeline rank, predicted for `hardware`."""
    console = TextConsole(110)
    timelines = simulate_pipeline(programs, hardware)
    step = max(timeline.seconds for timeline in timelines)
    console.print(f"{table.stages} pipeline stages on {len(programs)} ranks, {table.microbatches} micro-batches")
    console.print(f"{layout_line(programs[0].layout)} (data-parallel ranks with the same stages)")
    idle = f"{idle_share(timelines):.1%} of the time of all ranks idle"
    console.print(f"predicted for {hardware.name}: {step * 1e3:.4g} ms a step, {idle}")
    shown = Table("rank", "stages", "units", "model state", "in flight", "sends", "peak besides", "busy")
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
    return console.text
