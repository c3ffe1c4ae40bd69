"""Subjects of commands: a model and one rank's batch, from a name on the command line.

    gpt:7.5b                a GPT of that size (`zcompile.tools.gpt`)
    llama:405b              a Llama of that size, with a tensor-parallel plan (`zcompile.tools.llama`)
    package.module:factory  a function that returns (model, args) or (model, args, kwargs); also path/to/file.py:factory
    folder or config.json   a Hugging Face config: a causal language model, built by the library transformers

Everything is made on meta: nothing but a config is downloaded, and models take no memory.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zcompile.errors import SubjectError, nearest
from zcompile.tools import gpt, llama
from zcompile.tools.gpt import GPT
from zcompile.tools.llama import Llama

NAMED = ("gpt", "llama")
"""Families of built-in models: the part before the colon."""


@dataclass(frozen=True)
class Subject:
    """A model and the arguments of one rank's call."""

    name: str
    model: nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    """Returns the loss, for models that return more; called as `loss_fn(model, *args, **kwargs)`."""
    loss: str = "None"
    """The same as Python source."""


def subject_of(name: str, *, batch: int, sequence: int) -> Subject:
    """The model named by `name`; a language model gets `batch` sequences of `sequence` tokens.

    Raises:
        SubjectError: it does not exist, or cannot be read or made.
        OptionError: the SIZE in gpt:SIZE or llama:SIZE is unknown.
    """
    if is_factory(name):
        return _made(name)
    if ":" in name and name.partition(":")[0] in NAMED:
        return _named(name, batch, sequence)
    path = Path(name)
    if _is_config(path):
        return _hugging_face(path, batch, sequence)
    fix = "give gpt:SIZE, llama:SIZE, module:factory, file.py:factory, or the folder of a Hugging Face config"
    raise SubjectError(name, "does not name a model", fix)


def is_factory(name: str) -> bool:
    """True for a name such as module:factory."""
    return ":" in name and name.partition(":")[0] not in NAMED and not _is_config(Path(name))


def _is_config(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".json"


def raised(error: BaseException, file: Path) -> str:
    """Describe an error, with the line of `file` where it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()]
    where = f", at {file.name}:{frames[-1].lineno}" if frames else ""
    return f"raised {type(error).__name__}: {error}{where}"


def _named(name: str, batch: int, sequence: int) -> Subject:
    kind, _, size = name.partition(":")
    with torch.device("meta"):
        model = GPT(gpt.shape_of(size), sequence) if kind == "gpt" else Llama(llama.shape_of(size))
        tokens = torch.empty(batch, sequence, dtype=torch.int64)
    return Subject(name, model, (tokens, tokens))


def _hugging_face(path: Path, batch: int, sequence: int) -> Subject:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        fix = "pip install transformers, or give a factory that makes the model"
        raise SubjectError(
            str(path), "is a Hugging Face config, and the library transformers is not installed", fix
        ) from error
    try:
        config = AutoConfig.from_pretrained(path)
        config.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if model.loss_type is None:
            model.loss_type = "ForCausalLM"  # its own fallback warns, which Dynamo cannot trace
    except Exception as error:  # the library may raise anything for an invalid file
        problem = f"is not the config of a causal language model: {type(error).__name__}: {error}"
        fix = "give the folder of such a config, or a factory that makes the model"
        raise SubjectError(str(path), problem, fix) from error
    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    given = {"input_ids": tokens, "labels": tokens}
    return Subject(str(path), model, (), given, _loss, "lambda model, **batch: model(**batch).loss")


def _loss(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    """The loss in the output of a Hugging Face model."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def _made(name: str) -> Subject:
    factory = _factory(name)
    try:
        with torch.device("meta"):
            made = factory()
    except Exception as error:
        found = raised(error, Path(inspect.getsourcefile(inspect.unwrap(factory)) or name))
        fix = "fix it; it is called without arguments, under torch.device('meta')"
        raise SubjectError(name, found, fix) from error
    parts = made if isinstance(made, tuple) else (made,)
    model, args, kwargs = (*parts, *((), (), {})[len(parts) :]) if 1 <= len(parts) <= 3 else (None, (), {})
    if not isinstance(model, nn.Module) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        found = f"returns {', '.join(type(part).__name__ for part in parts)}"
        raise SubjectError(name, found, "return (model, args) or (model, args, kwargs): a module and one batch")
    return Subject(name, model, tuple(args), dict(kwargs))


def _factory(name: str) -> Callable[[], Any]:
    home, _, attribute = name.rpartition(":")
    module = _module(home, name)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        problem = f"has no function {attribute!r}" if factory is None else f"has {attribute!r}, which is not a function"
        raise SubjectError(home, problem, nearest(attribute, known) if known else "give the name of a factory in it")
    return factory  # type: ignore[no-any-return]


def _module(home: str, name: str) -> ModuleType:
    """Import `home`: the path of a .py file, or the name of a module."""
    if home.endswith(".py") and not Path(home).is_file():
        raise SubjectError(home, "is not a file", "give the path of the file that has the factory")
    try:
        return _from_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except Exception as error:
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        fix = "fix it, or run this where it can be imported"
        if meant := _nearest_name(home, name, error):
            fix = f"did you mean {meant!r}? Or run this where {home!r} can be imported"
        raise SubjectError(name, problem, fix) from error


def _nearest_name(home: str, name: str, error: Exception) -> str:
    """The built-in model whose name is nearest to that of a missing module; empty if none is near."""
    absent = isinstance(error, ModuleNotFoundError) and error.name == home
    close = difflib.get_close_matches(home.lower(), NAMED, n=1, cutoff=0.5) if absent else []
    return f"{close[0]}{name.removeprefix(home)}" if close else ""


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"zcompile_subject_{path.stem}", path)
    assert spec is not None, "a .py file can be loaded"
    assert spec.loader is not None, "a .py file can be loaded"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and torch look modules up by name
    spec.loader.exec_module(module)
    return module
