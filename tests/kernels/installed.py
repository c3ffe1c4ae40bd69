"""Where Triton is, which the project itself does not need."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tests.simulated import library

FOLDER = Path(__file__).parents[2] / ".triton"
"""Where `make triton` installs it."""


def unavailable() -> str:
    """Why regions cannot be compiled for a GPU here; empty if they can."""
    if reason := library.unavailable():
        return reason
    if importlib.util.find_spec("triton") is None and not (FOLDER / "triton").is_dir():
        return "Triton is not installed: `make triton` does it"
    return ""


def make_importable() -> None:
    """Let this process, and ranks that it starts from now on, import Triton."""
    if importlib.util.find_spec("triton") is None:
        sys.path.insert(0, str(FOLDER))
