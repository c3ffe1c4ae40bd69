"""What goes from one pipeline stage to another: the values at the boundary of its program.

The program of a stage is a step like any other: what other stages give it are inputs and tangents, what it gives them
results and gradients of inputs. A `Boundary` says which is which, by the names of the values in the traced step.
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


# -- messages ---------------------------------------------------------------------------------------------------------


class StageMessage(NamedTuple):
    """A value that one stage gives another: its name in the traced step, to which stage, of which micro-batch.

    Without a micro-batch it is the value of a parameter that is lent, or the sum of its gradients.
    """

    value: str
    to: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.prefix + self.value

    @property
    def prefix(self) -> str:
        """What lines begin with that are of this micro-batch."""
        return "" if self.microbatch is None else f"m{self.microbatch}_"


def shared_parameter_value(lending: Lending) -> StageMessage:
    """The value of a parameter, by what the stage that keeps it says of another one."""
    return StageMessage(f"stage{lending.stage}_{lending.value}", lending.stage)


def collected(lending: Lending, by: int, home: int) -> StageMessage:
    """The sum of a parameter's gradients that stage `by` gives the one that keeps it."""
    return StageMessage(f"stage{by}_{lending.value}_grad", home)


def messages_between(stages: Sequence[PipelineStage], table: ActionTable, sender: int, to: int) -> list[StageMessage]:
    """What one rank sends another in a step, in its order."""
    lent = (lending for number in table.stages_of(sender) for lending in stages[number].boundary.lends)
    found = list(map(shared_parameter_value, lent))
    for action in table.rows[sender]:
        for crossing in crossings(sent_ends(stages[action.stage], action.kind)):
            found.append(StageMessage(crossing.value, crossing.stage, action.microbatch))
        if is_last(action, table):
            found += [collected(one, action.stage, one.stage) for one in borrowed(stages[action.stage])]
    return [message for message in found if table.rank_of(message.to) == to]


def is_last(action: Action, table: ActionTable) -> bool:
    """True for the action of a stage behind which it has all gradients of its parameters."""
    kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    return action.kind in kinds and action.microbatch == table.microbatches - 1


def borrowed(stage: PipelineStage) -> list[Lending]:
    """The parameters of other stages that this one computes gradients of."""
    return [end for end in stage.boundary.gradients if isinstance(end, Lending)]


def sent_ends(stage: PipelineStage, kind: ActionKind) -> tuple[End, ...]:
    """What an action of a stage gives, for this micro-batch alone."""
    if kind is ActionKind.BACKWARD_WEIGHT:
        return ()
    boundary = stage.boundary
    return boundary.outputs if kind is ActionKind.FORWARD else boundary.gradients[: boundary.sent_back]


def crossings(ends: Sequence[End]) -> list[Crossing]:
    """Those that are values of the traced step for other stages."""
    return [end for end in ends if isinstance(end, Crossing)]


@dataclass
class StepInputs:
    """What a step is given: the graph, which begins with it, and where the placeholders of stages are found there."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    group: fx.Node | None = None
    """The ranks along the pipeline axis, if anything is sent."""
    found: dict[object, fx.Node] = field(default_factory=dict)

    @classmethod
    def of(cls, own: Sequence[PipelineStage], table: ActionTable, rank: int, axis: str) -> StepInputs:
        given = cls()
        for kind in (Shards, RuntimeInput):
            for node in (node for stage in own for node in stage.program.nodes(kind)):
                given._add(data(node).op, node, data(node).op, node.name)
        ends = (end for s in own for kind in ActionKind for end in sent_ends(s, kind))
        received = (end for s in own for end in (*s.boundary.inputs, *s.boundary.tangents))
        others = [end.stage for end in (*ends, *received) if not isinstance(end, int)]
        others += [one.stage for stage in own for one in (*stage.boundary.lends, *borrowed(stage))]
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
        """The inputs of a kind that are new with a micro-batch, or the same in all."""
        for node in stage.program.nodes(Input):
            op = op_of(node, Input)
            changes = op.kind is Kind.DATA and not op.held
            if op.kind is kind and changes is (microbatch is not None) and (key := _key(stage, node, microbatch)):
                name = node.name if microbatch is None else f"m{microbatch}_{node.name}"
                index = key[1] if isinstance(key[1], int) else op.index
                self._add(key, node, replace(op, index=index, microbatch=microbatch), name)

    def _add(self, key: object, like: fx.Node | None, op: Operation, name: str) -> fx.Node:
        if key not in self.found:
            made = self.found[key] = self.graph.create_node("placeholder", name, name=name)
            made.meta = dict(like.meta) if like is not None else {}
            set_data(made, replace(data(like), op=op, phase=Phase.STEP) if like is not None else Data(op, Phase.STEP))
        return self.found[key]

    def to(self, stage: PipelineStage, microbatch: int) -> dict[fx.Node, fx.Node]:
        """Where the placeholders of a stage are for a micro-batch, what other stages give left out."""
        result = {node: self.found[data(node).op] for node in stage.program.nodes(Shards, RuntimeInput)}
        for node in stage.program.nodes(Input):
            if (key := _key(stage, node, microbatch)) is not None:
                result[node] = self.found[key]
        return result


def _key(stage: PipelineStage, node: fx.Node, microbatch: int | None) -> tuple[Kind, object, int | None] | None:
    """What an input of a stage is known by; None for what another stage gives."""
    op = op_of(node, Input)
    if op.kind is Kind.CONSTANT:
        return op.kind, node.name, None
    if op.kind is Kind.TANGENT:
        end, shared = stage.boundary.tangents[op.index], True
    else:
        end, shared = stage.boundary.inputs[op.index], bool(op.held)
    return None if not isinstance(end, int) else (op.kind, end, None if shared else microbatch)
