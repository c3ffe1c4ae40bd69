"""Mixed precision: low-precision compute and gathers over full-precision shards, loss scaling, autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.cases import quickly
from tests.compare import full
from tests.models import GPT, batch, make
from tests.ranks import on_threads
from tests.threads import Threads
from zcompile.model.conversion import OwnDtype

# -- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_casts_stand_in_the_program_and_shards_keep_their_dtype(stage: int) -> None:
    compiled = zcompile.compile(make("mlp"), stage=stage, dtype=torch.bfloat16, backend="eager")
    compiled(*batch("mlp", 0, 0)).backward()
    forward, backward = map(str, compiled.programs)
    assert "dtype=torch.bfloat16)" in forward
    assert "dtype=torch.float32)" in backward
    assert "bf16[4, 13]" in forward
    for param in compiled.parameters():
        assert (param.dtype, param.grad.dtype) == (torch.float32, torch.float32)


class Classifier(nn.Module):
    """A mean over those targets that are not to be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 96, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x).tanh()), targets)


def test_logits_are_saved_in_the_dtype_they_are_computed_in() -> None:
    """A loss under autocast takes logarithms in float32, which torch.compile does not save either."""
    torch.manual_seed(0)
    model = Classifier()
    plain, given = copy.deepcopy(model), torch.randn(64, 8)
    targets = torch.where(torch.arange(64) % 3 == 0, -100, torch.arange(64))
    compiled = zcompile.compile(model, dtype=torch.bfloat16)
    compiled(given, targets).backward()
    saved = [node.meta["val"] for node in compiled._engine.runtime.steps[0].program.saved()]
    assert [(one.dtype, *one.shape) for one in saved if one.numel() == 64 * 96] == [(torch.bfloat16, 64, 96)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = plain(given, targets)
    loss.backward()
    for one, wanted in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one.grad), wanted.grad, rtol=2e-2, atol=1e-4)


@pytest.mark.slow
def test_a_mixed_program_parses_back() -> None:
    compiled = zcompile.compile(make("mlp"), dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, backend="eager")
    compiled(*batch("mlp", 0, 0)).backward()
    program = compiled._engine.runtime.steps[0].program
    assert zcompile.parse(program.text(regions=True)).text(regions=True) == program.text(regions=True)


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """In the dtype of autocast, beside an integer and what is not a tensor."""
        y = self.body(x)
        return {"logits": y, "order": y.argsort(), "more": [y.sum(1), "kept"]}


@pytest.mark.parametrize("stage", [0, 3])
def test_results_are_cast_to_the_dtype_that_is_asked_for(stage: int) -> None:
    torch.manual_seed(0)
    model = TwoResults()
    kept, cast = (
        zcompile.compile(copy.deepcopy(model), stage=stage, dtype=torch.bfloat16, output_dtype=one, backend="eager")
        for one in (None, torch.float32)
    )
    x = torch.randn(3, 4)
    for compiled, dtype in ((kept, torch.bfloat16), (cast, torch.float32)):
        result = compiled(x)
        assert (result["logits"].dtype, result["order"].dtype, result["more"][1]) == (dtype, torch.int64, "kept")
        (result["logits"].float().square().sum() + result["more"][0].float().sum()).backward()
        with compiled.unsharded():
            assert compiled(x)["logits"].dtype is dtype
    assert torch.equal(full(kept.body.weight.grad), full(cast.body.weight.grad)), "values are those of bfloat16"
    with pytest.raises(zcompile.OptionError, match="output_dtype"):
        zcompile.compile(TwoResults(), output_dtype="float32")


def low_traffic(rank: int, stage: int, options: dict[str, Any]) -> tuple[int, int]:
    compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager", **options)
    compiled(*batch("gpt", rank, 0)).backward()
    return compiled.traffic.payload, sum(param.padded_numel for param in compiled.layout.params)


