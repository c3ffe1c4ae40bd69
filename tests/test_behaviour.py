"""What a training script may do with a compiled module, and the errors for what it may not."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import quickly
from tests.models import GPT, batch, make, update


def pair(kind: str, **options: Any) -> tuple[zcompile.CompiledModule, nn.Module]:
    """A compiled model in a world of one, and the same model untouched."""
    model = make(kind)
    reference = copy.deepcopy(model)
    return zcompile.compile(model, **{"backend": "eager", **options}), reference


def assert_same_gradients(compiled: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, ours), (same, theirs) in zip(compiled.named_parameters(), reference.named_parameters(), strict=True):
        assert name == same
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            full = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            torch.testing.assert_close(full, theirs.grad, rtol=1e-5, atol=tolerance)


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_shards_under_the_models_own_names(stage: int) -> None:
    compiled, reference = pair("mlp", stage=stage)
    assert list(compiled.state_dict()) == list(reference.state_dict())
    for name, param in compiled.named_parameters():
        assert isinstance(param, DTensor), name
        assert param.placements[0].is_shard(0) == (param.dim() > 0)


def test_stage_0_keeps_plain_parameters() -> None:
    compiled, _ = pair("mlp", stage=0)
    assert not any(isinstance(param, DTensor) for param in compiled.parameters())


def test_the_full_storage_is_free_when_compile_returns() -> None:
    model = make("gpt")
    old = list(model.parameters())
    storages = [StorageWeakRef(param.untyped_storage()) for param in old]
    zcompile.compile(model, backend="eager")
    assert all(storage.expired() for storage in storages)
    assert len(old) == len(storages), "though the old parameters are held"


def test_buffers_modules_and_attributes_are_the_models_own() -> None:
    compiled, reference = pair("conv")
    assert list(dict(compiled.named_buffers())) == list(dict(reference.named_buffers()))
    assert [name for name, _ in compiled.named_modules()] == [name for name, _ in reference.named_modules()]
    compiled.eval()
    assert not compiled.stages[0].training


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_batch_norm_statistics_are_those_of_eager_training(stage: int) -> None:
    compiled, reference = pair("conv", stage=stage)
    for step in range(3):
        compiled(*batch("conv", 0, step)).backward()
        reference(*batch("conv", 0, step)).backward()
    for (name, ours), (_, theirs) in zip(compiled.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


LENGTHS = [(4, 16), (2, 16), (7, 9), (3, 5), (5, 12), (6, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "lengths"),
    [("eager", LENGTHS[:4]), ("inductor", LENGTHS[:3]), pytest.param("inductor", LENGTHS, marks=pytest.mark.nightly)],
)
def test_new_batch_and_sequence_lengths_work_without_a_program_for_each(
    backend: str, lengths: list[tuple[int, int]]
) -> None:
    compiled, reference = pair("gpt", backend=backend)
    for size, length in lengths:
        tokens, targets = (x[:, :length] for x in batch("gpt", 0, 0, size))
        ours, theirs = compiled(tokens, targets), reference(tokens, targets)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs)
    assert_same_gradients(compiled, reference, 1e-5)
    assert len(compiled.programs) <= 6


@quickly("stage", [0, 1, 2, 3], [0, 3])
def test_no_grad_eval_and_inference_mode_gather_and_release_too(stage: int) -> None:
    compiled, reference = pair("conv", stage=stage)
    compiled.eval()
    reference.eval()
    x, y = batch("conv", 0, 0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(compiled(x, y), reference(x, y))


def test_keyword_arguments_and_input_gradients() -> None:
    compiled, reference = pair("mlp")
    x, y = batch("mlp", 0, 0)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(x=ours, y=y).backward()
    reference(theirs, y).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.slow
def test_two_forwards_before_their_backwards_in_any_order() -> None:
    compiled, reference = pair("gpt")
    for model in (compiled, reference):
        first, second = model(*batch("gpt", 0, 0)), model(*batch("gpt", 0, 1))
        second.backward()
        first.backward()
    assert_same_gradients(compiled, reference)


@quickly("backend", ["eager", "inductor"], ["eager"])
def test_a_graph_may_be_retained(backend: str) -> None:
    compiled, reference = pair("mlp", backend=backend)
    for model in (compiled, reference):
        loss = model(*batch("mlp", 0, 0))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(compiled, reference)


class Mixed(nn.Module):
    """Tied weights far apart, a frozen and an unused parameter, dropout, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.blocks[1][0].weight.requires_grad_(False)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(x).square().mean(), {"hidden": x, "number": 3}


