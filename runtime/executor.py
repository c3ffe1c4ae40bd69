"""The executor: the functions that a printed program calls.

A program sees a unit as a `BoundUnit`: its shards, and how its parameters are grouped into messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zcompile.ir.layout import Message, Unit, message_places, secondary_bytes
from zcompile.runtime.arena import ActivationStack, Places
from zcompile.runtime.async_work import AsyncWork
from zcompile.runtime.device import current_stream, stream_number
from zcompile.runtime.groups import AxisCommunicator
from zcompile.runtime.low_precision import decode_shards
from zcompile.runtime.messages import joined, pack, piece_inside, sent_in_place, unpack
from zcompile.runtime.offloaded_activations import Arrival, OffloadedActivations
from zcompile.runtime.shards import Full, Secondary, UnitShards
from zcompile.runtime.stage_links import Receiving, Sending, receive, send
from zcompile.torch_internals.distributed import add_all
from zcompile.torch_internals.dtensor import local_tensor

Arrivals = list[tuple[Message, torch.Tensor, AsyncWork | None]]
"""Per message, the buffer it arrives in, and the work that fills it, if any."""


@dataclass(frozen=True)
class BoundUnit:
    """A unit as a program sees it: the shards, and the messages that its passes chose."""

    shards: UnitShards
    unit: Unit
    updater: Callable[[Gradients], None] | None = None
    """Steps the optimizer for the unit's parameters, in programs that update."""

    @property
    def kept(self) -> Full | None:
        """The full copy of these parameters that stages 1 and 2 keep, if there is one; it may be stale."""
        return self.shards.kept.get(self.unit.names)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The whole parameters, for regions of a program that gathers nothing (stage 0)."""
        found = [self.shards.parameters[name] for name in self.unit.names]
        return [one.detach() if one.__class__ is nn.Parameter else local_tensor(one) for one in found]


@dataclass
class Gather:
    """A gather in flight."""

    bound: BoundUnit
    arrivals: Arrivals
    keep: bool
    places: Places | None = None
    done: Full | None = None
    sent: Sequence[tuple[Message, torch.Tensor]] = ()
    """Of a gather for a later step: what this rank has sent, so that the step can check whether it is still current."""
    writes: int = 0
    """`UnitShards.writes()` when it was started."""
    stream: int | None = None
    """Of such a gather: the stream on which it was started, to which the allocator returns its memory."""

    def wait(self) -> Full:
        """The full parameters, contiguous, in the unit's order."""
        if self.done is not None:
            return self.done
        unit, shards = self.bound.unit, self.bound.shards
        ranks = shards.communicator.inside
        if self.stream is not None and stream_number(ranks.device) != self.stream:  # gathered ahead on another
            for _, arrived, _ in self.arrivals:
                arrived.record_stream(current_stream(arrived.device))
        tensors: list[torch.Tensor | None] = [
            None if param.shards or shards.memory.is_away else shards.local(param).to(param.full_dtype)
            for param in unit.params
        ]
        is_alone = shards.communicator.size == 1 and not shards.memory.is_away
        for message, arrived, work in self.arrivals:
            if work is not None and message.is_sharded and ranks.size > 1:
                _land(work, "all_gather", unit.name, ranks, arrived.nbytes)
            elif work is not None:  # it was only copied
                work.wait()
            if is_alone and arrived.dtype is message.params[0].dtype:
                full = shards.locals(message.params)  # the shards themselves: nothing was copied
            else:
                full = unpack(arrived, message.params, self.places)
            for index, tensor in zip(message.places, full, strict=True):
                tensors[index] = tensor
        direct = {one.places[0]: arrived for one, arrived, _ in self.arrivals if len(one.places) == 1}
        self.arrivals = []
        result = Full(unit, tensors, direct if self.keep else None)
        if self.keep:
            result.writes = self.writes
            shards.kept[unit.names] = result
        return result


