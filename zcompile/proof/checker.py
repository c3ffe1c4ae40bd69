"""The checker: decides from the texts of a dump alone whether the program that runs computes the traced step.

It shares no code with the compiler: each text is parsed by Python's `ast`, and every value gets a term, the operation
that computes it and the terms of its arguments. Inputs, whole parameters and numbered random draws are leaves; regions
are inlined; equal terms have the same number. So gathering, moving, saving, copying and recomputing do not change a
value's term, and a program is proven if all that it returns, averages and writes has the terms of the traced step.
Each value also has its memory: no line may read memory that was released, or that a reduction overwrites in place.

docs/proof.md lists what is trusted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from zcompile.errors import ProofError
from zcompile.proof.checker_evaluation import RUNTIME, Begun, Evaluation, Found, Lease
from zcompile.proof.checker_texts import (
    BACKWARD,
    CAPTURE,
    FIX,
    FORWARD,
    STEP,
    Margin,
    ParamText,
    Place,
    Text,
    dotted,
    refusal,
)
from zcompile.proof.checker_values import Averages, Storage, TermTable, TermValue, UnitPart


class BeingSent(NamedTuple):
    """A value that is being sent, and the line that sends it."""

    value: TermValue
    place: Place


class Proof(NamedTuple):
    """The size of a proof: lines read, terms, gradients of parameters; `modulo`: the names of the rules it needed."""

    lines: int
    terms: int
    parameters: int
    modulo: list[str]


class NamedMessage(NamedTuple):
    """A message of a pipeline: the peer's coordinate along the axis, the name of the value, and its strides."""

    peer: int
    name: str
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SharedParam:
    """A parameter that several stages read: its value, home stage, other readers, and summands of its gradient."""

    param: str
    value: str
    home: int
    readers: tuple[int, ...]
    parts: Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class RankPart:
    """A rank's part of a step that was traced with one micro-batch."""

    microbatches: int
    units: tuple[str, ...]
    bound: tuple[str, ...]  # arguments that are identified by name, in order: `unit blocks.0`, `group pp`, `constant c`
    inputs: tuple[tuple[str, int, int | None], ...]  # kind, number and micro-batch of each other argument
    held: frozenset[int]  # inputs that all micro-batches share
    results: tuple[tuple[int, int], ...]  # number in the traced step, micro-batch
    draws: tuple[tuple[int, int], ...]  # micro-batch, number of the draw in the traced step
    written: tuple[tuple[int, int], ...]  # number of a result that is the new value of a buffer, number of that input
    writes: tuple[tuple[int, int], ...]  # number of such a result, micro-batch
    shared: tuple[SharedParam, ...]
    sent: tuple[NamedMessage, ...]
    received: tuple[NamedMessage, ...]


def prove(texts: Mapping[str, str], rules: Sequence[Mapping[str, str]] = ()) -> Proof:
    """Prove that a program computes the traced step.

    Args:
        texts: The files of the program by name: CAPTURE, FORWARD, BACKWARD if there is one, and `regions/region_0.py`.
        rules: How passes change values: a name, a pattern such as `cast(x, torch.bfloat16)`, and a replacement.

    Raises:
        ProofError: the program computes something else, or uses something unknown; names the line.
    """
    return _followed(_compare_program, texts, rules)


def prove_step(texts: Mapping[str, str], part: RankPart, rules: Sequence[Mapping[str, str]] = ()) -> Proof:
    """Prove that a step computes a rank's part of the traced step, provided it receives the values that messages name.

    Args:
        texts: The files of the program by name: CAPTURE, STEP, and `regions/region_0.py` and so on.
        part: The rank's part of the traced step.
        rules: As for `prove`.

    Raises:
        ProofError: the step computes something else, or uses something unknown; names the line.
    """
    return _followed(partial(_compare_step, part), texts, rules)


def _followed(
    compare: Callable[[Mapping[str, Text], TermTable], int],
    texts: Mapping[str, str],
    rules: Sequence[Mapping[str, str]],
) -> Proof:
    """Run `compare`, which returns the number of gradients, and return the proof; refuse texts that break it."""
    files = {name: Text(name, text) for name, text in texts.items()}
    terms = TermTable(rules)
    try:
        gradients = compare(files, terms)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise refusal(terms.here, f"cannot be followed ({type(error).__name__}: {error})") from error
    return Proof(sum(len(text.lines) for text in files.values()), len(terms.heads), gradients, [*terms.applied])


