"""State: saved in one stage and world, loaded in another; complete or absent; nothing half-loaded."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.models import batch, make, update
from tests.ranks import AT_ONCE, Ranks, on_ranks
from zcompile import StateError
from zcompile.state import checkpoint
from zcompile.torch_internals.distributed import close_connections, default_store, gloo_of

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
SAVED, MORE = 2, 3


def compiled(model: nn.Module, stage: int) -> zcompile.CompiledModule:
    return zcompile.compile(model, stage=stage, backend="eager")


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups of different options."""
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, {"params": [p for p in model.parameters() if p.dim() < 2]}], lr=1e-2, **options)


def part(kind: str, step: int) -> list[torch.Tensor]:
    """This rank's rows of a batch that is the same whatever the world."""
    return [tensor[dist.get_rank() :: dist.get_world_size()] for tensor in batch(kind, 0, step, size=12)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, steps: Iterable[int]) -> list[float]:
    """Losses over the whole batch."""
    losses = []
    for step in steps:
        loss = model(*part(kind, step))
        loss.backward()
        update(optimizer)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def values(model: zcompile.CompiledModule) -> dict[str, torch.Tensor]:
    return model.full_state_dict(rank0_only=False)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def error_of(act: Callable[[], object]) -> str:
    """The text of the StateError that `act` must raise."""
    with pytest.raises(StateError) as caught:
        act()
    return str(caught.value)


def mark(model: zcompile.CompiledModule, value: float) -> None:
    with torch.no_grad():
        model.scale.fill_(value)


# -- training continues ----------------------------------------------------------------------------------------------


def save_every_stage(rank: int, folder: str, kind: str) -> list[list[float]]:
    losses = []
    for stage in range(4):
        model = compiled(make(kind), stage)
        optimizer = adamw(model)
        train(model, optimizer, kind, range(SAVED))
        model.save_checkpoint(f"{folder}/{stage}", optimizer, extra=stage)
        losses.append(train(model, optimizer, kind, range(SAVED, SAVED + MORE)))
    return losses


def load_every_stage(rank: int, folder: str, kind: str, stages: list[int]) -> list[list[float]]:
    losses = []
    for stage in stages:
        model = compiled(make(kind, seed=7), stage)
        optimizer = adamw(model)
        for saved in range(4):
            assert model.load_checkpoint(f"{folder}/{saved}", optimizer) == saved
            losses.append(train(model, optimizer, kind, range(SAVED, SAVED + MORE)))
    return losses


CONTINUED: list[tuple[list[int], dict[int, list[int]]]] = [([0, 3], {3: [1, 3]}), ([1, 2], {4: [2], 1: [0]})]
"""Stages in the same world, and in others by their size."""


@pytest.mark.slow
@quickly("stages, elsewhere", CONTINUED, CONTINUED[:1])
def test_training_continues_in_every_stage_and_world(
    ranks: Ranks, tmp_path: Path, stages: list[int], elsewhere: dict[int, list[int]]
) -> None:
    want, _ = ranks.run(2, save_every_stage, str(tmp_path), "mlp")
    assert want == [want[0]] * 4
    again, _ = ranks.run(2, load_every_stage, str(tmp_path), "mlp", stages)
    assert again == [want[0]] * 8, "bit for bit in the same world"
    for world, others in elsewhere.items():
        for losses in ranks.run(world, load_every_stage, str(tmp_path), "mlp", others)[0]:
            assert losses == pytest.approx(want[0], rel=1e-5), (world, losses)


class Droppy(nn.Module):
    """Dropout, tied weights, a frozen parameter, a buffer that ranks see differently, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.embed(tokens))) * self.frozen.sum()
        return F.cross_entropy(self.head(x), targets)


def droppy_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int, data: torch.Generator
) -> list[float]:
    """This rank's own, on data that a generator gives."""
    losses = []
    for _ in range(steps):
        loss = model(*torch.randint(0, 11, (2, 8), generator=data))
        loss.backward()
        update(optimizer)
        schedule.step()
        losses.append(loss.item())
    return losses


