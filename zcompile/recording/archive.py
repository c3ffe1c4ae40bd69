"""A recording as it is read: each file is compared with its checksum, and what is wrong is an error that names it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zcompile.errors import ReplayError
from zcompile.ir.operation import Phase
from zcompile.recording.recording import FORMAT, INDEX, rank_folder
from zcompile.recording.values import Tensor, digest_of

_AGAIN = "record the step again"


@dataclass(frozen=True)
class ArchivedRun:
    """A run as the index has it."""

    name: str
    phase: Phase
    program: str
    """The folder of its program."""
    raised: str
    """What it ended with, if it did not come to its end."""


class Archive:
    """The recording of one rank.

    Raises:
        ReplayError: it is not there, or its index is damaged or of other versions.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.home = rank_folder(folder, rank)
        if not (self.home / INDEX).exists():
            raise ReplayError(str(self.home / INDEX), "there is none", _other_ranks(folder))
        self.about = self._index()
        self._check_versions()

    def _index(self) -> dict[str, Any]:
        path = self.home / INDEX
        try:
            outer = json.loads(path.read_text())
            index: str = outer["index"]
            if digest_of(index.encode()) != outer["checksum"]:
                raise ReplayError(str(path), "was edited: it is not what its checksum is of", _AGAIN)
            found: dict[str, Any] = json.loads(index)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ReplayError(str(path), f"is no index of a recording: {error}", _AGAIN) from error
        return found

    def _check_versions(self) -> None:
        here = {"format": FORMAT, "zcompile": metadata.version("zcompile"), "torch": torch.__version__}
        for name, version in here.items():
            if (recorded := self.about.get(name)) != version:
                problem = f"was recorded with {name} {recorded}, and this is {version}"
                fix = f"replay it with {name} {recorded}: other versions compute other bits"
                raise ReplayError(str(self.home), problem, fix)

    @cached_property
    def runs(self) -> list[ArchivedRun]:
        """The runs, in order.

        Raises:
            ReplayError: there is none.
        """
        found = [ArchivedRun(**{**run, "phase": Phase(run["phase"])}) for run in self.about["runs"]]
        if not found:
            fix = "record a call of the model: `record=` waits for the first one that trains"
            raise ReplayError(str(self.home / INDEX), "has no run: nothing has run while it was made", fix)
        return found

    @property
    def device(self) -> torch.device:
        """The device that this process replays on: of the recorded kind.

        Raises:
            ReplayError: this machine has none.
        """
        recorded = torch.device(self.about["device"])
        if recorded.type == "cpu":
            return recorded
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != recorded.type:
            problem = f"was recorded on {self.about['processor']} ({recorded}), and there is none here"
            raise ReplayError(str(self.home), problem, "replay it on a machine with one")
        return torch.device(recorded.type, torch.accelerator.current_device_index())

    def text(self, name: str) -> str:
        """A text of the recording.

        Raises:
            ReplayError: it is missing, truncated or edited.
        """
        path = self.home / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ReplayError(str(path), f"cannot be read: {error.strerror}", _AGAIN) from error
        if digest_of(content) != self.about["files"].get(name):
            problem = f"was truncated or edited: its {len(content)} bytes are not what was recorded"
            raise ReplayError(str(path), problem, _AGAIN)
        return content.decode()

    def calls(self, run: ArchivedRun) -> dict[str, Any]:
        """What was recorded of a run: states of random generators before it, and its calls."""
        text = self.text(f"{run.name}.json")
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ReplayError(str(self.home / f"{run.name}.json"), f"is no record of a run: {error}", _AGAIN) from error
        return found

    def tensor(self, noted: Tensor) -> torch.Tensor:
        """A tensor whose bytes were kept.

        Raises:
            ReplayError: they are missing, or not those that were recorded.
        """
        path = self.home / "values" / f"{noted.digest}.bin"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ReplayError(str(path), f"cannot be read: {error.strerror}", _AGAIN) from error
        if digest_of(content) != noted.digest:
            problem = f"was truncated or edited: its {len(content)} bytes are not what was recorded"
            raise ReplayError(str(path), problem, _AGAIN)
        device = torch.device(noted.device)
        return noted.made(content, device if device.type == "cpu" else self.device)

    def described(self) -> str:
        """What it is of, in a line."""
        about, runs = self.about, len(self.about["runs"])
        return (
            f"rank {about['rank']}: {runs} run{'s' * (runs != 1)}, {about['backend']} on {about['device']} "
            f"({about['processor']}), {about['numerics']['threads']} threads, torch {about['torch']}"
        )


def ranks_of(folder: Path) -> list[int]:
    """The ranks that a folder has recordings of."""
    found = folder.glob(f"rank_*/{INDEX}")
    return sorted(int(path.parent.name.removeprefix("rank_")) for path in found if path.parent.name[5:].isdigit())


def _other_ranks(folder: Path) -> str:
    ranks = ranks_of(folder)
    if not ranks:
        return "give the folder of zcompile.compile(..., record=FOLDER) or compiled.record(FOLDER)"
    shown = ", ".join(map(str, ranks[:12])) + (", ..." if len(ranks) > 12 else "")
    return f"there are recordings of ranks {shown}"