@dataclass
class OutsideGather:
    """Secondary shards in flight: their destination, and the buffer that each message arrives in, encoded or not."""

    bound: BoundUnit
    ranks: AxisCommunicator
    secondary: Secondary
    arrivals: Sequence[tuple[torch.Tensor, AsyncWork]]
    keep: bool

    def wait(self) -> torch.Tensor:
        """The secondary shards of the unit, uint8 [n]."""
        for (message, tensor), (arrived, work) in zip(self.secondary.messages, self.arrivals, strict=False):
            _land(work, "all_gather", self.bound.unit.name, self.ranks, arrived.nbytes, self.ranks.axis)
            if message.wire is not None:  # this rank's own shard is decoded, too
                rows = arrived.view(self.ranks.size, -1)
                decoded = decode_shards(rows, message.shard_numels, message.wire, tensor.dtype)
                tensor.view(self.ranks.size, -1).copy_(decoded)
        self.arrivals = ()
        if self.keep:
            self.bound.shards.secondary[self.bound.unit.names] = self.secondary
        return self.secondary.memory


@dataclass
class Reduction:
    """A reduction in flight."""

    bound: BoundUnit
    arrivals: Arrivals
    scattered: bool
    ranks: AxisCommunicator
    """The ranks that it averages over."""

    def wait(self, *, added: bool = False) -> Gradients | InsideAverages:
        """The averaged gradients; with several axes, averages over the inner ones until all are done.

        `added`: return averages on the device, in the dtypes of their parameters, to be summed there.
        """
        communicator = self.bound.shards.communicator
        inside = self.ranks is communicator.inside
        divided = inside or communicator.parts > 1
        for message, arrived, work in self.arrivals:
            if work is None:
                continue
            operation, payload = "all_reduce", 2 * arrived.nbytes
            if self.scattered and divided and message.is_sharded:
                operation = "reduce_scatter"
                payload = (message.numel if inside else arrived.numel() * self.ranks.size) * arrived.itemsize
            _land(work, operation, self.bound.unit.name, self.ranks, payload, "" if inside else self.ranks.axis)
        landed = [(one, arrived) for one, arrived, _ in self.arrivals]
        self.arrivals = []
        if self.ranks is not communicator.axes[-1]:
            return InsideAverages(self.bound, landed, self.scattered, communicator.parts if self.scattered else 1)
        averages = InsideAverages(self.bound, landed, self.scattered)
        if not added:
            return averages.gradients()
        averages.cast()
        return averages


@dataclass
class InsideAverages:
    """Averaged gradients of a unit on the device, by message.

    They are averages over the inner ones of several axes, or of micro-batches that are summed.
    """

    bound: BoundUnit
    arrivals: Sequence[tuple[Message, torch.Tensor]]
    scattered: bool
    primary: int = 1
    """Number of primary shards in each average: several if the outer axis divides it further."""

    def parts(self) -> dict[str, torch.Tensor]:
        """Averages by parameter name, shaped like this rank's part, as views of what has arrived.

        With several primary shards they are rows of elements, including padding.
        """
        rank, found = self.bound.shards.communicator.dividing.rank, dict[str, torch.Tensor]()
        for message, arrived in self.arrivals:
            scattered = self.scattered and message.is_sharded
            if scattered and self.primary > 1:
                rows = arrived.view(self.primary, -1).split(message.shard_numels, dim=1)
                found |= zip([param.name for param in message.params], rows, strict=True)
            else:
                for param, part, shape in message.parts(rank if scattered else None):
                    found[param.name] = arrived if arrived.shape == shape else arrived[part].view(shape)
        return found

    def cast(self) -> None:
        """Convert to the dtypes of the parameters."""
        self.arrivals = [
            (message, arrived if arrived.dtype is message.params[0].dtype else arrived.to(message.params[0].dtype))
            for message, arrived in self.arrivals
        ]

    def gradients(self) -> Gradients:
        """The averages over all ranks, in the dtypes of their parameters, moved to where the shards are."""
        self.cast()
        return Gradients(self.bound.shards, self.bound.shards.memory.home(self.parts()))


