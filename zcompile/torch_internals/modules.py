"""Tables of modules: parameters, buffers and hooks; types in checkpoint metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys  # the result of `load_state_dict`

from zcompile.torch_internals.dispatch import no_torch_function

__all__ = ["LoadedKeys"]
"""Names re-exported unchanged from torch."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, to read and write: attribute assignment would refuse plain tensors."""
    return module._parameters


def parameters_at(places: Iterable[tuple[nn.Module, str]]) -> list[nn.Parameter | None]:
    """The parameter of each module under each name; None if there is none."""
    tables = [(module._parameters, key) for module, key in places]
    return [table[key] if key in table else None for table, key in tables]  # noqa: SIM401  # a call for each


def put_parameters(places: Iterable[tuple[nn.Module, str]], values: Iterable[nn.Parameter | None]) -> None:
    """Set the parameter of each module under each name."""
    for (module, key), value in zip(places, values, strict=True):
        module._parameters[key] = value


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table of a module's own buffers, to read and write."""
    return module._buffers


def load_post_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The table of a module's load post-hooks."""
    return module._load_state_dict_post_hooks


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's direct children."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """True for a buffer that is part of the module's state dict."""
    return buffer not in module._non_persistent_buffers_set


@dataclass(slots=True)
class TensorPlace:
    """A place in a module tree that holds a parameter or buffer; tied ones have several places."""

    path: str
    """Path of the module."""
    module: nn.Module
    key: str
    table: dict[str, Any]
    """The table of the module's parameters or buffers."""
    held: torch.Tensor
    """The tensor at this place when the place was made."""
    value: Any = None
    """The value to put or write there, set by users of the place; None for no change."""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def saved(self) -> bool:
        """True if a state dict has it: all but non-persistent buffers."""
        return is_persistent(self.module, self.key)


def tensor_places(named: Iterable[tuple[str, nn.Module]]) -> Iterator[TensorPlace]:
    """Every parameter and buffer directly in the given modules."""
    for path, module in named:
        tables: tuple[dict[str, Any], dict[str, Any]] = (parameters_of(module), buffers_of(module))
        for table in tables:
            yield from (TensorPlace(path, module, key, table, held) for key, held in table.items() if held is not None)


METADATA_TYPES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        [
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ]
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset({"MEM_FORMAT_ENCODING", "TensorProperties"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePosixPath"}),  # Python 3.13
}
"""Types besides dtypes in pickled `.metadata` of torch.distributed.checkpoint, by module; since torch 2.1.

All are plain containers of data, and safe to unpickle.
"""


_COUNTS_BYTES = "torch.distributed._tools.mem_tracker"
"""Its `register_hook` hooks only count bytes of gradients, as its post-accumulate hooks do, which zcompile runs."""


def with_gradient_hooks(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters with hooks of the user's `register_hook`, which do not run for gradients that zcompile assigns."""
    with no_torch_function():
        hooked = [(parameter, hooks) for parameter in parameters if (hooks := parameter._backward_hooks)]
    return [
        parameter
        for parameter, hooks in hooked
        if any(not getattr(hook, "is_own", False) and hook.__module__ != _COUNTS_BYTES for hook in hooks.values())
    ]


def hook_tables(modules: Iterable[torch.nn.Module]) -> list[Mapping[int, Callable[..., Any]]]:
    """Tables of forward and backward hooks: the global tables, then the tables of `modules`."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    everywhere = [getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds]
    return [*everywhere, *(getattr(module, f"_{kind}_hooks") for module in modules for kind in kinds)]


IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with the names that DistributedDataParallel ignores, which it reads before anything else."""


STATE_HOOKS = tuple(
    f"_{kind}_hooks" for kind in ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
)
"""Attributes of a module with its state dict hooks and load hooks."""


def replace_state_dict(module: torch.nn.Module, convert: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Let `module.state_dict()` return `convert(state)`; the public hook may only change the state in place."""
    module._register_state_dict_hook(lambda _, state, *__: convert(state))
