"""One rank, started by `benchmarks.common.ranks`: calls or makes what it is told, and answers over a pipe.

Nothing here imports torch unless a process group is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Place:
    """A rank's place in a process group, whose ranks meet through a file."""

    rank: int
    world: int
    store: str
    timeout: float
    device: str


@dataclass(frozen=True)
class Begin:
    """The first message to a rank: what a function is called with, or a class, and the group that is joined before."""

    args: tuple[Any, ...]
    place: Place | None = None


@dataclass(frozen=True)
class Failed:
    """The answer of a rank that cannot go on."""

    reason: str


@contextlib.contextmanager
def joined(place: Place | None) -> Iterator[Callable[[], object]]:
    """In the process group of `place`, if there is one; gives what waits for the other ranks."""
    if place is None:
        yield lambda: None
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if place.device == "cuda":
        torch.cuda.set_device(place.rank)
    store, limit = dist.FileStore(place.store, place.world), timedelta(seconds=place.timeout)
    backend = "nccl" if place.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=limit)
    try:
        yield dist.barrier  # a rank that is done at once would close its connections while others still use them
    finally:
        with contextlib.suppress(Exception):  # of a group that has lost a rank: what was lost is said already
            dist.destroy_process_group()


def serve(connection: Connection, named: Callable[..., Any]) -> None:
    """Answer with what a function gives; or make an object, and answer with what its methods give, first `ready`."""
    begin: Begin = connection.recv()
    with joined(begin.place) as meet:
        made = named(*begin.args)
        meet()
        if not isinstance(named, type):
            connection.send(made)
            return
        if hasattr(made, "ready"):
            connection.send(made.ready())
        while True:
            name, args = connection.recv()
            connection.send(getattr(made, name)(*args))


def main() -> None:
    """Serve the pipe at the descriptor of the command line; an error is the last answer."""
    descriptor, target = sys.argv[1:]
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    sys.modules["__main__"] = found  # classes of a command's own come pickled as those of its main module
    connection = Connection(int(descriptor))
    try:
        serve(connection, getattr(found, name))
    except EOFError:
        return  # the command has what it wanted, or is gone
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        connection.send(Failed(f"{type(error).__name__}: {lines[0]}"))
        raise SystemExit(1) from error
