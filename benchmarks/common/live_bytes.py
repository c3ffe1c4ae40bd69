"""Live bytes of a process: of all tensors on the CPU, whichever library, thread or kernel allocates them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build(folder: Path) -> Path:
    """The library that counts, compiled into `folder`; a process is to be started with it in LD_PRELOAD.

    Raises:
        RuntimeError: There is no C compiler, or the C library is not glibc.
    """
    library = folder / "live_bytes.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError("there is no C compiler `cc`: install gcc") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
    return library


class LiveBytes:
    """The counter of this process, which was started with the library in LD_PRELOAD.

    Raises:
        AttributeError: It was not.
    """

    def __init__(self) -> None:
        process = ctypes.CDLL(None)
        self._live, self._peak = process.live_bytes, process.peak_bytes
        self._live.restype = self._peak.restype = ctypes.c_long

    def live(self) -> int:
        """Bytes that are allocated now."""
        return int(self._live())

    def peak(self) -> int:
        """The most bytes that were since the last call."""
        return int(self._peak())
