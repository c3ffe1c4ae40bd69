"""Train a small GPT on Python's own source code, its state sharded over ranks by zcompile.

    python examples/train_gpt.py                                            starts two ranks itself
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py          the same by hand

On two CPU cores it takes about four minutes. Needs no GPU, no network and no data set.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoints import recall, remember
from errors import FixableError
from gpt import GPT, GPTConfig
from ranks import INTERRUPTED, Ranks, joined, launch, launched, speaks_first
from rich.console import Console
from rich.table import Table
from rich.text import Text
from screen import Reading, choose_screen, rate, share, size
from state import formula, held_bytes
from text import Corpus, load_corpus, sample_batch, spread_windows
from torch import nn

import zcompile

LEARNING_RATE = 2e-3
LEAST_RATE = 0.05  # where the learning rate ends, as a share of LEARNING_RATE
WARMUP = 30  # steps
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0  # largest norm of the whole gradient
VALIDATION_WINDOWS = 64  # on each rank
PROMPT = b"def "
SAMPLE = 300  # bytes written after the prompt
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Options:
    """The command line."""

    stage: int
    prefetch: int
    ranks: int | None
    steps: int
    batch: int
    data: Path | None
    backend: str
    dump: Path
    seed: int
    explain: bool
    checkpoint: Path | None
    every: int
    resume: bool


@dataclass(frozen=True)
class Run:
    """Everything one rank trains with."""

    options: Options
    config: GPTConfig
    ranks: Ranks
    corpus: Corpus
    model: zcompile.CompiledModule  # called like a GPT, its parameters sharded
    parameters: int  # of the whole model
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    data: torch.Generator  # chooses the batches, others on each rank
    done: int  # steps of the run that this one goes on from


class NothingLeft(FixableError):
    """The checkpoint has all the steps that were asked for."""


def parse(arguments: list[str]) -> Options:
    """Read the command line; a wrong one ends the program with a message."""
    parser = argparse.ArgumentParser(description="Train a small GPT, sharded over ranks by zcompile.")
    add = parser.add_argument
    add("--stage", type=int, choices=range(4), default=3, help="what the ranks share out, 0 nothing to 3 all (3)")
    add("--prefetch", type=at_least(0), default=2, metavar="K", help="collectives to start ahead of their use (2)")
    add("--ranks", type=at_least(1), metavar="N", help="ranks to start (2); under torchrun, what it started")
    add("--steps", type=at_least(1), default=350, metavar="N", help="optimizer steps (350)")
    add("--batch", type=at_least(1), default=8, metavar="N", help="sequences in a step on each rank (8)")
    add("--data", type=Path, metavar="PATH", help="a text file or a folder of them (Python's own sources)")
    add("--backend", choices=("inductor", "eager"), default="inductor", help="what runs the program (inductor)")
    add("--dump", type=Path, default=Path("zcompile_dump"), metavar="DIR", help="where the program is written")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of the weights and the batches (0)")
    add("--explain", action="store_true", help="end with a page on what was communicated when")
    add("--checkpoint", type=Path, metavar="DIR", help="where the state is saved every --every steps and at the end")
    add("--every", type=at_least(1), default=100, metavar="N", help="steps from one checkpoint to the next (100)")
    add("--resume", action="store_true", help="go on from the state in --checkpoint, whatever ranks and stage it had")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR, the folder to go on from")
    return options


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers for argparse that refuses those below `least`."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: give {least} or more")
        return value

    return whole_number


def main(arguments: list[str]) -> int:
    """Train, in ranks started here if no launcher has; return the exit status."""
    options = parse(arguments)
    try:
        if not launched():
            load_corpus(options.data, GPTConfig().context)  # complains here once rather than in every rank
            return launch(__file__, arguments, options.ranks or 2)
        with joined(options.ranks) as ranks:
            train(options, ranks, Console(quiet=not ranks.first))
    except (FixableError, zcompile.StateError) as error:
        return leave(f"train_gpt: {error}", status=2)
    except KeyboardInterrupt:
        return leave("train_gpt: interrupted", status=INTERRUPTED)
    return 0


def leave(message: str, status: int) -> int:
    """Say why the program ends, once for all ranks; return the exit status."""
    if speaks_first():
        print(message, file=sys.stderr)
    return status


def train(options: Options, ranks: Ranks, console: Console) -> None:
    """Train, validate, write a sample, and report. Every rank does the same; the first one's console is not quiet."""
    began = time.perf_counter()
    run = prepare(options, ranks)
    console.print(headline(run), markup=False, highlight=False, soft_wrap=True)
    history: list[Reading] = []
    with choose_screen(console, options.steps) as screen:
        for reading in readings(run):
            history.append(reading)
            screen.show(reading)
    console.print("validating and writing a sample; this compiles the forward once more", soft_wrap=True)
    validation = validate(run)
    sample = generate(run, PROMPT, SAMPLE)
    console.rule("sample")
    console.print(Text.assemble((legible(PROMPT), "bold"), legible(sample)), soft_wrap=True)
    console.rule()
    console.print(summary(run, history, validation, time.perf_counter() - began))
    if options.explain:
        console.print(run.model.explain(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"the program that ran is in {options.dump}/", markup=False, highlight=False, soft_wrap=True)


def prepare(options: Options, ranks: Ranks) -> Run:
    """Make the same model on each rank, compile it, and give its shards to an optimizer."""
    config = GPTConfig()
    corpus = load_corpus(options.data, config.context)
    torch.manual_seed(options.seed)
    model = GPT(config).to(ranks.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compiled = zcompile.compile(
        model, stage=options.stage, prefetch=options.prefetch, backend=options.backend, dump=str(options.dump)
    )
    optimizer = make_optimizer(compiled)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, options.steps))
    data = torch.Generator().manual_seed(options.seed + 1 + ranks.rank)
    done = 0
    if options.resume and options.checkpoint:
        done = recall(compiled.load_checkpoint(options.checkpoint, optimizer), ranks.rank, schedule, data)
        if done >= options.steps:
            raise NothingLeft(f"the run in {options.checkpoint} has done {done} steps", "ask for more with --steps")
    return Run(options, config, ranks, corpus, compiled, parameters, optimizer, schedule, data, done)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the shards; matrices decay, the vectors of the norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step, from 0, as a share of LEARNING_RATE: linear up, then half a cosine down."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min((step + 1) / WARMUP, LEAST_RATE + (1 - LEAST_RATE) * cosine)


