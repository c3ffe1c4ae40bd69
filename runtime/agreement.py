"""Agreement: ranks compare texts through the store, with a deadline: a difference raises an error and does not hang."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zcompile import errors
from zcompile.errors import AgreementError, GroupError, StateError, ZcompileError
from zcompile.runtime.groups import Communicator
from zcompile.runtime.waits import Waits, named, ranks_by
from zcompile.torch_internals.distributed import default_store, group_timeout, is_fake

T = TypeVar("T")

FIRST_LOOK = 0.001
"""Seconds until the store is polled again for the other ranks' texts; doubled after each poll."""
ALIKE = "run the same code, options and environment on every rank"
_WITHDRAWN = "\0"
"""Prefix of the text of a rank that withdraws; the reason follows as JSON."""


class Agreement:
    """Comparisons between the ranks of a mesh, numbered in order."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.count = 0
        self.number = 0
        """Number of this model among this rank's models on the group, from 1."""
        self.prefix = ""
        # A fake group has one real rank, which has nobody to agree with.
        self.alone = communicator.size == 1 or communicator.is_fake
        if not self.alone:
            self.prefix, self.number = _next_prefix(communicator.waits.ranks, communicator.waits.rank)

    def reach(
        self, what: str, lines: Sequence[str], fix: str = ALIKE, conflict: Callable[[], str] | None = None
    ) -> None:
        """Return once every rank has called this with the same `lines`, or with compatible ones.

        Args:
            what: Name of what is compared; the same on all ranks.
            lines: This rank's version of it.
            fix: How to fix a difference; part of the error.
            conflict: Called on every rank if lines differ; returns what is wrong, or an empty string. May be
                collective. Without it, every difference is an error.

        Raises:
            AgreementError: on every rank: the first line that differs with each version, or the ranks that came too
                late.
        """
        shared = [text.split("\n") for text in self._exchange("\n".join([what, *lines]), what)]
        self._compare(what, [texts[:1] for texts in shared])
        difference = first_difference(dict(enumerate(shared)))
        if difference and conflict is not None:
            difference = conflict()
        if difference:
            raise AgreementError(what, difference, fix)

    def share(self, what: str, text: str) -> list[str]:
        """The texts of all ranks, in rank order, once every rank has called this with the same `what`.

        Raises:
            AgreementError: on every rank; some ranks called this with another `what`, or did not arrive in time.
        """
        pairs = [shared.partition("\n") for shared in self._exchange(f"{what}\n{text}", what)]
        self._compare(what, [[what] for what, _, _ in pairs])
        return [text for _, _, text in pairs]

    def together(self, what: str, where: str, make: Callable[[], T]) -> T:
        """Return the result of `make` once it has succeeded on every rank.

        Raises:
            StateError: on every rank, about `where`: `make` raised one on some rank.
        """
        failure = ""
        try:
            made = make()
        except StateError as error:
            failure = error.problem
        failures = self.share(what, failure)
        for rank, found in enumerate(failures):
            if found:
                raise StateError(where, f"on rank {rank}: {found}", "give a folder with room for what every rank keeps")
        return made

    def attempt(self, what: str, act: Callable[[], T], *, shown: bool = False) -> tuple[T, list[Any]]:
        """Return the result of `act` once it succeeded on every rank, and with `shown` each rank's result, via JSON.

        Raises:
            ZcompileError: the same on every rank: the first one, in rank order, that `act` raised.
        """
        error: ZcompileError | None = None
        outcome: list[Any] = [None, None]
        try:
            result = act()
            outcome[1] = result if shown else None
        except ZcompileError as raised:
            error = raised
        except Exception as raised:
            kind, rank = type(raised).__name__, self.communicator.rank
            error = StateError(what, f"failed on rank {rank}: {kind}: {raised}", "fix that and try again")
            error.__cause__ = raised
        if error is not None:
            outcome[0] = [type(error).__name__, error.subject, error.problem, error.fix]
        answers = [json.loads(text) for text in self.share(what, json.dumps(outcome))]
        for failure, _ in answers:
            if failure is not None:
                raise getattr(errors, failure[0])(*failure[1:]) from error
        return result, [value for _, value in answers]

    def _write(self, text: str) -> dist.Store:
        self.count += 1
        store = dist.PrefixStore(f"{self.prefix}/{self.count}", default_store())
        store.set(str(self.communicator.waits.rank), text)
        return store

    def _exchange(self, text: str, what: str) -> list[str]:
        if self.alone:
            return [text]
        store, waits = self._write(text), self.communicator.waits
        return _read(store, waits.ranks, waits, group_timeout(self.communicator.group, self.communicator.device), what)

    def _compare(self, what: str, texts: list[list[str]], fix: str = ALIKE) -> None:
        if difference := first_difference(dict(enumerate(texts))):
            raise AgreementError(what, difference, fix)


