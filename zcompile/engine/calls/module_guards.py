"""What torch.compile does not look at between calls of a model: hooks, and which module stands where.

It takes a module for another one of its class, and skips hooks, whose guards take it 2 ms a call for a thousand
modules. Here both are 0.1 ms. What has changed makes another text, with which traced functions are called, so that
torch.compile traces them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from zcompile.torch_internals.modules import hook_tables, parameters_of, submodules_of


class TreeWatch:
    """Sees that modules or parameters of a model were put elsewhere, added or taken away."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.version = 0
        """How often a changed tree was accepted."""
        self._seen = _tree(model)

    def has_changed(self) -> bool:
        """True if the tree is another one than was last accepted."""
        attributes, below, counts = self._seen
        now = [held["_modules"] for held in attributes]
        return now != below or [*map(len, [held["_parameters"] for held in attributes])] != counts

    def accept(self) -> None:
        """Take the tree as it is now."""
        self.version += 1
        self._seen = _tree(self.model)


def _tree(model: nn.Module) -> tuple[list[dict[str, Any]], list[dict[str, nn.Module | None]], list[int]]:
    """Of all modules: their attributes, the modules right below each, and the number of its parameters."""
    modules = [*model.modules()]
    below = [dict(submodules_of(module)) for module in modules]
    return [vars(module) for module in modules], below, [len(parameters_of(module)) for module in modules]


class HookWatch:
    """The number of hooks on what is traced of a module, as a text, with the constants among their defaults.

    Which ones they are torch.compile sees itself, but in torch 2.11 not these constants.
    `itself`: its own hooks are traced too, not only those of the modules in it.
    """

    def __init__(self, module: nn.Module, *, itself: bool) -> None:
        self.module, self.itself = module, itself
        self._tables: tuple[int, Sequence[Mapping[int, Callable[..., Any]]]] = (-1, ())

    def text(self, version: int) -> str:
        """A text that is another one for other numbers or constants, and for another `version` of the tree."""
        known, tables = self._tables
        if known != version:
            modules = [module for module in self.module.modules() if self.itself or module is not self.module]
            self._tables = version, (tables := hook_tables(modules))
        hooks = [f"{index}:{_constants(table)}" for index, table in enumerate(tables) if table] if any(tables) else []
        return f"tree {version} hooks {','.join(hooks)}"


def _constants(hooks: Mapping[int, Callable[..., Any]]) -> list[list[Any]]:
    """Of each hook the constants among the defaults of its arguments."""
    defaults = [getattr(hook, "__defaults__", None) or () for hook in hooks.values()]
    return [[value for value in values if isinstance(value, (bool, int, float, str))] for values in defaults]
