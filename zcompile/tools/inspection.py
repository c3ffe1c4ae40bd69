"""Inspection: the programs of a model without a training run, of a factory's model or of a script's.

A script runs until its model is traced for the first time: what was traced is taken to the one who asked, past the
script and past torch.compile, and laid out for as many ranks as he likes.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from zcompile.cost.hardware import CPU, GPU, Hardware
from zcompile.cost.memory import model_state
from zcompile.cost.roofline import bucket_for
from zcompile.engine.region_cache import generated_code
from zcompile.engine.step_trace import Traced, intercepting
from zcompile.errors import SubjectError, ZcompileError
from zcompile.ir.layout import STAGES, Layout
from zcompile.ir.program import Program
from zcompile.model.units import axes_over, make_layout
from zcompile.report.dumps import dumping_failures, write_dump
from zcompile.report.explain import explain
from zcompile.report.program_page import write_page
from zcompile.schedule.decision import Request, checkpoint_budget, decide
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal
from zcompile.tools.gpu_autocast import autocast_of
from zcompile.tools.named_models import Subject, raised
from zcompile.tools.tracing import trace


def of_subject(
    subject: Subject,
    options: Options,
    world: int,
    hardware: Hardware,
    units: Sequence[str] | None = None,
    whole: Sequence[str] | None = None,
) -> Journal:
    """What the passes make of the model, laid out for `world` ranks; what depends on the machine is for `hardware`."""
    given = subject.model, subject.args, subject.kwargs
    traced = trace(*given, dtype=options.dtype, units=units, whole=whole, device=hardware.device)
    axes = axes_over(subject.model, world)
    layout = make_layout(subject.model, STAGES[options.stage], axes, units, options.precision, whole)
    schedule = replace(options.schedule, bucket=bucket_for(CPU if hardware.device == CPU.device else GPU))
    return _rewritten(traced, layout, Request(options, schedule), hardware, None)


def of_script(script: Path, arguments: Sequence[str], world: int, hardware: Hardware, folder: Path) -> Journal:
    """What the passes make of the first model that `script` calls compiled, laid out for `world` ranks.

    Where a pass fails, what those before it made is in `folder`.

    Raises:
        SubjectError: there is no such file, or it ends, or fails, before it has called one.
        ZcompileError: what `compile` or the call has raised.
    """
    if not script.is_file():
        raise SubjectError(str(script), "is no file", "give the path of a script, or what `zcompile plan` takes")
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
            raise SubjectError(str(script), f"ended with {error.code!r}", "give the arguments that it wants") from error
    except Exception as error:
        found = raised(error, script)
        raise SubjectError(str(script), found, "fix it; it runs as one rank until its model is traced") from error
    fix = "let it call the module that zcompile.compile gives, or name a factory in it: script.py:factory"
    raise SubjectError(str(script), "has ended without calling a compiled model", fix)


def write(journal: Journal, folder: Path, title: str, hardware: Hardware, *, code: bool) -> tuple[str, list[str]]:
    """Write what `compiled.dump` writes to `folder`; gives the text of `explain()`, and what could not be done.

    Raises:
        SubjectError: the folder cannot be written.
    """
    program = journal.entries[-1].after
    text = explain(program.layout, [program], len(program.regions))
    try:
        notes = write_dump(folder, [journal], text, hardware, code=generated_code if code else None)
        write_page(folder / "report.html", title, [journal], hardware, why="chosen by --hardware")
    except OSError as error:
        raise SubjectError(str(folder), f"cannot be written: {error.strerror}", "give another folder") from error
    return text, notes


def _rewritten(traced: Program, layout: Layout, request: Request, hardware: Hardware, folder: Path | None) -> Journal:
    """What training would do with the program, but for what it measures: that is taken from `hardware`."""
    traced, journal = replace(traced, layout=layout), Journal()
    free = checkpoint_budget(request.options, layout, lambda: hardware.memory - model_state(layout).parameters)
    request = replace(request, free=free)
    with dumping_failures(folder, 0, journal):
        request.pipeline(decide(traced, request, lambda: hardware, journal=journal)).run(traced, journal)
    return journal


@contextlib.contextmanager
def _as_one_rank() -> Iterator[None]:
    """What a script needs to make a process group of one; what is set stays as it is."""
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
    """`sys.argv` and `sys.path` as a script finds them that Python runs."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
