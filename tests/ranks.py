"""One pool of rank processes for all tests: starting torch takes seconds, a job on started ranks milliseconds."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from tests.garbage import Collector

AT_ONCE = 45
"""Seconds within which ranks are told of what would otherwise have them wait for the group's 60, on a busy machine."""

PATIENCE = 5.0
"""Seconds that the others have to answer once a rank has ended, which they may wait for."""
Device = Literal["host", "simulated", "gpu", "bound gpu"]
STARTED = multiprocessing.get_context("forkserver")
"""Torch and pytest are loaded once, by a process that does nothing else, of which those on the host are copies."""
STARTED.set_forkserver_preload(["pytest", "zcompile"])
SPAWNED = multiprocessing.get_context("spawn")
"""What a device needs has to be there before torch."""


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


class Ranks:
    """Up to `size` processes that run functions as the ranks of a process group. One that fails is replaced.

    Args:
        size: How many there may be.
        on: What they have: the host and gloo, a simulated GPU each, or one GPU together and NCCL, whose groups torch
            makes as they are used, or, where the device is bound to them, at once.
    """

    def __init__(self, size: int, *, on: Device = "host") -> None:
        self.size, self.on = size, on
        self.workers: dict[int, Worker] = {}

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, group: float = 60
    ) -> list[Any]:
        """Call `function(rank, *args)` on `world` ranks under a process group; returns what each gave.

        Of a world that is larger than the pool, which only simulated ranks may have, the first rank is there alone.

        Raises:
            RankError: on some rank it failed, ended the process, or took longer than `timeout` seconds.
        """
        workers = [self._worker(rank) for rank in range(world if world <= self.size else 1)]
        answers: list[tuple[bool, Any]] = []
        try:
            # A rank that still joins, and is killed with the others, may put the store into a folder that is going.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                job = (function.__module__, function.__qualname__, args, world, str(Path(folder) / "store"), group)
                for worker in workers:
                    worker.wait_until_ready(timeout)
                for rank, worker in enumerate(workers):
                    worker.connection.send((rank, *job))
                end = time.monotonic() + timeout
                for worker in workers:
                    answers.append(worker.answer(end))
                    if worker.has_ended:  # the others may wait for it
                        end = min(end, time.monotonic() + PATIENCE)
        except BaseException as error:  # a test that is out of time
            error.add_note("\n".join(f"rank {rank}:\n{worker.stacks()}" for rank, worker in enumerate(workers)))
            self.close()
            raise
        if failed := {rank: text for rank, (ok, text) in enumerate(answers) if not ok}:
            for rank in failed:
                self.workers.pop(rank).end()
            raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return [value for _, value in answers]

    def _worker(self, rank: int) -> Worker:
        if rank not in self.workers:
            self.workers[rank] = Worker(self.size, self.on, rank)
        return self.workers[rank]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers = {}


def run_apart(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `Ranks.run` gives, of a pool of this call's own: of more ranks than tests share."""
    with contextlib.closing(Ranks(world)) as pool:
        return pool.run(world, function, *args)


Body = Callable[..., Any]
"""What a test does on each rank: it is given the rank and the test's arguments, and gives nothing, or what is wrong."""


World = int | Callable[..., int] | None
"""How many ranks: as many as the test's argument `world` says where it is None, or a function of arguments."""


def on_ranks(world: World = None, **limits: float) -> Callable[[Body], Callable[..., None]]:
    """Make a test of what each rank does, which is a process of the pool; `limits` are those of its `run`."""
    return functools.partial(_test_of, "ranks", world, limits)


def on_threads(world: World = None) -> Callable[[Body], Callable[..., None]]:
    """Make a test of what each rank does, which is a thread."""
    return functools.partial(_test_of, "threads", world, {})


def _test_of(fixture: str, world: World, limits: dict[str, float], body: Body) -> Callable[..., None]:
    parameters = list(inspect.signature(body).parameters.values())[1:]

    @functools.wraps(body)
    def test(**given: Any) -> None:
        size = given["world"] if world is None else world
        if callable(size):
            size = size(*(given[name] for name in inspect.signature(size).parameters))
        answers = given[fixture].run(size, body, *(given[one.name] for one in parameters), **limits)
        wrong = {rank: answer for rank, answer in enumerate(answers) if answer}
        assert not wrong, wrong

    pool = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([pool, *parameters])  # type: ignore[attr-defined]
    test.on_each_rank = body  # type: ignore[attr-defined]
    return test


class Worker:
    """A process that is a rank of one job after the other."""

    def __init__(self, size: int, on: Device, rank: int) -> None:
        context = STARTED if on == "host" else SPAWNED
        self.connection, theirs = context.Pipe()
        self.log = tempfile.NamedTemporaryFile("r", prefix="stacks of a rank")  # noqa: SIM115  # until it ends
        self.process = context.Process(target=_work, args=(theirs, size, on, rank, self.log.name), daemon=True)
        self.process.start()
        theirs.close()
        self.has_ended = self.is_ready = False

    def wait_until_ready(self, seconds: float) -> None:
        """Return once it has loaded what it needs: on a busy machine ranks differ by more than their groups wait.

        Raises:
            EOFError: it has ended.
        """
        if not self.is_ready and self.connection.poll(seconds):
            self.is_ready = self.connection.recv()

    def answer(self, end: float) -> tuple[bool, Any]:
        """Whether the job went well, and what it gave or how it failed, once it has ended, or at the time `end`."""
        try:
            if self.connection.poll(max(0.0, end - time.monotonic())):
                answer: tuple[bool, Any] = self.connection.recv()
                return answer
        except (EOFError, ConnectionResetError):
            self.has_ended = True
            return False, f"the process died (a crash, not an exception)\n{self.log.read()}"
        self.has_ended = True
        return False, f"no answer: a hang, or the others wait for one that has ended\n{self.stacks()}"

    def stacks(self) -> str:
        """Where its threads are; empty where it has not begun, or is gone."""
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.2)
        return self.log.read()

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.log.close()


