"""Ranks of a process group in one process: threads that take turns, whose messages are copies.

A rank has the turn until it waits for another one, so nothing runs beside it but its own progress thread, and every run
has the same order. No sockets, no imports, no start; programs can be traced once for all ranks. What is about
processes, connections and time takes the pool of `tests.ranks`.

Not torch's own threaded group (`torch.testing._internal.distributed.multi_threaded_pg`), of which the registry of
groups by thread is taken: it has no messages between two ranks, its threads run at once, with one state of random
numbers, and its collectives meet by a name that groups of a mesh may share.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo import convert_frame  # noqa: TID251  # as torch's own tests do
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.ranks import PATIENCE, RankError
from tests.shared_steps import sharing_steps
from tests.shared_traces import sharing
from zcompile.engine.interpreter import in_large_frame
from zcompile.runtime.waits import Waits
from zcompile.torch_internals.dtensor import forget_meshes

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]
HANGS = 10.0
"""Seconds that ranks wait for each other while none goes on."""
KEEPS = 200.0
"""Seconds that a rank may have the turn, and that those who agree on something wait for it."""


class Ended(BaseException):
    """Another rank has failed. No Exception: nothing that a job runs is to catch it."""


# -- turns ------------------------------------------------------------------------------------------------------------


class Turns:
    """Which rank runs."""

    def __init__(self, world: int) -> None:
        self.changed = threading.Condition()
        self.left = list(range(world))
        self.now, self.failed = 0, False
        self._waiting, self._moved = set[int | None](), time.monotonic()
        """The ranks that wait, and when one of them last went on."""
        self._of_thread = threading.local()
        self._numbers: list[Any] = [_random_numbers()] * world

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """This thread is the rank's; within, it has the turn unless it waits."""
        self._of_thread.rank = rank
        try:
            with self.changed:
                self._take(rank)
            yield
        except BaseException:
            self.failed = True
            raise
        finally:
            with self.changed:
                others = [other for other in self.left if other != rank]
                self.now = self._behind(rank) if others else -1
                self.left = others
                self.changed.notify_all()

    def wait(self, ready: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Give the turn to others until `ready`; False if it is not within `seconds`, or if all ranks wait in vain."""
        rank, end = getattr(self._of_thread, "rank", None), time.monotonic() + seconds
        self._waiting |= {rank}
        self._moved = self._moved if rank is None else time.monotonic()
        while not ready():
            if self.failed:
                raise Ended
            if time.monotonic() > min(end, self._moved + HANGS if self._waiting.issuperset(self.left) else math.inf):
                self._waiting -= {rank}
                return False
            with self.changed:
                if rank is None or len(self.left) == 1:  # a progress thread, which has no turn; or nobody to give it to
                    self.changed.wait(0.001)
                    continue
                self._numbers[rank] = _random_numbers()
                self.now = self._behind(rank)
                self.changed.notify_all()
                self._take(rank)
        self._waiting -= {rank}
        self._moved = time.monotonic()
        return True

    def _behind(self, rank: int) -> int:
        return min(self.left, key=lambda other: (other - rank - 1) % (max(self.left) + 1))

    def _take(self, rank: int) -> None:
        if not self.changed.wait_for(lambda: self.now == rank or self.failed, KEEPS):
            self.failed = True
            raise RankError(f"rank {self.now} neither ends nor waits for another rank:\n{_stacks()}")
        if self.failed:
            raise Ended
        _set_random_numbers(self._numbers[rank])


def _stacks() -> str:
    """Where the ranks are."""
    names, frames = {thread.ident: thread.name for thread in threading.enumerate()}, sys._current_frames()
    stacks = {name: traceback.format_stack(frames[at]) for at, name in names.items() if at in frames}
    return "\n".join(f"{name}:\n{''.join(stack)}" for name, stack in sorted(stacks.items()) if "rank" in name)


def _random_numbers() -> Any:
    return torch.get_rng_state(), random.getstate()


def _set_random_numbers(state: Any) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])


# -- messages ---------------------------------------------------------------------------------------------------------


class Work:
    """A message to a rank, until it has arrived."""

    def __init__(self, turns: Turns, tensor: torch.Tensor | None = None) -> None:
        self._turns, self._tensor, self._done = turns, tensor, tensor is None

    @torch.no_grad()
    def arrive(self, sent: torch.Tensor) -> None:
        assert self._tensor is not None, "it is received"
        if sent.nbytes != self._tensor.nbytes:
            raise RuntimeError(f"{sent.nbytes} bytes were sent, and {self._tensor.nbytes} are received")
        self._tensor.view(-1).view(torch.uint8).copy_(sent.view(-1).view(torch.uint8))
        self._done = True

    def is_completed(self) -> bool:
        return self._done

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._turns.wait(self.is_completed, math.inf if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for a message")
        return True


class World:
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.turns, self.store = Turns(size), dist.HashStore()
        self.lock = threading.Lock()
        self.sent: dict[Any, deque[torch.Tensor]] = defaultdict(deque)
        self.awaited: dict[Any, deque[Work]] = defaultdict(deque)
        self.given: dict[Any, dict[int, Any]] = defaultdict(dict)

    def send(self, key: Any, tensor: torch.Tensor) -> Work:
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self.lock:
            if self.awaited[key]:
                self.awaited[key].popleft().arrive(sent)
            else:
                self.sent[key].append(sent)
        with self.turns.changed:
            self.turns.changed.notify_all()
        return Work(self.turns)

    def receive(self, key: Any, tensor: torch.Tensor) -> Work:
        work = Work(self.turns, tensor)
        with self.lock:
            if self.sent[key]:
                work.arrive(self.sent[key].popleft())
            else:
                self.awaited[key].append(work)
        return work

    def meet(self, key: Any, rank: int, size: int, given: Any) -> list[Any]:
        """What all ranks of a group have given to one of its collectives, once all have."""
        self.given[key][rank] = given
        if not self.turns.wait(lambda: len(self.given[key]) == size):
            raise RuntimeError(f"Timed out waiting for a collective:\n{_stacks()}")
        return [self.given[key][rank] for rank in range(size)]


class LocalGroup(dist.ProcessGroup):
    """A group whose ranks are in this process. To zcompile it is gloo's; collectives of torch's wait at once."""

    def __init__(self, world: World, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._world, self._rank, self._size = world, rank, size
        self._calls = 0
        # All ranks of a group, and no others, have its store: a place in it is what they have in common.
        self._key = _key_of(store, world)
        self.options = SimpleNamespace(_timeout=timeout)

    def name(self) -> str:
        return "gloo"

    def getBackendName(self) -> str:
        return _BACKEND

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def pg_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    group_name = pg_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _: torch.device) -> LocalGroup:
        return self

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        return self._world.send((self._key, self._rank, to, tag), *tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        return self._world.receive((self._key, source, self._rank, tag), *tensors)

    def _together(self, given: Any, work: Callable[[list[Any]], None]) -> Any:
        """Give to the next collective; `work` is called with what all have given, before anybody goes on."""
        self._calls += 1
        with torch.no_grad():
            kept = _copied(given)
            work(self._world.meet((self._key, self._calls, "in"), self._rank, self._size, kept))
            self._world.meet((self._key, self._calls, "out"), self._rank, self._size, None)
        done: Future[Any] = Future()
        done.set_result(given)
        return threaded._create_work_from_future(done)

    def barrier(self, opts: Any = None) -> Any:
        return self._together(None, lambda all_: None)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        source = opts.rootRank if opts is not None else 0
        return self._together(tensors, lambda all_: _copy(tensors, all_[source]))

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        reduce = _reducing(opts)
        return self._together(tensors, lambda all_: _copy(tensors, [reduce(rows) for rows in zip(*all_, strict=True)]))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        reduce, root = _reducing(opts), opts.rootRank

        def work(all_: list[Any]) -> None:
            if self._rank == root:
                _copy(tensors, [reduce(rows) for rows in zip(*all_, strict=True)])

        return self._together(tensors, work)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        def work(all_: list[Any]) -> None:
            for index, output in enumerate(outputs):
                _copy(output, [given[index] for given in all_])

        return self._together(inputs, work)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.allgather([output.view(self._size, *given.shape)], [given])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self.allgather([o.view(self._size, *i.shape) for o, i in zip(outputs, inputs, strict=True)], inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        reduce = _reducing(opts)

        def work(all_: list[Any]) -> None:
            for index, output in enumerate(outputs):
                output.copy_(reduce([given[index][self._rank] for given in all_]).view(output.shape))

        return self._together(inputs, work)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [given.view(self._size, *output.shape)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        parts = [i.view(self._size, *o.shape) for o, i in zip(outputs, inputs, strict=True)]
        return self.reduce_scatter(outputs, parts, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self._together(inputs, lambda all_: _copy(outputs, [given[self._rank] for given in all_]))

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, arriving: list[int], leaving: list[int], opts: Any = None
    ) -> Any:
        both = (output, arriving), (given, leaving)
        return self.alltoall(*(one.split(sizes) if sizes else one.chunk(self._size) for one, sizes in both))

    alltoall_base = all_to_all_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        return self._together(inputs, lambda all_: _copy(outputs[0] if outputs else (), [one for one, *_ in all_]))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        return self._together(inputs, lambda all_: _copy(outputs, [all_[opts.rootRank][0][self._rank]]))


def _key_of(store: dist.Store, world: World) -> str:
    """A name that the ranks of a group have in common, and no other group has: in its store a number is kept."""
    with world.lock:
        if not store.check(["local ranks"]):
            store.set("local ranks", str(world.store.add("groups", 1)))
        return store.get("local ranks").decode()


def _copied(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.detach().clone()
    return [_copied(one) for one in given] if isinstance(given, (list, tuple)) else given


def _copy(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=False):
        target.detach().copy_(source.view(target.shape))


def _reducing(opts: Any) -> Callable[[Tensors], torch.Tensor]:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return _SUMS[getattr(op, "op", op)]


def _sum(rows: Tensors) -> torch.Tensor:
    """In the order of ranks."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


_SUMS: dict[Any, Callable[[Tensors], torch.Tensor]] = {
    dist.ReduceOp.SUM: _sum,
    dist.ReduceOp.AVG: lambda rows: _sum(rows) / len(rows),
    dist.ReduceOp.MAX: lambda rows: torch.stack(list(rows)).amax(0),
    dist.ReduceOp.MIN: lambda rows: torch.stack(list(rows)).amin(0),
    dist.ReduceOp.PRODUCT: lambda rows: torch.stack(list(rows)).prod(0),
}


# -- running ----------------------------------------------------------------------------------------------------------


class Threads:
    """What runs functions as the ranks of a process group, as the pool of `tests.ranks` does."""

    def run(self, world: int, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(rank, *args)` on `world` ranks under a process group; returns what each gave.

        Raises:
            RankError: with the tracebacks of the ranks that failed.
        """
        shared, results, errors = World(world), dict[int, T](), dict[int, str]()

        def begin(rank: int) -> None:
            try:
                with shared.turns.of(rank):
                    dist.init_process_group(_BACKEND, store=shared.store, rank=rank, world_size=world, timeout=_TIMEOUT)
                    results[rank] = in_large_frame(function, rank, *args)
                    shared.turns.wait(lambda: len(results) == world)
            except Ended:
                pass
            except BaseException:
                errors[rank] = traceback.format_exc()

        numbers = _random_numbers()
        with _installed(shared), sharing(), sharing_steps():
            ranks = [threading.Thread(target=begin, args=(rank,), name=f"rank {rank}") for rank in range(world)]
            try:
                for thread in ranks:
                    thread.start()
                for thread in ranks:
                    thread.join()
            except BaseException:  # a test's own timeout: whoever waits or comes to wait ends with it
                shared.turns.failed = True
                for thread in filter(threading.Thread.is_alive, ranks):
                    thread.join(PATIENCE)
                raise
            torch.compiler.reset()
            forget_meshes()
        _set_random_numbers(numbers)
        if errors:
            raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(world)]


_BACKEND = "threads"
_TIMEOUT = timedelta(seconds=KEEPS)
_WORLDS: list[World] = []
"""The one that runs: torch makes groups by a function that knows nothing of it."""


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LocalGroup:
    return LocalGroup(_WORLDS[-1], store, rank, size, timeout)


dist.Backend.register_backend(_BACKEND, _group, devices=["cpu"])


@contextlib.contextmanager
def _installed(world: World) -> Iterator[None]:
    """Every thread has groups of its own, all of this kind, and a rank that waits gives its turn to others."""
    until, new_group = Waits.until, dist.new_group

    def giving_turns(waits: Waits, done: Callable[[float], bool], *args: Any) -> None:
        until(waits, lambda seconds: world.turns.wait(lambda: done(_LOOK), seconds), *args)

    def local_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs)

    _WORLDS.append(world)
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # noqa: TID251  # as torch's own tests do
    isolate(True)
    try:
        with (
            mock.patch.object(distributed_c10d, "_world", threaded.ThreadLocalWorld()),
            mock.patch.object(Waits, "until", giving_turns),
            mock.patch.object(dist, "new_group", local_group),
            # Held while a rank compiles, and within that it may wait for the others; turns keep them apart as it is.
            mock.patch.object(convert_frame, "compile_lock", contextlib.nullcontext()),
        ):
            yield
    finally:
        isolate(False)
        _WORLDS.pop()


_LOOK = 3e-4
"""Seconds of a look at whether something has come."""
