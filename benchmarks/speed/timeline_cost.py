"""What the timeline and the executor cost: `python -m benchmarks.speed.timeline_cost`, `--ranks 2`.

Two models that are alike take steps in turns, one with the recorder, one without: the ratio of each pair, their median
and quartiles. A step's noise is larger than what is looked for, so the cost of recording a line is also measured by
itself, and held against the step. The executor's own overhead is read off the timelines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

import zcompile
from benchmarks.common.figures import quartiles
from benchmarks.common.links import LOOPBACK
from benchmarks.common.ranks import call
from examples.gpt import GPT, GPTConfig
from zcompile.cost.timeline import Timeline
from zcompile.runtime.loader import load
from zcompile.runtime.recorder import Line, Recorder, Track


class Trained:
    """A model with its optimizer and batch."""

    def __init__(self, options: argparse.Namespace, *, recorded: bool) -> None:
        torch.manual_seed(0)
        model = GPT(GPTConfig(options.vocabulary, options.sequence, options.layers, options.heads, options.width))
        self.model = zcompile.compile(model, stage=options.stage)
        self.model._engine.runtime.recorder.enabled = recorded
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(0, options.vocabulary, (options.batch, options.sequence))

    def step(self) -> float:
        """Seconds of one training step."""
        start = time.perf_counter()
        self.model(self.tokens, self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def seconds_per_line(calls: int = 100_000) -> float:
    """What recording adds to a line that does nothing."""
    lines, recorder = 100, Recorder()
    text = "def forward(box):\n" + "    y = f(box)\n" * lines
    track = Track(recorder, "forward", "", [Line("f", "y", "")] * lines)
    recorded, plain = (load(text, "forward", {}, "<lines>", one, operations={"f": id}) for one in (track, None))

    def loop(program: Callable[[list[object]], object]) -> float:
        start = time.perf_counter()
        program([])
        return (time.perf_counter() - start) / lines

    pairs = []
    for _ in range(calls // lines):
        pairs.append((loop(recorded), loop(plain)))
        recorder._step.runs.clear()
    return statistics.median(with_it - without for with_it, without in pairs)


def measure(options: argparse.Namespace) -> str:
    """A page: ratios of steps with the recorder to steps without, and what the timelines of those with it say."""
    torch.set_num_threads(1)
    on, off = Trained(options, recorded=True), Trained(options, recorded=False)
    for trained in (on, off, on, off):
        trained.step()
    ratios, timelines = [], []
    for number in range(options.rounds):
        pair = (on, off) if number % 2 else (off, on)
        seconds = {trained: trained.step() for trained in pair}
        ratios.append(seconds[on] / seconds[off])
        timelines.append(on.model.timeline)
    return "\n".join(page(ratios, timelines))


def page(ratios: list[float], timelines: list[Timeline]) -> Iterator[str]:
    """The last timeline, and what all of them say together."""
    step = statistics.median(timeline.compute + timeline.optimizer + timeline.overhead for timeline in timelines)
    lines = len(timelines[0].lines)
    each = seconds_per_line()
    yield str(timelines[-1])
    yield f"step with the recorder / without, {len(ratios)} pairs: {quartiles(ratios):.4f}"
    yield f"recording: {each * 1e6:.2f} µs a line, {lines} lines: {each * lines / step:.4%} of a step of {step:.3f} s"
    per_line = quartiles([timeline.overhead_per_line for timeline in timelines])
    share = f"{per_line.times(100 * lines / step):.2f} % of a step"
    yield f"host overhead of the executor: {per_line.times(1e6):.1f} µs a line, {share}"
    of_all = quartiles([100 * timeline.overhead / step for timeline in timelines])
    yield f"host overhead of all kinds: {of_all:.2f} % of a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("width", 512), ("heads", 8), ("vocabulary", 8192), ("sequence", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("batch", 4), ("stage", 3), ("rounds", 20), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    print(call(measure, options, ends=[LOOPBACK] * options.ranks, group=options.ranks > 1)[0])


if __name__ == "__main__":
    main()
