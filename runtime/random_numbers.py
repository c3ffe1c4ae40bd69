"""Random numbers: another dropout mask on each rank, though all were seeded alike, as scripts for one device do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zcompile.runtime.device import generators_of, is_host


@contextlib.contextmanager
def numbers_of_rank(rank: int, device: torch.device, *, others_draw: bool = False) -> Iterator[None]:
    """Draw random numbers of this rank's own inside; outside, generators that were equal on all ranks stay equal.

    What is drawn inside follows from the generators' states and the rank. Where nothing is drawn nothing changes; else
    each generator goes on as after a single draw. With `others_draw` it does so in any case: other ranks have drawn.
    """
    generators = generators_of(device)
    states = [_reseeded(generator, rank) for generator in generators]
    try:
        yield
    finally:
        for generator, (untouched, begun, drawn) in zip(generators, states, strict=True):
            unused = not others_draw and torch.equal(generator.get_state(), begun)
            generator.set_state(untouched if unused else drawn)


def within_numbers_of_rank(device: torch.device) -> bool:
    """True if generators are in a state that `numbers_of_rank` has begun, as a recomputation of it restores it."""
    return any(generator.initial_seed() >= _OWN for generator in generators_of(device))


_OWN = 1 << 62
"""Seeds of ranks begin here; the user's are smaller, unless they were drawn, which is done on each rank apart."""


def _reseeded(generator: torch.Generator, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed `generator` for this rank; gives its state before, as it begins now, and as it is to be if used."""
    untouched = generator.get_state()
    seed = _draw(generator)
    drawn = generator.get_state()
    generator.manual_seed(_OWN + (seed + rank) % _OWN)
    return untouched, generator.get_state(), drawn


def _draw(generator: torch.Generator) -> int:
    """A number that follows from the generator's state, which goes on."""
    if not is_host(generator.device):
        # Drawing on a GPU would launch a kernel and wait for it; seed and offset are known on the host.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        generator = torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)
    return int(torch.randint(2**62, (), generator=generator))
