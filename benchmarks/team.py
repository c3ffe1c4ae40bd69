"""The processes of one configuration, a rank each, which the command talks to over pipes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.links import End
from benchmarks.protocol import Failed

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 5.0  # seconds that processes get to end by themselves
Environment = Callable[[Mapping[str, str], int, End], dict[str, str]]


class TeamError(RuntimeError):
    """A team that cannot go on: one of its processes failed, died or did not answer in time."""


class Team:
    """A process at each of `ends`, running `module` with a descriptor of its pipe and `arguments[rank]`.

    `environment(os.environ, rank, end)` is what each process sees.
    """

    def __init__(
        self,
        module: str,
        ends: Sequence[End],
        logs: Path,
        timeout: float,
        arguments: Sequence[Sequence[str]] | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.timeout, self.logs = timeout, logs
        self.environment = environment or on_two_ends
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, end in enumerate(ends):
            self._start(rank, end, [*end.prefix, sys.executable, "-m", module], arguments[rank] if arguments else ())

    def _start(self, rank: int, end: End, command: Sequence[str], arguments: Sequence[str]) -> None:
        mine, theirs = socket.socketpair()
        with theirs, Path(f"{self.logs}.rank{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), *arguments],
                cwd=ROOT,
                env=self.environment(os.environ, rank, end),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the command, which ends its processes in order
            )
        self.processes.append(process)
        self.connections.append(Connection(mine.detach()))

    def tell(self, *messages: Any) -> None:
        """Send `messages[rank]` to each process."""
        for connection, message in zip(self.connections, messages, strict=True):
            with contextlib.suppress(OSError):  # it died: hear() says so
                connection.send(message)

    def hear(self) -> list[Any]:
        """The answer of each process.

        Raises:
            TeamError: One of them failed, died or is late; the team is closed then.
        """
        if any(connection.closed for connection in self.connections):
            raise TeamError("it was closed")
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < len(self.connections):
            waiting = [connection for connection in self.connections if connection not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(f"no answer within {self.timeout:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[connection] = self._receive(connection)
        return [answers[connection] for connection in self.connections]

    def _receive(self, connection: Connection) -> Any:
        rank = self.connections.index(connection)
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            status = self._status(rank)
            self._give_up(f"rank {rank} died ({status})")
        if isinstance(answer, Failed):
            self._give_up(f"rank {rank}: {answer.reason}")
        return answer

    def _status(self, rank: int) -> str:
        try:
            code = self.processes[rank].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "its pipe is closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _give_up(self, reason: str) -> None:
        self.close(patience=0.5)
        raise TeamError(reason)

    def dismiss(self) -> None:
        """Let the processes end, and wait for none of them: `close` does, or the end of the `with`."""
        for connection in self.connections:
            connection.close()

    def close(self, patience: float = PATIENCE) -> None:
        """Let the processes end, and kill those that do not."""
        self.dismiss()
        deadline = time.monotonic() + patience
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def on_two_ends(given: Mapping[str, str], rank: int, end: End) -> dict[str, str]:
    """What a rank of two sees: one thread, the CPU, gloo at its end of the link, and what DeepSpeed asks for."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    return {
        **given,
        **{name: str(value) for name, value in ranks.items()},
        "MASTER_ADDR": end.address,
        "MASTER_PORT": "29500",  # asked for and unused: ranks meet through a file
        "GLOO_SOCKET_IFNAME": end.interface,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no idle pool of compilers beside each rank
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
    }
