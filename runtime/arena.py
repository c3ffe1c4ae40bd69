"""Arenas: memory that is kept from step to step, lent to one run of a program after the other.

A loan ends when the last tensor in it is gone, whoever holds that: autograd for a backward to come, a message on its
way, the user. Until then nobody else gets the memory, so two forwards before their backwards have two arenas.

On CUDA a loan is made on the current stream, and only to programs on that stream: whatever the next one writes comes
behind what the one before has read. A tensor that another stream reads must be kept until it has: `record_stream`, by
which torch's allocator would know, means nothing for memory that is lent.
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
    """Bytes of an arena that are one program's for the moment."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self._storage, self._device = storage, device

    def __getitem__(self, part: slice) -> torch.Tensor:
        """The bytes [start, stop), uint8 [stop - start].

        It is no view of a tensor: what is written to one part must not count as a change of another one, which autograd
        may hold for a backward.
        """
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(self._storage, part.start, (part.stop - part.start,), (1,))

    def __len__(self) -> int:
        return self._storage.nbytes()


class Places:
    """A line's place, of which its tensors take their parts one behind the other; what it has no room for is allocated.

    So are gradients in another dtype than planned: those to which held back ones have been added.
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
    """Memory that is filled from one end to the other in the order of `take`; what is beyond it is allocated."""

    def __init__(self, loan: Loan | None) -> None:
        self._loan, self.wanted = loan, 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Bytes of one's own, uint8 [nbytes]; None if there are none left."""
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
        """Bytes that are kept, lent or not."""
        return sum(block.memory.nbytes for block in self._blocks)

    def lend(self, nbytes: int) -> Loan:
        """At least `nbytes` that nobody else has. A free arena that is too small makes room for a larger one."""
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
        lent = torch.from_dlpack(block.memory)
        block.lent = StorageWeakRef(lent.untyped_storage())
        return Loan(lent.untyped_storage(), self.device)

    def loan_of(self, tensors: Iterable[torch.Tensor]) -> Loan | None:
        """The loan that one of `tensors` lies in."""
        begins = {block.memory.data_ptr() for block in self._blocks}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in begins:
                return Loan(storage, self.device)
        return None


class Lender:
    """Lends one program the memory of its arena and its stack, run by run."""

    def __init__(self, arenas: Arenas, arena: int, stack: int) -> None:
        """`arena` and `stack`: bytes that it needs of each; of the stack more, once a run has wanted more."""
        self._arenas, self._arena, self._stack = arenas, arena, stack

    def arena(self, full: Iterable[torch.Tensor]) -> Loan:
        """The arena for a phase: that which parameters kept `full` from the phase before lie in, if they do.

        Unless the backward is one of several through its graph (`retain_graph=True`): the others will read them too.
        """
        return (None if keeps_graph() else self._arenas.loan_of(full)) or self._arenas.lend(self._arena)

    @contextlib.contextmanager
    def stack(self) -> Iterator[ActivationStack]:
        """The stack for a phase. Sizes vary: what it would have taken is what the next one gets."""
        stack = ActivationStack(self._arenas.lend(self._stack) if self._stack else None)
        try:
            yield stack
        finally:
            self._stack = max(self._stack, stack.wanted)
