"""Evaluates a step line by line, tracking the terms of values, their memory, and the state of units.

Calls of regions are inlined. A line that reads freed memory, or that is unknown, is refused.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from zcompile.errors import ProofError
from zcompile.proof.checker_divided import divided_call, mean_over_ranks
from zcompile.proof.checker_rows import Loop
from zcompile.proof.checker_texts import (
    CAPTURE,
    FIX,
    Margin,
    ParamText,
    Place,
    Text,
    dotted,
    literal,
    loop_of,
    refusal,
)
from zcompile.proof.checker_values import Averages, SecondaryPart, Storage, TermTable, TermValue, UnitPart, WholeUnit

Found = tuple[int, Place]
"""A term, and the line that computes it."""
SAME = ("aten.alias.default", "aten.clone.default", "aten.detach.default")
WHOLE = ("all_reduce", "all_gather_into_tensor", "broadcast")
"""Collectives that return the same result on all ranks of their group."""
FUNCTIONS = ("aten", "ops", "operator", "math", "torch", "float", "unbox")
BOUND = ("unit", "parameter", "constant", "arena", "stack", "away", "group")
"""Arguments that are identified by name; the others by position."""
_VIEWS = (
    "_conj _grad_sum_to_size _indices _neg_view _reshape_alias _unsafe_view _values adjoint alias align_to as_strided"
    " broadcast_to ccol_indices chunk coalesce col_indices conj contiguous crow_indices detach diagonal dsplit expand"
    " expand_as flatten hsplit imag indices lift_fresh linalg_diagonal mH mT matrix_H moveaxis movedim narrow numpy_T"
    " permute pin_memory positive ravel real refine_names rename reshape reshape_as resolve_conj resolve_neg"
    " row_indices select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split to transpose type_as"
    " unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze values view view_as"
    " view_as_complex view_as_real vsplit wait_tensor"
)
VIEWS = frozenset(_VIEWS.split())
"""Operations whose result is, or may be, a view of their first argument."""
_RANDOM = (
    "_fused_dropout _sample_dirichlet _standard_gamma alpha_dropout bernoulli binomial cauchy dropout exponential"
    " feature_alpha_dropout feature_dropout geometric gru log_normal lstm multinomial native_dropout normal"
    " normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm rnn_relu rnn_tanh"
    " rrelu rrelu_with_noise rrelu_with_noise_functional uniform"
)
RANDOM = frozenset(_RANDOM.split())
"""Operations that draw random numbers, also with a trailing `_`. Attention does so if its dropout is not 0."""
_PURE = frozenset(
    {"abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "inv", "invert", "is_", "is_not", "le"}
    | {"lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv"}
    | {"truth", "xor"}
)
"""Pure functions of the module `operator`."""
RUNTIME = frozenset({"all_gather", "gather_ahead", "reduce_scatter", "all_reduce", "accumulate", "update", "wait"})
RUNTIME |= {"release", "copy", "store", "offload", "fetch"}
DTYPES = {f"torch.float{bits}": f"f{bits}" for bits in (16, 32, 64)} | {"torch.bfloat16": "bf16", "torch.int8": "i8"}


def is_function_of_values(name: str) -> bool:
    """Return True for the dotted name of an operation, or of a function of sizes, that a program may call.

    Whether an operation exists is not checked here: the captured step has those that are known.
    """
    match name.split("."):
        case ["aten", _, _] | ["ops", "higher_order", _] | ["ops", _, _, _]:
            return True
        case ["operator", function]:
            return function in _PURE
        case ["math", function]:
            return not function.startswith("_") and callable(getattr(math, function, None))
        case ["torch", function]:
            return function.startswith(("sym_", "_sym_"))
    return False


def packet_of(head: str) -> str:
    """The name of an operation without its library and overload."""
    parts = head.split("|")[0].split(".")
    return parts[2 if parts[0] == "ops" else 1] if len(parts) > 1 else ""


class Moved(NamedTuple):
    """An offloaded value, and the storage that it is in."""

    value: TermValue
    to: Lease
    memory: Storage


class Lease(NamedTuple):
    """An input that the runtime provides: an arena of `size` bytes, a stack, a storage for activations, or a group."""

    kind: str
    size: int


class Begun(list[Any]):
    """Asynchronous work: its result, until it is waited for."""


class Evaluation:
    """Evaluates the traced step, or the program that runs, which has regions."""

    runs = True

    def __init__(self, terms: TermTable, files: Mapping[str, Text], same: set[int] | None = None) -> None:
        self.terms, self.same, self.group = terms, same or set(), -1
        """`same`: terms that are known to be equal on all ranks of the tensor-parallel group."""
        regions = {name[8:-3]: text for name, text in files.items() if name.startswith("regions/")}
        self.regions = regions if self.runs else {}
        functions = [one for text in regions.values() for one in text.functions.values()]
        self.loops = any(map(loop_of, functions))
        divides = any("ops.zcompile." in line for text in regions.values() for line in text.lines)
        self.has_shapes = not self.runs and (self.loops or divides)
        capture = files[CAPTURE]
        bodies = (statement for statement in capture.body if isinstance(statement, ast.Assign))
        said = {ast.unparse(statement.targets[0]): ast.literal_eval(statement.value) for statement in bodies}
        kinds: dict[str, str] = said.get("axes", {})
        found = ((name, axis) for name, axis in kinds.items() if axis.startswith("sequence "))
        self.group_of, ranks = next(found, ("", "sequence 0"))
        self.ranks = 0 if any("ops.zcompile." in line for line in capture.lines) else int(re.split("[ ,]", ranks)[1])
        """The number of ranks that divide the tokens of a batch; 0 if the traced step is divided already."""
        if lacking := {"axes", "units"} - said.keys():
            raise ProofError(f"{capture.name} line 1", f"does not say what the {min(lacking)} are", FIX)
        self.units = {unit: UnitPart(unit, lines) for unit, lines in said["units"].items()}
        self.params = {param.name: param for shards in self.units.values() for param in shards.params}
        axes = " ".join(said["axes"].values())
        self.alone, self.marks = bool(re.search(r"shard 1\b", axes)), not self.runs and "tensor" in axes
        self.along = next((name for name, axis in said["axes"].items() if axis.startswith("pipeline")), "")
        self.outside = [f"group {n}" for n, axis in reversed(said["axes"].items()) if axis.startswith("replicate")]
        self.hybrid, self.stage = said.get("hybrid", ""), said.get("stage", 3)
        """How two axes divide shards; "" if one axis replicates them."""
        self.effects: dict[str, list[tuple[int, Place]]] = defaultdict(list)
        self.delivered: dict[str, tuple[int, Place]] = {}
        self.gathers, self.ahead, self.scope, self.gradients = (dict[str, Any]() for _ in range(4))
        self.taken, self.ranges, self.mutated = dict[str, int](), dict[Any, range](), set[Storage]()
        self.doubts, self.ends = list[tuple[Place, str]](), list[Place]()
        self.phase, self.how, self.graph, self.functions = "", "scatter", False, RUNTIME

    def refuse(self, problem: str) -> NoReturn:
        raise refusal(self.terms.here, problem)

    def _made(self, term: int, memory: Storage | None = None) -> TermValue:
        memory = memory or Storage("", self.phase, self.graph)
        return TermValue(term, memory, memory.written)

    def _moved(self, value: Any) -> TermValue:
        """Return a copy of a value."""
        return TermValue(self._term(value), Storage("", self.phase), -1, (*value.via, self.terms.here))

    def _alive(self, value: Any) -> Any:
        """Return a value as read now: refuse freed memory, and account for writes since the value was computed."""
        if type(value) is list:
            return [self._alive(item) for item in value]
        if isinstance(value, (TermValue, WholeUnit, Moved, Averages)) and value.memory.gone:
            self.refuse(f"reads the memory of {value.memory.owner or 'a value'}, which {value.memory.gone}")
        if isinstance(value, TermValue) and value.seen != value.memory.written:
            return self._made(self.terms.make("after", value.term, value.memory.written), value.memory)
        return value

    def _term(self, value: Any) -> int:
        if type(value) in (list, tuple):
            return self.terms.make(type(value).__name__, *map(self._term, value))
        if not isinstance(value, TermValue):
            self.refuse(f"computes with something that is not a value, but {type(value).__name__}")
        return value.term

    # -- lines --------------------------------------------------------------------------------------------------------

    def step(self, text: Text, phase: str, crossing: Sequence[Any] = ()) -> Any:
        """Evaluate a phase and return its results; `crossing`: values of the forward for the backward."""
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
        if any(result.memory.graph for result in results):
            self.refuse("returns a value in the memory of a CUDA graph, which the next step overwrites")
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
        """Return the term of an input."""
        return self.terms.make(f"{kind} {number}")

    def _draw(self, number: int) -> int:
        """Return the term of a random draw."""
        return self.terms.make(f"draw {number}")

    def _given(self, term: int, owner: str, margin: Margin) -> TermValue:
        if margin.types and margin.types[0][0] and not self.runs:
            self.same.add(term)
        self._shaped(term, margin.types[0] if margin.types else ("", "", ""))
        return TermValue(term, Storage(owner), -1)

    def _shaped(self, term: int, type_: tuple[str, str, str]) -> None:
        sizes = type_[2].replace(",", " ").split()
        if self.has_shapes and type_[1] and all(map(str.isdecimal, sizes)):
            self.terms.shapes[term], self.terms.kinds[term] = tuple(map(int, sizes)), type_[1]

    def _crossed(self, value: Any, words: str) -> Any:
        """Return a value of the forward as the backward reads it; an input that the forward wrote to has changed."""
        if type(value) is list:
            return [self._crossed(item, "") for item in value]
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

    def run(self, text: Text, name: str, scope: dict[str, Any], above: Place = ()) -> Any:
        """Evaluate a function and return its results."""
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
                        self.refuse("gives a value that has no name, so what it does is unknown")
                case ast.Assign(targets=[target], value=ast.Call() as call):
                    self._bind(text, target, self._call(call))
        return self.refuse(f"{name} returns nothing")

    def _bind(self, text: Text, target: ast.expr, value: Any) -> None:
        """Bind the results of a call to names, and collect values that the traced step marks as equal on all ranks."""
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        count = len(names) - isinstance(names[-1], ast.Starred)
        if not isinstance(target, ast.Tuple):
            results = value if type(value) is list and len(value) == 1 else [value]
        elif type(value) is list and (len(value) < count or len(value) > count == len(names)):
            self.refuse(f"unpacks {len(value)} results into {count} names")
        else:
            if count < len(names) and type(value) is not list and ast.unparse(names[-1]) != "*_":
                self.refuse("gives one name to an unknown number of results")
            results = [self._item(value, i) for i in range(count)] + ([value[count:]] if type(value) is list else [[]])
        marks = text.types(names) if self.marks or self.has_shapes else dict[str, tuple[str, str, str]]()
        reserved = self.functions if self._outer else RUNTIME
        for node, result in zip(names, results, strict=False):
            name = dotted(node.value if isinstance(node, ast.Starred) else node)
            if name in ("", "box", *FUNCTIONS, *reserved) or name in self.regions:
                self.refuse(f"gives the name of a function to a value: {name}")
            if name != "_":
                self.scope[name] = result
                if name in marks and isinstance(result, TermValue):
                    self._shaped(result.term, marks[name])
                if self.marks and name in marks and marks[name][0] and self._is_replicated(result.term):
                    self.same.add(result.term)

    def _is_replicated(self, term: int) -> bool:
        """Return True if a value is computed from values that are equal on all ranks, or by a collective of all."""
        head, args = self.terms.heads[term], self.terms.args[term]
        if head.startswith("item "):
            return self._is_replicated(args[0])
        if head.startswith("ops._c10d_functional.") and packet_of(head) in WHOLE:
            self.group = args[-1] if self.group < 0 else self.group
            return self.group == args[-1]
        follows = (head.startswith(("aten.", "ops.prims.")) and "empty" not in head) or packet_of(head) == "wait_tensor"
        return follows and all(map(self._is_same, args))

    def _is_same(self, term: int) -> bool:
        listed = self.terms.heads[term] in ("list", "tuple")
        known = term in self.same or self.terms.is_constant(term)
        return known or (listed and all(map(self._is_same, self.terms.args[term])))

    def _item(self, value: Any, index: int) -> Any:
        """Return one of several results; each has memory of its own, unless they are views."""
        if type(value) is list:
            return value[index]
        if (head := self.terms.heads[value.term]).startswith("part "):
            return self._made(self.terms.make(head, self.terms.make(f"item {index}", *self.terms.args[value.term])))
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
                return {ast.literal_eval(key): self._value(item) for key, item in zip(keys, values, strict=True) if key}
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
        if (divided := divided_call(self, call)) is not None:
            return divided
        name, given = dotted(call.func), self._values(call.args)
        named = {str(keyword.arg): self._value(keyword.value) for keyword in call.keywords}
        if self._outer and name in self.regions and not named:
            return self._region(name, given)
        if self._outer and name in self.functions and self.runs:
            heads = {key: self._keyword(option) for key, option in named.items()}
            options = {key: DTYPES.get(str(head), head) for key, head in heads.items()}
            return getattr(self, f"_{name}")(*given, **options)
        if name == "graph" and len(given) == 1 and not named:
            return self._made(self.terms.make("graph", given[0].term))
        if not is_function_of_values(name) or "out" in named:
            self.refuse(f"{ast.unparse(call.func)} is not a function that is known here")
        return self._operation(name, given, named)

    @property
    def _outer(self) -> bool:
        """True for a line outside regions."""
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
        is_loop = loop_of(text.functions[name]) is not None
        self.graph = len(text.functions[name].decorator_list) > is_loop
        run = Loop(self, text, name, scope, here).values() if is_loop else self.run(text, name, scope, here)
        results = [result.by(self.terms.here) for result in run]
        self.graph, self.terms.here = False, here
        return results

    def _parameter(self, owner: Any, item: int) -> Any:
        """Return a parameter that a region takes: of a gathered unit, or of shards that are read directly."""
        if not isinstance(owner, (WholeUnit, UnitPart)):
            self.refuse(f"takes a parameter of something that is not a full unit, but {type(owner).__name__}")
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
        if name == "aten.mul.Tensor" and given[0].term in self.terms.scaled:
            loop, index = self.terms.scaled[given[0].term]
            return loop.multiplied(index, given[1])
        if name == "ops.higher_order.run_and_save_rng_state":
            return [self._made(make("state", draw)), self._operation(heads[given[0].term], given[1:], named)]
        if replays := name == "ops.higher_order.run_with_rng_state":
            (draw,), name, values = self.terms.args[given[0].term], heads[given[1].term], values[2:]
            packet = packet_of(name)
        self.terms.operations |= set() if self.runs else {name}
        if name.startswith(("aten.", "ops.")) and name not in (*SAME, *self.terms.operations):
            self.doubts.append((self.terms.here, f"calls {name}, which was not traced, so its effects are unknown"))
        terms = [*map(self._term, values)]
        shares = [heads[term] for term in terms[: len(terms) - len(named)] if heads[term].startswith("float ")]
        shares += [heads[value.term] for key, value in named.items() if key == "dropout_p"]
        is_random = replays or packet.removesuffix("_") in RANDOM
        is_random = is_random or ("attention" in packet and shares[:1] not in ([], ["float 0.0"]))
        # A copy of what an exchange has started to write is not what arrives.
        plain = name in SAME and len(values) == 1 and not heads[terms[0]].startswith("in flight ")
        known = len(heads)
        term = terms[0] if plain else make("|".join([name, *named]), *([draw] if is_random else []), *terms)
        if term >= known:
            self.terms.routes[term] = {v.term: v.via for v in values if isinstance(v, TermValue) and v.via}
        if is_random and not replays:
            draws.append((term, self.terms.here))
        if name.startswith(("ops._c10d_functional.", "ops._dtensor.")) and packet != "wait_tensor":
            self.effects["collective"].append((term, self.terms.here))
        if packet.endswith("_") and not packet.endswith("__"):
            given[0].memory.written = make(f"write to {given[0].memory.owner}", term)
            self.effects["write"].append((given[0].memory.written, self.terms.here))
            return self._made(term, given[0].memory)
        via = next((value.via for value in values if isinstance(value, TermValue) and value.via), ())
        return self._made(term, given[0].memory if packet in VIEWS else None).by(*via)

    # -- the runtime's functions --------------------------------------------------------------------------------------

    def _line(self) -> str:
        text, line = self.terms.here[0]
        return f"{text.name} line {line}"

    def _lay(self, key: Any, at: range | None) -> None:
        """Reserve bytes of the arena; refuse bytes that are in use."""
        if at is not None and any(at.start < used.stop and used.start < at.stop for used in self.ranges.values()):
            self.refuse("takes bytes of the arena that another line has")
        self.ranges |= {key: at} if at is not None else {}

    def _all_gather(
        self, shards: Any, source: Any = None, keep: str = "", dtype: str = "", at: Any = None, wire: str = ""
    ) -> Begun:
        self._declared("gathers", shards, dtype, (param.computed for param in shards.params))
        made = shards, dtype, shards.version, keep, Storage(f"the parameters of {shards.unit}"), self.terms.here
        if isinstance(source, Lease):
            if [source.kind] != self.outside or not self.hybrid:
                self.refuse(f"gathers secondary shards of {shards.unit} over {source.kind}")
            if (keep == "bool True") != (self.hybrid == "hfsdp" and self.stage == 3):
                self.refuse(f"{'keeps' if keep else 'does not keep'} secondary shards of {shards.unit} beyond the step")
            if wire != (said := max(param.gathered for param in shards.params)):
                self.refuse(f"gathers {shards.unit} in {wire or 'its own dtype'}; its units say {said or 'nothing'}")
            return Begun([SecondaryPart(*made)])
        self._declared("gathers inside", shards, wire, ())
        divided = bool(self.hybrid) and any("whole" not in param.flags for param in shards.params)
        fits = isinstance(source, SecondaryPart) and source[:3] == made[:3] if divided else source is None
        if not fits:
            self.refuse(f"gathers {shards.unit} from what are not its {'secondary ' * divided}shards as they are now")
        gathered = WholeUnit(*made)
        shards.full.append(gathered.memory)
        if self.phase == "forward":
            self.gathers.setdefault(shards.unit, (keep, dtype))
        self._lay(gathered.memory, at)
        return Begun([gathered])

    def _gather_ahead(self, shards: Any, keep: str = "", dtype: str = "") -> None:
        self._declared("gathers", shards, dtype, (param.computed for param in shards.params))
        if self.ahead.setdefault(shards.unit, one := ((keep, dtype), shards.version, self.terms.here)) is not one:
            self.refuse("gathers twice for the next step")
        for memory in shards.full if keep else ():
            memory.gone = f"is gathered anew at {self._line()}"

    def _wait(self, started: Any) -> Any:
        if not isinstance(started, Begun) or not started:
            self.refuse("waits for something that is not in flight")
        result = started.pop()
        if isinstance(result, Averages):
            self.ranges.pop(result.memory, None)
        return result

    def _release(self, full: Any) -> None:
        if not isinstance(full, WholeUnit) or full.keep:
            self.refuse("releases something that is not a full unit, or is kept for later programs")
        full.memory.gone = f"was released at {self._line()}"
        self.ranges.pop(full.memory, None)

    def _averaged(self, shards: UnitPart, grads: Any, how: str, dtype: str = "", *, holds: bool = True) -> Averages:
        """Return the mean of each gradient over the ranks; its memory may not be read any more."""
        self._declared("averages", shards, dtype, (param.reduced for param in shards.params))
        given = self._taken(shards, grads, holds=holds)
        terms = {param.name: self.average(param, grad, how, dtype) for param, grad in given}
        return self._averages(shards, terms)

    def _averages(self, shards: UnitPart, terms: dict[str, int]) -> Averages:
        return Averages(shards, terms, self.terms.here, Storage(""))

    def _taken(self, shards: UnitPart, grads: Any, *, holds: bool = True) -> list[tuple[ParamText, TermValue]]:
        """Return the gradients of a unit by parameter; they are overwritten in place, so nothing may read them."""
        if isinstance(grads, Averages):
            return [(self.params[name], TermValue(term, Storage(""), -1)) for name, term in self.take(shards, grads)]
        found = [(param, grad) for param, grad in zip(shards.params, grads, strict=True) if not self._is_none(grad)]
        for param, grad in found:
            memory = self._alive(grad).memory
            if memory.owner or memory.phase not in ("backward", "step") or (holds and memory.graph):
                owner = memory.owner or "what it does not own"
                self.refuse(f"reduces in place {owner}, the gradient of {param.name}")
            memory.gone = f"was given away at {self._line()}"
        return found

    def take(self, shards: UnitPart, sums: Averages) -> list[tuple[str, int]]:
        """Return averages or sums of a unit by parameter; nothing may read them again."""
        if sums.shards is not shards:
            self.refuse(f"takes for {shards.unit} what is of {sums.shards.unit}")
        sums.memory.gone = f"was given away at {self._line()}"
        return [*sums.terms.items()]

    def _is_none(self, value: TermValue) -> bool:
        return self.terms.heads[value.term] == "NoneType None"

    def dense(self, grad: TermValue) -> int:
        """Return the term of a gradient, ignoring its strides, which do not matter for reductions."""
        return self.terms.args[grad.term][0] if self.terms.heads[grad.term] == "aten.contiguous.default" else grad.term

    def _declared(self, does: str, shards: UnitPart, dtype: str, said: Iterable[str]) -> None:
        """Refuse a dtype that the units declare for no parameter."""
        if dtype and dtype not in (known := {*said} - {""}):
            self.refuse(f"{does} {shards.unit} in {dtype}; its units say {', '.join(sorted(known)) or 'nothing'}")

    def average(self, param: ParamText, grad: TermValue, how: str, dtype: str) -> int:
        """Return the mean of a gradient, cast first if the units declare it; this rank's part if it is sharded."""
        cast = (self.terms.make(dtype),) if dtype and dtype == param.reduced else ()
        dense = mean_over_ranks(self.terms, self.dense(grad), self.ranks)
        sent = self.terms.make("cast", dense, *cast) if cast else dense
        term = self.terms.make("held" if how == "held" else "mean", sent)
        term = self.terms.make("part", term) if how == "scatter" and "whole" not in param.flags else term
        self.terms.routes[term] = {grad.term: grad.via}
        return term

    def across(self, groups: Sequence[str], param: ParamText, mean: int, dtype: str, wire: str) -> int:
        """Return the mean over groups of replicas of `mean`, a mean over the sharding ranks, sent as `wire`."""
        cast = (self.terms.make(dtype),) if dtype and dtype == param.reduced else ()
        for group in groups:
            head = "mean" + " of replicas" * (1 + self.outside.index(group))
            mean = self.terms.make(f"{head} {wire if wire == param.across else ''}".rstrip(), mean, *cast)
        return mean

    def _reduce_scatter(self, shards: Any, grads: Any, group: Any = None, dtype: str = "", **options: Any) -> Begun:
        if group is not None:
            return self._reduce_outside(shards, grads, group, "part", dtype, **options)
        return self._reduce_inside(shards, grads, dtype, **options)

    def _reduce_inside(self, shards: Any, grads: Any, dtype: str, bucket: str = "", at: Any = None) -> Begun:
        holds = self.alone or any("whole" in param.flags for param in shards.params)
        result = self._averaged(shards, grads, "scatter", dtype, holds=holds)
        self._lay(result.memory, at)
        return Begun([result])

    def _all_reduce(self, shards: Any, grads: Any, group: Any = None, dtype: str = "", wire: str = "") -> Begun:
        if group is not None:
            return self._reduce_outside(shards, grads, group, "all", dtype, wire)
        return Begun([self._averaged(shards, grads, "all", dtype)])

    def _reduce_outside(self, shards: Any, grads: Any, group: Any, how: str, dtype: str, wire: str = "") -> Begun:
        if not isinstance(grads, Averages) or grads.shards is not shards or group.kind not in self.outside:
            self.refuse(f"averages over {group.kind} what are not the averages of {shards.unit} inside")
        self._declared("averages", shards, dtype, (param.reduced for param in shards.params))
        self._declared("sends averages of", shards, wire, (param.across for param in shards.params))
        if (how == "part") != bool(self.hybrid):
            self.refuse(f"gives each rank outside {how} of the averages of {shards.unit}")
        over = [group.kind]
        means = {name: self.across(over, self.params[name], mean, dtype, wire) for name, mean in grads.terms.items()}
        grads.memory.gone = f"was given away at {self._line()}"
        return Begun([self._averages(shards, means)])

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

    def deliver_all(self, returned: Sequence[Any]) -> None:
        """Deliver the gradients that a program returns to the optimizer."""
        for grads in returned:
            self.deliver(grads)
        if returned and any(shards.version for shards in self.units.values()):
            self.refuse("returns gradients, but a program that updates uses all of them")

    def deliver(self, grads: Any) -> None:
        """Deliver the gradients of a unit to the optimizer."""
        if not isinstance(grads, Averages):
            self.refuse(f"takes as gradients what has not been waited for ({type(grads).__name__})")
        for name, term in grads.terms.items():
            if name in self.delivered:
                self.refuse(f"gives the gradient of {name} a second time")
            self.delivered[name] = term, grads.place

    def _copy(self, value: Any, strided: str = "") -> TermValue:
        copied = self._moved(value)
        # The strides matter to operations such as as_strided.
        dense = copied.term if strided else self.terms.make("aten.contiguous.default", copied.term)
        return TermValue(dense, copied.memory, -1, copied.via)

    def _store(self, value: Any, stack: Any) -> TermValue:
        return self._moved(value) if stack.kind == "stack" else self.refuse("stores on something that is not a stack")

    def _offload(self, value: Any, to: Any) -> Moved:
        if to.kind.startswith("group") and self._term(value) not in self.same:
            problem = "keeps on each rank of a group a shard of a value that is not known to be the same on all of them"
            self.doubts.append((self.terms.here, problem))  # an untraced term is reported instead
        return Moved(self._moved(value), to, Storage("an activation"))

    def _fetch(self, away: Any, to: Any) -> Begun:
        if not isinstance(away, Moved) or away.to != to:
            self.refuse("fetches a value that was not moved there")
        away.memory.gone = f"was fetched at {self._line()}"
        return Begun([self._moved(away.value)])
