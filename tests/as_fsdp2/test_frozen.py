"""Frozen parameters: beside trained ones, in units of their own, and frozen or freed while training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.as_fsdp2.plain import (
    Net,
    adam,
    average,
    beside,
    differing,
    gradients,
    mean_square,
    numbers,
    pair,
    parameters,
    three,
)
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_threads
from tests.threads import Threads


def biases(model: nn.Module) -> None:
    """In every unit some are trained."""
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name)


def alternate(model: nn.Module) -> None:
    """Every other unit is frozen."""
    for index, block in enumerate(model.blocks):
        block.requires_grad_(bool(index % 2))


def trunk(model: nn.Module) -> None:
    """Only the head is trained."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)


def top(model: nn.Module) -> None:
    """Only what comes first is trained, and gradients pass through frozen units."""
    model.requires_grad_(False)
    model.first.requires_grad_(True)


FREEZE: dict[str, Callable[[nn.Module], None]] = {f.__name__: f for f in (biases, alternate, trunk, top)}


def make(how: str) -> nn.Module:
    model = Net(blocks=4)
    FREEZE[how](model)
    return model


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model, x) + mean_square(model, x.flip(0) * 2)


CASES = [(how, several, stage) for how in FREEZE for several in (False, True) for stage in (3, 2)]


@pytest.mark.slow
@quickly("how, several, stage", CASES, CASES[2:3], pairs=False)
@on_threads(3)
def test_frozen_parameters_beside_trained_ones(rank: int, how: str, several: bool, stage: int) -> list[str]:
    plain, compiled = pair(lambda: make(how), stage=stage)
    return beside(plain, compiled, three(rank), twice if several else mean_square)


@pytest.mark.slow
@quickly("stage", [3, 2, 1, 0], [3])
@on_threads(2)
def test_parameters_may_be_frozen_and_freed_between_steps(rank: int, stage: int) -> list[str]:
    """Frozen and freed again between steps, by the parameters or by the module."""
    plain, compiled = pair(lambda: Net(blocks=4), stage=stage)
    optimizers = [adam(model) for model in (plain, compiled)]
    found = []
    for step, how in enumerate((None, "biases", "alternate", "trunk", "all", "top")):
        for model in (plain, compiled):
            if how == "all":
                model.requires_grad_(True)
            elif how is not None:
                FREEZE[how](model)
            mean_square(model, numbers(rank, step)).backward()
        average(plain)
        found += differing(gradients(compiled), gradients(plain), f"step {step}, gradient")
        update(*optimizers)
        found += differing(parameters(compiled), parameters(plain), f"step {step}, parameter")
    return found


def lines(rank: int, how: str) -> list[str]:
    _, compiled = pair(lambda: make(how))
    mean_square(compiled, numbers(rank, 0)).backward()
    backward = compiled.programs[1].communications()
    return [line.partition(": ")[2].partition(" (")[0] for line in backward]


@pytest.mark.slow
def test_units_that_are_not_trained_are_not_reduced_nor_gathered_where_no_gradient_passes(threads: Threads) -> None:
    assert threads.run(2, lines, "trunk")[0] == ["reduce_scatter head"]
    through = threads.run(2, lines, "top")[0]
    assert [line for line in through if line.startswith("reduce")] == ["reduce_scatter first"]
    assert "all_gather blocks.0" in through


@pytest.mark.slow
@on_threads(2)
def test_evaluation_between_steps_changes_nothing(rank: int) -> list[str]:
    """Under no_grad and inference_mode, between steps."""
    plain, compiled = pair(Net)
    found = beside(plain, compiled, three(rank))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            if not torch.allclose(compiled(numbers(rank, 9)), plain(numbers(rank, 9)), atol=1e-5):
                found.append(mode.__name__)
        found += beside(plain, compiled, three(rank))
    return found
