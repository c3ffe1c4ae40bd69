"""Starting on meta: which values a model gets, from where, and how little memory it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from benchmarks.common.ranks import call_alone
from benchmarks.memory import meta_start
from tests.models import GPT, batch, make, update
from tests.ranks import Ranks
from tests.starts import Layer, Stack, Values, assert_equal, compiled_from_meta, on_meta, values_of

ROOT = Path(__file__).parent.parent
# -- the model's own code ----------------------------------------------------------------------------------------------


def test_reset_parameters_gives_the_values_of_construction_in_another_order() -> None:
    found = values_of(compiled_from_meta(Stack))
    for name, wanted in values_of(Stack()).items():
        if "norm" in name:
            assert torch.equal(found[name], wanted)
        else:  # uniform within the bound of the layer's fan-in
            bound = (4 if name.startswith("inner") else 6) ** -0.5
            assert 0 < found[name].abs().max() <= bound
    assert not torch.equal(found["layers.0.linear.weight"], found["layers.1.linear.weight"])


class LayerWithInit(Layer):
    def init_weights(self) -> None:
        nn.init.constant_(self.linear.weight, 3.0)


class BlockInit(Stack):
    layer = LayerWithInit


def test_init_weights_of_a_block_comes_after_reset_parameters() -> None:
    found = values_of(compiled_from_meta(BlockInit))
    assert (found["layers.2.linear.weight"] == 3).all()
    assert found["layers.2.linear.bias"].abs().max() > 0


class RootInit(Stack):
    """Counts, too, what has memory while it runs; and scales by depth, as only the root can."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[set[str]] = []

    def init_weights(self) -> None:
        self.seen.append({name.rpartition(".")[0] for name, p in self.named_parameters() if not p.is_meta})
        for depth, layer in enumerate(self.layers):
            layer.linear.weight.data.fill_(depth)  # past autograd's version counter
        self.head.weight = nn.Parameter(torch.full_like(self.head.weight, 7))  # a parameter of its own


def test_init_weights_of_the_root_serves_one_unit_at_a_time() -> None:
    compiled = compiled_from_meta(RootInit)
    found = values_of(compiled)
    assert [found[f"layers.{depth}.linear.weight"].unique().tolist() for depth in range(3)] == [[0], [1], [2]]
    assert (found["head.weight"] == 7).all()
    blocks = [{f"layers.{depth}.linear", f"layers.{depth}.norm"} for depth in range(3)]
    # The head is replaced by one that has memory on every turn, before its own too; nothing keeps that.
    assert [seen - {"head"} for seen in compiled.seen] == [{"inner"}, *blocks, set()]


class HookInit(Stack):
    """The convention of Hugging Face: called for each module, children first."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(1.0)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, Layer):
            module.linear.weight.data.mul_(0.5)
        elif isinstance(module, HookInit):  # around several units, and last
            module.head.weight.data.add_(4.0)

    def init_weights(self) -> None:
        raise AssertionError("_init_weights(module) is enough")


def test_init_weights_of_each_module_is_called_children_first() -> None:
    found = values_of(compiled_from_meta(HookInit))
    assert (found["inner.weight"] == 1).all()
    assert (found["head.weight"] == 5).all()
    assert (found["layers.1.linear.weight"] == 0.5).all()
    assert (found["layers.1.linear.bias"] == 0).all()


class OneUnit(nn.Module):
    """No blocks: all that belongs to the root is in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.linear = nn.Linear(3, 3)

    def init_weights(self) -> None:
        nn.init.constant_(self.scale, 2.0)


def test_a_model_of_one_unit_is_served() -> None:
    found = values_of(compiled_from_meta(OneUnit))
    assert found["scale"] == 2
    assert found["linear.weight"].abs().max() > 0


class TwoUnits(nn.Module):
    """All parameters are in two blocks; the root has a buffer that its own code sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.register_buffer("shift", torch.zeros(3))

    def init_weights(self) -> None:
        self.shift.fill_(5)


def test_code_around_two_units_also_runs_after_both() -> None:
    compiled = compiled_from_meta(TwoUnits)
    assert len(compiled._engine.runtime.layout.units) == 2
    assert (values_of(compiled)["shift"] == 5).all()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))


def test_modules_of_torch_that_reset_under_a_private_name_are_served() -> None:
    found = values_of(compiled_from_meta(Attending))
    assert (found["layers.0.self_attn.out_proj.bias"] == 0).all()  # the attention's reset comes after its child's
    assert found["layers.0.self_attn.in_proj_weight"].abs().max() > 0


# -- buffers -----------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """No parameters, so no unit; its buffer is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / 10 ** torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        self.frequencies = 1 / 10 ** torch.arange(4.0)


class WithBuffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.layers[1].rotary = Rotary()
        self.layers[1].norm = nn.BatchNorm1d(6)
        self.scale = nn.BatchNorm1d(2, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.rotary.frequencies * self.layers[1].rotary.frequencies)


@pytest.mark.slow
def test_buffers_of_units_and_of_modules_without_parameters_are_those_of_construction() -> None:
    compiled = compiled_from_meta(WithBuffers)
    wanted = dict(WithBuffers().named_buffers())
    assert len(wanted) == 8
    assert_equal(dict(compiled.named_buffers()), wanted)
    compiled(torch.randn(5, 4)).backward()
    assert compiled.layers[1].norm.num_batches_tracked == 1


def test_buffers_that_are_not_persistent_come_from_code_when_there_are_weights() -> None:
    source = WithBuffers()
    source.scale.running_mean.fill_(4)
    compiled = compiled_from_meta(WithBuffers, weights=source.state_dict())
    assert_equal(values_of(compiled), values_of(source))


# -- tied, mixed -------------------------------------------------------------------------------------------------------


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear.weight = self.layers[0].linear.weight


def test_tied_parameters_stay_one_and_either_name_of_the_weights_suffices() -> None:
    source = Tied()
    for left_out in ("layers.0.linear.weight", "layers.2.linear.weight"):
        weights = {name: value for name, value in source.state_dict().items() if name != left_out}
        compiled = compiled_from_meta(Tied, weights=weights)
        assert compiled.layers[2].linear.weight is compiled.layers[0].linear.weight
        assert_equal(values_of(compiled), values_of(source))
    compiled = compiled_from_meta(Tied)
    assert compiled.layers[2].linear.weight is compiled.layers[0].linear.weight


def test_of_a_mixed_model_only_what_is_on_meta_gets_values() -> None:
    model = on_meta(HookInit)
    model.layers[1].linear.weight = nn.Parameter(torch.full((6, 6), 9.0))
    found = values_of(zcompile.compile(model, backend="eager"))
    assert (found["layers.1.linear.weight"] == 9).all()
    assert (found["layers.2.linear.weight"] == 0.5).all()


def test_flags_of_parameters_survive() -> None:
    model = on_meta(Stack)
    model.inner.weight.requires_grad_(False)
    compiled = zcompile.compile(model, backend="eager")
    assert [name for name, p in compiled.named_parameters() if not p.requires_grad] == ["inner.weight"]


# -- errors ------------------------------------------------------------------------------------------------------------


class Forgotten(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].gain = nn.Parameter(torch.ones(6))


class PartlyWritten(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].gain = nn.Parameter(torch.ones(6))

    def init_weights(self) -> None:
        self.layers[1].gain[:3].fill_(1)


class ForgottenBuffer(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


class Mixing(Stack):
    def init_weights(self) -> None:
        self.layers[1].linear.weight.copy_(self.layers[0].linear.weight)


class Deciding(Stack):
    def init_weights(self) -> None:
        if self.inner.weight.sum() > 0:
            self.inner.weight.neg_()


class Reshaping(Stack):
    def init_weights(self) -> None:
        self.head.weight = nn.Parameter(torch.zeros(3, 6))


class Stray(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(3)


@pytest.mark.parametrize(
    ("build", "subject", "message"),
    [
        (Forgotten, "layers.1.gain", r"nothing gives it values.*\n.*give layers.1 a reset_parameters\(\)"),
        (PartlyWritten, "layers.1.gain", "nothing gives it values"),
        (ForgottenBuffer, "mask", "nothing gives it values"),
        (Mixing, "Mixing", r"init_weights\(\) fails while of all parameters only those of layers.1 have memory"),
        (Deciding, "Deciding", r"init_weights\(\) fails"),
        (Reshaping, "head.weight", r"puts \[3, 6\] torch.float32 in place of \[2, 6\]"),
        (Stray, "table", "neither a parameter nor a buffer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_get_values_is_named_and_the_model_stays_as_it_was(
    build: type[nn.Module], subject: str, message: str
) -> None:
    model = on_meta(build)
    before = [*model.parameters(), *model.buffers()]
    with pytest.raises(zcompile.ModelError, match=message) as caught:
        zcompile.compile(model, backend="eager")
    assert caught.value.subject == subject
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))


# -- several ranks -----------------------------------------------------------------------------------------------------


def start_values(rank: int, stage: int, kind: str) -> Values:
    builds = {"gpt": GPT, "root": RootInit, "buffers": WithBuffers}
    return values_of(compiled_from_meta(builds[kind], seed=5 + rank, stage=stage))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "root", "buffers"])
def test_values_depend_on_the_first_ranks_seed_alone(ranks: Ranks, kind: str) -> None:
    (wanted,) = ranks.run(1, start_values, 0, kind)
    for world, stage in [(1, 3), (2, 0), (2, 2), (3, 1)]:
        for found in ranks.run(world, start_values, stage, kind):
            assert_equal(found, wanted)


