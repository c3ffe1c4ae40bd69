"""Reads folders of torch.distributed.checkpoint without running code that they contain.

Their `.metadata` is a pickle, which can name any function to be called while it is read.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from zcompile.errors import StateError
from zcompile.torch_internals.modules import METADATA_TYPES

_FIX = "load what torch.distributed.checkpoint.save or compiled.save_checkpoint wrote"


class Reader(FileSystemReader):
    """torch's reader of a folder, restricted to the types that torch itself writes into `.metadata`.

    `listed`: the files in the folder's manifest, if it has one; data in other files is refused.
    """

    def __init__(self, folder: Path, listed: Collection[str] | None = None) -> None:
        super().__init__(folder)
        self._listed = listed

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The folder's metadata.

        Raises:
            StateError: `.metadata` is missing or damaged, holds other types, or names files that are outside of the
                folder or not listed.
        """
        metadata = _metadata(Path(self.path) / ".metadata", self._listed)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _metadata(path: Path, listed: Collection[str] | None) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
        files = {PurePath(os.path.normpath(entry.relative_path)) for entry in metadata.storage_data.values()}
    except StateError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise StateError(str(path), f"cannot be read: {type(error).__name__}: {error}", _FIX) from error
    for file_name in sorted(files):
        if file_name.is_absolute() or ".." in file_name.parts:
            raise StateError(str(path), f"names '{file_name}', which is not in its folder", _FIX)
        if listed is not None and str(file_name) not in listed:
            raise StateError(str(path.with_name(str(file_name))), "is not listed in the checkpoint's manifest", _FIX)
    if not isinstance(metadata, Metadata):
        raise StateError(str(path), f"holds a {type(metadata).__name__} in place of metadata", _FIX)
    return metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        """The type of this name, if checkpoint metadata may contain it."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in METADATA_TYPES.get(module, ()):
            problem = f"names {module}.{name}, which no checkpoint of torch.distributed.checkpoint contains"
            raise StateError(str(self.path), problem, f"do not trust this file; {_FIX}")
        return super().find_class(module, name)
