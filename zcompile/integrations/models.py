"""Helpers shared by integrations: sharding a model once, checkpoint folders, missing libraries."""

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
    """Raise OptionError for an unknown option of `zcompile.compile`, or `optimizer`, which integrations set."""
    check_known(options, names_of(compile, CompileOptions) - {"optimizer"}, "zcompile.compile")


def sharded(model: nn.Module, optimizers: Iterable[Optimizer], options: Mapping[str, Any]) -> CompiledModule:
    """Compile `model` with those optimizers that hold its parameters; a model that is compiled already is returned.

    Raises:
        OptionError: the model is compiled already, with other options.
    """
    known = compiled_of(model)
    if known is not None:
        before, asked = str(options_of(known)), str(Options.among(options))
        if options and asked != before:
            problem = f"is compiled already, with {before!r} instead of {asked!r}"
            raise OptionError(type(model).__name__, problem, "give both trainers the same options, or none here")
        return known
    return compile(model, optimizer=[one for one in optimizers if holds_any(one, model)], **options)


def holds_any(optimizer: Optimizer, model: nn.Module) -> bool:
    """True if the optimizer has any parameter of the model."""
    return any(_are_held(optimizer, model))


def holds_others(optimizer: Optimizer, model: nn.Module) -> bool:
    """True if the optimizer has parameters that are not in the model."""
    return not all(_are_held(optimizer, model))


def _are_held(optimizer: Optimizer, model: nn.Module) -> Iterator[bool]:
    params = {id(param) for param in model.parameters()}
    return (id(param) in params for group in optimizer.param_groups for param in group["params"])


FOLDER = "zcompile"
"""The name of the checkpoint folder within a trainer's checkpoint."""


def folder_in(checkpoint: str | os.PathLike[str], number: int = 0) -> Path:
    """The checkpoint folder of model `number` of a trainer."""
    return Path(checkpoint) / (f"{FOLDER}_{number}" if number else FOLDER)


def read(path: Path) -> Any:
    """Load a file of `torch.save` by mmap, so that the ranks of a machine share its memory."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def missing(library: str, extra: str) -> ImportError:
    """The error for an integration whose library cannot be imported."""
    return ImportError(f"zcompile.integrations.{extra} needs {library}. Fix: pip install 'zcompile[{extra}]'")
