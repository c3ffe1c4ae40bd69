"""What commands choose from, by name. Imports no torch, so that `--help` is there at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from zcompile.errors import OptionError

Shape = TypeVar("Shape")

STAGES = (0, 1, 2, 3)
PREFETCHES = (0, 1, 2, 4)
"""Depths that a plan compares."""
CHECKPOINTS = (None, "unit")
"""Settings of `checkpoint=` that a plan compares."""
FLAT = "flat"
SHARDS = (FLAT, "hsdp", "hfsdp", "hpz")
"""What `shard=` says of a mesh of two levels; a test compares these, stages and schedules with the options' own."""
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
OWN = "own"
"""What a dtype is called that is the model's own."""
PIPED = 200
"""Columns where the output is no terminal: no table is wider."""
_FACTORS = {"m": 1e6, "b": 1e9, "t": 1e12}


def two_sizes(text: str) -> tuple[int, int] | None:
    """The sizes that a text such as "8x4" names; None if it does not."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    sizes = (int(match[1]), int(match[2])) if match else (0, 0)
    return sizes if all(sizes) else None


def shape_named(
    kind: str, name: str, sizes: Mapping[str, Shape], made: Callable[[int, int], Shape], multiple: int, example: str
) -> Shape:
    """The shape of a model that `name` means: one of `sizes`, or what is `made` of layers and width.

    Args:
        kind: Of the model.
        name: A size such as "7.5b", or layers x width such as "48x1600".
        sizes: Shapes by size.
        made: Gives the shape of so many layers and channels.
        multiple: What the width has to be a multiple of.
        example: Of layers x width.

    Raises:
        OptionError: it is neither.
    """
    if shape := sizes.get(name.lower()):
        return shape
    if (own := two_sizes(name)) and own[1] % multiple == 0:
        return made(*own)
    fix = f"{_nearest_size(name, sizes)}; or LAYERSxWIDTH, the width a multiple of {multiple}, such as {kind}:{example}"
    raise OptionError("model", f"{kind}:{name} is no size", fix)


def _nearest_size(name: str, sizes: Iterable[str]) -> str:
    """The advice for a size of a model that there is not, such as "1.3b": the size nearest to it, and all of them."""
    known = {size: _parameters(size) for size in sizes}
    wanted = _parameters(name)
    near = min(known, key=lambda size: abs(math.log(known[size] / wanted))) if wanted else ""
    return (f"did you mean {near!r}? " if near else "") + f"choose from {', '.join(map(repr, known))}"


def _parameters(size: str) -> float:
    """Parameters of a size such as "7.5b"; 0 for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mbt])", size.lower())
    return float(match[1]) * _FACTORS[match[2]] if match else 0.0
