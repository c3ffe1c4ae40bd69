"""A step over a large vocabulary with and without `chunk=`: `python -m benchmarks.memory.chunks`, ten minutes, 24 GiB.

One rank trains a GPT in turn as it is, in chunks, with a loss that is written in chunks by hand, as trl's and
torchtitan's are (the head, the loss and the backward of some rows at a time, by autograd), with the one of trl where
that is installed (tiles of 4,096 tokens and 32,768 words, as its trainers ask), and with a loss that reads no logits.
Printed are, of each, the bytes at the peak of a step beside those before it (on the CPU live bytes,
`benchmarks.common.live_bytes`; with `--device cuda` what torch has allocated, in bfloat16, of 124 million parameters
beside the words), and its seconds over those of the model as it is in the same round: median and spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

import zcompile
from benchmarks.common.configurations import MIB, Sizes
from benchmarks.common.live_bytes import LiveBytes
from benchmarks.common.models import batch, make_model
from benchmarks.common.ranks import call_alone
from examples.gpt import GPT

SIZES = {
    "cpu": Sizes(blocks=4, width=256, heads=8, vocabulary=128_256, sequence=2048, batch=4),
    "cuda": Sizes(blocks=12, width=768, heads=12, vocabulary=128_256, sequence=2048, batch=8),
}
Step = Callable[[Tensor, Tensor], Tensor]
"""Computes the loss of a batch and adds to the gradients."""


@dataclass
class Found:
    """What the steps of a way to train took."""

    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Allocated:
    """What torch has allocated on the GPU, in bytes."""

    def live(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """The most since this was asked."""
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most


def hidden(model: GPT, tokens: Tensor) -> Tensor:
    """What the head reads, (tokens, width)."""
    x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1], device=tokens.device))
    for block in model.blocks:
        x = block(x)
    normed: Tensor = model.norm(x)
    return normed.flatten(0, 1)


class WithoutLogits(GPT):
    """The same parameters, all of which have gradients, and no logits."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return (hidden(self, tokens) @ self.head.weight.sum(0)).square().mean()


def by_hand(model: GPT, rows: int) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda)
        with autocast:
            read = hidden(model, tokens)
        leaf, total = read.detach().requires_grad_(), read.new_zeros(())
        for some, wanted in zip(leaf.split(rows), targets.flatten().split(rows), strict=True):
            with autocast:
                loss = F.cross_entropy(model.head(some), wanted, reduction="sum") / targets.numel()
            loss.backward()
            total += loss.detach()
        read.backward(leaf.grad)
        return total

    return step


def by_trl(model: GPT) -> Step:
    from trl.kernels import ChunkedLogProbFunction

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            given = hidden(model, tokens), model.head.weight, model.head.bias, targets.flatten(), 1.0, 32_768, None, 1.0
            loss: Tensor = -ChunkedLogProbFunction.apply(*given, ())[0].mean()
        loss.backward()
        return loss.detach()

    return step


def by_zcompile(model: GPT, backend: str, chunk: int | None) -> Step:
    dtype = torch.bfloat16 if next(model.parameters()).is_cuda else None
    compiled = zcompile.compile(model, stage=0, backend=backend, chunk=chunk, dtype=dtype)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = compiled(tokens, targets)
        loss.backward()
        return loss.detach()

    return step


def measure(sizes: Sizes, rows: int, rounds: int, backend: str, device: str) -> dict[str, Found]:
    """Train with each in turn."""
    ways: dict[str, Callable[[GPT], Step]] = {
        "as it is": lambda model: by_zcompile(model, backend, None),
        "in chunks": lambda model: by_zcompile(model, backend, rows),
        "by hand": lambda model: by_hand(model, rows),
        **({"by trl": by_trl} if find_spec("trl") else {}),
        "without logits": lambda model: by_zcompile(model, backend, None),
    }
    models = {name: make_model(sizes, 0).to(device) for name in ways}
    models["without logits"] = WithoutLogits(models["as it is"].config).to(device)
    steps = {name: make(models[name]) for name, make in ways.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    counter = Allocated() if device == "cuda" else LiveBytes()
    found = {name: Found() for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            tokens, targets = (values.to(device) for values in batch(sizes, 0, 0, number))
            state, _ = counter.live(), counter.peak()
            before = time.perf_counter()
            loss = step(tokens, targets)
            peak = counter.peak() - state
            seconds = time.perf_counter() - before
            optimizers[name].step()
            optimizers[name].zero_grad()
            if number:  # not the first one, which compiles
                found[name].seconds.append(seconds)
                found[name].peaks.append(peak)
            found[name].losses.append(loss.item())
            print(f"{name} {number}: {seconds:.1f} s, {peak / MIB:.0f} MiB", file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="the most tokens at once (512)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each that count (5)")
    parser.add_argument("--backend", default="eager", help="of zcompile (eager)")
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--vocabulary", type=int, help="words (128,256)")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence (2,048)")
    options = parser.parse_args(arguments)
    named = {name: getattr(options, name) for name in ("vocabulary", "sequence") if getattr(options, name)}
    sizes = replace(SIZES[options.device], **named)
    print(f"{sizes}, {options.rows} rows, {options.backend}")
    given = sizes, options.rows, options.rounds, options.backend, options.device
    found = call_alone(measure, *given, counted=options.device == "cpu", device=options.device)
    plain = found["as it is"]
    for name, one in found.items():
        ratios = [mine / other for mine, other in zip(one.seconds, plain.seconds, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        peak = statistics.median(one.peaks)
        share = f"{peak / statistics.median(plain.peaks):.3f}"
        print(f"{name:16} {peak / MIB:8.0f} MiB {share} | {statistics.median(one.seconds):6.2f} s {spread}")
    far = max(abs(one - other) for one, other in zip(found["in chunks"].losses, plain.losses, strict=True))
    print(f"losses in chunks differ by at most {far:.1e}")
    return int(far > (1e-3 if options.device == "cpu" else 1e-1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
