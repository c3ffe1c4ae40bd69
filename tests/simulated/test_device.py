"""The simulated device is as good as a GPU for what is run on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import batch, fit, make
from tests.ranks import Ranks


def _computes(rank: int) -> dict[str, Any]:
    x = torch.arange(6.0, device="cuda", requires_grad=True)
    (x * x).sum().backward()
    torch.cuda.manual_seed(5)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    own = torch.Generator("cuda").manual_seed(5)
    before = torch.cuda.memory_allocated()
    held = torch.empty(1000, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        low = nn.Linear(4, 4).cuda()(torch.ones(2, 4, device="cuda"))
    return {
        "gradient": x.grad.cpu(),
        "again": torch.equal(second, torch.rand(3, device="cuda")),
        "own": torch.equal(first, torch.rand(3, device="cuda", generator=own)),
        "draws differ": not torch.equal(first, second),
        "held": torch.cuda.memory_allocated() - before >= held.nbytes,
        "autocast": low.dtype,
        "accelerator": str(torch.accelerator.current_accelerator()),
        "pinned": torch.ones(3).pin_memory().is_pinned(),
    }


@pytest.mark.slow
def test_it_computes_as_torch_does(gpus: Ranks) -> None:
    (answer,) = gpus.run(1, _computes)
    assert torch.equal(answer.pop("gradient"), 2 * torch.arange(6.0))
    assert answer.pop("autocast") is torch.bfloat16
    assert answer.pop("accelerator") == "cuda"
    assert all(answer.values()), answer


def _finds(rank: int) -> tuple[list[str], dict[str, int]]:
    from tests.simulated.device import checker

    checker.findings.clear()
    checker.begin_step()
    side, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        y = x + 1
    host = torch.empty(4, pin_memory=True)
    host.copy_(y, non_blocking=True)
    host.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    y.sum().item()
    return [str(finding) for finding in checker.findings.values()], dict(checker.waits)


@pytest.mark.slow
def test_findings_name_the_operations_and_the_lines(gpus: Ranks) -> None:
    ((findings, waits),) = gpus.run(1, _finds)
    here = f"at {__name__.replace('.', '/')}.py:"
    assert [finding.count(here) for finding in findings] == [3, 3, 3]
    reads, copies, host = findings
    assert " reads it by aten::add at " in reads
    assert "the default stream reads it by aten::copy_ at " in copies
    assert "the host writes it by aten::mul_ at " in host
    assert list(waits.values()) == [1]
    assert "aten::item" in next(iter(waits))


def _trains(rank: int) -> dict[str, torch.Tensor]:
    import zcompile

    model = zcompile.compile(make("gpt").cuda(), stage=3, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, ([tensor.cuda() for tensor in batch("gpt", rank, step)] for step in range(3)))
    dist.barrier()
    return {name: parameter.detach().full_tensor().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_ranks_that_are_there_train_as_one_process_does(gpus: Ranks) -> None:
    reference = make("gpt")
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    whole = ([torch.cat(both) for both in zip(*(batch("gpt", rank, step) for rank in range(2)), strict=True)]
             for step in range(3))  # fmt: skip
    fit(reference, optimizer, whole)
    expected = dict(reference.named_parameters())
    for answer in gpus.run(2, _trains):
        for name, parameter in answer.items():
            torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-4, atol=1e-5)