@pytest.mark.slow
def test_gathers_send_two_bytes_and_reductions_four_or_two(threads: Threads) -> None:
    for (sent, psi), _ in [threads.run(2, low_traffic, 1, {"dtype": torch.bfloat16})]:
        assert sent == (2 + 4) * psi
    for (sent, psi), _ in [threads.run(2, low_traffic, 1, {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16})]:
        assert sent == (2 + 2) * psi
    for (sent, psi), _ in [threads.run(2, low_traffic, 0, {"dtype": torch.bfloat16})]:
        assert sent == 2 * 4 * psi, "stage 0 gathers nothing: its casts are local"


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        pytest.param(0, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(3, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(3, torch.float16, marks=pytest.mark.nightly),
    ],
    ids=str,
)
@on_threads(2)
def test_the_loss_curve_is_that_of_ddp_with_autocast(rank: int, stage: int, dtype: torch.dtype) -> None:
    """100 steps beside DistributedDataParallel under autocast: the losses are smoothed."""
    model = make("gpt")
    compiled = zcompile.compile(copy.deepcopy(model), stage=stage, dtype=dtype, backend="eager")
    ddp = DistributedDataParallel(model)
    curves = []
    for wrapped, theirs in ((compiled, False), (ddp, True)):
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        losses = []
        for step in range(100):
            with torch.autocast("cpu", dtype=dtype, enabled=theirs):
                loss = wrapped(*batch("gpt", rank, step % 10))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses).view(-1, 10).mean(1))
    distance, end = float(((curves[0] - curves[1]).abs() / curves[1]).max()), float(curves[0][-1])
    assert distance < 0.01
    assert end < 3.0, "it learns"


@quickly("stage", range(4), [0])
@on_threads(3)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(rank: int, stage: int) -> None:
    """Rank 1's loss overflows in the second step."""
    compiled = zcompile.compile(make("mlp"), stage=stage, dtype=torch.float16, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    for step in range(3):
        before = [param.detach().clone() for param in compiled.parameters()]
        loss = compiled(*batch("mlp", rank, step))
        scaler.scale(loss * (torch.inf if (step, rank) == (1, 1) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(full(a), full(b)) for a, b in zip(before, compiled.parameters(), strict=True))
        seen.append((changed, scaler.get_scale()))
    assert seen == [(True, 1024.0), (False, 512.0), (True, 512.0)]


class Rows(nn.Module):
    """A scalar first, whose gradient stays finite when one row's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rows = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.rows).sum() + self.scale


@pytest.mark.slow
@on_threads(3)
def test_an_overflow_in_one_shard_is_seen_by_all_ranks(rank: int) -> None:
    """An overflow in a gradient of which only rank 2 keeps a part."""
    compiled = zcompile.compile(Rows(), stage=3, dtype=torch.float16, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.ones(6)
    x[5] = torch.inf
    scaler.scale(compiled(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (torch.equal(full(compiled.rows.detach()), torch.ones(6)), scaler.get_scale()) == (True, 512.0)


@quickly("backend", ["eager", "inductor"], [], slow=["eager"])
def test_autocast_around_the_call(backend: str) -> None:
    model = make("gpt")
    compiled = zcompile.compile(copy.deepcopy(model), backend=backend)
    losses = []
    for called in (compiled, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(called(*batch("gpt", 0, 0)))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        assert (full(ours.grad) - theirs.grad).norm() < 0.03 * theirs.grad.norm() + 1e-6


class InFloat32(nn.Module):
    """Computes in float32, by its own code, what would be computed in a dtype of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.last(x.float()).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_a_backward_casts_only_what_the_forward_has(breaks: bool) -> None:
    """As in eager mode, where it runs outside of autocast."""
    torch.manual_seed(0)
    model, x = InFloat32(), torch.randn(4, 7)
    compiled = zcompile.compile(copy.deepcopy(model), backend="eager")
    for called in (compiled, model):
        handle = called.first.register_forward_hook(lambda *_: print(end="")) if breaks else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = called(x)
        loss.backward()
        if handle is not None:
            handle.remove()
    for ours, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(ours.grad), theirs.grad)


@pytest.mark.slow
def test_batch_norm_keeps_its_dtype() -> None:
    compiled = zcompile.compile(make("conv"), dtype=torch.bfloat16, backend="eager")
    computed = {param.name: param.full_dtype for param in compiled.layout.params}
    assert computed["stages.0.1.weight"] is torch.float32
    assert computed["stages.0.0.weight"] is torch.bfloat16
    compiled(*batch("conv", 0, 0)).backward()


WRONG = {
    "lm_head": "'lm_head' matches no module with parameters.\n  Fix: did you mean 'head'?",
    "blocks": "'blocks' is a ModuleList, which is never called.\n  Fix: name what it holds: 'blocks.*'",
    "head": "'head' has parameters of torch.bfloat16 and torch.float32.\n  Fix: name its modules one by one",
}


@pytest.mark.parametrize("pattern", WRONG)
def test_modules_that_cannot_keep_their_dtype_are_refused(pattern: str) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    model.head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16())
    with pytest.raises(zcompile.OptionError) as refused:
        zcompile.compile(model, dtype=torch.bfloat16, keep_dtype=[pattern])
    assert WRONG[pattern] in str(refused.value)
    with pytest.raises(zcompile.OptionError, match="not a list of paths"):
        zcompile.compile(model, dtype=torch.bfloat16, keep_dtype=pattern)
    for option in ("keep_dtype", "whole", "ignore"):  # an iterator is empty where it is read again
        with pytest.raises(zcompile.OptionError, match="not a list of"):
            zcompile.compile(model, **{option: (name for name in ["head.*.weight", "blocks.*"])})
    assert type(model.head[0].weight) is nn.Parameter, "the model is as it was"


