"""Files that are whole or absent, and what is said where the disk has no room for one."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zcompile.errors import StateError

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