@dataclass(frozen=True)
class Gradients:
    """Gradients of a unit by parameter name: averaged and ready for `.grad`, or (`held`) this rank's own, full."""

    shards: UnitShards
    tensors: dict[str, torch.Tensor]
    held: bool = False


def unbox(box: list[Any]) -> list[Any]:
    """The values in `box`, which is emptied, so that the caller holds the only references."""
    values = list(box)
    box.clear()
    return values


def all_gather(
    bound: BoundUnit,
    given: AxisCommunicator | torch.Tensor | None = None,
    *,
    keep: bool = False,
    dtype: torch.dtype | None = None,
    at: torch.Tensor | None = None,
    wire: torch.dtype | None = None,
) -> Gather | OutsideGather:
    """Start gathering the full parameters of a unit; sends nothing if a current copy is kept (see `runtime.shards`).

    `given`: the ranks of the outer axis, to gather secondary shards; or these shards, to gather full parameters.
    `dtype`: shards that the layout computes in it are cast before sending. `at`: the memory to gather into. `wire`: the
    dtype that is sent along the outer axis, for parameters whose layout has it.
    """
    if isinstance(given, AxisCommunicator):
        return _gather_outside(bound, given, keep=keep, dtype=dtype, wire=wire)
    ahead: Gather | None = bound.shards.ahead.pop(bound.unit.names, None) if bound.updater is not None else None
    if ahead is not None:
        return ahead
    kept = bound.kept if keep else None
    if kept is not None and not kept.is_stale:
        return Gather(bound, [], keep, done=kept)
    return _start(bound, keep, dtype, kept, at=at, secondary=given)


def _gather_outside(
    bound: BoundUnit, outside: AxisCommunicator, *, keep: bool, dtype: torch.dtype | None, wire: torch.dtype | None
) -> OutsideGather:
    """Start gathering secondary shards, unless they, or the unit's full copy, are kept and current."""
    shards, device = bound.shards, outside.device
    if (kept := shards.secondary.get(bound.unit.names)) is not None:
        # Kept by a step on another stream: without this, that stream's later work could reuse the memory once it is
        # dropped, while a gather on this stream still sends from it.
        if stream_number(device) != kept.stream:
            kept.memory.record_stream(current_stream(device))
        return OutsideGather(bound, outside, kept, (), keep)
    if (full := bound.kept) is not None and not full.is_stale:
        nothing = Secondary(torch.empty(0, dtype=torch.uint8, device=device), [])
        return OutsideGather(bound, outside, nothing, (), keep=False)
    return _start_outside(bound, outside, keep=keep, dtype=dtype, wire=wire)


def _start_outside(
    bound: BoundUnit, outside: AxisCommunicator, *, keep: bool, dtype: torch.dtype | None, wire: torch.dtype | None
) -> OutsideGather:
    shards = bound.shards
    shards.memory.before(bound.unit.name)
    secondary = _secondary_of(bound, dtype, wire)
    secondary.writes, secondary.stream = shards.writes() if keep else 0, stream_number(outside.device)
    arrived = [
        torch.empty(one.gathered_bytes(outside.size), dtype=torch.uint8, device=outside.device) if one.wire else tensor
        for one, tensor in secondary.messages
    ]
    with shards.memory.sending():
        sent = [shards.sent(message) for message, _ in secondary.messages]
        sent = sent_in_place(sent, arrived, [None] * len(sent), outside, always=shards.memory.is_away)
        works = outside.collectives.all_gather_many(arrived, sent)
    return OutsideGather(bound, outside, secondary, list(zip(arrived, works, strict=True)), keep)


def _secondary_of(
    bound: BoundUnit, dtype: torch.dtype | None, wire: torch.dtype | None = None, memory: torch.Tensor | None = None
) -> Secondary:
    """The secondary shards in `memory`, or buffers for them in new memory."""
    inside = bound.shards.communicator.inside
    messages = bound.unit.sent(None, dtype, inside=inside.size, wire=wire)
    sizes = [message.nbytes for message in messages]
    if memory is None:
        memory = torch.empty(secondary_bytes(sizes), dtype=torch.uint8, device=inside.device)
    places = zip(messages, message_places(sizes), strict=True)
    return Secondary(memory, [(message, memory[a:b].view(message.dtype)) for message, (a, b) in places])