def _work(connection: Connection, size: int, on: Device, number: int, log: str) -> None:
    stacks = open(log, "w")  # noqa: SIM115  # as long as the process is there
    faulthandler.register(signal.SIGUSR1, stacks)
    faulthandler.enable(stacks)
    os.environ["OMP_NUM_THREADS"] = "1"
    join = {"host": _gloo, "simulated": _simulated}.get(on, partial(_nccl, on == "bound gpu"))(size, number)
    import torch
    import torch.distributed as dist
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    from tests.shared_steps import sharing_steps
    from tests.shared_traces import sharing
    from zcompile.engine.interpreter import in_large_frame
    from zcompile.torch_internals.dtensor import forget_meshes

    torch.set_num_threads(1)
    install_importhook(get_config())  # asserts on ranks say what they have found, as in tests
    garbage = Collector()
    gc.disable()
    connection.send(True)
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
            value = getattr(value, "on_each_rank", value)
            with sharing(), sharing_steps():
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


Join = Callable[[str, int, int, timedelta], None]
"""How a rank joins a world: where ranks meet, its number, how many there are, and how long groups wait."""


def _gloo(size: int, number: int) -> Join:
    import torch.distributed as dist

    def join(store: str, rank: int, world: int, timeout: timedelta) -> None:
        shared = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=timeout)
        # A rank that is done at once would close its connections while others are still connecting.
        dist.barrier()

    return join


def _simulated(size: int, number: int) -> Join:
    """Makes the simulated device, which has to be there before torch."""
    importlib.import_module("tests.simulated.device")
    from tests.simulated import nccl

    def join(store: str, rank: int, world: int, timeout: timedelta) -> None:
        if world > size:
            nccl.pretend(world)
        else:
            nccl.join(store, rank, world, timeout)

    return join


def _nccl(bound: bool, size: int, number: int) -> Join:
    """NCCL wants a GPU for each rank of a host: so each says that it is a host of its own, and goes over the network.

    Its collectives, streams and launches are those of several GPUs; what it must know has to be there before it begins.
    """
    os.environ |= {"NCCL_HOSTID": f"host {number}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    import torch
    import torch.distributed as dist

    def join(store: str, rank: int, world: int, timeout: timedelta) -> None:
        torch.cuda.set_device(0)
        shared, device = dist.FileStore(store, world), torch.device("cuda", 0) if bound else None
        dist.init_process_group("nccl", store=shared, rank=rank, world_size=world, timeout=timeout, device_id=device)
        dist.barrier()

    return join


def failed(call: Callable[[], Any]) -> tuple[str, str, float]:
    """What a call raises, its text, and the seconds it took; `away` waits until all the others are here."""
    started = time.perf_counter()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - started
    finally:
        from zcompile.torch_internals.distributed import default_store

        default_store().add("given up", 1)
    return "", "", time.perf_counter() - started


def away() -> tuple[str, str, float]:
    """Return once all the others have given up, without having taken part."""
    import torch.distributed as dist

    from zcompile.torch_internals.distributed import default_store

    until = time.monotonic() + 60
    while default_store().add("given up", 0) < dist.get_world_size() - 1 and time.monotonic() < until:
        time.sleep(0.05)
    return "", "", 0.0
