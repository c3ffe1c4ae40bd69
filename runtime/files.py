"""Files without a name: nothing can happen to them, and nothing is left of them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from zcompile.errors import StateError
from zcompile.tensor_type import human_bytes


def nameless(folder: Path) -> int:
    """The descriptor of a new file in `folder`, which is made if it is not there.

    Raises:
        StateError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.dup(made.fileno())
    except OSError as error:
        raise StateError(str(folder), f"cannot be written: {error.strerror}", "give a folder of yours") from error


def set_aside(folder: Path, file: int, offset: int, nbytes: int, what: str) -> None:
    """Let the disk keep room for `nbytes` of `file` in `folder`: what is written there later finds it.

    Raises:
        StateError: there is none, for `what`.
    """
    try:
        os.posix_fallocate(file, offset, nbytes)
    except OSError as error:
        found = f"has no room for the {human_bytes(nbytes)} of {what} of this rank: {error.strerror}"
        raise StateError(str(folder), found, "give a folder on a larger disk, or train on more ranks") from error
