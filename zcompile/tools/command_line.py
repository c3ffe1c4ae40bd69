"""The command `zcompile`: plan, inspect, prove, doctor, replay, migrate."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from zcompile.errors import OptionError, ProofError, ZcompileError
from zcompile.tools.arguments import (
    check_target,
    progress_bar,
)
from zcompile.tools.inspect_command import InspectCommand, inspect_command
from zcompile.tools.plan_command import plan_command
from zcompile.torch_range import torch_version

if TYPE_CHECKING:
    from rich.table import Table

    from zcompile.tools.doctor import Finding

app = typer.Typer(
    name="zcompile",
    help="A compiler for distributed training: plan, inspect and replay it, check the machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # `main` prints errors
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"zcompile {metadata.version('zcompile')}, torch {torch_version()}")
        raise typer.Exit


app.command("plan")(plan_command)
app.command("inspect", cls=InspectCommand, context_settings={"allow_extra_args": True})(inspect_command)


@app.callback()
def command(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    """A compiler for distributed training: plan, inspect and replay it, check the machine."""


@app.command("prove")
def prove_command(
    folder: Annotated[Path, typer.Argument(help="Written by dump= or `zcompile inspect`.", show_default=False)],
) -> None:
    """Prove from the text of a dump alone that each of its programs computes the traced step.

    For a folder with the dumps of all ranks (rank_0, rank_1, ...), also prove that their communications match.

    Exits with 1 if something else is computed, and names the line; with 3 if something could not be read.
    """
    from zcompile.proof.dumps import MANIFEST, TRUSTED, ProofVerdict, prove_dump, prove_together, rank_folders

    ranks = {} if (folder / MANIFEST).exists() else rank_folders(folder)
    homes = [(f"{home.name}/", home, rank) for rank, home in ranks.items()] or [("", folder, 0)]
    found, failed = dict[int, list[ProofVerdict]](), list[ProofError]()
    for prefix, home, rank in homes:
        for verdict in prove_dump(home):
            print(f"{prefix}{verdict}")
            found.setdefault(rank, []).append(verdict)
            if verdict.error is not None:
                subject = f"{prefix}{verdict.error.subject}"
                failed.append(ProofError(subject, verdict.error.problem, verdict.error.fix))
    unread = any(verdict.is_unread for verdicts in found.values() for verdict in verdicts)
    try:
        together = prove_together(ranks, found)
        print("".join(f"{line}\n" for line in together.said), end="")
        unread |= together.unread
    except ProofError as conflict:
        failed.append(conflict)
    for error in failed[:-1]:
        _print_error(error)
    if failed:
        raise failed[-1]
    if unread:
        raise typer.Exit(3)
    print(TRUSTED)


@app.command("doctor")
def doctor_command(
    target: Annotated[
        Path | None, typer.Option("--write", help="Measure, and write the profile to this .toml.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Number of processes that measure.")] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the profile.")] = "this machine",
) -> None:
    """Check what zcompile needs on this machine; with --write, measure it (under torchrun: with torchrun's ranks).

    Exits with 1 if something that is needed is missing.
    """
    if ranks is not None and target is None:
        raise OptionError("ranks", "is for measuring, which --write asks for", "give a file, too: --write here.toml")
    from zcompile.cost.hardware import profile_text
    from zcompile.tools import doctor

    findings = list(doctor.examine())
    if os.environ.get("RANK", "0") == "0":
        Console(emoji=False).print(_findings(findings))
    if target is not None:
        check_target("write", target, ".toml")
        with progress_bar(quiet=False) as progress:
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
        Path, typer.Argument(help="Written by `record=FOLDER` or `compiled.record(FOLDER)`.", show_default=False)
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", "-r", min=0, help="The rank to replay; default: an overview of all ranks.")
    ] = None,
    until: Annotated[
        str,
        typer.Option("--until", "-u", help="Stop after a line: forward:12, run_002_forward:12, or a value's name."),
    ] = "",
    brief: Annotated[bool, typer.Option("--brief", help="Show only values that differ from the recording.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the last line's values to this .pt.")] = None,
) -> None:
    """Run a rank's recorded programs again, alone: compare each value with the recording, and find the origin of NaN.

    Exits with 1 if a recomputed value differs from the recording.
    """
    if rank is None:
        if until or save is not None:
            raise OptionError("until" if until else "save", "is for the replay of one rank", "give --rank, too")
        from zcompile.tools.replay_report import overview

        for line in overview(folder):
            print(line)
        return
    if save is not None:
        check_target("save", save, ".pt")
    from zcompile.recording.archive import Archive
    from zcompile.tools.replay import Replay
    from zcompile.tools.replay_report import ReplayReport
    from zcompile.tools.replay_report import save as save_values

    report = ReplayReport(Replay(Archive(folder, rank)))
    for line in report.text(until, brief=brief):
        print(line, flush=True)
    if save is not None:
        save_values(report.last, save)
        print(f"Written to {save}: torch.load({str(save)!r}) gives the last line's values by name.")
    if not report.is_sound:
        raise typer.Exit(1)


@app.command("migrate")
def migrate_command(
    file: Annotated[
        Path, typer.Argument(help="A DeepSpeed JSON file, or a YAML file of `accelerate config`.", show_default=False)
    ],
) -> None:
    """Print the zcompile code for a DeepSpeed or Accelerate config, and list settings that have no counterpart.

    The output is valid Python: notes are comments.
    """
    from zcompile.tools.migration import migrated

    print(migrated(file).text, end="")


def _findings(findings: Sequence[Finding]) -> Table:
    from rich.table import Table

    table = Table("", "state", "found", "what to do")
    for finding in findings:
        state = "ok" if finding.is_well else "missing" if finding.is_needed else "absent"
        color = {"ok": "green", "missing": "red", "absent": "yellow"}[state]
        fix = "" if finding.is_well else escape(finding.fix)
        table.add_row(finding.subject, f"[{color}]{state}[/]", escape(finding.found), fix)
    return table


def main() -> None:
    """The entry point: prints a ZcompileError as one paragraph, or raises it if `--debug` is given."""
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
    """Print an error as one paragraph on stderr; returns the console."""
    console = Console(stderr=True, emoji=False)
    console.print(f"[bold red]error[/]: {escape(str(error))}", soft_wrap=True, highlight=False)
    return console
