"""Which values to save over the turn and which to recompute: the cheapest choice within a memory budget.

A mixed-integer program in the manner of Checkmate (Jain et al. 2020, section 4), with one step of recomputation per
region instead of per operation. For every value v that the backward may need and every run k of the backward:

    s[v] = 1        v is saved from its run of the forward to the last run that may need it
    r[o, k] = 1     operation o is recomputed in k
    s[v] + r[o, k] >= 1            for each v, computed by o, that k reads
    s[w] + r[p, k] >= r[o, k]      for each w, computed by p, that o reads
    bytes of s alive at k, plus bytes of r[., k]  <=  budget - other bytes that k holds

minimizing the time of recomputation. Without the last constraint, its relaxation is a minimum cut with integral
solutions; the budget makes it a knapsack. HiGHS solves it (through scipy), to a gap that is reported.
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
"""Relative gap to the optimum at which the solver may stop."""
SECONDS = 10.0
"""Time limit of one solve; the best solution found by then is taken."""
ROUNDS = 5
"""Most solves: each solution is measured on the finished program, and the measurement corrects the next solve."""
CLOSE = 0.98
"""Fraction of the budget at which a fitting solution is accepted without another solve."""


@dataclass(frozen=True)
class RecomputeChoice:
    """The values that the backward recomputes: for each of its runs, their names."""

    again: Mapping[int, frozenset[str]]
    saved: frozenset[fx.Node]
    """Values of the forward that the backward or its recomputation reads."""
    flops: int
    """FLOPs of recomputation."""
    gap: float = 0.0
    """Bound on the relative gap between the time of recomputation and the optimum."""

    def runs_again(self, operation: fx.Node, run: int) -> bool:
        """Return True if `run` recomputes any result of `operation`."""
        return any(value.name in self.again[run] for value in values_of(operation))


def choice(analysis: SavedValueAnalysis, is_saved: Callable[[fx.Node, int], bool], gap: float = 0.0) -> RecomputeChoice:
    """Return the choice in which each run recomputes all values that it needs, unless `is_saved(value, run)`."""
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
    """Return the choice that saves each unit's input and recomputes the rest (Chen et al. 2016, section 4).

    If the backward follows the forward `at_once`, the unit whose backward comes first is not recomputed: that would
    not save memory. Nor are values that another unit's backward reads, which are saved for it.
    """
    first = analysis.backward[0].unit if analysis.backward and at_once else ""

    def is_foreign(value: fx.Node, run: int) -> bool:
        unit = analysis.runs[run].unit
        return unit == first or analysis.runs[analysis.home[analysis.operation(value)]].unit != unit

    saved = choice(analysis, is_foreign).saved
    return choice(analysis, lambda value, run: value in saved or is_foreign(value, run))


class Problem:
    """The mixed-integer program of the choice; see the module docstring for its variables and constraints.

    Args:
        analysis: The values that cross the turn from forward to backward.
        fused: Whether the regions' compiler fuses operations, see `zcompile.cost.fusion`.
        others: How many other micro-batches hold their saved values all the time.
    """

    def __init__(self, analysis: SavedValueAnalysis, *, fused: bool = True, others: int = 0) -> None:
        self.analysis, self.fused, self.others = analysis, fused, others
        reached = self._reached()
        self.saved = {value: column for column, value in enumerate(dict.fromkeys(value for value, _ in reached))}
        """Column of s for each value."""
        again = dict.fromkeys((analysis.operation(v), run) for v, run in reached if analysis.may_recompute(v, run))
        self.again = {key: len(self.saved) + index for index, key in enumerate(again)}
        """Column of r for each operation and run."""
        self.ends: dict[fx.Node, int] = {}
        """The last run that may need each value."""
        for value, run in reached:
            self.ends[value] = max(run, self.ends.get(value, run))

    def _reached(self) -> list[tuple[fx.Node, int]]:
        """Return each (value, run) such that the run of the backward may need the value, directly or to recompute."""
        result: dict[tuple[fx.Node, int], None] = {}
        for run, values in self.analysis.needs.items():
            waiting = list(values)
            while waiting:
                value = waiting.pop()
                if (value, run) not in result:
                    result[value, run] = None
                    waiting += self.analysis.sources(value) if self.analysis.may_recompute(value, run) else []
        return list(result)

    # -- costs ----------------------------------------------------------------------------------------------------

    def saved_bytes(self, value: fx.Node) -> int:
        """Return the bytes that saving a value takes: 0 if the caller holds it anyway."""
        return 0 if value in self.analysis.returned else data(value).nbytes

    def again_bytes(self, operation: fx.Node) -> int:
        """Return the bytes that the results of an operation take when it is recomputed."""
        return sum(data(node).nbytes for node in values_of(operation) if not self.fused or is_stored(node))

    def again_seconds(self, operation: fx.Node) -> float:
        """Return the seconds of recomputing an operation; if it is fused, it moves few bytes of its own."""
        _, touched = aten_cost(operation)
        if self.fused and fuses(operation):
            touched = self.again_bytes(operation) + touched // 16
        return operation_seconds(operation, CPU, touched)

    @cached_property
    def _seconds(self) -> Any:
        """Cost by column, divided by the largest: solvers need coefficients near 1."""
        again = [self.again_seconds(operation) for operation, _ in self.again]
        costs = numpy.array([0.0] * len(self.saved) + again)
        return costs / (costs.max(initial=0.0) or 1.0)

    @cached_property
    def _unit(self) -> float:
        """The unit of memory: the bytes of the largest value, for the same reason."""
        return float(max((data(value).nbytes for value in self.saved), default=0) or 1)

    def held(self, selection: RecomputeChoice) -> dict[int, int]:
        """Return the bytes of saved and recomputed values that each run holds, as this problem counts them."""
        count = {run.index: 0 for run in self.analysis.runs}
        for value in self.ends:
            for run in count if value in selection.saved else ():
                count[run] += self._copies(value, run) * self.saved_bytes(value)
        for operation, run in self.again:
            if selection.runs_again(operation, run):
                count[run] += self.again_bytes(operation)
        return count

    def _copies(self, value: fx.Node, run: int) -> int:
        """Return how many micro-batches' copies of a saved value are held during a run."""
        return self.others + (self.analysis.home[value] <= run <= self.ends[value])

    # -- solving --------------------------------------------------------------------------------------------------

    def solve(self, budget: float | None, other_bytes: Mapping[int, float]) -> RecomputeChoice | None:
        """Return the cheapest choice in which no run holds more than `budget` bytes, or None if there is none.

        `other_bytes`: the bytes that each run holds regardless of the choice. Without a budget, the peak is minimized.
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
            constraints=[self._needs(), self._memory(other_bytes)],
            options={"mip_rel_gap": GAP, "time_limit": SECONDS},
        )
        if found.x is None:
            return None
        saved = {value for value, column in self.saved.items() if found.x[column] > 0.5}
        # Without a budget the solver's gap is the peak's, not the time's.
        gap = 0.0 if budget is None else float(found.mip_gap or 0.0)
        return choice(self.analysis, lambda value, _: value in saved, gap)

    def _needs(self) -> Any:
        """Constrain every value that the backward or a recomputed operation reads to be saved or recomputed."""
        rows = _Rows(len(self.saved) + len(self.again) + 1)
        for run, values in self.analysis.needs.items():
            for value in values:
                rows.add(self._sources(value, run), least=1)
        for (operation, run), column in self.again.items():
            for source in self.analysis.sources(operation):
                rows.add({**self._sources(source, run), column: -1}, least=0)
        return rows.constraint()

    def _sources(self, value: fx.Node, run: int) -> dict[int, float]:
        """Return the columns that provide `value` in `run`, with coefficient 1."""
        again = self.again.get((self.analysis.operation(value), run))
        return {self.saved[value]: 1.0} | ({again: 1.0} if again is not None else {})

    def _memory(self, other_bytes: Mapping[int, float]) -> Any:
        """Constrain the memory of every run to be at most the last column, the peak."""
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
            rows.add(coefficients, least=other_bytes.get(run, 0.0) / self._unit)
        return rows.constraint()


class _Rows:
    """Rows of a sparse constraint matrix, each with its lower bound."""

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
    """A choice and its measured effect."""

    choice: RecomputeChoice
    program: Program
    """The program rewritten by the choice, without the passes that follow."""
    peak: int
    """Peak bytes of the finished program."""
    other_bytes: Mapping[int, float]
    """Peak bytes of each run that do not depend on the choice."""


_BACKWARD = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def _phase_of(call: fx.Node) -> Phase:
    """Return the phase of a call in a program, or in a pipeline step, where its action says it."""
    kind = data(call).action.strip("0123456789")
    if not kind:
        return data(call).phase
    return Phase.BACKWARD if kind in _BACKWARD else Phase.FORWARD


class Budget:
    """Makes choices, measured on the finished programs that result."""

    def __init__(
        self, analysis: SavedValueAnalysis, finish: Callable[[Program], Program], *, fused: bool = True, others: int = 0
    ) -> None:
        """`finish` runs the passes that follow the choice; for the other arguments see `Problem`."""
        self.analysis, self.finish, self.problem = analysis, finish, Problem(analysis, fused=fused, others=others)

    def outcome(self, selection: RecomputeChoice) -> Outcome:
        """Apply a choice, and measure the finished program's peak and other bytes (parameters, temporaries) by run."""
        program = recompute(self.analysis, selection.again)
        finished = self.finish(program)
        live = live_bytes(finished)
        peaks: dict[tuple[Phase, str], int] = {}
        for call in finished.nodes(Call):
            for unit in op_of(call, Call).units:
                key = _phase_of(call), unit
                peaks[key] = max(live[call], peaks.get(key, 0))
        held = self.problem.held(selection)
        other_bytes = {run.index: peaks.get((run.phase, run.unit), 0) - held[run.index] for run in self.analysis.runs}
        return Outcome(selection, program, max(live.values(), default=0), other_bytes)

    def untouched(self) -> Outcome:
        """Return the outcome without recomputation."""
        return self.outcome(choice(self.analysis, lambda *_: True))

    def within(self, budget: int, start: Outcome) -> Outcome:
        """Return the cheapest outcome with a peak of at most `budget` bytes, or the smallest if there is none."""
        outcomes = [start]
        allowed = float(budget)
        for _ in range(ROUNDS):
            selection = self.problem.solve(allowed, outcomes[-1].other_bytes)
            if selection is None:
                break
            outcomes.append(self.outcome(selection))
            fits = outcomes[-1].peak <= budget
            if fits and (outcomes[-1].peak >= CLOSE * budget or not selection.flops):
                break
            if selection.again == outcomes[-2].choice.again:
                allowed -= max(outcomes[-1].peak - budget, 0)
        fitting = [outcome for outcome in outcomes if outcome.peak <= budget]
        return min(fitting, key=lambda fit: (fit.choice.flops, -fit.peak)) if fitting else self._smallest(outcomes)

    def _smallest(self, outcomes: list[Outcome]) -> Outcome:
        for _ in range(2):
            selection = self.problem.solve(None, outcomes[-1].other_bytes)
            if selection is None:  # without a budget there is a solution, but the solver has not found one in time
                break
            outcomes = [*outcomes, self.outcome(selection)]
        return min(outcomes, key=lambda outcome: outcome.peak)
