"""The collectives, sends, receives and waits of one rank, in order, read from the printed text of its programs.

    a_gather = all_gather(a)                           ->  joins over dp  "forward: all_gather a (a.weight f32[4, 4])"
    h_sent = send(h, pp, to=1)         # f32[8, 64]    ->  sends over pp to 1  "forward: f32[8, 64]"
    a_full = wait(a_gather)                            ->  waits for the first

A text is parsed as Python and not run. The table of operations defines its lines; others are errors.
Collectives in the model's own code, in regions, are over the tensor-parallel axis.
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
from zcompile.proof.checker_texts import loop_of


class Act(StrEnum):
    """What a rank does at one line. Only a wait blocks."""

    JOIN = "joins"
    """The rank launches a collective of its group."""
    SEND = "sends"
    RECEIVE = "receives"
    WAIT = "waits"
    """The rank blocks until all participants have launched a communication that it has launched."""


@dataclass(frozen=True, slots=True)
class RankEvent:
    """One communication event of a rank."""

    act: Act
    axis: str
    """The axis of its group."""
    what: str
    """The message, equal for all participants; for a wait, the message that it waits for."""
    where: str
    """File and line number."""
    text: str
    """The code of that line."""
    peer: int | None = None
    """For a send or a receive, the other rank's coordinate along the axis."""
    awaits: int | None = None
    """For a wait, the number of the event that launched the communication."""


