"""The command `zcompile`: plan, inspect, prove, doctor, replay."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from zcompile.cost.forecast import Checkpoint, Plan
from zcompile.cost.hardware import DTYPES, load_profile, profile_text, profiles
from zcompile.errors import OptionError, ProofError, ZcompileError, nearest
from zcompile.proof.dumps import MANIFEST, TRUSTED, prove_dump, rank_folders
from zcompile.proof.ranks import check_folders
from zcompile.recording.archive import Archive
from zcompile.report.plan_page import write_plan_page
from zcompile.schedule.option_checks import FLAT, SHARDS, bytes_of
from zcompile.schedule.options import Options
from zcompile.tools import doctor, inspection
from zcompile.tools.named_models import Subject, subject_of
from zcompile.tools.planner import CHECKPOINTS, PREFETCHES, STAGE_NUMBERS, choices_of, plan
from zcompile.tools.replay import Replay
from zcompile.tools.replay_report import ReplayReport, overview
from zcompile.tools.replay_report import save as save_values

app = typer.Typer(
    name="zcompile",
    help="A compiler for distributed training: plan it, look into it, check the machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # errors are told in `main`
    context_settings={"help_option_names": ["-h", "--help"]},
)
OWN = "own"
"""What a dtype is called that is the model's own."""
PIPED = 200
"""Columns where the output is no terminal: no table is wider."""

