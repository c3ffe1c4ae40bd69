"""Full parameters while a module's code runs as plain Python: leaves, whose gradients are averaged afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from zcompile._torch import parameters_of, recomputes, version_of, within_function_transform
from zcompile.errors import CaptureError, ParameterError
from zcompile.model.sharding import Site
from zcompile.runtime.executor import BoundUnit, Gradients, accumulate, gathered
from zcompile.runtime.gradients.delivery import Delivery
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.tensors.parameter import ShardedParameter


class FullParameter(nn.Parameter):
    """A full parameter, of which writes are noticed, those to its `.data` too: they would not change the shards."""

    zcompile_name: str

    @classmethod
    def named(cls, name: str, tensor: torch.Tensor, *, requires_grad: bool) -> Self:
        made = cls(tensor, requires_grad=requires_grad)
        made.zcompile_name = name
        return made

    @property
    def data(self) -> torch.Tensor:
        """Its values, as `.data` gives them; writes to them count as its own."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Conversions, as by `module.half()`, are allowed: they are for as long as it is full.

        Raises:
            ParameterError: `value` is of the same kind and not this memory, so that it is no conversion but a change.
        """
        alike = (value.dtype, value.device, value.shape) == (self.dtype, self.device, self.shape)
        if alike and value.untyped_storage().data_ptr() != self.untyped_storage().data_ptr():
            fix = "write to shards, outside: with torch.no_grad(): parameter.copy_(...)"
            problem = "is full for now, and assigning to its .data does not change the shards"
            raise ParameterError(self.zcompile_name, problem, fix)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter as any other: the copy is its owner's, to keep and to write to."""
        made = memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return made


class Leaf(FullParameter):
    """A full parameter for plain Python."""


@dataclass(frozen=True)
class Leaves:
    """Parameters of a unit, full for one call of plain Python, whose gradients autograd collects."""

    bound: BoundUnit
    tensors: dict[str, Leaf]
    delivery: Delivery

    @classmethod
    def gathered(cls, bound: BoundUnit, trainable: Mapping[str, bool], delivery: Delivery) -> Leaves:
        """Gather a unit. Collective."""
        with torch.inference_mode(False), torch.no_grad():
            full = gathered(bound)
        values = [(name, full[i]) for i, name in enumerate(bound.unit.names)]
        made = {name: Leaf.named(name, value, requires_grad=trainable[name]) for name, value in values}
        return cls(bound, made, delivery)

    def reduce(self) -> Sequence[Gradients]:
        """Average over the ranks what autograd has collected; what one rank's code did not reach counts as zero."""
        shards, leaves = self.bound.shards, self.tensors
        own = [leaf.grad for leaf in leaves.values()]
        with torch.no_grad():
            for leaf in leaves.values():
                leaf.grad = None
            if not self.delivery.synchronises:
                return [accumulate(self.bound, list(own))]
            self.delivery.enter(RunKind.GRADIENTS, digest(*leaves))
            self.delivery.lockstep.check()  # the host waits for the flags anyway
            reached = [g is not None or shards.held(name) is not None for name, g in zip(leaves, own, strict=True)]
            flags = torch.tensor(reached, dtype=torch.int32)
            on_any = shards.communicator.any_rank(flags).tolist()
            zipped = zip(leaves.values(), own, on_any, strict=True)
            grads = [(torch.zeros_like(leaf) if g is None else g) if wanted else None for leaf, g, wanted in zipped]
            return [self.delivery.reduce(self.bound, grads)]


