"""What loading a state dict would write, found by torch's own code and the model's hooks before anything is written.

    state -- hooks and _load_from_state_dict of every module --> values --> compared with the model --> written

Meanwhile what stands in the module tree shows the values that are there, and notes what is copied into it. So hooks may
rename, convert and add what they like, each runs once, and an error leaves the model as it was.
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
    """A tensor that notes what is copied into it, in place of copying it."""

    zcompile_noted: Any = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.copy_ and isinstance(args[0], _Noting):
            args[0].zcompile_noted = args[1]
            return args[0]
        if func == _IS_META:  # torch warns of copies into what is on other ranks
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
    """A tensor over the memory of `held` that notes what is copied into it."""
    made = held.detach()
    made.__class__ = _noting(type(held))
    return made


@dataclass
class Loading:
    """What loading would write into `model`."""

    model: nn.Module
    extra: dict[int, Any] = field(default_factory=dict)
    """Values for modules with extra state, by their number among these."""
    keys: LoadedKeys = field(default_factory=lambda: LoadedKeys([], []))
    """What torch gives back: an object with two lists, which hooks behind loading may change."""

    def __post_init__(self) -> None:
        self.places = _places(self.model.named_modules())
        self._extended = [module for module in self.model.modules() if _has_extra_state(module)]
        self._behind = [(module, dict(load_post_hooks_of(module))) for module in _in_loading_order(self.model)]

    def targets(self) -> dict[str, torch.Tensor | None]:
        """What there is by every name that the model's state has; None for extra state."""
        named = dict(self.model.named_modules(remove_duplicate=False))
        extra = {f"{path}._extra_state".lstrip("."): None for path, module in named.items() if _has_extra_state(module)}
        return {place.name: place.held for place in _places(named.items())} | extra

    @property
    def has_post_hooks(self) -> bool:
        """True if hooks run when all is written, which may call names that are missing right."""
        return any(hooks for _, hooks in self._behind)

    def look(self, state: Mapping[str, Any]) -> None:
        """Find what `state` would write, by what the model's class does to load it; errors of torch pass."""
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
            for module, _ in self._behind:
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
            for module, hooks in self._behind:
                load_post_hooks_of(module).update(hooks)

    def _take(self, place: TensorPlace, noting: Any) -> None:
        """Take what was noted; a buffer made anew, as of another size, takes the place of the old one."""
        now: Any = place.table.get(place.key)
        if now is noting:
            place.value = None if now.zcompile_noted is now else now.zcompile_noted
        elif isinstance(now, torch.Tensor) and not isinstance(place.held, nn.Parameter):
            place.held = place.value = now
        else:
            problem = "is replaced or taken away by the code that loads its module"
            raise StateError(place.name, problem, "change its value in the state dict that the code is given")

    def end(self) -> None:
        """Give modules their extra state, and run the hooks behind loading in torch's order, once all is written."""
        for number, value in self.extra.items():
            self._extended[number].set_extra_state(value)
        for module, hooks in self._behind:
            for hook in hooks.values():
                hook(module, self.keys)


@contextlib.contextmanager
def _copies() -> Iterator[None]:
    """Inside, torch's `load_state_dict` copies into parameters, whatever it is set to do."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _places(named: Iterable[tuple[str, nn.Module]]) -> list[TensorPlace]:
    """Where a state dict has values."""
    return [place for place in tensor_places(named) if place.saved]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _in_loading_order(module: nn.Module) -> Iterator[nn.Module]:
    """Modules as torch comes to the end of loading them; one with two places comes twice."""
    for child in submodules_of(module).values():
        if child is not None:
            yield from _in_loading_order(child)
    yield module
