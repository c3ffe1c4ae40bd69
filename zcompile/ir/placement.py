"""Where the rows of a value are, and loops over rows: see `zcompile.ir.rows`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from zcompile.ir.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Divided:
    """A value's rows are along `dim`, which has `outer` groups of all rows, one after the other."""

    dim: int
    outer: int = 1


class Kept(Enum):
    """What else a value may be to rows."""

    WHOLE = auto()
    """The same for all rows."""
    PARTIAL = auto()
    """A sum over rows: those of parts add up to it."""


WHOLE, PARTIAL = Kept.WHOLE, Kept.PARTIAL


Placement = Divided | Kept


@dataclass(frozen=True, slots=True)
class RowLoop:
    """A loop over rows: a graph is run for `size` of all `rows` rows after the other, and for what is left of them."""

    rows: int
    size: int
    takes: tuple[Placement, ...]
    """For each argument, where its rows are; the graph takes those of one turn, and what is whole as it is."""
    gives: tuple[Placement, ...]
    """For each result, along which dimension the turns' are joined; PARTIAL if they are added up."""
    factor: str = ""
    """The name of a number in the graph, 1 there, in which all sums and gradients are linear; "" for none."""

    def whole(self, type_: TensorType | None, placement: Placement) -> TensorType | None:
        """Return the type of a value for all rows, given that for one turn."""
        if type_ is None or not isinstance(placement, Divided) or placement.dim >= len(type_.dims):
            return type_
        dims = [*type_.dims]
        dims[placement.dim] = replace(dims[placement.dim], size=dims[placement.dim].size // self.size * self.rows)
        return replace(type_, dims=tuple(dims))

    def held(self, type_: TensorType | None, placement: Placement) -> int:
        """Return the bytes in which a result is joined or added up; 16-bit sums are in float32."""
        if type_ is None:
            return 0
        narrow = placement is PARTIAL and type_.dtype.is_floating_point
        return type_.nbytes // type_.dtype.itemsize * max(type_.dtype.itemsize, 4 if narrow else 1)

    def __str__(self) -> str:
        said = {"rows": self.rows, "size": self.size}
        lists = {"takes": self.takes, "gives": self.gives}
        parts = [f"{name}={value}" for name, value in said.items()]
        parts += [f"{name}=[{', '.join(map(_placement_text, value))}]" for name, value in lists.items()]
        return ", ".join([*parts, *([f"factor={self.factor!r}"] if self.factor else [])])


def _placement_text(placement: Placement) -> str:
    """Return a placement as it is printed: `0`, `(0, 4)` for four groups of all rows, `None`, or `'sum'`."""
    if isinstance(placement, Divided):
        return str(placement.dim) if placement.outer == 1 else str((placement.dim, placement.outer))
    return "None" if placement is WHOLE else "'sum'"


def placement_of(said: Any) -> Placement:
    """Return the placement that is printed as `said`. Raises ValueError: none is."""
    match said:
        case None:
            return WHOLE
        case "sum":
            return PARTIAL
        case int():
            return Divided(said)
        case (int() as dim, int() as outer):
            return Divided(dim, outer)
    raise ValueError(f"{said!r} says not where rows are")
