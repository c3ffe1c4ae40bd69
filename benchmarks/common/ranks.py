"""Ranks as processes: a `Team` is asked over pipes as long as it lives, a function is called once on each (`call`)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from benchmarks.common.links import LOOPBACK, End
from benchmarks.common.live_bytes import build
from benchmarks.common.rank import Begin, Failed, Place

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LOCAL = RESULTS / "local"
PATIENCE = 5.0  # seconds that processes get to end by themselves
MAIN = "from benchmarks.common.rank import main; main()"


class TeamError(RuntimeError):
    """A team that cannot go on: one of its processes failed, died or did not answer in time."""

    @property
    def kind(self) -> str:
        return "hang" if "no answer" in str(self) else "crash"


class Team:
    """A process at each of `ends`, which calls or makes `target` once it is told to `begin`.

    Args:
        target: A function or a class: "module:name" (`rank.serve`).
        ends: Where the ranks live.
        logs: What the names of files begin with to which they print.
        timeout: Seconds until a rank that does not answer has failed.
        environment: What they see beside the variables of their places.
        device: What they train on: "cpu" or "cuda".
    """

    def __init__(
        self,
        target: str,
        ends: Sequence[End],
        logs: Path,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.timeout, self.logs, self.device = timeout, logs, device
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, end in enumerate(ends):
            given = {**surroundings(os.environ, rank, len(ends), end, device), **(environment or {})}
            self._start(rank, [*end.prefix, sys.executable, "-c", MAIN], target, given)

    def _start(self, rank: int, command: Sequence[str], target: str, environment: Mapping[str, str]) -> None:
        mine, theirs = socket.socketpair()
        with theirs, Path(f"{self.logs}.rank{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), target],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the command, which ends its processes in order
            )
        self.processes.append(process)
        self.connections.append(Connection(mine.detach()))

    def begin(self, *args: Any, store: str = "") -> None:
        """Call or make the target on every rank, in one process group that meets at `store` if that is given."""
        world = len(self.connections)
        places = [Place(rank, world, store, self.timeout, self.device) if store else None for rank in range(world)]
        self.tell(*(Begin(args, place) for place in places))

    def ask(self, name: str, *args: Any) -> list[Any]:
        """What a method gives, of the object on each rank."""
        self.tell(*[(name, args)] * len(self.connections))
        return self.hear()

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

    def _give_up(self, reason: str) -> NoReturn:
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


class Pool:
    """Ranks that do one task after the other; they are started anew when one has died or hangs, and now and then."""

    def __init__(self, target: str, world: int, logs: Path, fresh: int, starting: float = 600.0) -> None:
        self.target, self.ends, self.logs, self.starting = target, [LOOPBACK] * world, logs, starting
        self.fresh, self.tasks = fresh, 0
        """After so many tasks: what libraries keep of each would fill the memory, and threads of groups stay."""
        self.team: Team | None = None

    def ask(self, timeout: float, name: str, *args: Any) -> list[Any]:
        """What a method of the target gives.

        Raises:
            TeamError: A rank failed, died or took longer than `timeout` seconds.
        """
        self.tasks += 1
        if self.tasks % self.fresh == 0:
            self.close()
        if self.team is None:
            self.team = Team(self.target, self.ends, self.logs, self.starting)
            self.team.begin()
            self.team.hear()  # imports are no part of a task
        self.team.timeout = timeout
        try:
            return self.team.ask(name, *args)
        except TeamError:
            self.team = None
            raise

    def close(self) -> None:
        if self.team is not None:
            self.team.close(patience=0.5)
            self.team = None


def surroundings(given: Mapping[str, str], rank: int, world: int, end: End, device: str = "cpu") -> dict[str, str]:
    """What a rank sees: its place; on the CPU one thread, gloo at its end of the link, and what DeepSpeed asks for."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    placed = {**given, **{name: str(value) for name, value in ranks.items()}}
    if device == "cuda":  # a few compilers of its own
        return {"TORCHINDUCTOR_COMPILE_THREADS": "8", **placed}
    return {
        **placed,
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


def named(function: Callable[..., Any]) -> str:
    """How a process of its own finds a function or a class of a module, also of the one that is run."""
    module = function.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    return f"{module}:{function.__qualname__}"


@contextlib.contextmanager
def started(
    target: Callable[..., Any],
    *args: Any,
    ends: Sequence[End] = (LOOPBACK, LOOPBACK),
    group: bool = True,
    counted: bool = False,
    timeout: float = 3600.0,
    environment: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> Iterator[Team]:
    """A team that has begun with `target`, in one process group; `counted`: with `live_bytes` in its processes."""
    with tempfile.TemporaryDirectory(prefix="ranks") as name:
        folder = Path(name)
        preload = {"LD_PRELOAD": str(build(folder))} if counted else {}
        seen = {**preload, **(environment or {})}
        with Team(named(target), ends, folder / "log", timeout, seen, device) as team:
            team.begin(*args, store=str(folder / "store") if group else "")
            try:
                yield team
            except TeamError:
                for log in sorted(folder.glob("log.*")):
                    print(log.name, log.read_text(errors="replace")[-2000:], sep="\n", file=sys.stderr)
                raise


def call(target: Callable[..., T], *args: Any, **options: Any) -> list[T]:
    """What a function gives on each of some ranks; options are those of `started`.

    Raises:
        TeamError: One of them failed.
    """
    with started(target, *args, **options) as team:
        return list(team.hear())


def call_alone(target: Callable[..., T], *args: Any, **options: Any) -> T:
    """What a function gives in a process of its own, which is in no group."""
    (found,) = call(target, *args, ends=(LOOPBACK,), group=False, **options)
    return found