def gathered(bound: BoundUnit) -> Full:
    """Gather the full parameters of a unit and wait for them: for code outside of a program."""
    communicator, dtype, secondary = bound.shards.communicator, bound.unit.compute_dtype, None
    if communicator.parts > 1 and bound.unit.is_sharded:
        (outside,), wire = communicator.outside, bound.unit.outer_gather_dtype
        secondary = _start_outside(bound, outside, keep=False, dtype=dtype, wire=wire).wait()
    return _start(bound, False, dtype, None, secondary=secondary).wait()


def gather_ahead(bound: BoundUnit, *, keep: bool = False, dtype: torch.dtype | None = None) -> None:
    """Start gathering a unit for the next step, whose `all_gather` takes it unless the shards have changed by then.

    Sends a copy of the shards: between steps anyone may write to the shards while the gather still reads them.
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
    secondary: torch.Tensor | None = None,
) -> Gather:
    """Start gathering, into the memory of `kept` if there is one.

    `copies`: send a copy, because the shards may be written to meanwhile. `secondary`: secondary shards to send in
    place of this rank's own.
    """
    shards, unit = bound.shards, bound.unit
    communicator, memory = shards.communicator.inside, shards.memory
    if secondary is None:
        memory.before(unit.name)
    places, messages = Places(at, communicator.device), unit.sent(None, dtype)
    if secondary is None:
        sent = [shards.wire(message.params) for message in messages]
    else:
        sent = [tensor for _, tensor in _secondary_of(bound, dtype, memory=secondary).messages]
    away = memory.is_away and secondary is None
    arrivals: Arrivals
    if communicator.size == 1 and not away:
        arrivals = [(message, shard.to(message.dtype), None) for message, shard in zip(messages, sent, strict=True)]
    else:
        arrived = []
        for message in messages:
            # Reuse a stale copy's memory: the kernel has to zero fresh memory, page by page. Nobody reads its old
            # values: a backward that would is refused, and on CUDA the gather waits for the current stream.
            stale = kept.arrived.get(message.places[0]) if kept is not None and len(message.places) == 1 else None
            arrived.append(places.empty(message.numel, message.dtype) if stale is None else stale)
        with memory.sending():
            owners = [message.owner for message in messages]
            if secondary is None:
                sent = sent_in_place(sent, arrived, owners, communicator, always=copies or away)
            works: Sequence[AsyncWork | None]
            if communicator.size > 1:
                works = _gathered(communicator, arrived, sent, owners, shards.communicator.parts)
            else:
                works = [memory.copied(full) for full in arrived]
        arrivals = list(zip(messages, arrived, works, strict=True))
    arrivals += _whole(bound)
    sent_by_message = list(zip(messages, sent, strict=True)) if copies else []
    writes = shards.writes() if keep or copies else 0
    stream = stream_number(communicator.device) if copies else None
    return Gather(bound, arrivals, keep, places, sent=sent_by_message, writes=writes, stream=stream)


def _gathered(
    ranks: AxisCommunicator,
    arrived: list[torch.Tensor],
    sent: list[torch.Tensor],
    owners: list[int | None],
    parts: int,
) -> list[AsyncWork]:
    """Start gathering each message: from all ranks, or from its owner, which has put it where it arrives."""
    divided = [index for index, owner in enumerate(owners) if owner is None]
    given = [arrived[index] for index in divided], [sent[index] for index in divided]
    works = ranks.collectives.all_gather_many(*given, parts)
    started = dict(zip(divided, works, strict=True))
    return [
        started[index] if owner is None else ranks.collectives.broadcast_from(owner, arrived[index])
        for index, owner in enumerate(owners)
    ]


def _whole(bound: BoundUnit) -> Iterator[tuple[Message, torch.Tensor, AsyncWork | None]]:
    """Start copying unsharded parameters to the device, if they are not there."""
    shards, memory = bound.shards, bound.shards.memory
    for index, param in enumerate(bound.unit.params):
        if memory.is_away and not param.shards:
            arrived = torch.empty(param.numel, dtype=param.full_dtype, device=shards.communicator.device)
            with memory.sending():
                arrived.copy_(shards.local(param).view(-1), non_blocking=True)
                work = memory.copied(arrived)
            yield Message((index,), (param,), param.full_dtype, param.numel), arrived, work


def reduce_scatter(
    bound: BoundUnit,
    grads: list[torch.Tensor | None] | InsideAverages,
    outside: AxisCommunicator | None = None,
    *,
    dtype: torch.dtype | None = None,
    bucket: int | None = None,
    at: torch.Tensor | None = None,
    wire: torch.dtype | None = None,
) -> Reduction:
    """Start averaging gradients; each rank gets its shard, or all of an unsharded parameter.

    `dtype`: gradients that the layout reduces in it are cast before sending. `bucket`: gradients that need staging
    memory are sent in pieces of at most so many bytes, but at least one row of the parameter per rank. `at`: the memory
    to pack whole messages into. `outside`: the ranks of the outer axis, with averages over the inner one.
    """
    if isinstance(grads, InsideAverages):
        return _reduce_outside(bound, grads, outside, wire, scatter=True)
    return _reduce(bound, unbox(grads), dtype, scattered=True, bucket=bucket, at=at)


def all_reduce(
    bound: BoundUnit,
    grads: list[torch.Tensor | None] | InsideAverages,
    outside: AxisCommunicator | None = None,
    *,
    dtype: torch.dtype | None = None,
    wire: torch.dtype | None = None,
) -> Reduction:
    """Start averaging gradients; each rank gets all of them. In place if possible: the program owns its gradients.

    `outside`: the ranks of the outer axis, with averages over the inner one, which are averaged in their own dtype.
    `wire`: the dtype that is sent there, for parameters whose layout has it.
    """
    if isinstance(grads, InsideAverages):
        return _reduce_outside(bound, grads, outside, wire, scatter=False)
    return _reduce(bound, unbox(grads), dtype, scattered=False)


def _reduce_outside(
    bound: BoundUnit,
    averages: InsideAverages,
    outside: AxisCommunicator | None,
    wire: torch.dtype | None,
    *,
    scatter: bool,
) -> Reduction:
    """Start averaging, over the ranks of the outer axis, the averages over the inner one."""
    assert outside is not None, "programs name the ranks of the outer axis"
    arrivals: Arrivals = []
    for message, tensor in averages.arrivals:
        scatters = scatter and message.is_sharded and outside.size > 1
        arrived = tensor.new_empty(tensor.numel() // outside.size) if scatters else tensor
        # Averages that another rank owns are empty here, and on all ranks with the same shards: all skip them alike.
        work: AsyncWork | None = None
        if outside.size > 1 and tensor.numel():
            sent_as = wire if message.params[0].outer_dtype is wire and wire is not tensor.dtype else None
            average = outside.collectives
            work = average.reduce_scatter(arrived, tensor, sent_as) if scatters else average.all_reduce(tensor, sent_as)
        arrivals.append((message, arrived, work))
    return Reduction(bound, arrivals, averages.scattered, outside)


def average(bound: BoundUnit, grads: list[torch.Tensor | None], *, scattered: bool) -> Gradients:
    """Average gradients over all ranks and wait: for those that are reduced outside of a program."""
    communicator, dtypes = bound.shards.communicator, (bound.unit.reduction_dtype, bound.unit.outer_dtype)
    averages: Any = grads
    for outside in (None, *communicator.outside):
        scatters = scattered and (outside is None or communicator.parts > 1)
        reduce = reduce_scatter if scatters else all_reduce
        averages = reduce(bound, averages, outside, dtype=dtypes[0], wire=dtypes[1]).wait()
    assert isinstance(averages, Gradients), "they are averaged over all axes"
    return averages


def accumulate(bound: BoundUnit, grads: list[torch.Tensor | None]) -> Gradients:
    """Hold gradients back until a later reduction of the same parameters adds them to its own."""
    given = zip(bound.unit.params, unbox(grads), strict=True)
    tensors = {param.name: grad.to(param.dtype).contiguous() for param, grad in given if grad is not None}
    return Gradients(bound.shards, tensors, held=True)


Summed = list[torch.Tensor | None] | Gradients | InsideAverages
"""Gradients of a unit: this rank's own, or averages."""


