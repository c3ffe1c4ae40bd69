"""The values that pipeline stages exchange: the boundary of a stage's program.

The program of a stage is a step like any other: it receives values from other stages as inputs and tangents, and sends
values to them as results and gradients of inputs. A `Boundary` maps these to values of the traced step, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx

from zcompile.ir.actions import Action, ActionKind, ActionTable
from zcompile.ir.operation import Data, Operation, Phase, data, op_of, set_data
from zcompile.ir.ops import Group, Input, Kind, RuntimeInput, Shards
from zcompile.ir.program import Program


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that is sent from one stage to another."""

    value: str
    """Its name in the traced step."""
    stage: int
    """The other stage: the sender of a received value, the receiver of a sent one."""


@dataclass(frozen=True, slots=True)
class Lending:
    """A parameter that several stages read and one of them, its home stage, keeps.

    Once per step the home stage sends its value to another, which sends back the sum of its micro-batches' gradients.
    """

    param: str
    value: str
    """Its name in the traced step."""
    stage: int
    """The other stage."""


End = int | Crossing | Lending
"""One value at the boundary: the number of an input or result of the traced step, or what is received or sent."""


@dataclass(frozen=True)
class Boundary:
    """Where each input of a stage's program comes from, and where each result goes.

    Attributes:
        inputs: For each input of kind DATA, in order.
        tangents: For each input of kind TANGENT, in order: gradients that the backward begins with.
        outputs: For each result of the forward.
        gradients: For each gradient that the backward returns, gradients of parameters excluded.
        draws: The numbers of the traced step's random draws that the forward and the backward make.
        lends: The parameters of this stage that it sends to other stages: see `PipelineStage.lent`.
        collects: Those of `lends` for which the other stage sends gradients back.
        written: Maps the number of each result that is the new value of a buffer to the number of that input.
        summands: Maps the name of each parameter that several stages read to the values of the traced step whose sum
            is its gradient in this stage.
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
        """The types of all ends: equal for stages with the same structure."""
        ends = (self.inputs, self.tangents, self.outputs, self.gradients)
        return tuple(tuple(type(end).__name__ for end in side) for side in ends)

    @property
    def sent_back(self) -> int:
        """How many of `gradients` are sent to other stages for each micro-batch; they are the first ones."""
        return sum(isinstance(end, Crossing) for end in self.gradients)


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage: its number, its program for one micro-batch, and the boundary to the other stages."""

    number: int
    program: Program
    boundary: Boundary
    lent: Program | None = None
    """A program, run once per step, that returns a copy of each parameter in `lends`, without repeats, in order."""


def written_results(program: Program) -> dict[int, int]:
    """Map the number of each result of a traced step that is the new value of an input to the number of that input.

    AOTAutograd returns them before all other results, in the order of the inputs.
    """
    inputs = [op for op in (op_of(node, Input) for node in program.nodes(Input)) if op.kind is Kind.DATA]
    return dict(enumerate(number for number, op in enumerate(inputs) if op.mutated))


# -- messages ---------------------------------------------------------------------------------------------------------


class StageMessage(NamedTuple):
    """A value sent from one stage to another: its name in the traced step, the receiving stage, and the micro-batch.

    Without a micro-batch, it is the value of a lent parameter, or the sum of that parameter's gradients.
    """

    value: str
    to: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.prefix + self.value

    @property
    def prefix(self) -> str:
        """The prefix of the names of this micro-batch's lines."""
        return "" if self.microbatch is None else f"m{self.microbatch}_"


def shared_parameter_value(lending: Lending) -> StageMessage:
    """Return the message with a lent parameter's value; `lending.stage` is the receiving stage."""
    return StageMessage(f"stage{lending.stage}_{lending.value}", lending.stage)


def collected(lending: Lending, by: int, home: int) -> StageMessage:
    """Return the message with the sum of a lent parameter's gradients, from stage `by` to its home stage."""
    return StageMessage(f"stage{by}_{lending.value}_grad", home)


def messages_between(stages: Sequence[PipelineStage], table: ActionTable, sender: int, to: int) -> list[StageMessage]:
    """Return the messages that one rank sends to another in a step, in order."""
    lent = (lending for number in table.stages_of(sender) for lending in stages[number].boundary.lends)
    messages = list(map(shared_parameter_value, lent))
    for action in table.rows[sender]:
        for crossing in crossings(sent_ends(stages[action.stage], action.kind)):
            messages.append(StageMessage(crossing.value, crossing.stage, action.microbatch))
        if is_last(action, table):
            messages += [collected(lending, action.stage, lending.stage) for lending in borrowed(stages[action.stage])]
    return [message for message in messages if table.rank_of(message.to) == to]


