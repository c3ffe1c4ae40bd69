"""The executor: the functions that a printed program calls.

What a program sees of a unit is a `BoundUnit`: it knows in which messages the unit's parameters travel there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.ir.layout import Param, Unit
from zcompile.runtime.arena import ActivationStack, Places
from zcompile.runtime.async_work import AsyncWork
from zcompile.runtime.device import current_stream, stream_number
from zcompile.runtime.groups import AxisCommunicator
from zcompile.runtime.messages import flattened, pack, part_of, piece_of, sent_in_place, unpack
from zcompile.runtime.offloaded_activations import Arrival, OffloadedActivations
from zcompile.runtime.recorder import Message, Span
from zcompile.runtime.shards import Full, UnitShards

Arrivals = list[tuple[list[int], torch.Tensor, AsyncWork | None]]
"""Per message the parameters that it is of, where it arrives, and what brings it, if it has to come."""


@dataclass(frozen=True)
class BoundUnit:
    """A unit as a program sees it: the shards, and the messages that its passes chose."""

    shards: UnitShards
    unit: Unit
    updater: Callable[[Gradients], None] | None = None
    """What steps the optimizer for the unit's parameters, in programs that do."""

    @property
    def kept(self) -> Full | None:
        """The full copy of these parameters that stages 1 and 2 keep, if there is one; it may be stale."""
        return self.shards.kept.get(self.unit.names)

    def keep(self, full: Full) -> None:
        self.shards.kept[self.unit.names] = full

    def __getitem__(self, index: int) -> torch.Tensor:
        """A whole parameter, for regions of a program that gathers nothing (stage 0)."""
        return self.shards.local(self.unit.params[index])

    def messages(self, wanted: Callable[[int], bool]) -> list[list[int]]:
        """The parameters that travel together, as indices, those not wanted left out."""
        filtered = ([index for index in message if wanted(index)] for message in self.unit.messages)
        return [message for message in filtered if message]


@dataclass
class Gather:
    """A gather in flight: per message what arrives and which parameters it brings."""

    bound: BoundUnit
    arrivals: Arrivals
    keep: bool
    places: Places | None = None
    done: Full | None = None
    sent: Sequence[tuple[list[Param], torch.Tensor]] = ()
    """Of a gather for a later step: what this rank has sent, for that step to see whether it still holds."""
    writes: int = 0
    """What `UnitShards.writes` said when it was started."""
    stream: int = 0
    """The stream that it was started on, to which the allocator gives its memory again."""

    def wait(self) -> Full:
        """The full parameters, contiguous, in the unit's order."""
        if self.done is not None:
            return self.done
        unit, shards = self.bound.unit, self.bound.shards
        ranks = shards.communicator.sharded
        if stream_number(ranks.device) != self.stream:  # a step's on its stream, for the next on another
            for _, arrived, _ in self.arrivals:
                arrived.record_stream(current_stream(arrived.device))
        tensors: list[torch.Tensor | None] = [
            None if param.shards or shards.memory.is_away else shards.local(param).to(param.full_dtype)
            for param in unit.params
        ]
        for message, arrived, work in self.arrivals:
            if work is not None and unit.params[message[0]].shards and ranks.size > 1:
                _land(work, "all_gather", unit.name, ranks, arrived.nbytes)
            elif work is not None:  # it was only copied
                work.wait()
            full = unpack(arrived, [unit.params[i] for i in message], self.places)
            for index, tensor in zip(message, full, strict=True):
                tensors[index] = tensor
        straight = {message[0]: arrived for message, arrived, _ in self.arrivals if len(message) == 1}
        self.arrivals = []
        result = Full(unit, tensors, straight if self.keep else None)
        if self.keep:
            result.writes = self.writes
            self.bound.keep(result)
        return result