def add(bound: BoundUnit, sums: Summed, grads: Summed, *, dtype: torch.dtype | None = None) -> Summed:
    """Add the gradients of another micro-batch to `sums`, in place; returns the sums, and empties both lists.

    `dtype`: gradients that the layout sums in it are cast first.
    """
    if isinstance(sums, Gradients):
        assert isinstance(grads, Gradients), "averages are added to averages"
        add_all([sums.tensors[name] for name in grads.tensors], list(grads.tensors.values()))
        grads.tensors.clear()
        return sums
    if isinstance(sums, InsideAverages):
        assert isinstance(grads, InsideAverages), "averages are added to averages"
        mine_by_name, theirs = sums.parts(), grads.parts()
        add_all([mine_by_name[name] for name in theirs], list(theirs.values()))
        grads.arrivals = []
        return sums
    assert isinstance(grads, list), "this rank's own gradients are added to its own"
    mine, others = unbox(sums), unbox(grads)
    if dtype is not None:
        casts = [dtype if param.sum_dtype is dtype else None for param in bound.unit.params]
        mine = [one if one is None or to is None else one.to(to) for one, to in zip(mine, casts, strict=True)]
    pairs = [(one, other) for one, other in zip(mine, others, strict=True) if one is not None and other is not None]
    if pairs:
        add_all(*map(list, zip(*pairs, strict=True)))
    return mine


