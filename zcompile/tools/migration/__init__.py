"""From configs of other libraries to the lines of zcompile: `zcompile migrate`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zcompile.errors import SubjectError
from zcompile.tools.migration import accelerate, deepspeed
from zcompile.tools.migration.script import Script

OF_DEEPSPEED = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer")
OF_ACCELERATE = ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")
WANTED = "give a JSON of DeepSpeed's, or a YAML of `accelerate config`"


def migrated(path: Path) -> Script:
    """The lines of zcompile for the config in a file.

    Raises:
        SubjectError: it cannot be read, or is no config that is known.
        OptionError: a value that its own library would not take either.
    """
    values = _read(path)
    if any(key in values for key in OF_ACCELERATE):
        return accelerate.script_of(values, f"{path.name} (Accelerate)")
    if any(key in values for key in OF_DEEPSPEED):
        return deepspeed.script_of(values, f"{path.name} (DeepSpeed)")
    raise SubjectError(str(path), f"has none of the keys {', '.join((*OF_DEEPSPEED, *OF_ACCELERATE))}", WANTED)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SubjectError(str(path), f"cannot be read: {error}", WANTED) from error
    values = _yaml(path, text) if path.suffix in (".yaml", ".yml") else _json(path, text)
    if not isinstance(values, Mapping):
        raise SubjectError(str(path), f"has a {type(values).__name__}, and no keys", WANTED)
    return values


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SubjectError(str(path), f"is no JSON: {error}", WANTED) from error


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # the libraries whose configs these are bring it; torch does not
    except ImportError as error:
        raise SubjectError(str(path), "is YAML, and the package PyYAML is absent", "pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SubjectError(str(path), f"is no YAML: {error}", WANTED) from error
