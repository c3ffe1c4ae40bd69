"""Replay: run the recorded runs of one rank again, line by line, in one process, without groups or the model.

The text of a recording is not executed but interpreted: its lines call a few known functions with names, lists and
numbers. The values that a line computes are compared bit for bit with the recorded ones; values from elsewhere (inputs,
and parameters and gradients received by communications) are taken from the recording.
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
from zcompile.recording.archive import Archive, ArchivedRun, damaged, read_program, rebuilt, varying
from zcompile.recording.recording import GIVEN, with_numerics
from zcompile.recording.values import Described, RecordedUnit, Tensor, described, dtype_named, labels_of, leaves_of
from zcompile.runtime.device import generators_of
from zcompile.runtime.executor import OPERATIONS
from zcompile.runtime.low_precision import as_sent
from zcompile.runtime.shards import Full
from zcompile.tools.replay_origins import NonFinite, RunLine, Tracer, generators_back
from zcompile.tools.replay_sizes import for_any_size
from zcompile.torch_internals.inductor import prepare_inductor
from zcompile.torch_internals.operators import GivenCollectives, is_collective

_COMPUTED = {name: OPERATIONS[name] for name in ("accumulate", "add", "copy", "plus", "release", "store", "write")}
"""Functions that run again, besides regions. The results of all other functions are taken from the recording."""
_LONGEST = 150
"""Maximum length of a printed line."""
_WITHOUT_GROUPS = "Regions that contain collectives ran operation by operation: Inductor needs the groups."
_FOR_THESE_SIZES = "Regions with dynamic sizes were compiled for the recorded sizes."


class Verdict(StrEnum):
    """The result of comparing a replayed value with the recorded one."""

    GIVEN = "given"
    """It came from elsewhere, and was taken from the recording."""
    EQUAL = "equal"
    """It was recomputed, and has the same bits, shape and strides."""
    STRIDES = "other strides"
    """It has the same bits and shape, but other strides."""
    DIFFERS = "DIFFERS"
    STALE = "STALE"
    """It was gathered, and this rank's rows differ from its shard."""


@dataclass(frozen=True)
class Value:
    """One tensor in the result of a line."""

    name: str
    verdict: Verdict
    noted: Tensor
    tensor: torch.Tensor


@dataclass(frozen=True)
class ReplayedLine:
    """A line that has run, and its values."""

    run: ArchivedRun
    number: int
    """Line number in the text of the phase; the first if the statement spans several lines."""
    operation: str
    values: Sequence[Value]


@dataclass
class Stop:
    """Where a replay stops: after line `line`, or after the line that makes the value `name`."""

    run: str = ""
    line: int = 0
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Stop:
        """Parse `forward:12`, `run_002_forward:12`, `backward:loss_grad` or `loss`."""
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
    """Runs the recorded runs of one rank again."""

    archive: Archive
    trace: bool = True
    """Look for the operations that made non-finite values within regions."""
    findings: dict[str, NonFinite] = field(default_factory=dict)
    """The first NaN and the first infinity that were found, by kind."""
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values that later runs take, by "RUN CALL ITEM"."""
    failure: str = ""
    """Where and how a run failed when it was recorded."""
    notes: set[str] = field(default_factory=set)
    """Differences from the recorded run that may change the last bits of values."""
    _programs: dict[str, tuple[Program, Mapping[str, Callable[..., Any]]]] = field(default_factory=dict)

    def lines(self, until: str = "") -> Iterator[ReplayedLine]:
        """Run line by line, up to and including `until`. Raises ReplayError for damaged records or an unknown line."""
        stop = Stop.parse(until)
        runs = self.archive.runs
        if until and not any(stop.is_in(run) for run in runs):
            names = ", ".join(run.name for run in runs)
            raise ReplayError(until, f"there is no run {stop.run!r}", f"choose from {names}, or forward and backward")
        if stop.name and not any(self._names(stop.name, run) for run in runs if stop.is_in(run)):
            fix = "take a name from forward.py or backward.py in the recording's `programs`"
            raise ReplayError(until, "no recorded line makes a value of this name", fix)
        wanted = self._wanted(runs)
        about = self.archive.about
        with with_numerics(about["numerics"]), generators_back(self.archive.device), torch.no_grad():
            for run in runs:
                with _readable(self.archive, run):
                    replayed = RunReplay(self, run, wanted)
                last = replayed.last_line(stop) if until and stop.is_in(run) else None
                yield from replayed.lines(last)
                if last is not None:
                    return
        if until:
            fix = "take a line or a name from forward.py or backward.py in the recording's `programs`"
            raise ReplayError(until, "no recorded line makes a value of this name", fix)

    def _names(self, name: str, run: ArchivedRun) -> bool:
        """True if a line of a run makes a value of this name."""
        return any(name in line.names for line in lines_of(self.archive, run))

    def _wanted(self, runs: Sequence[ArchivedRun]) -> set[str]:
        """The places of values that later runs take."""
        result = set()
        for run in runs:
            with _readable(self.archive, run):
                places = {str(one.get("place", "")) for one in _described(self.archive.calls(run))}
            result |= places - {"", "file"}
        return result

    def program(self, run: ArchivedRun) -> tuple[Program, Mapping[str, Callable[..., Any]]]:
        """The program of a run, and its compiled regions."""
        if run.program not in self._programs:
            program = read_program(self.archive, run.program)
            self._programs[run.program] = program, dict(self._compiled(run, program))
        return self._programs[run.program]

    def _compiled(self, run: ArchivedRun, program: Program) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Compile the regions of a program with the recorded backend, as far as possible here."""
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
        """A recorded tensor: read from a file, or computed by an earlier run of this replay."""
        if noted.place in ("", "file"):
            return self.archive.tensor(noted)
        run, call, item = noted.place.split()
        if noted.place not in self.made:
            raise damaged(f"{run}.json", f"call {call} made no value {item}, which a later run takes")
        return self.made[noted.place]


