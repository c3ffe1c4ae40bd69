"""Steps of pipelines, as the checker reads them: what one rank computes of a traced step, for each micro-batch.

    m0_h_recv = recv(pp, 'f32[8, 64]', source=0, message='m0_h')     # what was traced as h, of micro-batch 0
    m0_dh_sent = send(m0_dh, pp, to=0, message='m0_dh')              # must be what was traced as dh

The traced step is evaluated once for each micro-batch. What is received counts as what its message names, and what is
sent has to be that. Which part of the step is this rank's the manifest says, of which `zcompile.proof.parts` sees that
those of all ranks are the whole of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zcompile.proof.checker import Evaluation, Found, followed, proof_of, regions_of
from zcompile.proof.checker_runtime import RUNTIME, Begun
from zcompile.proof.checker_terms import TermTable
from zcompile.proof.checker_texts import CAPTURE, STEP, Margin, ParamText, Text, dotted
from zcompile.proof.checker_values import (
    Averages,
    BeingSent,
    Lease,
    NamedMessage,
    Proof,
    RankPart,
    SharedParam,
    Storage,
    TermValue,
    UnitPart,
)


def prove_step(texts: Mapping[str, str], part: RankPart, rules: Sequence[Mapping[str, str]] = ()) -> Proof:
    """That the step of these files computes a rank's part of the step that was traced, if it receives what is named.

    Args:
        texts: The files of a program by name: CAPTURE, STEP, and `regions/region_0.py` and so on.
        part: What of the traced step is this rank's.
        rules: As for `zcompile.proof.checker.prove`.

    Raises:
        ProofError: it computes something else, or what is not known here; with the line.
    """

    def proven(files: Mapping[str, Text], terms: TermTable) -> Proof:
        capture, batches = files[CAPTURE], list[Microbatch]()
        for number in range(part.microbatches):
            batches.append(Microbatch(terms, capture, part, number, batches[-1].buffers if batches else {}))
        batches[0].check_claims(capture)
        step = RankStep(terms, capture, regions_of(files), part, batches)
        wanted = step.wanted()
        known = len(terms.heads)
        found = step.found(files[STEP])
        step.compare(wanted | step.named, found | step.sent, known)
        step.check_effects(known)
        return proof_of(files, terms, sum(what.startswith("the gradient") for what in wanted))

    return followed(proven, texts, rules)


ADDED = "aten.add.Tensor"


class Microbatch(Evaluation):
    """The traced step of one micro-batch; `buffers`: the terms that those before it have left in buffers, by input."""

    def __init__(
        self, terms: TermTable, capture: Text, part: RankPart, number: int, buffers: Mapping[int, int]
    ) -> None:
        super().__init__(terms, capture, None, set())
        self.part, self.number, self.buffers = part, number, dict(buffers)
        self.named, self.types = dict[str, Any](), dict[str, str]()
        self.results, left = self.step(capture, "forward")
        _, self.gradients = self.step(capture, "backward", left)
        self.buffers = {place: self._term(self.results[result]) for result, place in part.written}

    def _input(self, kind: str, number: int) -> int:
        if kind == "input" and number in self.buffers:
            return self.buffers[number]
        return self.terms.make(_input_head(kind, number, None if number in self.part.held else self.number))

    def _draw(self, number: int) -> int:
        return self.terms.make(f"draw {number} of micro-batch {self.number}")

    def _crossed(self, value: Any, words: str) -> Any:
        return value  # what is written to buffers are results

    def run(self, text: Text, name: str, scope: dict[str, Any], above: Any = ()) -> Any:
        self.named |= scope
        arguments = text.arguments(name) if not self.number else ()
        self.types |= {one: _type(margin.types[0]) for one, margin in arguments if margin.types}
        return super().run(text, name, scope, above)

    def _bind(self, text: Text, target: ast.expr, value: Any) -> None:
        super()._bind(text, target, value)
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        self.types |= {} if self.number else {name: _type(found) for name, found in text.types(names).items()}
        self.named |= {name: self.scope[name] for name in map(dotted, names) if name in self.scope}


class RankStep(Evaluation):
    """The step of a rank, which has a part of the traced one."""

    def __init__(
        self,
        terms: TermTable,
        capture: Text,
        regions: Mapping[str, Text],
        part: RankPart,
        batches: Sequence[Microbatch],
    ) -> None:
        super().__init__(terms, capture, regions, set())
        self.part, self.batches, self.functions = part, batches, RUNTIME | {"add", "plus", "write", "send", "recv"}
        self.once = dict(one for shared in part.shared for one in self._once(shared))
        self.buffers, self.bound = dict[Storage, int](), 0
        self.sent, self.named, self.pending = dict[str, Found](), dict[str, Found](), list[BeingSent]()
        self.given, self.taken_messages = list[NamedMessage](), list[NamedMessage]()

    # -- what is wanted

    def wanted(self) -> dict[str, Found]:
        """All that the rank gives and does but for what it sends, each by what it is."""
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
        """What the optimizer must get of a parameter: sums over micro-batches in order, of averages or averaged."""
        shared = next((one for one in self.part.shared if one.param == param.name), None)
        if shared is None:
            each = [batch.dense(batch.gradients[param.name]) for batch in self.batches]
        else:
            each = self._parts(shared, shared.home)
            each += [self.once[f"{_message_of(shared, one)}_grad"][0] for one in shared.readers if one in shared.parts]
        values = [TermValue(one, Storage(""), -1) for one in each]
        if self.stage >= 2:
            mean = self._sum([self.average(param, one, "scatter", param.reduced) for one in values])
        else:
            total = TermValue(self._sum(each, param.summed), Storage(""), -1)
            mean = self.average(param, total, "scatter", param.reduced)
        return self.across(param, mean, param.reduced, param.across) if self.outside else mean

    def _sum(self, each: Sequence[int], dtype: str = "") -> int:
        """The sum of terms in their order, cast to a dtype with the first two."""
        total = each[0]
        for number, one in enumerate(each[1:]):
            total = self.terms.make(f"sum {'' if number else dtype}".rstrip(), total, one)
        return total

    def _parts(self, shared: SharedParam, stage: int) -> list[int]:
        """What a stage computes of the gradient of a parameter that several read, for each micro-batch."""
        totals = []
        for batch in self.batches:
            first, *others = (batch.named[name].term for name in shared.parts[stage])
            for other in others:
                first = self.terms.make(ADDED, first, other)
            totals.append(first)
        return totals

    def _once(self, shared: SharedParam) -> Iterator[tuple[str, tuple[int, str]]]:
        """What is sent once a step of a parameter that several stages read, by its message: its value, and sums."""
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
        """Refuse parts of a gradient that are not all that it is the sum of, each once."""
        batch = self.batches[0]
        parts = [batch.named[name].term for names in shared.parts.values() for name in names]
        gradient = batch.gradients.get(shared.param)
        left, found = [] if gradient is None else [gradient.term], list[int]()
        while left:
            one = left.pop()
            if one in parts or self.terms.heads[one] != ADDED:
                found.append(one)
            else:
                left += self.terms.args[one]
        if sorted(found) != sorted(parts):
            self.refuse(f"has another gradient of {shared.param} than the sum of what stages are said to compute")

    def _message(self, name: str) -> tuple[int, str] | None:
        """The term and the type of what a message names, if that is known."""
        number, _, value = name.removeprefix("m").partition("_")
        if name in self.once or not (number.isdecimal() and int(number) < len(self.batches)):
            return self.once.get(name)
        found = self.batches[int(number)].named.get(value)
        return (found.term, self.batches[0].types[value]) if isinstance(found, TermValue) else None

    # -- what is found

    def found(self, text: Text) -> dict[str, Found]:
        """All that the step gives and does but for what it sends."""
        part = self.part
        results, rest = self.step(text, "step")
        if self.taken["input"] != len(part.inputs):
            self.refuse(f"is given {self.taken['input']} inputs; want {len(part.inputs)}")
        found = {
            f"result {result} of micro-batch {number}": (self._term(one), self.terms.here)
            for (result, number), one in zip(part.results, results, strict=True)
        }
        for grads in rest:
            self.deliver(grads)
        if rest and any(shards.version for shards in self.units.values()):
            self.refuse("returns gradients, of which a program that updates uses all")
        if self.pending:
            self.terms.here = self.pending[0].place
            self.refuse("is never waited for")
        effects = {"random draw {}": "random draw", "write {} to a buffer": "buffer"}
        found |= {said.format(at): one for said, kind in effects.items() for at, one in enumerate(self.effects[kind])}
        return found | {f"the gradient of {name}": one for name, one in self.delivered.items()}

    def check_effects(self, known: int) -> None:
        """Refuse messages that are not this rank's, and what regions do that was not traced."""
        for kind, given, wanted in (
            ("send", self.given, self.part.sent),
            ("recv", self.taken_messages, self.part.received),
        ):
            self.terms.here = self.ends[-1]
            for one in (*wanted, *given):
                counts = given.count(one), wanted.count(one)
                if len({*counts}) > 1:
                    self.refuse(f"comes behind {counts[0]} lines {kind} {one.name!r}, {one.peer}; want {counts[1]}")
        for kind in ("collective", "write"):
            for term, place in self.effects[kind]:
                self.terms.here = place
                if term >= known:
                    self.refuse(f"is a {kind} that was not traced")

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
        one = self._passed(group, to, message, strides)
        self.given.append(one)
        again = f", message {len(self.given)}" if one in self.given[:-1] else ""
        what = f"what is sent as {one.name!r} to {one.peer}{again}"
        self.sent[what] = self._term(value), self.terms.here
        self.named[what] = (self._message(one.name) or (-1,))[0], ()
        self.pending.append(BeingSent(value, self.terms.here))
        return Begun([self.pending[-1]])

    def _recv(self, group: Any, said: TermValue, source: str, message: str, strides: Any = None) -> Begun:
        one = self._passed(group, source, message, strides)
        self.taken_messages.append(one)
        term, type_ = self._message(one.name) or self.refuse(f"receives {one.name!r}, which was not traced")
        if self.terms.heads[said.term] != f"str {type_!r}":
            self.refuse(f"receives as {self.terms.heads[said.term]} what is {type_}")
        return Begun([TermValue(term, Storage("", self.phase), -1)])

    def _passed(self, group: Any, peer: str, message: str, strides: Any) -> NamedMessage:
        if not isinstance(group, Lease) or group.kind != f"group {self.along}":
            self.refuse("passes something on to no rank of the pipeline")
        laid = None if strides is None else tuple(int(one.removeprefix("int ")) for one in strides)
        return NamedMessage(int(peer.removeprefix("int ")), ast.literal_eval(message.removeprefix("str ")), laid)

    def _wait(self, started: Any) -> Any:
        found = super()._wait(started)
        if not isinstance(found, BeingSent):
            return found
        self.pending.remove(found)
        if self._alive(found.value) is not found.value:
            self.refuse("waits for what was written to while it was being sent")
        return None

    def _add(self, shards: Any, sums: Any, grads: Any, dtype: str = "") -> Averages:
        self._declared("adds up", shards, dtype, (param.summed for param in shards.params))
        terms = self._summands(shards, sums, own=True)
        for name, term in self._summands(shards, grads, own=False).items():
            cast = dtype if dtype == self.params[name].summed else ""
            terms[name] = self._sum([terms[name], term], cast)
        return Averages(shards, terms, self.terms.here, Storage(""))

    def _summands(self, shards: UnitPart, given: Any, *, own: bool) -> dict[str, int]:
        """Gradients, averages or sums of a unit, by parameter; `own`: the sum takes their memory."""
        if own or isinstance(given, Averages):
            return {param.name: self.dense(grad) for param, grad in self._taken(shards, given)}
        pairs = zip(shards.params, given, strict=True)
        return {param.name: self.dense(grad) for param, grad in pairs if not self._is_none(grad)}

    def _plus(self, one: Any, other: Any, dtype: str = "") -> TermValue:
        return self._made(self._sum([self._term(one), self._term(other)], dtype))

    def _write(self, buffer: Any, value: Any) -> None:
        if buffer.memory not in self.buffers:
            self.refuse("writes to what is no buffer")
        term, memory = self._term(value), buffer.memory
        written = self.terms.make(f"write to input {self.buffers[memory]}", term)
        self.effects["buffer"].append((written, self.terms.here))
        memory.written = self.terms.make(f"write {len(self.effects['buffer'])}", written)
        now = TermValue(term, memory, memory.written)
        self.scope |= {name: now for name, one in self.scope.items() if one is buffer}


def _type(found: tuple[str, str, str]) -> str:
    return f"{found[1]}[{found[2]}]"


def _input_head(kind: str, number: int, microbatch: int | None) -> str:
    return f"{kind} {number}" + ("" if microbatch is None or kind == "tangent" else f" of micro-batch {microbatch}")


def _message_of(shared: SharedParam, reader: int) -> str:
    """What the message is called by which a stage is lent a parameter."""
    return f"stage{reader}_{shared.value}"
