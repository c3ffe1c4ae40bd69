"""Tensors of indices through the runtime: which element of which rank arrives where.

All ranks may be in one process: their collectives are plain copies (`LocalCollectives`), and each rank's part of a test
is a generator that yields between what it launches and what it waits for, so that all have launched by then. The same
generators run over a real process group, one rank a process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.rounding import rounded
from zcompile.ir.layout import Unit
from zcompile.runtime import shards
from zcompile.runtime.arena import Arenas
from zcompile.runtime.async_work import AsyncWork, TrafficMeter
from zcompile.runtime.collectives import Collectives, Member, Piece
from zcompile.runtime.executor import (
    BoundUnit,
    Full,
    Gradients,
    InsideAverages,
    accumulate,
    all_gather,
    all_reduce,
    gather_ahead,
    reduce_scatter,
    wait,
)
from zcompile.runtime.groups import AxisCommunicator, Communicator
from zcompile.runtime.recorder import Recorder
from zcompile.runtime.shards import UnitShards

T = TypeVar("T")
Steps = Generator[None, None, T]
CPU = torch.device("cpu")
PATTERN = 0xAB
"""What the bytes of an arena are before anything is put there."""


# -- ranks in one process ---------------------------------------------------------------------------------------------


@dataclass
class Post:
    """What the ranks have given to one collective. What they gave is read when the first of them waits for it."""

    given: dict[int, Any] = field(default_factory=dict)
    read: dict[int, Any] = field(default_factory=dict)

    def all(self, size: int) -> list[Any]:
        assert len(self.given) == size, "waited for before all have launched"
        self.read = self.read or copy.deepcopy(self.given)
        return [self.read[rank] for rank in range(size)]


@dataclass
class Switch:
    """What joins the ranks of one group: for each collective what each of them has given."""

    size: int
    posts: list[Post] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    sent: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    """What has left for whom: from, to, elements."""

    def post(self, rank: int, given: Any) -> Post:
        """Give it to the collective that is this rank's next one."""
        number = self.counts.get(rank, 0)
        self.counts[rank] = number + 1
        if number == len(self.posts):
            self.posts.append(Post())
        self.posts[number].given[rank] = given
        return self.posts[number]


