"""Inspection: the programs of a model without training it; the model comes from a factory or a script.

A script runs until its model is traced for the first time. The traced program is carried to the caller by an exception,
through torch.compile and the script, and is then laid out for any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from zcompile.cost.hardware import Hardware, guess_for
from zcompile.cost.memory import model_state
from zcompile.cost.roofline import bucket_for
from zcompile.engine.region_cache import generated_code
from zcompile.engine.step_trace import Traced, intercepting
from zcompile.engine.train_steps import FlatResults
from zcompile.errors import SubjectError, ZcompileError
from zcompile.ir.actions import ActionTable
from zcompile.ir.axis import DATA, Axis, AxisKind
from zcompile.ir.layout import STAGES, Layout
from zcompile.ir.program import Program
from zcompile.model.units import axes_over, make_layout
from zcompile.pipelining.action_tables import action_table
from zcompile.pipelining.guard import check_traced
from zcompile.pipelining.program import PipelinePlace, check_options, choose_starts, rewrite, with_budget
from zcompile.pipelining.ranks import PIPELINE
from zcompile.pipelining.reports import explain_pipeline
from zcompile.recording.recording import rank_folder
from zcompile.report.dumps import dumping_failures, write_dump
from zcompile.report.explain import explain
from zcompile.report.program_page import write_page
from zcompile.schedule.decision import Request, checkpoint_budget, decide
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal
from zcompile.tools.gpu_autocast import autocast_of
from zcompile.tools.named_models import Subject, raised
from zcompile.tools.tracing import trace


@dataclass(frozen=True)
class Inspected:
    """The programs of a model after the passes; of a pipeline, one for each rank along the pipeline axis."""

    journals: tuple[Journal, ...]
    hardware: Hardware
    """The hardware that times are predicted for."""
    table: ActionTable | None = None
    """The actions of a pipeline's ranks; None without a pipeline."""
    data: int = 1
    """The number of data-parallel ranks that have the same stages."""

    @cached_property
    def programs(self) -> list[Program]:
        return [journal.entries[-1].after for journal in self.journals]

    def write(self, folder: Path, title: str, *, code: bool) -> tuple[str, list[str]]:
        """Write a dump: of a pipeline as with `all_ranks=True`, for the first of the ranks that have the same stages.

        Returns the text of `explain()`, and notes on what could not be written.

        Raises:
            SubjectError: the folder cannot be written.
        """
        if self.table is None:
            (program,) = self.programs
            text = explain(program.layout, [program], len(program.regions))
            homes, ranks = [folder], list[Program]()
        else:
            text = explain_pipeline(self.programs, self.table, self.hardware)
            homes = [rank_folder(folder, place * self.data) for place in range(len(self.journals))]
            ranks = self.programs
        written, notes = generated_code if code else None, list[str]()
        try:
            for home, journal in zip(homes, self.journals, strict=True):
                notes += write_dump(home, [journal], text, self.hardware, code=written)
                page = home / "report.html"
                write_page(page, title, [journal], self.hardware, (), ranks, why="chosen by --hardware")
        except OSError as error:
            raise SubjectError(str(folder), f"cannot be written: {error.strerror}", "give another folder") from error
        return text, list(dict.fromkeys(notes))


def of_subject(
    subject: Subject,
    options: Options,
    world: int,
    hardware: Hardware,
    units: Sequence[str] | None = None,
    whole: Sequence[str] | None = None,
) -> Inspected:
    """Run the passes on the model's program for `world` ranks, with decisions of the cost model for `hardware`."""
    given = subject.model, subject.args, subject.kwargs
    fuses, chunks = options.backend == "inductor", options.chunk is not None
    traced = trace(
        *given, dtype=options.dtype, units=units, whole=whole, device=hardware.device, fuses=fuses, chunks=chunks
    )
    axes = axes_over(subject.model, world)
    layout = make_layout(subject.model, STAGES[options.stage], axes, units, options.precision, whole)
    schedule = replace(options.schedule, bucket=bucket_for(guess_for(hardware.device)))
    return _rewritten(traced, layout, Request(options, schedule), hardware, None)


