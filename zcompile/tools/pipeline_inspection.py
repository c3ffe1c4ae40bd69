"""Inspection of pipelines: the programs of all ranks along a pipeline axis, without any of these ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from zcompile.cost.hardware import CPU, GPU, Hardware
from zcompile.engine.region_cache import generated_code
from zcompile.engine.train_steps import FlatResults
from zcompile.errors import SubjectError
from zcompile.ir.actions import ActionTable
from zcompile.ir.axis import DATA, Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.ir.program import Program
from zcompile.model.units import make_layout
from zcompile.pipelining.action_tables import action_table
from zcompile.pipelining.guard import check_traced
from zcompile.pipelining.program import PipelinePlace, check_options, choose_starts, rewrite
from zcompile.pipelining.ranks import PIPELINE
from zcompile.pipelining.reports import explain_pipeline
from zcompile.recording.recording import rank_folder
from zcompile.report.dumps import write_dump
from zcompile.report.program_page import write_page
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal
from zcompile.tools.named_models import Subject
from zcompile.tools.tracing import trace


@dataclass(frozen=True)
class InspectedPipeline:
    """What passes make of the steps of all ranks along the pipeline axis.

    Attributes:
        journals: Of each of them.
        table: What they do.
        hardware: What seconds are predicted for.
        data: How many ranks have the same stages.
    """

    journals: tuple[Journal, ...]
    table: ActionTable
    hardware: Hardware
    data: int

    @cached_property
    def programs(self) -> list[Program]:
        return [journal.entries[-1].after for journal in self.journals]

    def write(self, folder: Path, title: str, *, code: bool) -> tuple[str, list[str]]:
        """Write what `step.dump(folder, all_ranks=True)` writes, of the first rank of each that have the same stages.

        Gives the text of `explain()`, and what could not be done.

        Raises:
            SubjectError: the folder cannot be written.
        """
        text, notes = explain_pipeline(self.programs, self.table, self.hardware), list[str]()
        try:
            for rank, journal in enumerate(self.journals):
                home = rank_folder(folder, rank * self.data)
                written = generated_code if code else None
                notes += write_dump(home, [journal], text, self.hardware, code=written)
                write_page(
                    home / "report.html", title, [journal], self.hardware, (), self.programs, why="chosen by --hardware"
                )
        except OSError as error:
            raise SubjectError(str(folder), f"cannot be written: {error.strerror}", "give another folder") from error
        return text, list(dict.fromkeys(notes))


def of_pipeline(
    subject: Subject,
    options: Options,
    mesh: tuple[int, int],
    asked: tuple[str, int, Sequence[str] | None],
    hardware: Hardware,
    units: Sequence[str] | None = None,
) -> InspectedPipeline:
    """What the passes make of a model's step on a mesh of so many pipeline stages' ranks, and ranks that have the same.

    Args:
        subject: The model, with a micro-batch.
        options: Of the train step.
        mesh: Its sizes along "pp" and "dp".
        asked: The schedule, how many micro-batches there are, and the units with which stages begin, if they are given.
        hardware: What seconds are predicted for.
        units: The units that are named.

    Raises:
        OptionError, CaptureError: what `zcompile.train_step` raises of them.
    """
    check_options(options)
    (pipeline, data), (schedule, microbatches, split) = mesh, asked
    table, results = action_table(schedule, pipeline, microbatches), FlatResults()
    given = subject.model, subject.args, subject.kwargs
    traced = trace(*given, dtype=options.dtype, units=units, device=hardware.device, results=results)
    check_traced(traced, len(results.names or ()))
    axes = Axis(PIPELINE, AxisKind.PIPELINE, pipeline, data), Axis(DATA, AxisKind.SHARD, data)
    layout = make_layout(subject.model, STAGES[options.stage], axes, units, options.precision)
    traced, kind = replace(traced, layout=layout), CPU if hardware.device == CPU.device else GPU
    starts = choose_starts(traced, table, split, kind, options)
    places = (PipelinePlace(table, rank, PIPELINE, starts) for rank in range(pipeline))
    return InspectedPipeline(
        tuple(rewrite(traced, place, options, kind).journal for place in places), table, hardware, data
    )
