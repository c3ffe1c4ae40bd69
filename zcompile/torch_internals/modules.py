"""Tables of modules: parameters, buffers, hooks, and what checkpoints name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys  # what `load_state_dict` gives back

from zcompile.torch_internals.dispatch import no_torch_function

__all__ = ["LoadedKeys"]
"""What is passed on from torch as it is."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, to read and to write: assignment by attribute would refuse tensors."""
    return module._parameters


def parameters_at(places: Iterable[tuple[nn.Module, str]]) -> list[nn.Parameter | None]:
    """What stands in each module under each name; None for nothing."""
    tables = [(module._parameters, key) for module, key in places]
    return [table[key] if key in table else None for table, key in tables]  # noqa: SIM401  # a call for each


def put_parameters(places: Iterable[tuple[nn.Module, str]], values: Iterable[nn.Parameter | None]) -> None:
    """Let the modules have these values under these names."""
    for (module, key), value in zip(places, values, strict=True):
        module._parameters[key] = value


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table of a module's own buffers, to read and to write."""
    return module._buffers


def load_post_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The table of the hooks that run when a module has been loaded."""
    return module._load_state_dict_post_hooks


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of the modules right below a module."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """True for a buffer that is part of the module's state dict."""
    return buffer not in module._non_persistent_buffers_set


@dataclass(slots=True)
class TensorPlace:
    """A place in a module tree that holds a parameter or a buffer; what is tied has several."""

    path: str
    """The module's."""
    module: nn.Module
    key: str
    table: dict[str, Any]
    """The module's parameters or its buffers."""
    held: torch.Tensor
    """What stood there when the place was found."""
    value: Any = None
    """What is to stand or be written there, for whoever looks for it; None where nothing is."""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def saved(self) -> bool:
        """True for what a state dict holds: all but buffers that are not persistent."""
        return is_persistent(self.module, self.key)


def tensor_places(named: Iterable[tuple[str, nn.Module]]) -> Iterator[TensorPlace]:
    """Every parameter and buffer right in modules, which are given with their paths."""
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
"""What the `.metadata` of torch.distributed.checkpoint is pickled from beside dtypes, by module; torch 2.1 and newer.

None of these does more than to keep what it is given.
"""


_COUNTS_BYTES = "torch.distributed._tools.mem_tracker"
"""Its hooks count the bytes of a gradient; it has a second one on the same parameters, which runs."""


def with_gradient_hooks(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters on which the user has called `register_hook`: such a hook sees what autograd carries, not ours."""
    with no_torch_function():
        hooked = [(parameter, hooks) for parameter in parameters if (hooks := parameter._backward_hooks)]
    return [
        parameter
        for parameter, hooks in hooked
        if any(not getattr(hook, "is_own", False) and hook.__module__ != _COUNTS_BYTES for hook in hooks.values())
    ]


def hook_tables(modules: Iterable[torch.nn.Module]) -> list[Mapping[int, Callable[..., Any]]]:
    """Where hooks of calls and of their backwards are: those of all modules there are, then those of `modules`."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    everywhere = [getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds]
    return [*everywhere, *(getattr(module, f"_{kind}_hooks") for module in modules for kind in kinds)]


IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: the names that DistributedDataParallel is to leave alone, which it reads first of all."""


STATE_HOOKS = tuple(
    f"_{kind}_hooks" for kind in ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
)
"""Attributes of a module: the tables of its hooks of state dicts, and of loading them."""


def replace_state_dict(module: torch.nn.Module, convert: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Let `module.state_dict()` give what `convert` makes of it; the public hook may only change it in place."""
    module._register_state_dict_hook(lambda _, state, *__: convert(state))