def of_pipeline(
    subject: Subject,
    options: Options,
    mesh: tuple[int, int],
    asked: tuple[str, int, Sequence[str] | None],
    hardware: Hardware,
    units: Sequence[str] | None = None,
) -> Inspected:
    """Run the passes on the step of a model in a pipeline, for every rank along the pipeline axis.

    Args:
        subject: The model, with one micro-batch.
        options: Options of the train step.
        mesh: Sizes along "pp" and "dp".
        asked: The schedule, the number of micro-batches, and the first units of stages (None: balanced).
        hardware: The hardware that times are predicted for.
        units: As for `zcompile.compile`.

    Raises:
        OptionError, CaptureError: as `zcompile.train_step`.
    """
    check_options(options)
    (pipeline, data), (schedule, microbatches, split) = mesh, asked
    table, results = action_table(schedule, pipeline, microbatches), FlatResults()
    given = subject.model, subject.args, subject.kwargs
    fuses, chunks = options.backend == "inductor", options.chunk is not None
    traced = trace(
        *given, dtype=options.dtype, units=units, device=hardware.device, results=results, fuses=fuses, chunks=chunks
    )
    check_traced(traced, len(results.names or ()))
    axes = Axis(PIPELINE, AxisKind.PIPELINE, pipeline, data), Axis(DATA, AxisKind.SHARD, data)
    layout = make_layout(subject.model, STAGES[options.stage], axes, units, options.precision)
    traced, guessed = replace(traced, layout=layout), guess_for(hardware.device)
    starts = choose_starts(traced, table, split, guessed, options)
    places = (PipelinePlace(table, rank, PIPELINE, starts) for rank in range(pipeline))
    bounded = ((place, with_budget(options, traced, place, lambda: hardware.memory)) for place in places)
    journals = tuple(rewrite(traced, place, own, guessed).journal for place, own in bounded)
    return Inspected(journals, hardware, table, data)


def of_script(script: Path, arguments: Sequence[str], world: int, hardware: Hardware, folder: Path) -> Inspected:
    """Run the passes on the program of the first compiled model that `script` calls, for `world` ranks.

    If a pass fails, the output of the passes before it is in `folder`.

    Raises:
        SubjectError: the file does not exist, or the script ends or fails before calling a compiled model.
        ZcompileError: an error of `compile` or of the call.
    """
    if not script.is_file():
        raise SubjectError(str(script), "is not a file", "give the path of a script, or a model as for `zcompile plan`")
    try:
        with _as_one_rank(), _as_main(script, arguments), intercepting(), autocast_of(hardware.device):
            runpy.run_path(str(script), run_name="__main__")
    except Traced as traced:
        layout = traced.program.layout.over(world)
        return _rewritten(traced.program, layout, traced.request, hardware, folder)
    except ZcompileError:
        raise
    except SystemExit as error:
        if error.code:
            raise SubjectError(str(script), f"ended with {error.code!r}", "give the arguments it requires") from error
    except Exception as error:
        found = raised(error, script)
        raise SubjectError(str(script), found, "fix it; it runs as one rank until its model is traced") from error
    fix = "let it call the module that zcompile.compile returns, or name a factory in it: script.py:factory"
    raise SubjectError(str(script), "ended without calling a compiled model", fix)


def _rewritten(traced: Program, layout: Layout, request: Request, hardware: Hardware, folder: Path | None) -> Inspected:
    """Rewrite the program as training would, with `hardware` in place of measurements."""
    traced, journal = replace(traced, layout=layout), Journal()
    free = checkpoint_budget(request.options, layout, lambda: hardware.memory - model_state(layout).parameters)
    request = replace(request, free=free)
    with dumping_failures(folder, 0, journal):
        request.pipeline(decide(traced, request, lambda: hardware, journal=journal)).run(traced, journal)
    return Inspected((journal,), hardware)


@contextlib.contextmanager
def _as_one_rank() -> Iterator[None]:
    """Set the environment variables for a process group of one rank, unless they are set already."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    missing = {key: value for key, value in one.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for key in missing:
            os.environ.pop(key, None)


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as Python does when it runs a script."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
