"""Checks of options, with the nearest valid choice in the message."""

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


def check_stage(stage: object) -> None:
    """Raise OptionError for what is no ZeRO stage."""
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        raise OptionError("stage", f"{stage!r} is no ZeRO stage", "choose 0, 1, 2 or 3")


def check_prefetch(prefetch: object, *, auto: bool = False) -> None:
    """Raise OptionError for what is no number of units, nor "auto" where that is allowed."""
    if auto and prefetch == "auto":
        return
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        fix = "choose 0 for none, how many to gather ahead, or (in compile) 'auto'"
        raise OptionError("prefetch", f"{prefetch!r} is no number of units", fix)


def bytes_of(option: str, size: object) -> int | None:
    """`size` in bytes: a number of them, or a text such as "512 MiB"; None for None.

    Raises:
        OptionError: it is neither, or not positive.
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
            option, f"{size!r} is no size", "give a number of bytes, or a text such as '512 MiB' or '2 GB'"
        )
    return int(count)


def offload_of(option: str, place: object) -> Path | Literal["cpu"] | None:
    """What is meant by `option=`: the memory of the host, or a folder on a disk.

    Raises:
        OptionError: it is neither.
    """
    if place is None or place == "cpu":
        return place
    kind, _, folder = str(place).partition(":")
    if kind != "disk" or not folder:
        raise OptionError(option, f"{place!r} is no place", "give 'disk:FOLDER', 'cpu' on a GPU, or leave it out")
    return Path(folder)


def check_place(option: str, place: Path | Literal["cpu"], device: torch.device) -> None:
    """Raise OptionError for the host's memory where the model is there itself, and for a disk where it is not."""
    if (place == "cpu") is (device.type == "cpu"):
        problem = f"is {'cpu' if place == 'cpu' else f'disk:{place}'!r}, and the model is on {device}"
        raise OptionError(option, problem, "give 'cpu' for a model on a GPU, 'disk:FOLDER' for one on the CPU")


def check_worlds(worlds: object) -> None:
    """Raise OptionError for what are no numbers of ranks."""
    given = list(worlds) if isinstance(worlds, Sequence) else []
    if not given or any(isinstance(world, bool) or not isinstance(world, int) or world < 1 for world in given):
        raise OptionError("worlds", f"{worlds!r} are no numbers of ranks", "give one or more, such as (8, 64)")


def checkpoint_of(checkpoint: object) -> Literal["unit", "auto"] | int | float | None:
    """What is meant by `checkpoint=`: a word, a size in bytes, or a share of the peak.

    Raises:
        OptionError: it is none of them.
    """
    if checkpoint is None or checkpoint == "unit" or checkpoint == "auto":
        return checkpoint
    if isinstance(checkpoint, float):
        if not 0 < checkpoint < 1:
            fix = "give a share of the peak between 0 and 1, such as 0.5, or leave it out to save all"
            raise OptionError("checkpoint", f"{checkpoint!r} is no share that has an effect", fix)
        return checkpoint
    try:
        return bytes_of("checkpoint", checkpoint)
    except OptionError as error:
        fix = "give 'unit', 'auto', a size such as '512 MiB', a share of the peak such as 0.5, or None to save all"
        raise OptionError("checkpoint", f"{checkpoint!r} is no setting", fix) from error


_FACTORS = {"": 1} | {
    f"{letter}{binary}": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for binary in ("", "i")
}


def check_dtype(option: str, dtype: object) -> None:
    """Raise OptionError for what is no real floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        fix = "choose torch.bfloat16, torch.float16 or torch.float32, or None for the model's own"
        raise OptionError(option, f"{dtype!r} is no dtype to compute with", fix)


def check_wire(dtype: object, stage: int) -> None:
    """Raise OptionError for what averages cannot travel in between replicas, or where there are none."""
    if dtype is None:
        return
    _check_wire_dtype("outer_dtype", dtype, "averages")
    if stage == 0:
        problem = "is for what ranks with the same shards average, and stage 0 has no shards"
        raise OptionError("outer_dtype", problem, "choose stage 1, 2 or 3, or leave it out")


def check_gather_wire(dtype: object, stage: int, *, divides: bool) -> None:
    """Raise OptionError for what shards cannot travel in outside, or where none do, unless both axes divide them."""
    if dtype is None:
        return
    _check_wire_dtype("outer_gather_dtype", dtype, "shards")
    if stage == 0 or not divides:
        problem = "applies to gathers along the outer dimension of a mesh, and these options make none"
        fix = "give a mesh of two dimensions and shard='hfsdp' or 'hpz', in stage 1, 2 or 3, or leave it out"
        raise OptionError("outer_gather_dtype", problem, fix)


def check_gathered(layout: Layout, dtype: torch.dtype | None) -> None:
    """Raise OptionError for an `outer_gather_dtype` that no shard of a layout travels outside in."""
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
        raise OptionError(option, f"{dtype!r} is no dtype in which {what} can travel", fix)


FLAT = "flat"
"""`shard=` for all ranks of a mesh of two dimensions as if it had one."""
AUTO = "auto"
"""`shard=` for what is chosen by the memory at hand and the links."""
SHARDS = (FLAT, *Hybrid)


def check_shard(shard: object, stage: int) -> None:
    """Raise OptionError for an unknown way to divide over two axes, or where nothing is divided."""
    if shard is None:
        return
    if shard not in (AUTO, *SHARDS):
        raise OptionError("shard", f"{shard!r} is unknown", nearest(str(shard), (AUTO, *SHARDS)))
    if stage == 0:
        problem = f"is {shard!r}, which says what two dimensions of a mesh divide, and stage 0 divides nothing"
        raise OptionError("shard", problem, "choose stage 1, 2 or 3, or leave it out")


def check_dimensions(shard: str | None, outer_dtype: object, dimensions: int, *, whole: bool = False) -> None:
    """Raise OptionError for what options ask of a mesh of so few dimensions, or beside `whole=`."""
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


def check_backend(backend: object) -> None:
    """Raise OptionError for an unknown backend."""
    if backend not in BACKENDS:
        raise OptionError("backend", f"{backend!r} is unknown", nearest(str(backend), BACKENDS))
