"""Agreement: ranks compare texts through the store, with a deadline: a difference is an error and not a hang."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist

from zcompile._torch import default_store, group_timeout
from zcompile.errors import AgreementError
from zcompile.runtime.groups import Communicator


class Agreement:
    """What the ranks of a mesh have agreed on so far, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.count = 0
        self.prefix = ""
        # A fake group has one real rank, which has nobody to agree with.
        self.alone = communicator.size == 1 or dist.get_backend(communicator.group) == "fake"
        if not self.alone:
            # The store counts this rank's models, so that the n-th of every rank meet.
            name = f"zcompile/{communicator.group.group_name}"
            self.prefix = f"{name}/{default_store().add(f'{name}/models of {communicator.rank}', 1)}"

    def reach(self, what: str, lines: Sequence[str]) -> None:
        """Return once every rank came here with the same `lines`.

        Raises:
            AgreementError: on every rank: the first line that differs and whose it is, or who did not come in time.
        """
        size, rank = self.communicator.size, self.communicator.rank
        self.count += 1
        if self.alone:
            return
        store = dist.PrefixStore(f"{self.prefix}/{self.count}", default_store())
        store.set(str(rank), "\n".join([what, *lines]))
        texts = {other: self._text(store, other, what) for other in range(size)}
        if difference := first_difference(texts):
            raise AgreementError(what, difference, "run the same code, options and environment on every rank")

    def _text(self, store: dist.Store, rank: int, what: str) -> list[str]:
        timeout = group_timeout(self.communicator.group, self.communicator.device)
        try:
            store.wait([str(rank)], timeout)
        except RuntimeError as error:  # a DistStoreError from a TCPStore, a plain one from a FileStore
            limit = f"{timeout.total_seconds():.0f} s"
            found = f"rank {rank} did not get here within {limit}, rank {self.communicator.rank} did"
            fix = "look for an error on that rank; every rank must make the same calls in the same order"
            raise AgreementError(what, found, fix) from error
        return store.get(str(rank)).decode().split("\n")


def first_difference(texts: dict[int, list[str]]) -> str:
    """The first line in which the ranks' texts differ, with each rank's version; empty when all are equal."""
    ranks = sorted(texts)
    for number, row in enumerate(itertools.zip_longest(*(texts[rank] for rank in ranks), fillvalue="(nothing)")):
        if len(set(row)) > 1:
            versions = {line: [rank for rank, other in zip(ranks, row, strict=True) if other == line] for line in row}
            listed = "; ".join(f"rank {', '.join(map(str, of))}: {line!r}" for line, of in versions.items())
            return f"line {number + 1} differs: {listed}"
    return ""
