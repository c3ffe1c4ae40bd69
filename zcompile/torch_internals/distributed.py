"""Process groups, their stores and timeouts, and collectives of several tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as pipelining_schedules  # tables of actions

from zcompile.torch_internals.dynamo import quiet


def default_store() -> dist.Store:
    """The store behind the default process group: ranks meet there without a collective, with a deadline."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the ranks of a group may wait for each other: the timeout given to `init_process_group`."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of a group for tensors on `device`; a RuntimeError if it has none."""
    name: str = group._get_backend(device).name()
    return name.lower()


def is_fake(group: dist.ProcessGroup) -> bool:
    """True if the other ranks of a group are not there: its backend is torch's "fake", alone or beside another."""
    return "fake" in {backend_name(group, device) for device in group._device_types}


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the ranks of a gloo group wait for each other as long as `timeout` from now on."""
    # torch 2.14 made it public, and its old name warns.
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def gloo_of(group: dist.ProcessGroup) -> Any:
    """The gloo backend of a group, which sends and receives tensors of the host."""
    return group._get_backend(torch.device("cpu"))


def connect_hosts(name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo backend that connects the hosts of `size` ranks, which meet by `name`; a RuntimeError if they do not.

    It is no group of torch's, which counts these: ranks that have not made equally many would not find each other.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(name, default_store()), rank, size, timeout)


def gather_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Where the gathers of a group go. Where it is all ranks', on NCCL: a group of their own, one for all who ask.

    On the stream of one group a gather would wait for the reductions before it. Its stream has a high priority, too: a
    gather is waited for by the next kernels, which would else be scheduled before it. New groups are made by all ranks
    of a world together, so other groups than its keep their one. Collective over the ranks when first called.
    """
    if backend_name(group, device) != dist.Backend.NCCL or group.size() != dist.get_world_size():
        return group
    for made in dist.distributed_c10d._world.pg_names:
        if made.group_desc == _GATHERS:
            return made
    options, timeout = dist.ProcessGroupNCCL.Options(), group_timeout(group, device)
    options.is_high_priority_stream, options._timeout = True, timeout
    new: dist.ProcessGroup = dist.new_group(
        timeout=timeout, backend=dist.Backend.NCCL, pg_options=options, group_desc=_GATHERS
    )
    return new


_GATHERS = "zcompile: gathers"


def gather_together(
    group: dist.ProcessGroup, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> dist.Work:
    """all_gather of several tensors by one launch."""
    work: dist.Work = group.allgather_into_tensor_coalesced(list(fulls), list(shards))
    return work


def reduce_together(
    group: dist.ProcessGroup, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType
) -> dist.Work:
    """reduce_scatter of several tensors by one launch."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]  # as torch's own functions take either
    work: dist.Work = group.reduce_scatter_tensor_coalesced(list(shards), list(fulls), options)
    return work


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor to its target, which may be of another dtype or device; on GPUs by as few kernels as can be."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def add_all(sums: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add each tensor to its sum, in place, by few kernels on a GPU."""
    torch._foreach_add_(list(sums), list(others))


def chunk_cat(tensors: Sequence[torch.Tensor], chunks: int, out: torch.Tensor) -> None:
    """Each tensor's rows in `chunks` parts, as `Shard(0)` divides, padded with zeros; `out`: these by part, flat."""
    torch._chunk_cat(list(tensors), 0, chunks, out=out)


def close_connections(backend: Any, rank: int, size: int) -> None:
    """End whatever waits for a message on a gloo backend: one that times out closes this process's connections."""
    for other in range(size):
        # Waiting for a rank that has died fails at once and closes nothing, so one that lives has to be found.
        if other != rank:
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], other, _NEVER).wait(timedelta(milliseconds=1))


_NEVER = (1 << 31) - 1
"""The tag of a message that nobody sends."""


def pipeline_order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """The actions of a schedule of torch.distributed.pipelining by rank, as torch prints them; `F;B` pairs one by one.

    Raise ValueError for a number of micro-batches that the schedule is not for.
    """
    count = ranks * stages_per_rank
    own = [
        SimpleNamespace(stage_index=rank, group_rank=0, group_size=ranks, num_stages=count, submod=None)
        for rank in range(stages_per_rank)
    ]
    with quiet(pipelining_schedules.__name__):
        made: Any = pipelining_schedules.get_schedule_class(schedule)(own, microbatches, None)
    return [
        [str(one) for action in row if action is not None for one in action.sub_actions or (action,)]
        for row in made.pipeline_order.values()
    ]
