"""Checks of options; messages suggest a valid choice."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from zcompile.errors import OptionError, nearest
from zcompile.ir.layout import WIRE_DTYPES, Hybrid, Layout

BACKENDS = ("inductor", "eager")
CudaGraphs = bool | Literal["step"]
"""What is captured as CUDA graphs: nothing, each region between two communications, or a whole train step."""

Chunk = int | str | None
"""The most rows for which wide values are computed at once, a size that the step keeps within by it, or "auto"."""

Sequencing = Literal["ulysses", "ring", "auto"] | None
"""How ranks that divide tokens compute attention; None: no ranks do."""


def check_sequence(sequence: object) -> None:
    """Raise OptionError unless `sequence` is a known way to divide tokens, or None."""
    if sequence not in (None, "ulysses", "ring", "auto"):
        fix = 'choose "ulysses", "ring" or "auto", or leave it out'
        raise OptionError("sequence", f"has no value {sequence!r}", fix)


def check_chunk(chunk: object) -> None:
    """Raise OptionError unless `chunk` is a number of rows, a size, "auto" or None."""
    if chunk is None or chunk == "auto" or (type(chunk) is int and chunk >= 1):
        return
    fix = "give how many rows, such as tokens, are computed at once, a size such as '8 GiB', 'auto', or leave it out"
    if not isinstance(chunk, str):
        raise OptionError("chunk", f"{chunk!r} is not a number of rows", fix)
    try:
        bytes_of("chunk", chunk)
    except OptionError as error:
        raise OptionError("chunk", f"{chunk!r} is not a number of rows", fix) from error


def check_stage(stage: object) -> None:
    """Raise OptionError unless `stage` is a ZeRO stage."""
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        raise OptionError("stage", f"{stage!r} is not a ZeRO stage", "choose 0, 1, 2 or 3")


def check_prefetch(prefetch: object, *, auto: bool = False) -> None:
    """Raise OptionError unless `prefetch` is a number of units, or "auto" if that is allowed."""
    if auto and prefetch == "auto":
        return
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        fix = "choose 0 for none, how many to gather ahead, or (in compile) 'auto'"
        raise OptionError("prefetch", f"{prefetch!r} is not a number of units", fix)


def bytes_of(option: str, size: object) -> int | None:
    """Return `size` in bytes: an int, or a string such as "512 MiB"; None for None.

    Raises:
        OptionError: `size` is neither, or not positive.
    """
    if size is None:
        return None
    count: float | None = None
    if isinstance(size, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|[KMGT]i?)B\s*", size)):
        count = float(match[1]) * _FACTORS[match[2]]
    elif isinstance(size, int) and not isinstance(size, bool):
        count = size
    if count is None or not 1 <= count < math.inf:
        raise OptionError(
            option, f"{size!r} is not a size", "give a number of bytes, or a text such as '512 MiB' or '2 GB'"
        )
    return int(count)


def offload_of(option: str, place: object) -> Path | Literal["cpu"] | None:
    """Parse an option for offloading: host memory ("cpu"), or a folder on a disk ("disk:FOLDER").

    Raises:
        OptionError: `place` is neither.
    """
    if place is None or place == "cpu":
        return place
    kind, _, folder = str(place).partition(":")
    if kind != "disk" or not folder:
        raise OptionError(option, f"{place!r} is not a place", "give 'disk:FOLDER', 'cpu' on a GPU, or leave it out")
    return Path(folder)


def check_place(option: str, place: Path | Literal["cpu"], device: torch.device) -> None:
    """Raise OptionError for offloading to host memory from the CPU, or to a disk from any other device."""
    if (place == "cpu") is (device.type == "cpu"):
        problem = f"is {'cpu' if place == 'cpu' else f'disk:{place}'!r}, and the model is on {device}"
        raise OptionError(option, problem, "give 'cpu' for a model on a GPU, 'disk:FOLDER' for one on the CPU")


def check_worlds(worlds: object) -> None:
    """Raise OptionError unless `worlds` is a sequence of numbers of ranks."""
    given = list(worlds) if isinstance(worlds, Sequence) else []
    if not given or any(isinstance(world, bool) or not isinstance(world, int) or world < 1 for world in given):
        raise OptionError("worlds", f"{worlds!r} are not numbers of ranks", "give one or more, such as (8, 64)")


def checkpoint_of(checkpoint: object) -> Literal["unit", "auto"] | int | float | None:
    """Parse `checkpoint=`: "unit", "auto", a size in bytes, or a share of the peak.

    Raises:
        OptionError: it is none of these.
    """
    if checkpoint is None or checkpoint == "unit" or checkpoint == "auto":
        return checkpoint
    if isinstance(checkpoint, float):
        if not 0 < checkpoint < 1:
            fix = "give a share of the peak between 0 and 1, such as 0.5, or leave it out to save all"
            raise OptionError("checkpoint", f"{checkpoint!r} is not a share that has an effect", fix)
        return checkpoint
    try:
        return bytes_of("checkpoint", checkpoint)
    except OptionError as error:
        fix = "give 'unit', 'auto', a size such as '512 MiB', a share of the peak such as 0.5, or None to save all"
        raise OptionError("checkpoint", f"{checkpoint!r} is not a setting", fix) from error


_FACTORS = {"": 1} | {
    f"{letter}{binary}": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for binary in ("", "i")
}


def check_dtype(option: str, dtype: object) -> None:
    """Raise OptionError unless `dtype` is a real floating-point dtype or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        fix = "choose torch.bfloat16, torch.float16 or torch.float32, or None for the model's own"
        raise OptionError(option, f"{dtype!r} is not a dtype to compute with", fix)


