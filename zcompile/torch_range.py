"""The releases of torch that zcompile runs on: asked about before anything is imported that others may lack."""

from __future__ import annotations

import contextlib
import re
import sys
from importlib import metadata

from zcompile.errors import VersionError

FIRST, LAST = (2, 11), (2, 15)
"""Release families, from and to; `pyproject.toml` and the Makefile name the same."""
TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The releases that the tests have run on."""
REQUIREMENT = f"torch>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"


def torch_version() -> str:
    """The version of the torch that is loaded, or would be: asked for without loading it, which takes seconds."""
    if "torch" not in sys.modules:
        with contextlib.suppress(metadata.PackageNotFoundError):  # of a checkout of torch on the path
            return metadata.version("torch")
    import torch

    return str(torch.__version__)


def check_torch(version: str) -> None:
    """Raise VersionError for a version of torch outside of the range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST <= tuple(map(int, found.groups())) <= LAST:
        problem = f"is none of the releases that zcompile runs on, {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
        raise VersionError(f"torch {version}", problem, f"pip install '{REQUIREMENT}'")


def is_tested(version: str) -> bool:
    """True if the tests have run on this release, in whichever build."""
    return version.partition("+")[0] in TESTED
