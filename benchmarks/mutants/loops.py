"""Loops over rows: how the oracle runs them, and mutations of what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import fx

from benchmarks.mutants.aten import Lanes, Operations, evaluate
from benchmarks.mutants.lines import Mutation, mutation_of, pick
from zcompile import Program
from zcompile.ir.placement import PARTIAL, WHOLE, Divided, Placement, RowLoop
from zcompile.ir.region import Region

aten = torch.ops.aten


def looped(region: Region, given: Sequence[Lanes], operations: Operations) -> list[Lanes | Any]:
    """The results of a region, which may be a loop: those of its turns, joined or added up."""
    loop = region.rows
    if loop is None:
        return evaluate(region.graph, given, region.modules, operations)
    if loop.rows % loop.size:
        raise TypeError("a turn has fewer rows, for which there is no graph")
    turns = []
    for first in range(0, loop.rows, loop.size):
        taken = [_rows(loop, lanes, placement, first) for lanes, placement in zip(given, loop.takes, strict=True)]
        turns.append(evaluate(region.graph, taken, region.modules, operations))
    results = zip(*turns, strict=True)
    return [_joined(loop, *one, operations.lanes) for one in zip(results, loop.gives, strict=True)]


def _rows(loop: RowLoop, lanes: Lanes, placement: Placement, first: int) -> Lanes:
    if not isinstance(placement, Divided):
        return lanes
    return [lane.index_select(placement.dim, _indices(loop, lane, placement, first)) for lane in lanes]


def _indices(loop: RowLoop, whole: torch.Tensor, placement: Divided, first: int) -> torch.Tensor:
    every = torch.arange(whole.shape[placement.dim]).view(placement.outer, loop.rows, -1)
    return every[:, first : first + loop.size].flatten()


def _joined(loop: RowLoop, turns: Sequence[Lanes], placement: Placement, lanes: int) -> Lanes:
    found: Lanes = []
    for lane in range(lanes):
        parts = [turn[lane] for turn in turns]
        if isinstance(placement, Divided):
            shape = [*parts[0].shape]
            shape[placement.dim] *= loop.rows // loop.size
            whole = parts[0].new_empty(shape)
            for number, part in enumerate(parts):
                whole.index_copy_(placement.dim, _indices(loop, whole, placement, number * loop.size), part)
        else:
            whole = sum(part.float() for part in parts).to(parts[0].dtype)
        found.append(whole)
    return found


# -- mutations --------------------------------------------------------------------------------------------------------


def _loop(random: Random, program: Program) -> tuple[Region, RowLoop]:
    return pick(random, [(one, one.rows) for one in program.regions.values() if one.rows is not None])


def _with(program: Program, region: Region, **changes: Any) -> Program:
    assert region.rows is not None, "it is a loop"
    changed = replace(region, rows=replace(region.rows, **changes))
    return replace(program, regions={**program.regions, region.name: changed})


def leave_out_rows(random: Random, program: Program) -> Program:
    """The last turn is left out."""
    region, loop = _loop(random, program)
    return _with(program, region, rows=loop.rows - loop.size)


def add_rows(random: Random, program: Program) -> Program:
    """There is a turn more, or there are twice as many."""
    region, loop = _loop(random, program)
    rows = loop.rows
    return _with(program, region, rows=random.choice([rows + loop.size, 2 * rows]))


def exchange_rows(random: Random, program: Program) -> Program:
    """There are as many rows in a turn as there were turns."""
    region, loop = _loop(random, program)
    return _with(program, region, size=loop.rows // loop.size)


def take_otherwise(random: Random, program: Program) -> Program:
    """A value is given to all turns as a whole, or divided, or along another dimension."""
    region, loop = _loop(random, program)
    takes = [*loop.takes]
    index = random.randrange(len(takes))
    takes[index] = _other(random, takes[index], WHOLE)
    return _with(program, region, takes=tuple(takes))


def give_otherwise(random: Random, program: Program) -> Program:
    """The results of turns are added up, or joined, or along another dimension."""
    region, loop = _loop(random, program)
    gives = [*loop.gives]
    index = random.randrange(len(gives))
    gives[index] = _other(random, gives[index], PARTIAL)
    return _with(program, region, gives=tuple(gives))


def _other(random: Random, placement: Placement, undivided: Placement) -> Placement:
    if not isinstance(placement, Divided):
        return Divided(random.randrange(2), random.choice((1, 2)))
    others = [undivided, Divided(1 - placement.dim % 2, placement.outer)]
    return random.choice([*others, Divided(placement.dim, 1 if placement.outer > 1 else 2)])


def forget_factor(random: Random, program: Program) -> Program:
    """What has 1 in place of a number counts as computed with 1."""
    return _with(program, _loop(random, program)[0], factor="")


def average_turns(random: Random, program: Program) -> Program:
    """A result of each turn is divided by the number of turns, or of its rows: the mean of means."""
    region, loop = _loop(random, program)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(region.graph, values)
    results = [values[node] for node in region.outputs]
    index = random.randrange(len(results))
    count = random.choice([loop.size, loop.rows // loop.size])
    divided = graph.call_function(aten.div.Scalar, (results[index], float(count)))
    divided.meta = {**results[index].meta}
    results[index] = divided
    graph.output(tuple(results)).meta = {**region.graph.output_node().meta}
    changed = replace(region, graph=graph)
    return replace(program, regions={**program.regions, region.name: changed})


_EDITS = (leave_out_rows, add_rows, exchange_rows, take_otherwise, give_otherwise, forget_factor, average_turns)
LOOPS: Mapping[str, Mutation] = {f"loop: {edit.__name__.replace('_', ' ')}": mutation_of(edit) for edit in _EDITS}
"""Mutations by what they do."""
