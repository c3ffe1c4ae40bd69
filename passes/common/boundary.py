"""What goes from one pipeline stage to another: the values at the boundary of its program.

The program of a stage is a step like any other: what other stages give it are inputs and tangents, what it gives them
results and gradients of inputs. A `Boundary` says which is which, by the names of the values in the traced step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zcompile.ir.program import Program


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that is sent from one stage to another."""

    value: str
    """Its name in the traced step."""
    stage: int
    """The other stage: that it comes from, or goes to."""


End = int | Crossing
"""A place at the boundary: of an input or result of the traced step its number, else what is received or sent."""


@dataclass(frozen=True)
class Boundary:
    """What the program of a stage is given and gives, place by place.

    Attributes:
        inputs: By the number of each input of kind DATA.
        tangents: By the number of each input of kind TANGENT: gradients that the backward begins with.
        outputs: Of the forward's results.
        gradients: Of the gradients that the backward gives, those of parameters left out.
        partial: Parameters that other stages read, too, with the stage that keeps them.
        draws: The random draws of the traced step that the forward and the backward make, by number.
    """

    inputs: tuple[End, ...]
    tangents: tuple[End, ...]
    outputs: tuple[End, ...]
    gradients: tuple[End, ...]
    partial: Mapping[str, int] = field(default_factory=dict)
    draws: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline: its number, its program for one micro-batch, and what that has to do with the others."""

    number: int
    program: Program
    boundary: Boundary
