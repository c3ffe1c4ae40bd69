"""Convert configs of other libraries to zcompile code: `zcompile migrate`. Does not import torch."""

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
WANTED = "give a DeepSpeed JSON file, or a YAML file of `accelerate config`"


def migrated(path: Path) -> Script:
    """The zcompile code for the config in a file.

    Raises:
        SubjectError: the file cannot be read, or is not a known config.
        OptionError: a value is invalid for the config's own library, too.
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
        raise SubjectError(str(path), f"has a {type(values).__name__} instead of keys", WANTED)
    return values


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SubjectError(str(path), f"is not valid JSON: {error}", WANTED) from error


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # installed with the libraries that use these configs, but not with torch
    except ImportError as error:
        raise SubjectError(str(path), "is YAML, and PyYAML is not installed", "pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SubjectError(str(path), f"is not valid YAML: {error}", WANTED) from error