def droppy(rank: int, stage: int) -> tuple[zcompile.CompiledModule, torch.optim.Optimizer, Any, torch.Generator]:
    torch.manual_seed(3)
    model = compiled(Droppy(), stage)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), torch.Generator().manual_seed(rank)


def save_droppy(rank: int, folder: str) -> tuple[list[float], list[float]]:
    model, optimizer, schedule, data = droppy(rank, 3)
    droppy_losses(model, optimizer, schedule, 3, data)
    extra = {"random": torch.get_rng_state(), "data": data.get_state(), "schedule": schedule.state_dict()}
    model.save_checkpoint(folder, optimizer, extra=extra)
    mean = model.norm.running_mean.tolist()
    return droppy_losses(model, optimizer, schedule, 3, data), mean


def load_droppy(rank: int, folder: str, stage: int) -> tuple[list[float], list[float]]:
    model, optimizer, schedule, data = droppy(rank + 50, stage)
    extra = model.load_checkpoint(folder, optimizer)
    torch.set_rng_state(extra["random"])
    data.set_state(extra["data"])
    schedule.load_state_dict(extra["schedule"])
    mean = model.norm.running_mean.tolist()
    assert model.head.weight is model.embed.weight
    return droppy_losses(model, optimizer, schedule, 3, data), mean


@pytest.mark.slow
def test_dropout_data_schedule_and_buffers_of_each_rank_continue_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    want = ranks.run(2, save_droppy, str(tmp_path / "droppy"))
    assert want[0][1] != want[1][1], "the ranks' running means differ"
    for stage in (1, 3):
        assert ranks.run(2, load_droppy, str(tmp_path / "droppy"), stage) == want
    means = [mean for _, mean in ranks.run(3, load_droppy, str(tmp_path / "droppy"), 2)]
    assert means == [want[0][1], want[1][1], want[0][1]], "a rank that was not there gets the first one's"


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "fused": lambda m: adamw(m, fused=True),
    "foreach": lambda m: adamw(m, foreach=True),
    "amsgrad": lambda m: adamw(m, amsgrad=True, foreach=False),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "partial": lambda m: torch.optim.Adam(list(m.parameters())[:3], lr=1e-2),
}


@pytest.mark.slow
@on_ranks(2)
def test_the_state_of_optimizers(rank: int, tmp_path: Path) -> list[str]:
    """Names of optimizers that do not continue bit for bit in another stage, after steps and before any."""
    wrong = []
    models = {stage: compiled(make("mlp"), stage) for stage in (3, 2, 0)}
    start = values(models[3])
    for name, make_optimizer in OPTIMIZERS.items():
        for steps in (0, SAVED):
            model, optimizer = models[3], make_optimizer(models[3])
            model.load_full_state_dict(start)
            train(model, optimizer, "mlp", range(steps))
            model.save_checkpoint(f"{tmp_path}/{name}", optimizer)
            want = train(model, optimizer, "mlp", range(steps, steps + 2)), values(model)
            for stage in (0, 2):
                model, optimizer = models[stage], make_optimizer(models[stage])
                train(model, optimizer, "mlp", range(5, 6))
                model.load_checkpoint(f"{tmp_path}/{name}", optimizer)
                got = train(model, optimizer, "mlp", range(steps, steps + 2)), values(model)
                if got[0] != want[0] or not same(got[1], want[1]):
                    wrong.append(f"{name} after {steps} steps, in stage {stage}")
    return wrong


