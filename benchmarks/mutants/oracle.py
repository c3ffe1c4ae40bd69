"""What a program computes, found by running it: two steps of all ranks at once, in one process, on real numbers.

Nothing here is shared with the proof, the facts or the runtime: communications are copies between the lanes of a value.
What a program may not count on is spoilt on purpose. Released parameters, gradients that were handed over to be reduced
in place and kept copies that are gathered anew become NaN; places of the arena are bytes of one tensor; parameters that
were stepped under a gather arrive as NaN. So a program that reads too late, or too early, gives other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from benchmarks.mutants.aten import Lanes, Operations
from benchmarks.mutants.loops import looped
from zcompile import Program
from zcompile.ir import ops
from zcompile.ir.layout import Param, Unit
from zcompile.ir.operation import data, op_of
from zcompile.ir.tensor_type import TensorType

STEPS = 2
"""So many that what one leaves for the next counts."""
_RATE = 0.1


@dataclass
class Full:
    """Whole parameters of a unit by rank: `tensors[index][rank]`."""

    unit: Unit
    tensors: list[Lanes]
    keep: bool
    aliases: bool


@dataclass
class Gathering:
    """A gather on its way."""

    full: Full
    versions: list[int]
    copied: bool = False
    """True if it has sent copies, so that parameters may be stepped meanwhile."""


@dataclass
class Secondary:
    """What ranks have of a unit inside, by sharded parameter and rank: shards of other ranks, in the order of these.

    `kept`: it outlives the program.
    """

    unit: Unit
    shards: list[list[Lanes]]
    versions: list[int]
    kept: bool


@dataclass
class OnItsWay:
    """Secondary shards until they have been waited for."""

    secondary: Secondary
    arrived: bool = False


@dataclass
class Averages:
    """Gradients by parameter; of sharded ones rows that a rank has not got are NaN.

    `cuts`: over how many axes they are scattered. `held`: each rank's own, not averaged.
    """

    tensors: dict[str, Lanes]
    cuts: int
    held: bool = False


@dataclass
class Reducing:
    """A reduction on its way, with what is copied to its place meanwhile."""

    averages: Averages
    place: list[torch.Tensor] | None


@dataclass
class Token:
    """What stands for an activation that is elsewhere."""

    kept: Lanes | None
    place: fx.Node


@dataclass
class Outcome:
    """All that two steps leave behind, as tensors by what they are; each is of all ranks, in order.

    Attributes:
        tensors: What was found.
        given: What the steps began with: parameters by name, inputs by step and name.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    def differs(self, other: Outcome) -> str:
        """What is not the same, bit for bit; empty if all is."""
        for name in sorted(self.tensors.keys() | other.tensors.keys()):
            one, another = self.tensors.get(name), other.tensors.get(name)
            if not _same(one, another):
                return name
        return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def outcome(program: Program, parts: int = 1, divided: Collection[str] = (), seed: int = 0) -> Outcome:
    """What two steps of a program compute, on numbers drawn from `seed`.

    Args:
        program: A whole one, laid out.
        parts: Tensor-parallel ranks.
        divided: The parameters of which each of these has a part of its own.
        seed: Of inputs, parameters and random draws.

    Raises:
        Exception: of any kind, where it cannot be run.
    """
    return _Machine(program, parts, divided, seed).result()


