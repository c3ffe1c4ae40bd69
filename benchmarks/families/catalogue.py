"""All families by name. A library is imported when a family of it is asked for."""

from __future__ import annotations

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


def families() -> dict[str, Family]:
    """Those whose library is installed."""
    found = {}
    for module, library in MODULES.items():
        if importlib.util.find_spec(library) is not None:
            of_module = importlib.import_module(f"benchmarks.families.{module}").FAMILIES
            found.update({family.name: family for family in of_module})
    return found