@dataclass(frozen=True)
class NonFiniteValue:
    """A non-finite value, found in the recording without a replay."""

    run: ArchivedRun
    line: int
    code: str
    name: str
    count: int


def first_recorded(archive: Archive, kind: str) -> NonFiniteValue | None:
    """The first value of a recording with NaN (`kind` "nan") or infinite elements ("inf")."""
    for run in archive.runs:
        for line, call in zip(lines_of(archive, run), archive.calls(run)["calls"], strict=False):
            labels = labels_of(call["gives"], line.targets)
            for name, one in zip(labels, leaves_of(call["gives"]), strict=True):
                if one.get(kind):
                    return NonFiniteValue(run, line.number, line.shown, name, one[kind])
    return None


@dataclass(frozen=True)
class CallLine:
    """A line in the text of a phase: a call, and the names that its results are bound to."""

    number: int
    statement: ast.stmt
    call: ast.Call
    targets: Sequence[str]
    """The name of a list begins with `*`."""
    is_spread: bool
    """True if each target is bound to a part of the result."""
    deleted: list[str] = field(default_factory=list)
    """Names that are deleted after it."""

    @property
    def operation(self) -> str:
        return ast.unparse(self.call.func)

    @property
    def names(self) -> list[str]:
        return [name.lstrip("*") for name in self.targets]

    @property
    def shown(self) -> str:
        """Its text, on one line."""
        text = ast.unparse(self.call if self.operation == "unbox" else self.statement)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def lines_of(archive: Archive, run: ArchivedRun) -> list[CallLine]:
    """Parse the text of the phase of a run. Raises ReplayError if it is damaged."""
    name = f"{run.program}/{run.phase}.py"
    try:
        found = ast.parse(archive.text(name)).body
    except SyntaxError as error:
        raise damaged(archive.home / name, f"line {error.lineno}: {error.msg}") from error
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
        raise damaged(archive.home / name, "is not a single function")
    lines = list[CallLine]()
    for one in found[0].body:
        match one:
            case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Call() as call):
                lines.append(CallLine(one.lineno, one, call, [ast.unparse(element) for element in elements], True))
            case ast.Assign(targets=[target], value=ast.Call() as call):
                lines.append(CallLine(one.lineno, one, call, [ast.unparse(target)], False))
            case ast.Expr(value=ast.Call() as call):
                lines.append(CallLine(one.lineno, one, call, [""], False))
            case ast.Delete(targets=targets) if lines:
                lines[-1].deleted.extend(map(ast.unparse, targets))
    return lines


def _described(calls: Mapping[str, Any]) -> Iterator[Described]:
    yield from calls["generators"]
    for call in calls["calls"]:
        yield from leaves_of(call["gives"])
        yield from call.get("inside", ())


