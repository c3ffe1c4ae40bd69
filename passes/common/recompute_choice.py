"""Which values to save over the turn and which to compute again: the cheapest choice within a budget of memory.

A mixed-integer program in the manner of Checkmate (Jain et al. 2020, section 4), with one step of recomputation for
each region instead of for each operation. For every value v that the backward may need and every run k of the backward:

    s[v] = 1        v is saved from its run of the forward to the last run that may need it
    r[o, k] = 1     operation o runs again in k
    s[v] + r[o, k] >= 1            for v, given by o, that k reads
    s[w] + r[p, k] >= r[o, k]      for w, given by p, that o reads
    sum of the bytes of s alive at k, and of r[., k]  <=  budget - what k holds beside

and least is the time of what runs again. Without the last line its relaxation is a minimum cut and has integral
solutions; the budget makes it a knapsack. HiGHS solves it (by scipy), to a gap that is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
from torch import fx

from zcompile.cost.fusion import fuses, is_stored
from zcompile.cost.hardware import CPU
from zcompile.cost.memory import live_bytes
from zcompile.cost.roofline import aten_cost, operation_seconds
from zcompile.ir.actions import ActionKind
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Call, values_of
from zcompile.ir.program import Program
from zcompile.passes.common.recompute import SavedValueAnalysis, recompute

GAP = 0.005
"""Relative distance from the least time at which the solver may stop."""
SECONDS = 10.0
"""Of one solution; what was found until then is taken."""
ROUNDS = 5
"""Solutions at most: each is measured against the finished program, and what was mistaken enters the next."""
CLOSE = 0.98
"""Share of the budget that is near enough to it."""


@dataclass(frozen=True)
class RecomputeChoice:
    """What the backward computes again: for each of its runs, the values by name."""

    again: Mapping[int, frozenset[str]]
    saved: frozenset[fx.Node]
    """What is read of the forward, for the backward or for what runs again."""
    flops: int
    """Of what runs again."""
    gap: float = 0.0
    """How far the time of what runs again may be from the least, as a share of it."""

    def runs_again(self, operation: fx.Node, run: int) -> bool:
        """True if `operation` is computed again in `run`, for any of its results."""
        return any(value.name in self.again[run] for value in values_of(operation))


def choice(analysis: SavedValueAnalysis, is_saved: Callable[[fx.Node, int], bool], gap: float = 0.0) -> RecomputeChoice:
    """All that must run again where `is_saved(value, run)` says what a run of the backward reads of the forward."""
    again: dict[int, frozenset[str]] = {}
    saved: set[fx.Node] = set()
    flops = 0
    for run, values in analysis.needs.items():
        result: set[fx.Node] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value in result:
                continue
            if is_saved(value, run) or not analysis.may_recompute(value, run):
                saved.add(value)
            else:
                result.add(value)
                waiting += analysis.sources(value)
        again[run] = frozenset(value.name for value in result)
        flops += sum(aten_cost(operation)[0] for operation in {analysis.operation(value) for value in result})
    return RecomputeChoice(again, frozenset(saved), flops, gap)


def by_unit(analysis: SavedValueAnalysis, *, at_once: bool = True) -> RecomputeChoice:
    """Each unit's input is saved and the rest of it computed again (Chen et al. 2016, section 4).

    Where the backward follows the forward `at_once`, nothing is of the unit whose backward comes first: it would be
    computed twice and in memory all the same. Nor is what another unit reads, which is saved for that.
    """
    first = analysis.backward[0].unit if analysis.backward and at_once else ""

    def is_foreign(value: fx.Node, run: int) -> bool:
        unit = analysis.runs[run].unit
        return unit == first or analysis.runs[analysis.home[analysis.operation(value)]].unit != unit

    saved = choice(analysis, is_foreign).saved
    return choice(analysis, lambda value, run: value in saved or is_foreign(value, run))


class Problem:
    """The choice of a program as a mixed-integer program; see the module for its variables and constraints.

    Args:
        turn: What crosses the turn from forward to backward.
        fused: Of what compiles the regions, see `zcompile.cost.fusion`.
        others: How many other micro-batches there are that hold what they save, all the time.
    """

    def __init__(self, analysis: SavedValueAnalysis, *, fused: bool = True, others: int = 0) -> None:
        self.analysis, self.fused, self.others = analysis, fused, others
        reached = self._reached()
        self.saved = {value: column for column, value in enumerate(dict.fromkeys(value for value, _ in reached))}
        """Columns of s."""
        again = dict.fromkeys((analysis.operation(v), run) for v, run in reached if analysis.may_recompute(v, run))
        self.again = {key: len(self.saved) + index for index, key in enumerate(again)}
        """Columns of r."""
        self.ends: dict[fx.Node, int] = {}
        """The last run that may need a value."""
        for value, run in reached:
            self.ends[value] = max(run, self.ends.get(value, run))

    def _reached(self) -> list[tuple[fx.Node, int]]:
        """All values that a run of the backward may need, itself or for what it computes again, with the run."""
        result: dict[tuple[fx.Node, int], None] = {}
        for run, values in self.analysis.needs.items():
            waiting = list(values)
            while waiting:
                value = waiting.pop()
                if (value, run) not in result:
                    result[value, run] = None
                    waiting += self.analysis.sources(value) if self.analysis.may_recompute(value, run) else []
        return list(result)

    # -- what things cost -----------------------------------------------------------------------------------------

    def saved_bytes(self, value: fx.Node) -> int:
        """Bytes that saving a value takes: none of one that the caller holds anyway."""
        return 0 if value in self.analysis.returned else data(value).nbytes

    def again_bytes(self, operation: fx.Node) -> int:
        """Bytes that the results of an operation take where it runs again."""
        return sum(data(node).nbytes for node in values_of(operation) if not self.fused or is_stored(node))

    def again_seconds(self, operation: fx.Node) -> float:
        """Time of an operation that runs again; what fuses reads and writes little of its own."""
        _, touched = aten_cost(operation)
        if self.fused and fuses(operation):
            touched = self.again_bytes(operation) + touched // 16
        return operation_seconds(operation, CPU, touched)

    @cached_property
    def _seconds(self) -> Any:
        """By column, as a share of the largest: solvers like numbers near one."""
        again = [self.again_seconds(operation) for operation, _ in self.again]
        costs = numpy.array([0.0] * len(self.saved) + again)
        return costs / (costs.max(initial=0.0) or 1.0)

    @cached_property
    def _unit(self) -> float:
        """Bytes of the largest value, in which memory is counted: for the same reason."""
        return float(max((data(value).nbytes for value in self.saved), default=0) or 1)

    def held(self, selection: RecomputeChoice) -> dict[int, int]:
        """Bytes of what each run holds of saved values and of what it computes again, as this problem counts them."""
        count = {run.index: 0 for run in self.analysis.runs}
        for value in self.ends:
            for run in count if value in selection.saved else ():
                count[run] += self._copies(value, run) * self.saved_bytes(value)
        for operation, run in self.again:
            if selection.runs_again(operation, run):
                count[run] += self.again_bytes(operation)
        return count

    def _copies(self, value: fx.Node, run: int) -> int:
        """How often a value that is saved is held in a run: of this micro-batch, and of others."""
        return self.others + (self.analysis.home[value] <= run <= self.ends[value])

    # -- solving --------------------------------------------------------------------------------------------------

    def solve(self, budget: float | None, beside: Mapping[int, float]) -> RecomputeChoice | None:
        """The cheapest choice in which no run holds more than `budget` bytes, if there is one.

        `beside` is what each run holds that is not chosen here. Without a budget: the choice whose peak is least.
        """
        from scipy.optimize import Bounds, milp  # importing scipy takes a quarter of a second

        columns = len(self.saved) + len(self.again)
        peak = 0.0 if budget is None else budget / self._unit
        cost = numpy.append(self._seconds * (1.0 if budget is not None else 1e-6), 0.0 if budget is not None else 1.0)
        found = milp(
            cost,
            integrality=numpy.append(numpy.ones(columns), 0),
            bounds=Bounds(
                numpy.append(numpy.zeros(columns), peak),
                numpy.append(numpy.ones(columns), peak if budget is not None else math.inf),
            ),
            constraints=[self._needs(), self._memory(beside)],
            options={"mip_rel_gap": GAP, "time_limit": SECONDS},
        )
        if found.x is None:
            return None
        saved = {value for value, column in self.saved.items() if found.x[column] > 0.5}
        # Without a budget the solver's gap is the peak's, not the time's.
        gap = 0.0 if budget is None else float(found.mip_gap or 0.0)
        return choice(self.analysis, lambda value, _: value in saved, gap)

    def _needs(self) -> Any:
        """What is read is saved or computed again, by the backward itself and by what it computes again."""
        rows = _Rows(len(self.saved) + len(self.again) + 1)
        for run, values in self.analysis.needs.items():
            for value in values:
                rows.add(self._sources(value, run), least=1)
        for (operation, run), column in self.again.items():
            for source in self.analysis.sources(operation):
                rows.add({**self._sources(source, run), column: -1}, least=0)
        return rows.constraint()

    def _sources(self, value: fx.Node, run: int) -> dict[int, float]:
        """The columns that give `value` to `run`."""
        again = self.again.get((self.analysis.operation(value), run))
        return {self.saved[value]: 1.0} | ({again: 1.0} if again is not None else {})

    def _memory(self, beside: Mapping[int, float]) -> Any:
        """No run holds more than the last column says."""
        peak = len(self.saved) + len(self.again)
        held: dict[int, dict[int, float]] = {run.index: {peak: 1.0} for run in self.analysis.runs}
        for value, column in self.saved.items():
            for run in held:
                if copies := self._copies(value, run):
                    held[run][column] = -copies * self.saved_bytes(value) / self._unit
        for (operation, run), column in self.again.items():
            held[run][column] = -self.again_bytes(operation) / self._unit
        rows = _Rows(peak + 1)
        for run, coefficients in held.items():
            rows.add(coefficients, least=beside.get(run, 0.0) / self._unit)
        return rows.constraint()


class _Rows:
    """Rows of a sparse matrix, each with the least that it may amount to."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.entries: list[tuple[int, int, float]] = []
        self.least: list[float] = []

    def add(self, coefficients: Mapping[int, float], *, least: float) -> None:
        self.entries += ((len(self.least), column, value) for column, value in coefficients.items() if value)
        self.least.append(least)

    def constraint(self) -> Any:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        rows, columns, values = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        matrix = csr_array((values, (rows, columns)), shape=(len(self.least), self.columns))
        return LinearConstraint(matrix, lb=numpy.array(self.least), ub=math.inf)


