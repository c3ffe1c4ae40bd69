"""The tests of `tests/test_gpu.py`, which want a GPU, on the simulated one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated import library

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.skipif(bool(library.unavailable()), reason=library.unavailable())
def test_they_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.simulated.plugin", "-m", "gpu", "tests/test_gpu.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "skipped" not in ended.stdout.splitlines()[-1]
