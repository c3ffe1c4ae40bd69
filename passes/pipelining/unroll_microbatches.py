"""unroll_microbatches: write out the step of a pipeline rank, action by action.

With the actions 0F0, 0F1, 0B0, 0B1 of a rank that has stage 0:

    h = region_0(a, x)                              # 0F0
    return [h], [h_saved]                           m0_h = region_0(a, m0_x)
                                                    m0_h_sent = send(m0_h, pp, to=1)
    ga = region_1(a, dh, h_saved)           ->      # 0F1
    return [], {"a.weight": ga}                     m1_h = region_0(a, m1_x)
                                                    m1_h_sent = send(m1_h, pp, to=1)
                                                    # 0B0
                                                    wait(m0_h_sent)
                                                    m0_dh_recv = recv(pp, "f32[4, 8]", source=1)
                                                    m0_dh = wait(m0_dh_recv)
                                                    m0_ga = region_1(a, m0_dh, m0_h_saved)
                                                    ...

A parameter that several stages read is lent by its home stage once per step, before everything else; the gradients that
the other stages compute of it come back as a sum over the micro-batches:

    tied_copy = region_2(a)                              stage1_a_recv = recv(pp, "f32[8, 8]", source=0)
    tied_copy_sent = send(tied_copy, pp, to=1)           ...
    ...                                                  a_total = plus(m0_a_grad, m1_a_grad)
    a_total_recv = recv(pp, "f32[8, 8]", source=1)       a_total_sent = send(a_total, pp, to=0)

A rank receives messages in the order in which the other rank sends them, whichever it needs first: two ranks share one
queue per direction. A sent value is held until its send is waited for: at the latest in the backward of its
micro-batch, and earlier to bound the number of messages in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from zcompile.ir.actions import IN_FLIGHT, Action, ActionKind, ActionTable
from zcompile.ir.operation import Data, Operation, Phase, data, op_of, set_data
from zcompile.ir.ops import (
    Call,
    Group,
    Input,
    Kind,
    Plus,
    Receive,
    Results,
    Send,
    Shards,
    WaitReceive,
    WaitSend,
    Write,
    items_of,
)
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.region import Region, region_name
from zcompile.ir.tensor_type import TensorType
from zcompile.passes.common.boundary import (
    Crossing,
    End,
    Lending,
    PipelineStage,
    StageMessage,
    StepInputs,
    collected,
    is_last,
    messages_between,
    sent_ends,
    shared_parameter_value,
)


def unroll_microbatches(stages: Sequence[PipelineStage], *, table: ActionTable, rank: int, axis: str) -> Program:
    """Return the program of a step for the rank with coordinate `rank` along the pipeline `axis`.

    It returns each micro-batch's results, and per parameter a list of gradients: by micro-batch, then sums from others.

    Args:
        stages: All stages in order; the stages of this rank with outlined regions.
        table: The actions of all ranks.
        rank: This rank's coordinate along the axis.
        axis: The name of the pipeline axis.
    """
    own = [stages[number] for number in table.stages_of(rank)]
    step = _Step(stages, table, rank, StepInputs.of(own, table, rank, axis), *_merged(own))
    for stage in own:
        step.lend(stage)
    for action in table.rows[rank]:
        step.run(action)
    return step.finished()


def _merged(own: Sequence[PipelineStage]) -> tuple[Program, dict[int, str]]:
    """Merge the programs of a rank's stages, except for their graphs: all their units, equal regions once.

    Also return the name of each region in the merged program, by the `id` of the stage's region.
    """
    programs, regions = [stage.program for stage in own], dict[str, Region]()
    lent = [stage.lent for stage in own if stage.lent is not None]
    called, by_key = dict[int, str](), dict[str, str]()
    for region in (region for program in (*programs, *lent) for region in program.regions.values()):
        name = called[id(region)] = by_key.setdefault(region.key(), region_name(len(regions), region.rows))
        if name not in regions:
            regions[name] = replace(region, name=name)
    first = programs[0]
    merged = replace(
        first,
        layout=first.layout.with_units(tuple(unit for program in programs for unit in program.layout.units)),
        regions=regions,
        constants={name: value for program in programs for name, value in program.constants.items()},
        modules={name: module for program in programs for name, module in program.modules.items()},
        unused=frozenset[str]().union(*(program.unused for program in programs)),
        notes=tuple(dict.fromkeys(note for program in programs for note in program.notes)),
        phases=(Phase.STEP,),
    )
    return merged, called


@dataclass
class _Step:
    """The step of one rank, under construction."""

    stages: Sequence[PipelineStage]
    table: ActionTable
    rank: int
    given: StepInputs
    merged: Program
    called: dict[int, str]
    """The name of each region in `merged`, by the `id` of the stage's region."""
    values: dict[tuple[int, int], dict[fx.Node, fx.Node]] = field(default_factory=dict)
    """By stage and micro-batch, a map from the stage's nodes to those of the step."""
    made: dict[StageMessage, fx.Node] = field(default_factory=dict)
    """Messages whose values are available: received, or from a stage of this rank."""
    arriving: dict[StageMessage, fx.Node] = field(default_factory=dict)
    """The line that starts each receive."""
    queues: dict[int, list[StageMessage]] = field(default_factory=dict)
    """The messages of each sending rank whose receives have not started yet."""
    leaving: list[tuple[Action | str, int, fx.Node]] = field(default_factory=list)
    """Sends that are not waited for yet: the action that sends, the receiving rank, and the line of the send."""
    outputs: list[fx.Node] = field(default_factory=list)
    gradients: dict[str, list[fx.Node]] = field(default_factory=dict)
    totals: dict[StageMessage, fx.Node] = field(default_factory=dict)
    """Sums of gradients of parameters that other stages keep."""

    def lend(self, stage: PipelineStage) -> None:
        """Write the lines that lend the values of a stage's shared parameters to other stages, once per step."""
        if stage.lent is None:
            return
        values = {node: self.given.placeholders[data(node).op] for node in stage.lent.nodes(Shards)}
        for node in lines_of(stage, ActionKind.FORWARD, stage.lent):
            self._copy("begin", node, values, stage.lent)
        names = dict.fromkeys(lending.value for lending in stage.boundary.lends)
        copies = {name: values[node] for name, node in zip(names, stage.lent.results.outputs, strict=True)}
        for lending in stage.boundary.lends:
            self._hand_over("begin", shared_parameter_value(lending), copies[lending.value])

    def run(self, action: Action) -> None:
        """Write the lines of an action: its waits, its compute, its sends."""
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        results, values = stage.program.results, self.values.setdefault(key, {})
        if action.kind is ActionKind.FORWARD:
            values |= self.given.to(stage, action.microbatch)
        self._end_sending(action)
        self._take(action, stage, values)
        for node in lines_of(stage, action.kind, stage.program):
            self._copy(action, node, values, stage.program)
        given = results.outputs if action.kind is ActionKind.FORWARD else results.input_gradients
        for end, value in zip(sent_ends(stage, action.kind), given, strict=False):
            self._give(action, stage, end, values[value])
        if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            for name, gradient in results.gradients.items():
                self.gradients.setdefault(name, []).append(values[gradient])
            for end, value in zip(stage.boundary.gradients, results.input_gradients, strict=True):
                if isinstance(end, Lending):
                    self._add_up(action, end, values[value])

    def _copy(self, action: Action | str, node: fx.Node, values: dict[fx.Node, fx.Node], program: Program) -> None:
        """Write a line of a stage's `program` for the micro-batch of `action`."""
        meta = data(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if isinstance(meta.op, Call):
            region = self.called[id(program.regions[meta.op.region])]
            meta, args = replace(meta, op=replace(meta.op, region=region)), (region, *args[1:])
        name = f"m{action.microbatch}_{node.name}" if isinstance(action, Action) else node.name
        values[node] = copied = self.given.graph.create_node(node.op, node.target, args, kwargs, name=name)
        copied.meta = dict(node.meta)
        set_data(copied, replace(meta, phase=Phase.STEP, action=str(action)))

    def _line(
        self,
        action: Action | str,
        args: tuple[object, ...],
        op: Operation,
        name: str,
        like: fx.Node | None = None,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        """Write a line that is in no stage's program; its result has the type of `like`, in `dtype` if given."""
        type_, source = (_type_in(dtype, like), data(like).source) if like is not None else (None, "")
        meta = Data(op, Phase.STEP, type_, source, view=isinstance(op, (Send, WaitReceive)), action=str(action))
        node = replace(self.merged, graph=self.given.graph).add(args, meta, name)
        if like is not None:
            value = like.meta.get("val")
            node.meta["val"] = value if dtype is None or value is None else value.to(dtype)
        return node

    # -- between stages -------------------------------------------------------------------------------------------

    def _take(self, action: Action, stage: PipelineStage, values: dict[fx.Node, fx.Node]) -> None:
        """Map the placeholders of an action that other stages fill to the values received from these."""
        kind = Kind.DATA if action.kind is ActionKind.FORWARD else Kind.TANGENT
        for node in stage.program.nodes(Input) if action.kind is not ActionKind.BACKWARD_WEIGHT else ():
            end = _end_taken(stage, op_of(node, Input))
            if op_of(node, Input).kind is not kind or end is None or isinstance(end, int):
                continue
            message = StageMessage(end.value, stage.number, action.microbatch)
            if isinstance(end, Lending):
                message = shared_parameter_value(replace(end, stage=stage.number))
            if message not in self.made:
                self.made[message] = self._arrived(action, self.table.rank_of(end.stage), message)
            values[node] = self.made[message]

    def _arrived(self, action: Action | str, sender: int, message: StageMessage) -> fx.Node:
        """Return the received value of `message`, after starting the receives of all earlier messages of `sender`."""
        if sender not in self.queues:
            self.queues[sender] = messages_between(self.stages, self.table, sender, self.rank)
        while message not in self.arriving:
            following = self.queues[sender].pop(0)
            like = self._placeholder(following)
            op, dtype = Receive(self.axis, sender, str(following), _strides(like)), self._sum_dtype(following)
            args = (self.given.group, str(_type_in(dtype, like)))
            name = f"{following.prefix}{self._name_of(following, like)}_recv"
            self.arriving[following] = self._line(action, args, op, name, like, dtype)
        like = self._placeholder(message)
        name = message.prefix + self._name_of(message, like)
        return self._line(action, (self.arriving[message],), WaitReceive(), name, like, self._sum_dtype(message))

    def _sum_dtype(self, message: StageMessage) -> torch.dtype | None:
        """Return the dtype of a received sum of gradients, if it is not that of the gradients, else None."""
        if message.microbatch is not None or self.table.microbatches == 1:
            return None
        stage = self.stages[message.to]
        lendings = (s for s in stage.boundary.collects if collected(s, s.stage, stage.number) == message)
        return next((stage.program.layout.param(lending.param).sum_dtype for lending in lendings), None)

    def _name_of(self, message: StageMessage, taken: fx.Node) -> str:
        """Return the name of a received value: the name of the input that takes it, else the message's."""
        return taken.name if isinstance(data(taken).op, Input) else message.value

    def _placeholder(self, message: StageMessage) -> fx.Node:
        """Return the input that takes a message; for a sum of gradients, the copy of the lent parameter."""
        stage = self.stages[message.to]
        for node in stage.program.nodes(Input):
            end = _end_taken(stage, op_of(node, Input))
            if isinstance(end, Crossing) and end.value == message.value:
                return node
            if isinstance(end, Lending) and shared_parameter_value(replace(end, stage=message.to)) == message:
                return node
        names = dict.fromkeys(lending.value for lending in stage.boundary.lends)
        assert stage.lent is not None, "a stage that collects gradients has lent a value"
        copies: dict[str, fx.Node] = dict(zip(names, stage.lent.results.outputs, strict=True))
        return next(copies[s.value] for s in stage.boundary.collects if collected(s, s.stage, stage.number) == message)

    @property
    def axis(self) -> str:
        assert self.given.group is not None, "messages are between ranks"
        return op_of(self.given.group, Group).axis

    def _give(self, action: Action, stage: PipelineStage, end: End, value: fx.Node) -> None:
        """Handle a result of an action: write a buffer, return a result of the step, or send to another stage."""
        if isinstance(end, int) and end in stage.boundary.written:
            buffer = self.given.placeholders[Kind.DATA, stage.boundary.written[end], None]
            self._line(action, (buffer, value), Write(), f"{value.name}_write")
            return
        if not isinstance(end, Crossing):
            self.outputs.append(value)
            return
        self._hand_over(action, StageMessage(end.value, end.stage, action.microbatch), value)

    def _hand_over(self, action: Action | str, message: StageMessage, value: fx.Node) -> None:
        """Pass a value to another stage: send it, unless that stage is on this rank, too."""
        to = self.table.rank_of(message.to)
        if to == self.rank:
            self.made[message] = value
            return
        op = Send(self.axis, to, str(message), _strides(self._placeholder(message)))
        sent = self._line(action, (value, self.given.group), op, f"{value.name}_sent", value)
        self.leaving.append((action, to, sent))

    def _add_up(self, action: Action, lending: Lending, gradient: fx.Node) -> None:
        """Add a gradient of a parameter of another stage to the sum so far; after the last, hand the sum over."""
        message = collected(lending, action.stage, lending.stage)
        if (total := self.totals.get(message)) is not None:
            dtype = self._sum_dtype(message)
            op = Plus(dtype if data(total).type != _type_in(dtype, total) else None)
            gradient = self._line(action, (total, gradient), op, f"{message.value}_total", gradient, dtype)
            set_data(gradient, replace(data(gradient), view=False))
        self.totals[message] = gradient
        if is_last(action, self.table):
            self._hand_over(action, message, gradient)

    def _end_sending(self, action: Action) -> None:
        """Wait for sends that have completed by now: lent values, outputs whose gradient arrives, and the oldest."""
        arrived = []
        if action.kind is not ActionKind.FORWARD:
            early = ("begin", replace(action, kind=ActionKind.FORWARD))
            arrived += [send for send in self.leaving if send[0] in early]
        simple = self.table.stages == len(self.table.rows)
        if action.sends_back or (simple and action.kind is ActionKind.FORWARD):
            sent = [s for s in self.leaving if isinstance(s[0], Action) and s[0].sends_back is action.sends_back]
            arrived += sent[: max(len(sent) - IN_FLIGHT[simple], 0)]
        for send in dict.fromkeys(arrived):
            self.leaving.remove(send)
            self._line(action, (send[2],), WaitSend(), f"{send[2].name}_end")

    def finished(self) -> Program:
        """Receive other stages' gradients of this rank's parameters, wait for all sends, and return the program."""
        for stage in (self.stages[number] for number in self.table.stages_of(self.rank)):
            for lending in stage.boundary.collects:
                message = collected(lending, lending.stage, stage.number)
                if message not in self.made:
                    self.made[message] = self._arrived("end", self.table.rank_of(lending.stage), message)
                self.gradients[lending.param].append(self.made[message])
        for _, _, sent in self.leaving:
            self._line("end", (sent,), WaitSend(), f"{sent.name}_end")
        set_results(self.given.graph, outputs=self.outputs, gradients=self.gradients)
        set_data(self.given.graph.output_node(), Data(Results(), Phase.STEP))
        return replace(self.merged, graph=self.given.graph)


def _end_taken(stage: PipelineStage, op: Input) -> End | None:
    """Return the end that an input of a stage comes from; None for a constant."""
    ends = {Kind.DATA: stage.boundary.inputs, Kind.TANGENT: stage.boundary.tangents}.get(op.kind)
    return None if ends is None else ends[op.index]


def lines_of(stage: PipelineStage, kind: ActionKind, program: Program) -> list[fx.Node]:
    """Return the lines of a stage's `program` that an action runs."""
    if kind is ActionKind.FORWARD:
        return program.body(Phase.FORWARD)
    lines = program.body(Phase.BACKWARD)
    if kind is ActionKind.BACKWARD:
        return lines
    first = _for_other_stages(program, stage.boundary.sent_back)
    return [node for node in lines if (node in first) is (kind is ActionKind.BACKWARD_INPUT)]


def _for_other_stages(program: Program, sent: int) -> set[fx.Node]:
    """Return the lines that compute the first `sent` gradients of inputs, with all items of their calls."""
    needed = {value for value in program.results.input_gradients[:sent] if isinstance(value, fx.Node)}
    for node in reversed(program.body(Phase.BACKWARD)):
        if node in needed:
            needed.update(node.all_input_nodes)
    calls = {node for node in needed if isinstance(data(node).op, Call)}
    return needed | {item for call in calls for item in items_of(call)}


def _type_in(dtype: torch.dtype | None, value: fx.Node) -> TensorType | None:
    """Return the type of a value, with `dtype` in place of its own if given."""
    type_ = data(value).type
    return type_ if dtype is None or type_ is None else replace(type_, dtype=dtype)


def _strides(placeholder: fx.Node) -> tuple[int, ...] | None:
    """Return the strides in which a value is received; None for contiguous, also if the value is not dense."""
    value = placeholder.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return None
    strides, dense = tuple(map(int, value.stride())), 1
    for stride, size in sorted(
        (stride, int(size)) for stride, size in zip(strides, value.shape, strict=True) if size > 1
    ):
        if stride != dense:
            return None
        dense *= size
    return strides
