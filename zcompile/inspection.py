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

from zcompile.configuration import Options
from zcompile.dumps import write_dump
from zcompile.errors import SubjectError
from zcompile.hardware import Hardware
from zcompile.layout import STAGES, Layout
from zcompile.page import write_page
from zcompile.pipeline import Journal
from zcompile.program import Program
from zcompile.regions import generated_code
from zcompile.report import explain
from zcompile.subjects import Subject
from zcompile.tracing import Traced, intercepting, trace
from zcompile.units import make_layout


def of_subject(subject: Subject, options: Options, world: int, units: Sequence[str] | None = None) -> Journal:
    """What the passes make of the model, laid out for `world` ranks."""
    traced = trace(subject.model, subject.args, subject.kwargs, dtype=options.dtype, units=units)
    layout = make_layout(subject.model, STAGES[options.stage], world, units, options.precision)
    return _rewritten(traced, layout, options)


def of_script(script: Path, arguments: Sequence[str], world: int) -> Journal:
    """What the passes make of the first model that `script` calls compiled, laid out for `world` ranks.

    Raises:
        SubjectError: it ends, or fails, before it has called one.
    """
    try:
        with _as_one_rank(), _as_main(script, arguments), intercepting():
            runpy.run_path(str(script), run_name="__main__")
    except Traced as traced:
        return _rewritten(traced.program, traced.program.layout.over(world), traced.options, updates=traced.updates)
    except SystemExit as error:
        if error.code:
            raise SubjectError(str(script), f"ended with {error.code!r}", "give the arguments that it wants") from error
    except Exception as error:
        found = f"raised {type(error).__name__}: {error}"
        raise SubjectError(str(script), found, "mend it; it runs as one rank until its model is traced") from error
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
        write_page(folder / "report.html", title, [journal], hardware)
    except OSError as error:
        raise SubjectError(str(folder), f"cannot be written: {error.strerror}", "give another folder") from error
    return text, notes


def _rewritten(traced: Program, layout: Layout, options: Options, *, updates: bool = False) -> Journal:
    journal = Journal()
    options.pipeline(updates=updates and traced.has_backward).run(replace(traced, layout=layout), journal)
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
