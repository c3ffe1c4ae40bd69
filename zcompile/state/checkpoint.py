"""Atomic checkpoints on disk, with a digest of every file.

    NAME/                        the folder; it may also hold other files
        zcompile.json            the manifest: size and digest of every file
        .metadata                where torch.distributed.checkpoint finds each tensor
        __RANK_TOKEN_0.distcp    the tensors of a rank; the token is unique to a save
        .zcompile-TOKEN/         during a save: the next zcompile.json and .metadata
    .NAME.zcompile-TOKEN/        the same folder during a save, if NAME does not exist yet

A save adds its tensor files to those of the previous checkpoint. It ends with three renames: a manifest of both
checkpoints, then `.metadata`, which decides between them, then a manifest of the new one only. So there is a complete
checkpoint whenever a save is killed, also for torch's own readers. Files that no save wrote are never touched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from zcompile.errors import StateError
from zcompile.runtime.tensors.explained import laid_out_like
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.pytree import tree_map_only

MANIFEST = "zcompile.json"
METADATA = ".metadata"
BOTH = "both.json"
"""The manifest of both the new and the previous checkpoint, before it is renamed."""
FORMAT = 1

Manifest = dict[str, Any]


@dataclass(frozen=True)
class CheckpointFolder:
    """The target of one save; the first rank makes it, by `CheckpointFolder.begin`.

    Attributes:
        folder: Folder of the checkpoint, with symbolic links resolved.
        token: Part of the names of this save's files, different for every save.
        fresh: True if `folder` does not exist, so that it appears with the complete checkpoint.
    """

    folder: Path
    token: str
    fresh: bool

    @classmethod
    def begin(cls, folder: Path) -> CheckpointFolder:
        """Prepare a save: remove files of failed saves, and keep the last complete checkpoint.

        Raises:
            StateError: `folder` has files but no checkpoint, or the disk is full.
        """
        clear(folder)
        if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
            problem = "has files, but no checkpoint of zcompile"
            raise StateError(str(folder), problem, "give a folder that is empty, does not exist or has a checkpoint")
        place = cls(folder, token(), not folder.exists())
        with room(folder):
            place.work.mkdir(parents=True)
        return place

    @property
    def at(self) -> Path:
        """The folder that tensor files are written to."""
        return self.folder.with_name(f".{self.folder.name}.zcompile-{self.token}") if self.fresh else self.folder

    @property
    def work(self) -> Path:
        """The folder for files that later replace others by a rename."""
        return self.at / f".zcompile-{self.token}"

    def commit(self, manifest: Manifest) -> None:
        """Replace the previous checkpoint by the new one; all tensor files must have been written."""
        previous = _known(self.folder)[:1]
        _write(self.work / BOTH, _signed({**manifest, "previous": previous[0]} if previous else manifest))
        _write(self.work / MANIFEST, _signed(manifest))
        for name, final in ((BOTH, MANIFEST), (METADATA, METADATA), (MANIFEST, MANIFEST)):
            os.replace(self.work / name, self.at / final)
            sync(self.at)
        self.work.rmdir()
        if self.fresh:
            os.rename(self.at, self.folder)
            sync(self.folder.parent)
        with suppress(OSError):  # the checkpoint is complete; the next save removes what remains
            for old in previous:
                _remove_files(self.folder, old["files"].keys() - manifest["files"].keys())
            clear(self.folder)


def clear(folder: Path) -> None:
    """Remove the files of saves to `folder` that failed or were killed, and no other files."""
    for left in siblings(folder, rf"\.{re.escape(folder.name)}\.zcompile-{TOKEN}"):
        _clear_inside(left, set())
        _remove_files(left, (MANIFEST, METADATA))
        _remove(left)
    if folder.is_dir():
        known = _known(folder)
        # If the manifest is damaged or lost, any file may belong to the checkpoint, and nothing is removed.
        if known or not any((folder / name).exists() for name in (MANIFEST, METADATA)):
            _clear_inside(folder, {name for manifest in known for name in manifest["files"]})


def _clear_inside(folder: Path, kept: set[str]) -> None:
    for path in list(folder.iterdir()):
        if re.fullmatch(rf"__\d+_{TOKEN}_\d+\.distcp", path.name) and path.name not in kept:
            path.unlink(missing_ok=True)
        elif re.fullmatch(rf"\.zcompile-{TOKEN}", path.name):
            _remove_files(path, (BOTH, MANIFEST, METADATA, f"{METADATA}.tmp"))
            _remove(path)


def _remove_files(folder: Path, names: Iterable[str]) -> None:
    for name in filter(_is_plain, names):
        (folder / name).unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a folder of zcompile if it is empty."""
    with suppress(OSError):
        folder.rmdir()


