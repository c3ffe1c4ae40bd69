"""Full parameters while a module's code runs as plain Python: leaves, whose gradients are averaged afterwards.

A method called between steps may write to them, which changes the shards; nothing else may write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.engine.model_runtime import ModelRuntime
from zcompile.errors import ParameterError
from zcompile.model.sharding import Site
from zcompile.runtime.executor import BoundUnit, Gradients, accumulate, gathered
from zcompile.runtime.gradients.delivery import Delivery
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.tensors.explained import laid_out_like
from zcompile.runtime.tensors.owned import part_of
from zcompile.torch_internals.modules import parameters_of


class FullParameter(nn.Parameter):
    """A full parameter whose writes are detected, even those to its `.data`, since they would not change the shards."""

    zcompile_name: str

    @classmethod
    def named(cls, name: str, tensor: torch.Tensor, *, requires_grad: bool) -> Self:
        made = cls(tensor, requires_grad=requires_grad)
        made.zcompile_name = name
        return made

    @property
    def data(self) -> torch.Tensor:
        """Its values, like `.data`; writes to them count as its own."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """A write like any other. Conversions, as by `module.half()`, last as long as it is full.

        Raises:
            ParameterError: `value` has another shape.
        """
        if value.shape != self.shape:
            problem = f"has shape {list(self.shape)}, and its .data would have {list(value.shape)}"
            raise ParameterError(self.zcompile_name, problem, "keep its shape: parameter.data.copy_(...)")
        if (value.dtype, value.device) == (self.dtype, self.device):
            if (value.data_ptr(), value.stride()) != (self.data_ptr(), self.stride()):
                self.detach().copy_(value)
        else:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter: the copy is its owner's, to keep and to write to."""
        made = memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return made


class Leaf(FullParameter):
    """A full parameter for plain Python."""


@dataclass(frozen=True)
class Leaves:
    """Parameters of a unit, full for one call of plain Python, whose gradients autograd accumulates."""

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
        """Average accumulated gradients over the ranks; a rank whose code did not use a parameter counts as zero."""
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


def digest(*names: str) -> str:
    """Identifies, in messages between ranks, code that is not a program."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def check_in_place(sites: Sequence[Site], full: Mapping[str, nn.Parameter]) -> None:
    """Refuse replacements of full parameters, which would be lost.

    Raises:
        ParameterError: one of `sites` has another value than in `full`.
    """
    for site in sites:
        if parameters_of(site.owner).get(site.key) is not full[site.name]:
            fix = "change its values in place, between steps: with torch.no_grad(): p.copy_(...)"
            raise ParameterError(
                site.name, "was replaced or removed while it is full, which does not change the shards", fix
            )


def write_back(leaves: Mapping[str, Leaf], runtime: ModelRuntime) -> None:
    """Copy a method's writes to the shards. Collective: the first rank's values, if ranks draw others.

    Raises:
        ParameterError: a parameter has another dtype or shape here, so its shards cannot hold what was written.
        AgreementError: ranks have written to different parameters.
    """
    shards = {name: unit.parameters[name] for unit in runtime.shards.values() for name in unit.parameters}
    for name, leaf in leaves.items():
        _check_kind(name, leaf, shards[name])
    runtime.lockstep.enter(RunKind.MODULE, digest("writes", *leaves))
    runtime.lockstep.check()
    runtime.settle()
    with torch.inference_mode(False), torch.no_grad():
        for name, leaf in leaves.items():
            shard, value = shards[name], leaf.detach()
            runtime.communicator.broadcast(value)
            if isinstance(shard, DTensor):
                shard.copy_(laid_out_like(shard, part_of(value, shard).to(shard.device)))
            else:
                shard.copy_(value)


def _check_kind(name: str, leaf: Leaf, shard: torch.Tensor) -> None:
    if leaf.dtype != shard.dtype:
        problem = (
            f"is {leaf.dtype} in the model's code and {shard.dtype} otherwise: what a method writes would be rounded"
        )
        fix = "name its module in keep_dtype=, or write to it outside: with torch.no_grad(): parameter.copy_(...)"
        raise ParameterError(name, problem, fix)
    if leaf.shape != shard.shape:
        problem = f"has shape {list(leaf.shape)} once a method has written to it, and {list(shard.shape)} in the model"
        raise ParameterError(name, problem, "keep its shape, or change the model before zcompile.compile")