@dataclass(frozen=True)
class Mark:
    """The clock and the counters of communication, all cumulative, at one moment."""

    time: float  # seconds
    sent: int  # bytes
    in_flight: float  # seconds, added up over collectives
    waited: float  # seconds


def mark(run: Run) -> Mark:
    """The counters of this rank now."""
    traffic = run.model.traffic
    return Mark(time.perf_counter(), traffic.bytes, traffic.seconds, traffic.exposed)


def readings(run: Run) -> Iterator[Reading]:
    """Train step by step, and say after each how things stand.

    Speed, hidden share and waiting count from the end of the first step: that one compiles, which would pass for
    slow compute that hides all communication.
    """
    tokens = run.options.batch * run.config.context * run.ranks.count
    kept = formula(run.options.stage)
    before, first, held, saving = mark(run), None, 0, None
    for count, step in enumerate(range(run.done + 1, run.options.steps + 1)):
        loss = forward_backward(run)
        run.optimizer.step()
        held = held or held_bytes(run.model.parameters(), run.optimizer)
        run.optimizer.zero_grad()
        run.schedule.step()
        if run.options.checkpoint and (step % run.options.every == 0 or step == run.options.steps):
            extra = remember(step, run.ranks.rank, run.schedule, run.data)
            saving = run.model.save_checkpoint(run.options.checkpoint, run.optimizer, extra=extra, asynchronous=True)
        now = mark(run)
        first = first or now
        in_flight, waited = now.in_flight - first.in_flight, now.waited - first.waited
        yield Reading(
            step=step,
            loss=loss,
            tokens_per_second=tokens * count / (now.time - first.time) if count else None,
            held=held,
            expected=kept.bytes(run.parameters, run.ranks.count),
            formula=str(kept),
            sent_step=now.sent - before.sent,
            sent=now.sent,
            hidden=max(0.0, 1 - waited / in_flight) if in_flight else None,
            waited=waited,
        )
        before = now
    if saving:
        saving.result()


