"""Code of the documentation runs as it is shown, on one rank: what other tests do not run of it."""

from __future__ import annotations

import os
import re
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import zcompile
from tests.ranks import on_ranks

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    "checkpoints",
    "less_memory",
    "meta",
    "optimizers",
    "precision",
    "replay",
    "timeline",
    "torch_compile",
    "training",
]
OF_MESHES = ["pipelines", "several_machines"]
WIDTH, WORDS = 16, 32
IMPORTS = """
import contextlib
import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DistributedSampler
"""
_PRINTED = re.compile(r"= (all_gather|wait|reduce_scatter|all_reduce)\(")
"""Lines of programs."""
_GRAPHS = 'cuda_graphs="step"'
"""For models on a GPU."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)) * self.router(x).sigmoid())


class Model(nn.Module):
    """What the snippets ask of a model: names of modules and methods."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.adapters, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.adapters(x)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.head(self.encode(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), (tokens if targets is None else targets).flatten())

    def generate(self, prompt: Tensor, max_new_tokens: int) -> Tensor:
        assert max_new_tokens
        return self.lm_head(self.encode(prompt)).argmax(-1)


def blocks(page: str) -> list[str]:
    every = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    return [code for code in every if not _PRINTED.search(code) and _GRAPHS not in code]


def names(code: str) -> dict[str, Any]:
    """What a snippet may name: a model, batches, an optimizer, and zcompile with operations as they are."""
    torch.manual_seed(0)
    eager = {"backend": "eager"}
    tokens = torch.randint(WORDS, (8, 8))
    model, compiled = Model(), zcompile.compile(Model(), **eager)
    optimizer = torch.optim.AdamW((compiled if "compiled" in code else model).parameters(), lr=1e-3)
    compiled(tokens).backward()
    optimizer.step()
    with torch.no_grad():
        compiled(tokens)
    options = {name: partial(getattr(zcompile, name), **eager) for name in ("compile", "train_step", "backend")}
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    given = {"model": model, "compiled": compiled, "optimizer": optimizer, "device": torch.device("cpu"), "plan": plan}
    batches = {
        "tokens": tokens,
        "targets": tokens,
        "prompt": tokens,
        "batch": (tokens, tokens) if "(*batch)" in code else tokens,
        "micro_batches": [tokens, tokens],
        "dataset": [tokens],
        "loader": [(tokens, tokens)] * 2,
        "batches": [tokens] if "for batch in" in code else [(tokens, tokens)],
        "chunks": [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))],
    }
    return {
        **given,
        **batches,
        "zcompile": SimpleNamespace(**options),
        "Model": Model,
        "GPT": Model,
        "config": None,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "rank": 0,
        "step": 41233,
        "loss_fn": lambda model, *batch: model(*batch),
        "loss": nn.functional.mse_loss,
    }


def run(page: str) -> None:
    """Run each snippet of a page, in a folder of its own; meshes have one rank, on the CPU."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            saved = zcompile.compile(Model(), backend="eager")
            saved.save_full_state_dict("model.safetensors")
            saved.save_checkpoint("checkpoints/last", torch.optim.AdamW(saved.parameters(), lr=1e-3))
            for code in blocks(page):
                code = code.replace('"cuda"', '"cpu"').replace("/scratch/", f"{folder}/").replace("checkpoint/", ".")
                code = re.sub(
                    r"(?<=_mesh\(\"cpu\", )\((.*?)\)", lambda found: f"({'1, ' * len(found[1].split(','))})", code
                )
                if "mesh=mesh" in code and "mesh =" not in code:  # it goes on from the first
                    code = blocks(page)[0].splitlines()[0].replace('"cuda", (4, 2)', '"cpu", (1, 1)') + "\n" + code
                exec(compile(IMPORTS + code, f"{page}.md", "exec"), names(code))
        finally:
            os.chdir(home)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str) -> None:
    run(page)


@pytest.mark.slow
@on_ranks(1)
def test_snippets_of_meshes_run(rank: int) -> None:
    for page in OF_MESHES:
        run(page)


def test_every_page_with_code_is_run_or_named() -> None:
    elsewhere = {"index", "integrations", "migration", "passes", "plan", "programs"}  # run by tests of their own
    assert {page.stem for page in DOCS.glob("*.md") if blocks(page.stem)} - elsewhere == {*PAGES, *OF_MESHES}
