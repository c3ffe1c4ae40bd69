"""Runs of operations that treat rows alike, between values that are narrow: what a loop over rows may compute.

A run grows from a wide value, one with many elements for each row. Whatever computes a wide value, or reads one,
belongs to it, so that no wide value exists for all rows; and whatever lies between two of its operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from zcompile.errors import OptionError
from zcompile.ir.operation import Phase, data, dependents, op_of
from zcompile.ir.ops import Compute, Input, Item, Kind, Results, called
from zcompile.ir.placement import Divided
from zcompile.ir.program import Program
from zcompile.ir.row_axes import MixedRowsError, shape_of, tensors_of
from zcompile.ir.rows import Placements, is_scaled, through_view
from zcompile.ir.side_effects import is_collective


class NoRunError(Exception):
    """A wide value cannot be computed in chunks; `node`: the line because of which."""

    def __init__(self, node: fx.Node, problem: str, fix: str = "leave it out") -> None:
        super().__init__(problem)
        self.node, self.fix = node, fix


def check_sizes(program: Program, option: str) -> None:
    """Raise OptionError for a program of batches whose sizes vary, with which `option` cannot deal."""
    inputs = [(node.name, data(node).type) for node in program.nodes(Input)]
    if dynamic := [f"{name} {type_}" for name, type_ in inputs if type_ and any(dim.symbol for dim in type_.dims)]:
        fix = "give torch.compile dynamic=False, for one program for each size, as zcompile.compile does by itself"
        raise OptionError(option, f"needs sizes that are known, but has {dynamic[0]}", fix)


_RETURNED = "let the model return the loss alone, or give zcompile.train_step a loss_fn that does"

_DIVIDED = "let each rank keep its part of the values, as a head does within loss_parallel(), or leave it out"


@dataclass
class RowRun:
    """A run around a wide value, of both phases, and where its rows are."""

    program: Program
    wide: fx.Node
    placed: Placements
    members: set[fx.Node]
    """Its operations, and the items of their results."""

    @classmethod
    def around(cls, program: Program, wide: fx.Node) -> RowRun:
        """Return the run around a value, with as many rows as it can be divided into.

        Raises:
            NoRunError: its rows are mixed, or it is given or returned.
        """
        failed: NoRunError | None = None
        for place, rows in sorted(set(_divisions(wide)), key=lambda found: -found[1]):
            try:
                return _Growth(program, wide, place, rows).run()
            except NoRunError as error:
                failed = error
        raise failed or NoRunError(wide, "has one row")

    def is_wide(self, value: fx.Node) -> bool:
        """Return True for a value with more than half as many elements for each row as the widest one."""
        placement = self.placed.of.get(value)
        return isinstance(placement, Divided) and value.meta["val"].numel() * 2 > self.wide.meta["val"].numel()

    @property
    def count(self) -> int:
        """The rows of the wide value, over all its dimensions but the last, or those before the one that is divided."""
        placement, shape = self.placed.of[self.wide], shape_of(self.wide)
        assert isinstance(placement, Divided), "a wide value has rows"
        if placement.dim < len(shape) - 1:
            return math.prod(shape[:-1])
        return math.prod(shape[:-1]) * placement.outer * self.placed.rows

    def of(self, phase: Phase) -> list[fx.Node]:
        """Return the members in a phase, in the program's order."""
        return [node for node in self.program.graph.nodes if node in self.members and data(node).phase is phase]

    @cached_property
    def again(self) -> list[fx.Node]:
        """The operations of the forward that the backward must repeat, as it reads wide values of theirs, in order."""
        found: set[fx.Node] = set()
        waiting = [source for node in self.of(Phase.BACKWARD) for source in node.all_input_nodes]
        while waiting:
            value = waiting.pop()
            if value in self.members and data(value).phase is Phase.FORWARD and value not in found:
                made = called(value)
                if any(map(self.is_wide, (value, *made.users))) or self.is_wide(made):
                    found |= {made, *(user for user in made.users if isinstance(data(user).op, Item))}
                    waiting += made.all_input_nodes
        return [node for node in self.of(Phase.FORWARD) if node in found]


def _divisions(wide: fx.Node) -> Iterator[tuple[Divided, int]]:
    """Yield ways to divide a value: by its dimensions but the last, and by those of values that are views of it."""
    shape = shape_of(wide)
    for dim, size in enumerate(shape[:-1]):
        if size > 1:
            yield Divided(dim), size
    for view in _views(wide, 3):
        for dim, size in enumerate(shape_of(view)[:-1]):
            if size > 1 and (found := through_view(shape_of(view), Divided(dim), shape, size)) is not None:
                yield found, size


