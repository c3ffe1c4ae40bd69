"""A pass of your own: wait for all reductions at the end of the backward.

The pipeline's `sink_waits` keeps a few reductions in flight, so that full gradients do not pile up. This one waits for
all of them at the end: more overlap, more memory. `python examples/own_pass.py --stage 3` prints the program with it,
`--plain` without.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import zcompile
from zcompile.facts import REDUCED_ONCE, WAITS_SUNK
from zcompile.ir.ops import Results, WaitReduce


def wait_at_end(program: zcompile.Program) -> zcompile.Program:
    """Move the wait of every reduction after all compute."""
    program = program.copy()
    (end,) = program.nodes(Results)
    for wait in program.nodes(WaitReduce):
        end.prepend(wait)
    return program


# A pass of the same name takes the other one's place; its facts are checked like any pass's.
WAIT_AT_END = zcompile.Pass("sink_waits", wait_at_end, requires=(REDUCED_ONCE,), ensures=(WAITS_SUNK,))


class Net(nn.Module):
    """Equal layers."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="the pipeline as it is")
    options = parser.parse_args()
    passes = None if options.plain else {"sink_waits": WAIT_AT_END}
    compiled = zcompile.compile(Net(), stage=options.stage, prefetch=options.prefetch, passes=passes, backend="eager")
    compiled(torch.randn(8, 64)).backward()
    for program in compiled.programs:
        print(program)


if __name__ == "__main__":
    main()