@dataclass
class Reduction:
    """A reduction in flight: per message what arrives and which gradients it brings."""

    bound: BoundUnit
    arrivals: Arrivals
    scattered: bool
    ranks: AxisCommunicator
    """Those over which it averages."""

    def wait(self) -> Gradients | ShardAverages:
        """The averaged gradients; where ranks of another axis have the same shards, those of this axis alone."""
        unit, of_shards = self.bound.unit, self.ranks is self.bound.shards.communicator.sharded
        for message, arrived, work in self.arrivals:
            if work is not None and self.scattered and of_shards and unit.params[message[0]].shards:
                nbytes = sum(unit.params[index].padded_numel for index in message) * arrived.itemsize
                _land(work, "reduce_scatter", unit.name, self.ranks, nbytes)
            elif work is not None:
                _land(
                    work, "all_reduce", unit.name, self.ranks, 2 * arrived.nbytes, "" if of_shards else self.ranks.axis
                )
        averages = ShardAverages(self.bound, [(one, arrived) for one, arrived, _ in self.arrivals], self.scattered)
        self.arrivals = []
        replicas = self.bound.shards.communicator.replicas
        return averages.gradients() if replicas is None or self.ranks is replicas else averages


@dataclass
class ShardAverages:
    """Averaged gradients of a unit, per message as they were sent; they may be those over one of two axes."""

    bound: BoundUnit
    arrivals: Sequence[tuple[list[int], torch.Tensor]]
    scattered: bool

    def parts(self) -> Iterator[tuple[Param, torch.Tensor]]:
        """Each parameter, and the average shaped like this rank's part of it, a view of what has arrived."""
        params, rank = self.bound.unit.params, self.bound.shards.communicator.sharded.rank
        for message, arrived in self.arrivals:
            offset = 0
            for param in (params[index] for index in message):
                scattered = self.scattered and bool(param.shards)
                yield param, part_of(arrived, offset, param, rank if scattered else None)
                offset += param.kept_numel(rank) if scattered else param.numel

    def gradients(self) -> Gradients:
        """The averages over all ranks, in the dtypes of their parameters, where these are."""
        params, home = self.bound.unit.params, self.bound.shards.memory.home
        self.arrivals = [(message, arrived.to(params[message[0]].dtype)) for message, arrived in self.arrivals]
        return Gradients(self.bound.shards, {param.name: home(part) for param, part in self.parts()})


@dataclass(frozen=True)
class Gradients:
    """Gradients of a unit by parameter name: averaged and ready for `.grad`, or (`held`) this rank's own, full."""

    shards: UnitShards
    tensors: dict[str, torch.Tensor]
    held: bool = False


def unbox(box: list[Any]) -> list[Any]:
    """What is in `box`, which is emptied: whoever has taken it out holds the only references."""
    values = list(box)
    box.clear()
    return values


def all_gather(
    bound: BoundUnit, *, keep: bool = False, dtype: torch.dtype | None = None, at: torch.Tensor | None = None
) -> Gather:
    """Start gathering the full parameters of a unit; nothing is sent where a copy is kept (see `runtime.stale_copies`).

    With `dtype`, shards that the layout computes with in it are cast before they are sent. `at`: where it arrives.
    """
    ahead: Gather | None = bound.shards.ahead.pop(bound.unit.names, None) if bound.updater is not None else None
    if ahead is not None:
        return ahead
    kept = bound.kept if keep else None
    if kept is not None and not kept.is_stale:
        return Gather(bound, [], keep, done=kept)
    return _start(bound, keep, dtype, kept, at=at)


def gather_ahead(bound: BoundUnit, *, keep: bool = False, dtype: torch.dtype | None = None) -> None:
    """Start gathering a unit for the next step, whose `all_gather` takes it unless the shards have changed by then.

    What is sent is a copy of the shards: between steps anybody may write to them, while it is still being read.
    """
    kept = bound.shards.kept.pop(bound.unit.names, None) if keep else None
    bound.shards.ahead[bound.unit.names] = _start(bound, keep, dtype, kept, copies=True)