@quickly("stage", [0, 1, 2, 3], [0, 3])
def test_tied_frozen_and_unused_parameters(stage: int) -> None:
    torch.manual_seed(0)
    model = Mixed()
    reference = copy.deepcopy(model)
    compiled = zcompile.compile(model, stage=stage, prefetch=1, backend="eager")
    for either in (compiled, reference):
        torch.manual_seed(5)
        loss, more = either(torch.arange(6).view(2, 3))
        (loss + more["hidden"].sum()).backward()
    assert_same_gradients(compiled, reference)
    assert compiled.head.weight is compiled.embed.weight


class Packed(nn.Module):
    """Parameters read in pieces: split, chunk, unbind, and attention's packed projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.pieces = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.pieces.chunk(2)
        for attention in self.attention:
            x = x + attention(x, x + self.pieces.unbind()[0], x * first[0])[0]
        return (x * second[1]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_read_in_pieces(stage: int) -> None:
    torch.manual_seed(0)
    model = Packed()
    reference = copy.deepcopy(model)
    compiled = zcompile.compile(model, stage=stage, backend="eager")
    x = torch.randn(2, 5, 8)
    for either in (compiled, reference):
        either(x).backward()
    assert_same_gradients(compiled, reference)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def body(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.drop(self.layers[index](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = checkpoint(self.body, index, x, use_reentrant=False)
        return x.sum()


@quickly("backend", ["eager", "inductor"], ["eager"])
def test_checkpointed_dropout_has_the_same_mask_when_recomputed(backend: str) -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    reference = copy.deepcopy(model)
    compiled = zcompile.compile(model, backend=backend)
    x = torch.randn(4, 8)
    for either in (compiled, reference):
        torch.manual_seed(1)
        either(x).backward()
    assert_same_gradients(compiled, reference)


def test_hooks_after_accumulation_run() -> None:
    compiled, _ = pair("mlp")
    called: list[torch.Size] = []
    for param in compiled.parameters():
        param.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.shape))
    compiled(*batch("mlp", 0, 0)).backward()
    assert len(called) == len(list(compiled.parameters()))


def test_a_hook_that_would_not_run_is_refused() -> None:
    compiled, _ = pair("mlp")
    compiled.layers[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(zcompile.ParameterError, match=r"layers\.0\.weight: has a hook"):
        compiled(*batch("mlp", 0, 0))


@pytest.mark.slow
def test_units_by_pattern() -> None:
    compiled = zcompile.compile(make("gpt"), units=["blocks.*.attention", "blocks.*.mlp"], backend="eager")
    assert "blocks.0.mlp" in [unit.name for unit in compiled.layout.units]
    compiled(*batch("gpt", 0, 0)).backward()


def test_freezing_a_parameter_later_makes_a_program_that_does_not_reduce_it() -> None:
    compiled, reference = pair("mlp")
    compiled(*batch("mlp", 0, 0)).backward()
    for model in (compiled, reference):
        model.layers[1].weight.requires_grad_(False)
        model.zero_grad()
        model(*batch("mlp", 0, 1)).backward()
    assert_same_gradients(compiled, reference)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_frozen_before_the_backward_gets_no_gradient(stage: int) -> None:
    compiled, reference = pair("mlp", stage=stage)
    for held in (False, True):
        for model in (compiled, reference):
            model.zero_grad()
            with compiled.no_sync() if held else nullcontext():
                loss = model(*batch("mlp", 0, 0))
                model.layers[1].weight.requires_grad_(False)
                loss.backward()
            assert model.layers[1].weight.grad is None
            assert model.layers[1].bias.grad is not None
            model.layers[1].weight.requires_grad_(True)
            model(*batch("mlp", 0, 1)).backward()
        assert_same_gradients(compiled, reference)


def test_an_exception_in_the_models_code_leaves_shards_in_place() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    compiled = zcompile.compile(Picky(), backend="eager")
    with pytest.raises(Exception, match=r"shape|size"):
        compiled(torch.randn(2, 5))
    assert all(isinstance(param, DTensor) for param in compiled.parameters())
    compiled(torch.randn(2, 4)).backward()


# -- stages 1 and 2 keep full copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_kept_copies_follow_every_kind_of_optimizer(optimizer: dict[str, bool]) -> None:
    compiled, reference = pair("mlp", stage=1)
    ours = torch.optim.AdamW(compiled.parameters(), lr=0.1, **optimizer)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, **optimizer)
    for step in range(3):
        losses = compiled(*batch("mlp", 0, step)), reference(*batch("mlp", 0, step))
        torch.testing.assert_close(*losses)
        for loss, either in zip(losses, (ours, theirs), strict=True):
            loss.backward()
            update(either)


def test_a_write_past_the_optimizer_is_seen() -> None:
    compiled, reference = pair("mlp", stage=2)
    with torch.no_grad():
        for model in (compiled, reference):
            model(*batch("mlp", 0, 0))
            for param in model.parameters():
                param.data.mul_(2)
        torch.testing.assert_close(compiled(*batch("mlp", 0, 0)), reference(*batch("mlp", 0, 0)))


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage: 4 is not a ZeRO stage"),
        ({"stage": -1}, "stage: -1"),
        ({"stage": True}, "stage: True"),
        ({"prefetch": -1}, "prefetch: -1"),
        ({"prefetch": 1.5}, r"prefetch: 1\.5"),
        ({"backend": "inducter"}, "did you mean 'inductor'"),
        ({"units": ["layer.*"]}, "'layer.\\*' matches no module"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(zcompile.OptionError, match=message):
        zcompile.compile(make("mlp"), **options)


def test_a_pipeline_of_another_stage() -> None:
    with pytest.raises(zcompile.OptionError, match="stage: is 3, but passes is a pipeline of stage 1"):
        zcompile.compile(make("mlp"), passes=zcompile.pipeline(stage=1))


def test_an_unknown_pass_names_the_nearest() -> None:
    with pytest.raises(zcompile.PipelineError, match="did you mean 'pack_small'"):
        zcompile.compile(make("mlp"), passes={"pack_smal": None})


@pytest.mark.gpu
def test_parameters_on_several_devices() -> None:
    model = make("mlp")
    model.layers[2].to("cuda")
    with pytest.raises(zcompile.ModelError, match=r"layers\.2\.weight"):
        zcompile.compile(model)


def test_a_model_compiled_twice() -> None:
    compiled, _ = pair("mlp")
    with pytest.raises(zcompile.ModelError, match="is sharded by zcompile already"):
        zcompile.compile(compiled)


def test_the_old_parameters_are_of_no_use_to_anybody() -> None:
    model = make("mlp")
    old = list(model.parameters())
    optimizer = torch.optim.SGD(old, lr=0.1)
    compiled = zcompile.compile(model, backend="eager")
    compiled(*batch("mlp", 0, 0)).backward()
    before = [param.grad.to_local().clone() for param in compiled.parameters()]
    with pytest.raises(zcompile.OptimizerError, match=r"scale: SGD holds this parameter from before"):
        optimizer.step()
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(old, 1.0),
        lambda: torch.optim.SGD(old, lr=0.1),
        lambda: optimizer.zero_grad(),
        lambda: old[0].sum(),
        lambda: old[0].grad,
    ):
        with pytest.raises(zcompile.ParameterError, match=r"scale: is held from before zcompile\.compile"):
            use()
    assert all(
        torch.equal(param.grad.to_local(), grad) for param, grad in zip(compiled.parameters(), before, strict=True)
    )
    assert repr(old[0]) == "RetiredParameter('scale')"


def test_several_ranks_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(zcompile.GroupError, match="WORLD_SIZE is 2"):
        zcompile.compile(make("mlp"))


def test_a_second_backward_through_a_freed_graph() -> None:
    compiled, _ = pair("mlp")
    loss = compiled(*batch("mlp", 0, 0))
    loss.backward()
    with pytest.raises(zcompile.BackwardError, match="retain_graph=True"):
        loss.backward()


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x).square().sum(), self.other(x).square().sum()


def test_backwards_of_two_results_one_after_the_other() -> None:
    """Plain PyTorch takes it, of results that share no graph: what is compiled is told what to do."""
    plain = TwoResults()
    compiled, x = zcompile.compile(copy.deepcopy(plain), stage=3, backend="eager"), torch.ones(3, 4)
    one, other = compiled(x)
    one.backward()
    with pytest.raises(zcompile.BackwardError, match=r"of another result(.|\n)*on the sum of the losses, or the first"):
        other.backward()
    compiled.zero_grad()
    one, other = compiled(x)
    one.backward(retain_graph=True)
    other.backward()
    sum(plain(x)).backward()  # type: ignore[union-attr]
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("fused", [True, False])
def test_a_backward_after_the_parameters_changed(fused: bool) -> None:
    compiled, _ = pair("mlp")
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=fused)
    compiled(*batch("mlp", 0, 0)).backward()
    loss = compiled(*batch("mlp", 0, 0))
    optimizer.step()
    with pytest.raises(zcompile.BackwardError, match="parameters changed since the forward"):
        loss.backward()


def test_a_parameter_read_past_its_module() -> None:
    class Hoarder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.weights = [layer.weight for layer in self.layers]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x).sum() + sum(weight.pow(2).sum() for weight in self.weights)

    compiled = zcompile.compile(Hoarder(), backend="eager")
    with pytest.raises(zcompile.ParameterError, match=r"layers\.0\.weight: is held from before(?s:.*)not from a list"):
        compiled(torch.randn(2, 4))


def test_two_parameters_in_one_memory() -> None:
    model = make("mlp")
    model.layers[0].bias = nn.Parameter(model.layers[0].weight.data[:, 0])
    model.layers[1].weight = nn.Parameter(model.layers[0].weight.data[:5])
    with pytest.raises(zcompile.ModelError, match="shares its memory with"):
        zcompile.compile(model)


def test_a_stale_backward_is_refused_though_the_loss_comes_in_a_dataclass() -> None:
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Output:
            return Output(self.linear(x).sum())

    compiled = zcompile.compile(Wrapped(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(torch.randn(2, 4)).loss.backward()
    output = compiled(torch.randn(2, 4))
    optimizer.step()
    with pytest.raises(zcompile.BackwardError, match="parameters changed"):
        output.loss.backward()


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "writes a parameter":
            with torch.no_grad():
                self.linear.weight.mul_(2)
        if self.kind == "assigns data":
            self.linear.weight.data = self.linear.weight.data * 2
        y = self.linear(x).sum()
        return (y, self.linear.weight.t()) if self.kind == "returns a parameter" else y


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "writes a parameter",
            r"linear\.weight: the model's forward writes to this parameter at .*test_behaviour.py:\d+",
        ),
        ("assigns data", r"linear\.weight: the model's forward writes to this parameter at .*test_behaviour.py:\d+"),
        ("returns a parameter", r"linear\.weight: result 1 of the model is this parameter"),
    ],
)
def test_code_that_cannot_be_sharded(kind: str, message: str) -> None:
    compiled = zcompile.compile(Odd(kind), backend="eager")
    with pytest.raises(zcompile.CaptureError, match=message):
        compiled(torch.randn(2, 4))


def test_a_disabled_compiler_is_refused_before_it_reads_freed_memory() -> None:
    compiled, _ = pair("mlp")
    with torch.compiler.set_stance("force_eager"), pytest.raises(zcompile.CaptureError, match="was not compiled"):
        compiled(*batch("mlp", 0, 0))


def test_a_replaced_parameter() -> None:
    compiled, _ = pair("mlp")
    compiled.layers[0].weight = nn.Parameter(torch.randn(13, 7))
    with pytest.raises(zcompile.ParameterError, match=r"layers\.0\.weight: was replaced"):
        compiled(*batch("mlp", 0, 0))


def test_a_sharded_model_is_not_moved() -> None:
    compiled, _ = pair("mlp")
    with pytest.raises(zcompile.ParameterError, match="a sharded model cannot be moved"):
        compiled.to("meta")


# -- looking inside ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_explain_and_dump_tell_of_every_unit_and_pass(tmp_path: Any) -> None:
    compiled = zcompile.compile(GPT(layers=2), backend="eager", dump=tmp_path)
    assert "No program yet" in compiled.explain()
    compiled(*batch("gpt", 0, 0)).backward()
    page = compiled.explain()
    for unit in compiled.layout.units:
        assert unit.name in page
    written = {path.name for path in (tmp_path / "program_0").iterdir()}
    assert {f"{i:02}_{name}.py" for i, name in enumerate(compiled.pipeline.names, 1)} <= written
    assert {"00_capture.py", "forward.py", "backward.py"} <= written
    assert (tmp_path / "program_0" / "forward.py").read_text() == str(compiled.programs[0])
