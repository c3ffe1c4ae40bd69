"""Optimizer settings: the hyperparameters and parameters of each group, which must be the same on all ranks.

Each rank steps its own rows. A learning rate that one rank changes alone, as `ReduceLROnPlateau` does by a rank's own
loss, would train some rows of each matrix at another rate. So a digest of all settings is sent with every run.
"""

from __future__ import annotations

import hashlib
import itertools
import numbers
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from zcompile.runtime.device import is_host
from zcompile.runtime.waits import named, ranks_by

FEW = 16
"""The most elements of a tensor that counts as a setting."""


@dataclass
class _Group:
    """A parameter group of an optimizer, as it was last read."""

    held: list[Any] = field(default_factory=list)
    """Its values, which are compared by identity."""
    is_mutable: bool = False
    """True if one of them may change and stay the same object."""
    parameters: list[Any] = field(default_factory=list)
    settings: bytes = b""
    names: bytes = b""
    """Digests, of parameter names and, above, of settings."""

    def read(self, group: Mapping[str, Any], names: Callable[[], Mapping[int, str]]) -> None:
        """Update the digests of what has changed, by identity."""
        held, parameters = [*group.values()], group["params"]
        if self.is_mutable or not _same(held, self.held):
            self.held, self.settings = held, _digest(_settings(group))
            self.is_mutable = any(isinstance(value, _MUTABLE) for value in held if value is not parameters)
        if not _same(parameters, self.parameters):
            self.parameters, self.names = [*parameters], _digest(_members(group, names()))


@dataclass(eq=False)
class _Known:
    """An optimizer that has stepped parameters of the model, or will."""

    number: int
    optimizer: weakref.ref[Optimizer]
    groups: list[_Group] = field(default_factory=list)


class OptimizerSettings:
    """The settings of a model's optimizers on this rank.

    Args:
        names: Returns the names of the model's parameters by their id.
    """

    def __init__(self, names: Callable[[], Mapping[int, str]]) -> None:
        self._names, self._count = names, 0
        self._known: list[_Known] = []

    def know(self, optimizer: Optimizer) -> int:
        """Register an optimizer and return its number, which follows the order of calls: the same on all ranks."""
        for known in self._known:
            if known.optimizer() is optimizer:
                return known.number
        self._known.append(_Known(self._count, weakref.ref(optimizer)))
        self._count += 1
        return self._count - 1

    def digests(self) -> dict[int, int]:
        """A digest of each optimizer's current settings, by the optimizer's number."""
        return {known.number: self._digest(known, optimizer.param_groups) for known, optimizer in self._alive()}

    def _alive(self) -> list[tuple[_Known, Optimizer]]:
        found = [(known, optimizer) for known in self._known if (optimizer := known.optimizer()) is not None]
        self._known = [known for known, _ in found]
        return found

    def _digest(self, known: _Known, groups: Sequence[Mapping[str, Any]]) -> int:
        if len(groups) != len(known.groups):
            known.groups = [_Group() for _ in groups]
        for seen, group in zip(known.groups, groups, strict=True):
            seen.read(group, self._names)
        found = b"".join(seen.settings + seen.names for seen in known.groups)
        return int.from_bytes(hashlib.blake2b(found, digest_size=8).digest()) >> 2

    def lines(self) -> list[str]:
        """All settings as text: a line for each setting and parameter."""
        alive, lines = self._alive(), list[str]()
        for known, optimizer in alive:
            kind = f"{type(optimizer).__name__}{f' {known.number}' if len(alive) > 1 else ''}"
            for number, group in enumerate(optimizer.param_groups):
                of_group = itertools.chain(_settings(group), _members(group, self._names()))
                lines += [f"{kind}, group {number}, {line}" for line in of_group]
        return lines


def difference(texts: Mapping[int, Sequence[str]]) -> tuple[str, str]:
    """The first setting that differs between ranks, given their `lines`, and its values by rank."""
    found = {rank: dict(line.split(" = ", 1) for line in lines if line) for rank, lines in sorted(texts.items())}
    for subject in dict.fromkeys(itertools.chain.from_iterable(found.values())):
        ranks = ranks_by({rank: values.get(subject, "nothing") for rank, values in found.items()})
        if len(ranks) > 1:
            return subject, "is " + ", and ".join(f"{value} on {named(of)}" for value, of in ranks.items())
    return "optimizer settings", f"are not the same on {named(list(found))}"


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


_MUTABLE = (torch.Tensor, list, dict)
"""Settings that may be changed in place."""


def _digest(lines: Iterator[str]) -> bytes:
    return hashlib.blake2b("\n".join(lines).encode(errors="backslashreplace"), digest_size=8).digest()


def _settings(group: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key} = {_text(group[key])}" for key in sorted(group, key=str) if key != "params")


def _members(group: Mapping[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    """The model's parameters in a group."""
    held = (names[id(parameter)] for parameter in group["params"] if id(parameter) in names)
    return (f"parameter {place} = {name}" for place, name in enumerate(held))


def _text(value: Any) -> str:
    """A setting as text, equal on ranks with the same setting; for values that are no settings, their type.

    A tensor on a GPU is not read: the host would wait for all work queued there.
    """
    if isinstance(value, bool | str | torch.dtype | type(None)):
        return repr(value)
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(value[key])}' for key in sorted(value, key=str))}}}"
    if type(value) is torch.Tensor and is_host(value.device) and value.numel() <= FEW:
        return _text(value.tolist())
    return f"a {getattr(value, '__qualname__', type(value).__qualname__)}"
