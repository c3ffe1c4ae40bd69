"""Ranks: start them, join them to a process group, leave it again."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from errors import FixableError
from torch import Tensor
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

INTERRUPTED = 130  # the exit status of a program stopped by Ctrl-C


class RanksError(FixableError):
    """The number of ranks asked for contradicts the number there is."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among all."""

    rank: int
    count: int
    device: torch.device
    transport: str  # "gloo" or "nccl"

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def mean(self, value: Tensor) -> float:
        """The mean of a scalar over all ranks; every rank must call it."""
        total = value.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.count


def launched() -> bool:
    """Whether torchrun, or a launcher like it, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks_first() -> bool:
    """Whether this process is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def launch(script: str, arguments: Sequence[str], count: int) -> int:
    """Run `script` as `count` ranks on this machine, as torchrun does, and return its exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    try:
        torchrun.main(["--standalone", f"--nproc-per-node={count}", script, *arguments])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


@contextmanager
def joined(expected: int | None) -> Iterator[Ranks]:
    """Join the process group for the length of a `with`.

    expected: the number of ranks the command line asks for; None takes what the launcher started.
    """
    count, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    if expected not in (None, count):
        raise RanksError(
            f"--ranks {expected} was asked for, and the launcher started {count}",
            f"leave --ranks out under torchrun, or start with --nproc-per-node {expected}",
        )
    device, transport = choose_device(local)
    dist.init_process_group(transport)
    try:
        yield Ranks(rank=dist.get_rank(), count=count, device=device, transport=transport)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher passes Ctrl-C on once more
        raise
    finally:
        dist.destroy_process_group()


def choose_device(local: int) -> tuple[torch.device, str]:
    """This rank's own GPU and NCCL where each rank of the machine can have one, else the CPU and gloo.

    local: this rank's number on its machine.
    """
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if torch.cuda.device_count() < beside:
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local)
    return torch.device("cuda", local), "nccl"
