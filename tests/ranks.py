"""One pool of rank processes for all tests: starting torch takes seconds, a job on started ranks milliseconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.garbage import Collector

AT_ONCE = 45
"""Seconds within which ranks are told of what would otherwise have them wait for the group's 60, on a busy machine."""


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


class Ranks:
    """Up to `size` processes that run functions as the ranks of a process group.

    Args:
        size: How many there may be.
        simulated: True for ranks that have a simulated GPU each, and groups of the backend "nccl".
    """

    def __init__(self, size: int, *, simulated: bool = False) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.size, self.simulated = size, simulated
        self.workers: list[tuple[Any, Connection]] = []

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, group: float = 60
    ) -> list[Any]:
        """Call `function(rank, *args)` on `world` ranks under a process group; returns what each gave.

        Of a world that is larger than the pool, which only simulated ranks may have, the first rank is there alone.
        """
        there = world if world <= self.size else 1
        self._start(there)
        with tempfile.TemporaryDirectory() as folder:
            job = (function.__module__, function.__qualname__, args, world, str(Path(folder) / "store"), group)
            for rank in range(there):
                self.workers[rank][1].send((rank, *job))
            answers = [self._receive(rank, timeout) for rank in range(there)]
        if failed := [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]:
            # Ranks of which one failed may disagree in what torch counts, as the names of groups.
            self.close()
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def _receive(self, rank: int, timeout: float) -> tuple[bool, Any]:
        if rank >= len(self.workers):
            return False, "ended with the others"
        connection = self.workers[rank][1]
        try:
            if connection.poll(timeout):
                answer: tuple[bool, Any] = connection.recv()
                return answer
        except EOFError:
            self.close()
            return False, "the process died (a crash, not an exception)"
        self.close()
        return False, f"no answer within {timeout} s: a hang"

    def _start(self, there: int) -> None:
        while len(self.workers) < there:
            mine, theirs = self.context.Pipe()
            process = self.context.Process(target=_work, args=(theirs, self.size, self.simulated), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, mine))

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
        self.workers = []


def _work(connection: Connection, size: int, simulated: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    join = _simulated_join(size) if simulated else _gloo
    import torch
    import torch.distributed as dist

    from zcompile._torch import forget_meshes
    from zcompile.engine.interpreter import in_large_frame

    torch.set_num_threads(1)
    garbage = Collector()
    while True:
        try:
            rank, module, name, args, world, store, group = connection.recv()
        except EOFError:
            return
        try:
            join(store, rank, world, timedelta(seconds=group))
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
            answer = (True, in_large_frame(value, rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.compiler.reset()
            forget_meshes()  # a mesh that stays keeps its groups, and their threads
            garbage.collect()
        connection.send(answer)


def _gloo(store: str, rank: int, world: int, timeout: timedelta) -> None:
    import torch.distributed as dist

    shared = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=timeout)
    # A rank that is done at once would close its connections while others are still connecting.
    dist.barrier()


def _simulated_join(size: int) -> Callable[[str, int, int, timedelta], None]:
    """How ranks of a pool of `size` join. Makes the simulated device, which has to be there before torch."""
    importlib.import_module("tests.simulated.device")
    from tests.simulated import nccl

    def join(store: str, rank: int, world: int, timeout: timedelta) -> None:
        if world > size:
            nccl.pretend(world)
        else:
            nccl.join(store, rank, world, timeout)

    return join
