"""Starting on meta: which values a model gets, from where, and how little memory it takes."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zcompile
from benchmarks.common.ranks import call_alone
from benchmarks.memory import meta_start
from tests.cases import diagonal
from tests.models import GPT, ConvNet, batch, make
from tests.ranks import Ranks

ROOT = Path(__file__).parent.parent
Values = dict[str, torch.Tensor]


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def compiled_from_meta(build: Callable[[], nn.Module], seed: int = 0, **options: Any) -> zcompile.CompiledModule:
    model = on_meta(build)
    torch.manual_seed(seed)
    return zcompile.compile(model, backend="eager", **options)


def values_of(module: nn.Module) -> Values:
    """Full values of all parameters and buffers."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in named}


def assert_equal(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# -- the model's own code ----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """A unit between blocks, three blocks, a unit between blocks."""

    layer: Callable[[], nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.layers = nn.ModuleList(type(self).layer() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


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


# -- weights -----------------------------------------------------------------------------------------------------------


def as_mapping(values: Values, folder: Path) -> Any:
    return values


def as_safetensors(values: Values, folder: Path) -> Any:
    from safetensors.torch import save_file

    save_file(values, folder / "some.safetensors", metadata={"format": "pt"})
    return folder / "some.safetensors"


def as_folder(values: Values, folder: Path) -> Any:
    from safetensors.torch import save_file

    save_file(values, folder / "model.safetensors")
    return str(folder)


def as_index(values: Values, folder: Path) -> Any:
    from safetensors.torch import save_file

    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(values)}
    for file in set(files.values()):
        save_file({name: value for name, value in values.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def as_torch_file(values: Values, folder: Path) -> Any:
    torch.save(values, folder / "model.pt")
    return folder / "model.pt"


def as_checkpoint(values: Values, folder: Path) -> Any:
    dcp.save(values, checkpoint_id=folder / "checkpoint", no_dist=True)
    return folder / "checkpoint"


FORMS = [as_mapping, as_safetensors, as_folder, as_index, as_torch_file, as_checkpoint]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the test saves a checkpoint in one process
@pytest.mark.filterwarnings("ignore:.*weights rounded")
@diagonal("form, meta", FORMS, [True, False])
def test_weights_of_any_form_are_what_the_model_starts_from(form: Any, meta: bool, tmp_path: Path) -> None:
    source = ConvNet().double()
    with torch.no_grad():
        for value in source.state_dict().values():
            value.copy_(torch.randn(value.shape) * 10)
    kept = {name: value.clone() for name, value in source.state_dict().items()}
    model = on_meta(ConvNet) if meta else ConvNet()
    compiled = zcompile.compile(model, backend="eager", weights=form(source.state_dict(), tmp_path))
    assert_equal(values_of(compiled), values_of(source.float()))  # cast to the model's dtype
    assert_equal(kept, {name: value.double() for name, value in kept.items()})
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(*batch("conv", 0, 0)).backward()
    optimizer.step()


def test_weights_of_every_dtype_are_read_from_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from zcompile.model.weights import SAFETENSORS_DTYPES, open_weights

    values = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in SAFETENSORS_DTYPES.values()}
    values |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    save_file(values, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    for name, wanted in values.items():
        found = weights.read(name)
        assert weights.kinds[name].dtype == wanted.dtype
        assert (found.dtype, found.shape, weights.kinds[name].shape) == (wanted.dtype, wanted.shape, wanted.shape)
        assert found.tolist() == wanted.tolist()


def test_the_mapping_given_as_weights_is_not_shared() -> None:
    weights = Stack().state_dict()
    before = {name: value.clone() for name, value in weights.items()}
    compiled = compiled_from_meta(Stack, stage=0, weights=weights)
    compiled(torch.randn(3, 4)).backward()
    torch.optim.SGD(compiled.parameters(), lr=1.0).step()
    assert_equal(weights, before)


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


def as_dtype(values: Values, dtype: torch.dtype) -> Values:
    return values | {"head.weight": values["head.weight"].to(dtype)}


def without(values: Values, name: str) -> Values:
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: without(values, "inner.bias"), "lacks inner.bias"),
        (lambda values: values | {"model.extra": torch.ones(1)}, "has model.extra, unknown to the model"),
        (lambda values: values | {"head.weight": torch.ones(3, 6)}, r"head.weight: has shape \[3, 6\].* is \[2, 6\]"),
        (lambda values: as_dtype(values, torch.complex64), "head.weight: is torch.complex64 in .* is torch.float32"),
        (lambda values: as_dtype(values, torch.int64), r"head.weight: is torch.int64 .*\n.*value.to\(torch.float32\)"),
        (lambda values: as_dtype(values, torch.bool), "head.weight: is torch.bool"),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_changes(meta: bool, change: Any, message: str) -> None:
    model = on_meta(Stack) if meta else Stack()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(zcompile.ModelError, match=message):
        zcompile.compile(model, backend="eager", weights=change(Stack().state_dict()))
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert meta or torch.equal(param, before[name][1])


def test_weights_in_another_width_are_cast_and_a_warning_says_what_is_rounded(tmp_path: Path) -> None:
    values = Stack().state_dict()
    for source, model, rounded in (
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float64, False),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.float16, torch.bfloat16, True),
    ):
        given = {name: value.to(source) for name, value in values.items()}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compiled = zcompile.compile(
                Stack().to(model), stage=0, backend="eager", weights=as_torch_file(given, tmp_path)
            )
        texts = [str(one.message) for one in said if "rounded" in str(one.message)]
        assert len(texts) == rounded, (source, model)
        assert all(f"weights rounded from {source} to the model's {model}: inner.weight, " in text for text in texts)
        assert all(one.filename == __file__ for one in said if "rounded" in str(one.message))
        assert_equal(values_of(compiled), {name: value.to(model) for name, value in given.items()})


class Masked(nn.Module):
    """Buffers of several kinds, one of them full of infinity and NaN on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("nan")]))
        self.register_buffer("count", torch.tensor(2**40))
        self.register_buffer("seen", torch.tensor([True]))


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"count": torch.tensor(7, dtype=torch.int16)}, ""),
        ({"weight": torch.tensor([1.0, float("inf"), 1.0])}, ""),
        ({"weight": torch.tensor([1.0, float("nan"), 1.0])}, "weight of the mapping holds NaN"),
        (
            {"weight": torch.full((3,), -1e300, dtype=torch.float64)},
            "weight of the mapping is too large for torch.float32",
        ),
        ({"count": torch.tensor(2.0)}, "count: is torch.float32 in the mapping, the model's is torch.int64"),
        ({"count": torch.tensor(2, dtype=torch.uint64)}, "count: is torch.uint64"),
        ({"seen": torch.tensor([1])}, "seen: is torch.int64"),
        ({"mask": torch.tensor([0, 1, 1])}, "mask: is torch.int64"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*rounded")
def test_weights_that_cannot_be_meant_are_refused_and_infinity_in_buffers_is_taken(
    meta: bool, change: Values, message: str
) -> None:
    model, weights = on_meta(Masked) if meta else Masked(), Masked().state_dict() | change
    if message:
        with pytest.raises((zcompile.ModelError, zcompile.OptionError), match=message):
            zcompile.compile(model, backend="eager", weights=weights)
        return
    found = zcompile.compile(model, stage=0, backend="eager", weights=weights).state_dict()
    for name, value in weights.items():
        assert torch.equal(found[name].nan_to_num(9), value.to(found[name].dtype).nan_to_num(9))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_whose_metadata_calls_a_function_is_refused(tmp_path: Path) -> None:
    folder = as_checkpoint(Stack().state_dict(), tmp_path)
    content = f"\x80\x04cos\nmkdir\n(V{tmp_path / 'called'}\ntR.".encode("latin-1")
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(zcompile.OptionError, match=r"\.metadata names os\.mkdir, which no checkpoint"):
        zcompile.compile(Stack(), backend="eager", weights=folder)
    assert not (tmp_path / "called").exists()


def outside_checkpoint(folder: Path) -> Path:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for entry in metadata.storage_data.values():
        entry.relative_path = f"../{entry.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def outside_index(folder: Path) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-1", "../model-1"))
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_that_name_files_outside_of_their_folder_are_refused(tmp_path: Path) -> None:
    values = Stack().state_dict()
    for source in (outside_checkpoint(as_checkpoint(values, tmp_path)), outside_index(as_index(values, tmp_path))):
        with pytest.raises(zcompile.OptionError, match=r"names '\.\./.*', which does not lie in its folder"):
            zcompile.compile(Stack(), backend="eager", weights=source)


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors here, only some text")
    as_safetensors(Stack().state_dict(), tmp_path).rename(tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", (tmp_path / "cut.safetensors").stat().st_size - 4)
    (tmp_path / "text.pt").write_text("no tensors")
    (tmp_path / "folder").mkdir()
    torch.save({"model": Stack().state_dict()}, tmp_path / "nested.pt")
    for source, message in [
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "text.safetensors", "no safetensors file"),
        (tmp_path / "cut.safetensors", "does not hold all of"),
        (tmp_path / "text.pt", "cannot be read"),
        (tmp_path / "folder", "folder without weights"),
        (tmp_path / "nested.pt", "model of .* is no tensor but "),
        (on_meta(Stack).state_dict(), "inner.weight of the mapping is on the meta device"),
    ]:
        with pytest.raises(zcompile.OptionError, match=message):
            zcompile.compile(Stack(), backend="eager", weights=source)  # type: ignore[arg-type]


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
        optimizer.step()
        optimizer.zero_grad()
    return values_of(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)), 3])
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


def fails_half_way(rank: int, meta: bool) -> str:
    """A source of which the third tensor cannot be read."""
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}

    class Cut(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            if name == "1.weight" and reading:
                raise OSError("input/output error")
            return super().__getitem__(name)

    reading = False
    weights = Cut(values)
    reading = True
    try:
        zcompile.compile(model, weights=weights, backend="eager")
    except zcompile.OptionError as error:
        return str(error)
    return ""


def differ(rank: int, problem: str) -> str:
    """Weights that fit on the first rank alone; or that are wrong there, where all ranks take theirs from."""
    values = nn.Linear(4, 4).state_dict()
    if problem == "dtype" and rank:
        values["weight"] = values["weight"].to(torch.complex64)
    if problem == "path":
        values = "/nowhere" if rank else values
    if problem == "nan" and rank == 0:
        values["weight"][1, 1] = torch.nan
    with pytest.raises((zcompile.ModelError, zcompile.OptionError)) as caught:
        zcompile.compile(nn.Linear(4, 4), weights=values, backend="eager")
    return str(caught.value)


@pytest.mark.parametrize("problem", ["dtype", "path", "nan"])
def test_weights_that_are_wrong_on_one_rank_are_the_same_error_on_all(ranks: Ranks, problem: str) -> None:
    first, second = ranks.run(2, differ, problem)
    assert first == second
    said = {
        "dtype": "weight: is torch.complex64",
        "path": "/nowhere does not exist",
        "nan": "weight of the mapping holds",
    }
    assert said[problem] in first


@pytest.mark.parametrize("meta", [True, False])
def test_weights_that_cannot_be_read_half_way_are_told_on_every_rank(ranks: Ranks, meta: bool) -> None:
    first, second = ranks.run(2, fails_half_way, meta)
    assert "1.weight of the mapping cannot be read: OSError: input/output error" in first
    assert "1.weight of the mapping cannot be read: the first rank cannot read it" in second


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
