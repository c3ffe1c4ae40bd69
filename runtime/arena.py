"""Arenas: memory kept from step to step and lent to one program run at a time.

A loan ends when the last tensor in it is freed, whoever holds it: autograd for a later backward, a message in flight,
the user. Until then no other run gets the memory, so two forwards before their backwards use two arenas.

On CUDA, a loan is made on the current stream, and the memory is lent only to programs on that stream: a later run's
writes are ordered after an earlier run's reads. A tensor that another stream reads must be kept alive until it has:
`record_stream` only informs torch's caching allocator, which does not manage lent memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zcompile.ir.packing import aligned
from zcompile.runtime.device import stream_number
from zcompile.torch_internals.autograd import keeps_graph


class Loan:
    """Bytes of an arena, lent to one program run."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self._storage, self._device = storage, device

    def __getitem__(self, part: slice) -> torch.Tensor:
        """The bytes [start, stop), uint8 [stop - start].

        Not a view of a shared tensor: views share a version counter, so a write to one part would invalidate others
        that autograd has saved for a backward.
        """
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(self._storage, part.start, (part.stop - part.start,), (1,))

    def __len__(self) -> int:
        return self._storage.nbytes()


class Places:
    """Memory planned for one line, handed out front to back; tensors that do not fit are allocated.

    Gradients to which held ones were added, for example, may have another dtype than planned.
    """

    def __init__(self, at: torch.Tensor | None, device: torch.device) -> None:
        self._at, self._taken, self._device = at, 0, device

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised 1-D tensor of `numel` elements."""
        start, stop = self._taken, self._taken + numel * dtype.itemsize
        if self._at is None or stop > len(self._at):
            return torch.empty(numel, dtype=dtype, device=self._device)
        self._taken = aligned(stop)
        return self._at[start:stop].view(dtype)


class ActivationStack:
    """Memory handed out front to back in the order of `take`; the caller allocates what no longer fits."""

    def __init__(self, loan: Loan | None) -> None:
        self._loan, self.wanted = loan, 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """The next free bytes, uint8 [nbytes]; None if too few are left."""
        start, self.wanted = self.wanted, self.wanted + aligned(nbytes)
        if self._loan is None or self.wanted > len(self._loan):
            return None
        return self._loan[start : start + nbytes]


@dataclass(eq=False)
class _Block:
    memory: torch.Tensor
    stream: int
    lent: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        return self.lent is None or bool(self.lent.expired())


class Arenas:
    """The arenas of one model on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[_Block] = []

    @property
    def nbytes(self) -> int:
        """Bytes held, lent or not."""
        return sum(block.memory.nbytes for block in self._blocks)

    def lend(self, nbytes: int) -> Loan:
        """Lend at least `nbytes`. If all free arenas are too small, the largest is replaced by a larger one."""
        stream = stream_number(self.device)
        free = sorted(
            (block for block in self._blocks if block.is_free and block.stream == stream),
            key=lambda block: block.memory.nbytes,
        )
        block = next((block for block in free if block.memory.nbytes >= nbytes), None)
        if block is None:
            if free:
                self._blocks.remove(free.pop())
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            block = _Block(memory, stream)
            self._blocks.append(block)
        lent = torch.from_dlpack(block.memory)  # a storage of its own, which expires with the loan's last tensor
        block.lent = StorageWeakRef(lent.untyped_storage())
        return Loan(lent.untyped_storage(), self.device)

    def loan_of(self, tensors: Iterable[torch.Tensor]) -> Loan | None:
        """The loan that one of `tensors` lies in, if any."""
        begins = {block.memory.data_ptr() for block in self._blocks}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in begins:
                return Loan(storage, self.device)
        return None


class Lender:
    """Lends one program its arena and its activation stack, run by run."""

    def __init__(self, arenas: Arenas, arena: int, stack: int) -> None:
        """`arena` and `stack`: bytes needed of each; the stack grows once a run has wanted more."""
        self._arenas, self._arena, self._stack = arenas, arena, stack

    def arena(self, full: Iterable[torch.Tensor]) -> Loan:
        """The arena for a phase; reuses the one that holds parameters kept `full` from the previous phase.

        Except in a backward that keeps its graph (`retain_graph=True`): later backwards read these parameters, too.
        """
        return (None if keeps_graph() else self._arenas.loan_of(full)) or self._arenas.lend(self._arena)

    @contextlib.contextmanager
    def stack(self) -> Iterator[ActivationStack]:
        """The stack for a phase. Sizes vary: the next phase gets at least as much as this one wanted."""
        stack = ActivationStack(self._arenas.lend(self._stack) if self._stack else None)
        try:
            yield stack
        finally:
            self._stack = max(self._stack, stack.wanted)
