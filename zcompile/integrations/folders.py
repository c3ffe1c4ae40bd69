"""Where checkpoints of shards lie within the checkpoints of a trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

FOLDER = "zcompile"
"""The name of the folder, beside the files that the trainer writes."""


def folder_in(checkpoint: str | os.PathLike[str], number: int = 0) -> Path:
    """That of the trainer's model of this number."""
    return Path(checkpoint) / (f"{FOLDER}_{number}" if number else FOLDER)


def read(path: Path) -> Any:
    """Tensors in a file of torch's, of which the ranks of a machine share the memory."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
