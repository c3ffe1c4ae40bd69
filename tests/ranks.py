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


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


class Ranks:
    """Up to `size` processes that run functions as the ranks of a process group."""

    def __init__(self, size: int) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.size = size
        self.workers: list[tuple[Any, Connection]] = []

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, group: float = 60
    ) -> list[Any]:
        """Call `function(rank, *args)` on `world` ranks under a gloo group; returns what each gave."""
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            job = (function.__module__, function.__qualname__, args, world, str(Path(folder) / "store"), group)
            for rank in range(world):
                self.workers[rank][1].send((rank, *job))
            answers = [self._receive(rank, timeout) for rank in range(world)]
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

    def _start(self, world: int) -> None:
        assert world <= self.size, f"the pool has {self.size} ranks"
        while len(self.workers) < world:
            mine, theirs = self.context.Pipe()
            process = self.context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, mine))

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
        self.workers = []


def _work(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    garbage = Collector()
    while True:
        try:
            rank, module, name, args, world, store, group = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=group),
            )
            # A rank that is done at once would close its connections while others are still connecting.
            dist.barrier()
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
            answer = (True, value(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.compiler.reset()
            garbage.collect()
        connection.send(answer)
