"""The longest sequence that fits on a device, by options, as forecast: `python -m benchmarks.memory.longest`, an hour.

Nothing is run. Each way to train is a line of options: `chunk`, `checkpoint`, `offload_activations`, and over how many
ranks `sequence="ulysses"` divides the tokens; "none" leaves one out. Stage 3, batches of one sequence, bfloat16.
Parameters and optimizer state are in the host's memory with `--offload`, else divided over the ranks. What fits is
nine tenths of the device, for what forecasts do not count. Lengths are tried by doubling, then by eighths.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zcompile.cost.memory import model_state, peak_bytes
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.model.units import Precision, make_layout
from zcompile.schedule.options import Options
from zcompile.tools.named_models import subject_of
from zcompile.tools.tracing import trace

WAYS = ("none,unit,none,1", "auto,unit,none,1", "none,unit,cpu,1", "auto,unit,cpu,1")


@dataclass(frozen=True)
class Way:
    """How to train."""

    chunk: str | None
    checkpoint: str | None
    activations: str | None
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Way:
        *options, ranks = text.split(",")
        chunk, checkpoint, activations = (None if option == "none" else option for option in options)
        return cls(chunk, checkpoint, activations, int(ranks))

    def held(self, model: str, length: int, *, offload: bool) -> int:
        """Bytes on the device at the peak of a step."""
        subject, dtype = subject_of(model, batch=1, sequence=length), torch.bfloat16
        sums = self.chunk is not None or self.ranks > 1
        traced = trace(subject.model, subject.args, subject.kwargs, dtype=dtype, device="cuda", chunks=sums)
        axes = Axis("dp_sp", AxisKind.SHARD, self.ranks), Axis("sp", AxisKind.SEQUENCE, self.ranks)
        layout = make_layout(subject.model, STAGES[3], axes[: 1 + (self.ranks > 1)], None, Precision(dtype))
        options = Options(
            dtype=dtype,
            prefetch=1,
            checkpoint=self.checkpoint,
            chunk=self.chunk,
            offload_activations=self.activations,
            sequence="ulysses" if self.ranks > 1 else None,
        )
        program = options.pipeline().run(replace(traced, layout=layout))
        program = replace(program, layout=replace(program.layout, away=offload))
        state = model_state(program.layout)
        return peak_bytes(program) + (0 if offload else state.parameters + state.moments)


def fits(length: int, way: Way, options: argparse.Namespace) -> bool:
    """Whether a sequence of that length fits."""
    held = way.held(options.model, length, offload=options.offload)
    print(f"{way}: {length} tokens, {held / 1e9:.2f} GB", file=sys.stderr, flush=True)
    return bool(held <= 0.9e9 * options.memory)


def longest(fits: Callable[[int], bool]) -> int:
    """The longest length that fits, to an eighth."""
    low, high = 0, 1024
    while fits(high):
        low, high = high, 2 * high
    step = low // 2
    while step and step >= low // 8:
        low += step if fits(low + step) else 0
        step //= 2
    return low


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama:8b", help="as of `zcompile plan` (llama:8b)")
    parser.add_argument("--memory", type=float, default=80, help="of the device, in GB (80)")
    parser.add_argument("--offload", action="store_true", help="parameters and optimizer state in the host's memory")
    parser.add_argument("ways", nargs="*", default=WAYS, help="chunk,checkpoint,offload_activations,ranks")
    options = parser.parse_args(arguments)
    for way in options.ways:
        found = longest(partial(fits, way=Way.parse(way), options=options))
        print(f"{way}: {found} tokens", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