def _start(
    bound: BoundUnit,
    keep: bool,
    dtype: torch.dtype | None,
    kept: Full | None,
    *,
    copies: bool = False,
    at: torch.Tensor | None = None,
) -> Gather:
    """Start gathering, into the memory of `kept` where there is one. `copies`: what is sent may be written to."""
    shards, unit = bound.shards, bound.unit
    communicator, memory = shards.communicator.sharded, shards.memory
    memory.before(unit.name)
    places = Places(at, communicator.device)
    messages = bound.messages(lambda index: bool(unit.params[index].shards))
    params = [[unit.params[index] for index in message] for message in messages]
    sent, owners = [shards.wire(some) for some in params], [some[0].owner for some in params]
    kinds = [dtype if dtype is not None and some[0].compute_dtype is dtype else some[0].dtype for some in params]
    arrivals: Arrivals
    if communicator.size == 1 and not memory.is_away:
        arrivals = [(message, shard.to(kind), None) for message, shard, kind in zip(messages, sent, kinds, strict=True)]
    else:
        arrived = []
        for message, some, kind in zip(messages, params, kinds, strict=True):
            # A stale copy's memory is used again: fresh memory costs the kernel's zeros, page by page. Nobody reads
            # what was there: a backward that still would is refused, and on CUDA the gather waits for the current
            # stream.
            stale = kept.arrived.get(message[0]) if kept is not None and len(message) == 1 else None
            numel = sum(param.padded_numel for param in some)
            arrived.append(places.empty(numel, kind) if stale is None else stale)
        with memory.sending():
            sent = sent_in_place(sent, arrived, owners, communicator, always=copies or memory.is_away)
            works: Sequence[AsyncWork | None]
            if communicator.size > 1:
                works = _gathered(communicator, arrived, sent, owners)
            else:
                works = [memory.copied(full) for full in arrived]
        arrivals = list(zip(messages, arrived, works, strict=True))
    arrivals += _whole(bound)
    told = list(zip(params, sent, strict=True)) if copies else []
    writes = shards.writes() if keep or copies else 0
    stream = stream_number(communicator.device)
    return Gather(bound, arrivals, keep, places, sent=told, writes=writes, stream=stream)


def _gathered(
    ranks: AxisCommunicator, arrived: list[torch.Tensor], sent: list[torch.Tensor], owners: list[int | None]
) -> list[AsyncWork]:
    """Start what brings each message: from all ranks, or from its owner, which has put it where it arrives."""
    divided = [index for index, owner in enumerate(owners) if owner is None]
    works = ranks.all_gather_many([arrived[index] for index in divided], [sent[index] for index in divided])
    started = dict(zip(divided, works, strict=True))
    return [
        started[index] if owner is None else ranks.broadcast_from(owner, arrived[index])
        for index, owner in enumerate(owners)
    ]


def _whole(bound: BoundUnit) -> Iterator[tuple[list[int], torch.Tensor, AsyncWork | None]]:
    """Start copying what every rank has whole to the device, if it is away."""
    shards, memory = bound.shards, bound.shards.memory
    for index, param in enumerate(bound.unit.params):
        if memory.is_away and not param.shards:
            arrived = torch.empty(param.numel, dtype=param.full_dtype, device=shards.communicator.device)
            with memory.sending():
                arrived.copy_(shards.local(param).view(-1), non_blocking=True)
                work = memory.copied(arrived)
            yield [index], arrived, work


def reduce_scatter(
    bound: BoundUnit,
    grads: list[torch.Tensor | None],
    *,
    dtype: torch.dtype | None = None,
    bucket: int | None = None,
    at: torch.Tensor | None = None,
) -> Reduction:
    """Start averaging gradients; each rank gets its shard (all of it, of a parameter that is not sharded).

    With `dtype`, gradients that the layout reduces in it are cast before they are sent. What takes memory beside
    gradients and shards is sent in pieces of at most `bucket` bytes, or of one row of the parameter for each rank. What
    is copied as a whole is copied to `at`.
    """
    return _reduce(bound, unbox(grads), dtype, scattered=True, bucket=bucket, at=at)