def write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a new value into a buffer of the model."""
    buffer.copy_(value)


def plus(one: torch.Tensor, other: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum in new memory; `dtype`: its dtype, if not that of the operands."""
    return one + other if dtype is None else one.to(dtype) + other


def update(bound: BoundUnit, grads: Gradients | InsideAverages) -> None:
    """Step the optimizer for the parameters of a unit; the memory of their gradients is free when this returns."""
    assert bound.updater is not None, "programs with updates are run by a train step"
    if isinstance(grads, InsideAverages):
        grads = grads.gradients()
    bound.shards.memory.landed()
    bound.updater(grads)
    grads.tensors.clear()


def wait(
    started: Gather | OutsideGather | Reduction | Arrival | Receiving | Sending, *, added: bool = False
) -> Full | Gradients | InsideAverages | torch.Tensor | None:
    """The result of async work: full parameters, averaged gradients, an activation, or a value from another stage."""
    return started.wait(added=True) if added and isinstance(started, Reduction) else started.wait()


def release(full: Full) -> None:
    """Drop full parameters: their memory is back with the allocator when this returns.

    On CUDA the allocator gives it only to later work of the current stream, which runs after the kernels that read it;
    a later gather into it first waits for the current stream.
    """
    full.release()


def copy(value: torch.Tensor, *, strided: bool = False) -> torch.Tensor:
    """A copy in new memory: contiguous, or, with `strided`, with the value's strides if it is dense."""
    return value.clone(memory_format=torch.preserve_format if strided else torch.contiguous_format)


