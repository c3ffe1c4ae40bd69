"""Names of modules and parameters, whatever is in them, leave the printed program the program that was meant."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

import zcompile
from tests.cases import quickly
from zcompile.ir.spelling import escaped, free, identifier, quoted, unescaped

COLLIDING = [
    "region_0", "region", "forward", "backward", "box", "torch", "ops", "aten", "unbox", "wait", "release", "copy",
    "math", "operator", "float", "class", "None", "_", "__debug__", "f32[8]", "all_gather", "Box", "print",
    "unit", "arena",
]  # fmt: skip
INJECTED = [
    "a\n    raise SystemExit(1)  #",
    "a\r\n    raise SystemExit(1)",
    'a"""\nraise SystemExit(1)',
    "a\\",
    "a # b",
    "f32[8] +2 KiB",
    "3 parameters",
    "a + b",
    " ",
    "\0",
    "\x0c\x1c\x85\u2028",
    "ä²ß",
    "a' b",
    "{{ 7 * 7 }}",
    "[/red]",
    "\\u{41}",
    "\ud800",
    "\U000693ee\x85",
    "\U00020000",
]


class Named(nn.Module):
    """Modules and parameters of these names; some are the arguments' too."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = names
        for name in names:
            self.add_module(name, nn.Linear(4, 4))
        inner = nn.Module()
        for name in names:
            inner.register_parameter(name, nn.Parameter(torch.randn(4)))
        self.add_module(f"{names[0]}0", inner)

    def forward(self, region: torch.Tensor, box: torch.Tensor) -> torch.Tensor:
        x = region * box
        for name in self.order:
            x = torch.tanh(self._modules[name](x)) + self._modules[f"{self.order[0]}0"]._parameters[name]  # type: ignore[misc]
        return x


def check(names: list[str]) -> None:
    """The compiled model computes what the plain one does, and its programs are what their text says."""
    plain = Named(names)
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
    inputs = [torch.randn(3, 4), torch.randn(3, 4)]
    results = [model(*inputs) for model in (plain, compiled)]
    assert torch.equal(*results)
    for result in results:
        result.square().sum().backward()
    grads = {name: param.grad for name, param in compiled.named_parameters()}
    for name, param in plain.named_parameters():
        got: Any = grads[name]
        assert torch.equal(got.full_tensor(), param.grad)  # type: ignore[arg-type]
    program = compiled._engine.runtime.steps[0].program
    for one in (program, compiled.journals[0].entries[0].before):
        text = one.text(regions=True)
        again = zcompile.parse(text)
        assert again.text(regions=True) == text
        assert again.communications() == one.communications()
        assert {param.name for param in again.layout.params} == {param.name for param in one.layout.params}
    assert "graph break" not in compiled.explain()


@quickly("name", [*COLLIDING], [*COLLIDING][::12])
def test_names_that_mean_something_in_a_program(name: str) -> None:
    check([name, f"{name}_1"] if hasattr(nn.Module, name) is False else [f"{name}_1"])


BREAKING_OUT = [name for name in INJECTED if "." not in name]


@quickly("name", BREAKING_OUT, BREAKING_OUT[::6])
def test_names_that_would_break_out_of_a_comment(name: str) -> None:
    check([name, "b"])


PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking would compile for minutes
words = st.text(st.characters(blacklist_characters="."), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(st.lists(words, min_size=1, max_size=3, unique=True))
def test_any_names(names: list[str]) -> None:
    torch.compiler.reset()
    taken = {name for name in names if hasattr(nn.Module(), name)}
    check([name for name in names if name not in taken] or ["a"])


@given(st.text())
@example("\\u{41}")
def test_an_escaped_name_is_one_word_and_comes_back(name: str) -> None:
    assert unescaped(escaped(name)) == name
    assert all(char.isalnum() or char in "_.+-\\{}" for char in escaped(name))


@given(st.text(st.characters(codec=None)))
@example('a"\\"')
def test_a_quoted_name_is_the_literal_of_it(name: str) -> None:
    assert ast.literal_eval(quoted(name)) == name
    assert quoted(name).isascii()


@given(st.text(min_size=1))
@example("region_7")
@example("__")
def test_an_identifier_is_one_and_free(name: str) -> None:
    found = identifier(name)
    assert found.isidentifier()
    assert found.isascii()
    assert found.strip("_")
    assert free(found) == found
