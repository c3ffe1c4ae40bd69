"""A plugin of pytest that gives its process a simulated GPU: `pytest -p tests.simulated.plugin -m gpu`.

Regions run eager: what Inductor would write for a GPU cannot run here.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest

importlib.import_module("tests.simulated.device")  # it has to be there before torch
importlib.import_module("tests.simulated.nccl")
STATUS = pytest.StashKey[int]()
regions: Any = importlib.import_module("zcompile.engine.region_cache")
compile_region = regions._compile
regions._compile = lambda region, _: compile_region(region, "eager")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End at once: a thread of autograd's that frees a tensor while the interpreter ends would abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(STATUS, 1))