def forward_backward(run: Run) -> float:
    """Leave the clipped gradient of a new batch in the parameters; return its loss, the mean over all ranks."""
    tokens, targets = sample_batch(run.corpus.train, run.options.batch, run.config.context, run.data)
    loss = run.model(tokens.to(run.ranks.device), targets.to(run.ranks.device))
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
    return run.ranks.mean(loss)


@torch.no_grad()
def validate(run: Run) -> float:
    """The mean loss, in nats per byte, over windows of the held-out text; each rank takes its share of them."""
    count = run.ranks.count
    windows = list(spread_windows(run.corpus.validation, VALIDATION_WINDOWS * count, run.config.context))
    losses = [
        F.cross_entropy(run.model(tokens.to(run.ranks.device))[0], targets[0].to(run.ranks.device))
        for tokens, targets in windows[run.ranks.rank :: count]
    ]
    return run.ranks.mean(torch.stack(losses).mean())


@torch.no_grad()
def generate(run: Run, prompt: bytes, length: int) -> bytes:
    """Write `length` bytes after the prompt, which must not be empty.

    Each forward gathers the parameters, so all ranks write the same bytes together. The window keeps the shape
    (1, context), which is compiled already: text longer than it loses its beginning, and what stands behind a
    shorter one is padding that no earlier position looks at.
    """
    context = run.config.context
    generator = torch.Generator().manual_seed(run.options.seed)  # the same choices on each rank
    text = list(prompt)
    for _ in range(length):
        recent = text[-context:]
        window = torch.tensor([recent + [0] * (context - len(recent))], device=run.ranks.device)
        logits = run.model(window)[0, len(recent) - 1].float().cpu()
        chances = torch.softmax(logits / TEMPERATURE, dim=0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text[len(prompt) :])


def legible(text: bytes) -> str:
    """The text for a terminal: what is no character, or would move the cursor, becomes a replacement mark."""
    characters = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def headline(run: Run) -> str:
    """One line on what is trained, where and how."""
    options, ranks = run.options, run.ranks
    return (
        f"GPT of {run.parameters / 1e6:.1f} million parameters, {ranks.count} ranks ({ranks.device.type}, "
        f"{ranks.transport}), stage {options.stage}, prefetch {options.prefetch}, {options.backend}; "
        f"it learns from {run.corpus.source}, {size(len(run.corpus.train))}"
    )


def summary(run: Run, history: list[Reading], validation: float, elapsed: float) -> Table:
    """All that was measured, a row for each figure."""
    last, recent = history[-1], [reading.loss for reading in history[-25:]]
    copy = formula(run.options.stage).copy
    table = Table(show_header=False)
    table.add_row("training loss", f"{history[0].loss:.3f} at first, {sum(recent) / len(recent):.3f} at last")
    table.add_row("validation loss", f"{validation:.3f} nats, {validation / math.log(2):.3f} bits per byte")
    table.add_row("speed", f"{rate(last)} over all ranks")
    table.add_row("held per rank", f"{size(last.held)} measured, {last.formula} = {size(last.expected)} by the formula")
    if copy:
        table.add_row("", f"and a whole copy of the parameters, {copy}Ψ = {size(copy * run.parameters)}, not measured")
    table.add_row("sent per rank", f"{size(last.sent_step)} a step, {size(last.sent)} in {len(history)} steps")
    table.add_row("communication", f"{share(last.hidden)} of its time in flight hidden behind compute")
    table.add_row("", f"{last.waited:.1f} s waited for it, the first step left out")
    table.add_row("elapsed", f"{elapsed:.0f} s")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
