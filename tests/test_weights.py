"""The weights that a model starts from: their forms, what fits, and what is said of what does not."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zcompile
from tests.cases import diagonal
from tests.models import ConvNet, batch
from tests.ranks import Ranks
from tests.refusals import error_of
from tests.starts import Stack, Values, assert_equal, compiled_from_meta, on_meta, values_of


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
        with pytest.raises(zcompile.OptionError, match=r"names '\.\./.*', which is not in its folder"):
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
        (tmp_path / "text.safetensors", "not a safetensors file"),
        (tmp_path / "cut.safetensors", "does not hold all of"),
        (tmp_path / "text.pt", "cannot be read"),
        (tmp_path / "folder", "folder without weights"),
        (tmp_path / "nested.pt", "model of .* is a OrderedDict, no tensor"),
        (on_meta(Stack).state_dict(), "inner.weight of the mapping is on the meta device"),
    ]:
        with pytest.raises(zcompile.OptionError, match=message):
            zcompile.compile(Stack(), backend="eager", weights=source)  # type: ignore[arg-type]


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
    return error_of(lambda: zcompile.compile(model, weights=weights, backend="eager"), zcompile.OptionError)


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
