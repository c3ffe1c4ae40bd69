"""What a dump of all ranks, and the recordings beside it, have to hold."""

from __future__ import annotations

from pathlib import Path

from zcompile.proof.dumps import prove_dump, rank_folders
from zcompile.proof.ranks import check_folders
from zcompile.recording.archive import Archive
from zcompile.tools.replay import Replay, Verdict


def assert_proven(dump: Path) -> None:
    """Each rank computes what was traced, and their communications fit together."""
    for rank, folder in rank_folders(dump).items():
        (verdict,) = prove_dump(folder)
        assert verdict.error is None, f"rank {rank}: {verdict.error}"
    check_folders(rank_folders(dump))


def assert_replayed(folder: Path, ranks: int) -> None:
    """Every recorded value comes about again, bit for bit."""
    for rank in range(ranks):
        lines = list(Replay(Archive(folder, rank)).lines())
        assert {value.verdict for line in lines for value in line.values} <= {Verdict.GIVEN, Verdict.EQUAL}


def assert_proven_and_replayed(folder: Path, ranks: int) -> None:
    """Of a folder that has recordings, and the dump in it."""
    assert_proven(folder / "dump")
    assert_replayed(folder, ranks)