def _compare_program(files: Mapping[str, Text], terms: TermTable) -> int:
    capture = files[CAPTURE]
    if (BACKWARD in files) != ("backward" in capture.functions):
        raise ProofError(BACKWARD, "is missing, or is of another program", FIX)
    traced = TracedStep(terms, files)
    wanted = traced.whole(capture, capture if BACKWARD in files else None)
    traced.check_claims(capture)
    averages, known = {how: traced.averages(how) for how in ("scatter", "held")}, len(terms.heads)
    program = ComparedStep(terms, files, traced.same)
    found = program.whole(files[FORWARD], files.get(BACKWARD))
    program.compare(wanted | averages[program.how], found, known)
    return len(traced.gradients)


def _compare_step(part: RankPart, files: Mapping[str, Text], terms: TermTable) -> int:
    batches = list[Microbatch]()
    for number in range(part.microbatches):
        batches.append(Microbatch(terms, files, part, number, batches[-1].buffers if batches else {}))
    batches[0].check_claims(files[CAPTURE])
    step = RankStep(terms, files, part, batches)
    wanted, known = step.wanted(), len(terms.heads)
    found = step.found(files[STEP])
    step.compare(wanted | step.named, found | step.sent, known)
    step.check_messages()
    return sum(what.startswith("the gradient") for what in wanted)


class ComparedStep(Evaluation):
    """The step of a program, to be compared with the traced step."""

    def whole(self, forward: Text, backward: Text | None) -> dict[str, Found]:
        """Evaluate a step; return its results and effects by name, without the traced step's parameter gradients."""
        results, left = self.step(forward, "forward")
        found = {f"result {i}": (self._term(value), self.terms.here) for i, value in enumerate(results)}
        results, rest = self.step(backward, "backward", left) if backward else ([], [])
        found |= {f"the gradient of input {i}": (self._term(grad), self.terms.here) for i, grad in enumerate(results)}
        found |= {f"the number of {k}s": (self.terms.make(f"{n}"), self.terms.here) for k, n in self.taken.items()}
        if self.runs:
            self.deliver_all(rest)
        else:
            self.gradients = dict(rest)
        for unit, (options, version, place) in self.ahead.items():
            self.terms.here = place
            if options != self.gathers.get(unit) or version != self.units[unit].version:
                self.refuse(f"is not what the next forward gathers first of {unit}, or is gathered before its update")
        # Once each: checkpoints send again.
        ordered = self.effects | {"collective": [] if self.loops else [*dict(self.effects["collective"]).items()]}
        found |= {f"{kind} {i}": term for kind, terms in ordered.items() for i, term in enumerate(terms)}
        return found | {f"the gradient of {name}": term for name, term in self.delivered.items()}

    def compare(self, wanted: Mapping[str, Found], found: Mapping[str, Found], known: int) -> None:
        """Raise ProofError if results or effects differ from those wanted, or an operation was not traced.

        `known`: the number of terms of the traced step.
        """
        for what in [*wanted, *found]:
            end = self.ends[0 if what.startswith("result") else -1]
            (expected, _), (actual, place) = wanted.get(what, (-1, ())), found.get(what, (-1, end))
            if expected != actual:
                raise self.terms.difference(known, what, expected, actual, place)
        effects = [(kind, *found) for kind in ("collective", "write") for found in self.effects[kind]]
        unknown = [(place, f"is a {kind} that was not traced") for kind, term, place in effects if term >= known]
        for place, problem in (*self.doubts, *unknown):
            self.terms.here = place
            self.refuse(problem)


class TracedStep(ComparedStep):
    """The traced step."""

    runs = False

    def check_claims(self, capture: Text) -> None:
        """Raise ProofError if a parameter that has a gradient is marked as unused."""
        if claimed := [name for name in self.gradients if "unused" in self.params[name].flags]:
            raise ProofError(capture.name, f"says that {claimed[0]} is unused, and has a gradient of it", FIX)

    def averages(self, how: str) -> dict[str, tuple[int, Place]]:
        """Return what the optimizer must receive, computed from the gradients of the traced step."""
        pairs = [(self.params[name], grad) for name, grad in self.gradients.items()]
        means = [self.average(param, grad, how, param.reduced) for param, grad in pairs]
        if how == "scatter":
            across = partial(self.across, self.outside)
            means = [across(p, mean, p.reduced, p.across) for (p, _), mean in zip(pairs, means, strict=True)]
        return {f"the gradient of {param.name}": (mean, ()) for (param, _), mean in zip(pairs, means, strict=True)}


