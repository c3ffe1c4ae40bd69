"""The output of `zcompile replay`: a row for each value of each line, a summary, and the origin of NaN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from zcompile.errors import ReplayError
from zcompile.ir.tensor_type import TensorType
from zcompile.recording.archive import Archive, ranks_of
from zcompile.recording.values import norm_of
from zcompile.tools.replay import Replay, ReplayedLine, Value, Verdict, first_recorded
from zcompile.tools.replay_origins import KINDS, NonFinite

_NAME, _TYPE = 44, 22
"""Widths of the columns of names and types."""
_LAST = ("~", 0, 0)
"""Sorts after any line of any run."""


class ReplayReport:
    """The text of a replay, produced while it runs."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.verdicts: Counter[Verdict] = Counter()
        self.first_differing: ReplayedLine | None = None
        self.last: ReplayedLine | None = None
        self.lines = 0

    @property
    def is_sound(self) -> bool:
        """True if every recomputed value has the recorded bits, and no gathered parameter is stale."""
        return not (self.verdicts[Verdict.DIFFERS] or self.verdicts[Verdict.STALE])

    def text(self, until: str, *, brief: bool = False) -> Iterator[str]:
        """Run the replay, and report each value; `brief`: only values that differ."""
        yield self.replay.archive.described()
        run = ""
        for line in self.replay.lines(until):
            self._take(line)
            shown = [one for one in line.values if not brief or one.verdict in (Verdict.DIFFERS, Verdict.STALE)]
            if line.run.name != run and (shown or not brief):
                run = line.run.name
                yield f"\n{run}, the text of {line.run.program}/{line.run.phase}.py"
                yield f"{'line':>5}  {'value':{_NAME}} {'type':{_TYPE}} {'norm':>10} {'min':>10} {'max':>10}  is"
            yield from (row(line.number, value) for value in shown)
        yield ""
        yield from self.summary()

    def _take(self, line: ReplayedLine) -> None:
        self.lines, self.last = self.lines + 1, line
        self.verdicts.update(value.verdict for value in line.values)
        if self.first_differing is None and not self.is_sound:
            self.first_differing = line

    def summary(self) -> Iterator[str]:
        """Summarize the replay."""
        given, stale = self.verdicts[Verdict.GIVEN], self.verdicts[Verdict.STALE]
        differ, strides = self.verdicts[Verdict.DIFFERS], self.verdicts[Verdict.STRIDES]
        computed = self.verdicts.total() - given - stale
        equal = "all equal, bit for bit" if not differ else f"{differ} DIFFER from the recording"
        odd = f" ({strides} in other strides)" if strides else ""
        yield f"{self.lines} lines: {computed} values recomputed, {equal}{odd}; {given} taken from the recording."
        if stale:
            yield f"{stale} gathered parameters differ from this rank's shards: a copy was not refreshed."
        if (line := self.first_differing) is not None:
            yield f"The first difference is in {line.run.name}, line {line.number}."
            yield from (f"{note} This may change the last bits." for note in sorted(self.replay.notes))
        if self.replay.failure:
            yield self.replay.failure
        for kind in KINDS:
            if (finding := self.replay.findings.get(kind)) is not None:
                yield from finding_lines(finding)
        if not self.replay.findings:
            yield "No NaN and no infinity in any value."


def row(number: int, value: Value) -> str:
    """Format a value as a row."""
    kind = str(TensorType.of(value.tensor))
    figures = (f"{one:10.4g}" if math.isfinite(one) else f"{'-':>10}" for one in norm_of(value.tensor))
    bad = [f"{count} {KINDS[kind]}" for kind, count in (("nan", value.noted.nan), ("inf", value.noted.inf)) if count]
    text = f"{number:5}  {value.name:{_NAME}} {kind:{_TYPE}} {' '.join(figures)}  {value.verdict}"
    return f"{text}  {', '.join(bad)}".rstrip()


def finding_lines(finding: NonFinite) -> Iterator[str]:
    """Format a finding as lines."""
    yield f"\nThe first {KINDS[finding.kind]}: {finding.count} in {finding.name}, {finding.place.line}:"
    yield f"    {finding.place.code}"
    for reason in finding.reasons:
        yield f"  {reason}"


def overview(folder: Path) -> Iterator[str]:
    """List the recorded ranks, with the first NaN and the first infinity of each, without running anything.

    Raises:
        ReplayError: there is no recording, or it is damaged.
    """
    ranks = ranks_of(folder)
    if not ranks:
        fix = "give the FOLDER of zcompile.compile(..., record=FOLDER) or compiled.record(FOLDER)"
        raise ReplayError(str(folder), "has no recording of any rank", fix)
    earliest: dict[str, tuple[str, int, int]] = {}
    for rank in ranks:
        archive = Archive(folder, rank)
        yield archive.described()
        for kind, name in KINDS.items():
            if (met := first_recorded(archive, kind)) is not None:
                earliest[name] = min(earliest.get(name, _LAST), (met.run.name, met.line, rank))
                yield f"    first {name}: {met.count} in {met.name}, {met.run.name}, line {met.line}: {met.code}"
    for name, (run, number, rank) in earliest.items():
        yield f"The earliest {name} is on rank {rank}: {run}, line {number}."
    yield "`--rank R` runs the programs of a rank again, and finds the operation."


def save(line: ReplayedLine | None, path: Path) -> None:
    """Save the values of a line by name, for `torch.load`."""
    torch.save({value.name: value.tensor.cpu() for value in line.values} if line else {}, path)
