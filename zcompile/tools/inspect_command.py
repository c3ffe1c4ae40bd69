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
    Chunk,
    Hardware_,
    Sequence_,
    Units,
    Whole,
    checkpoint_of,
    chunk_of,
    dtype_of,
    is_given,
    model_of,
    sizes_of,
)
from zcompile.tools.choices import OWN, SCHEDULES

Mesh = Annotated[str | None, typer.Option("--mesh", help="STAGESxRANKS: a pipeline's mesh ('pp', 'dp'), such as 4x2.")]
Schedule = Annotated[str, typer.Option("--schedule", help=f"With --mesh: one of {', '.join(SCHEDULES)}.")]
Microbatches = Annotated[
    int, typer.Option("--microbatches", min=1, help="With --mesh: number of micro-batches, of --batch sequences each.")
]
Split = Annotated[list[str], typer.Option("--split", help="With --mesh: first unit of a stage; repeat.")]
Limit = Annotated[str | None, typer.Option("--memory-limit", "-m", help="As for compile, such as '20 GB'.")]
SUBJECT = "A training script, with its arguments after `--`; or a model as for `plan`."


class InspectCommand(TyperCommand):
    """The command. Its error for an unknown option explains where a script's options belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's class, or its copy in newer releases of typer
            unknown = getattr(error, "option_name", None)
            place = next((at for at, one in enumerate(given) if one.partition("=")[0] == unknown), 0)
            if any(one.endswith(".py") for one in given[:place]) and isinstance(getattr(error, "message", None), str):
                line = " ".join(["zcompile", "inspect", *given[:place], "--", *given[place:]])
                error.message += f". Put arguments of the script after `--`: {line}"  # type: ignore[attr-defined]
            raise


def inspect_command(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(help=SUBJECT, show_default=False)],
    folder: Annotated[Path, typer.Option("--dump", "-o", help="Output folder.")] = Path("zcompile_dump"),
    world: Annotated[int, typer.Option("--world", "-w", min=1, help="Number of data-parallel ranks.")] = 2,
    stage: Annotated[int, typer.Option("--stage", help="ZeRO stage; a script chooses its own.")] = 3,
    prefetch: Annotated[int, typer.Option("--prefetch", help="Units gathered ahead; not for a script.")] = 2,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="'none', 'unit', a size or a share of the peak; not for a script.")
    ] = "none",
    chunk: Chunk = "none",
    dtype: Annotated[str, typer.Option("--dtype", help=f"'{OWN}', {', '.join(DTYPES)}; not for a script.")] = OWN,
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
        bool, typer.Option("--code", help="Also compile each region here, and write Inductor's code.")
    ] = False,
) -> None:
    """Write the program of a model after every pass, without training; print the text of `explain()`.

    A script runs, with the arguments after `--`, until it first calls a compiled model. Values that training would
    measure, for prefetch="auto" and checkpoint="auto", are taken from the profile. With --mesh the program is the step
    of a pipeline, with one folder for each rank that has its own stages.
    """
    from zcompile.cost.hardware import load_profile
    from zcompile.schedule.options import Options
    from zcompile.tools import inspection

    device = load_profile(hardware)
    _check_given(context, is_script=subject.endswith(".py"), pipelined=mesh is not None)
    if subject.endswith(".py"):
        inspected = inspection.of_script(Path(subject), context.args, world, device, folder)
    else:
        options = Options(
            stage=stage,
            prefetch=prefetch,
            checkpoint=checkpoint_of(checkpoint),
            chunk=chunk_of(chunk),
            dtype=dtype_of(dtype),
            memory_limit=memory_limit,
        )
        given = model_of(context, subject)
        if mesh is not None:
            asked = schedule, microbatches, split or None
            sizes = sizes_of(mesh, "is not a mesh", "give STAGESxRANKS, such as 4x2")
            inspected = inspection.of_pipeline(given, options, sizes, asked, device, units or None)
        else:
            inspected = inspection.of_subject(given, options, world, device, units or None, whole or None)
    text, notes = inspected.write(folder, subject, code=code)
    print(text)
    print(f"Written to {folder}: report.html; the program after every pass, with changes, drawing and regions; and a")
    print("trace for ui.perfetto.dev.")
    for note in notes:
        print(note)


def _check_given(context: typer.Context, *, is_script: bool, pipelined: bool) -> None:
    """Raise OptionError for an option that does not apply to the subject."""
    own = "stage prefetch checkpoint chunk dtype batch sequence units whole memory_limit mesh"
    inapplicable = dict.fromkeys(own.split(), "the script chooses its own") if is_script else {}
    if pipelined:
        inapplicable |= {"world": "--mesh sets it", "whole": "pipelines do not support it"}
    else:
        inapplicable |= dict.fromkeys(("schedule", "microbatches", "split"), "it is for a pipeline, which needs --mesh")
    for name, why in inapplicable.items():
        if is_given(context, name):
            fix = "leave it out" + "; if it is the script's own, put it after `--`" * is_script
            raise OptionError(name, f"does not apply here: {why}", fix)
    if context.args and not is_script:
        fix = "leave it out; only a script takes arguments of its own"
        raise OptionError(context.args[0], "does not apply here", fix)