# -- steps of pipelines -----------------------------------------------------------------------------------------------


ADDED = "aten.add.Tensor"


class Microbatch(TracedStep):
    """The traced step of one micro-batch; `buffers`: the terms that earlier micro-batches left in buffers, by input."""

    def __init__(
        self, terms: TermTable, files: Mapping[str, Text], part: RankPart, number: int, buffers: Mapping[int, int]
    ) -> None:
        super().__init__(terms, files)
        self.part, self.number, self.buffers = part, number, dict(buffers)
        self.named, self.types = dict[str, Any](), dict[str, str]()
        self.results, left = self.step(files[CAPTURE], "forward")
        _, self.gradients = self.step(files[CAPTURE], "backward", left)
        self.buffers = {place: self._term(self.results[result]) for result, place in part.written}

    def _input(self, kind: str, number: int) -> int:
        if kind == "input" and number in self.buffers:
            return self.buffers[number]
        return self.terms.make(_input_head(kind, number, None if number in self.part.held else self.number))

    def _draw(self, number: int) -> int:
        return self.terms.make(f"draw {number} of micro-batch {self.number}")

    def _crossed(self, value: Any, words: str) -> Any:
        return value  # new values of buffers are results

    def run(self, text: Text, name: str, scope: dict[str, Any], above: Any = ()) -> Any:
        self.named |= scope
        arguments = text.arguments(name) if not self.number else ()
        self.types |= {argument: _type(margin.types[0]) for argument, margin in arguments if margin.types}
        return super().run(text, name, scope, above)

    def _bind(self, text: Text, target: ast.expr, value: Any) -> None:
        super()._bind(text, target, value)
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        self.types |= {} if self.number else {name: _type(found) for name, found in text.types(names).items()}
        self.named |= {name: self.scope[name] for name in map(dotted, names) if name in self.scope}


