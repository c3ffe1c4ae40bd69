"""Which profiles of hardware come with zcompile. Imports no torch: the command's help lists them."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

DTYPES = ("float32", "bfloat16", "float16")
"""Those that a profile has rates of matrix products for."""


def profiles() -> list[str]:
    """The names of the profiles that come with zcompile."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def text_of(name: str) -> str:
    """The profile of this name, as TOML."""
    return (_folder() / f"{name}.toml").read_text()


def _folder() -> Traversable:
    return resources.files("zcompile.cost") / "profiles"
