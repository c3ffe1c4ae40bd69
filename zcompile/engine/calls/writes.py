"""What plain Python has written to full parameters: methods between steps change shards by it, nothing else may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.engine.calls.leaves import Leaf, digest
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.errors import ParameterError
from zcompile.model.sharding import Site
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.tensors.explained import laid_out_like
from zcompile.runtime.tensors.parts import part_of
from zcompile.torch_internals.modules import parameters_of


def check_in_place(sites: Sequence[Site], full: Mapping[str, nn.Parameter]) -> None:
    """Refuse what code has put into the places of full parameters, which would be lost.

    Raises:
        ParameterError: something else than `full` stands at one of `sites`.
    """
    for site in sites:
        if parameters_of(site.owner).get(site.key) is not full[site.name]:
            fix = "change its values in place, between steps: with torch.no_grad(): p.copy_(...)"
            raise ParameterError(
                site.name, "was replaced or taken away where it is full for now, which does not change the shards", fix
            )


def write_back(leaves: Mapping[str, Leaf], runtime: ModelRuntime) -> None:
    """Let the shards have what a method has written. Collective: the first rank's values, where ranks draw others.

    Raises:
        ParameterError: a parameter has another dtype or shape here, so that its shards cannot have what was written.
        AgreementError: ranks have written to others.
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
