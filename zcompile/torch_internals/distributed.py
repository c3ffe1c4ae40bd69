"""Process groups, their stores and timeouts, and collectives of several tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as pipelining_schedules  # action tables

from zcompile.torch_internals.dynamo import quiet


def default_store() -> dist.Store:
    """The store of the default process group, for exchanges with a deadline and without a collective."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of a group, as given to `init_process_group`."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of a group's backend for `device`, in lower case. Raises RuntimeError if there is none."""
    name: str = group._get_backend(device).name()
    return name.lower()


def is_fake(group: dist.ProcessGroup) -> bool:
    """True if a group has torch's "fake" backend, alone or among others, so that its other ranks do not exist."""
    return "fake" in {backend_name(group, device) for device in group._device_types}


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a gloo group."""
    # Public since torch 2.14, where the private name warns.
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def gloo_of(group: dist.ProcessGroup) -> Any:
    """The gloo backend of a group, for CPU tensors."""
    return group._get_backend(torch.device("cpu"))


def connect_hosts(name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo backend that connects `size` ranks, which find each other by `name`. Raises RuntimeError on a timeout.

    It is not a process group: torch numbers groups, so ranks that have made different numbers of groups would not meet.
    """
    return dist.ProcessGroupGloo(dist.PrefixStore(name, default_store()), rank, size, timeout)


def gather_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group for gathers: a separate group if `group` is the whole world on NCCL, else `group` itself.

    A group has one stream, on which a gather would wait for earlier reductions. The new group's stream also has a high
    priority, because the next kernels wait for gathers, and would otherwise be scheduled before them. Only the whole
    world gets one, because all ranks must make a new group together; callers share it. Collective in the first call.
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
    """all_gather of several tensors in one launch."""
    work: dist.Work = group.allgather_into_tensor_coalesced(list(fulls), list(shards))
    return work


def reduce_together(
    group: dist.ProcessGroup, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType
) -> dist.Work:
    """reduce_scatter of several tensors in one launch."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]  # torch's own functions accept both types
    work: dist.Work = group.reduce_scatter_tensor_coalesced(list(shards), list(fulls), options)
    return work


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, which may have another dtype or device; on GPUs with few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def add_all(sums: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Add each tensor to its sum, in place; on GPUs with few kernels."""
    torch._foreach_add_(list(sums), list(others))


def chunk_cat(tensors: Sequence[torch.Tensor], chunks: int, out: torch.Tensor) -> None:
    """Split rows of each tensor into `chunks` as `Shard(0)` does, zero-padded; write them to flat `out`, by chunk."""
    torch._chunk_cat(list(tensors), 0, chunks, out=out)


def close_connections(backend: Any, rank: int, size: int) -> None:
    """Close this process's connections of a gloo backend, by a receive that times out, so that peers stop waiting."""
    for other in range(size):
        # A receive from a dead rank fails at once and closes nothing, so try all ranks.
        if other != rank:
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1)], other, _NEVER).wait(timedelta(milliseconds=1))


_NEVER = (1 << 31) - 1
"""A tag that no message has."""


def pipeline_order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """The actions of each rank in a schedule of torch.distributed.pipelining, as torch prints them; pairs are split.

    Raises ValueError if the schedule does not allow this number of micro-batches.
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