def _views(value: fx.Node, depth: int) -> Iterator[fx.Node]:
    """Yield values that are computed from `value`, or that it is, with as many elements."""
    near = [*value.users, *value.all_input_nodes] if depth else []
    for other in near:
        tensor = other.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.numel() == value.meta["val"].numel():
            yield other
            yield from _views(other, depth - 1)


class _Growth:
    """A run that is growing."""

    def __init__(self, program: Program, wide: fx.Node, placement: Divided, rows: int) -> None:
        self.found = RowRun(program, wide, Placements(rows), set())
        self.waiting: list[fx.Node] = []
        self.nodes = list(program.graph.nodes)
        try:
            self.found.placed.put(wide, placement, wide)
        except MixedRowsError as error:
            raise NoRunError(error.node, str(error)) from error

    def run(self) -> RowRun:
        """Return the run. Raises NoRunError: there is none."""
        self._add(self.found.wide)
        try:
            self._grow()
            while between := [node for phase in self.found.program.phases for node in self._between(phase)]:
                for node in between:
                    self._add(node)
                    self._grow()
        except MixedRowsError as error:
            fix = [_DIVIDED] if is_collective(error.node) else []
            raise NoRunError(error.node, str(error), *fix) from error
        return self.found

    def _add(self, value: fx.Node) -> None:
        """Let the operation that computes a value belong to the run."""
        made = called(value) if value.op == "call_function" else value
        if made in self.found.members:
            return
        if made.op != "call_function" or not isinstance(data(made).op, Compute):
            raise NoRunError(value, "is given to the step as a whole")
        items = [user for user in made.users if isinstance(data(user).op, Item)]
        self.found.members |= {made, *items}
        self.waiting.append(made)

    def _grow(self) -> None:
        placed = self.found.placed
        while self.waiting:
            made = self.waiting.pop(0)
            items = [user for user in made.users if isinstance(data(user).op, Item)]
            for item in items:
                placed.follow(item)
            placed.follow(made)
            for item in items:
                placed.follow(item)
            for source in filter(self.found.is_wide, tensors_of(made)):
                self._add(source)
            for result in filter(self.found.is_wide, (made, *items)):
                for user in result.users:
                    if isinstance(data(user).op, Results):
                        raise NoRunError(result, "is returned", _RETURNED)
                    self._add(user)

    def _between(self, phase: Phase) -> list[fx.Node]:
        """Return what lies between members in a phase, in order: it reads of one, and another reads of it."""
        members = self.found.members
        nodes = [node for node in self.nodes if node.op == "call_function" and data(node).phase is phase]
        after, before = set[fx.Node](), set[fx.Node]()
        for node in nodes:
            if any(source in after or source in members for source in node.all_input_nodes):
                after.add(node)
        for node in reversed(nodes):
            if any(user in before or user in members for user in node.users):
                before.add(node)
        return [node for node in nodes if node in after and node in before and node not in members]


# -- gradients that are known but for a factor ------------------------------------------------------------------------


_FEW = 16
"""A value has few elements for each row if the wide value has at least this many times as many."""


@dataclass(frozen=True)
class Ahead:
    """The backward of a run, where it can be computed with the forward, but for a factor."""

    nodes: list[fx.Node]
    """Its operations, in order; those between the factor and the run's among them."""
    factor: fx.Node
    """The number in which all its results are linear, which the backward computes before it."""


def ahead_of_backward(run: RowRun) -> Ahead | None:
    """Return the backward of a run as computed with its forward, if all that it wants of the backward is one number."""
    nodes = set(run.of(Phase.BACKWARD))
    forward = set(run.of(Phase.FORWARD))
    order = {node: index for index, node in enumerate(run.program.graph.nodes)}
    placed = run.placed

    def pull(value: fx.Node) -> bool:
        """Let the computation of a value with few elements for each row be done ahead, too."""
        large = value.meta["val"].numel() * _FEW > run.wide.meta["val"].numel()
        if not isinstance(data(value).op, Compute) or large:
            return False
        nodes.add(value)
        try:
            placed.follow(value)
        except MixedRowsError:
            return False
        return True

    given, made = dependents(_tangents(run.program)), dependents(forward)
    while True:
        read = {source for node in nodes for source in node.all_input_nodes} - nodes - forward
        wanted = sorted(read & (given | made), key=order.__getitem__)
        rows = [value for value in wanted if value in made or isinstance(placed.of.get(value), Divided)]
        if not rows and len(wanted) == 1:
            break
        if not wanted or not pull(rows[-1] if rows else wanted[-1]):
            return None
    (factor,) = wanted
    found = sorted(nodes, key=order.__getitem__)
    results = [node for node in found if node in run.members and any(user not in nodes for user in node.users)]
    return Ahead(found, factor) if not shape_of(factor) and is_scaled(found, factor, results) else None


def _tangents(program: Program) -> list[fx.Node]:
    return [node for node in program.nodes(Input) if op_of(node, Input).kind is Kind.TANGENT]
