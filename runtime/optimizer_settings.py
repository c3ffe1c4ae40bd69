"""Settings of optimizers: what stands in their groups, and which parameters; ranks must have it alike.

Each rank steps its own rows. A learning rate that one rank changes alone, as `ReduceLROnPlateau` does by a rank's own
loss, would train half of each matrix at another rate. So a digest of all settings travels with every run.
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
"""Elements of a tensor that is a setting."""


@dataclass
class _Group:
    """A group of an optimizer as it was read last."""

    held: list[Any] = field(default_factory=list)
    """Its values, which are compared by identity."""
    is_mutable: bool = False
    """True if one of them may change and stay the same object."""
    parameters: list[Any] = field(default_factory=list)
    settings: bytes = b""
    names: bytes = b""
    """Digests."""

    def read(self, group: Mapping[str, Any], names: Callable[[], Mapping[int, str]]) -> None:
        """Take over what has changed; nothing is done for each parameter where none has."""
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
    """What the optimizers of a model are set to on this rank.

    Args:
        names: Gives the names of the model's parameters by their identity.
    """

    def __init__(self, names: Callable[[], Mapping[int, str]]) -> None:
        self._names, self._count = names, 0
        self._known: list[_Known] = []

    def know(self, optimizer: Optimizer) -> int:
        """The number of an optimizer, which is told of from now on; all ranks come to know them in the same order."""
        for known in self._known:
            if known.optimizer() is optimizer:
                return known.number
        self._known.append(_Known(self._count, weakref.ref(optimizer)))
        self._count += 1
        return self._count - 1

    def digests(self) -> dict[int, int]:
        """A number for what each is set to now, by the optimizer's number."""
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
        """All of it as text: a line for each setting and parameter."""
        alive, lines = self._alive(), list[str]()
        for known, optimizer in alive:
            kind = f"{type(optimizer).__name__}{f' {known.number}' if len(alive) > 1 else ''}"
            for number, group in enumerate(optimizer.param_groups):
                of_group = itertools.chain(_settings(group), _members(group, self._names()))
                lines += [f"{kind}, group {number}, {line}" for line in of_group]
        return lines


def difference(texts: Mapping[int, Sequence[str]]) -> tuple[str, str]:
    """What ranks have otherwise, given their `lines`: the first such setting, and its values by rank."""
    found = {rank: dict(line.split(" = ", 1) for line in lines if line) for rank, lines in sorted(texts.items())}
    for subject in dict.fromkeys(itertools.chain.from_iterable(found.values())):
        ranks = ranks_by({rank: values.get(subject, "nothing") for rank, values in found.items()})
        if len(ranks) > 1:
            return subject, "is " + ", and ".join(f"{value} on {named(of)}" for value, of in ranks.items())
    return "the settings of optimizers", f"are not the same on {named(list(found))}"


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


_MUTABLE = (torch.Tensor, list, dict)
"""Settings that may change and stay the same object."""


def _digest(lines: Iterator[str]) -> bytes:
    return hashlib.blake2b("\n".join(lines).encode(errors="backslashreplace"), digest_size=8).digest()


def _settings(group: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key} = {_text(group[key])}" for key in sorted(group, key=str) if key != "params")


def _members(group: Mapping[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    """The parameters that are the model's."""
    held = (names[id(parameter)] for parameter in group["params"] if id(parameter) in names)
    return (f"parameter {place} = {name}" for place, name in enumerate(held))


def _text(value: Any) -> str:
    """A setting as all ranks spell it that have the same; of what is no setting, its kind.

    A tensor on a GPU is not read: the host would wait for what the device has to do before.
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