@pytest.mark.slow
@on_ranks(2)
def test_options_come_from_the_checkpoint_but_not_how_a_step_is_computed(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    model = compiled(make("mlp"), 0)
    optimizer = adamw(model, fused=True)
    optimizer.param_groups[0]["lr"] = 0.125
    train(model, optimizer, "mlp", range(1))
    model.save_checkpoint(folder, optimizer)
    model = compiled(make("mlp"), 3)
    optimizer = adamw(model, foreach=True)
    model.load_checkpoint(folder, optimizer)
    train(model, optimizer, "mlp", range(1, 2))
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.125
    assert group["foreach"]
    assert not group["fused"]


def through_torch(rank: int, folder: str, stage: int) -> list[float]:
    """torch's own functions, without ours."""
    model = compiled(make("mlp", seed=stage), stage)
    optimizer = adamw(model)
    if stage == 3:
        train(model, optimizer, "mlp", range(SAVED))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if stage == 3:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(model, optimizer, "mlp", range(SAVED, SAVED + MORE))


@pytest.mark.slow
def test_states_go_through_torchs_own_functions(ranks: Ranks, tmp_path: Path) -> None:
    want = ranks.run(2, through_torch, str(tmp_path / "c"), 3)
    assert ranks.run(2, through_torch, str(tmp_path / "c"), 1) == want
    for losses in ranks.run(3, through_torch, str(tmp_path / "c"), 2):
        assert losses == pytest.approx(want[0], rel=1e-5)


# -- asynchronous ----------------------------------------------------------------------------------------------------


def slow_writes(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    write = checkpoint.Writer.write_data

    def slow(self: checkpoint.Writer, *args: Any) -> Any:
        before()
        return write(self, *args)

    monkeypatch.setattr(checkpoint.Writer, "write_data", slow)


@pytest.mark.slow
@quickly("stage", [0, 2], [2])
@on_ranks(2)
def test_training_goes_on_while_the_values_of_the_save_are_written(rank: int, tmp_path: Path, stage: int) -> None:
    folder = str(tmp_path / "c")
    model = compiled(make("mlp"), stage)
    optimizer = adamw(model)
    train(model, optimizer, "mlp", range(SAVED))
    want = values(model)
    with pytest.MonkeyPatch.context() as patch:
        slow_writes(patch, lambda: time.sleep(0.5))
        save = model.save_checkpoint(folder, optimizer, extra={"lr": 1}, asynchronous=True)
        losses = train(model, optimizer, "mlp", range(SAVED, SAVED + MORE))
        facts = [not save.done(), not Path(folder).exists()]
        model.save_checkpoint(f"{folder}-2", asynchronous=True)  # waits for the first
        facts += [save.done(), save.result() == Path(folder)]
        assert model.load_checkpoint(folder, optimizer) == {"lr": 1}
    facts += [Path(f"{folder}-2").exists(), same(values(model), want)]
    assert [*facts, train(model, optimizer, "mlp", range(SAVED, SAVED + MORE)) == losses] == [True] * 7


def fail_while_training(rank: int, folder: str) -> list[str]:
    model = compiled(make("mlp"), 2)

    def fail() -> None:
        if rank == 1:
            raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        slow_writes(patch, fail)
        first = model.save_checkpoint(folder, asynchronous=True)
        found = [error_of(first.result)]
        model.save_checkpoint(folder, asynchronous=True)
        found.append(error_of(lambda: model.save_checkpoint(folder)))  # nobody asked the one before
    model.save_checkpoint(folder)
    return found


def test_a_failed_save_is_an_error_for_whoever_comes_next(ranks: Ranks, tmp_path: Path) -> None:
    one, two = ranks.run(2, fail_while_training, str(tmp_path / "c"))
    assert one == two
    assert all("rank 1 failed: OSError: no space left on device" in text for text in one)
    assert os.listdir(tmp_path) == ["c"]


# -- bad input -------------------------------------------------------------------------------------------------------


def wrong_states(rank: int, stage: int) -> dict[str, str]:
    """Each kind of wrong state dict on the last rank alone: every rank has the error, and its state as it was."""
    model = compiled(make("mlp"), stage)
    before, plain = values(model), make("mlp", seed=4).state_dict()
    layer = plain["layers.1.weight"]
    wrong: dict[str, Any] = {
        "missing": {name: value for name, value in plain.items() if name != "layers.1.weight"},
        "renamed": {f"module.{name}": value for name, value in plain.items()},
        "unexpected": {**plain, "layers.1.wieght": layer},
        "misshapen": {**plain, "layers.1.weight": layer.T},
        "dtype": {**plain, "layers.1.weight": layer.double()},
        "no tensor": {**plain, "layers.1.weight": layer.tolist()},
    }
    found = {}
    for kind, state in wrong.items():
        state = state if rank == dist.get_world_size() - 1 else plain
        found[kind] = error_of(lambda state=state: model.load_state_dict(state))
        assert error_of(lambda state=state: model.load_full_state_dict(state)) == found[kind]
        assert same(values(model), before), kind
    found["none"] = error_of(lambda: model.load_full_state_dict(None))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_wrong_state_dicts_are_refused_on_every_rank(ranks: Ranks, stage: int) -> None:
    one, two = ranks.run(2, wrong_states, stage)
    assert one == two
    assert one["missing"].startswith("layers.1.weight: is missing from the state dict.\n  Fix: ")
    assert "did you mean 'module.scale'" in one["renamed"]
    assert one["unexpected"].startswith("layers.1.wieght: is in the state dict, but is not a parameter or buffer of")
    assert "did you mean 'layers.1.weight'" in one["unexpected"]
    assert one["misshapen"].startswith("layers.1.weight: has shape [13, 5] in the state dict, and [5, 13] in the model")
    assert "value.to(torch.float32)" in one["dtype"]
    assert one["no tensor"].startswith("layers.1.weight: is a list in the state dict")


@on_ranks(2)
def test_names_may_be_left_out_when_not_strict(rank: int) -> None:
    model = compiled(make("mlp"), 3)
    keys = model.load_state_dict({"scale": torch.tensor(4.0), "more": torch.ones(1)}, strict=False)
    assert sorted(keys.missing_keys)[:1] == ["layers.0.bias"]
    assert keys.unexpected_keys == ["more"]
    assert values(model)["scale"].item() == 4.0


def wrong_checkpoints(rank: int, folder: str) -> dict[str, str]:
    root = Path(folder)
    model = compiled(make("mlp"), 2)
    optimizer = adamw(model)
    model.save_checkpoint(root / "model")
    model.save_checkpoint(root / "adamw", optimizer)
    before = values(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=root / "torchs")
    if rank == 0:
        (root / "other").mkdir(exist_ok=True)
        (root / "other" / "thesis.tex").touch()
    dist.barrier()
    conv, sgd = compiled(make("conv"), 1), torch.optim.SGD(model.parameters(), lr=0.1)
    regrouped = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1] + [model.scale]}, {"params": [model.layers[0].bias]}]
    )
    attempts: dict[str, Callable[[], object]] = {
        "absent": lambda: model.load_checkpoint(root / "absent"),
        "torchs": lambda: model.load_checkpoint(root / "torchs"),
        "other": lambda: model.load_checkpoint(root / "other"),
        "over": lambda: model.save_checkpoint(root / "other"),
        "conv": lambda: conv.load_checkpoint(root / "model"),
        "no optimizer": lambda: model.load_checkpoint(root / "model", optimizer),
        "sgd": lambda: model.load_checkpoint(root / "adamw", sgd),
        "one group": lambda: model.load_checkpoint(root / "adamw", torch.optim.AdamW(model.parameters())),
        "groups": lambda: model.load_checkpoint(root / "adamw", regrouped),
        "extra": lambda: model.save_checkpoint(root / "extra", extra=(lambda: 0) if rank else None),
    }
    found = {name: error_of(attempt) for name, attempt in attempts.items()}
    with pytest.raises(zcompile.OptimizerError, match="parameter 0 of group 0"):
        model.save_checkpoint(root / "foreign", torch.optim.SGD([torch.zeros(1)], lr=0.1))
    assert (root / "other" / "thesis.tex").exists()
    assert same(values(model), before)
    return found


