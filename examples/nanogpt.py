"""A training script in the shape of nanoGPT's, for one process or several, sharded by three lines.

    torchrun --standalone --nproc-per-node 2 examples/nanogpt.py

It has what such scripts have: micro-batches whose gradients accumulate, mixed precision with a scaler, clipping, a
cosine schedule, evaluation, checkpoints that resume on other numbers of processes, and a sample in the end. The lines
that make it a sharded one are marked: each names what stood there for DistributedDataParallel.
"""

import argparse
import contextlib
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from text import load_corpus

import zcompile  # was: from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
arguments.add_argument("--steps", type=int, default=100)
arguments.add_argument("--evaluate-every", type=int, default=50)
arguments.add_argument("--batch", type=int, default=4)
arguments.add_argument("--accumulate", type=int, default=4, help="micro-batches a step, of all processes together")
arguments.add_argument("--lr", type=float, default=2e-3)
arguments.add_argument("--out", type=Path, default=Path("out-nanogpt"))
arguments.add_argument("--resume", action="store_true")
arguments.add_argument("--backend", default="inductor")
arguments.add_argument("--quiet", action="store_true", help="write losses to OUT/losses.txt alone")
options = arguments.parse_args()

# -- processes ----------------------------------------------------------------------------------------------------

distributed = "RANK" in os.environ
device = "cuda" if torch.cuda.is_available() else "cpu"
if distributed:
    dist.init_process_group()
    device += f":{os.environ['LOCAL_RANK']}" if device == "cuda" else ""
rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
master = rank == 0
assert options.accumulate % world == 0, "each process takes as many micro-batches"
accumulate = options.accumulate // world
torch.manual_seed(1337)
autocast = torch.autocast("cuda", torch.bfloat16) if device != "cpu" else contextlib.nullcontext()

# -- data, model, optimizer ---------------------------------------------------------------------------------------

config = GPTConfig()
corpus = load_corpus(None, config.context)
model = GPT(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
scaler = torch.amp.GradScaler(enabled=False)
done = 0
if options.resume:
    checkpoint = torch.load(options.out / "checkpoint.pt", map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    done = checkpoint["done"]
model = zcompile.compile(model, optimizer=optimizer, backend=options.backend)  # was: DistributedDataParallel(model)
raw = model.module if distributed else model


def batch(split: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the text and what follows each byte, the same for a seed whatever the number of processes."""
    starts = torch.randint(
        len(split) - config.context - 1, (options.batch,), generator=torch.Generator().manual_seed(seed)
    )
    windows = torch.stack([split[start : start + config.context + 1] for start in starts]).long()
    return windows[:, :-1].to(device), windows[:, 1:].to(device)


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    """Means over batches that are the same each time."""
    model.eval()
    losses = {
        name: torch.stack([model(*batch(split, seed)) for seed in range(8)]).mean().item()
        for name, split in (("train", corpus.train), ("validation", corpus.validation))
    }
    model.train()
    return losses


def rate(step: int) -> float:
    """A warmup of a tenth of the steps, then half a cosine down to a tenth."""
    warmup = max(options.steps // 10, 1)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    share = (step - warmup) / max(options.steps - warmup, 1)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


# -- training -----------------------------------------------------------------------------------------------------

options.out.mkdir(exist_ok=True)
started = time.perf_counter()
for step in range(done, options.steps + 1):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    if step % options.evaluate_every == 0:
        losses = estimate_loss()
        state = {"model": model.full_state_dict(), "optimizer": model.full_optimizer_state_dict(optimizer)}
        if master:
            torch.save({**state, "done": step, "config": vars(config)}, options.out / "checkpoint.pt")
            with (options.out / "losses.txt").open("a") as file:
                print(step, losses["train"], losses["validation"], file=file)
            if not options.quiet:
                print(f"step {step}: train loss {losses['train']:.4f}, validation loss {losses['validation']:.4f}")
    if step == options.steps:
        break
    total = 0.0
    for micro in range(accumulate):
        if distributed:
            model.require_backward_grad_sync = micro == accumulate - 1
        with autocast:
            loss = model(*batch(corpus.train, step * options.accumulate + rank * accumulate + micro)) / accumulate
        total += loss.item()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master and not options.quiet and step % 10 == 0:
        print(
            f"step {step}: loss {total:.4f}, {(time.perf_counter() - started) / (step - done + 1) * 1e3:.0f} ms a step"
        )

tokens = torch.tensor([list(b"def ")], device=device)
with torch.no_grad():
    for _ in range(60):
        tokens = torch.cat([tokens, raw(tokens[:, -config.context :])[:, -1:].argmax(-1)], dim=1)
if master:
    (options.out / "sample.txt").write_bytes(bytes(tokens[0].tolist()))
    if not options.quiet:
        print(bytes(tokens[0].tolist()).decode(errors="replace"))
if distributed:
    dist.destroy_process_group()