Model = Annotated[
    str,
    typer.Argument(
        help="gpt:7.5b, gpt:LAYERSxWIDTH, module:factory, file.py:factory, or the folder of a Hugging Face config. "
        "A factory gives (model, args) or (model, args, kwargs).",
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences in one rank's batch, of language models.")]
Sequence_ = Annotated[int, typer.Option("--sequence", "-s", min=1, help="Tokens in a sequence.")]
Hardware_ = Annotated[
    str, typer.Option("--hardware", "-p", help=f"A profile: {', '.join(profiles())}, or the path of one.")
]
Meshes = Annotated[
    list[str],
    typer.Option("--mesh", help="NODESxRANKS: compare what such a mesh of two levels may divide; repeat."),
]
Shards = Annotated[
    list[str],
    typer.Option("--shard", help=f"Of a mesh of two levels, compare {', '.join(SHARDS)}; repeat. All of them."),
]
Units = Annotated[list[str], typer.Option("--units", help="Module paths gathered together; repeat for several.")]

Whole = Annotated[
    list[str], typer.Option("--whole", help="Parameters that one rank each keeps whole, for Muon or Shampoo; repeat.")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"zcompile {metadata.version('zcompile')}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def command(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    """A compiler for distributed training: plan it, look into it, check the machine."""


@app.command("plan")
def plan_command(
    model: Model,
    world: Annotated[list[int], typer.Option("--world", "-w", min=1, help="Data-parallel ranks; repeat.")] = [8],  # noqa: B006
    hardware: Hardware_ = "h100",
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", "-m", help="Of a rank, such as '70 GB'; by default 0.9 of a device's."),
    ] = None,
    batch: Batch = 1,
    sequence: Sequence_ = 1024,
    stage: Annotated[list[int], typer.Option("--stage", help="Stages to compare; repeat.")] = list(STAGE_NUMBERS),  # noqa: B006
    prefetch: Annotated[list[int], typer.Option("--prefetch", help="Depths to compare; repeat.")] = list(PREFETCHES),  # noqa: B006
    checkpoint: Annotated[
        list[str], typer.Option("--checkpoint", help="'none', 'unit', a size or a share of the peak; repeat.")
    ] = [str(one or "none") for one in CHECKPOINTS],  # noqa: B006
    dtype: Annotated[
        list[str],
        typer.Option(
            "--dtype", help=f"'{OWN}' or one of {', '.join(DTYPES)}; repeat. By default own and the hardware's."
        ),
    ] = [],  # noqa: B006
    mesh: Meshes = [],  # noqa: B006
    shard: Shards = list(SHARDS),  # noqa: B006
    units: Units = [],  # noqa: B006
    whole: Whole = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write the plan as a page to this .html.")] = None,
) -> None:
    """Forecast memory per rank and time of a step for every choice of options, and recommend one.

    Nothing is run: no process group, no GPU, no memory for the model.
    """
    if html is not None:
        _check_target("html", html, ".html")
    checkpoints, dtypes = [_checkpoint(one) for one in checkpoint], [_dtype(one) for one in dtype]
    device = load_profile(hardware)
    choices_of(dtypes or [None], stage, checkpoints, prefetch)  # before the model is made, which takes its time
    # A shell knows no numbers: digits are one.
    limit = bytes_of("memory_limit", f"{memory_limit}B" if (memory_limit or "").isdecimal() else memory_limit)
    shapes = [_mesh(one) for one in mesh]
    with _progress(quiet=as_json) as progress:
        subject = _subject(model, batch, sequence)
        made = plan(
            subject.model,
            subject.args,
            subject.kwargs,
            worlds=[nodes * ranks for nodes, ranks in shapes] or world,
            hardware=device,
            memory_limit=limit,
            stages=stage,
            prefetches=prefetch,
            checkpoints=checkpoints,
            dtypes=dtypes or None,
            replicas=[1] * (FLAT in shard or not shapes) + [nodes for nodes, _ in shapes],
            hybrids=[one for one in shard if one != FLAT],
            units=units or None,
            whole=whole or None,
            progress=progress,
        )
    _tell(replace(made, model=subject.name), html, {"batch": batch, "sequence": sequence} if as_json else None)


def _mesh(text: str) -> tuple[int, int]:
    """The two sizes of `8x4`.

    Raises:
        OptionError: it is no such text.
    """
    nodes, _, ranks = text.partition("x")
    if not (nodes.isdecimal() and ranks.isdecimal() and int(nodes) and int(ranks)):
        raise OptionError("mesh", f"{text!r} is no mesh of two levels", "give nodes and the ranks of each, such as 8x4")
    return int(nodes), int(ranks)


def _tell(made: Plan, html: Path | None, beside: Mapping[str, int] | None) -> None:
    """Print a plan, as JSON with what stands `beside` it if that is given, and write its page.

    Raises:
        OptionError: beside JSON, nothing fits; a table has said so itself.
        typer.Exit: nothing fits.
    """
    if beside is not None:
        print(json.dumps({**made.as_dict(), **beside}, indent=1))
    else:
        made.print(Console(width=None if sys.stdout.isatty() else PIPED))
    if html is not None:
        write_plan_page(html, made)
    for ranks in made.worlds:
        if made.fastest(ranks) is None:
            if beside is not None:
                made.best(ranks)
            raise typer.Exit(1)


@app.command("inspect", context_settings={"allow_extra_args": True})
def inspect_command(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(help="A script that trains, or what `plan` takes.", show_default=False)],
    folder: Annotated[Path, typer.Option("--dump", "-o", help="Where to write.")] = Path("zcompile_dump"),
    world: Annotated[int, typer.Option("--world", "-w", min=1, help="Ranks to lay the program out for.")] = 2,
    stage: Annotated[int, typer.Option("--stage", help="Of a model; a script says its own.")] = 3,
    prefetch: Annotated[int, typer.Option("--prefetch", help="Likewise.")] = 2,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Likewise; 'none', 'unit', a size or a share.")
    ] = "none",
    dtype: Annotated[str, typer.Option("--dtype", help=f"Likewise; '{OWN}' or one of {', '.join(DTYPES)}.")] = OWN,
    batch: Batch = 1,
    sequence: Sequence_ = 128,
    units: Units = [],  # noqa: B006
    whole: Whole = [],  # noqa: B006
    hardware: Hardware_ = "h100",
    code: Annotated[
        bool, typer.Option("--code", help="Also what Inductor makes of each region, compiled here.")
    ] = False,
) -> None:
    """Write the program of a model after every pass, without training; print what `explain()` says.

    A script runs, with the arguments behind `--`, until it calls a compiled model for the first time. What training
    measures is taken from the profile: prefetch="auto", and the memory of checkpoint="auto".
    """
    device = load_profile(hardware)
    if subject.endswith(".py"):
        for name in ("stage", "prefetch", "checkpoint", "dtype", "batch", "sequence", "units", "whole"):
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                raise OptionError(name, "means nothing here: the script says its own", "leave it out")
        journal = inspection.of_script(Path(subject), context.args, world, device)
    else:
        if context.args:
            fix = "leave it out; only a script takes arguments of its own"
            raise OptionError(context.args[0], "means nothing here", fix)
        options = Options(stage=stage, prefetch=prefetch, checkpoint=_checkpoint(checkpoint), dtype=_dtype(dtype))
        given = _subject(subject, batch, sequence)
        journal = inspection.of_subject(given, options, world, device, units or None, whole or None)
    text, notes = inspection.write(journal, folder, subject, device, code=code)
    print(text)
    print(f"Written to {folder}: report.html, and the program after every pass with what has changed, its drawing, its")
    print("regions, and a trace for ui.perfetto.dev.")
    for note in notes:
        print(note)


@app.command("prove")
def prove_command(
    folder: Annotated[Path, typer.Argument(help="What dump= or `zcompile inspect` has written.", show_default=False)],
) -> None:
    """Prove from the texts of a dump alone that each of its programs computes the step that was traced.

    Of a folder with the dumps of all ranks (rank_0, rank_1, ...) also that their communications fit together.

    Exits with 1 where that is not proven, and says at which line.
    """
    ranks = {} if (folder / MANIFEST).exists() else rank_folders(folder)
    homes = [(f"{home.name}/", home) for home in ranks.values()] or [("", folder)]
    proven, failed = False, list[ProofError]()
    for prefix, home in homes:
        for verdict in prove_dump(home):
            print(f"{prefix}{verdict}")
            proven = proven or verdict.proof is not None
            if verdict.error is not None:
                subject = f"{prefix}{verdict.error.subject}"
                failed.append(ProofError(subject, verdict.error.problem, verdict.error.fix))
    if ranks:
        try:
            check_folders(ranks)
            print(f"{len(ranks)} ranks: their communications fit together")
        except ProofError as conflict:
            failed.append(conflict)
    if proven and not failed:
        print(TRUSTED)
    if failed:
        for error in failed[:-1]:
            _print_error(error)
        raise failed[-1]


@app.command("doctor")
def doctor_command(
    target: Annotated[
        Path | None, typer.Option("--write", help="Measure, and write the profile to this .toml.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Processes that measure at once.")] = None,
    name: Annotated[str, typer.Option("--name", help="What the profile is called.")] = "this machine",
) -> None:
    """Say what this machine has of what zcompile can use; with --write, measure it (under torchrun, with its ranks).

    Exits with 1 where something is missing that is needed.
    """
    if ranks is not None and target is None:
        raise OptionError("ranks", "measure, and nothing is measured", "say where to: --write here.toml")
    findings = list(doctor.examine())
    if os.environ.get("RANK", "0") == "0":
        Console(emoji=False).print(_findings(findings))
    if target is not None:
        _check_target("write", target, ".toml")
        with _progress(quiet=False) as progress:
            progress("measuring this machine: half a minute", 0, None)
            profile = doctor.measured(name, ranks)
        if profile is not None:
            text = profile_text(profile)
            target.write_text(text)
            print(f"{text}\nWritten to {target}: give it to `zcompile plan --hardware {target}`.")
    if any(not finding.is_well and finding.is_needed for finding in findings):
        raise typer.Exit(1)


@app.command("replay")
def replay_command(
    folder: Annotated[
        Path, typer.Argument(help="Of `record=FOLDER` or `compiled.record(FOLDER)`.", show_default=False)
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", "-r", min=0, help="Whose program to run; without it, an overview of all.")
    ] = None,
    until: Annotated[
        str,
        typer.Option("--until", "-u", help="Stop behind a line: forward:12, run_002_forward:12, or a value's name."),
    ] = "",
    brief: Annotated[bool, typer.Option("--brief", help="Leave out values that are as they were recorded.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the last line's values to this .pt.")] = None,
) -> None:
    """Run what a rank has recorded again, alone: each value of each line beside the record, and where NaN comes from.

    Exits with 1 where a value that was computed again is not what was recorded.
    """
    if rank is None:
        if until or save is not None:
            raise OptionError("until" if until else "save", "is of one rank's program", "give --rank, too")
        for line in overview(folder):
            print(line)
        return
    if save is not None:
        _check_target("save", save, ".pt")
    report = ReplayReport(Replay(Archive(folder, rank)))
    for line in report.text(until, brief=brief):
        print(line, flush=True)
    if save is not None:
        save_values(report.last, save)
        print(f"Written to {save}: torch.load({str(save)!r}) gives the last line's values by name.")
    if not report.is_sound:
        raise typer.Exit(1)


def _findings(findings: Sequence[doctor.Finding]) -> Table:
    table = Table("", "state", "found", "what to do")
    for finding in findings:
        state = "ok" if finding.is_well else "missing" if finding.is_needed else "absent"
        color = {"ok": "green", "missing": "red", "absent": "yellow"}[state]
        fix = "" if finding.is_well else escape(finding.fix)
        table.add_row(finding.subject, f"[{color}]{state}[/]", escape(finding.found), fix)
    return table


def _check_target(option: str, target: Path, suffix: str) -> None:
    """Raise OptionError where a file cannot be written, before it takes time to find out what to write."""
    if target.suffix != suffix:
        raise OptionError(option, f"{str(target)!r} is no {suffix} file", f"give it a name that ends in {suffix}")
    is_new = not target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.open("a").close()
        if is_new:
            target.unlink()
    except OSError as error:
        problem = f"{str(target)!r} cannot be written: {error.strerror}"
        raise OptionError(option, problem, "give a file in a folder of yours") from error


def main() -> None:
    """The entry point: errors of ours in one paragraph, with a traceback if `--debug` is given."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, for factories
    try:
        app()
    except ZcompileError as error:
        if "--debug" in sys.argv:
            raise
        console = _print_error(error)
        if error.__cause__ is not None:
            console.print("[dim]`zcompile --debug ...` shows the traceback.[/]", highlight=False)
        raise SystemExit(1) from None


def _print_error(error: ZcompileError) -> Console:
    """Print an error in one paragraph; gives the console, on stderr."""
    console = Console(stderr=True, emoji=False)
    console.print(f"[bold red]error[/]: {escape(str(error))}", soft_wrap=True, highlight=False)
    return console


def _subject(name: str, batch: int, sequence: int) -> Subject:
    return subject_of(name, batch=batch, sequence=sequence)


def _checkpoint(text: str) -> Checkpoint:
    """A setting of `checkpoint=`, from its text."""
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _dtype(text: str) -> torch.dtype | None:
    if text == OWN:
        return None
    if text not in DTYPES:
        raise OptionError("dtype", f"{text!r} is unknown", nearest(text, (OWN, *DTYPES)))
    result: torch.dtype = getattr(torch, text)
    return result


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """A bar on stderr, which is gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True, disable=quiet) as bar:
        task = bar.add_task("making the model", total=None)

        def progress(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        yield progress
