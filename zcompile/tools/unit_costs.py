"""The cost of each unit of a model in a pipeline: seconds, memory and messages, for one micro-batch.

A traced step is cut into one pipeline stage per unit, and each of these is rewritten as pipeline stages are. The cost
of a stage of several units is the sum of theirs, so every division of the model into stages is forecast from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

from torch import fx

from zcompile.cost.divided import PartCost, PipelineCosts, UnitCost
from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import live_bytes
from zcompile.cost.roofline import aten_cost, bucket_for, line_seconds, operation_seconds
from zcompile.ir.actions import ActionKind
from zcompile.ir.layout import Unit
from zcompile.ir.liveness import last_needs
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Call, Input, Kind, Parameter
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.region import graph_text
from zcompile.passes.common.boundary import Crossing, End, PipelineStage
from zcompile.passes.pipelining.cut_stages import cut_stages, units_in_order, work_of_units
from zcompile.passes.pipelining.unroll_microbatches import lines_of
from zcompile.schedule.default_pipeline import of_stages
from zcompile.schedule.pipeline import Verified
from zcompile.torch_internals.pytree import tree_map_only

PARTS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class UnitStages:
    """A traced step, cut into one pipeline stage per unit.

    Attributes:
        names: Names of the units, in forward order.
        stages: One pipeline stage per unit.
        work: Seconds of each unit, used to balance stages.
        hardware: The hardware that costs are predicted for.
    """

    names: tuple[str, ...]
    stages: tuple[PipelineStage, ...]
    work: tuple[float, ...]
    hardware: Hardware
    _measured: dict[tuple[bool, str], _Measured] = field(default_factory=dict)
    """Costs by whether activations are recomputed, and by structure."""

    @classmethod
    def of(cls, traced: Program, balance: Hardware, hardware: Hardware) -> UnitStages:
        """Cut the traced step of one micro-batch.

        Args:
            traced: The step, laid out for any number of ranks.
            balance: The hardware by which `zcompile.pipelining.program.choose_starts` balances stages.
            hardware: The hardware that costs are predicted for.
        """
        names = units_in_order(traced)
        work = work_of_units(traced, lambda node: operation_seconds(node, balance))
        stages = cut_stages(traced, starts=names[1:])
        return cls(tuple(names), tuple(stages), tuple(work[name] for name in names), hardware)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """One key per unit, equal for units that compute the same."""
        return tuple(structure_of(stage) for stage in self.stages)

    def measured(self, *, checkpoint: bool) -> list[_Measured]:
        """The cost of each stage; stages with equal keys are rewritten once."""
        for stage, key in zip(self.stages, self.keys, strict=True):
            if (checkpoint, key) not in self._measured:
                self._measured[checkpoint, key] = _Measured.rewritten(stage, self.hardware, checkpoint=checkpoint)
        return [self._measured[checkpoint, key] for key in self.keys]


def costs_of_units(
    model: UnitStages,
    *,
    checkpoint: bool = False,
    like: UnitStages | None = None,
    alike: Sequence[int] | None = None,
) -> PipelineCosts:
    """The costs of the units of a traced step.

    Args:
        model: All units, traced for any sizes: only the messages between units are taken from it.
        checkpoint: Save only the input of each unit.
        like: The units of a reduced model, traced for the requested sizes; default: `model`.
        alike: For each unit of `model`, the index of its equal in `like`.

    Raises:
        ProgramError, PipelineError: a pass failed.
    """
    units, numbers = like or model, range(len(model.names)) if alike is None else alike

    def costs(again: bool) -> tuple[UnitCost, ...]:
        measured = units.measured(checkpoint=again)
        pairs = zip(model.stages, numbers, strict=True)
        return tuple(measured[number].cost_of(stage, units.stages[number]) for stage, number in pairs)

    plain = costs(False)
    work = tuple(units.work[number] for number in numbers)
    return PipelineCosts(model.names, work, costs(True) if checkpoint else plain, plain)


def structure_of(stage: PipelineStage) -> str:
    """A key that is equal for stages with the same operations, arguments and types, whatever their names."""
    number = {node: index for index, node in enumerate(stage.program.graph.nodes)}
    lines = [f"{p.shape} {p.dtype} {p.full_dtype} {p.trainable}" for p in stage.program.layout.params]
    params = {param.name: index for index, param in enumerate(stage.program.layout.params)}
    for node in stage.program.graph.nodes:
        op, target = data(node).op, str(node.target)
        if isinstance(op, Parameter):
            target = f"parameter {params[op.name]}"
        elif isinstance(op, Input):
            target = f"{op.kind} {op.index}"
        elif node.op == "get_attr":
            target = graph_text(stage.program.modules[target])
        given = tree_map_only(fx.Node, number.__getitem__, (node.args, node.kwargs))
        texts = "" if node.op == "output" else f"{given}"
        lines.append(f"{node.op} {target} {texts} {data(node).type}")
    results = stage.program.results
    given = ([number[n] for n in results.backward_nodes()], [number.get(n, n) for n in results.outputs])
    return "\n".join([*lines, str(given), str(stage.boundary.shape)])


def _ends(stage: PipelineStage) -> tuple[tuple[End, ...], ...]:
    boundary = stage.boundary
    return boundary.inputs, boundary.tangents, boundary.outputs, boundary.gradients


@dataclass(frozen=True)
class _Measured:
    """The cost of stages of one structure. Boundary values are named by their position, not by stage."""

    units: tuple[Unit, ...]
    parts: Mapping[ActionKind, PartCost]
    own: Mapping[ActionKind, int]
    """Bytes of the stage's own values that are kept after an action."""
    crossing: Mapping[ActionKind, Collection[tuple[str, int]]]
    """Boundary values needed after an action: ("inputs" or another kind, index)."""

    @classmethod
    def rewritten(cls, stage: PipelineStage, hardware: Hardware, *, checkpoint: bool) -> _Measured:
        """The cost of a stage, with its backward both whole and in halves."""
        again: Literal["unit"] | None = "unit" if checkpoint else None
        make = partial(of_stages, partition="min_cut", bucket=bucket_for(hardware), checkpoint=again, at_once=False)
        whole = Verified.traced(stage.program).after(make()).program
        divided = Verified.traced(stage.program).after(make(sent=stage.boundary.sent_back)).program
        parts, own, crossing = dict[ActionKind, PartCost](), dict[ActionKind, int](), {}
        for program, kinds in ((whole, PARTS[:2]), (divided, PARTS[2:])):
            lines = {kind: lines_of(replace(stage, program=program), kind, program) for kind in PARTS}
            live = {node.name: nbytes for node, nbytes in live_bytes(_without_results(program)).items()}
            for kind in kinds:
                seconds = sum(line_seconds(program, line, hardware) for line in lines[kind])
                peak = max((live.get(line.name, 0) for line in lines[kind]), default=0)
                reads = any(op_of(line, Call).units for line in lines[kind] if isinstance(data(line).op, Call))
                parts[kind] = PartCost(seconds, peak, reads)
            before = {line for kind in (ActionKind.FORWARD, kinds[0]) for line in lines[kind]}
            own[kinds[0]], crossing[kinds[0]] = _needed(program, before, set(lines[kinds[1]]))
        # Tangents do not exist yet after the forward, so they are not kept.
        forward = {one for one in crossing[ActionKind.FORWARD] if one[0] != "tangents"}
        return cls(whole.layout.units, parts, own, {**crossing, ActionKind.FORWARD: forward})

    def cost_of(self, stage: PipelineStage, like: PipelineStage) -> UnitCost:
        """The cost of `stage`, with the sizes of the equal stage `like`, which was measured."""
        ends = dict(zip(("inputs", "tangents", "outputs", "gradients"), _ends(stage), strict=True))
        program = like.program

        def held(kind: ActionKind) -> dict[str, int]:
            found = {f"{stage.number}": self.own[kind]} if self.own[kind] else {}
            for where, index in self.crossing[kind]:
                if isinstance(end := ends[where][index], Crossing):
                    found[end.value] = _bytes_at(program, where, index)
            return found

        def taken(where: str) -> dict[str, int]:
            crossing = ((index, end) for index, end in enumerate(ends[where]) if isinstance(end, Crossing))
            return {end.value: _bytes_at(program, where, index) for index, end in crossing}

        def sent(where: str) -> dict[str, tuple[int, int]]:
            return {
                f"{end.value} {end.stage}": (end.stage, _bytes_at(program, where, index))
                for index, end in enumerate(ends[where])
                if isinstance(end, Crossing)
            }

        lent, params = dict[int, int](), stage.program.layout.params
        for one in stage.boundary.lends:
            param = program.layout.params[[param.name for param in params].index(one.param)]
            lent[one.stage] = lent.get(one.stage, 0) + param.numel * param.full_dtype.itemsize
        saved, left = held(ActionKind.FORWARD), held(ActionKind.BACKWARD_INPUT)
        given = taken("inputs"), taken("tangents")
        flops = sum(aten_cost(node)[0] for node in program.graph.nodes if node.op == "call_function")
        return UnitCost(self.units, flops, self.parts, saved, left, *given, sent("outputs"), sent("gradients"), lent)