@dataclass(frozen=True)
class RankEvents:
    """All events of one rank, in order, and the mesh according to its text."""

    axes: Mapping[str, Axis]
    events: tuple[RankEvent, ...]

    def along(self, *axes: str) -> RankEvents:
        """Return the events along some axes, in a mesh of these alone, with strides relative to the smallest one."""
        kept = [number for number, event in enumerate(self.events) if event.axis in axes]
        renumbered = {old: new for new, old in enumerate(kept)}
        events = (self.events[number] for number in kept)
        moved = (e if e.awaits is None else replace(e, awaits=renumbered[e.awaits]) for e in events)
        smallest = min(self.axes[name].stride for name in axes)
        mesh = {n: replace(axis, stride=axis.stride // smallest) for n, axis in self.axes.items() if n in axes}
        return RankEvents(mesh, tuple(moved))

    @property
    def mesh(self) -> str:
        """Its axes, as they are printed."""
        return ", ".join(f"{name}: {axis}" for name, axis in self.axes.items())


def read_events(sources: Mapping[str, str]) -> RankEvents:
    """Read the events of all phases in texts of a program.

    Args:
        sources: Texts by file name, `""` for a text without a file. If several texts define a function, the first
            definition counts.

    Raises:
        ProofError: a text is not a printed program, or has lines that may communicate in unknown ways.
    """
    return _Reader(sources).rank_events()


PHASES = ("forward", "backward", "step")
"""Functions that a rank runs, in this order; `step` has both phases of several micro-batches."""

_TORCH = ("aten.", "ops.", "operator.", "math.", "torch.")
_COMMUNICATING = re.compile(r"ops\.(?P<library>\w*c10d\w*|_dtensor|symm_mem|zcompile)\.(?P<operation>\w+)\.\w+")
_KNOWN_LIBRARIES = ("_c10d_functional", "_dtensor", "zcompile")
_UNEQUAL = ("all_to_all_single",)
"""Collectives in which ranks may send different sizes."""
_VALUE = Input(Kind.DATA, 0)
"""Represents any value whose operation does not matter."""
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
        """Return the margins of the lines of a node that have one."""
        lines = self.lines[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]
        try:
            return [margin for line in lines if (margin := LineMargin.of(line)) is not None]
        except ValueError as error:
            raise self.error(node, f"no type: {error}") from error

    def error(self, node: ast.AST, problem: str) -> ProofError:
        return ProofError(self.where(node), problem, _FIX)


@dataclass(frozen=True)
class _Call:
    """A line of a function: a call, and the names of its results."""

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
        """The code of the line without its margin; only the first line if it is wrapped."""
        return self.function.lines[self.statement.lineno - 1].partition("  # ")[0].strip()

    @property
    def types(self) -> str:
        """The types of its results, with dynamic sizes as they were traced."""
        types = (value.type for margin in self.function.margins(self.statement) for value in margin.types)
        return ", ".join(re.sub(r"[^\[\],\s]+=", "", str(type_)) for type_ in types if type_ is not None)

    @property
    def gives(self) -> list[str]:
        """The names that it binds."""
        nodes = ast.walk(self.target) if self.target is not None else ()
        return [node.id for node in nodes if isinstance(node, ast.Name)]

    def event(self, act: Act, axis: str, what: str = "", **more: Any) -> RankEvent:
        """Return the line as an event."""
        return RankEvent(act, axis, what, self.where, self.text, **more)

    def error(self, problem: str) -> ProofError:
        return self.function.error(self.statement, problem)


@dataclass
class _Body:
    """The events of a function, numbered from its start: the body of a region is repeated at each call."""

    events: list[RankEvent] = field(default_factory=list)
    started: dict[str, int | None] = field(default_factory=dict)
    """By the name of a line's result, the number of the event that the line launched; None if it launched none."""

    def add(self, call: _Call, event: RankEvent | None) -> None:
        """Add the event that `call` launched, if any."""
        self.started |= dict.fromkeys(call.gives, None if event is None else len(self.events))
        self.events += [] if event is None else [event]

    def wait(self, call: _Call, axis: str) -> None:
        """Add the wait for what gave the first argument of `call`."""
        self.events.append(call.event(Act.WAIT, axis, awaits=self.started.get(ast.unparse(call.tree.args[0]))))


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
        """The operation of each value of the phases, by name; a list for a bundle."""
        self.regions: dict[str, _Body] = {}

    def _take(self, file: str, text: str, constants: dict[str, Any]) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            line, why = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
            raise ProofError(f"{file} line {line}".strip(), f"is not valid Python: {why}", _FIX) from error
        lines = text.split("\n")
        for statement in tree.body:
            match statement:
                case ast.FunctionDef(name=name):
                    self.functions.setdefault(name, _Function(file, lines, statement))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    try:
                        constants.setdefault(name, literal(value))
                    except ParseError as error:
                        subject = f"{file} {error.subject}".strip()
                        raise ProofError(subject, f"{name} is not a constant", _FIX) from error

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
        """Add the events of `function` to `body`. A region calls only operations of torch."""
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
                    raise function.error(statement, f"{ast.unparse(statement)!r} is not a statement of a program")

    def _call(self, call: _Call, body: _Body, *, is_phase: bool) -> None:
        name = call.name
        is_region = is_phase and name in self.functions and name not in PHASES
        if name == "unbox":
            for element in call.target.elts if is_phase and isinstance(call.target, ast.Tuple) else []:
                margins = call.function.margins(element)
                given = next((margin.placeholder for margin in margins if margin.placeholder), _VALUE)
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
        """Bind new names to values; the last name is a bundle if the margin says so."""
        for name in names:
            self.names.setdefault(name, given)
        for margin in margins:
            if margin.count is not None and names:
                self.names[names[-1]] = [_VALUE] * margin.count

    def _region(self, call: _Call, body: _Body) -> None:
        """Append the events of a region."""
        if call.name not in self.regions:
            self.regions[call.name] = _Body()
            self._read(self.functions[call.name], self.regions[call.name])
        begin, loop = len(body.events), loop_of(self.functions[call.name].tree)
        turns = f" for {loop['size']} of {loop['rows']} rows" if loop else ""  # in each of which it does the same
        for event in self.regions[call.name].events:
            awaits = None if event.awaits is None else begin + event.awaits
            where = f"{event.where}, run at {call.where}"
            body.events.append(replace(event, what=event.what + turns, where=where, awaits=awaits))

    def _runtime(self, call: _Call, body: _Body) -> None:
        """Handle a call of a runtime function."""
        problem = f"`{call.text}` gives {call.name} arguments it does not take"
        try:
            given = [value_of(argument, self.names) for argument in call.tree.args]
            options = {word.arg: value_of(word.value, self.names) for word in call.tree.keywords if word.arg}
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
        """Return the event that a line launches; None if it does not communicate with other ranks."""
        if isinstance(op, Communication):
            axis = getattr(op, "axis", self.layout.sharded.name)
            if axis not in {averaged.name for averaged in self.layout.averaged}:
                raise call.error(f"gradients are not averaged over {axis}")
            return call.event(Act.JOIN, axis, op.message_text(self.layout))
        group = next((arg for arg in given if isinstance(arg, Group)), None)
        if group is None or not isinstance(op, (Fetch, Send, Receive)):
            return None  # local, or a transfer with the host or a disk
        if not call.types:
            raise call.error("the margin lacks the type of the value sent")
        if isinstance(op, Fetch):
            return call.event(Act.JOIN, group.axis, f"fetch {call.types}")
        peer = op.to if isinstance(op, Send) else op.source
        if peer < 0:
            raise call.error("does not say who the other is")
        message = f" {op.message!r}" * bool(op.message) + f" {op.strides}" * (op.strides is not None)
        act = Act.SEND if isinstance(op, Send) else Act.RECEIVE
        return call.event(act, group.axis, f"{call.types}{message}", peer=peer)

    # -- collectives in the model's code ----------------------------------------------------------------------------

    def _collective(self, call: _Call, body: _Body, library: str, operation: str) -> None:
        """Handle a collective of the model's own code, or the wait for one.

        A wait whose collective is unknown, such as one started in another region, waits for the last collective.
        """
        if library not in _KNOWN_LIBRARIES:
            raise call.error(f"{call.name} is not known: it communicates otherwise than functional collectives do")
        if library == "zcompile":
            self._divided(call, body, operation)
            return
        axis = self._model_axis(call)
        if operation == "wait_tensor":
            body.wait(call, axis.name)
            return
        constants = [ast.unparse(argument) for argument in call.tree.args if _is_constant(argument)]
        types = call.types
        if operation in _UNEQUAL:
            constants, types = constants[-1:], types.partition("[")[0]
        if operation.startswith(("all_gather", "reduce_scatter")) and str(axis.size) not in constants:
            raise call.error(f"is not over the {axis.size} ranks of {axis.name}, as the model's own collectives are")
        body.add(call, call.event(Act.JOIN, axis.name, " ".join([operation, *constants, types])))

    def _divided(self, call: _Call, body: _Body, operation: str) -> None:
        """Handle an operator that divides a value otherwise over an axis; most wait for what they send."""
        given = *call.tree.args, *(word.value for word in call.tree.keywords if word.arg in ("size", "group"))
        *constants, name = [ast.literal_eval(argument) for argument in given if _is_constant(argument)]
        if name not in self.axes:
            raise call.error(f"divides a value over {name!r}, which is not an axis")
        if operation == "wait_all_to_all":
            body.wait(call, name)
        elif operation != "shard":
            what = " ".join([operation, *map(str, constants), call.types])
            body.add(call, call.event(Act.JOIN, name, what))
            if not operation.startswith("start"):
                body.events.append(call.event(Act.WAIT, name, awaits=len(body.events) - 1))

    def _model_axis(self, call: _Call) -> Axis:
        """Return the axis of the model's own collectives: the tensor-parallel axis, or the only axis."""
        found = [axis for axis in self.axes.values() if axis.kind is AxisKind.TENSOR] or list(self.axes.values())
        if len(found) != 1:
            raise call.error("is a collective of the model's own, and of several axes none is a tensor one")
        return found[0]


def _is_constant(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) or (
        isinstance(argument, ast.List) and all(isinstance(element, ast.Constant) for element in argument.elts)
    )


def _resolved(events: list[RankEvent]) -> Iterator[RankEvent]:
    """Yield `events` with the target of every wait resolved, without waits for which nothing was launched."""
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
