"""The hardware profiles that come with zcompile. Must not import torch: the command's help lists them."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes for which a profile has rates of matrix products."""


def profiles() -> list[str]:
    """Return the names of the profiles that come with zcompile."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def text_of(name: str) -> str:
    """Return the TOML text of the profile with this name."""
    return (_folder() / f"{name}.toml").read_text()


def _folder() -> Traversable:
    return resources.files("zcompile.cost") / "profiles"
