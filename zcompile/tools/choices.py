"""The named values that options of commands accept. Does not import torch, so that `--help` is instant."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from zcompile.errors import OptionError

Shape = TypeVar("Shape")

STAGES = (0, 1, 2, 3)
PREFETCHES = (0, 1, 2, 4)
"""Prefetch depths that a plan compares."""
CHECKPOINTS = (None, "unit")
"""Values of `checkpoint=` that a plan compares."""
FLAT = "flat"
SHARDS = (FLAT, "hsdp", "hfsdp", "hpz")
"""Values of `shard=` for a mesh of two levels. A test compares these, STAGES and SCHEDULES with the options' own."""
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
OWN = "own"
"""The name of the model's own dtype."""
PIPED_WIDTH = 200
"""Columns of the output if it is not a terminal: no table is wider."""
_FACTORS = {"m": 1e6, "b": 1e9, "t": 1e12}


def two_sizes(text: str) -> tuple[int, int] | None:
    """The two positive sizes in a text such as "8x4"; None for any other text."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    sizes = (int(match[1]), int(match[2])) if match else (0, 0)
    return sizes if all(sizes) else None


def shape_named(
    kind: str, name: str, sizes: Mapping[str, Shape], made: Callable[[int, int], Shape], multiple: int, example: str
) -> Shape:
    """The shape of a model named `name`: one of `sizes`, or the shape made from layers and width.

    Args:
        kind: Name of the model family, for messages.
        name: A size such as "7.5b", or layers x width such as "48x1600".
        sizes: Shapes by size.
        made: Makes a shape from a number of layers and a width.
        multiple: The width must be a multiple of this.
        example: An example of layers x width, for messages.

    Raises:
        OptionError: `name` is neither.
    """
    if shape := sizes.get(name.lower()):
        return shape
    if (own := two_sizes(name)) and own[1] % multiple == 0:
        return made(*own)
    fix = f"{_nearest_size(name, sizes)}; or LAYERSxWIDTH, the width a multiple of {multiple}, such as {kind}:{example}"
    raise OptionError("model", f"{kind}:{name} is not a known size", fix)


def _nearest_size(name: str, sizes: Iterable[str]) -> str:
    """Advice for an unknown size such as "1.3b": the nearest size, and all sizes."""
    known = {size: _parameters(size) for size in sizes}
    wanted = _parameters(name)
    near = min(known, key=lambda size: abs(math.log(known[size] / wanted))) if wanted else ""
    return (f"did you mean {near!r}? " if near else "") + f"choose from {', '.join(map(repr, known))}"


def _parameters(size: str) -> float:
    """Number of parameters of a size such as "7.5b"; 0 for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mbt])", size.lower())
    return float(match[1]) * _FACTORS[match[2]] if match else 0.0
