"""recompute_activations: save fewer activations for the backward, and recompute the others where they are needed.

With checkpoint="unit" and two units that each multiply and apply a sine:

    h = aten.mm.default(x, a)                          h = aten.mm.default(x, a)
    ya = aten.sin.default(h)                           ya = aten.sin.default(h)
    ...                                                ...
    return [y], [h, x, ya, ...]           ->           return [y], [x, ya, ...]

    c = aten.cos.default(h)                            h_1 = aten.mm.default(x, a)
    dh = aten.mul.Tensor(dya, c)                       c = aten.cos.default(h_1)
                                                       dh = aten.mul.Tensor(dya, c)

With a budget, values are chosen individually (`zcompile.passes.common.recompute_choice`) to minimize the time of
recomputation within the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from zcompile.cost.roofline import aten_cost
from zcompile.errors import OptionError
from zcompile.ir.operation import Phase, data
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.passes.common.recompute import SavedValueAnalysis, recompute
from zcompile.passes.common.recompute_choice import Budget, RecomputeChoice, by_unit


def recompute_activations(
    program: Program,
    *,
    checkpoint: Literal["unit"] | int | float,
    finish: Callable[[Program], Program] = lambda program: program,
    fuses: bool = True,
    whole: bool = True,
    at_once: bool = True,
    others: int = 0,
) -> Program:
    """Return a program whose backward recomputes values of the forward instead of saving them.

    Args:
        program: A program with phases split and units assigned.
        checkpoint: "unit" saves the input of each unit. An int is a limit in bytes for the finished program, shards
            and optimizer state excluded. A float is such a limit as a fraction of the peak without recomputation.
        finish: Runs the remaining passes.
        fuses: Whether the regions' compiler fuses operations, see `zcompile.cost.fusion`.
        whole: False for a part of a model, which may have nothing to save.
        at_once: False if other micro-batches run between the program's forward and its backward.
        others: With a budget, how many other micro-batches hold their saved values in the meantime.

    Raises:
        OptionError: the budget is too small for any choice, or there is nothing to recompute.
    """
    if not program.has_backward:
        return program.copy()
    analysis = SavedValueAnalysis(program, collectives=checkpoint == "unit")  # all ranks of a group have the same units
    if isinstance(checkpoint, str):
        selection = by_unit(analysis, at_once=at_once)
        result = recompute(analysis, selection.again)
        if whole and not any(selection.again.values()):
            problem = f"{checkpoint!r} has no effect: no unit but the last computes anything that can be computed again"
            raise OptionError("checkpoint", problem, "give smaller units=, or leave it out")
    else:
        selection, result = _within(Budget(analysis, finish, fused=fuses, others=others), checkpoint)
    return replace(result, notes=(*program.notes, _note(program, result, selection)))


def _note(before: Program, after: Program, selection: RecomputeChoice) -> str:
    saved, again = (sum(data(node).nbytes for node in program.saved()) for program in (before, after))
    forward = sum(aten_cost(node)[0] for node in before.body(Phase.FORWARD))
    share = f"{selection.flops / forward:.1%} of the forward's FLOPs" if forward else "no FLOPs"
    gap = f", within {selection.gap:.1%} of the least time" if selection.gap else ""
    kept = f"{human_bytes(again)} of activations saved in place of {human_bytes(saved)}"
    return f"activation checkpointing: {kept}, {share} computed again{gap}"


def _within(budget: Budget, checkpoint: int | float) -> tuple[RecomputeChoice, Program]:
    start = budget.untouched()
    limit = int(checkpoint * start.peak) if isinstance(checkpoint, float) else checkpoint
    if start.peak <= limit:
        return start.choice, start.program
    best = budget.within(limit, start)
    if best.peak > limit:
        less = f"{human_bytes(limit)} is less than the {human_bytes(best.peak)} that this step takes at the least"
        fix = f"give at least {best.peak} bytes, a smaller prefetch or batch, or smaller units="
        raise OptionError("checkpoint", less, fix)
    return best.choice, best.program
