"""The checker: says from the texts of a dump alone whether the program that runs computes the step that was traced.

It shares no code with what made them: each text is read by Python's `ast`, and every value gets a term that says what
computes it and of what. Inputs, whole parameters and numbered random draws are leaves; regions are computed where they
are called; equal terms are one number. So gathering, moving, saving, copying and computing again leave a value's term
as it is, and a program is proven if all that it returns, averages and writes has the terms that the traced step gives.
Beside its term a value has its memory: nothing is read that is released, or that a reduction works on in place.

docs/proof.md says what is trusted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zcompile.errors import ProofError
from zcompile.proof.checker_grammar import is_function_of_values, packet_of
from zcompile.proof.checker_runtime import DTYPES, RUNTIME, RuntimeLines
from zcompile.proof.checker_terms import BOUND, FUNCTIONS, LISTS, LITERAL, RANDOM, SAME, VIEWS, WHOLE, TermTable
from zcompile.proof.checker_texts import BACKWARD, CAPTURE, FIX, FORWARD, Margin, Place, Text, dotted, literal, refusal
from zcompile.proof.checker_values import Lease, Moved, Proof, SecondaryPart, Storage, TermValue, UnitPart, WholeUnit

Found = tuple[int, Place]
"""A term, and where it is made."""


class Evaluation(RuntimeLines):
    """The values of a step: of the traced one, or (with regions) of the program that runs."""

    def whole(self, forward: Text, backward: Text | None) -> dict[str, Found]:
        """All that a step gives and does but for the gradients of parameters of the traced one, each by what it is."""
        results, left = self.step(forward, "forward")
        found = {f"result {i}": (self._term(one), self.terms.here) for i, one in enumerate(results)}
        results, rest = self.step(backward, "backward", left) if backward else ([], [])
        found |= {f"the gradient of input {i}": (self._term(one), self.terms.here) for i, one in enumerate(results)}
        found |= {f"the number of {one}s": (self.terms.make(f"{n}"), self.terms.here) for one, n in self.taken.items()}
        if self.runs:
            for grads in rest:
                self.deliver(grads)
            if rest and any(shards.version for shards in self.units.values()):
                self.refuse("returns gradients, of which a program that updates uses all")
        else:
            self.gradients = dict(rest)
        for unit, (options, version, place) in self.ahead.items():
            self.terms.here = place
            if options != self.gathers.get(unit) or version != self.units[unit].version:
                self.refuse(f"is not what the next forward gathers first of {unit}, or is gathered before its update")
        found |= {f"{kind} {i}": one for kind, terms in self.effects.items() for i, one in enumerate(terms)}
        return found | {f"the gradient of {name}": one for name, one in self.delivered.items()}

    def step(self, text: Text, phase: str, crossing: Sequence[Any] = ()) -> Any:
        """What a phase returns, given what the forward has left for it and what the caller gives."""
        self.phase, arguments, scope = phase, text.arguments(phase), dict[str, Any]()
        self.terms.here = ((text, text.functions[phase].lineno),)
        bound = ([margin.words.split(" ")[0] in BOUND for _, margin in arguments] + [False]).index(False)
        kind = "tangent" if phase == "backward" else "input"
        self.taken[kind] = len(arguments) - bound - len(crossing)
        for number, (name, margin) in enumerate(arguments, -bound):
            if number < 0:
                scope[name] = self._bound(name, margin)
            elif number < len(crossing):
                scope[name] = self._crossed(crossing[number], margin.words)
            else:
                scope[name] = self._given(self._input(kind, number - len(crossing)), f"the {kind} {name}", margin)
                self.terms.names.setdefault(scope[name].term, name)
                self.mutated |= {scope[name].memory} if margin.words == "mutated" else set()
        results, rest = self.run(text, phase, scope)
        self.ends.append(self.terms.here)
        if any(one.memory.graph for one in results):
            self.refuse("returns what lies in the memory of a CUDA graph, to which the next step writes")
        return results, rest

    def _bound(self, name: str, margin: Margin) -> Any:
        kind, _, rest = margin.words.partition(" ")
        if kind == "unit":
            return self.units[rest]
        if kind == "parameter":
            full = self.params[rest].full(margin.types[0][1])
            return self._given(self.terms.make(full), f"the parameter {rest}", margin)
        if kind == "constant":
            return self._given(self.terms.make(f"constant {name}"), f"the constant {name}", margin)
        return Lease(margin.words, int(margin.types[0][2]) if kind == "arena" else 0)

    def _input(self, kind: str, number: int) -> int:
        """The term of what the caller gives."""
        return self.terms.make(f"{kind} {number}")

    def _draw(self, number: int) -> int:
        """The term of the numbers that are drawn there."""
        return self.terms.make(f"draw {number}")

    def _given(self, term: int, owner: str, margin: Margin) -> TermValue:
        if margin.types and margin.types[0][0] and not self.runs:
            self.same.add(term)
        return TermValue(term, Storage(owner), -1)

    def _crossed(self, value: Any, words: str) -> Any:
        """What the forward has left, as the backward finds it: not what was written to meanwhile."""
        if type(value) is list:
            return [self._crossed(one, "") for one in value]
        if not isinstance(value, (TermValue, WholeUnit, SecondaryPart, Moved)):
            self.refuse(f"takes what does not outlive the forward ({type(value).__name__})")
        if isinstance(value, (WholeUnit, SecondaryPart)):
            kind = "full" if isinstance(value, WholeUnit) else "secondary"
            if words != f"{kind} unit {value.shards.unit}":
                self.refuse(f"takes the {kind} unit {value.shards.unit} as {words!r}")
        if isinstance(value, TermValue):
            term = self.terms.make("mutated", value.term) if value.memory in self.mutated else value.term
            return TermValue(term, value.memory, value.seen, (*value.via, self.ends[0]))
        return value

    def check_claims(self, capture: Text) -> None:
        """Raise ProofError where units say of a parameter that has a gradient that it is unused."""
        if claimed := [name for name in self.gradients if "unused" in self.params[name].flags]:
            raise ProofError(capture.name, f"says that {claimed[0]} is unused, and has a gradient of it", FIX)

    def compare(self, wanted: Mapping[str, Found], found: Mapping[str, Found], known: int) -> None:
        """Raise ProofError where a program gives or does something else than is wanted, or what is not known.

        `known`: the number of terms of the traced step.
        """
        for what in [*wanted, *found]:
            end = self.ends[0 if what.startswith("result") else -1]
            (one, _), (other, place) = wanted.get(what, (-1, ())), found.get(what, (-1, end))
            if one != other:
                raise self.terms.difference(known, what, one, other, place)
        for place, problem in self.doubts:
            self.terms.here = place
            self.refuse(problem)

    def run(self, text: Text, name: str, scope: dict[str, Any], above: Place = ()) -> Any:
        """What a function returns."""
        outer, self.scope = self.scope, scope
        for statement in text.functions[name].body[1:]:
            called = getattr(statement, "value", None) or statement
            self.terms.here = (*above, (text, called.lineno))
            match statement:
                case ast.Return(value=ast.expr() as value):
                    result, self.scope = self._value(value), outer
                    return result
                case ast.Delete(targets=targets):
                    for target in targets:
                        if isinstance(was := self.scope.get(dotted(target), "is defined nowhere"), str):
                            self.refuse(f"{dotted(target)} {was}")
                        self.scope[dotted(target)] = f"was deleted at {self._line()}"
                case ast.Expr(value=ast.Call() as call):
                    if self._call(call) is not None and not packet_of(dotted(call.func)).endswith("_"):
                        self.refuse("does nothing, or what is not known here: it gives a value, which has no name")
                case ast.Assign(targets=[target], value=ast.Call() as call):
                    self._bind(text, target, self._call(call))
        return self.refuse(f"{name} returns nothing")

    def _bind(self, text: Text, target: ast.expr, value: Any) -> None:
        """Give the results of a call their names, and mark what the traced step says that all ranks have."""
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        count = len(names) - isinstance(names[-1], ast.Starred)
        if not isinstance(target, ast.Tuple):
            results = value if type(value) is list and len(value) == 1 else [value]
        elif type(value) is list and (len(value) < count or len(value) > count == len(names)):
            self.refuse(f"unpacks {len(value)} results into {count} names")
        else:
            if count < len(names) and type(value) is not list and ast.unparse(names[-1]) != "*_":
                self.refuse("gives one name to results of which it is not known how many there are")
            results = [self._item(value, i) for i in range(count)] + ([value[count:]] if type(value) is list else [[]])
        marks = text.types(names) if self.marks else dict[str, tuple[str, str, str]]()
        reserved = self.functions if self._outer else RUNTIME
        for node, result in zip(names, results, strict=False):
            name = dotted(node.value if isinstance(node, ast.Starred) else node)
            if name in ("", "box", *FUNCTIONS, *reserved) or name in self.regions:
                self.refuse(f"gives the name of a function to a value: {name}")
            if name != "_":
                self.scope[name] = result
                if name in marks and marks[name][0] and self._is_replicated(result.term):
                    self.same.add(result.term)

    def _is_replicated(self, term: int) -> bool:
        """True if a value follows on all ranks of the group from what they have alike, or is made by all of them."""
        head, args = self.terms.heads[term], self.terms.args[term]
        if head.startswith("item "):
            return self._is_replicated(args[0])
        if head.startswith("ops._c10d_functional.") and packet_of(head) in WHOLE:
            self.group = args[-1] if self.group < 0 else self.group
            return self.group == args[-1]
        follows = (head.startswith(("aten.", "ops.prims.")) and "empty" not in head) or packet_of(head) == "wait_tensor"
        return follows and all(map(self._is_same, args))

    def _is_same(self, term: int) -> bool:
        head = self.terms.heads[term]
        constant = LITERAL.match(head) or head.startswith("torch.")
        return bool(term in self.same or constant or (head in LISTS and all(map(self._is_same, self.terms.args[term]))))

    def _item(self, value: Any, index: int) -> Any:
        """One of several results; each has memory of its own, unless they are views."""
        if type(value) is list:
            return value[index]
        shown = value.memory if packet_of(self.terms.heads[value.term]) in VIEWS else None
        return self._made(self.terms.make(f"item {index}", value.term), shown)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                found = self.scope.get(name, "is defined nowhere")
                return self.refuse(f"{name} {found}") if isinstance(found, str) else self._alive(found)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return self._values(elements) if isinstance(node, ast.List) else tuple(self._values(elements))
            case ast.Dict(keys=keys, values=values):
                return {ast.literal_eval(key): self._value(one) for key, one in zip(keys, values, strict=True) if key}
            case ast.Subscript(value=arena, slice=ast.Slice(lower=ast.expr() as low, upper=ast.expr() as high)):
                place = range(ast.literal_eval(low), ast.literal_eval(high))
                if not 0 <= place.start < place.stop <= self._value(arena).size:
                    self.refuse("names bytes that the arena does not have")
                return place
        made = isinstance(node, ast.Call) and dotted(node.func) in ("float", "torch.device")
        path = ast.unparse(node) if made else dotted(node)
        head = path if path.startswith(("torch.", "aten.", "ops.", "float(")) else literal(node)
        return self._made(self.terms.make(head), Storage("a constant"))

    def _values(self, nodes: Sequence[ast.expr]) -> list[Any]:
        values: list[Any] = []
        for node in nodes:
            values += self._value(node.value) if isinstance(node, ast.Starred) else [self._value(node)]
        return values

    def _call(self, call: ast.Call) -> Any:
        name, given = dotted(call.func), self._values(call.args)
        named = {str(keyword.arg): self._value(keyword.value) for keyword in call.keywords}
        if self._outer and name in self.regions and not named:
            return self._region(name, given)
        if self._outer and name in self.functions and self.runs:
            heads = {key: self._keyword(one) for key, one in named.items()}
            return getattr(self, f"_{name}")(*given, **{key: DTYPES.get(str(one), one) for key, one in heads.items()})
        if name == "graph" and len(given) == 1 and not named:
            return self._made(self.terms.make("graph", given[0].term))
        if not is_function_of_values(name) or "out" in named:
            self.refuse(f"{ast.unparse(call.func)} is no function that is known here")
        return self._operation(name, given, named)

    @property
    def _outer(self) -> bool:
        """True for a line that is in no region."""
        return len(self.terms.here) == 1

    def _keyword(self, value: Any) -> Any:
        if type(value) is tuple:
            return [*map(self._keyword, value)]
        return value if isinstance(value, range) else self.terms.heads[value.term]

    def _region(self, name: str, given: list[Any]) -> Any:
        text, here, scope, taken = self.regions[name], self.terms.here, dict[str, Any](), [-1]
        for inner, margin in text.arguments(name):
            words = margin.words.split(" ")  # argument 0 item 3
            value = given[int(words[1])]
            scope[inner] = value
            if len(words) > 2:
                made = self._parameter(value, int(words[3]))
                passed = (value.place,) if isinstance(value, WholeUnit) else ()
                scope[inner] = made.by(*passed, (*here, (text, margin.line)))
            taken.append(int(words[1]))
        if len(given) != max(taken) + 1:
            self.refuse(f"gives {len(given)} values to {name}, which takes {max(taken) + 1}")
        self.graph = bool(text.functions[name].decorator_list)
        results = [one.by(self.terms.here) for one in self.run(text, name, scope, here)]
        self.graph, self.terms.here = False, here
        return results

    def _parameter(self, owner: Any, item: int) -> Any:
        """A parameter that a region takes: of a gathered unit, or of one that every rank has whole."""
        if not isinstance(owner, (WholeUnit, UnitPart)):
            self.refuse(f"takes a parameter of what is no full unit, but {type(owner).__name__}")
        shards, dtype = (owner.shards, owner.dtype) if isinstance(owner, WholeUnit) else (owner, None)
        param = shards.params[item]
        is_whole = "whole" in param.flags
        cast = dtype is not None and (is_whole or dtype == param.computed)
        head = param.full((param.computed if cast else "") or param.dtype)
        head = f"shard({param.name})" if dtype is None and not is_whole else head
        return self._alive(self._made(self.terms.make(head, *owner.version), owner.memory))

    def _operation(self, name: str, given: list[Any], named: Mapping[str, Any]) -> Any:
        make, heads, draws = self.terms.make, self.terms.heads, self.effects["random draw"]
        packet, values, draw = packet_of(name), [*given, *named.values()], self._draw(len(draws))
        if name == "operator.getitem" and len(given) == 2:
            return self._item(given[0], int(heads[given[1].term].removeprefix("int ")))
        if name == "ops.higher_order.run_and_save_rng_state":
            return [self._made(make("state", draw)), self._operation(heads[given[0].term], given[1:], named)]
        if replays := name == "ops.higher_order.run_with_rng_state":
            (draw,), name, values = self.terms.args[given[0].term], heads[given[1].term], values[2:]
            packet = packet_of(name)
        self.terms.operations |= set() if self.runs else {name}
        if name.startswith(("aten.", "ops.")) and name not in (*SAME, *self.terms.operations):
            self.doubts.append((self.terms.here, f"calls {name}, which was not traced: it is not known what it does"))
        terms = [*map(self._term, values)]
        shares = [heads[term] for term in terms[: len(terms) - len(named)] if heads[term].startswith("float ")]
        shares += [heads[one.term] for key, one in named.items() if key == "dropout_p"]
        is_random = replays or packet.removesuffix("_") in RANDOM
        is_random = is_random or ("attention" in packet and shares[:1] not in ([], ["float 0.0"]))
        plain, known = name in SAME and len(values) == 1, len(heads)
        term = terms[0] if plain else make("|".join([name, *named]), *([draw] if is_random else []), *terms)
        if term >= known:
            self.terms.routes[term] = {one.term: one.via for one in values if isinstance(one, TermValue) and one.via}
        if is_random and not replays:
            draws.append((term, self.terms.here))
        if name.startswith(("ops._c10d_functional.", "ops._dtensor.")) and packet != "wait_tensor":
            self.effects["collective"].append((term, self.terms.here))
        if packet.endswith("_") and not packet.endswith("__"):
            given[0].memory.written = make(f"write to {given[0].memory.owner}", term)
            self.effects["write"].append((given[0].memory.written, self.terms.here))
            return self._made(term, given[0].memory)
        via = next((one.via for one in values if isinstance(one, TermValue) and one.via), ())
        return self._made(term, given[0].memory if packet in VIEWS else None).by(*via)


# -- the proof --------------------------------------------------------------------------------------------------------


def prove(texts: Mapping[str, str], rules: Sequence[Mapping[str, str]] = ()) -> Proof:
    """That the program of these files computes the step that was traced.

    Args:
        texts: The files of a program by name: CAPTURE, FORWARD, BACKWARD if there is one, and `regions/region_0.py`.
        rules: By which passes change values: a name, a pattern such as `cast(x, torch.bfloat16)`, a replacement.

    Raises:
        ProofError: it computes something else, or what is not known here; with the line.
    """
    return followed(_proven, texts, rules)


def followed(
    proven: Callable[[Mapping[str, Text], TermTable], Proof],
    texts: Mapping[str, str],
    rules: Sequence[Mapping[str, str]],
) -> Proof:
    """What `proven` finds of the files of a program, and an error for a line that it cannot follow."""
    files = {name: Text(name, text) for name, text in texts.items()}
    terms = TermTable(rules)
    try:
        return proven(files, terms)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise refusal(terms.here, f"cannot be followed ({type(error).__name__}: {error})") from error


def _proven(files: Mapping[str, Text], terms: TermTable) -> Proof:
    capture = files[CAPTURE]
    if (BACKWARD in files) != ("backward" in capture.functions):
        raise ProofError(BACKWARD, "is missing, or is of another program", FIX)
    traced = Evaluation(terms, capture, None, set())
    wanted = traced.whole(capture, capture if BACKWARD in files else None)
    traced.check_claims(capture)
    averages, known = {how: traced.averages(how) for how in ("scatter", "held")}, len(terms.heads)
    program = Evaluation(terms, capture, regions_of(files), traced.same)
    found = program.whole(files[FORWARD], files.get(BACKWARD))
    program.compare(wanted | averages[program.how], found, known)
    return proof_of(files, terms, len(traced.gradients))


def regions_of(files: Mapping[str, Text]) -> dict[str, Text]:
    """The texts of regions by their names."""
    return {name[8:-3]: text for name, text in files.items() if name.startswith("regions/")}


def proof_of(files: Mapping[str, Text], terms: TermTable, gradients: int) -> Proof:
    """The proof that these files, which compute these terms, are."""
    return Proof(sum(len(text.lines) for text in files.values()), len(terms.heads), gradients, [*terms.applied])