@dataclass(frozen=True)
class _Written(WriteResult):
    """The result of writing one tensor, with the digest of the whole file."""

    digest: str


class Writer(FileSystemWriter):
    """Writes files to `place`; when all ranks have written, the first rank commits the checkpoint."""

    def __init__(self, place: CheckpointFolder, about: Mapping[str, Any]) -> None:
        super().__init__(place.at)
        self.place, self.about = place, about

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state to CPU memory, for a save that continues while training changes the state."""
        staged: dict[str, Any] = tree_map_only(torch.Tensor, _staged, state_dict)
        return staged

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # FileSystemWriter's warns about overwriting a checkpoint, which does not happen here

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        named = [replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{self.place.token}_") for plan in plans]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, named, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        with room(self.place.folder):
            self.place.at.mkdir(parents=True, exist_ok=True)  # if ranks share no file system, finish() raises
            written = super().write_data(plan, planner).wait()
        digests = {name: _digest(self.place.at / name) for name in {w.storage_data.relative_path for w in written}}
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(
            [_Written(w.index, w.size_in_bytes, w.storage_data, digests[w.storage_data.relative_path]) for w in written]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        place = self.place
        digests = {w.storage_data.relative_path: w.digest for ws in results for w in ws if isinstance(w, _Written)}
        for name in digests:
            if not (place.at / name).exists():
                fix = "save to a file system that all ranks share"
                raise StateError(
                    str(place.at / name), "was written by its rank, but the first rank does not see it", fix
                )
        with room(place.folder):
            self.path = place.work  # the base class writes `.metadata` here; commit() renames it
            super().finish(metadata, results)
            paths = {METADATA: place.work / METADATA, **{name: place.at / name for name in digests}}
            digests[METADATA] = _digest(paths[METADATA])
            files = {n: {"bytes": paths[n].stat().st_size, "sha256": digests[n]} for n in sorted(digests)}
            place.commit({"format": FORMAT, **self.about, "files": files})


def read_manifest(folder: Path) -> Manifest:
    """Read `zcompile.json`: world and stage of a checkpoint, and the size and digest of every file.

    Raises:
        StateError: there is no complete checkpoint, or the file is damaged or names files outside of the folder.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise StateError(str(folder), *_absence(folder))
    manifests = _known(folder)
    if not manifests:
        raise StateError(str(path), "is damaged", "load another checkpoint")
    manifest = manifests[0]
    if manifest.get("format") != FORMAT:
        problem = f"has format {manifest.get('format')}, and this zcompile reads {FORMAT}"
        raise StateError(str(path), problem, "load it with the zcompile that wrote it")
    for name in manifest["files"]:
        if not _is_plain(name):
            problem = f"names {name!r}, which is not in the folder of the checkpoint"
            raise StateError(str(path), problem, "load an unmodified checkpoint of compiled.save_checkpoint")
    return manifest


def _known(folder: Path) -> list[Manifest]:
    """The manifest of the checkpoint in `folder`; none if it is damaged.

    While one checkpoint replaces another, the manifests of both, unless `.metadata` decides between them.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content.pop("sha256") != _content_digest(content):
            return []
        both = [content, previous] if (previous := content.pop("previous", None)) else [content]
        if not all(_is_manifest(one) for one in both):
            return []
        held = _digest(folder / METADATA) if len(both) > 1 else ""
        return [one for one in both if one["files"][METADATA]["sha256"] == held] or both
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_manifest(content: Manifest) -> bool:
    """True if it has the size and the digest of every file, including `.metadata`."""
    files = content["files"]
    about = [(one["bytes"], one["sha256"]) for one in files.values()]
    return METADATA in files and all(isinstance(size, int) and isinstance(digest, str) for size, digest in about)


def _is_plain(name: str) -> bool:
    """True for a file name without directories."""
    return name == os.path.basename(name) and name not in ("", os.curdir, os.pardir)


def check_files(folder: Path, manifest: Mapping[str, Any], rank: int, size: int) -> None:
    """Check the sizes and digests of this rank's share of the files. Raises StateError for a difference."""
    for name in sorted(manifest["files"])[rank::size]:
        path, wanted = folder / name, manifest["files"][name]
        if not path.is_file():
            raise StateError(str(path), "is missing", "restore the file, or load another checkpoint")
        if (length := path.stat().st_size) != wanted["bytes"]:
            problem = f"has {length} bytes, but {wanted['bytes']} were written"
            raise StateError(str(path), problem, "copy the checkpoint again, or load another one")
        if _digest(path) != wanted["sha256"]:
            problem = "is damaged: its digest differs from that of the file that was written"
            raise StateError(str(path), problem, "copy the checkpoint again, or load another one")