def all_reduce(
    bound: BoundUnit,
    grads: list[torch.Tensor | None] | ShardAverages,
    replicas: AxisCommunicator | None = None,
    *,
    dtype: torch.dtype | None = None,
    wire: torch.dtype | None = None,
) -> Reduction:
    """Start averaging gradients; each rank gets all. Works in place where it can: gradients are the program's own.

    With `replicas`, ranks that have the same shards, over these: what has been averaged over those that shard. It is
    averaged in the dtype in which that was, `dtype` where one is named, and travels as `wire`, where that is.
    """
    if not isinstance(grads, ShardAverages):
        return _reduce(bound, unbox(grads), dtype, scattered=False)
    assert replicas is not None, "a program says over which ranks"
    arrivals: Arrivals = [
        (message, tensor, _across(bound.unit.params[message[0]], tensor, replicas, wire))
        for message, tensor in grads.arrivals
    ]
    return Reduction(bound, arrivals, grads.scattered, replicas)


def _across(
    param: Param, tensor: torch.Tensor, replicas: AxisCommunicator, wire: torch.dtype | None
) -> AsyncWork | None:
    """Start averaging a message, of which `param` is the first, over replicas, if there is something to average."""
    # Empty are averages that another rank owns, and so those of all ranks with the same shards.
    if replicas.size == 1 or not tensor.numel():
        return None
    return replicas.all_reduce(tensor, wire if param.outer_dtype is wire else None)


def average(bound: BoundUnit, grads: list[torch.Tensor | None], *, scattered: bool) -> Gradients:
    """The averages of gradients over all ranks, now: for those that are reduced outside of a program."""
    reduce = reduce_scatter if scattered else all_reduce
    dtype = bound.unit.reduction_dtype
    averages = reduce(bound, grads, dtype=dtype).wait()
    if isinstance(averages, ShardAverages):
        replicas, wire = bound.shards.communicator.replicas, bound.unit.outer_dtype
        averages = all_reduce(bound, averages, replicas, dtype=dtype, wire=wire).wait()
    assert isinstance(averages, Gradients), "there are two axes at most"
    return averages


def accumulate(bound: BoundUnit, grads: list[torch.Tensor | None]) -> Gradients:
    """Hold gradients back until a later reduction of the same parameters adds them to its own."""
    given = zip(bound.unit.params, unbox(grads), strict=True)
    tensors = {param.name: grad.to(param.dtype).contiguous() for param, grad in given if grad is not None}
    return Gradients(bound.shards, tensors, held=True)


def update(bound: BoundUnit, grads: Gradients) -> None:
    """Step the optimizer for the parameters of a unit; the memory of their gradients is free when this returns."""
    assert bound.updater is not None, "programs with updates are run by a train step"
    bound.shards.memory.landed()
    bound.updater(grads)
    grads.tensors.clear()


def wait(started: Gather | Reduction | Arrival) -> Full | Gradients | ShardAverages | torch.Tensor:
    """The full parameters of a gather, averaged gradients in the dtype of their shards, or an activation."""
    return started.wait()


def release(full: Full) -> None:
    """Drop full parameters: their memory is back with the allocator when this returns.

    On CUDA the allocator hands it only to later work of the current stream, which runs after the kernels that read it;
    a later gather into it starts only once the current stream has come to its launch.
    """
    full.release()


def copy(value: torch.Tensor, *, strided: bool = False) -> torch.Tensor:
    """A copy in memory of its own: contiguous, or, where that is dense, laid out like the value."""
    return value.clone(memory_format=torch.preserve_format if strided else torch.contiguous_format)


def store(value: torch.Tensor, stack: ActivationStack) -> torch.Tensor:
    """A copy of a tensor, laid out alike, on top of the stack; beside it, where that is full."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    taken = stack.take((last + 1) * value.itemsize) if value.numel() else None
    if taken is None:
        return value.new_empty_strided(value.shape, value.stride()).copy_(value)
    return taken.view(value.dtype).as_strided(value.shape, value.stride()).copy_(value)


def offload(value: torch.Tensor, away: OffloadedActivations) -> torch.Tensor:
    """Start moving an activation out of the device's memory; gives what stands for it."""
    return away.offload(value)


def fetch(offloaded: torch.Tensor, away: OffloadedActivations) -> Arrival:
    """Start bringing an activation back."""
    return away.fetch(offloaded)


