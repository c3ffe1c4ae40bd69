"""Replay: the recorded runs of one rank again, line by line, in one process, without groups and without the model.

The text of a recording is not executed: its lines are calls of a few known functions with names, lists and numbers,
which this interprets. What a line computes is compared with what it gave when it was recorded, bit for bit; what came
from elsewhere (inputs, parameters and gradients that communications received) is given to it as it was.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from zcompile.engine.region_cache import RegionCache
from zcompile.errors import ParseError, ReplayError
from zcompile.ir.parser import value_of
from zcompile.ir.program import Program
from zcompile.recording.archive import Archive, ArchivedRun
from zcompile.recording.rebuilding import RecordedUnit, read_program, rebuilt, varying
from zcompile.recording.recording import GIVEN, with_numerics
from zcompile.recording.values import Described, Tensor, dtype_named, labels_of, leaves_of
from zcompile.runtime.device import generators_of
from zcompile.runtime.executor import Gradients, accumulate, add, copy, plus, release, store, write
from zcompile.runtime.low_precision import as_sent
from zcompile.runtime.shards import Full
from zcompile.tools.replay_origins import NonFinite, RunLine, Tracer
from zcompile.tools.replay_sizes import for_any_size
from zcompile.torch_internals.inductor import prepare_inductor
from zcompile.torch_internals.operators import GivenCollectives, is_collective

_AGAIN = "record the step again"
_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "accumulate": accumulate,
    "add": add,
    "copy": copy,
    "plus": plus,
    "release": release,
    "store": store,
    "write": write,
}
"""What a line calls beside regions that runs again; of others there is what they gave, or nothing to give."""
_LONGEST = 150
"""Columns of a line that is shown."""
_WITHOUT_GROUPS = "Regions with collectives of their own ran operation by operation: Inductor wants the groups."
_FOR_THESE_SIZES = "Regions for sizes that vary were compiled for the recorded ones."


class Verdict(StrEnum):
    """What a value of a replay is, beside the recorded one."""

    GIVEN = "given"
    """It came from elsewhere, and is given to the program as it was."""
    EQUAL = "equal"
    """It was computed again, and has the same bits, shape and strides."""
    STRIDES = "other strides"
    """It has the same bits and shape."""
    DIFFERS = "DIFFERS"
    STALE = "STALE"
    """It was gathered, and this rank's rows of it are not those of its shard."""


@dataclass(frozen=True)
class Value:
    """One tensor that a line gave."""

    name: str
    verdict: Verdict
    noted: Tensor
    tensor: torch.Tensor


@dataclass(frozen=True)
class ReplayedLine:
    """A line that has run."""

    run: ArchivedRun
    number: int
    """Of its first line in the text of the phase."""
    operation: str
    values: Sequence[Value]


@dataclass
class Stop:
    """Where a replay stops: behind a line of a run, or the value of a name; None: at its end."""

    run: str = ""
    line: int = 0
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Stop:
        """`forward:12`, `run_002_forward:12`, `backward:loss_grad` or `loss`."""
        run, colon, place = text.rpartition(":")
        if place.isdecimal() and colon:
            return cls(run, int(place))
        if text and not place.isidentifier():
            fix = "give forward:12, run_002_forward:12, or the name of a value"
            raise ReplayError(f"until {text!r}", "is neither a line nor the name of a value", fix)
        return cls(run, 0, place)

    def is_in(self, run: ArchivedRun) -> bool:
        return self.run in ("", run.name, str(run.phase))

    def __str__(self) -> str:
        return ":".join(filter(None, [self.run, str(self.line or self.name)]))


