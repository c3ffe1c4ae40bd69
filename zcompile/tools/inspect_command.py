"""The command `zcompile inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from zcompile.cost.profile_files import DTYPES
from zcompile.errors import OptionError
from zcompile.tools.arguments import (
    Batch,
    Hardware_,
    Sequence_,
    Units,
    Whole,
    checkpoint_of,
    dtype_of,
    is_given,
    sizes_of,
)
from zcompile.tools.choices import OWN, SCHEDULES

Mesh = Annotated[
    str | None, typer.Option("--mesh", help="STAGESxRANKS: of a pipeline's mesh ('pp', 'dp'), such as 4x2.")
]
Schedule = Annotated[str, typer.Option("--schedule", help=f"With --mesh, one of {', '.join(SCHEDULES)}.")]
Microbatches = Annotated[
    int, typer.Option("--microbatches", min=1, help="With --mesh, how many there are of --batch sequences each.")
]
Split = Annotated[list[str], typer.Option("--split", help="With --mesh, units with which stages begin; repeat.")]
Limit = Annotated[str | None, typer.Option("--memory-limit", "-m", help="Of a model, such as '20 GB'.")]
SUBJECT = "A script that trains, its own arguments behind `--`; or what `plan` takes."


class InspectCommand(TyperCommand):
    """The command, which says of an unknown option where those of a script belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of click, or of the copy of it that newer releases of typer have
            unknown = getattr(error, "option_name", None)
            place = next((at for at, one in enumerate(given) if one.partition("=")[0] == unknown), 0)
            if any(one.endswith(".py") for one in given[:place]) and isinstance(getattr(error, "message", None), str):
                line = " ".join(["zcompile", "inspect", *given[:place], "--", *given[place:]])
                error.message += f". Arguments of the script stand behind `--`: {line}"  # type: ignore[attr-defined]
            raise


def inspect_command(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(help=SUBJECT, show_default=False)],
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
    memory_limit: Limit = None,
    mesh: Mesh = None,
    schedule: Schedule = "1f1b",
    microbatches: Microbatches = 8,
    split: Split = [],  # noqa: B006
    code: Annotated[
        bool, typer.Option("--code", help="Also what Inductor makes of each region, compiled here.")
    ] = False,
) -> None:
    """Write the program of a model after every pass, without training; print what `explain()` says.

    A script runs, with the arguments behind `--`, until it calls a compiled model for the first time. What training
    measures is taken from the profile: prefetch="auto", and the memory of checkpoint="auto". With --mesh it is the
    step of a pipeline, and each rank with stages of its own has a folder.
    """
    from zcompile.cost.hardware import load_profile
    from zcompile.schedule.options import Options
    from zcompile.tools import inspection
    from zcompile.tools.named_models import subject_of

    device = load_profile(hardware)
    _check_given(context, is_script=subject.endswith(".py"), pipelined=mesh is not None)
    if subject.endswith(".py"):
        made = inspection.of_script(Path(subject), context.args, world, device, folder)
    else:
        options = Options(
            stage=stage,
            prefetch=prefetch,
            checkpoint=checkpoint_of(checkpoint),
            dtype=dtype_of(dtype),
            memory_limit=memory_limit,
        )
        given = subject_of(subject, batch=batch, sequence=sequence)
        if mesh is not None:
            asked = schedule, microbatches, split or None
            sizes = sizes_of(mesh, "is none", "give STAGESxRANKS, such as 4x2")
            made = inspection.of_pipeline(given, options, sizes, asked, device, units or None)
        else:
            made = inspection.of_subject(given, options, world, device, units or None, whole or None)
    text, notes = made.write(folder, subject, code=code)
    print(text)
    print(f"Written to {folder}: report.html, and the program after every pass with what has changed, its drawing, its")
    print("regions, and a trace for ui.perfetto.dev.")
    for note in notes:
        print(note)


def _check_given(context: typer.Context, *, is_script: bool, pipelined: bool) -> None:
    """Raise OptionError for what means nothing to what is inspected."""
    own = ("stage", "prefetch", "checkpoint", "dtype", "batch", "sequence", "units", "whole", "memory_limit", "mesh")
    unasked = dict.fromkeys(own, "the script says its own") if is_script else {}
    if pipelined:
        unasked |= {"world": "--mesh says it", "whole": "a pipeline does not have it"}
    else:
        unasked |= dict.fromkeys(("schedule", "microbatches", "split"), "it is of a pipeline, which --mesh asks for")
    for name, why in unasked.items():
        if is_given(context, name):
            fix = "leave it out" + "; if it is the script's own, put it behind `--`" * is_script
            raise OptionError(name, f"means nothing here: {why}", fix)
    if context.args and not is_script:
        fix = "leave it out; only a script takes arguments of its own"
        raise OptionError(context.args[0], "means nothing here", fix)
