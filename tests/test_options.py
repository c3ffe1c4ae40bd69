"""Options: one dataclass, which signatures, the command's options and what ranks agree on follow."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from zcompile.schedule.options import Options, names_of
from zcompile.tools import command_line
from zcompile.tools.arguments import checkpoint_of, chunk_of, dtype_of

FIELDS = {field.name: field for field in fields(Options)}
OTHER: dict[str, Any] = {
    "stage": 2,
    "shard": "hpz",
    "prefetch": 1,
    "dtype": torch.bfloat16,
    "reduce_dtype": torch.float64,
    "outer_dtype": torch.int8,
    "outer_gather_dtype": torch.int8,
    "checkpoint": "unit",
    "backend": "eager",
    "memory_limit": "1 GiB",
    "bucket": 2048,
    "arenas": True,
    "offload_activations": "cpu",
    "partition_activations": True,
    "offload_parameters": "cpu",
    "cuda_graphs": True,
    "chunk": 1024,
    "sequence": "ulysses",
}
"""Another value than the default for each option that ranks agree on."""
BESIDE: dict[str, dict[str, Any]] = {"offload_parameters": {"stage": 3}, "outer_gather_dtype": {"shard": "hpz"}}
"""What an option needs beside it."""
OWN = {"passes", "dump", "record"}
NOT_OF_A_BACKEND = {"partition_activations", "offload_parameters"}


def defaults_of(function: Any) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each parameter."""
    return {name: (one.annotation, one.default) for name, one in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(
    ("function", "kind", "left_out"),
    [
        (zcompile.compile, zcompile.CompileOptions, set()),
        (zcompile.backend, zcompile.BackendOptions, NOT_OF_A_BACKEND),
    ],
)
def test_functions_have_every_option_with_its_type_and_default(function: Any, kind: Any, left_out: set[str]) -> None:
    given, by_name = defaults_of(function), kind.__annotations__
    assert given["options"][0] == f"Unpack[{kind.__name__}]"
    assert not given.keys() & by_name.keys()
    assert FIELDS.keys() - given.keys() - by_name.keys() == left_out
    for name in FIELDS.keys() & given.keys():
        assert given[name] == (FIELDS[name].type, FIELDS[name].default), name
    for name in FIELDS.keys() & by_name.keys():
        assert by_name[name].__forward_arg__ == FIELDS[name].type, name


def test_every_option_of_compile_is_one_or_says_what_to_compile() -> None:
    about = {"optimizer", "mesh", "units", "whole", "ignore", "keep_dtype", "weights", "output_dtype"}
    assert names_of(zcompile.compile, zcompile.CompileOptions) - FIELDS.keys() == about


def test_every_option_is_documented_once() -> None:
    documented = re.findall(r"^        (\w+): ", zcompile.compile.__doc__ or "", re.MULTILINE)
    assert sorted(documented) == sorted([*names_of(zcompile.compile, zcompile.CompileOptions), "model", "options"])


@pytest.mark.parametrize("function", [partial(zcompile.compile, nn.Linear(2, 2)), zcompile.backend])
def test_an_option_that_is_none_is_refused_with_the_nearest(function: Any) -> None:
    with pytest.raises(zcompile.OptionError, match=r"prefecth: is not an option of .*\n.*did you mean 'prefetch'"):
        function(prefecth=1)
    with pytest.raises(zcompile.OptionError, match=r"arena: is not an option of zcompile.*\n.*did you mean 'arenas'"):
        function(arena=True)


def test_a_train_step_hands_options_on() -> None:
    own = defaults_of(zcompile.train_step)
    assert own["options"][0] == "Any"
    assert not own.keys() & FIELDS.keys()


def test_the_command_has_the_same_defaults() -> None:
    given = {name: default for name, (_, default) in defaults_of(command_line.inspect_command).items()}
    given |= {"checkpoint": checkpoint_of(given["checkpoint"]), "dtype": dtype_of(given["dtype"])}
    given["chunk"] = chunk_of(given["chunk"])
    del given["sequence"]  # how many tokens a sequence has
    shared = given.keys() & FIELDS.keys()
    assert shared == {"stage", "prefetch", "checkpoint", "chunk", "dtype", "memory_limit"}
    assert {name: given[name] for name in shared} == {name: FIELDS[name].default for name in shared}


def test_ranks_agree_on_every_option_but_those_of_their_own() -> None:
    assert FIELDS.keys() - OTHER.keys() == OWN
    for name, value in OTHER.items():
        beside = BESIDE.get(name, {})
        said = str(Options(**beside, **{name: value}))
        assert said != str(Options(**beside)), name
        assert f"{name} " in said


def test_ranks_may_have_other_folders() -> None:
    one, other = (Options(offload_activations=f"disk:/{folder}") for folder in "ab")
    assert str(one) == str(other) == "stage 3 offload_activations disk"


def test_the_environment_gives_a_folder_to_dump_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMPILE_DUMP", "there")
    assert Options().dump == "there"
    assert Options(dump="here").dump == "here"
    assert str(Options()) == "stage 3"