def test_wrong_checkpoints_are_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    one, two = ranks.run(2, wrong_checkpoints, str(tmp_path))
    assert one == two
    said = {
        "absent": "does not exist",
        "torchs": "was not written by compiled.save_checkpoint",
        "other": "is not a complete checkpoint",
        "over": "has files, but no checkpoint",
        "conv": "stages.0.0.weight: is missing from ",
        "no optimizer": "has no optimizer state",
        "sgd": "optimizer: is SGD, the checkpoint has the state of AdamW",
        "one group": "optimizer: has 1 parameter groups, the checkpoint's has 2",
        "groups": "scale: is not in the checkpoint's group 0",
        "extra": "extra: cannot be pickled",
    }
    assert {name: text for name, text in one.items() if said[name] not in text} == {}


def apart(rank: int, folder: str) -> str:
    model = compiled(make("mlp"), 3)
    with pytest.raises(zcompile.AgreementError) as caught:
        model.save_checkpoint(f"{folder}/{rank}")
    return str(caught.value)


def test_ranks_that_save_to_different_folders_are_told(ranks: Ranks, tmp_path: Path) -> None:
    one, _ = ranks.run(2, apart, str(tmp_path))
    assert "/0')" in one
    assert "/1')" in one


# -- whole -----------------------------------------------------------------------------------------------------------


