"""All families by name. A library is imported when a family of it is asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from benchmarks.families.family import Family

MODULES = {
    "plain_models": "torch",
    "several_losses": "torch",
    "transformers_models": "transformers",
    "timm_models": "timm",
    "diffusers_models": "diffusers",
    "peft_models": "peft",
}
"""Which library each module of models needs."""


@functools.cache
def _of(module: str) -> dict[str, Family]:
    return {family.name: family for family in importlib.import_module(f"benchmarks.families.{module}").FAMILIES}


def _installed() -> list[str]:
    return [module for module, library in MODULES.items() if importlib.util.find_spec(library) is not None]


def families() -> dict[str, Family]:
    """Those whose library is installed."""
    return {name: family for module in _installed() for name, family in _of(module).items()}


def find(name: str) -> Family | None:
    """The family of a name, if its library is installed; imports no more libraries than it takes."""
    return next((_of(module)[name] for module in _installed() if name in _of(module)), None)
