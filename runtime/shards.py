"""Shards: what this rank keeps of each unit, as DTensor parameters that are views of one flat buffer per dtype.

    full [10, 4], world 3      rank 0: rows 0..3   rank 1: rows 4..7   rank 2: rows 8, 9 and two rows of padding

A padded shard is contiguous in the buffer, so a gather sends it without a copy. The padding of all ranks is the tail of
the gathered parameter, so the full parameter is a contiguous view of what arrived.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from zcompile.ir.layout import Message, Param, Unit
from zcompile.runtime.async_work import AsyncWork
from zcompile.runtime.groups import Communicator
from zcompile.runtime.low_precision import as_sent, encode_shards
from zcompile.runtime.tensors.explained import explain, gradients_like
from zcompile.runtime.tensors.parameter import ShardedParameter, sharded
from zcompile.runtime.tensors.placement import ModelParallel, Placing, along
from zcompile.torch_internals.autograd import backward_number, writes_to
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import local_tensor, local_values


class Full:
    """The full parameters of a unit, in the unit's order; emptied by `release`."""

    __slots__ = ("arrived", "is_stale", "tensors", "unit", "writes")

    def __init__(
        self, unit: Unit, tensors: list[torch.Tensor | None], arrived: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self.unit = unit
        self.tensors = tensors
        self.arrived = arrived or {}
        """The padded 1-D buffers of parameters that were gathered directly into them, by index in the unit."""
        self.is_stale = False
        """True for an outdated kept copy: only its memory is used, for the next gather."""
        self.writes = 0
        """Of a kept copy: `UnitShards.writes()` when it was gathered."""

    def __getitem__(self, index: int) -> torch.Tensor:
        tensor = self.tensors[index]
        assert tensor is not None, f"{self.unit.params[index].name} is used after its release"
        return tensor

    def release(self) -> None:
        self.tensors = [None] * len(self.tensors)


@dataclass
class Secondary:
    """A rank's secondary shards of a unit: the primary shards of all ranks of its outer group, itself included."""

    memory: torch.Tensor
    """All of it, uint8 [n]: see `zcompile.ir.layout`."""
    messages: list[tuple[Message, torch.Tensor]]
    """Each message, and its part of `memory`, 1-D."""
    writes: int = 0
    """`UnitShards.writes()` when it was gathered."""
    stream: int = 0
    """The stream on which its memory was allocated, to which the allocator returns it."""


@dataclass
class HeldGradient:
    """This rank's own gradient of a parameter, held back by `no_sync` until a later backward reduces it."""

    total: torch.Tensor
    """Full, in the parameter's dtype. Its average over the ranks is the gradient, including what was averaged
    before."""
    shown: torch.Tensor
    """The object in `.grad` meanwhile; if that is another one, the user has dropped the gradient."""
    taken: int | None = None
    """The number of the backward whose reduction adds it; ignored once that has failed."""


class UnitShards:
    """This rank's shards of one unit: the parameters to train, and the memory that gathers send from.

    `memory`: what allocates it; by default the device's.
    """

    def __init__(self, unit: Unit, communicator: Communicator, memory: ShardMemory | None = None) -> None:
        self.unit = unit
        self.communicator = communicator
        self.memory = memory or ShardMemory(communicator.device)
        sizes, self.offsets = _sizes(unit, communicator.dividing.rank)
        self.buffers = {dtype: self.memory.zeros(unit.name, size, dtype) for dtype, size in sizes.items()}
        self.parameters: dict[str, nn.Parameter] = {}
        self._runs: dict[tuple[str, ...], slice | None] = {}
        """The slice of the buffer for parameters that are sent together; None if they are not adjacent."""
        self.adopted: dict[str, int] = {}
        """Version counters of parameters when they were adopted."""
        self._placings: dict[str, Placing] = {}
        """Placements of parameters that are DTensors."""
        self.kept: dict[tuple[str, ...], Full] = {}
        """Full copies that stages 1 and 2 keep between programs, by the parameters that they hold; some may be
        stale."""
        self.secondary: dict[tuple[str, ...], Secondary] = {}
        """Secondary shards that are kept until parameters change, by the parameters that they are of."""
        self.ahead: dict[tuple[str, ...], Any] = {}
        """Gathers (`executor.Gather`) in flight for the next step, by the parameters that they gather."""
        self.user_params: dict[str, nn.Parameter] = {}
        """Under `torch.compile`: the parameters of the user's module, which have the same `.grad` as the shards."""
        self._held: dict[str, HeldGradient] = {}

    def adopt(self, param: Param, source: nn.Parameter, parallel: ModelParallel | None = None) -> nn.Parameter:
        """Create the parameter that replaces `source`, with the values of the mesh's first rank. Collective.

        `source` keeps its memory until the caller frees it. `parallel`: what the model is divided over already.
        """
        value, mesh = local_tensor(source), self.communicator.dividing_mesh
        self.communicator.broadcast(value)
        self._placings[param.name] = along(param, mesh) if parallel is None else parallel.sharded(param, source)
        start, stop = param.shard_rows(self.communicator.dividing.rank)
        return self._adopt(param, self._placed(param, value[start:stop] if param.shards else value))

    def adopt_plain(self, param: Param, source: nn.Parameter, parallel: ModelParallel | None = None) -> nn.Parameter:
        """Take the user's own parameter, as stage 0 does, with the values of the mesh's first rank. Collective."""
        self.communicator.broadcast(local_tensor(source))
        if parallel is not None and isinstance(source, DTensor):
            self._placings[param.name] = parallel.whole(source)
        return self._adopt(param, source)

    def _adopt(self, param: Param, parameter: nn.Parameter) -> nn.Parameter:
        self.parameters[param.name], self.adopted[param.name] = parameter, writes_to([parameter])
        return parameter

    def copied(self, unit: Unit, communicator: Communicator, memory: ShardMemory | None = None) -> UnitShards:
        """A copy in memory of its own, without gradients; nothing is communicated.

        `unit`: this one, or one with the same parameters in other dtypes, to which values are converted.
        """
        made = UnitShards(unit, communicator, memory)
        made._placings = dict(self._placings)
        for param in unit.params:
            old = self.parameters[param.name]
            new = made._placed(param, local_tensor(old)) if isinstance(old, ShardedParameter) else deepcopy(old)
            new.data = new.data if new.dtype is param.dtype else new.data.to(param.dtype)
            new.requires_grad_(old.requires_grad)
            made._adopt(param, new)
        return made

    def take_place_of(self, other: UnitShards) -> None:
        """Move this unit's parameters into the objects of `other`, which optimizers may hold."""
        for param in self.unit.params:
            old, new = other.parameters[param.name], self.parameters[param.name]
            if isinstance(old, ShardedParameter):
                vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})
                swap_tensors(old, new)
            else:
                old.data = new.data
            self._adopt(param, old)

    def _placed(self, param: Param, mine: torch.Tensor) -> nn.Parameter:
        """A parameter in this unit's memory, with the values of `mine`, this rank's part of it."""
        if param.shards:
            local = self.padded_shard(param)[: mine.numel()].view(mine.shape)
            local.copy_(mine)
        else:
            local = self.memory.own(mine.to(param.dtype))
        result = nn.Parameter(self._placings[param.name].place(local), requires_grad=param.trainable)
        sharded(result, param.name, self.communicator.waits)
        return result

    def gradients(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values for `.grad`, given tensors that are shaped like this rank's parts of these parameters."""
        if not self._placings:
            return dict(tensors)
        names, parts = list(tensors), list(tensors.values())
        with no_torch_function():
            params: list[Any] = [self.parameters[name] for name in names]
            # Others get a new DTensor each, which is slow in torch.
            alike = [
                param.__class__ is ShardedParameter and param.dtype is part.dtype
                for param, part in zip(params, parts, strict=True)
            ]
            chosen, given = [*itertools.compress(params, alike)], [*itertools.compress(parts, alike)]
            made: dict[str, torch.Tensor] = dict(
                zip(
                    itertools.compress(names, alike),
                    gradients_like(chosen, given, self.communicator.waits),
                    strict=True,
                )
            )
            for name, part, is_alike in zip(names, parts, alike, strict=True):
                if not is_alike:
                    made[name] = self._laid_out(name, part)
        return made

    def _laid_out(self, name: str, part: torch.Tensor) -> torch.Tensor:
        placing = self._placings.get(name)
        return part if placing is None else explain(placing.place(part), self.communicator.waits)

    def shard_of(self, name: str, full: torch.Tensor) -> DTensor:
        """This rank's part of `full`, which is shaped like the full parameter `name`, in new memory."""
        param = self.unit.params[self.unit.index(name)]
        start, stop = param.shard_rows(self.communicator.dividing.rank)
        mine = full[start:stop] if param.shards else full
        return self._placings[name].place(self.memory.own(mine))

    def padded_shard(self, param: Param) -> torch.Tensor:
        """This rank's padded shard of `param`, 1-D, a view of the buffer."""
        offset = self.offsets[param.name]
        return self.buffers[param.dtype][offset : offset + param.kept_numel(self.communicator.dividing.rank)]

    def wire(self, params: Sequence[Param]) -> torch.Tensor:
        """The padded shards of `params` end to end: a view of the buffer if they are adjacent, else a copy."""
        names = tuple([param.name for param in params])
        if names not in self._runs:
            first, last, rank = params[0], params[-1], self.communicator.dividing.rank
            start, stop = self.offsets[first.name], self.offsets[last.name] + last.kept_numel(rank)
            are_neighbours = stop - start == sum(param.kept_numel(rank) for param in params)
            self._runs[names] = slice(start, stop) if are_neighbours else None
        if (run := self._runs[names]) is not None:
            return self.buffers[params[0].dtype][run]
        return torch.cat([self.padded_shard(param) for param in params])

    def sent(self, message: Message) -> torch.Tensor:
        """What a message sends along the outer axis; encoded on the device if it is sent in fewer bits."""
        if message.wire is None:
            return self.wire(message.params)
        flat = self.wire(message.params).to(self.communicator.device, non_blocking=True)
        return encode_shards(flat, message.shard_numels, message.wire)

    def as_gathered(self, params: Sequence[Param], dtype: torch.dtype) -> torch.Tensor:
        """`wire(params)` on the device, with the values that a gather in `dtype` gives."""
        if (wire := params[0].outer_gather_dtype) is None:
            return self.wire(params).to(self.communicator.device, dtype, non_blocking=True)
        flat = self.wire(params).to(self.communicator.device, non_blocking=True)
        return as_sent(flat, [param.shard_numel for param in params], wire, dtype)

    def locals(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """`local` of several parameters, in few calls."""
        return local_values([self.parameters[param.name] for param in params])

    def local(self, param: Param) -> torch.Tensor:
        """This rank's values of `param`: its rows, or the whole of it where it is not sharded."""
        return local_tensor(self.parameters[param.name])

    def is_sharded(self, name: str) -> bool:
        """False for a parameter that every rank has whole."""
        return bool(self.unit.params[self.unit.index(name)].shards)

    # -- gradients held back --------------------------------------------------------------------------------------

    def hold(self, name: str, gradient: torch.Tensor | None) -> None:
        """Add to the gradient that is held back for the parameter `name`; `.grad` shows it, unreduced.

        None: the parameter got no gradient.
        """
        parameter = self.parameters[name]
        if gradient is None:
            return
        if (held := self.held(name)) is not None:
            held.total.add_(gradient)
            return
        if parameter.grad is not None:
            self._add_averaged(name, gradient, parameter.grad)
        placing = self._placings.get(name)
        shown = gradient
        if placing is not None:
            shown = explain(placing.unreduced().place(gradient), self.communicator.waits)
        self._held[name] = HeldGradient(gradient, shown)
        self._show(name, shown)

    def _add_averaged(self, name: str, gradient: torch.Tensor, averaged: torch.Tensor) -> None:
        """Add an averaged gradient to this rank's own, so that the average of the sum holds it once."""
        param = self.unit.params[self.unit.index(name)]
        if param.shards:
            start, stop = param.shard_rows(self.communicator.dividing.rank)
            # Only one of the ranks that divide it adds this part, so scale it; replicas all add the same.
            gradient[start:stop].add_(local_tensor(averaged), alpha=self.communicator.dividing.size)
        else:
            gradient.add_(local_tensor(averaged))

    def held(self, name: str) -> HeldGradient | None:
        """What is held back for the parameter `name`, unless the user has dropped it from `.grad`."""
        if (held := self._held.get(name)) is None:
            return None
        holders = (self.parameters[name], self.user_params.get(name))
        return held if all(one is None or one.grad is held.shown for one in holders) else None

    def _show(self, name: str, gradient: torch.Tensor | None) -> None:
        self.parameters[name].grad = gradient
        if name in self.user_params:
            self.user_params[name].grad = gradient

    def with_held(self, params: Sequence[Param], gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients, which the caller owns, plus those held back for the same parameters, once per backward."""
        if not self._held:
            return gradients
        pairs = zip(params, gradients, strict=True)
        return [None if gradient is None else self._with_held(param, gradient) for param, gradient in pairs]

    def _with_held(self, param: Param, gradient: torch.Tensor) -> torch.Tensor:
        held, running = self.held(param.name), backward_number()
        if held is None or held.taken == running:
            return gradient
        held.taken = running
        # contiguous(): an expanded scalar, such as the gradient of a sum, cannot be added to in place.
        return gradient.to(param.dtype).contiguous().add_(held.total)

    def is_taken(self, name: str) -> bool:
        """True if the backward that runs now has taken the gradient held back for `name` into a reduction."""
        held = self.held(name)
        return held is not None and held.taken == backward_number()

    def settle(self, names: Iterable[str], backward: int) -> None:
        """Remove from `.grad` the gradients held back for `names` that `backward` has reduced."""
        for name in names if self._held else ():
            if (held := self.held(name)) is not None and held.taken == backward:
                self._show(name, None)
                del self._held[name]

    def names_held(self) -> list[str]:
        """Parameters with gradients that are held back; frees those that the user has dropped."""
        if not self._held:
            return []
        self._held = {name: held for name, held in self._held.items() if self.held(name) is held}
        return list(self._held)

    def writes(self) -> int:
        """A number that changes with every write that torch or the parameters themselves report."""
        return _version([self]) + sum([param.zcompile_unseen for param in self._sharded()])

    def _sharded(self) -> list[ShardedParameter]:
        return [param for param in self.parameters.values() if isinstance(param, ShardedParameter)]

    @property
    def may_differ(self) -> bool:
        """True if a copy that counts as current, kept or in flight, may be outdated."""
        if not self.has_current:
            return False
        current = (full for full in self.kept.values() if not full.is_stale)
        copies = [*current, *self.secondary.values(), *self.ahead.values()]
        return any(map(attrgetter("zcompile_exposed"), self._sharded())) or {copy.writes for copy in copies} != {
            self.writes()
        }

    def compared(self) -> None:
        """The remaining copies equal the shards as they are now."""
        for copy in [*self.kept.values(), *self.secondary.values(), *self.ahead.values()]:
            copy.writes = self.writes()

    def drop_stale_copy(self) -> None:
        """Mark every kept copy stale, and free those that no gather has renewed since the last time.

        Secondary shards are freed at once: all ranks would compare remaining ones with their shards in each step.
        """
        self.kept = {names: full for names, full in self.kept.items() if not full.is_stale}
        for full in self.kept.values():
            full.is_stale = True
        self.secondary.clear()

    def drop_copies(self) -> None:
        """Drop every copy, kept or in flight."""
        for gather in self.ahead.values():
            gather.wait()  # on CUDA: its memory must not be reused while it is still being written
        for copies in (self.ahead, self.kept, self.secondary):
            copies.clear()

    @property
    def has_current(self) -> bool:
        """True if a copy, kept or in flight, counts as current."""
        return bool(self.ahead or self.secondary) or any(not full.is_stale for full in self.kept.values())

    def copies_differ(self) -> torch.Tensor:
        """1 if this rank's part of a copy, kept or in flight, differs from its shard, else 0; int32 [] on the device.

        Does not wait: on CUDA all units are compared before the first result is read.
        """
        rank = self.communicator.dividing.rank
        result = [torch.zeros((), dtype=torch.bool, device=self.communicator.device)]
        for full in (full for full in self.kept.values() if not full.is_stale):
            for index, param in enumerate(full.unit.params):
                if param.shards or param.compute_dtype or self.memory.is_away:  # else it aliases the shard
                    start, stop = param.shard_rows(rank)
                    kept = full[index][start:stop] if param.shape else full[index]
                    if param.outer_gather_dtype is None:
                        mine = self.local(param).to(kept, non_blocking=True)
                    else:
                        mine = self.as_gathered([param], kept.dtype)[: kept.numel()].view_as(kept)
                    result.append(torch.ne(kept, mine).any())
        for secondary in self.secondary.values():
            (outside,) = self.communicator.outside
            for message, sent in secondary.messages:
                mine = sent.view(outside.size, -1)[outside.rank]
                result.append(torch.ne(mine, self.as_gathered(message.params, sent.dtype)).any())
        for gather in self.ahead.values():
            result += [
                torch.ne(sent, self.wire(message.params).to(sent, non_blocking=True)).any()
                for message, sent in gather.sent
            ]
        return torch.stack(result).any().to(torch.int32)


def _version(units: Collection[UnitShards]) -> int:
    """A number that grows with every write in place that autograd sees; zero for units that were just adopted."""
    # Without a call for each unit.
    adopted = [unit.adopted[name] for unit in units for name in unit.adopted]
    return writes_to([unit.parameters[name] for unit in units for name in unit.adopted]) - sum(adopted)


def shard_bytes(unit: Unit, rank: int) -> int:
    """Bytes that the shards of a unit take in the file of `rank`, one of those that shard."""
    end = 0
    for dtype, size in _sizes(unit, rank)[0].items():
        end = aligned_end(end, size * dtype.itemsize)
    return end


def _sizes(unit: Unit, rank: int) -> tuple[dict[torch.dtype, int], dict[str, int]]:
    """The size of `rank`'s flat buffer of each dtype, and the offset of each sharded parameter in it, in elements.

    Large parameters are aligned for vectorized loads; small ones are adjacent, because they are sent together.
    """
    sizes: dict[torch.dtype, int] = {}
    offsets: dict[str, int] = {}
    for param in unit.params:
        if param.shards:
            start = sizes.get(param.dtype, 0)
            if not param.is_small:
                start = aligned_end(0, start * param.dtype.itemsize) // param.dtype.itemsize
            offsets[param.name] = start
            sizes[param.dtype] = start + param.kept_numel(rank)
    return sizes, offsets


# -- memory -----------------------------------------------------------------------------------------------------------


class ShardMemory:
    """Memory of the model's device, which collectives send from. Subclasses allocate other memory.

    Args:
        device: The device of shards, gradients and optimizer state.
    """

    is_away = False
    """True if collectives cannot send from it: a gather copies the shard to the device first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, unit: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor of zeros for shards of `unit`."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `value`, an unsharded parameter."""
        return value.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def before(self, unit: str) -> None:
        """A gather of `unit` is about to start."""

    def sending(self) -> contextlib.AbstractContextManager[object]:
        """Around the copies and launches of a gather."""
        return contextlib.nullcontext()

    def copied(self, arrived: torch.Tensor) -> AsyncWork | None:
        """The work of a message that is only copied, to `arrived`; None if the current stream copies it."""
        return None

    def home(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move gradients to where their shards are. The host may read them once `landed` has returned."""
        return gradients

    def landed(self) -> None:
        """Return once the gradients that `home` moves have arrived."""

    def settle(self) -> None:
        """Return once no copy is in flight: the host may read gradients and write to shards."""


class Reserved(ShardMemory):
    """Memory that is reserved before any shard is made, so that a failure comes early.

    Args:
        device: Its device.
        room: The memory of each unit, zeros, uint8 [`runtime.shards.shard_bytes`].
    """

    def __init__(self, device: torch.device, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(device)
        self._room = room
        self._taken = dict.fromkeys(room, 0)

    def zeros(self, unit: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not numel:
            return torch.zeros(0, dtype=dtype, device=self.device)
        start = self._taken[unit]
        self._taken[unit] = aligned_end(start, numel * dtype.itemsize)
        return self._room[unit][start : start + numel * dtype.itemsize].view(dtype)


def aligned_end(offset: int, nbytes: int) -> int:
    """The aligned end of a tensor of `nbytes` at `offset`, in bytes."""
    return offset + -(-nbytes // 64) * 64


# -- copies -----------------------------------------------------------------------------------------------------------


class Freshness:
    """Marks kept copies that a step has outdated, and drops those that a write has, on all ranks alike.

    An optimizer step reports that it has changed parameters. Without one (gradient accumulation, evaluation, the next
    train step), a parameter reports whether it may have been written to: by version counters, by operations that these
    miss, or by anyone who has its `.data` or the result of `state_dict`. Ranks share this with each run; if one of them
    has such a parameter, all compare their copies with their shards and agree on the result: no rank gathers alone.
    """

    def __init__(self, units: Mapping[str, UnitShards], communicator: Communicator) -> None:
        self.units = units
        self.communicator = communicator
        self.steps = 0
        """Optimizer steps that changed these parameters."""
        self.idle = 0
        """Steps that have found no gradient."""
        self._steps_seen = 0
        self._given: list[weakref.ref[torch.Tensor]] = []
        """Tensors given to others that alias shards; a write to them changes no version counter of a parameter."""

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that others have `tensors`, which alias shards, and may write to them."""
        self._given += map(weakref.ref, tensors)

    def _prune(self) -> None:
        self._given = [given for given in self._given if given() is not None]

    def step(self, *, idle: bool = False) -> None:
        """An optimizer has stepped parameters of these units; `idle`: it found no gradient."""
        self.steps += 1
        self.idle += idle

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Count the optimizer steps within as one, on all ranks: each has parameters of other optimizers."""
        before = self.steps, self.idle
        try:
            yield
        finally:
            self.steps, self.idle = before[0] + 1, before[1]

    def version(self) -> int:
        """A number that grows with every change of a parameter that an optimizer or autograd reports."""
        return self.steps + _version(self.units.values())

    def drop_stale_copies(self) -> bool:
        """Mark the copies that a step has outdated; returns whether any current one may differ from its shard.

        What was gathered ahead was gathered after the step. Steps are assumed to be the same on every rank: `Lockstep`
        compares their number with each run.
        """
        stepped, self._steps_seen = self.steps != self._steps_seen, self.steps
        if stepped:
            for unit in self.units.values():
                if any(param.requires_grad for param in unit.parameters.values()):
                    unit.drop_stale_copy()
        if not self.has_current:
            self._prune()  # what was written so far will be gathered anew
            return False
        return bool(self._given) or any(unit.may_differ for unit in self.units.values())

    @property
    def has_current(self) -> bool:
        """True if there are copies that no step has outdated: on every rank, or on none."""
        return any(unit.has_current for unit in self.units.values())

    @torch.no_grad()
    def compare(self) -> None:
        """Drop copies that differ from the shard on any rank. Collective.

        Their memory is not reused: autograd may not know of the write, so a later backward may still read them.
        """
        kept = [unit for unit in self.units.values() if unit.has_current]
        differ = self.communicator.any_rank(torch.stack([unit.copies_differ() for unit in kept]).cpu())
        for unit in itertools.compress(kept, differ.tolist()):
            unit.drop_copies()
        for unit in kept:
            unit.compared()
        self._prune()
