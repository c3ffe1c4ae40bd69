"""Process groups whose backend for GPUs is the simulated NCCL; `tests.simulated.device` has to be there before.

`join` is `init_process_group` for a rank of a world that is there, whose bytes go through gloo; `pretend` for the first
rank of one that is not: what it would get from the others is what it has sent itself.
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.simulated import library
from zcompile.torch_internals.distributed import is_fake


def _module() -> ModuleType:
    loader = ExtensionFileLoader("simulated_nccl", str(library.build()["nccl"]))
    spec = importlib.util.spec_from_loader("simulated_nccl", loader)
    assert spec is not None, "a library is there"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class ProcessGroupNCCL(_module().Nccl):  # type: ignore[misc]
    """Made by torch for each group of the backend "nccl"."""

    made: ClassVar[list[ProcessGroupNCCL]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        transport = None
        if not _is_fake(store):
            gloo = dist.PrefixStore("bytes of the simulated device", store)
            transport = dist.ProcessGroupGloo(gloo, rank, size, timeout=options._timeout)
        super().__init__(rank, size, options, transport)
        ProcessGroupNCCL.made.append(self)


def _is_fake(store: dist.Store) -> bool:
    """Whether the other ranks of a new group are not there."""
    if (world := dist.GroupMember.WORLD) is not None:
        return is_fake(world)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, FakeStore)


distributed_c10d._NCCL_AVAILABLE = True
distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined,misc]
dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined,misc]


def join(store: str, rank: int, world: int, timeout: timedelta) -> None:
    """Begin as a rank of a world that is there; its ranks meet in a file."""
    ProcessGroupNCCL.made.clear()
    shared = dist.FileStore(store, world)
    # Without device_id: torch would split the group for the dimensions of a mesh, which this NCCL does not do.
    dist.init_process_group("nccl", store=shared, rank=rank, world_size=world, timeout=timeout)
    dist.barrier()


def pretend(world: int) -> None:
    """Begin as the first rank of a world that is not there."""
    ProcessGroupNCCL.made.clear()
    dist.init_process_group("cpu:fake,cuda:nccl", store=FakeStore(), rank=0, world_size=world)


def calls() -> list[list[str]]:
    """What each group has been asked for, in order: the ranks of a group must have asked for the same."""
    return [group.calls() for group in ProcessGroupNCCL.made]
