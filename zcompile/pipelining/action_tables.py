"""Action tables of pipeline schedules by name; taken from torch where possible.

| name | schedule | stages per rank |
| --- | --- | --- |
| `gpipe` | all forwards, then all backwards (Huang et al., "GPipe", 2019) | 1 |
| `1f1b` | one forward, one backward (Narayanan et al., "PipeDream", 2019; "PipeDream-Flush", 2021) | 1 |
| `interleaved1f1b` | the same with several stages per rank (Narayanan et al. 2021, section 2.2) | 2 or more |
| `interleavedzerobubble` | gradients of weights fill bubbles (Qi et al., "Zero Bubble Pipeline Parallelism") | any |
| `zbvzerobubble` | ZB-V: two stages per rank, the first and the last on rank 0 (Qi et al. 2023, section 6) | 2 |
| `dualpipev` | DualPipeV (DeepSeek-V3, 2024): forwards overlapped with backwards | 2 |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zcompile.errors import OptionError, nearest
from zcompile.ir.actions import Action, ActionKind, ActionTable
from zcompile.torch_internals.distributed import pipeline_order


@dataclass(frozen=True, slots=True)
class _Known:
    """A named schedule: torch's name for it, and the allowed numbers of stages per rank."""

    torch: str
    stages: int = 1
    """Default number of stages per rank."""
    least: int = 1
    most: int = 1


_MANY = 1 << 16
SCHEDULES: Mapping[str, _Known] = {
    "gpipe": _Known(""),
    "1f1b": _Known(""),
    "interleaved1f1b": _Known("Interleaved1F1B", 2, 2, _MANY),
    "interleavedzerobubble": _Known("InterleavedZeroBubble", 1, 1, _MANY),
    "zbvzerobubble": _Known("ZBVZeroBubble", 2, 2, 2),
    "dualpipev": _Known("DualPipeV", 2, 2, 2),
}
"""Schedules by lower-case name."""


def action_table(
    schedule: str | ActionTable | Path, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> ActionTable:
    """The action table of a schedule.

    Args:
        schedule: A name in `SCHEDULES`, in any case; a table; or the path of a file for `ActionTable.parse`.
        ranks: Number of ranks along the pipeline axis.
        microbatches: Number of micro-batches of a step.
        stages_per_rank: Number of pipeline stages on each rank; None for the schedule's default.

    Raises:
        OptionError: the schedule is unknown, or does not allow this number of ranks, stages or micro-batches.
    """
    if isinstance(schedule, Path):
        schedule = _read(schedule)
    if isinstance(schedule, ActionTable):
        return _fitting(schedule, ranks, microbatches, stages_per_rank)
    known = SCHEDULES.get(str(schedule).lower())
    if known is None:
        raise OptionError("schedule", f"{schedule!r} is unknown", nearest(str(schedule), SCHEDULES))
    if microbatches < 1:
        raise OptionError("microbatches", f"is {microbatches}", "give the number of parts of a batch, 1 or more")
    stages = known.stages if stages_per_rank is None else stages_per_rank
    if not known.least <= stages <= known.most:
        allowed = str(known.least) if known.most == known.least else f"{known.least} or more"
        raise OptionError("stages_per_rank", f"is {stages}, and {schedule} has {allowed}", f"give {allowed}")
    if not known.torch:
        return ActionTable(
            tuple(_gpipe_or_1f1b(str(schedule).lower(), rank, ranks, microbatches) for rank in range(ranks))
        )
    try:
        cells = pipeline_order(known.torch, ranks, stages, microbatches)
    except ValueError as error:
        fix = "give another number of micro-batches, or another schedule"
        raise OptionError("microbatches", f"is {microbatches}: {error}", fix) from error
    return ActionTable(tuple(_merged([Action.parse(cell) for cell in row]) for row in cells))


def _gpipe_or_1f1b(name: str, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Build the row of a rank. torch runs these two by loops; its 1F1B table starts the last rank at micro-batch 1."""
    ahead = microbatches if name == "gpipe" else min(ranks - 1 - rank, microbatches)
    forwards = [Action(rank, ActionKind.FORWARD, number) for number in range(microbatches)]
    backwards = [Action(rank, ActionKind.BACKWARD, number) for number in range(microbatches)]
    steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *steady, *backwards[microbatches - ahead :])


def _merged(row: list[Action]) -> tuple[Action, ...]:
    """`row` with adjacent halves of a backward merged into one backward."""
    result: list[Action] = []
    for action in row:
        before = result[-1] if result else None
        if action.kind is ActionKind.BACKWARD_WEIGHT and before == replace(action, kind=ActionKind.BACKWARD_INPUT):
            result[-1] = replace(action, kind=ActionKind.BACKWARD)
        else:
            result.append(action)
    return tuple(result)


def _read(path: Path) -> ActionTable:
    try:
        return ActionTable.parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise OptionError("schedule", problem, "give the path of an action table, or a name") from error


def _fitting(table: ActionTable, ranks: int, microbatches: int, stages_per_rank: int | None) -> ActionTable:
    stages = table.stages if stages_per_rank is None else stages_per_rank * ranks
    for option, what, asked, found in (
        ("mesh", "ranks along its pipeline axis", ranks, len(table.rows)),
        ("microbatches", "micro-batches", microbatches, table.microbatches),
        ("stages_per_rank", "stages in total", stages, table.stages),
    ):
        if asked != found:
            problem = f"requires {asked} {what}, and the table has {found}"
            raise OptionError(option, problem, f"give {found}, or another table")
    if not table.trains:
        raise OptionError("schedule", "has no backward, and a train step needs it", "add each stage's, such as 0B0")
    return table