@contextmanager
def typed(subject: str) -> Iterator[None]:
    """Convert errors of torch.distributed.checkpoint, which it raises on all ranks if one fails, to StateError."""
    fix = "fix that and try again; the previous state is unchanged"
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, StateError):
            raise StateError(cause.subject, cause.problem, cause.fix) from error
        raise StateError(subject, f"rank {rank} failed: {type(cause).__name__}: {cause}", fix) from error
    except (RuntimeError, OSError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(subject, f"a rank failed or is gone: {error}", fix) from error


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return laid_out_like(tensor, local_tensor(tensor).to("cpu", copy=True))
    return tensor.detach().to("cpu", copy=True)


def _absence(folder: Path) -> tuple[str, str]:
    """Why there is no checkpoint in `folder`, and the fix."""
    if not folder.exists():
        return "does not exist", "give a folder written by compiled.save_checkpoint"
    if (folder / METADATA).exists():
        fix = "load it with torch.distributed.checkpoint.load, into compiled.state_dict()"
        return "was not written by compiled.save_checkpoint, but by torch.distributed.checkpoint", fix
    return f"is not a complete checkpoint: it has no {MANIFEST}", "give the folder of a save that finished"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    """Write a file, and wait until it is on the disk."""
    path.write_text(text)
    sync(path)


def _signed(content: Manifest) -> str:
    return json.dumps({**content, "sha256": _content_digest(content)}, indent=1)


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -- whole files ------------------------------------------------------------------------------------------------------


TOKEN = "[0-9a-f]{16}"
"""A regular expression for the results of `token`."""


def token() -> str:
    """A random part of a file name, which no other process chooses."""
    return secrets.token_hex(8)


def real(path: str | os.PathLike[str]) -> Path:
    """Resolve symbolic links, even if the target does not exist, so that writing replaces the target, not the link."""
    return Path(os.path.realpath(path))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Replace `path` atomically by the file that the body writes under the name given to it.

    The rename happens when the body ends, and `path` is complete even after a power failure. If the body fails, the new
    file is removed. Files left by killed processes are removed, too.

    Raises:
        StateError: the disk is full.
    """
    path = real(path)
    for left in siblings(path, f".{re.escape(path.name)}.{TOKEN}.new"):
        left.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{token()}.new")
    try:
        with room(path.parent):
            yield beside
            sync(beside)
            os.replace(beside, path)
            sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def siblings(path: Path, pattern: str) -> list[Path]:
    """Paths in the folder of `path` with names that match `pattern`; none if the folder cannot be listed."""
    with suppress(FileNotFoundError, PermissionError):
        return [match for match in path.parent.iterdir() if re.fullmatch(pattern, match.name)]
    return []


@contextmanager
def room(folder: Path) -> Iterator[None]:
    """Convert errors of torch and safetensors on a full disk to StateError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StateError) or not _is_full(error):
            raise
        problem = f"the disk is full, or this user's share of it ([Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)})"
        raise StateError(str(folder), problem, "free space there, or save to another disk") from error


def _is_full(error: BaseException | None) -> bool:
    """True if an error in the chain is ENOSPC or EDQUOT: torch's zip writer raises a RuntimeError on top of it."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        if re.search(rf"os error ({errno.ENOSPC}|{errno.EDQUOT})\b", str(error)):  # the wording of Rust, by safetensors
            return True
        error = error.__cause__ or error.__context__
    return False


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
