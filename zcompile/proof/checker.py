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
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from zcompile.errors import ProofError
from zcompile.proof.checker_grammar import is_function_of_values
from zcompile.proof.checker_terms import BOUND, FUNCTIONS, LISTS, LITERAL, RANDOM, SAME, VIEWS, WHOLE, TermTable
from zcompile.proof.checker_texts import (
    BACKWARD,
    CAPTURE,
    FIX,
    FORWARD,
    Margin,
    ParamText,
    Place,
    Text,
    dotted,
    full,
    literal,
    packet_of,
    told,
)
from zcompile.proof.checker_values import Averages, Begun, Lease, Moved, Proof, Storage, TermValue, UnitPart, WholeUnit

_RUNTIME = frozenset({"all_gather", "gather_ahead", "reduce_scatter", "all_reduce", "accumulate", "update", "wait"})
_RUNTIME |= {"release", "copy", "store", "offload", "fetch"}
_DTYPES = {f"torch.float{bits}": f"f{bits}" for bits in (16, 32, 64)} | {"torch.bfloat16": "bf16", "torch.int8": "i8"}


class Evaluation:
    """The values of a step: of the traced one, or (with regions) of the program that runs."""

    def __init__(self, terms: TermTable, capture: Text, regions: Mapping[str, Text] | None, same: set[int]) -> None:
        self.terms, self.regions, self.runs = terms, regions or {}, regions is not None
        self.same, self.group = same, -1
        """Terms of what all ranks of the one group of tensor parallelism are known to have."""
        bodies = (one for one in capture.body if isinstance(one, ast.Assign))
        said = {ast.unparse(one.targets[0]): ast.literal_eval(one.value) for one in bodies}
        if lacking := {"axes", "units"} - said.keys():
            raise ProofError(f"{capture.name} line 1", f"does not say what the {min(lacking)} are", FIX)
        self.units = {unit: UnitPart(unit, lines) for unit, lines in said["units"].items()}
        self.params = {param.name: param for shards in self.units.values() for param in shards.params}
        axes = " ".join(said["axes"].values())
        self.alone, self.marks = bool(re.search(r"shard 1\b", axes)), not self.runs and "tensor" in axes
        self.replicas = next((name for name, axis in said["axes"].items() if axis.startswith("replicate")), "")
        self.effects: dict[str, list[tuple[int, Place]]] = defaultdict(list)
        self.delivered: dict[str, tuple[int, Place]] = {}
        self.gathers: dict[str, Any] = {}
        self.ahead: dict[str, Any] = {}
        self.ranges: dict[Any, range] = {}
        self.mutated: set[Storage] = set()
        self.scope: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}
        self.taken: dict[str, int] = {}
        self.doubts: list[tuple[Place, str]] = []
        self.ends: list[Place] = []
        self.phase, self.how, self.graph = "", "scatter", False

    def refuse(self, problem: str) -> NoReturn:
        where, lines = told(self.terms.here)
        raise ProofError(where, f"{problem}{lines}", FIX)

    def whole(self, forward: Text, backward: Text | None) -> dict[str, tuple[int, Place]]:
        """All that a step gives and does but for the gradients of parameters of the traced one, each by what it is."""
        results, left = self.step(forward, "forward")
        found = {f"result {i}": (self._term(one), self.terms.here) for i, one in enumerate(results)}
        results, rest = self.step(backward, "backward", left) if backward else ([], [])
        found |= {f"the gradient of input {i}": (self._term(one), self.terms.here) for i, one in enumerate(results)}
        found |= {
            f"the number of {kind}s": (self.terms.make(f"{n}"), self.terms.here) for kind, n in self.taken.items()
        }
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
        for kind, terms in self.effects.items():
            found |= {f"{kind} {number}": one for number, one in enumerate(terms)}
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
                scope[name] = self._given(f"{kind} {number - len(crossing)}", f"the {kind} {name}", margin)
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
            return self._given(full(self.params[rest], margin.types[0][1]), f"the parameter {rest}", margin)
        if kind == "constant":
            return self._given(f"constant {name}", f"the constant {name}", margin)
        return Lease(margin.words, int(margin.types[0][2]) if kind == "arena" else 0)

    def _given(self, head: str, owner: str, margin: Margin) -> TermValue:
        term = self.terms.make(head)
        if margin.types and margin.types[0][0] and not self.runs:
            self.same.add(term)
        return TermValue(term, Storage(owner), -1)

    def _crossed(self, value: Any, words: str) -> Any:
        """What the forward has left, as the backward finds it: not what was written to meanwhile."""
        if type(value) is list:
            return [self._crossed(one, "") for one in value]
        if not isinstance(value, (TermValue, WholeUnit, Moved)):
            self.refuse(f"takes what does not outlive the forward ({type(value).__name__})")
        if isinstance(value, WholeUnit) and words != f"full unit {value.shards.unit}":
            self.refuse(f"takes the full unit {value.shards.unit} as {words!r}")
        if isinstance(value, TermValue):
            term = self.terms.make("mutated", value.term) if value.memory in self.mutated else value.term
            return TermValue(term, value.memory, value.seen, (*value.via, self.ends[0]))
        return value

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
        types: dict[int, Iterator[Any]] = {}
        for node, result in zip(names, results, strict=False):
            name = dotted(node.value if isinstance(node, ast.Starred) else node)
            if name in ("", "box", *FUNCTIONS, *_RUNTIME) or name in self.regions:
                self.refuse(f"gives the name of a function to a value: {name}")
            if name != "_":
                self.scope[name] = result
                if self.marks:
                    line = types.setdefault(node.lineno, iter(text.margin(node.lineno).types))
                    if next(line, ("",))[0] and self._alike(result.term):
                        self.same.add(result.term)

    def _alike(self, term: int) -> bool:
        """True if a value follows on all ranks of the group from what they have alike, or is made by all of them."""
        head, args = self.terms.heads[term], self.terms.args[term]
        if head.startswith("item "):
            return self._alike(args[0])
        if head.startswith("ops._c10d_functional.") and packet_of(head) in WHOLE:
            self.group = args[-1] if self.group < 0 else self.group
            return self.group == args[-1]
        follows = (head.startswith(("aten.", "ops.prims.")) and "empty" not in head) or packet_of(head) == "wait_tensor"
        return follows and all(map(self._is_same, args))

    def _is_same(self, term: int) -> bool:
        head = self.terms.heads[term]
        constant = LITERAL.match(head) or head.startswith("torch.")
        return bool(term in self.same or constant or (head in LISTS and all(map(self._is_same, self.terms.args[term]))))

    def _made(self, term: int, memory: Storage | None = None) -> TermValue:
        memory = memory or Storage("", self.phase, self.graph)
        return TermValue(term, memory, memory.written)

    def _moved(self, value: Any) -> TermValue:
        """A copy of a value."""
        return TermValue(self._term(value), Storage("", self.phase), -1, (*value.via, self.terms.here))

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

    def _alive(self, value: Any) -> Any:
        """A value as it is read now."""
        if type(value) is list:
            return [self._alive(one) for one in value]
        if isinstance(value, (TermValue, WholeUnit, Moved, Averages)) and value.memory.gone:
            self.refuse(f"reads the memory of {value.memory.owner or 'a value'}, which {value.memory.gone}")
        if isinstance(value, TermValue) and value.seen != value.memory.written:
            return self._made(self.terms.make("after", value.term, value.memory.written), value.memory)
        return value

    def _term(self, value: Any) -> int:
        if type(value) in (list, tuple):
            return self.terms.make(type(value).__name__, *map(self._term, value))
        if not isinstance(value, TermValue):
            self.refuse(f"computes with what is no value, but {type(value).__name__}")
        return value.term

    def _call(self, call: ast.Call) -> Any:
        name, given = dotted(call.func), self._values(call.args)
        named = {str(keyword.arg): self._value(keyword.value) for keyword in call.keywords}
        if len(self.terms.here) == 1 and name in self.regions and not named:
            return self._region(name, given)
        if len(self.terms.here) == 1 and name in _RUNTIME and self.runs:
            options = {key: one if isinstance(one, range) else self.terms.heads[one.term] for key, one in named.items()}
            return getattr(self, f"_{name}")(*given, **options)
        if name == "graph" and len(given) == 1 and not named:
            return self._made(self.terms.make("graph", given[0].term))
        if not is_function_of_values(name) or "out" in named:
            self.refuse(f"{ast.unparse(call.func)} is no function that is known here")
        return self._operation(name, given, named)

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

    def _parameter(self, owner: Any, item: int) -> TermValue:
        """A parameter that a region takes: of a gathered unit, or of one that every rank has whole."""
        if not isinstance(owner, (WholeUnit, UnitPart)):
            self.refuse(f"takes a parameter of what is no full unit, but {type(owner).__name__}")
        param = (owner.shards if isinstance(owner, WholeUnit) else owner).params[item]
        is_whole = "whole" in param.flags
        cast = isinstance(owner, WholeUnit) and (is_whole or owner.dtype == param.computed)
        head = full(param, (param.computed if cast else "") or param.dtype)
        head = head if is_whole or isinstance(owner, WholeUnit) else f"shard({param.name})"
        value: TermValue = self._alive(self._made(self.terms.make(head, *owner.version), owner.memory))
        return value

    def _operation(self, name: str, given: list[Any], named: Mapping[str, Any]) -> Any:
        make, heads, draws = self.terms.make, self.terms.heads, self.effects["random draw"]
        packet, values, draw = packet_of(name), [*given, *named.values()], make(f"draw {len(draws)}")
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

    # -- the runtime's functions

    def _line(self) -> str:
        text, line = self.terms.here[0]
        return f"{text.name} line {line}"

    def _lay(self, key: Any, at: range | None) -> None:
        """Take bytes of the arena."""
        if at is not None and any(at.start < one.stop and one.start < at.stop for one in self.ranges.values()):
            self.refuse("takes bytes of the arena that another line has")
        self.ranges |= {key: at} if at is not None else {}

    def _all_gather(self, shards: Any, keep: str = "", dtype: str = "", at: range | None = None) -> Begun:
        memory, dtype_ = Storage(f"the parameters of {shards.unit}"), _DTYPES.get(dtype, dtype)
        gathered = WholeUnit(shards, dtype_, shards.version, keep, memory, self.terms.here)
        shards.full.append(gathered.memory)
        if self.phase == "forward":
            self.gathers.setdefault(shards.unit, (keep, dtype))
        self._lay(gathered.memory, at)
        return Begun([gathered])

    def _gather_ahead(self, shards: Any, keep: str = "", dtype: str = "") -> None:
        if self.ahead.setdefault(shards.unit, one := ((keep, dtype), shards.version, self.terms.here)) is not one:
            self.refuse("gathers twice for the next step")
        for memory in shards.full if keep else ():
            memory.gone = f"is gathered anew at {self._line()}"

    def _wait(self, started: Any) -> Any:
        if not isinstance(started, Begun) or not started:
            self.refuse("waits for what is not under way")
        result = started.pop()
        if isinstance(result, Averages):
            self.ranges.pop(result.memory, None)
        return result

    def _release(self, full: Any) -> None:
        if not isinstance(full, WholeUnit) or full.keep:
            self.refuse("releases what is no full unit, or is kept for later programs")
        full.memory.gone = f"was released at {self._line()}"
        self.ranges.pop(full.memory, None)

    def _averaged(self, shards: UnitPart, grads: Any, how: str, dtype: str = "", *, holds: bool = True) -> Averages:
        """Each gradient as the ranks' mean, in memory that nothing else may read any more."""
        terms: dict[str, int] = {}
        for param, grad in zip(shards.params, grads, strict=True):
            if self.terms.heads[grad.term] != "NoneType None":
                memory = self._alive(grad).memory
                if memory.owner or memory.phase != "backward" or (holds and memory.graph):
                    self.refuse(
                        f"reduces in place {memory.owner or 'what it does not own'}, the gradient of {param.name}"
                    )
                memory.gone = f"was given away at {self._line()}"
                terms[param.name] = self.average(param, grad, how, dtype)
        return Averages(shards, terms, self.terms.here, Storage(""))

    def average(self, param: ParamText, grad: TermValue, how: str, dtype: str) -> int:
        """The mean of a gradient, cast before where the units say so; of what is sharded this rank's part."""
        cast = (self.terms.make(dtype),) if dtype and dtype == param.reduced else ()
        dense = self.terms.args[grad.term][0] if self.terms.heads[grad.term] == "aten.contiguous.default" else grad.term
        sent = self.terms.make("cast", dense, *cast) if cast else dense
        term = self.terms.make("held" if how == "held" else "mean", sent)
        term = self.terms.make("part", term) if how == "scatter" and "whole" not in param.flags else term
        self.terms.routes[term] = {grad.term: grad.via}
        return term

    def across(self, param: ParamText, mean: int, dtype: str, wire: str) -> int:
        """The mean over the ranks that have the same shards of what is one over those that shard, sent as `wire`."""
        cast = (self.terms.make(dtype),) if dtype and dtype == param.reduced else ()
        return self.terms.make(f"mean of replicas {wire if wire == param.across else ''}".rstrip(), mean, *cast)

    def averages(self, how: str) -> dict[str, tuple[int, Place]]:
        """What the optimizer must get, by the gradients that the traced step gives."""
        pairs = [(self.params[name], grad) for name, grad in self.gradients.items()]
        means = [self.average(one, grad, how, one.reduced) for one, grad in pairs]
        if self.replicas and how == "scatter":
            means = [self.across(one, m, one.reduced, one.across) for (one, _), m in zip(pairs, means, strict=True)]
        return {f"the gradient of {one.name}": (mean, ()) for (one, _), mean in zip(pairs, means, strict=True)}

    def _reduce_scatter(self, shards: Any, grads: Any, dtype: str = "", bucket: str = "", at: Any = None) -> Begun:
        holds = self.alone or any("whole" in param.flags for param in shards.params)
        result = self._averaged(shards, grads, "scatter", _DTYPES.get(dtype, dtype), holds=holds)
        self._lay(result.memory, at)
        return Begun([result])

    def _all_reduce(self, shards: Any, grads: Any, group: Any = None, dtype: str = "", wire: str = "") -> Begun:
        dtype, wire = (_DTYPES.get(one, one) for one in (dtype, wire))
        if group is None:
            return Begun([self._averaged(shards, grads, "all", dtype)])
        if getattr(grads, "shards", None) is not shards or group.kind != f"group {self.replicas}":
            self.refuse(f"averages over {group.kind} what are not the averages of {shards.unit} over its shards")
        means = {name: self.across(self.params[name], one, dtype, wire) for name, one in grads.terms.items()}
        grads.memory.gone = f"was given away at {self._line()}"
        return Begun([Averages(grads.shards, means, self.terms.here, Storage(""))])

    def _accumulate(self, shards: Any, grads: Any) -> Averages:
        self.how = "held"
        return self._averaged(shards, grads, "held")

    def _update(self, shards: Any, grads: Any) -> None:
        if self.how == "held" or getattr(grads, "shards", shards) is not shards:
            self.refuse(f"updates {shards.unit} with what are not its averaged gradients")
        self.deliver(grads)
        shards.version = (self.terms.make("updated", *shards.version, *grads.terms.values()),)
        for memory in (shards.memory, *shards.full):
            memory.gone = f"was updated at {self._line()}"

    def deliver(self, grads: Any) -> None:
        """Take the gradients of a unit as what the optimizer gets."""
        if not isinstance(grads, Averages):
            self.refuse(f"takes as gradients what has not been waited for ({type(grads).__name__})")
        for name, term in grads.terms.items():
            if name in self.delivered:
                self.refuse(f"gives the gradient of {name} a second time")
            self.delivered[name] = term, grads.place

    def _copy(self, value: Any, strided: str = "") -> TermValue:
        copied = self._moved(value)
        # How it is laid out matters to operations such as as_strided.
        dense = copied.term if strided else self.terms.make("aten.contiguous.default", copied.term)
        return TermValue(dense, copied.memory, -1, copied.via)

    def _store(self, value: Any, stack: Any) -> TermValue:
        return self._moved(value) if stack.kind == "stack" else self.refuse("stores on what is no stack")

    def _offload(self, value: Any, to: Any) -> Moved:
        if to.kind.startswith("group") and self._term(value) not in self.same:
            problem = "keeps on each rank of a group a shard of what is not known to be the same on all of them"
            self.doubts.append((self.terms.here, problem))  # where it is not traced at all, that is said instead
        return Moved(self._moved(value), to, Storage("an activation"))

    def _fetch(self, away: Any, to: Any) -> Begun:
        if not isinstance(away, Moved) or away.to != to:
            self.refuse("fetches what was not moved there")
        away.memory.gone = f"was fetched at {self._line()}"
        return Begun([self._moved(away.value)])


