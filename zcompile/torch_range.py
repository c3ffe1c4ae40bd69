"""The supported releases of torch: checked before importing anything that other releases may lack."""

from __future__ import annotations

import contextlib
import re
import sys
from importlib import metadata

from zcompile.errors import VersionError

FIRST, LAST = (2, 11), (2, 15)
"""First and last release family; the same as in `pyproject.toml` and the Makefile."""
TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The releases on which the tests have run."""
REQUIREMENT = f"torch>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"


def torch_version() -> str:
    """The version of the imported or installed torch, without importing it if possible: that takes seconds."""
    if "torch" not in sys.modules:
        with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout of torch on sys.path has no metadata
            return metadata.version("torch")
    import torch

    return str(torch.__version__)


def check_torch(version: str) -> None:
    """Raise VersionError for an unsupported version of torch."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST <= tuple(map(int, found.groups())) <= LAST:
        problem = f"is not supported: zcompile runs on torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
        raise VersionError(f"torch {version}", problem, f"pip install '{REQUIREMENT}'")


def is_tested(version: str) -> bool:
    """True if the tests have run on this release, in any build."""
    return version.partition("+")[0] in TESTED
