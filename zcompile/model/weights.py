"""Weights: full initial values of a model by name, read one tensor at a time.

Each tensor has memory of its own: nothing is mapped or shared, so its memory is freed with the tensor.
"""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zcompile.errors import OptionError, StateError
from zcompile.runtime.checkpoint_reader import Reader

Source = str | os.PathLike[str] | Mapping[str, torch.Tensor]
"""What `weights=` takes: a mapping from names to tensors, or the path of a file or folder."""

FORMS = (
    "give a mapping from names to tensors, a .safetensors file, a file of torch.save, a folder with model.safetensors "
    "or model.safetensors.index.json, or a folder of torch.distributed.checkpoint"
)

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Weights:
    """Full values by name."""

    source: str
    """A description of where they come from."""
    kinds: Mapping[str, torch.Tensor]
    """For each name, a tensor on meta with its shape and dtype."""
    read: Callable[[str], torch.Tensor]
    """Returns the tensor of a name in new memory, on the CPU, or for a mapping on the device of its tensor."""


def open_weights(source: Source) -> Weights:
    """Look up which weights `source` holds, without reading them.

    Raises:
        OptionError: the file or folder does not exist, or has none of the formats that `weights=` takes.
    """
    if isinstance(source, Mapping):
        return _from_mapping(source, "the mapping")
    path = Path(source)
    if not path.exists():
        raise OptionError("weights", f"{path} does not exist", FORMS)
    try:
        if path.is_file():
            return _from_safetensors(path) if path.suffix == ".safetensors" else _from_torch_file(path)
        if (index := path / "model.safetensors.index.json").exists():
            return _from_index(index)
        if (single := path / "model.safetensors").exists():
            return _from_safetensors(single)
        if (path / ".metadata").exists():
            return _from_checkpoint(path)
    except OptionError:
        raise
    except Exception as error:  # torch.load alone raises half a dozen types, some of its own
        raise OptionError("weights", f"{path} cannot be read: {type(error).__name__}: {error}", FORMS) from error
    raise OptionError("weights", f"{path} is a folder without weights that are known here", FORMS)


def _from_mapping(mapping: Mapping[str, Any], source: str) -> Weights:
    for name, value in mapping.items():
        if isinstance(value, DTensor):
            fix = "save it by torch.distributed.checkpoint and give the folder, or give p.full_tensor() of each"
            raise OptionError("weights", f"{name} of {source} is a DTensor, a part of which is elsewhere", fix)
        if not isinstance(value, torch.Tensor) or value.is_meta:
            kind = "on the meta device" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}, no tensor"
            fix = "give the model's own state_dict, names to tensors"
            raise OptionError("weights", f"{name} of {source} is {kind}", fix)
    kinds = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in mapping.items()}
    return Weights(source, kinds, lambda name: mapping[name].detach().clone())


def _from_safetensors(path: Path) -> Weights:
    # The format is an 8-byte length, that much JSON, and the bytes of the tensors. It is parsed here because the
    # library's reader maps the file, and pages of a mapped file count as this process's memory until it is closed.
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size:
            raise OptionError("weights", f"{path} is not a safetensors file: its header is longer than itself", FORMS)
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    kinds = {
        name: torch.empty(entry["shape"], dtype=SAFETENSORS_DTYPES[entry["dtype"]], device="meta")
        for name, entry in header.items()
    }
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if last - first != kinds[name].nbytes or 8 + length + last > size:
            raise OptionError("weights", f"{path} does not hold all of {name}", "fetch or save the file again")

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty_like(kinds[name], device="cpu")
        with path.open("rb") as file:
            file.seek(8 + length + header[name]["data_offsets"][0])
            if tensor.numel():
                file.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    return Weights(str(path), kinds, read)


def _from_index(path: Path) -> Weights:
    files: dict[str, str] = json.loads(path.read_text())["weight_map"]
    for file in sorted(set(files.values())):
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise OptionError("weights", f"{path} names {file!r}, which is not in its folder", FORMS)
    parts = {file: _from_safetensors(path.parent / file) for file in sorted(set(files.values()))}
    kinds = {name: parts[file].kinds[name] for name, file in files.items()}
    return Weights(str(path), kinds, lambda name: parts[files[name]].read(name))


def _from_torch_file(path: Path) -> Weights:
    def load() -> Weights:
        return _from_mapping(torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path))

    # Opened again for each tensor: pages of a mapped file stay in memory until it is unmapped.
    return Weights(str(path), load().kinds, lambda name: load().read(name))


def _from_checkpoint(folder: Path) -> Weights:
    try:
        stored = Reader(folder).read_metadata().state_dict_metadata
    except StateError as error:
        raise OptionError("weights", f"{error.subject} {error.problem}", error.fix) from error
    kinds = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty_like(kinds[name], device="cpu")
        with warnings.catch_warnings():  # it warns that it assumes one process, which is intended
            warnings.simplefilter("ignore", UserWarning)
            dcp.load({name: tensor}, storage_reader=Reader(folder), no_dist=True)
        return tensor

    return Weights(str(folder), kinds, read)


def takes(wanted: torch.dtype, given: torch.dtype) -> bool:
    """Return True if a value of dtype `given` may be converted to `wanted`: the same kind of number, integers in range.

    Floating-point numbers may be rounded; see `rounds`.
    """
    if wanted == given:
        return True
    if _is_integer(wanted) and _is_integer(given):
        there, here = torch.iinfo(given), torch.iinfo(wanted)
        return here.min <= there.min and there.max <= here.max
    real = wanted.is_floating_point and given.is_floating_point
    return real or (wanted.is_complex and given.is_complex)


def rounds(wanted: torch.dtype, given: torch.dtype) -> bool:
    """Return True if floating-point or complex numbers of dtype `given` lose precision or range in `wanted`."""
    if _is_integer(wanted) or torch.bool in (wanted, given):
        return False
    kept, had = torch.finfo(wanted), torch.finfo(given)
    return kept.eps > had.eps or kept.max < had.max


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