@dataclass
class Replay:
    """The recorded runs of one rank, to be run again.

    Args:
        archive: The recording.
        trace: Look for what made non-finite values within regions.
    """

    archive: Archive
    trace: bool = True
    findings: dict[str, NonFinite] = field(default_factory=dict)
    """The first NaN and the first infinity, once they were met."""
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values that later runs take, by the line that gave them."""
    failure: str = ""
    """Where a run failed when it was recorded, and by what."""
    notes: set[str] = field(default_factory=set)
    """What may change last bits."""
    _programs: dict[str, tuple[Program, Mapping[str, Callable[..., Any]]]] = field(default_factory=dict)

    def lines(self, until: str = "") -> Iterator[ReplayedLine]:
        """Run line by line, up to and with the line `until`.

        Raises:
            ReplayError: a file that is damaged, a line that is not there, or one that cannot run.
        """
        stop = Stop.parse(until)
        runs = self.archive.runs
        if until and not any(stop.is_in(run) for run in runs):
            names = ", ".join(run.name for run in runs)
            raise ReplayError(until, f"there is no run {stop.run!r}", f"choose from {names}, forward and backward")
        if stop.name and not any(self._names(stop.name, run) for run in runs if stop.is_in(run)):
            fix = "names are those in forward.py and backward.py in the recording's `programs`"
            raise ReplayError(until, "no line that has run gives a value of this name", fix)
        wanted = self._wanted(runs)
        about = self.archive.about
        with with_numerics(about["numerics"]), _generators_back(self.archive.device), torch.no_grad():
            for run in runs:
                with _readable(self.archive, run):
                    replayed = RunReplay(self, run, wanted)
                last = replayed.last_line(stop) if until and stop.is_in(run) else None
                yield from replayed.lines(last)
                if last is not None:
                    return
        if until:
            fix = "lines are those of forward.py and backward.py in the recording's `programs`, names those in them"
            raise ReplayError(until, "no line that has run gives a value of this name", fix)

    def _names(self, name: str, run: ArchivedRun) -> bool:
        """True if a line of a run gives a value of this name."""
        statements = [one for one in function_of(self.archive, run).body if _call_of(one) is not None]
        return any(name in [target.lstrip("*") for target in _targets(one)] for one in statements)

    def _wanted(self, runs: Sequence[ArchivedRun]) -> set[str]:
        """The lines whose values later runs take."""
        result = set()
        for run in runs:
            with _readable(self.archive, run):
                places = {str(one.get("place", "")) for one in _described(self.archive.calls(run))}
            result |= places - {"", "file"}
        return result

    def program(self, run: ArchivedRun) -> tuple[Program, Mapping[str, Callable[..., Any]]]:
        """The program of a run, and its regions compiled as they were."""
        if run.program not in self._programs:
            program = read_program(self.archive, run.program)
            self._programs[run.program] = program, dict(self._compiled(run, program))
        return self._programs[run.program]

    def _compiled(self, run: ArchivedRun, program: Program) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The regions of a program, by the backend that has compiled them."""
        eager, cache = RegionCache("eager"), RegionCache(self.archive.about["backend"])
        if cache.backend == "eager":
            yield from eager.get_all(program.regions).items()
            return
        cache.ready = prepare_inductor(self.archive.device)
        vary = varying(self.archive, run.program)
        for name, region in program.regions.items():
            if any(is_collective(node.target) for node in region.graph.nodes):
                self.notes.add(_WITHOUT_GROUPS)
                yield name, eager.get(region)
            elif name in vary:
                self.notes.add(_FOR_THESE_SIZES)
                yield name, for_any_size(region, cache)
            else:
                yield name, cache.get(region)

    def found(self, noted: Tensor) -> torch.Tensor:
        """A tensor that a line was given: read, or computed by an earlier run."""
        if noted.place in ("", "file"):
            return self.archive.tensor(noted)
        run, call, item = noted.place.split()
        if noted.place not in self.made:
            raise ReplayError(f"{run}.json", f"call {call} gave no value {item}, which a later run takes", _AGAIN)
        return self.made[noted.place]