class RankStep(ComparedStep):
    """The step of a rank, which computes a part of the traced step."""

    def __init__(
        self, terms: TermTable, files: Mapping[str, Text], part: RankPart, batches: Sequence[Microbatch]
    ) -> None:
        super().__init__(terms, files)
        self.part, self.batches, self.functions = part, batches, RUNTIME | {"add", "plus", "write", "send", "recv"}
        self.once = dict(entry for shared in part.shared for entry in self._once(shared))
        self.buffers, self.bound = dict[Storage, int](), 0
        self.sent, self.named, self.pending = dict[str, Found](), dict[str, Found](), list[BeingSent]()
        self.given, self.taken_messages = list[NamedMessage](), list[NamedMessage]()

    # -- expected

    def wanted(self) -> dict[str, Found]:
        """Return the expected results and effects of the rank by name, except sends."""
        part, found = self.part, dict[str, Found]()
        for result, number in part.results:
            found[f"result {result} of micro-batch {number}"] = self._traced(number, result), ()
        for unit in part.units:
            for param in self.units[unit].params:
                if param.name in self.batches[0].gradients:
                    found[f"the gradient of {param.name}"] = self._average(param), ()
        for at, (number, draw) in enumerate(part.draws):
            found[f"random draw {at}"] = self.batches[number].effects["random draw"][draw]
        places = dict(part.written)
        for at, (result, number) in enumerate(part.writes):
            head = f"write to input {places[result]}"
            found[f"write {at} to a buffer"] = self.terms.make(head, self._traced(number, result)), ()
        return found

    def _traced(self, number: int, result: int) -> int:
        return self._term(self.batches[number].results[result])

    def _average(self, param: ParamText) -> int:
        """Return the gradient that the optimizer must receive: summed over micro-batches in order, and averaged."""
        shared = next((shared for shared in self.part.shared if shared.param == param.name), None)
        if shared is None:
            each = [batch.dense(batch.gradients[param.name]) for batch in self.batches]
        else:
            each = self._parts(shared, shared.home)
            readers = (reader for reader in shared.readers if reader in shared.parts)
            each += [self.once[f"{_message_of(shared, reader)}_grad"][0] for reader in readers]
        values = [TermValue(term, Storage(""), -1) for term in each]
        if self.stage >= 2:
            mean = self._sum([self.average(param, value, "scatter", param.reduced) for value in values])
        else:
            total = TermValue(self._sum(each, param.summed), Storage(""), -1)
            mean = self.average(param, total, "scatter", param.reduced)
        return self.across(self.outside, param, mean, param.reduced, param.across)

    def _sum(self, each: Sequence[int], dtype: str = "") -> int:
        """Return the sum of terms in order; `dtype`: the first addition casts to it."""
        total = each[0]
        for number, term in enumerate(each[1:]):
            total = self.terms.make(f"sum {'' if number else dtype}".rstrip(), total, term)
        return total

    def _parts(self, shared: SharedParam, stage: int) -> list[int]:
        """Return a stage's part of the gradient of a shared parameter, for each micro-batch."""
        totals = []
        for batch in self.batches:
            first, *others = (batch.named[name].term for name in shared.parts[stage])
            for other in others:
                first = self.terms.make(ADDED, first, other)
            totals.append(first)
        return totals

    def _once(self, shared: SharedParam) -> Iterator[tuple[str, tuple[int, str]]]:
        """Yield the messages sent once per step for a shared parameter: its value, and sums of its gradients."""
        batch = self.batches[0]
        self.terms.here = batch.ends[-1]
        self._check_parts(shared)
        param = self.params[shared.param]
        dtype, dims = batch.types[shared.value].split("[", 1)
        if (value := batch.named[shared.value].term) != self.terms.make(param.full(dtype)):
            self.refuse(f"has no value {shared.value} of {param.name}, which is said to be lent")
        for reader in shared.readers:
            yield _message_of(shared, reader), (value, f"{dtype}[{dims}")
            if reader in shared.parts:
                wider = param.summed if len(self.batches) > 1 else ""
                total = self._sum(self._parts(shared, reader), wider)
                yield f"{_message_of(shared, reader)}_grad", (total, f"{wider or dtype}[{dims}")

    def _check_parts(self, shared: SharedParam) -> None:
        """Refuse parts of a gradient that are not exactly its summands."""
        batch = self.batches[0]
        parts = [batch.named[name].term for names in shared.parts.values() for name in names]
        gradient = batch.gradients.get(shared.param)
        left, found = [] if gradient is None else [gradient.term], list[int]()
        while left:
            term = left.pop()
            if term in parts or self.terms.heads[term] != ADDED:
                found.append(term)
            else:
                left += self.terms.args[term]
        if sorted(found) != sorted(parts):
            self.refuse(f"has another gradient of {shared.param} than the sum of what stages are said to compute")

    def _message(self, name: str) -> tuple[int, str] | None:
        """Return the term and the type of the value that a message names, or None if it is unknown."""
        number, _, value = name.removeprefix("m").partition("_")
        if name in self.once or not (number.isdecimal() and int(number) < len(self.batches)):
            return self.once.get(name)
        found = self.batches[int(number)].named.get(value)
        return (found.term, self.batches[0].types[value]) if isinstance(found, TermValue) else None

    # -- found

    def found(self, text: Text) -> dict[str, Found]:
        """Evaluate the step; return its results and effects by name, except sends."""
        part = self.part
        results, rest = self.step(text, "step")
        if self.taken["input"] != len(part.inputs):
            self.refuse(f"is given {self.taken['input']} inputs; want {len(part.inputs)}")
        found = {
            f"result {result} of micro-batch {number}": (self._term(value), self.terms.here)
            for (result, number), value in zip(part.results, results, strict=True)
        }
        self.deliver_all(rest)
        if self.pending:
            self.terms.here = self.pending[0].place
            self.refuse("is never waited for")
        effects = {"random draw {}": "random draw", "write {} to a buffer": "buffer"}
        found |= {text.format(i): term for text, kind in effects.items() for i, term in enumerate(self.effects[kind])}
        return found | {f"the gradient of {name}": term for name, term in self.delivered.items()}

    def check_messages(self) -> None:
        """Refuse messages that are not this rank's."""
        for kind, given, wanted in (
            ("send", self.given, self.part.sent),
            ("recv", self.taken_messages, self.part.received),
        ):
            self.terms.here = self.ends[-1]
            for message in (*wanted, *given):
                count, want = given.count(message), wanted.count(message)
                if count != want:
                    self.refuse(f"comes after {count} lines {kind} {message.name!r}, {message.peer}; want {want}")

    def _input(self, kind: str, number: int) -> int:
        return self.terms.make(_input_head(*self.part.inputs[number]))

    def _draw(self, number: int) -> int:
        if number >= len(self.part.draws):
            return self.terms.make(f"draw {number} of this rank")
        batch, draw = self.part.draws[number]
        return self.terms.make(f"draw {draw} of micro-batch {batch}")

    def _bound(self, name: str, margin: Margin) -> Any:
        words = f"constant {name}" if margin.words == "constant" else margin.words
        self.bound += 1
        if self.part.bound[self.bound - 1 : self.bound] != (words,):
            self.refuse(f"takes {words} as {name}, which is not what is given there")
        return super()._bound(name, margin)

    def _given(self, term: int, owner: str, margin: Margin) -> TermValue:
        value, head = super()._given(term, owner, margin), self.terms.heads[term]
        if head.startswith("input ") and head.removeprefix("input ").isdecimal():
            self.buffers[value.memory] = int(head.removeprefix("input "))
        return value

    # -- the functions of a step

    def _send(self, value: Any, group: Any, to: str, message: str, strides: Any = None) -> Begun:
        sent = self._passed(group, to, message, strides)
        self.given.append(sent)
        again = f", message {len(self.given)}" if sent in self.given[:-1] else ""
        what = f"what is sent as {sent.name!r} to {sent.peer}{again}"
        self.sent[what] = self._term(value), self.terms.here
        self.named[what] = (self._message(sent.name) or (-1,))[0], ()
        self.pending.append(BeingSent(value, self.terms.here))
        return Begun([self.pending[-1]])

    def _recv(self, group: Any, said: TermValue, source: str, message: str, strides: Any = None) -> Begun:
        received = self._passed(group, source, message, strides)
        self.taken_messages.append(received)
        term, type_ = self._message(received.name) or self.refuse(f"receives {received.name!r}, which was not traced")
        if self.terms.heads[said.term] != f"str {type_!r}":
            self.refuse(f"receives as {self.terms.heads[said.term]} what is {type_}")
        return Begun([TermValue(term, Storage("", self.phase), -1)])

    def _passed(self, group: Any, peer: str, message: str, strides: Any) -> NamedMessage:
        if not isinstance(group, Lease) or group.kind != f"group {self.along}":
            self.refuse("passes something on to no rank of the pipeline")
        laid = None if strides is None else tuple(int(stride.removeprefix("int ")) for stride in strides)
        return NamedMessage(int(peer.removeprefix("int ")), ast.literal_eval(message.removeprefix("str ")), laid)

    def _wait(self, started: Any) -> Any:
        found = super()._wait(started)
        if not isinstance(found, BeingSent):
            return found
        self.pending.remove(found)
        if self._alive(found.value) is not found.value:
            self.refuse("waits for a value that was written to while it was sent")
        return None

    def _add(self, shards: Any, sums: Any, grads: Any, dtype: str = "") -> Averages:
        self._declared("adds up", shards, dtype, (param.summed for param in shards.params))
        terms = self._summands(shards, sums, own=True)
        for name, term in self._summands(shards, grads, own=False).items():
            cast = dtype if dtype == self.params[name].summed else ""
            terms[name] = self._sum([terms[name], term], cast)
        return self._averages(shards, terms)

    def _summands(self, shards: UnitPart, given: Any, *, own: bool) -> dict[str, int]:
        """Return gradients, averages or sums of a unit, by parameter; `own`: the sum reuses their memory."""
        if own or isinstance(given, Averages):
            return {param.name: self.dense(grad) for param, grad in self._taken(shards, given)}
        pairs = zip(shards.params, given, strict=True)
        return {param.name: self.dense(grad) for param, grad in pairs if not self._is_none(grad)}

    def _plus(self, first: Any, second: Any, dtype: str = "") -> TermValue:
        return self._made(self._sum([self._term(first), self._term(second)], dtype))

    def _write(self, buffer: Any, value: Any) -> None:
        if buffer.memory not in self.buffers:
            self.refuse("writes to something that is not a buffer")
        term, memory = self._term(value), buffer.memory
        written = self.terms.make(f"write to input {self.buffers[memory]}", term)
        self.effects["buffer"].append((written, self.terms.here))
        memory.written = self.terms.make(f"write {len(self.effects['buffer'])}", written)
        now = TermValue(term, memory, memory.written)
        self.scope |= {name: now for name, old in self.scope.items() if old is buffer}


def _type(found: tuple[str, str, str]) -> str:
    return f"{found[1]}[{found[2]}]"


def _input_head(kind: str, number: int, microbatch: int | None) -> str:
    return f"{kind} {number}" + ("" if microbatch is None or kind == "tangent" else f" of micro-batch {microbatch}")


def _message_of(shared: SharedParam, reader: int) -> str:
    """Return the name of the message that lends a parameter to a stage."""
    return f"stage{reader}_{shared.value}"