def export(rank: int, folder: str, stage: int) -> list[bool]:
    torch.manual_seed(2)
    model = compiled(Droppy(), stage)
    whole = model.full_state_dict()
    assert bool(whole) == (rank == 0)
    everywhere = model.full_state_dict(rank0_only=False)
    model.save_full_state_dict(f"{folder}/whole.safetensors")
    model.save_full_state_dict(f"{folder}/whole.pt")
    from safetensors.torch import load_file

    plain = Droppy()
    facts = [str(plain.load_state_dict(everywhere, strict=True)) == "<All keys matched successfully>"]
    facts.append(everywhere["head.weight"].data_ptr() != everywhere["embed.weight"].data_ptr())
    facts.append(same(dict(sorted(load_file(f"{folder}/whole.safetensors").items())), dict(sorted(everywhere.items()))))
    facts.append(same(torch.load(f"{folder}/whole.pt"), everywhere))
    facts += [not isinstance(value, DTensor) and value.is_contiguous() for value in everywhere.values()]
    return facts


@pytest.mark.parametrize("stage", [0, 3])
def test_the_full_state_loads_into_the_plain_model(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("safetensors")
    for facts in ranks.run(3, export, str(tmp_path), stage):
        assert all(facts), facts
    assert sorted(os.listdir(tmp_path)) == ["whole.pt", "whole.safetensors"]


@pytest.mark.slow
@quickly("stage, kind", [(stage, kind) for stage in (0, 1, 3) for kind in ("mlp", "conv")], [(3, "mlp")], pairs=False)
@on_ranks(3)
def test_a_full_state_is_taken_by_every_rank_or_sent_by_the_first(rank: int, kind: str, stage: int) -> None:
    model, want = compiled(make(kind), stage), dict(make(kind, seed=8).state_dict())
    model(*part(kind, 0)) if stage < 3 else None  # stages 1 and 2 keep a copy, which must not be used again
    model.load_full_state_dict(want)
    facts = [same(values(model), want)]
    other = dict(make(kind, seed=9).state_dict())
    model.load_full_state_dict(other if rank == 0 else None)
    facts.append(same(values(model), other))
    model.load_full_state_dict(model.full_state_dict())
    facts.append(same(values(model), other))
    plain = make(kind, seed=9)
    loss = plain(*part(kind, 1))
    facts = [*facts, torch.equal(model(*part(kind, 1)), loss)]
    assert facts == [True] * 4


@pytest.mark.slow
@on_ranks(2)
def test_copies_in_lower_precision_follow_what_is_loaded(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    facts = []
    for stage in (0, 1):
        model = zcompile.compile(make("mlp"), stage=stage, dtype=torch.bfloat16, backend="eager")
        before = model(*part("mlp", 0)).item()
        model.save_checkpoint(folder)
        mark(model, 9.0)
        facts.append(model(*part("mlp", 0)).item() != before)
        model.load_checkpoint(folder)
        facts.append(model(*part("mlp", 0)).item() == before)
    assert facts == [True] * 4


@quickly("stage", [0, 1, 3], [0])
@on_ranks(2)
def test_a_backward_over_values_from_before_a_load_is_refused(rank: int, stage: int) -> None:
    model = compiled(make("mlp"), stage)
    loss = model(*part("mlp", 0))
    model.load_full_state_dict(make("mlp", seed=1).state_dict())
    with pytest.raises(zcompile.BackwardError, match="parameters changed"):
        loss.backward()


def without_safetensors(rank: int, folder: str) -> str:
    model = compiled(make("mlp"), 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "safetensors.torch", None)
        return error_of(lambda: model.save_full_state_dict(f"{folder}/a.safetensors"))


def test_safetensors_missing_is_an_error_that_says_so(ranks: Ranks, tmp_path: Path) -> None:
    (text,) = ranks.run(1, without_safetensors, str(tmp_path))
    assert "pip install 'zcompile[safetensors]'" in text


def hugging_face(rank: int, folder: str) -> bool:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=2, n_head=2)
    model = compiled(GPT2LMHeadModel(config), 3)
    model.save_full_state_dict(f"{folder}/model.safetensors")
    if rank == 0:
        config.save_pretrained(folder)
        loaded, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    whole = values(model)
    return rank > 0 or all(torch.equal(value, whole[name]) for name, value in loaded.state_dict().items())


@pytest.mark.slow
def test_hugging_face_loads_the_file(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert ranks.run(2, hugging_face, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("what", ["save", "load"])
@on_ranks(3)
def test_ranks_do_not_wait_for_one_whose_message_has_failed(rank: int, tmp_path: Path, what: str) -> None:
    """A message fails on rank 0, whose process goes on: as where another rank has died before it answered."""
    folder = str(tmp_path / "c")
    model = zcompile.compile(make("mlp"), backend="eager")
    model.save_checkpoint(folder).result()
    broken = mock.patch.object(dcp, what, side_effect=RuntimeError("Connection closed by peer"))
    act = {"save": model.save_checkpoint, "load": model.load_checkpoint}[what]
    started = time.perf_counter()
    with broken if rank == 0 else contextlib.nullcontext(), pytest.raises(StateError) as error:
        act(folder)
    found, seconds = error.value.problem, time.perf_counter() - started
    assert found.startswith("a rank failed or is gone: ")
    assert seconds < AT_ONCE


@on_ranks(3)
def test_hanging_up_reaches_ranks_beyond_one_that_has_died(rank: int) -> None:
    """Rank 1 is gone; rank 0 hangs up, which has to end the wait of rank 2 for rank 0."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=60), backend="gloo")
    dist.barrier(group)
    if rank == 1:
        dist.destroy_process_group(group)  # its connections end as with the process
    elif rank == 0:
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 1, group)
        close_connections(gloo_of(group), 0, 3)
        default_store().wait(["released"], timedelta(seconds=20))  # its process goes on
    else:
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 0, group)
        default_store().set("released", "")


def write_slowly(rank: int, folder: str) -> float:
    """A rank that writes for longer than the ranks of the training's group wait for each other."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3), backend="gloo")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("slow",))
    model = zcompile.compile(make("mlp"), mesh=mesh, backend="eager")
    finish = checkpoint.Writer.write_data

    def slow(self: checkpoint.Writer, *args: Any) -> Any:
        time.sleep(5)
        return finish(self, *args)

    started = time.perf_counter()
    with mock.patch.object(checkpoint.Writer, "write_data", slow) if rank else contextlib.nullcontext():
        model.save_checkpoint(folder).result()
    return time.perf_counter() - started


@pytest.mark.slow
def test_a_rank_may_write_for_longer_than_a_message_may_take(ranks: Ranks, tmp_path: Path) -> None:
    assert min(ranks.run(2, write_slowly, str(tmp_path / "c"))) >= 5