class PlainReads:
    """Parameters that a module's plain Python reads past the modules that they are in: gathered once they are read.

    Within such code a shard stands for its full parameter, as `F.linear(x, self.embedding.weight)` wants it. It is
    kept until the code that reads it first has returned. A function that is checkpointed runs again within a backward,
    where no module's code is around it: `again` gathers, for each read, what stands for a parameter there.
    """

    def __init__(self, sites: Sequence[Site], again: Callable[[Sequence[Site], str], dict[str, Leaf]]) -> None:
        self._all, self._sites, self._again = sites, {id(site.shard): site for site in sites}, again
        self._code: _Code | None = None
        self._is_aside = False
        self._read: set[str] = set()
        """What plain Python of the model has read so far: what it computes again reads nothing else."""
        for site in sites:
            shard: object = site.shard
            if isinstance(shard, ShardedParameter):
                shard.zcompile_reader = weakref.ref(self)

    def full(self, parameter: ShardedParameter) -> nn.Parameter | None:
        """All of a parameter, gathered where it was not yet; None where no plain Python of a model runs. Collective.

        Raises:
            ParameterError: it would be gathered within a transform of torch.func, which would not see its gradient.
        """
        site, code = self._read_site(parameter), self._code
        if site is None:
            return None
        if code is None or site.name not in code.found:
            if within_function_transform():
                fix = "read it before, outside of the transform"
                raise ParameterError(site.name, "is first read within a transform of torch.func", fix)
            if code is None:
                with self.aside():
                    return self._again([site], site.name)[site.name]
            with self.aside(), torch.set_grad_enabled(code.trains):  # what it reads without gradients, it may use with
                code.add(code.gather([site], site.name))
            self._read.add(site.name)
        return code.found[site.name]

    def kind(self, parameter: ShardedParameter) -> torch.Tensor | None:
        """What has the dtype and the device of all of a parameter, where plain Python of a model asks for them."""
        site = self._read_site(parameter)
        return None if site is None else site.placeholder

    def _read_site(self, parameter: ShardedParameter) -> Site | None:
        """The place of a parameter, if it is the model's own code that reads it, as plain Python."""
        code, site = self._code, self._sites.get(id(parameter))
        if code is not None:
            return site if code.thread == threading.get_ident() else None
        known = site is not None and site.name in self._read and not self._is_aside
        return site if known and recomputes() else None

    @contextlib.contextmanager
    def within(self, gather: Callable[[Sequence[Site], str], dict[str, Leaf]], own: Iterable[str]) -> Iterator[None]:
        """Plain Python of a module runs; `gather` gives full parameters, for the reader that is named.

        `own`: the module's own parameters, which are full already.

        Raises:
            CaptureError: it has written to what it read.
        """
        before = self._code, self._is_aside
        self._read.update(own)
        self._code = code = _Code(gather, torch.is_grad_enabled())
        self._is_aside = False
        try:
            yield
        finally:
            self._code, self._is_aside = before
            self._put_back(code.found)
        check_unwritten(code.found, code.versions)

    def _put_back(self, found: Mapping[str, Leaf]) -> None:
        """Shards where code has set full parameters, as `other.weight *= 2` does."""
        for site in self._all if found else ():
            if site.name in found and parameters_of(site.owner).get(site.key) is found[site.name]:
                parameters_of(site.owner)[site.key] = site.shard

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A program runs, or zcompile itself: shards are shards."""
        before = self._code, self._is_aside
        self._code, self._is_aside = None, True
        try:
            yield
        finally:
            self._code, self._is_aside = before


@dataclass
class _Code:
    """The plain Python of one call of a module."""

    gather: Callable[[Sequence[Site], str], dict[str, Leaf]]
    trains: bool
    thread: int = field(default_factory=threading.get_ident)
    """Others, as one that saves or averages shards meanwhile, are not the model's code."""
    found: dict[str, Leaf] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def add(self, leaves: dict[str, Leaf]) -> None:
        self.found |= leaves
        self.versions |= {name: version_of(leaf) for name, leaf in leaves.items()}


def check_unwritten(leaves: Mapping[str, Leaf], versions: Mapping[str, int]) -> None:
    """Refuse writes to full parameters, which would be lost.

    Raises:
        CaptureError: one has another version than in `versions`.
    """
    for name, leaf in leaves.items():
        if version_of(leaf) != versions[name]:
            fix = "keep what changes in a buffer, or change parameters between steps"
            raise CaptureError(name, "the model's forward writes to this parameter", fix)


def digest(*names: str) -> str:
    """What the ranks tell each other of code that is no program."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
