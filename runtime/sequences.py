"""Parts of batches, for ranks that divide the tokens of sequences and load no more than their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.errors import AgreementError, GroupError, OptionError
from zcompile.runtime.groups import SEQUENCE
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only


def sequence_slice(batch: Any, mesh: DeviceMesh, dim: int = 1) -> Any:
    """Return this rank's part of a batch: an equal, contiguous share of the tokens along `dim`.

    Args:
        batch: Tensors, alone or in lists, tuples and dicts; those that have no dimension `dim` remain as they are.
        mesh: The mesh given to `compile`, with a dimension "sp".
        dim: Where tokens are: 1 in (batch, tokens, ...).

    Raises:
        GroupError: the mesh has no such dimension.
        OptionError: the number of tokens is not a multiple of the ranks along it, or `dim` is negative.
    """
    ranks = _ranks(mesh, dim)

    def part(value: torch.Tensor) -> torch.Tensor:
        if value.dim() <= dim:
            return value
        if value.shape[dim] % ranks.size():
            problem = f"has a tensor {[*value.shape]}, whose dimension {dim} {ranks.size()} ranks cannot divide"
            raise OptionError("batch", problem, f"give a multiple of {ranks.size()} tokens, and divide others by hand")
        return value.chunk(ranks.size(), dim)[ranks.get_local_rank()].contiguous()

    return tree_map_only(torch.Tensor, part, batch)


def sequence_gather(part: Any, mesh: DeviceMesh, dim: int = 1) -> Any:
    """Return the batch of which each rank along "sp" has the part that `sequence_slice` gives. Collective.

    Compiled models want the whole batch; so each rank may read a part only, and ranks exchange the parts. Gradients do
    not flow back to them.

    Args:
        part: Tensors, alone or in lists, tuples and dicts, on the device of the mesh.
        mesh: See `sequence_slice`.
        dim: See `sequence_slice`.

    Raises:
        GroupError: the mesh has no such dimension.
        OptionError: `dim` is negative.
        AgreementError: on every rank: parts differ in size or dtype.
    """
    ranks = _ranks(mesh, dim)
    group, size = ranks.get_group(), ranks.size()
    said: list[Any] = [None] * size
    leaves = [value for value in tree_leaves(part) if isinstance(value, torch.Tensor)]
    dist.all_gather_object(said, [(str(value.dtype), tuple(value.shape)) for value in leaves], group=group)
    if other := next((rank for rank in range(size) if said[rank] != said[0]), 0):
        problem = f"the parts of a batch differ: rank 0 has {said[0]}, rank {other} {said[other]} (of {SEQUENCE!r})"
        raise AgreementError("batch", problem, "give each rank as many tokens: see zcompile.sequence_slice")

    def whole(value: torch.Tensor) -> torch.Tensor:
        if value.dim() <= dim:
            return value
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, dim)

    return tree_map_only(torch.Tensor, whole, part)


def _ranks(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """Return the dimension of the mesh over which tokens are divided."""
    if dim < 0:
        raise OptionError("dim", f"is {dim}", "count from the first dimension: 1 for (batch, tokens)")
    if SEQUENCE not in (mesh.mesh_dim_names or ()):
        raise GroupError("mesh", f"is {mesh}, of which no dimension divides tokens", f"name one of them {SEQUENCE!r}")
    return mesh[SEQUENCE]
