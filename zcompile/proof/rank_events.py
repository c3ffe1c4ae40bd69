"""What one rank sends, receives and waits for, in order, read from the printed text of what it runs.

    a_gather = all_gather(a)                           ->  joins over dp  "forward: all_gather a (a.weight f32[4, 4])"
    h_sent = send(h, pp, to=1)         # f32[8, 64]    ->  sends over pp to 1  "forward: f32[8, 64]"
    a_full = wait(a_gather)                            ->  waits for the first

A text is read as Python and not run. What may communicate in it, and how, are the tables `_LINES` and `_SILENT`; what
they lack is an error. Collectives of the model's own code, in regions, are over the axis of tensor parallelism.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from zcompile.errors import ProofError
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.spelling import counted
from zcompile.ir.tensor_type import dtype_of, dtype_text


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


@dataclass(frozen=True, slots=True)
class _Line:
    """How a line that starts communication is read."""

    act: Act = Act.JOIN
    argument: int = 0
    """Which argument says where to: a unit, or a group."""
    peer: str = ""
    """The keyword that says the place of the other along the axis."""
    of_units: bool = False
    reduces: bool = False
    """True if it is given a list of gradients."""


_LINES = {
    "all_gather": _Line(of_units=True),
    "gather_ahead": _Line(of_units=True),
    "reduce_scatter": _Line(of_units=True, reduces=True),
    "all_reduce": _Line(of_units=True, reduces=True),
    "fetch": _Line(argument=1),
    "send": _Line(Act.SEND, argument=1, peer="to"),
    "recv": _Line(Act.RECEIVE, peer="source"),
}
_SILENT = frozenset({"release", "update", "accumulate", "plus", "copy", "write", "store", "offload"})
"""What sends nothing."""
_TORCH = ("aten.", "ops.", "operator.", "math.", "torch.")
_COMMUNICATING = re.compile(r"ops\.(?P<library>\w*c10d\w*|_dtensor|symm_mem)\.(?P<operation>\w+)\.\w+")
_KNOWN_LIBRARIES = ("_c10d_functional", "_dtensor")
_UNEQUAL = ("all_to_all_single",)
"""Collectives of which each rank may send another size."""
_TYPES = re.compile(r"(?:=?&?\w+\[[^\]]*\](?:@\d+)?(?:, )?)*")
_GIVEN = re.compile(r"(?<!full )(?<!secondary )\b(?:unit|group) (\S+)$")
_FIX = "give the texts that zcompile has printed, of one version and unedited"


@dataclass(frozen=True)
class _Function:
    """A function of a text, and the lines of that text."""

    file: str
    lines: list[str]
    tree: ast.FunctionDef

    def where(self, node: ast.AST) -> str:
        return f"{self.file} line {node.lineno}".strip()  # type: ignore[attr-defined]

    def margins(self, node: ast.AST) -> list[str]:
        """What stands behind the lines of a node, of those that have something there."""
        lines = self.lines[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]
        return [margin for _, mark, margin in (line.rpartition("  # ") for line in lines) if mark]

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
        found = (_TYPES.match(margin) for margin in self.function.margins(self.statement))
        texts = [text for match in found if match for text in re.findall(r"\w+\[[^\]]*\]", match[0])]
        return ", ".join(re.sub(r"[^\[\],\s]+=", "", text) for text in texts)

    @property
    def options(self) -> dict[str, str]:
        return {keyword.arg: ast.unparse(keyword.value) for keyword in self.tree.keywords if keyword.arg}

    @property
    def gives(self) -> list[str]:
        """The names that it binds."""
        nodes = ast.walk(self.target) if self.target is not None else ()
        return [node.id for node in nodes if isinstance(node, ast.Name)]

    def argument(self, index: int) -> str:
        """An argument's text; empty if there is none."""
        return ast.unparse(self.tree.args[index]) if index < len(self.tree.args) else ""

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
        self.constants: dict[str, Any] = {}
        self.functions: dict[str, _Function] = {}
        for file, text in sources.items():
            self._take(file, text)
        self.axes = self._axes()
        self.units: dict[str, list[str]] = self.constants.get("units", {})
        self.given: dict[str, str] = {}
        """Units and groups by the names of the values that stand for them."""
        self.counts: dict[str, int] = {}
        """How many values a bundle is."""
        self.reduced: dict[str, list[bool]] = {}
        """Of what parameters of its unit a reduction has gradients, by its name."""
        self.averages: dict[str, list[bool]] = {}
        """The same of what it gives, once it has been waited for, and of sums over micro-batches."""
        self.regions: dict[str, _Body] = {}

    def _take(self, file: str, text: str) -> None:
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
                        self.constants.setdefault(name, ast.literal_eval(value))
                    except ValueError as error:
                        where = f"{file} line {statement.lineno}".strip()
                        raise ProofError(where, f"{name} is no constant", _FIX) from error

    def _axes(self) -> dict[str, Axis]:
        try:
            return {name: Axis.parse(name, text) for name, text in self.constants["axes"].items()}
        except KeyError:
            raise ProofError("the text", "says nothing of the axes of its mesh", _FIX) from None
        except (AttributeError, TypeError, ValueError) as error:
            raise ProofError("axes", str(error), _FIX) from error

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
        self._count(call)
        if name == "unbox":
            self._unbox(call)
        elif found := _COMMUNICATING.fullmatch(name):
            self._collective(call, body, found["library"], found["operation"])
        elif is_phase and name == "add":
            unit = self.given.get(call.argument(0), "")
            self.averages |= dict.fromkeys(call.gives, self._has_gradient(call, len(self.units.get(unit, ()))))
        elif name.startswith(_TORCH) or name == "graph" or (is_phase and name in _SILENT):
            pass
        elif is_phase and name in self.functions and name not in PHASES:
            self._region(call, body)
        elif is_phase and name == "wait":
            self._wait(call, body)
        elif is_phase and name in _LINES:
            body.add(call, self._started(call, _LINES[name]))
        else:
            raise call.error(f"{name} is not known: it may communicate")

    def _count(self, call: _Call) -> None:
        """Remember how many values the bundle at the end of what a call gives is."""
        found = re.search(r"\b(\d+) values", " ".join(call.function.margins(call.statement)))
        if found and call.gives:
            self.counts[call.gives[-1]] = int(found[1])

    def _unbox(self, call: _Call) -> None:
        for element in call.target.elts if isinstance(call.target, ast.Tuple) else []:
            margin, name = " ".join(call.function.margins(element)), ast.unparse(element)
            if found := _GIVEN.search(margin):
                self.given[name] = found[1]
            if found := re.search(r"\b(\d+) values", margin):
                self.counts[name] = int(found[1])

    def _region(self, call: _Call, body: _Body) -> None:
        """The events of a region, behind those that have been."""
        if call.name not in self.regions:
            self.regions[call.name] = _Body()
            self._read(self.functions[call.name], self.regions[call.name])
        begin = len(body.events)
        for event in self.regions[call.name].events:
            awaits = None if event.awaits is None else begin + event.awaits
            body.events.append(replace(event, where=f"{event.where}, run at {call.where}", awaits=awaits))

    def _wait(self, call: _Call, body: _Body) -> None:
        name = call.argument(0)
        if name not in body.started:
            raise call.error(f"waits for {name or 'nothing'}, which no line has started")
        self.averages |= {one: self.reduced[name] for one in call.gives if name in self.reduced}
        if (awaited := body.started[name]) is not None:
            body.events.append(call.event(Act.WAIT, body.events[awaited].axis, awaits=awaited))

    def _started(self, call: _Call, row: _Line) -> RankEvent | None:
        """What a line of the table `_LINES` launches; None if that is no communication."""
        of = self.given.get(call.argument(row.argument), "")
        if not of and call.name == "fetch":
            return None  # from the host or a disk
        if of in self.units and row.of_units:
            axis = self._outside(call) or self._sharding(call)
            return call.event(row.act, axis, self._of_unit(call, of, row))
        if of not in self.axes or row.of_units:
            raise call.error(f"{call.argument(row.argument) or 'nothing'} is no unit or group that is known here")
        if not (types := call.types):
            raise call.error("the type of what is sent does not stand in the margin")
        if not row.peer:
            return call.event(row.act, of, f"{call.name} {types}")
        if not (place := call.options.get(row.peer, "")).isdigit():
            raise call.error(f"does not say by {row.peer}= who the other is")
        message = "".join(f" {call.options[one]}" for one in ("message", "strides") if one in call.options)
        return call.event(row.act, of, f"{types}{message}", peer=int(place))

    # -- messages -------------------------------------------------------------------------------------------------

    def _sharding(self, call: _Call) -> str:
        found = [name for name, axis in self.axes.items() if axis.kind is AxisKind.SHARD]
        if len(found) != 1:
            raise call.error(f"gathers or reduces a unit, and {len(found)} axes shard")
        return found[0]

    def _outside(self, call: _Call) -> str:
        """The outer one of two axes of data, where a line says so by its group; else nothing."""
        group = call.argument(2) or call.argument(1)
        if call.argument(2) == "" and group not in self.given:
            return ""  # gradients, or secondary shards
        axis = self.given.get(group, "")
        if axis not in self.axes or self.axes[axis].kind is not AxisKind.REPLICATE:
            raise call.error(f"{group} is no group of ranks of the outer one of two axes")
        return axis

    def _of_unit(self, call: _Call, unit: str, row: _Line) -> str:
        """What is sent of a unit, as `Program.communications` says it."""
        params, options = [_Param(text) for text in self.units[unit]], call.options
        if row.reduces:
            sends = self.reduced[call.gives[0]] = self._has_gradient(call, len(params))
            kinds = [param.sent_in(param.reduced, param.full, options.get("dtype")) for param in params]
        else:
            sends = [not param.is_whole for param in params]
            kinds = [param.sent_in(param.computed, param.own, options.get("dtype")) for param in params]
            encoded = zip(params, kinds, strict=True)
            kinds = [param.sent_in(param.gathered, kind, options.get("wire")) for param, kind in encoded]
        packed = {
            index: tuple(message) for message in self.constants.get("packed", {}).get(unit, ()) for index in message
        }
        messages = dict.fromkeys(packed.get(index, (index,)) for index in range(len(params)))
        sent = ([index for index in message if sends[index]] for message in messages)
        texts = [
            "+".join(f"{params[i].name} {kinds[i]}{params[i].shape}" for i in some) + params[some[0]].owner
            for some in sent
            if some
        ]
        keep = " keep" if call.name == "all_gather" and options.get("keep") == "True" else ""
        by = f" by {options['bucket']}" if "bucket" in options else ""
        by += f" over {axis}" if (axis := self._outside(call)) else ""
        by += " from secondary shards" if not axis and call.name == "all_gather" and call.argument(1) else ""
        by += f" in {dtype_text(dtype_of(options['wire'].removeprefix('torch.')))}" if "wire" in options else ""
        return f"{call.name}{keep} {unit} ({', '.join(texts)}){by}"

    def _has_gradient(self, call: _Call, count: int) -> list[bool]:
        """For each parameter of a unit whether a line is given a gradient of it, or an average or sum of some."""
        if (averages := self.averages.get(call.argument(1))) is not None:
            return averages
        found: list[bool] = []
        for given in call.tree.args[1:2]:
            for element in given.elts if isinstance(given, ast.List) else [ast.Starred(given)]:
                if isinstance(element, ast.Starred):
                    found += [True] * self.counts.get(ast.unparse(element.value), 0)
                else:
                    found.append(not (isinstance(element, ast.Constant) and element.value is None))
        if len(found) != count:
            raise call.error(f"is given {counted(len(found), 'gradient')} of {counted(count, 'parameter')}")
        return found

    def _collective(self, call: _Call, body: _Body, library: str, operation: str) -> None:
        """A collective of the model's own code, or the wait for one.

        A wait for what is not known to come from one, as where that was started in another region, waits for the last.
        """
        if library not in _KNOWN_LIBRARIES:
            raise call.error(f"{call.name} is not known: it communicates otherwise than functional collectives do")
        axis = self._model_axis(call)
        if operation == "wait_tensor":
            body.events.append(call.event(Act.WAIT, axis.name, awaits=body.started.get(call.argument(0))))
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


class _Param:
    """A parameter as the head of a text says it: `a.weight f32[4, 4] computed in bf16 reduced in f32 whole`."""

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition(" ")
        type_, _, flags = rest.partition("]")
        self.own, _, dims = type_.partition("[")
        self.shape = f"[{dims}]"
        dtypes = dict(re.findall(r" (computed|reduced|across|gathered) in (\w+)", flags))
        self.computed, self.reduced, self.gathered = map(dtypes.get, ("computed", "reduced", "gathered"))
        self.full = self.computed or self.own
        self.is_whole = flags.endswith(" whole")
        owner = re.search(r" owner \d+$", flags)
        self.owner = owner[0] if owner else ""

    def sent_in(self, wanted: str | None, usual: str, given: str | None) -> str:
        """The dtype in which a line that names the dtype `given` sends it, where the head says `wanted` of it."""
        return wanted if wanted is not None and str(dtype_of(wanted)) == given else usual


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