def _reduce(
    bound: BoundUnit,
    grads: list[torch.Tensor | None],
    dtype: torch.dtype | None,
    *,
    scattered: bool,
    bucket: int | None = None,
    at: torch.Tensor | None = None,
) -> Reduction:
    places = Places(at, bound.shards.communicator.device)
    communicator, params = bound.shards.communicator.sharded, bound.unit.params
    grads = [grad if grad is None else bound.shards.with_held(p, grad) for p, grad in zip(params, grads, strict=True)]
    arrivals: Arrivals = []
    messages = bound.messages(lambda index: grads[index] is not None)
    if communicator.size == 1:  # nothing is sent, so nothing is packed
        messages = [[index] for message in messages for index in message]
    together = []
    for message in messages:
        first = params[message[0]]
        cast = dtype if first.reduction_dtype is dtype else None
        parts = [(params[index], grads[index]) for index in message]
        work: AsyncWork | None = None
        if scattered and first.owner is not None:
            arrivals.append((message, *_to_owner(communicator, first.owner, flattened([g for _, g in parts], cast))))
            continue
        if scattered and first.shards:
            pieces = _by_pieces(communicator, parts, cast, bucket)
            if pieces is not None:
                arrivals.append((message, *pieces))
                continue
            arrived = pack(parts, communicator.size, cast, places)
            if communicator.size > 1:
                together.append((message, arrived))
                continue
        else:
            arrived = flattened([grad for _, grad in parts], cast)
            work = None if communicator.size == 1 else communicator.all_reduce(arrived)
        arrivals.append((message, arrived, work))
    mine = [torch.empty(s.numel() // communicator.size, dtype=s.dtype, device=s.device) for _, s in together]
    works = communicator.reduce_scatter_many(mine, [sent for _, sent in together])
    arrivals += [(message, shard, work) for (message, _), shard, work in zip(together, mine, works, strict=True)]
    return Reduction(bound, arrivals, scattered, communicator)


def _to_owner(ranks: AxisCommunicator, owner: int, sent: torch.Tensor) -> tuple[torch.Tensor, AsyncWork | None]:
    """Where the average of what all ranks send arrives, empty on all but its owner, and the work that brings it."""
    work = None if ranks.size == 1 else ranks.reduce_to(owner, sent)
    return (sent if ranks.rank == owner else sent.new_empty(0)), work


def _by_pieces(
    communicator: AxisCommunicator,
    parts: list[tuple[Param, torch.Tensor | None]],
    dtype: torch.dtype | None,
    bucket: int | None,
) -> tuple[torch.Tensor, AsyncWork] | None:
    """Where this rank's shard of a gradient's average arrives, and the work that brings it; None if it goes whole."""
    size, (param, grad) = communicator.size, parts[0]
    assert grad is not None, "messages hold parameters with gradients only"
    kind = dtype or grad.dtype
    if bucket is None or len(parts) > 1 or param.padded_numel * kind.itemsize <= bucket or size == 1:
        return None
    packed = param.padded_numel != param.numel or kind is not grad.dtype or not grad.is_contiguous()
    if not (staged := communicator.collectives.rows_staged(packed=packed)):
        return None
    row = param.row_numel
    width = max(bucket // (staged * row * kind.itemsize), 1) * row
    arrived = torch.empty(param.shard_numel, dtype=kind, device=grad.device)
    piece = functools.partial(piece_of, param, grad, kind, packed)
    return arrived, communicator.reduce_scatter_by_pieces(arrived, piece, width)


def _land(work: AsyncWork, operation: str, unit: str, ranks: AxisCommunicator, payload: int, group: str = "") -> None:
    """Wait for a collective, and note when it flew; `group`: its axis, if that is not the one that shards."""
    recorder, start = ranks.recorder, ranks.recorder.now()
    work.wait()
    waited = Span("wait", start, recorder.now())
    sent = payload * (ranks.size - 1) // ranks.size
    recorder.add_message(Message(operation, unit, sent, work.started, work.ended, waited, group))


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "unbox": unbox,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "update": update,
    "gather_ahead": gather_ahead,
    "accumulate": accumulate,
    "wait": wait,
    "release": release,
    "copy": copy,
    "store": store,
    "offload": offload,
    "fetch": fetch,
}