@dataclass(frozen=True)
class NonFiniteValue:
    """A value that is not finite, by the record alone."""

    run: ArchivedRun
    line: int
    code: str
    name: str
    count: int


def first_recorded(archive: Archive, kind: str) -> NonFiniteValue | None:
    """The first value of a recording with NaN (`kind` "nan") or infinite elements ("inf").

    Raises:
        ReplayError: a text is damaged.
    """
    for run in archive.runs:
        statements = [one for one in function_of(archive, run).body if _call_of(one) is not None]
        for statement, call in zip(statements, archive.calls(run)["calls"], strict=False):
            labels = labels_of(call["gives"], _targets(statement))
            for name, one in zip(labels, leaves_of(call["gives"]), strict=True):
                if one.get(kind):
                    return NonFiniteValue(run, statement.lineno, shown(statement), name, one[kind])
    return None


def shown(statement: ast.stmt) -> str:
    """The text of a line, in one."""
    call = _call_of(statement)
    text = ast.unparse(call if call is not None and ast.unparse(call.func) == "unbox" else statement)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def function_of(archive: Archive, run: ArchivedRun) -> ast.FunctionDef:
    """The text of a phase that ran, parsed.

    Raises:
        ReplayError: it is damaged.
    """
    name = f"{run.program}/{run.phase}.py"
    try:
        found = ast.parse(archive.text(name)).body
    except SyntaxError as error:
        raise ReplayError(str(archive.home / name), f"line {error.lineno}: {error.msg}", _AGAIN) from error
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
        raise ReplayError(str(archive.home / name), "is not one function", _AGAIN)
    return found[0]


def _described(calls: Mapping[str, Any]) -> Iterator[Described]:
    yield from calls["generators"]
    for call in calls["calls"]:
        yield from leaves_of(call["gives"])
        yield from call.get("inside", ())