def is_last(action: Action, table: ActionTable) -> bool:
    """Return True for the action of a stage that completes the gradients of its parameters."""
    kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    return action.kind in kinds and action.microbatch == table.microbatches - 1


def borrowed(stage: PipelineStage) -> list[Lending]:
    """Return the parameters of other stages that this stage computes gradients of."""
    return [end for end in stage.boundary.gradients if isinstance(end, Lending)]


def sent_ends(stage: PipelineStage, kind: ActionKind) -> tuple[End, ...]:
    """Return the ends of the results of an action that belong to its micro-batch alone."""
    if kind is ActionKind.BACKWARD_WEIGHT:
        return ()
    boundary = stage.boundary
    return boundary.outputs if kind is ActionKind.FORWARD else boundary.gradients[: boundary.sent_back]


def crossings(ends: Sequence[End]) -> list[Crossing]:
    """Return the ends that are values of the traced step sent to, or received from, other stages."""
    return [end for end in ends if isinstance(end, Crossing)]


@dataclass
class StepInputs:
    """The inputs of a rank's step: the graph, which begins with them, and its placeholders by key."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    group: fx.Node | None = None
    """The ranks along the pipeline axis, if the rank sends or receives anything."""
    placeholders: dict[object, fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, own: Sequence[PipelineStage], table: ActionTable, rank: int, axis: str) -> StepInputs:
        given = cls()
        for kind in (Shards, RuntimeInput):
            for node in (node for stage in own for node in stage.program.nodes(kind)):
                given._add(data(node).op, node, data(node).op, node.name)
        ends = (end for s in own for kind in ActionKind for end in sent_ends(s, kind))
        received = (end for s in own for end in (*s.boundary.inputs, *s.boundary.tangents))
        others = [end.stage for end in (*ends, *received) if not isinstance(end, int)]
        others += [lending.stage for stage in own for lending in (*stage.boundary.lends, *borrowed(stage))]
        if any(table.rank_of(stage) != rank for stage in others):
            given.group = given._add(Group(axis), None, Group(axis), axis)
        for stage in own:
            given._inputs(stage, Kind.CONSTANT, None)
            given._inputs(stage, Kind.DATA, None)
        for microbatch in range(table.microbatches):
            for stage in own:
                given._inputs(stage, Kind.DATA, microbatch)
        for stage in own:
            given._inputs(stage, Kind.TANGENT, None)
        return given

    def _inputs(self, stage: PipelineStage, kind: Kind, microbatch: int | None) -> None:
        """Add the inputs of a kind that belong to `microbatch`, or, if it is None, those that all of them share."""
        for node in stage.program.nodes(Input):
            op = op_of(node, Input)
            changes = op.kind is Kind.DATA and not op.held
            if op.kind is kind and changes is (microbatch is not None) and (key := _key(stage, node, microbatch)):
                name = node.name if microbatch is None else f"m{microbatch}_{node.name}"
                index = key[1] if isinstance(key[1], int) else op.index
                self._add(key, node, replace(op, index=index, microbatch=microbatch), name)

    def _add(self, key: object, like: fx.Node | None, op: Operation, name: str) -> fx.Node:
        if key not in self.placeholders:
            made = self.placeholders[key] = self.graph.create_node("placeholder", name, name=name)
            made.meta = dict(like.meta) if like is not None else {}
            set_data(made, replace(data(like), op=op, phase=Phase.STEP) if like is not None else Data(op, Phase.STEP))
        return self.placeholders[key]

    def to(self, stage: PipelineStage, microbatch: int) -> dict[fx.Node, fx.Node]:
        """Map the placeholders of a stage to those of the step for a micro-batch, except values of other stages."""
        result = {node: self.placeholders[data(node).op] for node in stage.program.nodes(Shards, RuntimeInput)}
        for node in stage.program.nodes(Input):
            if (key := _key(stage, node, microbatch)) is not None:
                result[node] = self.placeholders[key]
        return result


def _key(stage: PipelineStage, node: fx.Node, microbatch: int | None) -> tuple[Kind, object, int | None] | None:
    """Return the key that identifies an input of a stage; None for a value from another stage."""
    op = op_of(node, Input)
    if op.kind is Kind.CONSTANT:
        return op.kind, node.name, None
    if op.kind is Kind.TANGENT:
        end, shared = stage.boundary.tangents[op.index], True
    else:
        end, shared = stage.boundary.inputs[op.index], bool(op.held)
    return None if not isinstance(end, int) else (op.kind, end, None if shared else microbatch)
