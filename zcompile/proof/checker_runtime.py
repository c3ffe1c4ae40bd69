"""What lines of a program do with units: gather, release, average and update them; and what moves values elsewhere.

`checker` has the rest of the evaluation.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from zcompile.errors import ProofError
from zcompile.proof.checker_terms import TermTable
from zcompile.proof.checker_texts import FIX, ParamText, Place, Text, refusal
from zcompile.proof.checker_values import Averages, Lease, Moved, SecondaryPart, Storage, TermValue, UnitPart, WholeUnit

RUNTIME = frozenset({"all_gather", "gather_ahead", "reduce_scatter", "all_reduce", "accumulate", "update", "wait"})
RUNTIME |= {"release", "copy", "store", "offload", "fetch"}
DTYPES = {f"torch.float{bits}": f"f{bits}" for bits in (16, 32, 64)} | {"torch.bfloat16": "bf16", "torch.int8": "i8"}


class Begun(list[Any]):
    """What is under way: its result, until it is waited for."""


class RuntimeLines:
    """What is known while the lines of a step are evaluated, and what those of the runtime's functions do to it."""

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
        self.along = next((name for name, axis in said["axes"].items() if axis.startswith("pipeline")), "")
        self.outside = next((name for name, axis in said["axes"].items() if axis.startswith("replicate")), "")
        self.hybrid, self.stage = said.get("hybrid", ""), said.get("stage", 3)
        """How both axes divide what ranks keep; empty where one repeats it."""
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
        """A copy of a value."""
        return TermValue(self._term(value), Storage("", self.phase), -1, (*value.via, self.terms.here))

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

    # -- the runtime's functions

    def _line(self) -> str:
        text, line = self.terms.here[0]
        return f"{text.name} line {line}"

    def _lay(self, key: Any, at: range | None) -> None:
        """Take bytes of the arena."""
        if at is not None and any(at.start < one.stop and one.start < at.stop for one in self.ranges.values()):
            self.refuse("takes bytes of the arena that another line has")
        self.ranges |= {key: at} if at is not None else {}

    def _all_gather(
        self, shards: Any, source: Any = None, keep: str = "", dtype: str = "", at: Any = None, wire: str = ""
    ) -> Begun:
        self._declared("gathers", shards, dtype, (param.computed for param in shards.params))
        made = shards, dtype, shards.version, keep, Storage(f"the parameters of {shards.unit}"), self.terms.here
        if isinstance(source, Lease):
            if source.kind != f"group {self.outside}" or not self.hybrid:
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
        self._declared("averages", shards, dtype, (param.reduced for param in shards.params))
        given = self._taken(shards, grads, holds=holds)
        terms = {param.name: self.average(param, grad, how, dtype) for param, grad in given}
        return Averages(shards, terms, self.terms.here, Storage(""))

    def _taken(self, shards: UnitPart, grads: Any, *, holds: bool = True) -> list[tuple[ParamText, TermValue]]:
        """The gradients of a unit, by parameter, in memory that is worked on in place: nothing else may read it."""
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
        """Averages or sums of a unit, which nothing else may read any more."""
        if sums.shards is not shards:
            self.refuse(f"takes for {shards.unit} what is of {sums.shards.unit}")
        sums.memory.gone = f"was given away at {self._line()}"
        return [*sums.terms.items()]

    def _is_none(self, value: TermValue) -> bool:
        return self.terms.heads[value.term] == "NoneType None"

    def dense(self, grad: TermValue) -> int:
        """The term of a gradient; how it is laid out does not matter to who sends it."""
        return self.terms.args[grad.term][0] if self.terms.heads[grad.term] == "aten.contiguous.default" else grad.term

    def _declared(self, does: str, shards: UnitPart, dtype: str, said: Iterable[str]) -> None:
        """Refuse a dtype that the units do not say of any parameter."""
        if dtype and dtype not in (known := {*said} - {""}):
            self.refuse(f"{does} {shards.unit} in {dtype}; its units say {', '.join(sorted(known)) or 'nothing'}")

    def average(self, param: ParamText, grad: TermValue, how: str, dtype: str) -> int:
        """The mean of a gradient, cast before where the units say so; of what is sharded this rank's part."""
        cast = (self.terms.make(dtype),) if dtype and dtype == param.reduced else ()
        dense = self.dense(grad)
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
        if self.outside and how == "scatter":
            means = [self.across(one, m, one.reduced, one.across) for (one, _), m in zip(pairs, means, strict=True)]
        return {f"the gradient of {one.name}": (mean, ()) for (one, _), mean in zip(pairs, means, strict=True)}

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
        if not isinstance(grads, Averages) or grads.shards is not shards or group.kind != f"group {self.outside}":
            self.refuse(f"averages over {group.kind} what are not the averages of {shards.unit} inside")
        self._declared("averages", shards, dtype, (param.reduced for param in shards.params))
        self._declared("sends averages of", shards, wire, (param.across for param in shards.params))
        if (how == "part") != bool(self.hybrid):
            self.refuse(f"gives each rank outside {how} of the averages of {shards.unit}")
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
