"""What one rank sends, receives and waits for, in order, read from the printed text of what it runs.

    a_gather = all_gather(a)                           ->  joins over dp  "forward: all_gather a (a.weight f32[4, 4])"
    h_sent = send(h, pp, to=1)         # f32[8, 64]    ->  sends over pp to 1  "forward: f32[8, 64]"
    a_full = wait(a_gather)                            ->  waits for the first

A text is read as Python and not run. What its lines mean is in the table of operations; what that lacks is an error.
Collectives of the model's own code, in regions, are over the axis of tensor parallelism.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from zcompile.errors import ParseError, ProofError
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.operation import Operation, Role, takes
from zcompile.ir.ops import FUNCTIONS, Communication, Fetch, Group, Input, Kind, Receive, Send, operation
from zcompile.ir.parser import LineMargin, layout_of, literal, value_of


class Act(StrEnum):
    """What a rank does at one line. Only a wait blocks."""

    JOIN = "joins"
    """It launches a collective of its group."""
    SEND = "sends"
    RECEIVE = "receives"
    WAIT = "waits"
    """It blocks until all who take part in something that it has launched have launched it."""


@dataclass(frozen=True, slots=True)
class RankEvent:
    """One thing that a rank does."""

    act: Act
    axis: str
    """The axis that its group is along."""
    what: str
    """The message: equal on all who take part. Of a wait, what it waits for."""
    where: str
    """File and line."""
    text: str
    """That line."""
    peer: int | None = None
    """The place along the axis of who receives what is sent, or sends what is received."""
    awaits: int | None = None
    """Of a wait: the number of the event that has launched what it waits for."""


@dataclass(frozen=True)
class RankEvents:
    """All that one rank does, in order, and the mesh as it sees it."""

    axes: Mapping[str, Axis]
    events: tuple[RankEvent, ...]

    def along(self, *axes: str) -> RankEvents:
        """What it does along some axes, in a mesh of these alone: those behind them are left out."""
        kept = [number for number, event in enumerate(self.events) if event.axis in axes]
        places = {number: place for place, number in enumerate(kept)}
        events = (self.events[number] for number in kept)
        moved = (e if e.awaits is None else replace(e, awaits=places[e.awaits]) for e in events)
        near = min(self.axes[name].stride for name in axes)
        mesh = {n: replace(axis, stride=axis.stride // near) for n, axis in self.axes.items() if n in axes}
        return RankEvents(mesh, tuple(moved))

    @property
    def mesh(self) -> str:
        """Its axes, as they are printed."""
        return ", ".join(f"{name}: {axis}" for name, axis in self.axes.items())


def read_events(sources: Mapping[str, str]) -> RankEvents:
    """The events of the phases that are in texts of programs.

    Args:
        sources: Texts by the names of their files, `""` for a text without a file. Of a function that stands in
            several, the first is the one that runs.

    Raises:
        ProofError: a text is no printed program, or has lines of which it is not known whether they communicate.
    """
    return _Reader(sources).rank_events()


PHASES = ("forward", "backward", "step")
"""Functions that a rank runs, in this order; `step` is both, as a schedule of micro-batches may write them."""

_TORCH = ("aten.", "ops.", "operator.", "math.", "torch.")
_COMMUNICATING = re.compile(r"ops\.(?P<library>\w*c10d\w*|_dtensor|symm_mem)\.(?P<operation>\w+)\.\w+")
_KNOWN_LIBRARIES = ("_c10d_functional", "_dtensor")
_UNEQUAL = ("all_to_all_single",)
"""Collectives of which each rank may send another size."""
_VALUE = Input(Kind.DATA, 0)
"""What stands for a value of which it does not matter what gives it."""
_FIX = "give the texts that zcompile has printed, of one version and unedited"


@dataclass(frozen=True)
class _Function:
    """A function of a text, and the lines of that text."""

    file: str
    lines: list[str]
    tree: ast.FunctionDef

    def where(self, node: ast.AST) -> str:
        return f"{self.file} line {node.lineno}".strip()  # type: ignore[attr-defined]

    def margins(self, node: ast.AST) -> list[LineMargin]:
        """What stands behind the lines of a node, of those that have something there."""
        lines = self.lines[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]
        try:
            return [margin for line in lines if (margin := LineMargin.of(line)) is not None]
        except ValueError as error:
            raise self.error(node, f"no type: {error}") from error

    def error(self, node: ast.AST, problem: str) -> ProofError:
        return ProofError(self.where(node), problem, _FIX)


@dataclass(frozen=True)
class _Call:
    """A line of a function: a call, and the names of what it gives."""

    function: _Function
    tree: ast.Call
    statement: ast.stmt
    target: ast.expr | None = None

    @property
    def name(self) -> str:
        return ast.unparse(self.tree.func)

    @property
    def where(self) -> str:
        return self.function.where(self.statement)

    @property
    def text(self) -> str:
        """Its code without its margin; of one that is broken, the first line."""
        return self.function.lines[self.statement.lineno - 1].partition("  # ")[0].strip()

    @property
    def types(self) -> str:
        """The types of the values that it gives, sizes that vary as they were traced."""
        types = (one.type for margin in self.function.margins(self.statement) for one in margin.types)
        return ", ".join(re.sub(r"[^\[\],\s]+=", "", str(type_)) for type_ in types if type_ is not None)

    @property
    def gives(self) -> list[str]:
        """The names that it binds."""
        nodes = ast.walk(self.target) if self.target is not None else ()
        return [node.id for node in nodes if isinstance(node, ast.Name)]

    def event(self, act: Act, axis: str, what: str = "", **more: Any) -> RankEvent:
        """It as an event."""
        return RankEvent(act, axis, what, self.where, self.text, **more)

    def error(self, problem: str) -> ProofError:
        return self.function.error(self.statement, problem)


@dataclass
class _Body:
    """The events of a function. Waits count from its begin: the body of a region is run wherever it is called."""

    events: list[RankEvent] = field(default_factory=list)
    started: dict[str, int | None] = field(default_factory=dict)
    """By the name of what stands for it: the number of the event that has launched it; None for what sends nothing."""

    def add(self, call: _Call, event: RankEvent | None) -> None:
        """What `call` has launched, if anything."""
        self.started |= dict.fromkeys(call.gives, None if event is None else len(self.events))
        self.events += [] if event is None else [event]


class _Reader:
    def __init__(self, sources: Mapping[str, str]) -> None:
        constants: dict[str, Any] = {}
        self.functions: dict[str, _Function] = {}
        for file, text in sources.items():
            self._take(file, text, constants)
        if "axes" not in constants:
            raise ProofError("the text", "says nothing of the axes of its mesh", _FIX)
        try:
            self.layout = layout_of(constants)
        except ParseError as error:
            raise ProofError(error.subject, error.problem, error.fix) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ProofError("the head of the text", "says no layout of a program", _FIX) from error
        self.axes = {axis.name: axis for axis in self.layout.axes}
        self.names: dict[str, Operation | list[Operation]] = {}
        """What gives the values of the phases, by their names: for each value of a bundle."""
        self.regions: dict[str, _Body] = {}

    def _take(self, file: str, text: str, constants: dict[str, Any]) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
            raise ProofError(f"{file} line {line}".strip(), f"is no Python: {why}", _FIX) from error
        lines = text.split("\n")
        for statement in tree.body:
            match statement:
                case ast.FunctionDef(name=name):
                    self.functions.setdefault(name, _Function(file, lines, statement))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    try:
                        constants.setdefault(name, literal(value))
                    except ParseError as error:
                        raise ProofError(f"{file} {error.subject}".strip(), f"{name} is no constant", _FIX) from error

    def rank_events(self) -> RankEvents:
        phases = [name for name in PHASES if name in self.functions]
        if not phases or phases == ["backward"]:
            raise ProofError("the text", f"has none of the functions {', '.join(PHASES)} to begin with", _FIX)
        body = _Body()
        for phase in phases:
            begin = len(body.events)
            self._read(self.functions[phase], body, is_phase=True)
            body.events[begin:] = [replace(event, what=f"{phase}: {event.what}") for event in body.events[begin:]]
        return RankEvents(self.axes, tuple(_resolved(body.events)))

    # -- lines ----------------------------------------------------------------------------------------------------

    def _read(self, function: _Function, body: _Body, *, is_phase: bool = False) -> None:
        """Add the events of `function` to `body`. A region calls operations of torch only."""
        if not isinstance(function.tree.body[-1], ast.Return):
            raise function.error(function.tree.body[-1], f"{function.tree.name} ends without a return: it is cut off")
        for statement in function.tree.body:
            match statement:
                case ast.Assign(targets=[target], value=ast.Call() as tree):
                    self._call(_Call(function, tree, statement, target), body, is_phase=is_phase)
                case ast.Expr(value=ast.Call() as tree):
                    self._call(_Call(function, tree, statement), body, is_phase=is_phase)
                case ast.Return() | ast.Delete():
                    pass
                case _:
                    raise function.error(statement, f"{ast.unparse(statement)!r} is no statement of a program")

    def _call(self, call: _Call, body: _Body, *, is_phase: bool) -> None:
        name = call.name
        is_region = is_phase and name in self.functions and name not in PHASES
        if name == "unbox":
            for element in call.target.elts if is_phase and isinstance(call.target, ast.Tuple) else []:
                margins = call.function.margins(element)
                given = next((one.placeholder for one in margins if one.placeholder), _VALUE)
                self._bind([ast.unparse(element)], margins, given)
        elif is_region or name.startswith(_TORCH) or name == "graph":
            if is_phase:
                self._bind(call.gives, call.function.margins(call.statement))
            if is_region:
                self._region(call, body)
            elif found := _COMMUNICATING.fullmatch(name):
                self._collective(call, body, found["library"], found["operation"])
        elif is_phase and name in FUNCTIONS:
            self._runtime(call, body)
        else:
            raise call.error(f"{name} is not known: it may communicate")

    def _bind(self, names: Sequence[str], margins: Sequence[LineMargin], given: Operation = _VALUE) -> None:
        """Let names that are new stand for values: the last for a bundle, where a margin says so."""
        for name in names:
            self.names.setdefault(name, given)
        for margin in margins:
            if margin.count is not None and names:
                self.names[names[-1]] = [_VALUE] * margin.count

    def _region(self, call: _Call, body: _Body) -> None:
        """The events of a region, behind those that have been."""
        if call.name not in self.regions:
            self.regions[call.name] = _Body()
            self._read(self.functions[call.name], self.regions[call.name])
        begin = len(body.events)
        for event in self.regions[call.name].events:
            awaits = None if event.awaits is None else begin + event.awaits
            body.events.append(replace(event, where=f"{event.where}, run at {call.where}", awaits=awaits))

    def _runtime(self, call: _Call, body: _Body) -> None:
        """A call of a function of the runtime."""
        problem = f"`{call.text}` gives {call.name} what it does not take"
        try:
            given = [value_of(argument, self.names) for argument in call.tree.args]
            options = {one.arg: value_of(one.value, self.names) for one in call.tree.keywords if one.arg}
            op = operation(call.name, given, options, self.layout)
        except ParseError as error:
            raise call.error(error.problem) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise call.error(problem) from error
        if not takes(type(op), tuple(given)):
            raise call.error(problem)
        self.names |= dict.fromkeys(call.gives, op)
        if op.role is not Role.WAIT:
            body.add(call, self._started(call, op, given))
        elif (awaited := body.started[ast.unparse(call.tree.args[0])]) is not None:
            body.events.append(call.event(Act.WAIT, body.events[awaited].axis, awaits=awaited))

    def _started(self, call: _Call, op: Operation, given: Sequence[Any]) -> RankEvent | None:
        """What a line launches; None if that is no communication."""
        if isinstance(op, Communication):
            axis = getattr(op, "axis", self.layout.sharded.name)
            if axis not in {one.name for one in self.layout.averaged}:
                raise call.error(f"gradients are not averaged over {axis}")
            return call.event(Act.JOIN, axis, op.message_text(self.layout))
        group = next((one for one in given if isinstance(one, Group)), None)
        if group is None or not isinstance(op, (Fetch, Send, Receive)):
            return None  # what stays here, or comes from the host or a disk
        if not call.types:
            raise call.error("the type of what is sent does not stand in the margin")
        if isinstance(op, Fetch):
            return call.event(Act.JOIN, group.axis, f"fetch {call.types}")
        peer = op.to if isinstance(op, Send) else op.source
        if peer < 0:
            raise call.error("does not say who the other is")
        message = f" {op.message!r}" * bool(op.message) + f" {op.strides}" * (op.strides is not None)
        act = Act.SEND if isinstance(op, Send) else Act.RECEIVE
        return call.event(act, group.axis, f"{call.types}{message}", peer=peer)

    # -- the model's own --------------------------------------------------------------------------------------------

    def _collective(self, call: _Call, body: _Body, library: str, operation: str) -> None:
        """A collective of the model's own code, or the wait for one.

        A wait for what is not known to come from one, as where that was started in another region, waits for the last.
        """
        if library not in _KNOWN_LIBRARIES:
            raise call.error(f"{call.name} is not known: it communicates otherwise than functional collectives do")
        axis = self._model_axis(call)
        if operation == "wait_tensor":
            body.events.append(call.event(Act.WAIT, axis.name, awaits=body.started.get(ast.unparse(call.tree.args[0]))))
            return
        constants = [ast.unparse(argument) for argument in call.tree.args if _is_constant(argument)]
        types = call.types
        if operation in _UNEQUAL:
            constants, types = constants[-1:], types.partition("[")[0]
        if operation.startswith(("all_gather", "reduce_scatter")) and str(axis.size) not in constants:
            raise call.error(f"is not over the {axis.size} ranks of {axis.name}, as the model's own collectives are")
        body.add(call, call.event(Act.JOIN, axis.name, " ".join([operation, *constants, types])))

    def _model_axis(self, call: _Call) -> Axis:
        """The axis that the model's own collectives are along: that of tensor parallelism, or the only one."""
        found = [axis for axis in self.axes.values() if axis.kind is AxisKind.TENSOR] or list(self.axes.values())
        if len(found) != 1:
            raise call.error("is a collective of the model's own, and of several axes none is a tensor one")
        return found[0]


def _is_constant(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) or (
        isinstance(argument, ast.List) and all(isinstance(element, ast.Constant) for element in argument.elts)
    )


def _resolved(events: list[RankEvent]) -> Iterator[RankEvent]:
    """`events`, in which every wait knows what it waits for; what nothing is started for is left out."""
    last: dict[str, int] = {}
    kept: dict[int, int] = {}
    result: list[RankEvent] = []
    for number, event in enumerate(events):
        if event.act is Act.WAIT:
            awaits = last.get(event.axis) if event.awaits is None else kept[event.awaits]
            if awaits is None:
                continue
            event = replace(event, awaits=awaits, what=result[awaits].what)
        else:
            last[event.axis] = len(result)
        kept[number] = len(result)
        result.append(event)
    yield from result