@contextlib.contextmanager
def _readable(archive: Archive, run: ArchivedRun) -> Iterator[None]:
    """Raise ReplayError if the record of a run does not have the expected form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ReplayError):
            raise
        problem = f"is not the record of a run: {type(error).__name__}: {error}"
        raise damaged(archive.home / f"{run.name}.json", problem) from error


class _UnreadMemory:
    """Stands for borrowed memory and for async work, which a replay never reads."""

    def take(self, _: int) -> None:
        """Return no memory, so that `store` allocates."""


class RunReplay:
    """Runs one run line by line."""

    def __init__(self, replay: Replay, run: ArchivedRun, wanted: set[str]) -> None:
        self.replay, self.run, self.wanted = replay, run, wanted
        self.archive = replay.archive
        self.file = str(self.archive.home / f"{run.program}/{run.phase}.py")
        self.recorded = self.archive.calls(run)
        self.program, self.regions = replay.program(run)
        self.tracer = Tracer(self.program, run.phase, self.archive.device)
        self.names: dict[str, Any] = {"box": None}
        self.units: dict[str, RecordedUnit] = {}
        self.text_lines = lines_of(self.archive, run)

    def last_line(self, stop: Stop) -> int | None:
        """The line number to stop after; None if it is not in this run. Raises ReplayError if there is no such line."""
        if not stop.line:
            return next((line.number for line in self.text_lines if stop.name in line.names), None)
        count = len(self.archive.text(f"{self.run.program}/{self.run.phase}.py").splitlines())
        before = [line.number for line in self.text_lines if line.number <= stop.line]
        if stop.line > count or not before:
            fix = f"give one from {self.text_lines[0].number} to {count}"
            raise ReplayError(f"{self.file}, line {stop.line}", "there is no line to stop after", fix)
        return before[-1]

    def lines(self, last: int | None) -> Iterator[ReplayedLine]:
        """Run the lines up to and including line `last`; None: all."""
        self._set_generators()
        for number, line in enumerate(self.text_lines):
            if number >= len(self.recorded["calls"]):
                self._end(line)
                return
            yield self._line(line, number)
            if line.number == last:
                return
            for name in line.deleted:
                self.names.pop(name, None)

    def _at(self, number: int) -> str:
        return f"{self.file}, line {number}"

    def _end(self, line: CallLine) -> None:
        """Note the failure at `line`, where the record ends. Raises ReplayError if the run did not fail there."""
        where = self._at(line.number)
        if not self.run.raised:
            raise damaged(where, "is not recorded, although the run finished")
        self.replay.failure = f"{self.run.name} failed at {where}:\n    {line.shown}\n  {self.run.raised}"

    def _line(self, line: CallLine, number: int) -> ReplayedLine:
        recorded, operation, where = self.recorded["calls"][number], line.operation, self._at(line.number)
        if recorded["function"] != operation:
            raise damaged(where, f"calls {operation}, but {recorded['function']} was recorded")
        try:
            result = self._called(line.call, operation, recorded)
            given = self._compared(line, result, recorded["gives"], number)
        except ReplayError:
            raise
        except Exception as error:
            raise damaged(where, f"cannot run again: {type(error).__name__}: {error}") from error
        if line.is_spread:
            for index, name in enumerate(line.targets):
                self.names[name.lstrip("*")] = list(result[index:]) if name.startswith("*") else result[index]
        elif isinstance(line.statement, ast.Assign):
            self.names[line.targets[0]] = result
        if self.replay.trace:
            found = [(one.name, one.noted) for one in given]
            place = RunLine(f"{self.run.name}, line {line.number} of {self.run.phase}.py", line.shown)
            self.tracer.look(self.replay.findings, place, operation, result, found)
        return ReplayedLine(self.run, line.number, operation, given)

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
            problem = f"{ast.unparse(expression)!r} is not a valid argument"
            raise damaged(self._at(expression.lineno), problem) from error

    @contextlib.contextmanager
    def _collectives(self, recorded: Mapping[str, Any]) -> Iterator[None]:
        """Let DTensor collectives within a region return their recorded results."""
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

    def _compared(self, line: CallLine, result: Any, recorded: Described, number: int) -> list[Value]:
        """Compare the tensors of a result with the recorded ones."""
        tensors: list[torch.Tensor] = []

        def noted_here(tensor: torch.Tensor) -> Tensor:
            tensors.append(tensor)
            return Tensor.of(tensor)[0]

        before, after = list(leaves_of(recorded)), list(leaves_of(described(result, noted_here)))
        if len(before) != len(after):
            problem = f"{line.operation} returns {len(after)} values, but {len(before)} were recorded"
            raise damaged(self._at(line.number), problem)
        stale = self._stale(result) if isinstance(result, Full) else ()
        values, is_given, items = [], line.operation in GIVEN, iter(range(len(before)))
        left = iter(tensors)
        for name, was, now in zip(labels_of(recorded, line.targets), before, after, strict=True):
            tensor = next(left) if now["kind"] == "tensor" else torch.tensor(now["value"])
            if was["kind"] == "tensor" and (place := f"{self.run.name} {number} {next(items)}") in self.wanted:
                self.replay.made[place] = tensor
            kept, noted = _leaf(was), _leaf(now)
            verdict = _verdict(kept, noted, given=is_given and kept.place in ("", "file"))
            values.append(Value(name, Verdict.STALE if name in stale else verdict, noted, tensor))
        return values

    def _stale(self, full: Full) -> list[str]:
        """Names of gathered parameters whose rows of this rank differ from its shard."""
        unit, rank = self.units.get(full.unit.name), self.archive.about["data_rank"]
        if unit is None:
            return []
        result = []
        for index, param in enumerate(full.unit.params):
            start, stop = param.shard_rows(rank)
            rows = full[index][start:stop] if param.shape else full[index]
            own, wire = unit[index], param.outer_gather_dtype
            # Cast the shard as gathers do before sending.
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


def _leaf(value: Described) -> Tensor:
    """The tensor of a described value; a number becomes a 0-d tensor."""
    return Tensor.read(value) if value["kind"] == "tensor" else Tensor.of(torch.tensor(value["value"]))[0]
