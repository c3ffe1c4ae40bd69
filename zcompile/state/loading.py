"""Find what loading a state dict would write, by torch's own code and the model's hooks, before anything is written.

    state -- hooks and _load_from_state_dict of every module --> values --> compared with the model --> written

During the search, tensors in the module tree are replaced by views that record copies into them. So hooks may rename,
convert and add values, each hook runs once, and an error leaves the model unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.errors import StateError
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.modules import (
    LoadedKeys,
    TensorPlace,
    load_post_hooks_of,
    submodules_of,
    tensor_places,
)


class _Noting:
    """A tensor that records the source of `copy_` into it instead of copying."""

    zcompile_noted: Any = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.copy_ and isinstance(args[0], _Noting):
            args[0].zcompile_noted = args[1]
            return args[0]
        if func == _IS_META:  # torch warns about copies into meta tensors, which here are on other ranks
            return False
        if issubclass(cls, DTensor):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        with no_torch_function():
            return func(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


@functools.cache
def _noting(kind: type[torch.Tensor]) -> type[Any]:
    return types.new_class("Noting", (_Noting, kind))


def _noting_like(held: torch.Tensor) -> Any:
    """A recording view of `held`."""
    made = held.detach()
    made.__class__ = _noting(type(held))
    return made


@dataclass
class Loading:
    """The values that loading would write into `model`."""

    model: nn.Module
    extra: dict[int, Any] = field(default_factory=dict)
    """Extra state by the index of the module among those that have extra state."""
    keys: LoadedKeys = field(default_factory=lambda: LoadedKeys([], []))
    """The missing and unexpected keys that torch returns; load post-hooks may change the lists."""

    def __post_init__(self) -> None:
        self.places = _places(self.model.named_modules())
        self._extended = [module for module in self.model.modules() if _has_extra_state(module)]
        self._post_hooks = [(module, dict(load_post_hooks_of(module))) for module in _in_loading_order(self.model)]

    def targets(self) -> dict[str, torch.Tensor | None]:
        """The current value for every name in the model's state dict; None for extra state."""
        named = dict(self.model.named_modules(remove_duplicate=False))
        extra = {f"{path}._extra_state".lstrip("."): None for path, module in named.items() if _has_extra_state(module)}
        return {place.name: place.held for place in _places(named.items())} | extra

    @property
    def has_post_hooks(self) -> bool:
        """True if the model has load post-hooks, which may remove missing keys from the list."""
        return any(hooks for _, hooks in self._post_hooks)

    def find(self, state: Mapping[str, Any]) -> None:
        """Find what `state` would write, by `load_state_dict` of the model's class. torch's errors propagate."""
        with self._noting():
            keys = type(self.model).load_state_dict(self.model, state, strict=False)
        self.keys = self.keys if keys is None else keys

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        noting = [_noting_like(place.held) for place in self.places]
        try:
            for place, tensor in zip(self.places, noting, strict=True):
                place.table[place.key] = tensor
            for number, module in enumerate(self._extended):
                vars(module)["set_extra_state"] = functools.partial(self.extra.__setitem__, number)
            for module, _ in self._post_hooks:
                load_post_hooks_of(module).clear()
            with _copies():
                yield
            for place, tensor in zip(self.places, noting, strict=True):
                self._take(place, tensor)
        finally:
            for place in self.places:
                place.table[place.key] = place.held
            for module in self._extended:
                vars(module).pop("set_extra_state", None)
            for module, hooks in self._post_hooks:
                load_post_hooks_of(module).update(hooks)

    def _take(self, place: TensorPlace, noting: Any) -> None:
        """Store the recorded value; a buffer that loading replaces, for instance by another size, replaces the old."""
        now: Any = place.table.get(place.key)
        if now is noting:
            place.value = None if now.zcompile_noted is now else now.zcompile_noted
        elif isinstance(now, torch.Tensor) and not isinstance(place.held, nn.Parameter):
            place.held = place.value = now
        else:
            problem = "is replaced or removed by the code that loads its module"
            raise StateError(place.name, problem, "let that code change the value in the state dict instead")

    def end(self) -> None:
        """After all values are written: set extra state, and run load post-hooks in torch's order."""
        for number, value in self.extra.items():
            self._extended[number].set_extra_state(value)
        for module, hooks in self._post_hooks:
            for hook in hooks.values():
                hook(module, self.keys)


@contextlib.contextmanager
def _copies() -> Iterator[None]:
    """Let torch's `load_state_dict` copy into parameters, whatever `set_swap_module_params_on_conversion` says."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _places(named: Iterable[tuple[str, nn.Module]]) -> list[TensorPlace]:
    """The places of all parameters and persistent buffers."""
    return [place for place in tensor_places(named) if place.saved]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _in_loading_order(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order in which torch finishes loading them; a module with two parents comes twice."""
    for child in submodules_of(module).values():
        if child is not None:
            yield from _in_loading_order(child)
    yield module
