"""The command `zcompile plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from zcompile.cost.profile_files import DTYPES
from zcompile.errors import OptionError
from zcompile.tools.arguments import (
    BATCH,
    Chunk,
    Hardware_,
    Model,
    Sequence_,
    Units,
    Whole,
    check_target,
    checkpoint_of,
    chunk_of,
    dtype_of,
    is_given,
    model_of,
    progress_bar,
    sizes_of,
)
from zcompile.tools.choices import CHECKPOINTS, FLAT, OWN, PIPED_WIDTH, PREFETCHES, SHARDS, STAGES

if TYPE_CHECKING:
    from zcompile.cost.forecast import Plan, PrintedPlan

CHECKPOINT_TEXTS = [str(one or "none") for one in CHECKPOINTS]
AUTO = "auto"
"""The value of `--mesh` that searches all meshes."""
Meshes = Annotated[
    list[str],
    typer.Option(
        "--mesh",
        help="NODESxRANKS: compare layouts on such a mesh of two levels; repeat. Or 'auto': search all meshes of "
        "pipeline, data and tensor parallelism.",
    ),
]
Worlds = Annotated[
    list[int], typer.Option("--world", "-w", min=1, help="Data-parallel ranks; repeat. With --mesh auto, all ranks.")
]
Limit = Annotated[
    str | None, typer.Option("--memory-limit", "-m", help="Per rank, such as '70 GB'; default: 0.9 of a device's.")
]
Batch = Annotated[
    int, typer.Option("--batch", "-b", min=1, help=f"{BATCH}; with --mesh auto, in the smallest micro-batch.")
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, help="With --mesh auto: sequences per step; default: --batch per rank."),
]
Checkpoints = Annotated[
    list[str], typer.Option("--checkpoint", help="'none', 'unit', a size or a share of the peak; repeat.")
]
Dtypes = Annotated[
    list[str],
    typer.Option("--dtype", help=f"'{OWN}' or one of {', '.join(DTYPES)}; repeat. Default: own, and 16 bits."),
]
Shards = Annotated[
    list[str],
    typer.Option("--shard", help=f"For a mesh of two levels: {', '.join(SHARDS)}; repeat. Default: all."),
]


def plan_command(
    context: typer.Context,
    model: Model,
    world: Worlds = [8],  # noqa: B006
    hardware: Hardware_ = "h100",
    memory_limit: Limit = None,
    batch: Batch = 1,
    sequence: Sequence_ = 1024,
    stage: Annotated[list[int], typer.Option("--stage", help="Stages to compare; repeat.")] = list(STAGES),  # noqa: B006
    prefetch: Annotated[list[int], typer.Option("--prefetch", help="Depths to compare; repeat.")] = list(PREFETCHES),  # noqa: B006
    checkpoint: Checkpoints = list(CHECKPOINT_TEXTS),  # noqa: B006
    chunk: Chunk = "none",
    dtype: Dtypes = [],  # noqa: B006
    mesh: Meshes = [],  # noqa: B006
    shard: Shards = list(SHARDS),  # noqa: B006
    units: Units = [],  # noqa: B006
    whole: Whole = [],  # noqa: B006
    global_batch: GlobalBatch = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write the plan as a page to this .html.")] = None,
) -> None:
    """Forecast the memory per rank and the time of a step for every choice of options, and recommend a choice.

    Nothing is run: no process group, no GPU, no memory for the model.
    """
    from zcompile.cost.hardware import load_profile
    from zcompile.tools.planner import choices_of, plan

    if mesh == [AUTO]:
        _plan_meshes(context)
        return
    if global_batch is not None:
        raise OptionError("global_batch", "is for --mesh auto; elsewhere each rank has --batch", "leave it out")
    if html is not None:
        check_target("html", html, ".html")
    checkpoints, dtypes = [checkpoint_of(one) for one in checkpoint], [dtype_of(one) for one in dtype]
    device, limit = load_profile(hardware), _limit(memory_limit)
    choices_of(dtypes or [None], stage, checkpoints, prefetch)  # check before making the model, which takes time
    fix = "give nodes and the ranks of each, such as 8x4, or auto alone"
    shapes = [sizes_of(one, "is not a mesh of two levels", fix) for one in mesh]
    with progress_bar(quiet=as_json) as progress:
        subject = model_of(context, model)
        result = plan(
            subject.model,
            subject.args,
            subject.kwargs,
            worlds=[nodes * ranks for nodes, ranks in shapes] or world,
            hardware=device,
            memory_limit=limit,
            stages=stage,
            prefetches=prefetch,
            checkpoints=checkpoints,
            chunk=chunk_of(chunk),
            dtypes=dtypes or None,
            replicas=[1] * (FLAT in shard or not shapes) + [nodes for nodes, _ in shapes],
            hybrids=[one for one in shard if one != FLAT],
            units=units or None,
            whole=whole or None,
            progress=progress,
        )
    result = replace(result, model=subject.name)
    extra = {"batch": batch, "sequence": sequence} if as_json else None
    _print_plan(result, extra, None if html is None else partial(_write_page, html, result))


def _plan_meshes(context: typer.Context) -> None:
    """Carry out `--mesh auto`.

    Raises:
        OptionError: an option does not apply, or is given several times.
    """
    from zcompile.cost.hardware import load_profile
    from zcompile.tools.mesh_planner import plan_meshes

    given = context.params
    for name in ("prefetch", "chunk", "shard", "whole", "html"):
        if is_given(context, name):
            raise OptionError(name, "is not compared over meshes", "leave it out, or --mesh auto")
    for name, least in (("world", 1), ("dtype", 0)):
        if not least <= len(given[name]) <= 1:
            raise OptionError(name, f"is given {len(given[name])} times", "give it once with --mesh auto")
    device = load_profile(given["hardware"])
    with progress_bar(quiet=given["as_json"]) as progress:
        subject = model_of(context, given["model"])
        result = plan_meshes(
            subject.model,
            subject.args,
            subject.kwargs,
            world=given["world"][0],
            loss_fn=subject.loss_fn,
            global_batch=given["global_batch"],
            hardware=device,
            memory_limit=_limit(given["memory_limit"]),
            stages=given["stage"],
            checkpoints=[checkpoint_of(one) for one in given["checkpoint"]],
            dtype=dtype_of(given["dtype"][0]) if given["dtype"] else "auto",
            units=given["units"] or None,
            progress=progress,
        )
    result = replace(result, model=subject.name, texts=replace(result.texts, loss=subject.loss))
    _print_plan(result, {} if given["as_json"] else None)


def _limit(text: str | None) -> int | None:
    """Parse a memory limit, in bytes if it has no unit.

    Raises:
        OptionError: it is not a size.
    """
    from zcompile.schedule.option_checks import bytes_of

    return bytes_of("memory_limit", f"{text}B" if (text or "").isdecimal() else text)


def _write_page(html: Path, result: Plan) -> None:
    from zcompile.report.plan_page import write_plan_page

    write_plan_page(html, result)


def _print_plan(
    result: PrintedPlan, extra: Mapping[str, int] | None, write_page: Callable[[], None] | None = None
) -> None:
    """Print a plan, as JSON with the entries `extra` unless that is None, and write its page.

    Raises:
        OptionError: nothing fits, for JSON.
        typer.Exit: nothing fits, for a table, which says so itself.
    """
    if extra is not None:
        print(json.dumps({**result.as_dict(), **extra}, indent=1))
    else:
        result.print(Console(width=None if sys.stdout.isatty() else PIPED_WIDTH))
    if write_page is not None:
        write_page()
    try:
        result.check_fits()
    except OptionError:
        if extra is not None:
            raise
        raise typer.Exit(1) from None