class LocalWork(AsyncWork):
    """A collective that takes place when it is waited for: all must have launched it by then."""

    def __init__(self, size: int, post: Post, arrive: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self.size, self.post, self.arrive = size, post, arrive

    def wait(self) -> None:
        self.arrive(self.post.all(self.size))


class LocalCollectives(Collectives):
    """Plain copies between ranks of one process, of what is there when the first of them waits."""

    separates = True

    def __init__(self, switch: Switch, member: Member) -> None:
        super().__init__(member)
        self.switch = switch

    def stamp(self, run: int) -> None: ...

    def order_all(self) -> None: ...

    def _join(self, given: Any, arrive: Callable[[list[Any]], None]) -> AsyncWork:
        return LocalWork(self.size, self.switch.post(self.rank, given), arrive)

    def _sends(self, rows: Sequence[torch.Tensor]) -> None:
        self.switch.sent += [(self.rank, to, row.clone()) for to, row in enumerate(rows)]

    def _all_gather(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int) -> list[AsyncWork]:
        return [self._gather(full, shard, parts) for full, shard in zip(fulls, shards, strict=True)]

    def _gather(self, full: torch.Tensor, shard: torch.Tensor, parts: int) -> AsyncWork:
        check_sizes(full, shard, self.size)
        self._sends([shard] * self.size)

        def arrive(all_: list[torch.Tensor]) -> None:
            full.copy_(
                torch.cat([row for rows in zip(*(one.chunk(parts) for one in all_), strict=True) for row in rows])
            )

        return self._join(shard, arrive)

    def _reduce_scatter(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int
    ) -> list[AsyncWork]:
        return [self._scatter(shard, full, parts) for shard, full in zip(shards, fulls, strict=True)]

    def _scatter(self, shard: torch.Tensor, full: torch.Tensor, parts: int) -> AsyncWork:
        check_sizes(full, shard, self.size)
        sent = [torch.cat([part.chunk(self.size)[to] for part in full.chunk(parts)]) for to in range(self.size)]
        self._sends(sent if full.numel() else [full] * self.size)
        return self._join(sent, lambda all_: shard.copy_(mean([one[self.rank] for one in all_])))

    def _reduce_scatter_in(self, wire: torch.dtype, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        raise NotImplementedError

    def rows_staged(self, *, packed: bool) -> int:
        """As gloo's."""
        return packed * self.size + self.size - 2

    def _by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        bounds = [(begin, min(begin + width, shard.numel())) for begin in range(0, shard.numel(), width)]
        pieces = [piece(*bound) for bound in bounds]
        for one, (begin, end) in zip(pieces, bounds, strict=True):
            assert one.shape == (self.size, end - begin)
            self._sends(list(one))

        def arrive(all_: list[list[torch.Tensor]]) -> None:
            for number, (begin, end) in enumerate(bounds):
                shard[begin:end].copy_(mean([given[number][self.rank] for given in all_]))

        return self._join(pieces, arrive)

    def _all_reduce(self, tensor: torch.Tensor) -> AsyncWork:
        assert tensor.is_contiguous()
        return self._join(tensor, lambda all_: tensor.copy_(mean(all_)))

    def _all_reduce_in(self, wire: torch.dtype, tensor: torch.Tensor) -> AsyncWork:
        raise NotImplementedError

    def _broadcast(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        mine = self.rank == owner
        self._sends([tensor if mine else tensor[:0]] * self.size)
        return self._join(tensor if mine else None, lambda all_: tensor.copy_(all_[owner]))

    def _reduce(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        self._sends([tensor if rank == owner else tensor[:0] for rank in range(self.size)])

        def arrive(all_: list[torch.Tensor]) -> None:
            tensor.copy_(mean(all_) if self.rank == owner else torch.full_like(tensor, -7))

        return self._join(tensor, arrive)


def check_sizes(full: torch.Tensor, shard: torch.Tensor, size: int) -> None:
    assert full.numel() == size * shard.numel()
    assert full.dtype is shard.dtype
    assert full.is_contiguous()


def mean(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)


class LocalWaits:
    """Nobody has to be waited for."""

    explained = staticmethod(contextlib.nullcontext)


class LocalAxis(AxisCommunicator):
    """A rank of this process among those of one axis."""

    def __init__(self, switch: Switch, rank: int, axis: str) -> None:
        self.switch, self.size, self.rank, self.device, self.axis = switch, switch.size, rank, CPU, axis
        self.traffic, self.recorder, self.is_fake = TrafficMeter(), Recorder(), False
        self.waits = LocalWaits()  # type: ignore[assignment]
        member = Member(None, CPU, rank, switch.size, self.traffic, self.waits, axis=axis)  # type: ignore[arg-type]
        self.collectives = LocalCollectives(switch, member)


class LocalCommunicator(LocalAxis, Communicator):
    """One of several ranks of this process; with switches for its places inside and outside, of two axes."""

    def __init__(self, switch: Switch, rank: int, inside: Switch | None = None, outside: Switch | None = None) -> None:
        super().__init__(switch, rank, "dp")
        self.mesh = DeviceMesh("cpu", torch.arange(switch.size), _init_backend=False, _rank=rank)
        self.control, self.parts, self._parts = None, 1, []
        if inside is not None and outside is not None:
            self._parts = [
                LocalAxis(inside, rank % inside.size, "shard"),
                LocalAxis(outside, rank // inside.size, "replicate"),
            ]
            self.parts = outside.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The first rank comes first."""
        given = self.switch.post(self.rank, tensor.clone())
        tensor.copy_(given.given[0])


def together(parts: Sequence[Steps[T]]) -> list[T]:
    """Run the parts of all ranks, each up to its next yield in turn."""
    results: dict[int, T] = {}
    while len(results) < len(parts):
        for number, part in enumerate(parts):
            if number not in results:
                try:
                    next(part)
                except StopIteration as stop:
                    results[number] = stop.value
    return [results[number] for number in range(len(parts))]


def alone(part: Steps[T]) -> T:
    """Run one rank's part, where the others are elsewhere."""
    return together([part])[0]


# -- what is sent -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A unit on some ranks, and how it is sent."""

    world: int
    unit: Unit
    dtype: torch.dtype | None = None
    """What gathers are told to cast to."""
    reduce_dtype: torch.dtype | None = None
    """What reductions are told to cast to."""
    bucket: int | None = None
    room: int | None = None
    """Bytes of the place in an arena that lines have; None for memory of their own."""
    gradients: tuple[str, ...] = ()
    """How each parameter's gradient lies in memory: see `laid_out`; `none` for one that is not there."""
    hot: int | None = None
    """The only rank that has gradients that are not zero, where dtypes hold few numbers."""
    held: bool = False
    """True if each gradient is the sum of one that was held back and one more."""
    outer: int = 1
    """The ranks of an outer axis, over which shards are divided, too."""

    @property
    def total(self) -> int:
        return sum(param.numel for param in self.unit.params)

    def full(self, index: int) -> torch.Tensor:
        """A whole parameter: its elements are numbered, from 1, behind those of the parameters before."""
        begin = 1 + sum(param.numel for param in self.unit.params[:index])
        param = self.unit.params[index]
        return torch.arange(begin, begin + param.numel).to(param.dtype).view(param.shape)

    def gradient(self, index: int, rank: int) -> torch.Tensor | None:
        """What `rank` has of a parameter's gradient: with the rank's own multiple of all elements added."""
        kind = self.gradients[index]
        if kind == "none":
            return None
        value = self.full(index).to(torch.float64)
        if kind == "expanded" and value.numel():
            value = value.flatten()[0].expand(value.shape)
        value = value + rank * self.total if self.hot is None else value * (rank == self.hot)
        return laid_out(value.to(self.unit.params[index].full_dtype), kind)

    def average(self, index: int) -> torch.Tensor | None:
        """The mean of all ranks' gradients, by hand: whole, in the dtype of the shard."""
        param, grads = self.unit.params[index], [self.gradient(index, rank) for rank in range(self.world)]
        if grads[0] is None:
            return None
        if self.hot is None:
            total = sum((grad.to(torch.float64) for grad in grads if grad is not None), torch.tensor(0.0))
            return (total * (1 + self.held) / self.world).to(param.dtype).view(param.shape)
        kind = self.reduce_dtype if param.reduction_dtype is self.reduce_dtype is not None else param.full_dtype
        one = grads[self.hot]
        assert one is not None
        return one.to(kind).div(self.world).to(param.dtype).view(param.shape)


def laid_out(value: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values, in memory that is laid out otherwise."""
    if kind == "transposed" and value.dim() > 1:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "strided" and value.dim():
        wide = value.new_zeros(*value.shape[:-1], 2 * value.shape[-1])
        wide[..., ::2] = value
        return wide[..., ::2]
    if kind == "expanded" and value.numel():
        return value.flatten()[0].clone().expand(value.shape)
    return value.contiguous()


def rows_of(full: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """What torch gives to a rank of a tensor that is sharded on dim 0."""
    chunks = torch.chunk(full, world)
    return chunks[rank] if rank < len(chunks) else full[:0]


def part(case: Case, index: int, full: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's own of a parameter or its gradient."""
    param = case.unit.params[index]
    if param.owner is not None:
        return full if rank == param.owner else full[:0]
    return rows_of(full, case.world, rank) if param.shards else full


def arriving(case: Case, index: int, full: torch.Tensor) -> torch.Tensor:
    """A whole parameter as it arrives, where each rank's rows may travel in fewer bits."""
    wire = case.unit.params[index].outer_gather_dtype
    if wire is None or case.outer == 1:
        return full
    return torch.cat([rounded(rows_of(full, case.world, rank), wire) for rank in range(case.world)])


# -- one rank's part of a test ----------------------------------------------------------------------------------------


def adopted(case: Case, communicator: Communicator) -> BoundUnit:
    """The unit's shards, with the values of the first rank; others begin with other ones."""
    held = UnitShards(case.unit, communicator)
    for index, param in enumerate(case.unit.params):
        value = case.full(index) if communicator.rank == 0 else torch.full(param.shape, -1.0, dtype=param.dtype)
        held.adopt(param, nn.Parameter(value))
    return BoundUnit(held, case.unit, updater=lambda _: None)


def place(case: Case) -> torch.Tensor | None:
    """A place in an arena whose bytes are all `PATTERN`, with as many around it."""
    if case.room is None:
        return None
    loan = Arenas(CPU).lend(case.room + 128)
    loan[0 : len(loan)].fill_(PATTERN)
    return loan[64 : 64 + case.room]


def around(at: torch.Tensor) -> bool:
    """True if nothing was written before or behind a place."""
    memory = torch.empty(0, dtype=torch.uint8).set_(at.untyped_storage())
    before, behind = memory[:64], memory[64 + at.numel() : 128 + at.numel()]
    return bool((before == PATTERN).all() and (behind == PATTERN).all())


def wrong(what: str, found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    same = found.dtype is wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    return [] if same else [f"{what} is {found.dtype} {found.tolist()}, not {wanted.dtype} {wanted.tolist()}"]


def gathering(case: Case, bound: BoundUnit) -> Steps[list[str]]:
    """What is wrong with shards and with what is gathered: into an arena, kept, after a change, and ahead of time."""
    rank, found = bound.shards.communicator.rank, list[str]()
    params = case.unit.params
    for index, param in enumerate(params):
        found += wrong(f"shard of {param.name}", bound.shards.local(param), part(case, index, case.full(index), rank))
        if param.shards:
            rest = bound.shards.padded_shard(param)[bound.shards.local(param).numel() :]
            found += wrong(f"padding of {param.name}", rest, torch.zeros_like(rest))
    at = place(case)
    for keeps, ahead, changed in ((False, False, 0), (True, False, 0), (True, False, 1), (False, True, 1)):
        if ahead and case.outer > 1:
            continue  # what is gathered outside first is not gathered ahead
        if changed:
            negate(bound)
        bound.shards.drop_stale_copy()
        if ahead:
            gather_ahead(bound, dtype=case.dtype)
            negate(bound)  # what is on its way stays as it was: a copy is sent
        secondary = None
        if case.outer > 1 and case.unit.is_sharded:
            wire = case.unit.outer_gather_dtype
            (ranks,) = bound.shards.communicator.outside
            outside = all_gather(bound, ranks, keep=not keeps, dtype=case.dtype, wire=wire)
            yield
            secondary = wait(outside)
            assert isinstance(secondary, torch.Tensor)
        gather = all_gather(bound, secondary, keep=keeps, dtype=case.dtype, at=None if keeps else at)
        yield
        full = wait(gather)
        assert isinstance(full, Full)
        for index, param in enumerate(params):
            sign = -1 if changed and not ahead else 1
            wanted = arriving(case, index, sign * case.full(index)).to(param.full_dtype)
            if not ahead or (param.shards and case.world > 1):  # what a rank has whole is not sent
                found += wrong(f"{param.name} gathered, keep={keeps} ahead={ahead}", full[index], wanted)
            found += [] if full[index].is_contiguous() else [f"{param.name} is not contiguous"]
    return found + ([] if at is None or around(at) else ["a gather has written beside its place"])


def negate(bound: BoundUnit) -> None:
    """Write to all shards, as an optimizer does."""
    for param in bound.unit.params:
        bound.shards.local(param).detach().neg_()


def reducing(case: Case, bound: BoundUnit, *, scattered: bool) -> Steps[list[str]]:
    """What is wrong with averaged gradients: who gets which rows of them, and what they were divided by."""
    rank, found, at = bound.shards.communicator.rank, list[str](), place(case)
    params = case.unit.params
    if case.held:
        for name, grad in accumulate(bound, [case.gradient(i, rank) for i in range(len(params))]).tensors.items():
            bound.shards.hold(name, grad)
    grads = [case.gradient(index, rank) for index in range(len(params))]
    box = list(grads)
    with mock.patch.object(shards, "backward_number", return_value=1):  # what is held back is added once in a backward
        if scattered:
            reduction = reduce_scatter(bound, box, dtype=case.reduce_dtype, bucket=case.bucket, at=at)
        else:
            reduction = all_reduce(bound, box, dtype=case.reduce_dtype)
    assert box == []
    yield
    result = wait(reduction)
    if isinstance(result, InsideAverages):
        reduce = reduce_scatter if scattered else all_reduce
        reduction = reduce(bound, result, *bound.shards.communicator.outside, dtype=case.reduce_dtype)
        yield
        result = wait(reduction)
    assert isinstance(result, Gradients)
    wanted = {p.name: average for i, p in enumerate(params) if (average := case.average(i)) is not None}
    found += [] if result.tensors.keys() == wanted.keys() else [f"gradients of {sorted(result.tensors)}"]
    for index, param in enumerate(params):
        if param.name in wanted and param.name in result.tensors:
            whole = wanted[param.name]
            mine = part(case, index, whole, rank) if scattered else whole
            found += wrong(f"gradient of {param.name}, scattered={scattered}", result.tensors[param.name], mine)
    return found + ([] if at is None or around(at) else ["a reduction has written beside its place"])


def battery(case: Case, communicator: Communicator) -> Steps[list[str]]:
    """All of it."""
    bound = adopted(case, communicator)
    found = yield from gathering(case, bound)
    for scattered in (True, False):
        found += yield from reducing(case, adopted(case, communicator), scattered=scattered)
    return found


def local_ranks(world: int, outer: int = 1) -> tuple[Switch, list[LocalCommunicator]]:
    switch, inner = Switch(world), world // outer
    if outer == 1:
        return switch, [LocalCommunicator(switch, rank) for rank in range(world)]
    inside, outside = [Switch(inner) for _ in range(outer)], [Switch(outer) for _ in range(inner)]
    pairs = [(inside[rank // inner], outside[rank % inner]) for rank in range(world)]
    return switch, [LocalCommunicator(switch, rank, *pair) for rank, pair in enumerate(pairs)]


def numbers(tensors: Iterable[torch.Tensor]) -> list[float]:
    """All elements that are not zero, in order of size."""
    return sorted(number for tensor in tensors for number in tensor.flatten().tolist() if number)
