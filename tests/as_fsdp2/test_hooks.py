"""Hooks: of parameters, of modules, and of the reduction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.as_fsdp2.plain import (
    Net,
    average,
    beside,
    differing,
    full,
    gradients,
    mean_square,
    numbers,
    pair,
    parameters,
    three,
)
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_ranks, on_threads
from tests.refusals import error_of
from tests.threads import Threads


@pytest.mark.slow
@quickly("stage", [3, 2, 1, 0], [3])
@on_threads(3)
def test_post_accumulate_hooks_run_once_per_backward_with_the_reduced_gradient(rank: int, stage: int) -> list[str]:
    """What hooks of a plain model with averaged gradients would see, and how often they run."""
    plain, compiled = pair(Net, stage=stage)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, param in compiled.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(full(p.grad)))
    for model in (plain, compiled):
        for step in range(2):
            mean_square(model, numbers(rank, step)).backward()
    average(plain)
    found = [f"{name} ran {len(grads)} times" for name, grads in seen.items() if len(grads) != 2]
    return found + differing({n: seen[n][-1] for n, _ in plain.named_parameters()}, gradients(plain), "seen")


@pytest.mark.slow
@quickly("stage", [3, 2, 1, 0], [3])
@on_threads(2)
def test_an_optimizer_may_step_in_the_backward(rank: int, stage: int) -> list[str]:
    """An optimizer for each parameter, which steps in its hook and lets the gradient go."""
    plain, compiled = pair(Net, stage=stage)
    usual = torch.optim.AdamW(plain.parameters(), lr=0.01)
    own = {param: torch.optim.AdamW([param], lr=0.01) for param in compiled.parameters()}

    def step(param: torch.Tensor) -> None:
        own[param].step()
        own[param].zero_grad()

    for param in compiled.parameters():
        param.register_post_accumulate_grad_hook(step)
    found = []
    for number in range(3):
        for model in (plain, compiled):
            mean_square(model, numbers(rank, number)).backward()
        average(plain)
        update(usual)
        found += [name for name, param in compiled.named_parameters() if param.grad is not None]
        found += differing(parameters(compiled), parameters(plain), f"step {number}")
    return found


def changing(rank: int, late: bool) -> list[str]:
    """Hooks that change what goes into a module and what comes out, put on before or after compile."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        if not late:
            change(one)
    compiled = zcompile.compile(model, backend="eager")
    found = []
    if late:
        found += beside(plain, compiled, three(rank))
        change(plain)
        change(compiled)
    return found + beside(plain, compiled, three(rank))


def change(model: nn.Module) -> None:
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda _, args, out: out * 0.5)


@pytest.mark.slow
def test_forward_hooks_of_modules_change_what_they_change(threads: Threads) -> None:
    for late in (False, True):
        assert threads.run(2, changing, late) == [[], []]


def change_gradients(model: nn.Module) -> None:
    for block in model.blocks:
        block.register_full_backward_hook(lambda _, into, out: (2 * into[0],))
        block.register_full_backward_pre_hook(lambda _, out: (out[0] * 0.7,))


@pytest.mark.slow
@on_threads(2)
def test_backward_hooks_of_modules_change_gradients(rank: int) -> list[str]:
    torch.manual_seed(0)
    plain = Net()
    change_gradients(plain)
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
    return beside(plain, compiled, three(rank))


@pytest.mark.slow
@quickly("kind", ["forward", "pre", "backward"], ["backward"])
@on_threads(2)
def test_hooks_on_the_compiled_module_are_the_roots(rank: int, kind: str) -> list[str]:
    """A hook of the root that is put on the compiled module itself."""
    plain, compiled = pair(Net)
    seen: list[list[int]] = [[], []]
    for model, notes in zip((plain, compiled), seen, strict=True):
        if kind == "forward":
            model.register_forward_hook(lambda _, args, out, notes=notes: notes.append(len(args)) or out * 2)
        elif kind == "pre":
            model.register_forward_pre_hook(lambda _, args, notes=notes: notes.append(len(args)) or (args[0] * 2,))
        else:
            model.register_full_backward_hook(lambda _, into, out, notes=notes: notes.append(len(out)))
    found = beside(plain, compiled, three(rank))
    return found + ([] if seen[0] == seen[1] else [f"{seen}"])


@pytest.mark.slow
@on_threads(2)
def test_a_hook_on_a_full_gradient_is_refused_with_the_one_to_take(rank: int) -> None:
    _, compiled = pair(Net)
    mean_square(compiled, numbers(rank, 0)).backward()
    next(compiled.parameters()).register_hook(lambda grad: grad)
    message = error_of(lambda: mean_square(compiled, numbers(rank, 0)).backward(), zcompile.ParameterError)
    assert "register_hook" in message
    assert "register_post_accumulate_grad_hook" in message


@pytest.mark.slow
@on_ranks(2)
def test_a_hook_may_change_the_reduced_gradient_in_place(rank: int) -> list[Any]:
    """In place of an all-reduce hook: what changes gradients after the reduction, in a hook on the shard."""
    plain, compiled = pair(Net)
    for param in compiled.parameters():
        assert isinstance(param, DTensor)
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    for model in (plain, compiled):
        mean_square(model, numbers(rank, 0)).backward()
    average(plain)
    for param in plain.parameters():
        param.grad.mul_(0.5)
    return differing(gradients(compiled), gradients(plain), "gradient")
