"""Text from a sharded GPT-2 of Hugging Face, beside the plain model and FSDP2: `python -m benchmarks.speed.generation`.

All ways are in the same two processes and take turns, so their ratios are of one run. Seconds are those of a whole
`generate`, of 128 tokens after a prompt of 16; of `unsharded()` with what gathers the parameters.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcompile
from benchmarks.common import turns
from benchmarks.common.ranks import started

WORLD, PROMPT = 2, 16
PLAIN = "plain"
WAYS = (PLAIN, "zcompile, unsharded()", "zcompile, a gather a token", "fsdp2, a gather a token")
Generate = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Generated:
    """Seconds of each text."""

    seconds: list[float]


def made() -> Any:
    """A GPT-2 of 3.2 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=256, n_positions=256, bos_token_id=0, eos_token_id=None
    )
    config.pad_token_id = 0
    return GPT2LMHeadModel(config).eval()


class Ways(turns.Ways[Generate]):
    """One rank of two, which generates so many tokens."""

    def __init__(self, ways: Sequence[str], tokens: int) -> None:
        warnings.simplefilter("ignore")
        self.tokens = tokens
        super().__init__(ways, warmup=1)
        self.wanted = self.ways[PLAIN]()

    def build(self, way: str) -> Generate:
        model, prompt = made(), torch.arange(PROMPT)[None] % 255 + 1

        def generate(either: Any) -> torch.Tensor:
            text: torch.Tensor = either.generate(prompt, max_new_tokens=self.tokens, do_sample=False)
            return text

        if way == PLAIN:
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

    def train(self, way: str, steps: int) -> Generated:
        found = Generated([])
        for _ in range(steps):
            dist.barrier()
            begin = time.perf_counter()
            text = self.ways[way]()
            dist.barrier()
            found.seconds.append(time.perf_counter() - begin)
            assert torch.equal(text, self.wanted), f"{way}: another text than the plain model's"
        return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each way generates")
    parser.add_argument("--tokens", type=int, default=128, help="how many tokens")
    asked = parser.parse_args()
    with started(Ways, WAYS, asked.tokens) as team:
        team.hear()
        rounds = turns.turns(team, WAYS, asked.rounds, 1)
    table = turns.table(f"{asked.tokens} tokens on {WORLD} ranks", "way", "seconds", "of the plain model", "spread")
    for way in WAYS:
        table.add_row(way, *turns.compared(turns.slowest(rounds[way]), turns.slowest(rounds[PLAIN])))
    Console().print(table)


if __name__ == "__main__":
    main()