# -- a budget ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A choice and what comes of it."""

    choice: RecomputeChoice
    program: Program
    """Rewritten by it, not finished."""
    peak: int
    """Bytes that the finished program holds at most."""
    beside: Mapping[int, float]
    """Bytes that each run holds at most of what was not chosen."""


_BACKWARD = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def _phase_of(call: fx.Node) -> Phase:
    """Of a program, or of the step that a pipeline makes of it."""
    kind = data(call).action.strip("0123456789")
    if not kind:
        return data(call).phase
    return Phase.BACKWARD if kind in _BACKWARD else Phase.FORWARD


class Budget:
    """Choices measured against the program that comes of them."""

    def __init__(
        self, analysis: SavedValueAnalysis, finish: Callable[[Program], Program], *, fused: bool = True, others: int = 0
    ) -> None:
        """`finish` rewrites a program as the passes do that follow the choice; for the others see `Problem`."""
        self.analysis, self.finish, self.problem = analysis, finish, Problem(analysis, fused=fused, others=others)

    def outcome(self, selection: RecomputeChoice) -> Outcome:
        """What a run holds beside what is chosen (full parameters, gradients, values that come and go) is read off."""
        program = recompute(self.analysis, selection.again)
        finished = self.finish(program)
        live = live_bytes(finished)
        peaks: dict[tuple[Phase, str], int] = {}
        for call in finished.nodes(Call):
            for unit in op_of(call, Call).units:
                key = _phase_of(call), unit
                peaks[key] = max(live[call], peaks.get(key, 0))
        held = self.problem.held(selection)
        beside = {run.index: peaks.get((run.phase, run.unit), 0) - held[run.index] for run in self.analysis.runs}
        return Outcome(selection, program, max(live.values(), default=0), beside)

    def untouched(self) -> Outcome:
        """Nothing is computed again."""
        return self.outcome(choice(self.analysis, lambda *_: True))

    def within(self, budget: int, start: Outcome) -> Outcome:
        """The cheapest choice whose finished program holds at most `budget` bytes; if there is none, the smallest."""
        outcomes = [start]
        allowed = float(budget)
        for _ in range(ROUNDS):
            selection = self.problem.solve(allowed, outcomes[-1].beside)
            if selection is None:
                break
            outcomes.append(self.outcome(selection))
            fits = outcomes[-1].peak <= budget
            if fits and (outcomes[-1].peak >= CLOSE * budget or not selection.flops):
                break
            if selection.again == outcomes[-2].choice.again:
                allowed -= max(outcomes[-1].peak - budget, 0)
        fitting = [outcome for outcome in outcomes if outcome.peak <= budget]
        return min(fitting, key=lambda one: (one.choice.flops, -one.peak)) if fitting else self._smallest(outcomes)

    def _smallest(self, outcomes: list[Outcome]) -> Outcome:
        for _ in range(2):
            selection = self.problem.solve(None, outcomes[-1].beside)
            assert selection is not None, "some peak can be kept"
            outcomes = [*outcomes, self.outcome(selection)]
        return min(outcomes, key=lambda outcome: outcome.peak)
