"""What the step of a pipeline's rank is given, of all its stages and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from zcompile.ir.actions import ActionKind, ActionTable
from zcompile.ir.operation import Data, Operation, Phase, data, op_of, set_data
from zcompile.ir.ops import Group, Input, Kind, RuntimeInput, Shards
from zcompile.passes.common.boundary import PipelineStage
from zcompile.passes.common.stage_messages import borrowed, ends_given


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
        ends = (end for s in own for kind in ActionKind for end in ends_given(s, kind))
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
