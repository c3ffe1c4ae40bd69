"""A rank under test: runs its loop on zcompile, and tells what its user sees."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from benchmarks.faults.loop import BEFORE, FORWARDS, LATE, MOMENTS, NORM, Op, make_model, make_optimizer, set_otherwise

FOREVER = 3600.0


@dataclass(frozen=True)
class Job:
    """What a rank is to do."""

    rank: int
    world: int
    stage: int
    timeout: float
    folder: Path
    """Where ranks meet and write logs."""
    checkpoint: Path
    script: Sequence[Op]


@dataclass(frozen=True)
class Raised:
    """What an operation ended in, after how many seconds."""

    kind: str
    typed: bool
    text: str
    seconds: float


class UsersOwnError(Exception):
    """Raised by the user's code on one rank."""


class Pipe:
    """The way to the command, also from threads that warn."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()

    def tell(self, what: str, *given: object) -> None:
        """Say something that `ranks.Seen.hear` knows."""
        with self.lock:
            self.connection.send((what, *given))


class Warnings(logging.Handler):
    """Sends what is logged as a warning."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(logging.WARNING)
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self.pipe.tell("warned", record.getMessage())


def work(connection: Connection, job: Job) -> None:
    """Run the job, and stay until the command says that all ranks are done: a process that ends is seen by others."""
    log = os.open(job.folder / f"{job.rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    pipe = Pipe(connection)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: pipe.tell("warned", str(message))
    logging.getLogger().addHandler(Warnings(pipe))
    began = time.perf_counter()
    try:
        pipe.tell("begun", BEFORE)
        store = dist.FileStore(str(job.folder / "store"), job.world)
        limit = timedelta(seconds=job.timeout)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=limit)
        rank = Rank(job, pipe)
        for op in job.script:
            pipe.tell("begun", op)
            began = time.perf_counter()
            rank.do(op)
    except Exception as error:
        typed = isinstance(error, zcompile.ZcompileError)
        pipe.tell("ended", Raised(type(error).__name__, typed, str(error), time.perf_counter() - began))
    else:
        pipe.tell("ended", None)
    connection.recv()


class Rank:
    """A user's training loop on one rank."""

    def __init__(self, job: Job, pipe: Pipe) -> None:
        self.job, self.pipe = job, pipe
        plain = make_model()
        self.optimizer = make_optimizer(plain)
        self.model = zcompile.compile(plain, optimizer=self.optimizer, stage=job.stage, backend="eager")
        self.losses: list[torch.Tensor] = []
        self.saves: list[Any] = []
        self.train_step: Callable[..., torch.Tensor] | None = None
        if any(op.letter in "Tt" for op in job.script):
            self.train_step = zcompile.train_step(self.model, self._loss, self.optimizer)
        self.fails = False
        self.doing: dict[str, Callable[[Op], object]] = {
            **dict.fromkeys(FORWARDS, self._forward),
            "B": lambda op: self.losses.pop().backward(),
            "R": lambda op: self.losses[-1].backward(retain_graph=True),
            "A": self._micro_batch,
            "E": self._evaluate,
            "V": self._evaluate,
            "S": self._step,
            "Z": lambda op: self.optimizer.zero_grad(),
            **dict.fromkeys("Yy", lambda op: set_otherwise(self.optimizer, op.letter)),
            "T": self._train,
            "C": lambda op: self.model.save_checkpoint(job.checkpoint, self.optimizer),
            "c": self._save_meanwhile,
            "w": lambda op: [save.result() for save in self.saves],
            "M": self._whole_state,
            "D": self._state,
            "O": lambda op: self.model.load_checkpoint(job.checkpoint, self.optimizer),
            "G": lambda op: nn.utils.clip_grad_norm_(self.model.parameters(), NORM),
            "K": lambda op: os.kill(os.getpid(), signal.SIGKILL),
            "X": lambda op: os._exit(1),
            **dict.fromkeys("Pp", lambda op: os.kill(os.getpid(), signal.SIGSTOP)),
            "k": self._kill_soon,
            "W": lambda op: time.sleep(LATE),
            "N": lambda op: time.sleep(FOREVER),
            "!": self._fail,
            "h": self._fail_in_hook,
            "o": self._fail_in_optimizer,
            "t": self._fail_in_loss,
        }

    def do(self, op: Op) -> None:
        self.doing[op.letter](op)

    def _forward(self, op: Op) -> None:
        self.losses.append(self.model(*op.batch(self.job.rank), op.path))
        self.pipe.tell("loss", op.place, float(self.losses[-1].detach()))

    def _micro_batch(self, op: Op) -> None:
        with self.model.no_sync():
            self.model(*op.batch(self.job.rank)).backward()

    def _evaluate(self, op: Op) -> None:
        self.model.train(op.letter == "E")
        with torch.no_grad():
            self.pipe.tell("loss", op.place, float(self.model(*op.batch(self.job.rank))))
        self.model.train()

    def _step(self, op: Op) -> None:
        self.optimizer.step()
        self._tell_rows()

    def _train(self, op: Op) -> None:
        assert self.train_step is not None
        loss = self.train_step(*op.batch(self.job.rank))
        self.pipe.tell("loss", op.place, float(loss))
        self._tell_rows()

    def _tell_rows(self) -> None:
        self.pipe.tell("stepped", [own_rows(param).tolist() for param in self.model.parameters()])

    def _state(self, op: Op) -> None:
        state = self.model.full_state_dict()
        if self.job.rank == 0:
            self.pipe.tell("state", op.place, [value.tolist() for value in state.values()])

    def _whole_state(self, op: Op) -> None:
        state = list(self.model.full_state_dict(rank0_only=False).values())
        slots = [self.optimizer.state[param].get("momentum_buffer") for param in self.model.parameters()]
        moments = [slot.full_tensor() if isinstance(slot, DTensor) else slot for slot in slots if slot is not None]
        self.pipe.tell("state", op.place, [value.tolist() for value in [*state, *moments]])

    def _save_meanwhile(self, op: Op) -> None:
        self.saves.append(self.model.save_checkpoint(self.job.checkpoint, self.optimizer, asynchronous=True))

    def _loss(self, model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise UsersOwnError("the loss failed")
        loss: torch.Tensor = model(*batch)
        return loss

    def _kill_soon(self, op: Op) -> None:
        seed = f"{self.job.checkpoint.name} {self.job.world} {self.job.stage} {op.place}"
        least, most = MOMENTS
        moment = least * (most / least) ** random.Random(seed).random()
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def _fail(self, *_: object) -> None:
        raise UsersOwnError("the data loader failed")

    def _fail_in_hook(self, op: Op) -> None:
        loss = self.losses.pop()
        loss.register_hook(self._fail)
        loss.backward()

    def _fail_in_optimizer(self, op: Op) -> None:
        self.optimizer.register_step_pre_hook(self._fail)
        self.optimizer.step()

    def _fail_in_loss(self, op: Op) -> None:
        self.fails = True
        self._train(op)


def own_rows(param: torch.Tensor) -> torch.Tensor:
    """What this rank keeps of a parameter."""
    with torch.no_grad():
        return param.to_local() if isinstance(param, DTensor) else param.detach()
