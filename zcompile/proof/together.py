"""What a folder of dumps proves beyond each of them: that ranks fit together, and that no part of a step is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zcompile.ir.spelling import counted
from zcompile.proof.dumps import ProofVerdict
from zcompile.proof.parts import check_parts, pipeline_of
from zcompile.proof.ranks import check_folders, lacking_ranks

_FIX = "give the folder of dump(folder, all_ranks=True)"


class Together(NamedTuple):
    """What is said of all that was read, and whether something was not that belongs to it."""

    said: list[str]
    unread: bool


def prove_together(ranks: Mapping[int, Path], verdicts: Mapping[int, Sequence[ProofVerdict]]) -> Together:
    """See that the programs of all ranks fit together.

    Args:
        ranks: The dumps of all ranks by their numbers; none where it is one dump alone.
        verdicts: What came of the programs of each, the one dump as rank 0.

    Raises:
        ProofError: they do not.
    """
    parts: dict[str, dict[int, ProofVerdict]] = {}
    for rank, found in verdicts.items():
        for verdict in found:
            parts.setdefault(verdict.program, {})[rank] = verdict
    if not ranks:
        alone = [v for v in verdicts[0] if v.part is not None and pipeline_of(v.part[0]).size > 1]
        problem = "is the step of one rank of a pipeline, and those of the others were not read"
        return Together([f"not proven: {one.program} {problem}: {_FIX}" for one in alone], bool(alone))
    if lacking := lacking_ranks(ranks):
        named = ", ".join(map(str, lacking[:8])) + (" and others" if len(lacking) > 8 else "")
        return Together([f"not proven: {counted(len(lacking), 'rank')} of the mesh not read, {named}: {_FIX}"], True)
    check_folders(ranks)
    said = [f"{len(ranks)} ranks: their communications fit together"]
    for program, by_rank in parts.items():
        pieces = {rank: verdict.part for rank, verdict in by_rank.items() if verdict.part is not None}
        if len(pieces) == len(ranks):
            check_parts(pieces)
            said.append(f"{program}: the parts of all ranks are the whole step")
    return Together(said, unread=False)
