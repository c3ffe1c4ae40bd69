"""What is told of a region that was compiled for a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Binary:
    """Machine code of a kernel, in one of the variants that Inductor chooses from by measuring them on the GPU.

    `registers` and `spills` are a thread's, the latter counted as Triton does: 4-byte words of its stack. `shared` is a
    block's, in bytes.
    """

    kernel: str
    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Compiled:
    """A region as Inductor compiles it for a GPU.

    Args:
        binaries: The variants of all its kernels.
        calls: What it calls beside its kernels, such as cuBLAS, and how often.
        problem: Why it does not run on a GPU by Triton alone; empty if it does.
    """

    binaries: tuple[Binary, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def kernels(self) -> set[str]:
        return {binary.kernel for binary in self.binaries}

    @property
    def templates(self) -> int:
        """Kernels that are not generated but filled in, such as matrix products after `max_autotune`."""
        return sum(name.startswith("triton_tem_") for name in self.kernels)


@dataclass(frozen=True)
class Row:
    """A region of one phase of a program, and how often that calls it."""

    phase: str
    region: str
    uses: int
    compiled: Compiled
