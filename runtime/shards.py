"""Shards: what this rank keeps of each unit, as DTensor parameters that are views of one flat buffer per dtype.

    full [10, 4], world 3      rank 0: rows 0..3   rank 1: rows 4..7   rank 2: rows 8, 9 and two rows of padding

A padded shard is contiguous in the buffer, so a gather sends it as it lies; the padding of all ranks together is the
tail of the gathered parameter, so that the full parameter is a contiguous view of what arrived.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from zcompile._torch import local_tensor
from zcompile.layout import Param, Unit
from zcompile.runtime.groups import Communicator


class Full:
    """The full parameters of a unit, in the unit's order; emptied by `release`."""

    __slots__ = ("communicator", "tensors", "unit")

    def __init__(self, unit: Unit, tensors: list[torch.Tensor | None], communicator: Communicator) -> None:
        self.unit = unit
        self.communicator = communicator
        self.tensors = tensors

    def __getitem__(self, index: int) -> torch.Tensor:
        tensor = self.tensors[index]
        assert tensor is not None, f"{self.unit.params[index].name} is used after its release"
        return tensor

    def release(self) -> None:
        self.tensors = [None] * len(self.tensors)


class UnitShards:
    """What this rank keeps of one unit: parameters to train, and the memory that gathers send from."""

    def __init__(self, unit: Unit, communicator: Communicator, device: torch.device) -> None:
        self.unit = unit
        self.communicator = communicator
        self.buffers, self.offsets = _allocate(unit, device)
        self.parameters: dict[str, nn.Parameter] = {}
        self.kept: dict[tuple[str, ...], Full] = {}
        """Full copies that stages 1 and 2 keep between programs, by the parameters that they hold."""

    def adopt(self, param: Param, source: nn.Parameter) -> nn.Parameter:
        """Make the parameter that stands for `source` from now on, with the values of the mesh's first rank.

        `source` keeps its memory until the caller frees it. Collective.
        """
        value = source.detach()
        self.communicator.broadcast(value)
        self.parameters[param.name] = adopted = self._distributed(param, value)
        return adopted

    def adopt_plain(self, param: Param, source: nn.Parameter) -> nn.Parameter:
        """Take the user's own parameter, as stage 0 does, with the values of the mesh's first rank. Collective."""
        self.communicator.broadcast(source.detach())
        self.parameters[param.name] = source
        return source

    def _distributed(self, param: Param, value: torch.Tensor) -> nn.Parameter:
        start, stop = param.shard_rows(self.communicator.rank)
        if param.shards:
            flat = self.padded_shard(param)[: (stop - start) * math.prod(param.shape[1:])]
            local = flat.view(stop - start, *param.shape[1:])
            local.copy_(value[start:stop])
        else:
            local = value.clone(memory_format=torch.contiguous_format)
        return nn.Parameter(self.distribute(param, local), requires_grad=param.trainable)

    def distribute(self, param: Param, local: torch.Tensor) -> DTensor:
        """`local` as this rank's part of a tensor shaped like `param`."""
        placement = Shard(0) if param.shards else Replicate()
        return DTensor.from_local(
            local,
            self.communicator.mesh,
            [placement],
            run_check=False,
            shape=torch.Size(param.shape),
            stride=contiguous_stride(param.shape),
        )

    def padded_shard(self, param: Param) -> torch.Tensor:
        """This rank's padded shard of `param`, 1-D, as it lies in the buffer."""
        offset = self.offsets[param.name]
        return self.buffers[param.dtype][offset : offset + param.shard_numel]

    def wire(self, params: list[Param]) -> torch.Tensor:
        """The padded shards of `params` end to end: as they lie where they are neighbours, else a copy."""
        first, last = params[0], params[-1]
        start, stop = self.offsets[first.name], self.offsets[last.name] + last.shard_numel
        if stop - start == sum(param.shard_numel for param in params):
            return self.buffers[first.dtype][start:stop]
        return torch.cat([self.padded_shard(param) for param in params])

    def local(self, param: Param) -> torch.Tensor:
        """This rank's values of `param`: its rows, or the whole of it where it is not sharded."""
        parameter = self.parameters[param.name]
        return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter.detach()

    def version(self) -> int:
        """A number that grows with every write in place that autograd sees."""
        return sum(_version(parameter) for parameter in self.parameters.values())

    def kept_is_current(self) -> bool:
        """True if this rank's part of every kept full copy still equals its shard."""
        rank = self.communicator.rank
        for full in self.kept.values():
            for index, param in enumerate(full.unit.params):
                start, stop = param.shard_rows(rank)
                kept = full[index][start:stop] if param.shape else full[index]
                is_copy = param.shards or param.compute_dtype
                if is_copy and not torch.equal(kept, self.local(param).to(kept.dtype)):
                    return False
        return True


def _version(parameter: nn.Parameter) -> int:
    if isinstance(parameter, DTensor):
        return parameter._version + local_tensor(parameter)._version
    return parameter._version


def _allocate(unit: Unit, device: torch.device) -> tuple[dict[torch.dtype, torch.Tensor], dict[str, int]]:
    """One zeroed flat buffer per dtype, and where each sharded parameter begins in it."""
    sizes: dict[torch.dtype, int] = {}
    offsets: dict[str, int] = {}
    for param in unit.params:
        if param.shards:
            offsets[param.name] = sizes.get(param.dtype, 0)
            sizes[param.dtype] = offsets[param.name] + param.shard_numel
    return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}, offsets


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