@pytest.mark.slow
def test_a_module_in_two_places_keeps_its_dtype_by_either_name() -> None:
    for name in ("first", "*", "second"):
        model = nn.Module()
        model.first = model.second = nn.Linear(3, 3)
        compiled = zcompile.compile(model, dtype=torch.bfloat16, keep_dtype=[name], backend="eager")
        assert compiled.second(torch.ones(2, 3)).dtype is torch.float32
        wrapped = vars(compiled.first)["forward"].method
        assert isinstance(wrapped, OwnDtype)
        assert not isinstance(wrapped.method, OwnDtype), "cast once"


def test_modules_that_keep_their_dtype_are_not_converted() -> None:
    compiled = zcompile.compile(nn.Sequential(nn.Linear(3, 3)), keep_dtype=["0"])
    with pytest.raises(zcompile.ParameterError, match="modules that keep_dtype= names"):
        compiled.to(torch.float64)


def other_modules(rank: int) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(zcompile.AgreementError) as refused:
        zcompile.compile(model, keep_dtype=[str(rank)], backend="eager")
    return str(refused.value)


def test_ranks_agree_on_the_modules_that_keep_their_dtype(threads: Threads) -> None:
    assert all("keep_dtype=" in said for said in threads.run(2, other_modules))


@pytest.mark.slow
@quickly("stage", range(3), [2])
@on_threads(2)
def test_kept_casts_are_renewed(rank: int, stage: int) -> None:
    """Low-precision copies kept by stages 0 to 2 follow optimizer steps and writes."""
    compiled = zcompile.compile(make("mlp"), stage=stage, dtype=torch.bfloat16, backend="eager")
    x = batch("mlp", rank, 0)
    first = compiled(*x).item()
    with torch.no_grad():
        for param in compiled.parameters():
            param.mul_(2)
    second = compiled(*x).item()
    with torch.no_grad():
        for param in compiled.parameters():
            param.div_(2)
    assert compiled(*x).item() == first != second


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return (self.inner(x) @ self.weight).float().square().mean()


@pytest.mark.filterwarnings("ignore")
def test_plain_python_computes_in_low_precision_too() -> None:
    compiled = zcompile.compile(Breaks(), dtype=torch.bfloat16, backend="eager")
    compiled(torch.randn(2, 4)).backward()
    assert compiled.weight.grad.dtype is torch.float32


# -- memory and mistakes ----------------------------------------------------------------------------------------------


def test_predicted_peak_counts_two_bytes_a_parameter() -> None:
    low, own = (zcompile.compile(GPT(), dtype=dtype, backend="eager") for dtype in (torch.bfloat16, None))
    unit = low.layout.units[1]
    assert low.layout.gathered_bytes(unit.name) == 2 * sum(param.numel for param in unit.params)
    assert own.layout.gathered_bytes(own.layout.units[1].name) == 0, (
        "alone and in their own dtype, the shards are the parameters"
    )


@pytest.mark.parametrize("option", ["dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", [torch.int32, "bf16", torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes_that_cannot_be_meant(option: str, value: object) -> None:
    with pytest.raises(zcompile.OptionError, match=f"^{option}: .* is not a dtype to compute with"):
        zcompile.compile(make("mlp"), **{option: value})  # type: ignore[arg-type]


def test_a_scaler_with_bfloat16_is_refused() -> None:
    compiled = zcompile.compile(make("mlp"), dtype=torch.bfloat16, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    before = [param.detach().clone() for param in compiled.parameters()]
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(compiled(*batch("mlp", 0, 0))).backward()
        if enabled:
            with pytest.raises(zcompile.OptimizerError, match="GradScaler: scales the loss of a model"):
                scaler.step(optimizer)
            assert all(torch.equal(full(a), full(b)) for a, b in zip(before, compiled.parameters(), strict=True))
        else:
            scaler.step(optimizer)
