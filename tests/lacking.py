"""What a machine may lack, and how it shows: tests that fail of it are skipped with that reason."""

from __future__ import annotations

import functools
import shutil
import socket
import traceback

NO_LOOPBACK = "there is no loopback interface, over which ranks meet"


@functools.cache
def lacking() -> dict[str, str]:
    """Of what is not there, the words in errors, and the reason."""
    found = {}
    if shutil.which("g++") is None:
        found |= dict.fromkeys(
            ("InvalidCxxCompiler", "No working C++ compiler"), "there is no g++, by which Inductor compiles"
        )
    if not has_loopback():
        words = (
            "Unable to find interface",
            "Network is unreachable",
            "failed to connect",
            "Cannot assign requested address",
        )
        found |= dict.fromkeys(words, NO_LOOPBACK)
    return found


def has_loopback() -> bool:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return True
    except OSError:
        return False


def reason_of(error: BaseException) -> str | None:
    """What the machine lacks, if that is why; None if it is something else."""
    if not lacking():
        return None
    text = "".join(traceback.format_exception(error))
    return next((reason for words, reason in lacking().items() if words in text), None)
