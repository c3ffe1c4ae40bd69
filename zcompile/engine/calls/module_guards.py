"""Guards that torch.compile lacks, or is slow at: hooks, and the structure of the module tree.

It takes one module for another of its class, and guards on hooks take it 2 ms a call for a thousand modules; here both
take 0.1 ms. A change gives another text, an argument of traced functions, so that torch.compile traces them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from zcompile.torch_internals.modules import hook_tables, parameters_of, submodules_of


class TreeWatch:
    """Detects modules or parameters of a model that were moved, added or removed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.version = 0
        """Number of changes accepted so far."""
        self._seen = _tree(model)

    def has_changed(self) -> bool:
        """True if the tree differs from the last accepted one."""
        attributes, below, counts = self._seen
        now = [held["_modules"] for held in attributes]
        return now != below or [*map(len, [held["_parameters"] for held in attributes])] != counts

    def accept(self) -> None:
        """Accept the tree as it is now."""
        self.version += 1
        self._seen = _tree(self.model)


def _tree(model: nn.Module) -> tuple[list[dict[str, Any]], list[dict[str, nn.Module | None]], list[int]]:
    """For all modules: their attributes, their direct submodules, and their numbers of parameters."""
    modules = [*model.modules()]
    below = [dict(submodules_of(module)) for module in modules]
    return [vars(module) for module in modules], below, [len(parameters_of(module)) for module in modules]


class HookWatch:
    """The number of hooks on the traced part of a module, as text, with the constants among their defaults.

    torch.compile itself guards on which hooks these are, but torch 2.11 not on these constants. `itself`: the module's
    own hooks are traced, too, not only those of its submodules.
    """

    def __init__(self, module: nn.Module, *, itself: bool) -> None:
        self.module, self.itself = module, itself
        self._tables: tuple[int, Sequence[Mapping[int, Callable[..., Any]]]] = (-1, ())

    def text(self, version: int) -> str:
        """A text that differs for other numbers or constants, and for another `version` of the tree."""
        known, tables = self._tables
        if known != version:
            modules = [module for module in self.module.modules() if self.itself or module is not self.module]
            self._tables = version, (tables := hook_tables(modules))
        hooks = [f"{index}:{_constants(table)}" for index, table in enumerate(tables) if table] if any(tables) else []
        return f"tree {version} hooks {','.join(hooks)}"


def _constants(hooks: Mapping[int, Callable[..., Any]]) -> list[list[Any]]:
    """For each hook, the constants among the defaults of its arguments."""
    defaults = [getattr(hook, "__defaults__", None) or () for hook in hooks.values()]
    return [[value for value in values if isinstance(value, (bool, int, float, str))] for values in defaults]
