"""Checkpoints on disk: complete or absent, and every file with its digest.

    NAME/                        a folder, in which others may keep files too
        zcompile.json            the manifest: size and digest of every file
        .metadata                where torch.distributed.checkpoint finds each tensor
        __RANK_TOKEN_0.distcp    the tensors of a rank; each save has a token of its own
        .zcompile-TOKEN/         of a save under way: the next zcompile.json and .metadata
    .NAME.zcompile-TOKEN/        such a folder, while NAME is not there

A save writes its tensors beside those of the previous one. It ends with three renames: a manifest that knows both, then
`.metadata`, which decides which of them is the checkpoint, then a manifest of the new one alone. So one complete
checkpoint is there wherever a save is killed, for torch's own readers too, and no file is touched that no save wrote.
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
"""The manifest that knows the new checkpoint and the previous one."""
FORMAT = 1

Manifest = dict[str, Any]


@dataclass(frozen=True)
class CheckpointFolder:
    """Where one save writes; the first rank makes it, by `CheckpointFolder.begin`.

    Attributes:
        folder: The checkpoint's, links resolved.
        token: What tells the files of this save from all others.
        fresh: Whether `folder` is to appear with the checkpoint, because it is not there yet.
    """

    folder: Path
    token: str
    fresh: bool

    @classmethod
    def begin(cls, folder: Path) -> CheckpointFolder:
        """Make room for a save: what failed saves left goes, the last complete checkpoint stays.

        Raises:
            StateError: `folder` holds other things and no checkpoint, or the disk is full.
        """
        clear(folder)
        if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
            problem = "holds other things than a checkpoint of zcompile"
            raise StateError(str(folder), problem, "give a folder that is empty, does not exist or holds a checkpoint")
        place = cls(folder, token(), not folder.exists())
        with room(folder):
            place.work.mkdir(parents=True)
        return place

    @property
    def at(self) -> Path:
        """Where the files of the checkpoint are written."""
        return self.folder.with_name(f".{self.folder.name}.zcompile-{self.token}") if self.fresh else self.folder

    @property
    def work(self) -> Path:
        """Where those are written that take the place of others."""
        return self.at / f".zcompile-{self.token}"

    def commit(self, manifest: Manifest) -> None:
        """Let the new checkpoint take the place of the previous one, once all its files are there."""
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
        with suppress(OSError):  # it is complete; what cannot be removed now goes with the next save
            for old in previous:
                _remove_files(self.folder, old["files"].keys() - manifest["files"].keys())
            clear(self.folder)


def clear(folder: Path) -> None:
    """Remove what saves to `folder` left that failed or were killed, and nothing that no save wrote."""
    for left in siblings(folder, rf"\.{re.escape(folder.name)}\.zcompile-{TOKEN}"):
        _clear_inside(left, set())
        _remove_files(left, (MANIFEST, METADATA))
        _remove(left)
    if folder.is_dir():
        known = _known(folder)
        # Without either any file may be a checkpoint's, of which the manifest is damaged or lost.
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
    """Remove a folder of ours, unless somebody has put a file there."""
    with suppress(OSError):
        folder.rmdir()


@dataclass(frozen=True)
class _Written(WriteResult):
    """One tensor in a file, with the digest of the whole file as its rank wrote it."""

    digest: str


class Writer(FileSystemWriter):
    """Writes to the place; when all ranks have written, the first one completes the checkpoint."""

    def __init__(self, place: CheckpointFolder, about: Mapping[str, Any]) -> None:
        super().__init__(place.at)
        self.place, self.about = place, about

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state to CPU memory, for a save that goes on while training changes it."""
        staged: dict[str, Any] = tree_map_only(torch.Tensor, _staged, state_dict)
        return staged

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # torch's own warns that there is a checkpoint, which it would write into

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        named = [replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{self.place.token}_") for plan in plans]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, named, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        with room(self.place.folder):
            self.place.at.mkdir(parents=True, exist_ok=True)  # where ranks share no file system, finish() says so
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
            self.path = place.work  # `.metadata` comes to its place when the checkpoint is complete
            super().finish(metadata, results)
            paths = {METADATA: place.work / METADATA, **{name: place.at / name for name in digests}}
            digests[METADATA] = _digest(paths[METADATA])
            files = {n: {"bytes": paths[n].stat().st_size, "sha256": digests[n]} for n in sorted(digests)}
            place.commit({"format": FORMAT, **self.about, "files": files})


def read_manifest(folder: Path) -> Manifest:
    """What `zcompile.json` says of a checkpoint: world, stage, and the size and digest of every file.

    Raises:
        StateError: there is no complete checkpoint, or the file is damaged or names files that are elsewhere.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise StateError(str(folder), *_absence(folder))
    manifests = _known(folder)
    if not manifests:
        raise StateError(str(path), "is damaged", "load another checkpoint")
    manifest = manifests[0]
    if manifest.get("format") != FORMAT:
        problem = f"is of format {manifest.get('format')}, this zcompile reads {FORMAT}"
        raise StateError(str(path), problem, "load it with the zcompile that wrote it")
    for name in manifest["files"]:
        if not _is_plain(name):
            problem = f"names {name!r}, which does not lie in the folder of the checkpoint"
            raise StateError(str(path), problem, "load a checkpoint as compiled.save_checkpoint wrote it")
    return manifest


def _known(folder: Path) -> list[Manifest]:
    """The manifest of the checkpoint in `folder`; of both, if there are two and it is not known which; none if damaged.

    There are two while one takes the other's place.
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
    """Whether it says size and digest of every file, `.metadata` among them."""
    files = content["files"]
    about = [(one["bytes"], one["sha256"]) for one in files.values()]
    return METADATA in files and all(isinstance(size, int) and isinstance(digest, str) for size, digest in about)


def _is_plain(name: str) -> bool:
    """True for the name of a file right in the folder."""
    return name == os.path.basename(name) and name not in ("", os.curdir, os.pardir)


def check_files(folder: Path, manifest: Mapping[str, Any], rank: int, size: int) -> None:
    """Compare this rank's share of the files with their digests; raise StateError for one that differs."""
    for name in sorted(manifest["files"])[rank::size]:
        path, wanted = folder / name, manifest["files"][name]
        if not path.is_file():
            raise StateError(str(path), "is missing", "bring the file back, or load another checkpoint")
        if (length := path.stat().st_size) != wanted["bytes"]:
            problem = f"has {length} bytes, {wanted['bytes']} were written"
            raise StateError(str(path), problem, "copy the checkpoint again, or load another one")
        if _digest(path) != wanted["sha256"]:
            problem = "is damaged: its digest is not that of the file that was written"
            raise StateError(str(path), problem, "copy the checkpoint again, or load another one")


@contextmanager
def typed(subject: str) -> Iterator[None]:
    """A StateError in place of what torch.distributed.checkpoint raises on all ranks when one fails."""
    fix = "fix that and try again; what was there before is as it was"
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
    """What there is in place of a checkpoint, and the fix."""
    if not folder.exists():
        return "does not exist", "give the folder of an earlier compiled.save_checkpoint"
    if (folder / METADATA).exists():
        fix = "load it with torch.distributed.checkpoint.load, into compiled.state_dict()"
        return "was not written by compiled.save_checkpoint, but by torch.distributed.checkpoint alone", fix
    return f"is no checkpoint, or a partial one: it has no {MANIFEST}", "give the folder of a save that came to its end"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    """Write a file whose bytes are on the disk when this ends."""
    path.write_text(text)
    sync(path)


def _signed(content: Manifest) -> str:
    return json.dumps({**content, "sha256": _content_digest(content)}, indent=1)


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -- whole files ------------------------------------------------------------------------------------------------------


TOKEN = "[0-9a-f]{16}"
"""What `token` gives, as a regular expression."""


def token() -> str:
    """A part of a file name that nobody else has chosen."""
    return secrets.token_hex(8)


def real(path: str | os.PathLike[str]) -> Path:
    """Where a path leads, also if nothing is there: what is written takes the place of a link's target, not its own."""
    return Path(os.path.realpath(path))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The name to write a file under that is to take the place of `path`: it does once the body has ended.

    Also after a loss of power `path` is whole. If the body fails, nothing is left; what killed processes left goes.

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
    """What lies beside `path` under names like `pattern`; nothing where the folder cannot be listed."""
    with suppress(FileNotFoundError, PermissionError):
        return [match for match in path.parent.iterdir() if re.fullmatch(pattern, match.name)]
    return []


@contextmanager
def room(folder: Path) -> Iterator[None]:
    """A StateError in place of what the writers of torch and safetensors raise when the disk is full."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StateError) or not _is_full(error):
            raise
        problem = f"the disk is full, or this user's share of it ([Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)})"
        raise StateError(str(folder), problem, "free space there, or save to another disk") from error


def _is_full(error: BaseException | None) -> bool:
    """True if the system has said so somewhere below: torch's zip writer raises a RuntimeError of its own after it."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        if re.search(rf"os error ({errno.ENOSPC}|{errno.EDQUOT})\b", str(error)):  # as Rust says it: safetensors
            return True
        error = error.__cause__ or error.__context__
    return False


def sync(path: Path) -> None:
    """Have the system write a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
