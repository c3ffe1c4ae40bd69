"""What goes from one pipeline stage to another: the values at the boundary of its program.

The program of a stage is a step like any other: what other stages give it are inputs and tangents, what it gives them
results and gradients of inputs. A `Boundary` says which is which, by the names of the values in the traced step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zcompile.ir.operation import op_of
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that is sent from one stage to another."""

    value: str
    """Its name in the traced step."""
    stage: int
    """The other stage: that it comes from, or goes to."""


@dataclass(frozen=True, slots=True)
class Lending:
    """A parameter that several stages read, of which one keeps it.

    Its value, which that stage gives another one once a step; and back the sum of its gradients over the micro-batches.
    """

    param: str
    value: str
    """Its name in the traced step."""
    stage: int
    """The other stage."""


End = int | Crossing | Lending
"""A place at the boundary: of an input or result of the traced step its number, else what is received or sent."""


@dataclass(frozen=True)
class Boundary:
    """What the program of a stage is given and gives, place by place.

    Attributes:
        inputs: By the number of each input of kind DATA.
        tangents: By the number of each input of kind TANGENT: gradients that the backward begins with.
        outputs: Of the forward's results.
        gradients: Of the gradients that the backward gives, those of parameters left out.
        draws: The random draws of the traced step that the forward and the backward make, by number.
        lends: The values of parameters of this stage that it gives others: see `PipelineStage.lent`.
        collects: From which stages it gets gradients of these.
        written: By the number of each result that is the new value of a buffer, which input that is.
        summands: Of each parameter that several stages read, by its name, the values of the traced step whose sum is
            its gradient in this stage.
    """

    inputs: tuple[End, ...]
    tangents: tuple[End, ...]
    outputs: tuple[End, ...]
    gradients: tuple[End, ...]
    draws: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    lends: tuple[Lending, ...] = ()
    collects: tuple[Lending, ...] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    summands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[tuple[str, ...], ...]:
        """What kind of end each place has: what equal stages have in common."""
        ends = (self.inputs, self.tangents, self.outputs, self.gradients)
        return tuple(tuple(type(end).__name__ for end in some) for some in ends)

    @property
    def sent_back(self) -> int:
        """How many of the gradients go to other stages for each micro-batch; they are the first ones."""
        return sum(isinstance(end, Crossing) for end in self.gradients)


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline: its number, its program for one micro-batch, and what that has to do with the others."""

    number: int
    program: Program
    boundary: Boundary
    lent: Program | None = None
    """What gives, once a step, copies of those parameters that it lends, each one once, in the order of `lends`."""


def written_results(program: Program) -> dict[int, int]:
    """Of a traced step, by the number of each result that is the new value of an input, which input that is.

    AOTAutograd gives them in front of all others, in the order of the inputs.
    """
    inputs = [op for op in (op_of(node, Input) for node in program.nodes(Input)) if op.kind is Kind.DATA]
    return dict(enumerate(number for number, op in enumerate(inputs) if op.mutated))