def check_wire(dtype: object, stage: int) -> None:
    """Raise OptionError for a dtype in which averages cannot be sent between replicas, or if none are sent."""
    if dtype is None:
        return
    _check_wire_dtype("outer_dtype", dtype, "averages")
    if stage == 0:
        problem = "is for what ranks with the same shards average, and stage 0 has no shards"
        raise OptionError("outer_dtype", problem, "choose stage 1, 2 or 3, or leave it out")


def check_gather_wire(dtype: object, stage: int, *, divides: bool) -> None:
    """Raise OptionError for a dtype in which shards cannot be sent along the outer axis, or if none are sent."""
    if dtype is None:
        return
    _check_wire_dtype("outer_gather_dtype", dtype, "shards")
    if stage == 0 or not divides:
        problem = "applies to gathers along the outer dimension of a mesh, and these options make none"
        fix = "give a mesh of two dimensions and shard='hfsdp' or 'hpz', in stage 1, 2 or 3, or leave it out"
        raise OptionError("outer_gather_dtype", problem, fix)


def check_gathered(layout: Layout, dtype: torch.dtype | None) -> None:
    """Raise OptionError if no shard of a layout is sent along the outer axis in `dtype`."""
    floating = (param for param in layout.params if param.full_dtype.is_floating_point)
    found = (dtype in (param.outer_gather_dtype, param.full_dtype) for param in floating)
    if dtype is None or not layout.has_secondary or any(found):
        return
    problem, fix = f"is {dtype}, which would make no shard smaller: ", "leave it out"
    wide = {param.full_dtype for param in layout.params if param.full_dtype.is_floating_point}
    if wide and all(kind.itemsize <= dtype.itemsize for kind in wide):
        problem += f"parameters are gathered in {' and '.join(sorted(map(str, wide)))}, no wider"
    else:
        problem, fix = (
            f"{problem}divided among {layout.shards} ranks they are tiny, or integers",
            f"{fix}, or take fewer ranks",
        )
    raise OptionError("outer_gather_dtype", problem, fix)


def _check_wire_dtype(option: str, dtype: object, what: str) -> None:
    if dtype not in WIRE_DTYPES:
        fix = "choose torch.bfloat16 or torch.int8, or None to send them as they are"
        raise OptionError(option, f"{dtype!r} is not a dtype in which {what} can travel", fix)


FLAT = "flat"
"""`shard=` that treats all ranks of a 2-D mesh as one dimension."""
AUTO = "auto"
"""`shard=` that chooses by available memory and links."""
SHARDS = (FLAT, *Hybrid)


def check_shard(shard: object, stage: int) -> None:
    """Raise OptionError for an unknown way to shard over two axes, or in stage 0."""
    if shard is None:
        return
    if shard not in (AUTO, *SHARDS):
        raise OptionError("shard", f"{shard!r} is unknown", nearest(str(shard), (AUTO, *SHARDS)))
    if stage == 0:
        problem = f"is {shard!r}, which says what two dimensions of a mesh divide, and stage 0 divides nothing"
        raise OptionError("shard", problem, "choose stage 1, 2 or 3, or leave it out")


def check_dimensions(shard: str | None, outer_dtype: object, dimensions: int, *, whole: bool = False) -> None:
    """Raise OptionError for options that need a mesh of more dimensions, or that exclude `whole=`."""
    if outer_dtype is not None and dimensions == 1:
        problem = "is for the outer dimension of a mesh of two, and all ranks shard along one"
        raise OptionError("outer_dtype", problem, f"give mesh={_TWO_LEVELS}, or leave it out")
    if shard in (None, FLAT):
        return
    if dimensions == 1:
        problem = f"is {shard!r}, which says what two dimensions of a mesh divide, and all ranks are along one"
        raise OptionError("shard", problem, f"give mesh={_TWO_LEVELS}, or leave it out")
    if whole and shard != Hybrid.HSDP:
        problem = f"is {shard!r}, by which every rank has a part of each parameter, and whole= keeps some with one rank"
        raise OptionError("shard", problem, "choose 'hsdp' or 'flat', or leave whole= out")


_TWO_LEVELS = "init_device_mesh('cuda', (nodes, gpus), mesh_dim_names=('replicate', 'shard'))"


def check_graphs(graphs: object) -> None:
    """Raise OptionError unless `graphs` is True, False or "step"."""
    if graphs != "step" and not isinstance(graphs, bool):
        fix = "give True for a graph of each region, or, to zcompile.train_step, 'step' for one of all"
        raise OptionError("cuda_graphs", f"{graphs!r} is unknown", fix)


def check_backend(backend: object) -> None:
    """Raise OptionError for an unknown backend."""
    if backend not in BACKENDS:
        raise OptionError("backend", f"{backend!r} is unknown", nearest(str(backend), BACKENDS))
