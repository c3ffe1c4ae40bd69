"""Text from a sharded GPT-2 of Hugging Face, beside the plain model and FSDP2: `python -m benchmarks.generation`.

All ways are in the same two processes and take turns, so their ratios are of one run. Seconds are those of a whole
`generate`, of 128 tokens after a prompt of 16; of `unsharded()` with what gathers the parameters.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcompile

WORLD, PROMPT = 2, 16
WAYS = ("plain", "zcompile, unsharded()", "zcompile, a gather a token", "fsdp2, a gather a token")
Generate = Callable[[], torch.Tensor]


def made() -> Any:
    """A GPT-2 of 3.2 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=256, n_positions=256, bos_token_id=0, eos_token_id=None
    )
    config.pad_token_id = 0
    return GPT2LMHeadModel(config).eval()


def build(way: str, tokens: int) -> Generate:
    """A way to generate so many tokens."""
    model, prompt = made(), torch.arange(PROMPT)[None] % 255 + 1

    def generate(either: Any) -> torch.Tensor:
        text: torch.Tensor = either.generate(prompt, max_new_tokens=tokens, do_sample=False)
        return text

    if way == "plain":
        return lambda: generate(model)
    if way.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return lambda: generate(model)
    compiled = zcompile.compile(model)

    def unsharded() -> torch.Tensor:
        with compiled.unsharded():
            return generate(compiled)

    return unsharded if "unsharded" in way else lambda: generate(compiled)


def rank_main(rank: int, store: str, rounds: int, tokens: int, results: Any) -> None:
    """Generate in all ways, in turns; the first rank gives the seconds of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    ways = {way: build(way, tokens) for way in WAYS}
    wanted = ways["plain"]()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, generate in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            text = generate()
            dist.barrier()
            if number:  # the first one compiles
                seconds[way].append(time.perf_counter() - begin)
            assert torch.equal(text, wanted), f"{way}: another text than the plain model's"
    if rank == 0:
        results.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="how often each way generates")
    parser.add_argument("--tokens", type=int, default=128, help="how many tokens")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (str(Path(folder) / "store"), asked.rounds, asked.tokens, results)
        context = multiprocessing.start_processes(rank_main, arguments, WORLD, join=False, start_method="spawn")
        while context is not None and not context.join():
            pass
        seconds = results.get()
    table = Table("way", "seconds", "of the plain model", "spread", title=f"{asked.tokens} tokens on {WORLD} ranks")
    for way in WAYS:
        ratios = [one / plain for one, plain in zip(seconds[way], seconds["plain"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.add_row(way, f"{statistics.median(seconds[way]):.3f}", f"{statistics.median(ratios):.2f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