def _without_results(program: Program) -> Program:
    """The program without outputs, so that only values that it needs itself are alive."""
    program = program.copy()
    set_results(program.graph, outputs=())
    return program


def _needed(
    program: Program, before: Collection[fx.Node], behind: Collection[fx.Node]
) -> tuple[int, set[tuple[str, int]]]:
    """What lines `behind` need from lines `before`: bytes of the stage's own values, and boundary values."""
    results = program.results
    program = _without_results(program)
    names_before, names_behind = ({node.name for node in nodes} for nodes in (before, behind))
    outputs = {node.name: index for index, node in enumerate(results.outputs) if isinstance(node, fx.Node)}
    own, crossing = 0, set[tuple[str, int]]()
    for node, end in last_needs(program).items():
        if node.name in names_before and end.name in names_behind:
            if node.name in outputs:
                crossing.add(("outputs", outputs[node.name]))
            else:
                own += data(node).nbytes
    for node in program.nodes(Input):
        op = op_of(node, Input)
        where = {Kind.DATA: "inputs", Kind.TANGENT: "tangents"}.get(op.kind)
        if where is not None and any(user.name in names_behind for user in _readers(node)):
            crossing.add((where, op.index))
    return own, crossing


def _readers(node: fx.Node) -> set[fx.Node]:
    """All lines that read a value or a view of it."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting += [user] if data(user).view else []
    return found


def _bytes_at(program: Program, where: str, index: int) -> int:
    """Bytes of a boundary value of a stage."""
    if where in ("outputs", "gradients"):
        results = program.results
        value = (results.outputs if where == "outputs" else results.input_gradients)[index]
    else:
        kind = Kind.DATA if where == "inputs" else Kind.TANGENT
        value = next(n for n in program.nodes(Input) if (op_of(n, Input).kind, op_of(n, Input).index) == (kind, index))
    found = data(value).type if isinstance(value, fx.Node) else None
    return found.nbytes if found else 0