def _read(store: dist.Store, ranks: Sequence[int], waits: Waits, limit: timedelta, what: str) -> list[str]:
    """The texts that `ranks` have written into `store`, once all have.

    Raises:
        AgreementError: some did not within `limit`, or one has withdrawn.
    """
    _await(store, ranks, waits, limit, what)
    texts = [store.get(str(rank)).decode() for rank in ranks]
    for rank, found in zip(ranks, texts, strict=True):
        if found.startswith(_WITHDRAWN):
            problem, fix = json.loads(found.removeprefix(_WITHDRAWN))
            raise AgreementError(what, f"rank {rank} failed first: {problem}", f"on rank {rank}: {fix}")
    return texts


def _await(store: dist.Store, ranks: Sequence[int], waits: Waits, limit: timedelta, what: str) -> None:
    """Return once every rank has written its text.

    Raises:
        AgreementError: some did not within `limit`.
    """
    deadline, keys = time.perf_counter() + limit.total_seconds(), [str(rank) for rank in ranks]

    def missing() -> list[int]:
        with contextlib.suppress(RuntimeError):
            return [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        return [rank for rank in ranks if rank != waits.rank]  # the store is gone with its host

    def done(seconds: float) -> bool:
        end, pause = time.perf_counter() + seconds, FIRST_LOOK
        while (left := end - time.perf_counter()) > 0:
            # Not `store.wait`: TCPStore logs two warnings each time that it times out.
            with contextlib.suppress(RuntimeError):  # the store is gone
                if store.check(keys):
                    return True
            time.sleep(min(pause, left))
            pause *= 2
        return time.perf_counter() > deadline

    waits.until(done, what, missing)
    waits.over()
    if late := missing():
        seconds = f"{limit.total_seconds():.0f} s"
        problem = f"{named(late)} did not arrive within {seconds}, but rank {waits.rank} did"
        if (culprits := waits.culprits(late)) != late:
            problem += f"; {named(culprits)} kept {'it' if len(late) == 1 else 'them'} waiting"
        fix = f"look for an error of {named(culprits)}; every rank must make the same calls in the same order"
        raise AgreementError(what, problem, fix)


def _next_prefix(ranks: Sequence[int], rank: int) -> tuple[str, int]:
    """The store prefix for comparisons of the ranks' next model, and that model's number on `rank`, from 1.

    The store counts models per rank, so that the n-th models of all ranks share a prefix.
    """
    name = f"zcompile/{hashlib.sha256(repr(sorted(ranks)).encode()).hexdigest()[:16]}"
    number = default_store().add(f"{name}/models of {rank}", 1)
    return f"{name}/{number}", number


@contextlib.contextmanager
def propagate_failure(ranks_of: Callable[[], Sequence[int]], *, every: bool = False) -> Iterator[None]:
    """Around a rank's local work before ranks agree on a model: report its failure to the ranks that wait.

    Do not create groups within it: other ranks would not take part.

    Args:
        ranks_of: Returns the ranks that will create the same model, including this one.
        every: Report GroupErrors, too; only if no group of the model is created within.
    """
    try:
        yield
    except ZcompileError as error:
        # Every rank raises an AgreementError itself, and a broken group cannot carry a report.
        own = isinstance(error, AgreementError) or (isinstance(error, GroupError) and not every)
        if not own and dist.is_initialized():
            with contextlib.suppress(Exception):  # the mesh may be invalid, or the store gone
                _withdraw(ranks_of(), error)
        raise


def preflight_barrier(ranks: Sequence[int], device: torch.device, what: str) -> None:
    """Return once all of `ranks` have passed the work inside `propagate_failure`; call it before creating their groups.

    Raises:
        AgreementError: one failed there, or did not arrive within the default group's timeout.
    """
    world = dist.GroupMember.WORLD
    if world is None or len(ranks) == 1 or is_fake(world):
        return
    prefix, _ = _next_prefix(ranks, dist.get_rank())
    store = dist.PrefixStore(f"{prefix}/1", default_store())
    store.set(str(dist.get_rank()), "")
    _read(store, ranks, Waits(world), group_timeout(world, device), what)


def _withdraw(ranks: Sequence[int], error: ZcompileError) -> None:
    """Write why this rank withdraws, in place of its first text to compare."""
    rank = dist.get_rank()
    if len(ranks) > 1 and rank in ranks:
        problem = f"{type(error).__name__}: {error.subject}: {error.problem}"
        prefix, _ = _next_prefix(ranks, rank)
        dist.PrefixStore(f"{prefix}/1", default_store()).set(str(rank), _WITHDRAWN + json.dumps([problem, error.fix]))


def first_difference(texts: dict[int, list[str]]) -> str:
    """The first line in which the ranks' texts differ, with each rank's version; empty when all are equal."""
    ranks = sorted(texts)
    for number, row in enumerate(itertools.zip_longest(*(texts[rank] for rank in ranks), fillvalue="(nothing)")):
        if len(set(row)) > 1:
            versions = ranks_by(dict(zip(ranks, row, strict=True)))
            listed = "; ".join(f"rank {', '.join(map(str, of))}: {line!r}" for line, of in versions.items())
            return f"line {number + 1} differs: {listed}"
    return ""
