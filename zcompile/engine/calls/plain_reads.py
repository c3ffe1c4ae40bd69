"""Reads of parameters by a module's plain Python, its own and others', and writes to them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zcompile.engine.calls.leaves import Leaf
from zcompile.errors import ParameterError
from zcompile.frontend.written_inputs import refuse_written_parameter
from zcompile.model.sharding import Site
from zcompile.runtime.tensors.parameter import ShardedParameter
from zcompile.torch_internals.autograd import recomputes, version_of, within_function_transform
from zcompile.torch_internals.modules import parameters_of

Gather = Callable[[Sequence[Site], str], dict[str, Leaf]]


class PlainReads:
    """Parameters that a module's plain Python reads from other modules: gathered when they are read.

    Within such code a shard acts as its full parameter, as in `F.linear(x, self.embedding.weight)`. That is kept until
    the code that first reads it has returned. A checkpointed function runs again within a backward, where no module's
    code runs around it: there `again` gathers the full parameter for each read.

    Writes by code that may make them are passed to `write` when it returns, and before it calls anything else that
    could read the shards.
    """

    def __init__(self, sites: Sequence[Site], again: Gather, write: Callable[[Mapping[str, Leaf]], None]) -> None:
        self._all, self._sites, self._again = sites, {id(site.shard): site for site in sites}, again
        self._write = write
        self.running: list[_Code] = []
        """Code that is running, outermost first."""
        self._code: _Code | None = None
        self._is_aside = False
        self._read: set[str] = set()
        """Names that plain Python of the model has read so far: its recomputations read no others."""
        for site in sites:
            shard: object = site.shard
            if isinstance(shard, ShardedParameter):
                shard.zcompile_reader = weakref.ref(self)

    def full(self, parameter: ShardedParameter) -> nn.Parameter | None:
        """All of a parameter, gathered if it was not; None if no plain Python of a model runs. Collective.

        Raises:
            ParameterError: it would be gathered within a transform of torch.func, which would not see its gradient.
        """
        site, code = self._read_site(parameter), self._code
        if site is None:
            return None
        if code is None or site.name not in code.leaves:
            if within_function_transform():
                fix = "read it before, outside of the transform"
                raise ParameterError(site.name, "is first read within a transform of torch.func", fix)
            if code is None:
                with self.aside():
                    return self._again([site], site.name)[site.name]
            with self.aside(), torch.set_grad_enabled(code.trains):  # read without gradients, it may be used with
                code.add(code.gather([site], site.name))
            code.read.add(site.name)
            self._read.add(site.name)
        return code.leaves[site.name]

    def kind(self, parameter: ShardedParameter) -> torch.Tensor | None:
        """A tensor with the dtype and device of the full parameter, if plain Python of a model asks for them."""
        site = self._read_site(parameter)
        return None if site is None else site.placeholder

    def _read_site(self, parameter: ShardedParameter) -> Site | None:
        """The site of a parameter, if the model's own code reads it as plain Python."""
        code, site = self._code, self._sites.get(id(parameter))
        if code is not None:
            return site if code.thread == threading.get_ident() else None
        known = site is not None and site.name in self._read and not self._is_aside
        return site if known and recomputes() else None

    @contextlib.contextmanager
    def within(self, gather: Gather, own: dict[str, Leaf], *, writes: bool, place: str) -> Iterator[None]:
        """Around plain Python of a module; `gather` returns full parameters, for a named reader.

        `own`: the module's own parameters, which are full already. `writes`: it may write to parameters. `place`: names
        the code, for errors.

        Raises:
            CaptureError, ParameterError, AgreementError: its writes cannot be kept.
        """
        before = self._code, self._is_aside
        self._read.update(own)
        self._code = code = _Code(gather, torch.is_grad_enabled(), writes, place)
        code.add(own)
        self.running.append(code)
        self._is_aside = False
        try:
            yield
            self._settle(code)
        finally:
            self.running.remove(code)
            self._code, self._is_aside = before
            self._put_back(code)

    def settle(self) -> None:
        """Copy the writes so far of running code to the shards, since its callees read them. Collective."""
        for code in self.running:
            self._settle(code)

    def _settle(self, code: _Code) -> None:
        if not (written := code.written()):
            return
        if not code.writes:
            refuse_written_parameter(next(iter(written)), code.place)
        with self.aside():
            self._write(written)
            for other in self.running:
                other.take(written)

    def _put_back(self, code: _Code) -> None:
        """Restore shards that code has replaced by full parameters, as `other.weight *= 2` does."""
        for site in self._all if code.read else ():
            if site.name in code.read and parameters_of(site.owner).get(site.key) is code.leaves[site.name]:
                parameters_of(site.owner)[site.key] = site.shard

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around a program, or zcompile's own code: shards are shards."""
        before = self._code, self._is_aside
        self._code, self._is_aside = None, True
        try:
            yield
        finally:
            self._code, self._is_aside = before


@dataclass(eq=False)
class _Code:
    """The plain Python of one call of a module."""

    gather: Gather
    trains: bool
    writes: bool
    """True if it may write to parameters."""
    place: str
    thread: int = field(default_factory=threading.get_ident)
    """Other threads, such as one that saves or averages shards meanwhile, are not the model's code."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """Names that it has read from other modules."""
    _versions: dict[str, int] = field(default_factory=dict)

    def add(self, leaves: Mapping[str, Leaf]) -> None:
        self.leaves |= leaves
        self._versions |= {name: version_of(leaf) for name, leaf in leaves.items()}

    def written(self) -> dict[str, Leaf]:
        """The leaves written to since they were gathered or settled."""
        return {name: leaf for name, leaf in self.leaves.items() if version_of(leaf) != self._versions[name]}

    @torch.no_grad()
    def take(self, leaves: Mapping[str, Leaf]) -> None:
        """Copy the values of `leaves`, which other code has written, into its own leaves of these names."""
        for name in leaves.keys() & self.leaves.keys():
            if self.leaves[name] is not leaves[name]:
                self.leaves[name].copy_(leaves[name])
            self._versions[name] = version_of(self.leaves[name])
