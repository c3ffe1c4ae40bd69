"""Checkpoints on disk: complete or absent, and every file with its digest.

    NAME/            a complete checkpoint: what torch.distributed.checkpoint wrote, and zcompile.json, which was last
    .NAME.new/       one that is being written
    .NAME.old/       the previous one, while the new one takes its place

Wherever a save is killed, one complete checkpoint stays: at NAME or, between the two renames, still at .NAME.new.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from zcompile._torch import local_tensor, tree_map_only, with_local
from zcompile.errors import StateError

MANIFEST = "zcompile.json"
FORMAT = 1


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies, and its two siblings of the moments of a save."""

    folder: Path

    @property
    def new(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.new")

    @property
    def old(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.old")

    def found(self) -> Path:
        """Where to read: elsewhere than at `folder` only if a save was killed between its two renames."""
        places = [self.folder] if self.folder.exists() else [self.new, self.old]
        return next((place for place in places if _is_complete(place)), self.folder)

    def prepare(self) -> None:
        """Make an empty folder to write into; what killed saves left goes, the last complete checkpoint stays.

        Raises:
            StateError: `folder` holds something else, which a save would delete.
        """
        last = self.found()
        if last != self.folder:
            os.rename(last, self.folder)
        elif self.folder.exists() and not _is_complete(self.folder) and any(self.folder.iterdir()):
            found = "holds other things than a checkpoint of zcompile, and saving would delete them"
            raise StateError(str(self.folder), found, "give a folder that is empty or does not exist")
        for left in (self.new, self.old):
            if left.exists():
                shutil.rmtree(left)
        self.new.mkdir(parents=True)

    def commit(self) -> None:
        """Let the new checkpoint take the place of the previous one."""
        replaced = self.folder.exists()
        if replaced:
            os.rename(self.folder, self.old)
        os.rename(self.new, self.folder)
        _sync(self.folder.parent)
        if replaced:
            shutil.rmtree(self.old)


@dataclass(frozen=True)
class _Written(WriteResult):
    """One tensor in a file, with the digest of the whole file as its rank wrote it."""

    digest: str


class Writer(FileSystemWriter):
    """Writes beside the place; when all ranks have written, the first one completes the checkpoint."""

    def __init__(self, place: Place, about: Mapping[str, Any]) -> None:
        super().__init__(place.new)
        self.place, self.about = place, about

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state to CPU memory, for a save that goes on while training changes it."""
        staged: dict[str, Any] = tree_map_only(torch.Tensor, _staged, state_dict)
        return staged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        digests = {name: _digest(self.place.new / name) for name in {w.storage_data.relative_path for w in written}}
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(
            [_Written(w.index, w.size_in_bytes, w.storage_data, digests[w.storage_data.relative_path]) for w in written]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        new = self.place.new
        digests = {w.storage_data.relative_path: w.digest for ws in results for w in ws if isinstance(w, _Written)}
        digests[".metadata"] = _digest(new / ".metadata")
        for name in digests:
            if not (new / name).exists():
                fix = "save to a file system that all ranks share"
                raise StateError(str(new / name), "was written by its rank, but the first rank does not see it", fix)
        files = {name: {"bytes": (new / name).stat().st_size, "sha256": digests[name]} for name in sorted(digests)}
        content = {"format": FORMAT, **self.about, "files": files}
        write_file(new / MANIFEST, json.dumps({**content, "sha256": _content_digest(content)}, indent=1).encode())
        self.place.commit()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `zcompile.json` says of a checkpoint: world, stage, and the size and digest of every file.

    Raises:
        StateError: there is no complete checkpoint, or the file is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise StateError(str(folder), *_absence(folder))
    try:
        content = json.loads(path.read_bytes())
        intact = content.pop("sha256") == _content_digest(content)
    except (ValueError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise StateError(str(path), "is damaged", "load another checkpoint")
    if content["format"] != FORMAT:
        found = f"is of format {content['format']}, this zcompile reads {FORMAT}"
        raise StateError(str(path), found, "load it with the zcompile that wrote it")
    return dict(content)


def check_files(folder: Path, manifest: Mapping[str, Any], rank: int, size: int) -> None:
    """Compare this rank's share of the files with their digests.

    Raises:
        StateError: a file is missing, cut short, or other than it was written.
    """
    for name in sorted(manifest["files"])[rank::size]:
        path, wanted = folder / name, manifest["files"][name]
        if not path.is_file():
            raise StateError(str(path), "is missing", "bring the file back, or load another checkpoint")
        if (length := path.stat().st_size) != wanted["bytes"]:
            found = f"has {length} bytes, {wanted['bytes']} were written"
            raise StateError(str(path), found, "copy the checkpoint again, or load another one")
        if _digest(path) != wanted["sha256"]:
            found = "is damaged: its digest is not that of the file that was written"
            raise StateError(str(path), found, "copy the checkpoint again, or load another one")


@contextmanager
def typed(subject: str) -> Iterator[None]:
    """A StateError in place of what torch.distributed.checkpoint raises on all ranks when one fails."""
    fix = "mend that and try again; what was there before is as it was"
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, StateError):
            raise StateError(cause.subject, cause.found, cause.fix) from error
        raise StateError(subject, f"rank {rank} failed: {type(cause).__name__}: {cause}", fix) from error
    except (RuntimeError, OSError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(subject, f"a rank failed or is gone: {error}", fix) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or absent, also after a loss of power."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    put_in_place(beside, path)


def put_in_place(beside: Path, path: Path) -> None:
    """Rename a file that was written beside `path` to it, once its bytes are on the disk."""
    _sync(beside)
    os.replace(beside, path)
    _sync(path.parent)


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return with_local(tensor, local_tensor(tensor).to("cpu", copy=True))
    return tensor.detach().to("cpu", copy=True)


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _absence(folder: Path) -> tuple[str, str]:
    """What there is in place of a checkpoint, and the fix."""
    if not folder.exists():
        return "does not exist", "give the folder of an earlier compiled.save_checkpoint"
    if (folder / ".metadata").exists():
        fix = "load it with torch.distributed.checkpoint.load, into compiled.state_dict()"
        return "was not written by compiled.save_checkpoint, but by torch.distributed.checkpoint alone", fix
    return f"is no checkpoint, or a partial one: it has no {MANIFEST}", "give the folder of a save that came to its end"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Have the system write a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
