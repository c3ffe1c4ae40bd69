"""Shards: what this rank keeps of each unit, as DTensor parameters that are views of one flat buffer per dtype.

    full [10, 4], world 3      rank 0: rows 0..3   rank 1: rows 4..7   rank 2: rows 8, 9 and two rows of padding

A padded shard is contiguous in the buffer, so a gather sends it as it lies; the padding of all ranks together is the
tail of the gathered parameter, so that the full parameter is a contiguous view of what arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from zcompile.ir.layout import Param, Unit
from zcompile.runtime.groups import Communicator
from zcompile.runtime.low_precision import as_sent, encode_shards
from zcompile.runtime.shard_memory import ShardMemory, aligned_end
from zcompile.runtime.tensors.explained import explain, laid_out_like
from zcompile.runtime.tensors.parameter import ShardedParameter, sharded
from zcompile.runtime.tensors.placement import ModelParallel, Placing, along
from zcompile.torch_internals.autograd import backward_number, version_of
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import local_tensor


class Full:
    """The full parameters of a unit, in the unit's order; emptied by `release`."""

    __slots__ = ("arrived", "is_stale", "tensors", "unit", "writes")

    def __init__(
        self, unit: Unit, tensors: list[torch.Tensor | None], arrived: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self.unit = unit
        self.tensors = tensors
        self.arrived = arrived or {}
        """The memory, padded and 1-D, of parameters that were gathered straight into it, by their place in the unit."""
        self.is_stale = False
        """True for a kept copy that the shards have outgrown: only its memory is of use, for the next gather."""
        self.writes = 0
        """Of a kept copy: what `UnitShards.writes` said when it was gathered."""

    def __getitem__(self, index: int) -> torch.Tensor:
        tensor = self.tensors[index]
        assert tensor is not None, f"{self.unit.params[index].name} is used after its release"
        return tensor

    def release(self) -> None:
        self.tensors = [None] * len(self.tensors)


@dataclass
class Secondary:
    """What a rank has of a unit inside: the primary shards of the ranks at its place outside, itself included."""

    memory: torch.Tensor
    """All of it, uint8 [n]: see `zcompile.ir.wire`."""
    messages: list[tuple[list[Param], torch.Tensor]]
    """Parameters that travel together, and what is there of them, 1-D, in the dtype in which it is sent."""
    writes: int = 0
    """What `UnitShards.writes` said when it was gathered."""
    stream: int = 0
    """The stream that its memory was allocated on, to which the allocator gives it again."""


@dataclass
class HeldGradient:
    """This rank's own gradient of a parameter, held back by `no_sync` until a later backward reduces it."""

    total: torch.Tensor
    """Full, in the parameter's dtype. Its average over the ranks is the gradient, what was averaged before included."""
    shown: torch.Tensor
    """What stands in `.grad` meanwhile; once it does not, the user has dropped the gradient."""
    taken: int | None = None
    """The number of the backward whose reduction adds it; of no account once that has failed."""


class UnitShards:
    """What this rank keeps of one unit: parameters to train, and the memory that gathers send from.

    `memory`: what that is; by default the device's.
    """

    def __init__(self, unit: Unit, communicator: Communicator, memory: ShardMemory | None = None) -> None:
        self.unit = unit
        self.communicator = communicator
        self.memory = memory or ShardMemory(communicator.device)
        sizes, self.offsets = _sizes(unit, communicator.dividing.rank)
        self.buffers = {dtype: self.memory.zeros(unit.name, size, dtype) for dtype, size in sizes.items()}
        self.parameters: dict[str, nn.Parameter] = {}
        self._adopted: dict[str, int] = {}
        """Versions of parameters when they came."""
        self._placings: dict[str, Placing] = {}
        """Of parameters that are DTensors."""
        self.kept: dict[tuple[str, ...], Full] = {}
        """Full copies that stages 1 and 2 keep between programs, by the parameters that they hold; also stale ones."""
        self.secondary: dict[tuple[str, ...], Secondary] = {}
        """Secondary shards that are kept until parameters change, by the parameters that they are of."""
        self.ahead: dict[tuple[str, ...], Any] = {}
        """Gathers (`executor.Gather`) on their way for the next step, by the parameters that they bring."""
        self.user_params: dict[str, nn.Parameter] = {}
        """Under `torch.compile`: what the user's module holds in place of a shard. It has the same `.grad`."""
        self._held: dict[str, HeldGradient] = {}

    def adopt(self, param: Param, source: nn.Parameter, parallel: ModelParallel | None = None) -> nn.Parameter:
        """Make the parameter that stands for `source` from now on, with the values of the mesh's first rank.

        `source` keeps its memory until the caller frees it. Collective.
        `parallel`: what the model is divided over already.
        """
        value, mesh = local_tensor(source), self.communicator.dividing_mesh
        self.communicator.broadcast(value)
        self._placings[param.name] = along(param, mesh) if parallel is None else parallel.sharded(param, source)
        return self._adopt(param, self._distributed(param, value))

    def adopt_plain(self, param: Param, source: nn.Parameter, parallel: ModelParallel | None = None) -> nn.Parameter:
        """Take the user's own parameter, as stage 0 does, with the values of the mesh's first rank. Collective."""
        self.communicator.broadcast(local_tensor(source))
        if parallel is not None and isinstance(source, DTensor):
            self._placings[param.name] = parallel.whole(source)
        return self._adopt(param, source)

    def _adopt(self, param: Param, parameter: nn.Parameter) -> nn.Parameter:
        self.parameters[param.name], self._adopted[param.name] = parameter, _version(parameter)
        return parameter

    def copied(self, unit: Unit, communicator: Communicator, memory: ShardMemory | None = None) -> UnitShards:
        """The same values in memory of their own, without gradients; nothing is communicated.

        `unit`: this one, or with the same parameters in other dtypes, to which values are converted.
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
        """Let the parameters of `other`, which optimizers may hold, be those of this unit: the same objects."""
        for param in self.unit.params:
            old, new = other.parameters[param.name], self.parameters[param.name]
            if isinstance(old, ShardedParameter):
                vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})
                swap_tensors(old, new)
            else:
                old.data = new.data
            self._adopt(param, old)

    def _distributed(self, param: Param, value: torch.Tensor) -> nn.Parameter:
        start, stop = param.shard_rows(self.communicator.dividing.rank)
        return self._placed(param, value[start:stop] if param.shards else value)

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

    def gradient(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, shaped like this rank's part of the parameter `name`, as it stands in `.grad`."""
        placing, parameter = self._placings.get(name), self.parameters[name]
        if placing is None:
            return tensor
        if isinstance(parameter, ShardedParameter) and local_tensor(parameter).dtype is tensor.dtype:
            made = laid_out_like(parameter, tensor)  # torch thinks long about what is laid out anew
        else:
            made = placing.place(tensor)
        return explain(made, self.communicator.waits)

    def shard_of(self, name: str, full: torch.Tensor) -> DTensor:
        """This rank's part of `full`, which is shaped like the full parameter `name`, in memory of its own."""
        param = self.unit.params[self.unit.index(name)]
        start, stop = param.shard_rows(self.communicator.dividing.rank)
        mine = full[start:stop] if param.shards else full
        return self._placings[name].place(self.memory.own(mine))

    def padded_shard(self, param: Param) -> torch.Tensor:
        """This rank's padded shard of `param`, 1-D, as it lies in the buffer."""
        offset = self.offsets[param.name]
        return self.buffers[param.dtype][offset : offset + param.kept_numel(self.communicator.dividing.rank)]

    def wire(self, params: list[Param]) -> torch.Tensor:
        """The padded shards of `params` end to end: as they lie where they are neighbours, else a copy."""
        first, last, rank = params[0], params[-1], self.communicator.dividing.rank
        start, stop = self.offsets[first.name], self.offsets[last.name] + last.kept_numel(rank)
        if stop - start == sum(param.kept_numel(rank) for param in params):
            return self.buffers[first.dtype][start:stop]
        return torch.cat([self.padded_shard(param) for param in params])

    def encoded(self, params: list[Param], wire: torch.dtype) -> torch.Tensor:
        """What `wire(params)` gives, on the device, encoded in `wire`."""
        flat = self.wire(params).to(self.communicator.device, non_blocking=True)
        return encode_shards(flat, [param.shard_numel for param in params], wire)

    def as_gathered(self, params: list[Param], dtype: torch.dtype) -> torch.Tensor:
        """What `wire(params)` gives, on the device, as it is once it has been gathered in `dtype`."""
        if (wire := params[0].outer_gather_dtype) is None:
            return self.wire(params).to(self.communicator.device, dtype, non_blocking=True)
        flat = self.wire(params).to(self.communicator.device, non_blocking=True)
        return as_sent(flat, [param.shard_numel for param in params], wire, dtype)

    def local(self, param: Param) -> torch.Tensor:
        """This rank's values of `param`: its rows, or the whole of it where it is not sharded."""
        return local_tensor(self.parameters[param.name])

    def is_sharded(self, name: str) -> bool:
        """False for a parameter that every rank has whole."""
        return bool(self.unit.params[self.unit.index(name)].shards)

    # -- gradients held back --------------------------------------------------------------------------------------

    def hold(self, name: str, gradient: torch.Tensor | None) -> None:
        """Add to the gradient that is held back for the parameter `name`; it shows in `.grad`, unreduced.

        None: no gradient has flowed there.
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
            # Once among the ranks that divide it; replicas, whose average is that of equal parts, each do so.
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

    def with_held(self, param: Param, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient`, which the caller owns, with what is held back for `param` added, once in a backward."""
        held, running = self.held(param.name), backward_number()
        if held is None or held.taken == running:
            return gradient
        held.taken = running
        # Nothing can be added to one number that is expanded to a shape, as the gradient of a sum is.
        return gradient.to(param.dtype).contiguous().add_(held.total)

    def is_taken(self, name: str) -> bool:
        """True if the backward that runs now has taken the gradient held back for `name` into a reduction."""
        held = self.held(name)
        return held is not None and held.taken == backward_number()

    def settle(self, name: str, backward: int) -> None:
        """What `backward` took of the gradient held back for `name` has been reduced: it leaves `.grad`."""
        if (held := self.held(name)) is not None and held.taken == backward:
            self._show(name, None)
            del self._held[name]

    def names_held(self) -> list[str]:
        """Parameters with gradients that wait for their reduction; the memory of those that were dropped is freed."""
        self._held = {name: held for name, held in self._held.items() if self.held(name) is held}
        return list(self._held)

    def version(self) -> int:
        """A number that grows with every write in place that autograd sees; zero for units that have just come."""
        with no_torch_function():
            return sum(_version(parameter) - self._adopted[name] for name, parameter in self.parameters.items())

    def writes(self) -> int:
        """A number that changes with every write that torch, or the parameters themselves, make known."""
        unseen = (p.zcompile_unseen for p in self.parameters.values() if isinstance(p, ShardedParameter))
        return self.version() + sum(unseen)

    @property
    def may_differ(self) -> bool:
        """True if a copy, kept or on its way, that is taken to be up to date may be so no longer."""
        if not self.has_current:
            return False
        current = (full for full in self.kept.values() if not full.is_stale)
        copies = [*current, *self.secondary.values(), *self.ahead.values()]
        exposed = (p.zcompile_exposed for p in self.parameters.values() if isinstance(p, ShardedParameter))
        return any(exposed) or {copy.writes for copy in copies} != {self.writes()}

    def compared(self) -> None:
        """The copies that are left equal the shards as they are now."""
        for copy in [*self.kept.values(), *self.secondary.values(), *self.ahead.values()]:
            copy.writes = self.writes()

    def drop_stale_copy(self) -> None:
        """Every kept copy is out of date now. One that no gather has renewed since the last time is freed.

        Secondary shards are freed at once: what is left, all ranks would compare with their shards in each step.
        """
        self.kept = {names: full for names, full in self.kept.items() if not full.is_stale}
        for full in self.kept.values():
            full.is_stale = True
        self.secondary.clear()

    def drop_copies(self) -> None:
        """Let every copy go, kept or on its way."""
        for gather in self.ahead.values():
            gather.wait()  # on CUDA: its memory must not be used again while it is still being filled
        for copies in (self.ahead, self.kept, self.secondary):
            copies.clear()

    @property
    def has_current(self) -> bool:
        """True if a copy, kept or on its way, is taken to be up to date."""
        return bool(self.ahead or self.secondary) or any(not full.is_stale for full in self.kept.values())

    def copies_differ(self) -> torch.Tensor:
        """1 if this rank's part of a copy, kept or on its way, no longer equals its shard, else 0.

        An int32 [] on the device. The host does not wait for it: on CUDA all units are compared before the first
        answer is read.
        """
        rank = self.communicator.dividing.rank
        result = [torch.zeros((), dtype=torch.bool, device=self.communicator.device)]
        for full in (full for full in self.kept.values() if not full.is_stale):
            for index, param in enumerate(full.unit.params):
                if param.shards or param.compute_dtype or self.memory.is_away:  # else it is the shard itself
                    start, stop = param.shard_rows(rank)
                    kept = full[index][start:stop] if param.shape else full[index]
                    if param.outer_gather_dtype is None:
                        mine = self.local(param).to(kept, non_blocking=True)
                    else:
                        mine = self.as_gathered([param], kept.dtype)[: kept.numel()].view_as(kept)
                    result.append(torch.ne(kept, mine).any())
        for secondary in self.secondary.values():
            assert self.communicator.outside is not None, "they are gathered along the outer axis"
            place, parts = self.communicator.outside.rank, self.communicator.parts
            for params, sent in secondary.messages:
                result.append(torch.ne(sent.view(parts, -1)[place], self.as_gathered(params, sent.dtype)).any())
        for gather in self.ahead.values():
            result += [
                torch.ne(sent, self.wire(params).to(sent, non_blocking=True)).any() for params, sent in gather.sent
            ]
        return torch.stack(result).any().to(torch.int32)


def _version(parameter: nn.Parameter) -> int:
    if isinstance(parameter, DTensor):
        return version_of(parameter) + version_of(local_tensor(parameter))
    return version_of(parameter)


def shard_bytes(unit: Unit, rank: int) -> int:
    """Bytes that the shards of a unit take in a file of `rank`'s, of those that shard."""
    end = 0
    for dtype, size in _sizes(unit, rank)[0].items():
        end = aligned_end(end, size * dtype.itemsize)
    return end


def _sizes(unit: Unit, rank: int) -> tuple[dict[torch.dtype, int], dict[str, int]]:
    """The elements of `rank`'s flat buffer of each dtype, and where each sharded parameter begins in it.

    A large one begins where kernels load many elements at once, whatever came before; small ones follow each other, for
    they travel together.
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