def store(value: torch.Tensor, stack: ActivationStack) -> torch.Tensor:
    """A copy with the same strides, on top of the stack; in newly allocated memory if the stack is full."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    taken = stack.take((last + 1) * value.itemsize) if value.numel() else None
    if taken is None:
        return value.new_empty_strided(value.shape, value.stride()).copy_(value)
    return taken.view(value.dtype).as_strided(value.shape, value.stride()).copy_(value)


def offload(value: torch.Tensor, away: OffloadedActivations) -> torch.Tensor:
    """Start moving an activation out of the device's memory; returns its token."""
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
    whole, params = bound.shards.communicator, bound.unit.params
    communicator, shards = whole.inside, whole.dividing.size
    grads = bound.shards.with_held(params, grads)
    arrivals: Arrivals = []
    names = tuple([param.name for param, grad in zip(params, grads, strict=True) if grad is not None])
    messages, coalesced = bound.unit.sent(names, dtype, packed=shards > 1), []
    if whole.size == 1 and dtype is None:  # nothing is sent, so nothing is packed, flattened or cast
        own_grads: Sequence[Any] = grads
        arrivals = [(message, own_grads[message.places[0]].contiguous(), None) for message in messages]
        messages = ()
    for message in messages:
        cast = dtype if message.params[0].reduction_dtype is dtype else None
        own = [grads[index] for index in message.places]
        work: AsyncWork | None = None
        if scattered and message.owner is not None:
            arrivals.append((message, *_to_owner(communicator, message.owner, joined(own, cast))))
            continue
        if scattered and message.is_sharded:
            if bucket is not None and (pieces := _by_pieces(communicator, whole.parts, message, own, cast, bucket)):
                arrivals.append((message, *pieces))
                continue
            arrived = pack(message.params, own, shards, cast, places)
            if communicator.size > 1:
                coalesced.append((message, arrived))
                continue
        else:
            arrived = joined(own, cast)
            work = None if communicator.size == 1 else communicator.collectives.all_reduce(arrived)
        arrivals.append((message, arrived, work))
    mine = [torch.empty(s.numel() // communicator.size, dtype=s.dtype, device=s.device) for _, s in coalesced]
    works = communicator.collectives.reduce_scatter_many(mine, [sent for _, sent in coalesced], whole.parts)
    arrivals += [(message, shard, work) for (message, _), shard, work in zip(coalesced, mine, works, strict=True)]
    return Reduction(bound, arrivals, scattered, communicator)


def _to_owner(ranks: AxisCommunicator, owner: int, sent: torch.Tensor) -> tuple[torch.Tensor, AsyncWork | None]:
    """Start averaging onto `owner`; returns the result's buffer, empty on other ranks, and the work that fills it."""
    work = None if ranks.size == 1 else ranks.collectives.reduce_to(owner, sent)
    return (sent if ranks.rank == owner else sent.new_empty(0)), work


def _by_pieces(
    communicator: AxisCommunicator,
    primary: int,
    message: Message,
    grads: Sequence[torch.Tensor | None],
    dtype: torch.dtype | None,
    bucket: int,
) -> tuple[torch.Tensor, AsyncWork] | None:
    """Start averaging a gradient in pieces; returns this rank's buffer and its work, None if the gradient goes whole.

    `primary`: number of primary shards in this rank's part.
    """
    size, param, grad = communicator.size, message.params[0], grads[0]
    assert grad is not None, "messages hold parameters with gradients only"
    kind = dtype or grad.dtype
    if len(grads) > 1 or message.numel * kind.itemsize <= bucket or size == 1:
        return None
    packed = param.padded_numel != param.numel or kind is not grad.dtype or not grad.is_contiguous()
    if not (staged := communicator.collectives.rows_staged(packed=packed)):
        return None
    row = param.row_numel
    width = max(bucket // (staged * row * kind.itemsize), 1) * row
    arrived = torch.empty(primary * param.shard_numel, dtype=kind, device=grad.device)
    piece = functools.partial(piece_inside, param, grad, kind, size, packed=packed)
    return arrived, communicator.collectives.reduce_scatter_by_pieces(arrived, piece, width)


def _land(work: AsyncWork, operation: str, unit: str, ranks: AxisCommunicator, payload: int, group: str = "") -> None:
    """Wait for a collective and record it; `group`: its axis, if that is not the one that shards."""
    ranks.recorder.land(work, operation, unit, payload * (ranks.size - 1) // ranks.size, group)


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
    "add": add,
    "plus": plus,
    "write": write,
    "send": send,
    "recv": receive,
    "copy": copy,
    "store": store,
    "offload": offload,
    "fetch": fetch,
}