@contextlib.contextmanager
def _readable(archive: Archive, run: ArchivedRun) -> Iterator[None]:
    """What is read inside of a run has the form of a record.

    Raises:
        ReplayError: it has not.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ReplayError):
            raise
        problem = f"is no record of a run: {type(error).__name__}: {error}"
        raise ReplayError(str(archive.home / f"{run.name}.json"), problem, _AGAIN) from error


@contextlib.contextmanager
def _generators_back(device: torch.device) -> Iterator[None]:
    """Random generators as they were, afterwards."""
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class _UnreadMemory:
    """What stands for memory that is lent, and for what is on its way: nothing is ever read from it."""

    def take(self, _: int) -> None:
        """No bytes on the stack: `store` allocates."""


class RunReplay:
    """One run, line by line."""

    def __init__(self, replay: Replay, run: ArchivedRun, wanted: set[str]) -> None:
        self.replay, self.run, self.wanted = replay, run, wanted
        self.archive = replay.archive
        self.file = str(self.archive.home / f"{run.program}/{run.phase}.py")
        self.text = self.archive.text(f"{run.program}/{run.phase}.py")
        self.recorded = self.archive.calls(run)
        self.program, self.regions = replay.program(run)
        self.tracer = Tracer(self.program, run.phase, self.archive.device)
        self.names: dict[str, Any] = {"box": None}
        self.units: dict[str, RecordedUnit] = {}
        self.function = function_of(self.archive, run)

    def last_line(self, stop: Stop) -> int | None:
        """The number of the line to stop behind; None if it is not in this run.

        Raises:
            ReplayError: the text has no such line.
        """
        statements = [one for one in self.function.body if _call_of(one) is not None]
        count = len(self.text.splitlines())
        if stop.line:
            before = [one.lineno for one in statements if one.lineno <= stop.line]
            if stop.line > count or not before:
                fix = f"give one from {statements[0].lineno} to {count}"
                raise ReplayError(f"{self.file}, line {stop.line}", "there is no line to stop behind", fix)
            return before[-1]
        return next(
            (one.lineno for one in statements if stop.name in [name.lstrip("*") for name in _targets(one)]), None
        )

    def lines(self, last: int | None) -> Iterator[ReplayedLine]:
        """Run its lines up to and with that at line `last`; None: all."""
        self._set_generators()
        numbers = iter(range(len(self.function.body)))
        for statement in self.function.body:
            call = _call_of(statement)
            if isinstance(statement, ast.Delete):
                for target in statement.targets:
                    self.names.pop(ast.unparse(target), None)
            if call is None:
                continue
            number = next(numbers)
            if number >= len(self.recorded["calls"]):
                self._end(statement)
                return
            yield self._line(statement, call, number)
            if statement.lineno == last:
                return

    def _end(self, statement: ast.stmt) -> None:
        """The record ends before `statement`, which failed.

        Raises:
            ReplayError: it did not, so calls are missing.
        """
        where = f"{self.file}, line {statement.lineno}"
        if not self.run.raised:
            raise ReplayError(where, "has no record, though the run came to its end", _AGAIN)
        self.replay.failure = f"{self.run.name} failed at {where}:\n    {shown(statement)}\n  {self.run.raised}"

    def _line(self, statement: ast.stmt, call: ast.Call, number: int) -> ReplayedLine:
        recorded, operation = self.recorded["calls"][number], ast.unparse(call.func)
        where = f"{self.file}, line {statement.lineno}"
        if recorded["function"] != operation:
            problem = f"calls {operation}, where {recorded['function']} was recorded"
            raise ReplayError(where, problem, _AGAIN)
        try:
            result = self._called(call, operation, recorded)
            given = self._compared(operation, result, recorded["gives"], number, statement)
        except ReplayError:
            raise
        except Exception as error:
            raise ReplayError(where, f"cannot run again: {type(error).__name__}: {error}", _AGAIN) from error
        self._bind(statement, result)
        if self.replay.trace:
            found = [(one.name, one.noted) for one in given]
            place = RunLine(f"{self.run.name}, line {statement.lineno} of {self.run.phase}.py", shown(statement))
            self.tracer.look(self.replay.findings, place, operation, result, found)
        return ReplayedLine(self.run, statement.lineno, operation, given)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _called(self, call: ast.Call, operation: str, recorded: Mapping[str, Any]) -> Any:
        args = self._value(ast.List(call.args, ast.Load(), lineno=call.lineno))
        if operation in GIVEN:
            result = rebuilt(recorded["gives"], self.program, self.replay.found)
            if operation == "unbox":
                self.units = {one.unit.name: one for one in result if isinstance(one, RecordedUnit)}
                return [_UnreadMemory() if one is None else one for one in result]
            return result
        if operation in self.regions:
            with self._collectives(recorded):
                if self.replay.trace:
                    self.tracer.before(operation, args)
                return self.regions[operation](args)
        if operation in _COMPUTED:
            return _COMPUTED[operation](*args, **{one.arg: self._value(one.value) for one in call.keywords if one.arg})
        if operation in ("reduce_scatter", "all_reduce") and isinstance(args[1], list):
            args[1].clear()
        return None

    def _value(self, expression: ast.expr) -> Any:
        try:
            return value_of(expression, self.names)
        except ParseError as error:
            problem = f"{ast.unparse(expression)!r} is nothing that a line takes"
            raise ReplayError(f"{self.file}, line {expression.lineno}", problem, _AGAIN) from error

    @contextlib.contextmanager
    def _collectives(self, recorded: Mapping[str, Any]) -> Iterator[None]:
        """Collectives of DTensors within a region give what they gave."""
        if "inside" not in recorded:
            yield
            return
        with GivenCollectives(self._received(one) for one in recorded["inside"]):
            yield

    def _received(self, value: Described) -> torch.Tensor:
        if value["kind"] == "tensor":
            return self.replay.found(Tensor.read(value))
        dtype = dtype_named(value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device=self.archive.device)

    def _set_generators(self) -> None:
        for generator, state in zip(generators_of(self.archive.device), self.recorded["generators"], strict=True):
            generator.set_state(self.replay.found(Tensor.read(state)).cpu())

    # -- values ---------------------------------------------------------------------------------------------------

    def _bind(self, statement: ast.stmt, result: Any) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]):
                self.names[name] = result
            case ast.Assign(targets=[ast.Tuple(elts=elements)]):
                for index, element in enumerate(elements):
                    if isinstance(element, ast.Starred):
                        self.names[ast.unparse(element.value)] = list(result[index:])
                    else:
                        self.names[ast.unparse(element)] = result[index]

    def _compared(
        self, operation: str, result: Any, recorded: Described, number: int, statement: ast.stmt
    ) -> list[Value]:
        """The tensors of a result beside the recorded ones."""
        before, after = list(leaves_of(recorded)), list(_tensors(result))
        if len(before) != len(after):
            problem = f"{operation} gives {len(after)} values, where {len(before)} were recorded"
            raise ReplayError(f"{self.file}, line {statement.lineno}", problem, _AGAIN)
        stale = self._stale(result) if isinstance(result, Full) else ()
        values, given, item = [], operation in GIVEN, 0
        for name, was, tensor in zip(labels_of(recorded, _targets(statement)), before, after, strict=True):
            if was["kind"] == "tensor":
                if (place := f"{self.run.name} {number} {item}") in self.wanted:
                    self.replay.made[place] = tensor
                item += 1
            kept = Tensor.read(was) if was["kind"] == "tensor" else Tensor.of(torch.tensor(was["value"]))[0]
            noted, _ = Tensor.of(tensor)
            verdict = _verdict(kept, noted, given=given and kept.place in ("", "file"))
            values.append(Value(name, Verdict.STALE if name in stale else verdict, noted, tensor))
        return values

    def _stale(self, full: Full) -> list[str]:
        """Parameters that were gathered and are, in this rank's rows, not what it keeps of them."""
        unit, rank = self.units.get(full.unit.name), self.archive.about["data_rank"]
        if unit is None:
            return []
        result = []
        for index, param in enumerate(full.unit.params):
            start, stop = param.shard_rows(rank)
            rows = full[index][start:stop] if param.shape else full[index]
            own, wire = unit[index], param.outer_gather_dtype
            # Cast as what is sent is.
            own = (
                own.to(rows)
                if wire is None
                else as_sent(own.reshape(-1), [own.numel()], wire, rows.dtype).view_as(rows)
            )
            if not Tensor.of(rows)[0].has_bits_of(Tensor.of(own)[0]):
                result.append(param.name)
        return result


def _verdict(was: Tensor, now: Tensor, *, given: bool) -> Verdict:
    if not was.has_bits_of(now):
        return Verdict.DIFFERS
    if given:
        return Verdict.GIVEN
    return Verdict.EQUAL if was.stride == now.stride else Verdict.STRIDES


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a line gives, in the order of the record; a number is one without dimensions."""
    match value:
        case torch.Tensor():
            yield value
        case bool() | int() | float():
            yield torch.tensor(value)
        case list() | tuple():
            yield from (tensor for one in value for tensor in _tensors(one))
        case Full() | RecordedUnit():
            yield from (tensor for tensor in value.tensors if tensor is not None)
        case Gradients():
            yield from value.tensors.values()


def _call_of(statement: ast.stmt) -> ast.Call | None:
    """The call that a line is."""
    match statement:
        case ast.Assign(value=ast.Call() as call) | ast.Expr(value=ast.Call() as call):
            return call
    return None


def _targets(statement: ast.stmt) -> list[str]:
    """The names that a line binds; with `*` that of a list."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=elements)]):
            return [ast.unparse(element) for element in elements]
        case ast.Assign(targets=[target]):
            return [ast.unparse(target)]
    return [""]
