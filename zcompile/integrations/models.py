"""What integrations share: models that are sharded once, whoever asks; checkpoint folders; missing libraries."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from zcompile.compile_model import compile
from zcompile.compiled import CompiledModule, compiled_of, options_of
from zcompile.errors import OptionError
from zcompile.schedule.options import CompileOptions, Options, check_known, names_of


def check_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError for what `zcompile.compile` does not take, or an integration gives it by itself."""
    check_known(options, names_of(compile, CompileOptions) - {"optimizer"}, "zcompile.compile")


def sharded(model: nn.Module, optimizers: Iterable[Optimizer], options: Mapping[str, Any]) -> CompiledModule:
    """`model` compiled with the optimizers that hold parameters of it; as it is, if another trainer has compiled it.

    Raises:
        OptionError: that one did so with other options.
    """
    known = compiled_of(model)
    if known is not None:
        before, asked = str(options_of(known)), str(Options.among(options))
        if options and asked != before:
            problem = f"is compiled already, with {before!r} and not {asked!r}"
            raise OptionError(type(model).__name__, problem, "give both trainers the same options, or this one none")
        return known
    return compile(model, optimizer=[one for one in optimizers if holds_any(one, model)], **options)


def holds_any(optimizer: Optimizer, model: nn.Module) -> bool:
    """True if the optimizer has a parameter of the model."""
    return any(_are_held(optimizer, model))


def holds_others(optimizer: Optimizer, model: nn.Module) -> bool:
    """True if it has parameters beside those of the model."""
    return not all(_are_held(optimizer, model))


def _are_held(optimizer: Optimizer, model: nn.Module) -> Iterator[bool]:
    params = {id(param) for param in model.parameters()}
    return (id(param) in params for group in optimizer.param_groups for param in group["params"])


FOLDER = "zcompile"
"""The name of the folder, beside the files that the trainer writes."""


def folder_in(checkpoint: str | os.PathLike[str], number: int = 0) -> Path:
    """That of the trainer's model of this number."""
    return Path(checkpoint) / (f"{FOLDER}_{number}" if number else FOLDER)


def read(path: Path) -> Any:
    """Tensors in a file of torch's, of which the ranks of a machine share the memory."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def missing(library: str, extra: str) -> ImportError:
    """For a module of this package whose library cannot be imported."""
    return ImportError(f"zcompile.integrations.{extra} needs {library}. Fix: pip install 'zcompile[{extra}]'")