class _Machine:
    def __init__(self, program: Program, parts: int, divided: Collection[str], seed: int) -> None:
        self.program, self.parts, self.seed = program, parts, seed
        self.layout = program.layout
        self.world, self.shards = self.layout.world, self.layout.sharded.size
        self.cuts = 2 if self.layout.has_secondary else 1
        """Over how many axes what ranks keep is divided."""
        self.lanes = self.world * parts
        """Those of one replica follow each other, and those of one data-parallel rank."""
        self.generator = torch.Generator().manual_seed(seed)
        self.masters = {param.name: self._master(param, param.name in divided) for param in self.layout.params}
        self.versions = dict.fromkeys(self.masters, 0)
        self.buffers: dict[int, Lanes] = {}
        self.kept: dict[tuple[str, ...], Gathering] = {}
        self.ahead: dict[tuple[str, ...], Gathering] = {}
        self.secondary: dict[tuple[str, ...], Secondary] = {}
        self.held: dict[str, Lanes] = {}
        places = [op.at[1] for node in program.nodes(ops.AllGather, ops.Reduce) if (op := data(node).op).at]  # type: ignore[attr-defined]
        self.arena = [torch.zeros(max(places, default=0), dtype=torch.uint8) for _ in range(self.lanes)]
        self.values: dict[fx.Node, Any] = {}

    # -- numbers ----------------------------------------------------------------------------------------------------

    def _master(self, param: Param, is_divided: bool) -> Lanes:
        """A parameter, the same on all data ranks; of each rank of them only its own rows are up to date."""
        kind = TensorType.make(param.dtype, param.shape)
        drawn = [self._drawn(kind) * 0.5 for _ in range(self.parts if is_divided else 1)]
        parts = drawn if is_divided else drawn * self.parts
        return [part.clone() for _ in range(self.world) for part in parts]

    def _drawn(self, kind: TensorType, *, positive: bool = False) -> torch.Tensor:
        if kind.dtype.is_floating_point:
            drawn = torch.randn(kind.shape, generator=self.generator)
            return (drawn.abs() + 0.5 if positive else drawn).to(kind.dtype)
        return torch.randint(0, 5, kind.shape, generator=self.generator).to(kind.dtype)

    def _input(self, node: fx.Node) -> Lanes:
        given, kind = op_of(node, ops.Input), data(node).type
        if kind is None:  # a mesh, say, which no operation reads
            return [None] * self.lanes
        if given.kind is ops.Kind.CONSTANT:
            return [self.program.constants[node.name].clone() for _ in range(self.lanes)]
        if given.kind is ops.Kind.DATA and (given.held or given.mutated):
            if given.index not in self.buffers:
                value = self._drawn(kind, positive=True)
                self.buffers[given.index] = [value.clone() for _ in range(self.lanes)]
            return self.buffers[given.index]
        drawn = [self._drawn(kind) for _ in range(self.world)]
        return [value.clone() for value in drawn for _ in range(self.parts)]

    # -- steps ------------------------------------------------------------------------------------------------------

    def result(self) -> Outcome:
        found, results = Outcome(given=_cloned(self.masters)), []
        for step in range(STEPS):
            self._step(step)
            found.given |= {f"{step} {node.name}": self.values[node] for node in self.program.nodes(ops.Input)}
            ends = self.program.results
            for what, values in (("result", ends.outputs), ("gradient of input", ends.input_gradients)):
                listed = [self.values[value] if isinstance(value, fx.Node) else value for value in values]
                results.append((f"{what}s of step {step}", listed))
            found.tensors |= self._handed_back(step)
        found.tensors |= dict(results)  # as they are at the end: nothing may have written to them
        found.tensors |= {f"parameter {name}": self._whole(name) for name in self.masters}
        found.tensors |= {f"input {index} as it is left": value for index, value in self.buffers.items()}
        return replace(found, tensors={name: _cloned(value) for name, value in found.tensors.items()})

    def _step(self, step: int) -> None:
        self.operations = Operations(self.lanes, self.parts, hash((self.seed, step)))
        self.values = {}
        # Within a step nobody asks whether what is kept is still current: a gather behind an update gets it as it was.
        self.secondary = {
            names: one for names, one in self.secondary.items() if one.versions == self._versions(one.unit)
        }
        for node in self.program.graph.nodes:
            if isinstance(data(node).op, ops.Input):
                self.values[node] = self._input(node)
        for node in self.program.graph.nodes:
            if node not in self.values:
                self.values[node] = _RUN[type(data(node).op)](self, node)

    def _handed_back(self, step: int) -> dict[str, Any]:
        """The gradients of a step, with which parameters are stepped, where the program has not done it."""
        found: dict[str, Any] = {}
        for node in self.program.results.reduced:
            averages = self.values[node]
            for name, lanes in averages.tensors.items():
                key = f"gradient of {name} in step {step}"
                found[key] = [*found.get(key, []), self._owned(name, averages, lanes)]
            if averages.held:
                for name, lanes in averages.tensors.items():
                    before = self.held.get(name)
                    self.held[name] = lanes if before is None else [a + b for a, b in zip(lanes, before, strict=True)]
            else:
                self._stepped(averages)
        for name, node in self.program.results.gradients.items():
            param = self.layout.param(name)
            mean = self._mean(param, self.values[node], param.reduction_dtype, self._inside())
            mean = self._mean(param, mean, param.reduction_dtype, self._across()) if self.world > self.shards else mean
            found[f"gradient of {name} in step {step}"] = [mean]
            self._stepped(Averages({name: mean}, cuts=0))
        return found

    def _stepped(self, averages: Averages) -> None:
        if averages.cuts not in (0, self.cuts):
            raise TypeError("parameters are stepped with averages that are not of their rows")
        for name, lanes in averages.tensors.items():
            self.versions[name] += 1
            for lane in range(self.lanes):
                # Rows of other ranks are as old as the last gather: they are never read.
                master, gradient = (_rows_of(tensors[lane]) for tensors in (self.masters[name], lanes))
                for rows in self._rows(self.layout.param(name), lane, averages.cuts):
                    master[rows].sub_(gradient[rows].to(master.dtype), alpha=_RATE)

    def _rows(self, param: Param, lane: int, cuts: int) -> list[slice]:
        """The rows that a rank has of a parameter that is divided over so many axes, the inner one first."""
        rank = lane // self.parts % self.world
        if not cuts or not param.shards:
            return [slice(0, param.shape[0] if param.shape else 1)]
        if cuts > self.cuts:
            raise TypeError(f"{param.name} is divided over {cuts} axes, and not kept so")
        first = rank % self.shards
        shards = [rank] if cuts == 2 else range(first, param.shards, self.shards)
        return [slice(*param.shard_rows(shard)) for shard in shards]

    def _owned(self, name: str, averages: Averages, lanes: Lanes) -> Lanes:
        """What ranks have of an average: all of it, or their rows."""
        param = self.layout.param(name)
        places = (self._rows(param, lane, averages.cuts) for lane in range(self.lanes))
        return [
            torch.cat([_rows_of(tensor)[rows] for rows in some]) for tensor, some in zip(lanes, places, strict=True)
        ]

    def _whole(self, name: str, groups: Sequence[range] | None = None) -> Lanes:
        """A parameter of the rows that ranks of a group keep, by default of those that divide it; the rest is NaN."""
        param = self.layout.param(name)
        if not param.shards:
            return self.masters[name]
        found: Lanes = [None] * self.lanes
        for lanes in self._dividing() if groups is None else groups:
            whole = torch.empty_like(self.masters[name][lanes[0]])
            _fill([whole])
            for lane in lanes:
                for rows in self._rows(param, lane, self.cuts):
                    _rows_of(whole)[rows] = _rows_of(self.masters[name][lane])[rows]
            for lane in lanes:
                found[lane] = whole
        return found

    def _versions(self, unit: Unit) -> list[int]:
        return [self.versions[param.name] for param in unit.params]

    def _dividing(self) -> list[range]:
        """The lanes among which a part of the model is divided."""
        everywhere = [range(part, self.lanes, self.parts) for part in range(self.parts)]
        return everywhere if self.cuts == 2 else self._inside()

    def _inside(self) -> list[range]:
        """The lanes that have the shards of one copy of a part of the model, in their order."""
        width = self.shards * self.parts
        firsts = (first + part for first in range(0, self.lanes, width) for part in range(self.parts))
        return [range(first, first - first % self.parts + width, self.parts) for first in firsts]

    def _across(self) -> list[range]:
        """The lanes that have the same shard of the same part, or are at the same place inside."""
        width = self.shards * self.parts
        return [range(first, self.lanes, width) for first in range(width)]

    def _along(self, group: fx.Node) -> list[range]:
        """The lanes of each group of ranks that differ along the axis that a line names."""
        name = op_of(group, ops.Group).axis
        if name in [axis.name for axis in self.layout.outside]:
            return self._across()
        if name != self.layout.sharded.name:
            raise TypeError(f"{name} is no axis of data")
        return self._inside()

    # -- communication ----------------------------------------------------------------------------------------------

    def _gathered(
        self,
        unit: Unit,
        dtype: torch.dtype | None,
        place: list[Callable[[Param], Any]],
        *,
        keep: bool,
        secondary: Secondary | None = None,
    ) -> Gathering:
        tensors, joined = [], [] if secondary is None else self._joined(unit, dtype, secondary)
        for param in unit.params:
            if param.shards and (self.shards > 1 or secondary is not None):
                kind = _sent_dtype(param, dtype)
                inside = (tensor.to(kind) for tensor in self._whole(param.name, self._inside()))
                sent = joined.pop(0) if joined else list(inside)
                lanes = [_placed(sent[lane], place[lane](param) if place else None) for lane in range(self.lanes)]
            else:
                lanes = [tensor.to(_sent_dtype(param, dtype)) for tensor in self.masters[param.name]]
            tensors.append(lanes)
        full = Full(unit, tensors, keep, aliases=self.shards == 1 and secondary is None)
        return Gathering(full, self._versions(unit), copied=secondary is not None)

    def _all_gather(self, node: fx.Node) -> Gathering:
        op, unit = op_of(node, ops.AllGather), self._unit(node)
        if (started := self.ahead.pop(unit.names, None)) is not None:
            return started
        kept = self.kept.get(unit.names) if op.keep else None
        if kept is not None:
            if kept.versions == self._versions(unit):
                return kept
            self._spoil(kept.full)
        secondary = self._secondary(node)
        started = self._gathered(unit, op.dtype, self._places(op), keep=op.keep, secondary=secondary)
        if op.keep:
            self.kept[unit.names] = started
        return started

    def _secondary(self, node: fx.Node) -> Secondary | None:
        """What a gather inside is of; None for one of what ranks keep."""
        if not isinstance(data(node).op, ops.GatherInside):
            return None
        secondary = self.values[node.args[1]]  # type: ignore[index]
        if not isinstance(secondary, Secondary):
            raise TypeError(f"{node} is not given secondary shards")
        return secondary

    def _joined(self, unit: Unit, dtype: torch.dtype | None, secondary: Secondary) -> list[Lanes]:
        """The sharded parameters of a unit, of what is taken for their secondary shards inside."""
        sharded = [param for param in unit.params if param.shards]
        if len(sharded) != len(secondary.shards):
            raise TypeError(f"there are {len(secondary.shards)} secondary shards for {unit.name}")
        return [
            self._of_shards(param, _sent_dtype(param, dtype), secondary.shards[i]) for i, param in enumerate(sharded)
        ]

    def _of_shards(self, param: Param, kind: torch.dtype, shards: list[Lanes]) -> Lanes:
        found: Lanes = [None] * self.lanes
        for lanes in self._inside():
            whole = torch.empty(param.shape, dtype=kind)
            _fill([whole])
            for place, lane in enumerate(lanes):
                for number, shard in enumerate(shards[lane]):
                    rows = _rows_of(whole)[slice(*param.shard_rows(number * self.shards + place))]
                    if (rows.shape, rows.dtype) != (shard.shape, shard.dtype):
                        raise TypeError(f"shards of {param.name} are {shard.dtype} {list(shard.shape)}")
                    rows.copy_(shard)
            for lane in lanes:
                found[lane] = whole
        return found

    def _gather_outside(self, node: fx.Node) -> OnItsWay:
        op, unit = op_of(node, ops.GatherOutside), self._unit(node)
        if (secondary := self.secondary.get(unit.names)) is not None:
            return OnItsWay(secondary, arrived=True)
        if (full := self.kept.get(unit.names)) is not None and full.versions == self._versions(unit):
            return OnItsWay(Secondary(unit, [], full.versions, kept=False))  # nobody is to need it
        groups = self._along(node.args[1])  # type: ignore[arg-type]
        sent = [self._sent(param, op, groups) for param in unit.params if param.shards]
        return OnItsWay(Secondary(unit, sent, self._versions(unit), op.keep))

    def _sent(self, param: Param, op: ops.GatherOutside, groups: Sequence[range]) -> list[Lanes]:
        """For each rank the shards that those of its group keep of a parameter."""
        kind, wire = _sent_dtype(param, op.dtype), op.wire if op.wire is param.outer_gather_dtype else None
        found: list[Lanes] = [[] for _ in range(self.lanes)]
        for lanes in groups:
            for lane in lanes:
                kept = (self._rows(param, other, self.cuts) for other in lanes)
                found[lane] = [
                    torch.cat([_rows_of(self.masters[param.name][other])[rows] for rows in some]).to(kind)
                    for other, some in zip(lanes, kept, strict=True)
                ]
                if wire is not None:
                    found[lane] = [_as_sent(shard, wire) for shard in found[lane]]
        return found

    def _gather_ahead(self, node: fx.Node) -> None:
        op, unit = op_of(node, ops.GatherAhead), self._unit(node)
        if op.keep and (kept := self.kept.pop(unit.names, None)) is not None:
            self._spoil(kept.full)
        started = replace(self._gathered(unit, op.dtype, [], keep=op.keep), copied=True)
        self.ahead[unit.names] = started
        if op.keep:
            self.kept[unit.names] = started

    def _wait(self, node: fx.Node) -> Any:
        started = self.values[node.all_input_nodes[0]]
        match started:
            case Gathering(full, versions, copied):
                for param, version, lanes in zip(full.unit.params, versions, full.tensors, strict=True):
                    if self.versions[param.name] != version and not (copied or full.keep):
                        _fill(lanes)
                return full
            case OnItsWay(secondary, arrived):
                if secondary.versions != self._versions(secondary.unit) and not arrived:
                    for shards in secondary.shards:
                        _fill(shard for lane in shards for shard in lane)
                started.arrived = True
                if secondary.kept:
                    self.secondary[secondary.unit.names] = secondary
                return secondary
            case Reducing(averages, place):
                if place is not None and any(bool((spot != _MARK).any()) for spot in place):
                    for lanes in averages.tensors.values():
                        _fill(lanes)
                return averages
            case list():
                return [value.clone() for value in started]
        raise TypeError(f"{node} waits for what was not started")

    def _release(self, node: fx.Node) -> None:
        full = self.values[node.all_input_nodes[0]]
        self._spoil(full)
        full.tensors = []

    def _spoil(self, full: Full) -> None:
        if not full.aliases:
            for param, lanes in zip(full.unit.params, full.tensors, strict=False):
                if param.shards:
                    _fill(lanes)

    def _reduce(self, node: fx.Node) -> Reducing:
        op = op_of(node, ops.Reduce)
        tensors = {}
        for param, lanes in self._gradients(node):
            cast = op.dtype if param.reduction_dtype is op.dtype else None
            tensors[param.name] = self._cut(param, self._mean(param, lanes, cast, self._inside()), int(op.scatter))
            if self.shards > 1:
                _fill(lanes)
        place = None
        if op.at is not None:
            place = [arena[slice(*op.at)] for arena in self.arena]
            for spot in place:
                spot.fill_(_MARK)
        return Reducing(Averages(tensors, int(op.scatter)), place)

    def _cut(self, param: Param, lanes: Lanes, cuts: int) -> Lanes:
        """Leave each rank the rows that it gets of an average that is scattered over so many axes."""
        for lane, tensor in enumerate(lanes):
            mine = [(rows, _rows_of(tensor)[rows].clone()) for rows in self._rows(param, lane, cuts)]
            _fill([tensor])
            for rows, values in mine:
                _rows_of(tensor)[rows] = values
        return lanes

    def _mean(self, param: Param, lanes: Lanes, dtype: torch.dtype | None, groups: Sequence[range]) -> Lanes:
        """The average over the lanes of each group, in their order."""
        sent = [lane.to(dtype or param.full_dtype) for lane in lanes]
        result: Lanes = [None] * self.lanes
        for group in groups:
            total = sent[group[0]].clone()
            for lane in group[1:]:
                total += sent[lane]
            for lane in group:
                result[lane] = (total / len(group)).to(param.dtype)
        return result

    def _reduce_outside(self, node: fx.Node) -> Reducing:
        op, (_, source, group) = op_of(node, ops.ReduceOutside), node.all_input_nodes
        averages, groups = self.values[source], self._along(group)
        if not isinstance(averages, Averages):
            raise TypeError(f"{node} is not given averages")
        tensors, cuts = {}, averages.cuts + op.scatter
        for name, lanes in averages.tensors.items():
            param = self._unit(node).params[self.layout.unit_of(name).index(name)]
            cast = op.dtype if param.reduction_dtype is op.dtype else None
            wire = op.wire if op.wire is param.outer_dtype else None
            sent = lanes if wire is None else [_as_sent(lane, wire) for lane in lanes]
            tensors[param.name] = self._cut(param, self._mean(param, sent, cast, groups), cuts)
            _fill(lanes)
        return Reducing(replace(averages, tensors=tensors, cuts=cuts), None)

    def _accumulate(self, node: fx.Node) -> Averages:
        given = {param.name: [lane.to(param.dtype) for lane in lanes] for param, lanes in self._gradients(node)}
        return Averages(given, cuts=0, held=True)

    def _gradients(self, node: fx.Node) -> list[tuple[Param, Lanes]]:
        unit, given = self._unit(node), node.args[1]
        assert isinstance(given, (list, tuple)), "gradients are listed"
        pairs = zip(unit.params, given, strict=True)
        return [(param, self._tensors(value)) for param, value in pairs if value is not None]

    def _update(self, node: fx.Node) -> None:
        averages, unit = self.values[node.all_input_nodes[1]], self._unit(node)
        if not isinstance(averages, Averages) or not averages.tensors.keys() <= set(unit.names):
            raise TypeError(f"{node} steps what is not its unit's")
        self._stepped(averages)
        averages.tensors = {}

    def _places(self, op: ops.AllGather) -> list[Callable[[Param], torch.Tensor | None]]:
        """For each rank what gives parameters their part of a place, one behind the other, while there is room."""
        if op.at is None:
            return []
        start, stop = op.at

        def giver(arena: torch.Tensor) -> Callable[[Param], torch.Tensor | None]:
            offset = start

            def give(param: Param) -> torch.Tensor | None:
                nonlocal offset
                kind = param.full_dtype if op.dtype is param.compute_dtype else param.dtype
                nbytes = math.prod(param.shape) * kind.itemsize
                begin, offset = offset, offset + -(-param.padded_numel * kind.itemsize // 256) * 256
                return arena[begin : begin + nbytes].view(kind).view(param.shape) if begin + nbytes <= stop else None

            return give

        return [giver(arena) for arena in self.arena]

    def _unit(self, node: fx.Node) -> Unit:
        shards = node.args[0]
        assert isinstance(shards, fx.Node), "communication is of a unit"
        return self.layout.unit(op_of(shards, ops.Shards).unit)

    # -- values -----------------------------------------------------------------------------------------------------

    def _tensors(self, given: Any) -> Lanes:
        found = self.values[given]
        if not isinstance(found, list):
            raise TypeError(f"{given} is no tensor")
        return found

    def _call(self, node: fx.Node) -> list[Any]:
        region = self.program.regions[op_of(node, ops.Call).region]
        given = [self._taken(node.args[1 + argument], item) for argument, item in region.takes]
        return looped(region, given, self.operations)

    def _taken(self, given: Any, item: int | None) -> Any:
        if item is None:
            return self._tensors(given) if isinstance(given, fx.Node) else [given] * self.lanes
        found = self.values[given]
        if isinstance(found, Unit):
            param = found.params[item]
            if param.shards > 1 or param.compute_dtype:
                raise TypeError(f"{given} is not gathered")
            return self.masters[param.name]
        if not isinstance(found, Full):
            raise TypeError(f"{given} has not been waited for")
        return found.tensors[item]

    def _item(self, node: fx.Node) -> Any:
        source, index = node.all_input_nodes[0], op_of(node, ops.Item).index
        if isinstance(data(source).op, ops.Call):
            return self.values[source][index]
        return [value[index] for value in self.values[source]]

    def _offload(self, node: fx.Node) -> Token:
        value, place = node.all_input_nodes
        lanes = [tensor.clone() for tensor in self._tensors(value)]
        if isinstance(data(place).op, ops.Group):
            lanes = [_rejoined(lanes[lane - lane % self.parts :][: self.parts]) for lane in range(self.lanes)]
        return Token(lanes, place)

    def _fetch(self, node: fx.Node) -> Lanes:
        source, place = node.all_input_nodes
        token = self.values[source]
        if not isinstance(token, Token) or token.place is not place or token.kept is None:
            raise TypeError(f"{node} fetches what is not there")
        found, token.kept = token.kept, None
        return found

    def _one(self, node: fx.Node) -> Any:
        """What a call of one region or operation gives."""
        results = self._call(node)
        return results if any(isinstance(data(user).op, ops.Item) for user in node.users) else results[0]


_MARK = 0xA5
"""What stands at a place while a reduction has it."""


def _as_sent(lane: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """A number of its own for each dtype in which averages and shards may travel: in few bits, by one scale for all."""
    if wire.is_floating_point or not lane.numel():
        return lane.to(wire).to(lane.dtype)
    scale = lane.abs().nan_to_num().amax().clamp(min=1e-30) / torch.iinfo(wire).max
    return torch.round(lane / scale) * scale


def _sent_dtype(param: Param, dtype: torch.dtype | None) -> torch.dtype:
    """In which a gather that says `dtype` brings a parameter."""
    return param.full_dtype if not param.shards or param.compute_dtype is dtype else param.dtype


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor as rows."""
    return tensor if tensor.dim() else tensor.view(1)


def _fill(lanes: Iterable[torch.Tensor]) -> None:
    """Let nothing that is read of these tensors be right."""
    for tensor in lanes:
        tensor.fill_(math.nan if tensor.dtype.is_floating_point else -(2**31))


def _placed(tensor: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    return tensor.clone() if place is None else place.copy_(tensor)


def _rejoined(values: Lanes) -> torch.Tensor:
    """A value of a shard of each rank."""
    flat = [value.reshape(-1) for value in values]
    shards = [one.tensor_split(len(flat))[index] for index, one in enumerate(flat)]
    return torch.cat(shards).view(values[0].shape)


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cloned(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cloned(one) for one in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


_RUN: Mapping[type, Callable[[_Machine, fx.Node], Any]] = {
    ops.Shards: lambda machine, node: machine.layout.unit(op_of(node, ops.Shards).unit),
    ops.Parameter: lambda machine, node: [
        lane.to(data(node).type.dtype)  # type: ignore[union-attr]
        for lane in machine._whole(op_of(node, ops.Parameter).name)
    ],
    **dict.fromkeys(ops.RUNTIME_INPUTS, lambda machine, node: None),
    ops.Compute: lambda machine, node: machine.operations.run(node, machine.values),
    ops.Call: _Machine._one,
    ops.Item: _Machine._item,
    ops.AllGather: _Machine._all_gather,
    ops.GatherOutside: _Machine._gather_outside,
    ops.GatherInside: _Machine._all_gather,
    ops.GatherAhead: _Machine._gather_ahead,
    ops.WaitGather: _Machine._wait,
    ops.WaitSecondary: _Machine._wait,
    ops.WaitReduce: _Machine._wait,
    ops.WaitFetch: _Machine._wait,
    ops.Release: _Machine._release,
    ops.Reduce: _Machine._reduce,
    ops.ReduceOutside: _Machine._reduce_outside,
    ops.Accumulate: _Machine._accumulate,
    ops.Update: _Machine._update,
    ops.Copy: lambda machine, node: [value.clone() for value in machine._tensors(node.args[0])],
    ops.Store: lambda machine, node: [value.clone() for value in machine._tensors(node.args[0])],
    ops.Offload: _Machine._offload,
    ops.Fetch: _Machine._fetch,
    ops.Results: lambda machine, node: None,
}
"""How each kind of lines is run."""