# -- the proof --------------------------------------------------------------------------------------------------------


def prove(texts: Mapping[str, str], rules: Sequence[Mapping[str, str]] = ()) -> Proof:
    """That the program of these files computes the step that was traced.

    Args:
        texts: The files of a program by name: CAPTURE, FORWARD, BACKWARD if there is one, and `regions/region_0.py`.
        rules: By which passes change values: a name, a pattern such as `cast(x, torch.bfloat16)`, a replacement.

    Raises:
        ProofError: it computes something else, or what is not known here; with the line.
    """
    files = {name: Text(name, text) for name, text in texts.items()}
    terms = TermTable(rules)
    try:
        return _proven(files, terms)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        where, lines = told(terms.here)
        raise ProofError(where, f"cannot be followed ({type(error).__name__}: {error}){lines}", FIX) from error


def _proven(files: Mapping[str, Text], terms: TermTable) -> Proof:
    capture = files[CAPTURE]
    if (BACKWARD in files) != ("backward" in capture.functions):
        raise ProofError(BACKWARD, "is missing, or is of another program", FIX)
    regions = {name[8:-3]: text for name, text in files.items() if name.startswith("regions/")}
    traced = Evaluation(terms, capture, None, set())
    wanted = traced.whole(capture, capture if BACKWARD in files else None)
    if claimed := [name for name in traced.gradients if "unused" in traced.params[name].flags]:
        raise ProofError(capture.name, f"says that {claimed[0]} is unused, and has a gradient of it", FIX)
    averages, known = {how: traced.averages(how) for how in ("scatter", "held")}, len(terms.heads)
    program = Evaluation(terms, capture, regions, traced.same)
    found = program.whole(files[FORWARD], files.get(BACKWARD))
    wanted |= averages[program.how]
    for what in [*wanted, *found]:
        end = program.ends[0 if what.startswith("result") else -1]
        (one, _), (other, place) = wanted.get(what, (-1, ())), found.get(what, (-1, end))
        if one != other:
            raise terms.difference(known, what, one, other, place)
    for terms.here, problem in program.doubts:
        program.refuse(problem)
    return Proof(
        sum(len(text.lines) for text in files.values()), len(terms.heads), len(traced.gradients), [*terms.applied]
    )