def train(rank: int, meta: bool, stage: int, backend: str) -> Values:
    weights = make("gpt", seed=3).state_dict()
    if rank and meta:
        weights = {name: torch.zeros_like(value) for name, value in weights.items()}  # the first rank's are taken
    model = on_meta(GPT) if meta else make("gpt", seed=3)
    mesh = init_device_mesh("cpu", (2,)) if meta else None
    compiled = zcompile.compile(model, stage=stage, backend=backend, mesh=mesh, weights=weights if meta else None)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    for step in range(3):
        compiled(*batch("gpt", rank, step)).backward()
        update(optimizer)
    return values_of(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_after_a_start_on_meta_is_that_after_an_ordinary_start(ranks: Ranks, stage: int) -> None:
    wanted = ranks.run(2, train, False, stage, "eager")[0]
    for found in ranks.run(2, train, True, stage, "eager"):
        assert_equal(found, wanted)


@pytest.mark.slow
def test_an_optimizer_over_parameters_on_meta_is_refused() -> None:
    for stage in (0, 3):
        model = on_meta(Stack)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = zcompile.compile(model, stage=stage, backend="eager")
        compiled(torch.randn(3, 4)).backward()
        with pytest.raises(zcompile.OptimizerError, match="build it afterwards"):
            optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_over_parameters_on_meta_is_pointed_at_the_shards(stage: int) -> None:
    model = on_meta(Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = zcompile.compile(model, optimizer=optimizer, stage=stage, dtype=torch.bfloat16, backend="eager")
    before = values_of(compiled)
    compiled(torch.randn(3, 4)).backward()
    optimizer.step()
    assert not torch.equal(values_of(compiled)["head.weight"], before["head.weight"])


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    return model


@pytest.mark.slow
def test_a_hugging_face_model_starts_from_its_own_code_and_from_its_own_folder(tmp_path: Path) -> None:
    tokens = torch.randint(0, 64, (2, 8))
    compiled = compiled_from_meta(llama)
    found = values_of(compiled)
    assert 0.015 < found["model.layers.1.mlp.up_proj.weight"].std() < 0.025  # config.initializer_range is 0.02
    assert (found["model.norm.weight"] == 1).all()
    assert compiled.lm_head.weight is compiled.model.embed_tokens.weight
    assert torch.equal(found["model.rotary_emb.inv_freq"], llama().model.rotary_emb.inv_freq)
    compiled(input_ids=tokens, use_cache=False).logits.square().mean().backward()

    source = llama()
    source.save_pretrained(tmp_path)
    restored = compiled_from_meta(llama, weights=tmp_path)
    assert_equal(values_of(restored), values_of(source))
    logits = restored(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(logits, source(input_ids=tokens, use_cache=False).logits)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_start_on_meta_takes_one_unit_beside_the_shards() -> None:
    """110 million parameters in a world of 64, measured by the kernel in a process of its own."""

    def measured(*flags: str) -> dict[str, Any]:
        return call_alone(meta_start.measure, meta_start.parse(["--start-only", "--layers=12", *flags]))

    found = measured("--width=768", "--heads=12", "--vocabulary=16384")
    tiny = measured("--width=32", "--heads=2", "--vocabulary=64")
    assert found["parameters"] > 100e6
    room = found["phases"]["start"]["peak"] - tiny["phases"]["start"]["peak"]
    assert room < 1.05 * (found["shards"] + sum(found["units"]))
    assert room < 0.4 * 4 * found["parameters"]


class Tables(nn.Module):
    """Tables on the device of a parameter, here of another unit, as many models make them."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self.like = like
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("table", torch.empty(3, 4), persistent=False)

    def init_weights(self) -> None:
        weight = self.embed.weight
        if self.like == "device":
            self.table = torch.arange(12.0, device=weight.device).view(3, 4).cos()
        elif self.like == "default":
            with torch.device(weight.device):
                self.table = torch.arange(12.0).view(3, 4).cos()
        else:
            self.table = weight[:3] * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.embed(x) * self.table


@pytest.mark.parametrize("like", ["device", "default"])
def test_a_table_on_the_device_of_a_parameter_is_where_the_model_is(like: str) -> None:
    compiled = compiled_from_meta(lambda: Tables(like))
    assert torch.equal(compiled.table, torch.arange(12.0).view(3, 4).cos())
    compiled(torch.ones(3, 4)).sum().backward()


def test_a_table_computed_from_a_parameter_says_why_it_is_on_meta() -> None:
    with pytest.raises(zcompile.ModelError, match=r"on meta in place of .* those of other units have no values"):
        compiled_from_meta(lambda: Tables("values"))
