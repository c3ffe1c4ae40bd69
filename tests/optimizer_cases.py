"""Optimizers, and what each gives over shards beside one process with the same gradients: docs/optimizers.md."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

COLUMNS = ("0", "1", "2", "3", "whole=")
"""Stages, and stage 3 with parameters that one rank each keeps whole."""
EQUAL, ROUNDING, REFUSED = "=", "≈", "refused"
Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

# -- models -----------------------------------------------------------------------------------------------------------


def usual() -> nn.Module:
    """Matrices and vectors, some with rows that two ranks do not divide; rows are of whole blocks of torchao."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 97), nn.Tanh(), nn.Linear(97, 6))


def even() -> nn.Module:
    """Two ranks divide all rows."""
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 6))


def half_blocks() -> nn.Module:
    """Of what torchao's optimizers quantise in blocks, shards have no whole number, or fewer than they quantise."""
    return nn.Sequential(
        nn.Linear(64, 102, bias=False),
        nn.Tanh(),
        nn.Linear(102, 128),
        nn.Tanh(),
        nn.Linear(128, 102),
        nn.Linear(102, 6),
    )


# -- optimizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row of the table.

    What a step gives is "=", the same bits; "≈", these or rounding, by the processor; "≈ N": elements are off by at
    most N of the largest change of their parameter; or "refused", by an error before anything has changed.
    """

    name: str
    path: str
    """Of its class, imported when it is made."""
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    plain: str = EQUAL
    """In stage 0."""
    shards: str = EQUAL
    """In stages 1 to 3."""
    whole: str = EQUAL
    says: str = ""
    """What a refusal says."""
    model: Callable[[], nn.Module] = usual
    matrices: bool = False
    """True for one of matrices alone; AdamW steps the rest."""
    steps: int = 4
    release: str = "torch"
    """The package, and the release that was tested."""

    def make(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        module, _, name = self.path.rpartition(".")
        optimizer: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(params, **self.options)
        return optimizer

    def gives(self, column: str) -> str:
        """What stands in that column."""
        return {"0": self.plain, "whole=": self.whole}.get(column, self.shards)

    @property
    def package(self) -> str:
        return self.path.partition(".")[0]


def torchs(name: str, kind: str = "", **given: Any) -> Case:
    fields = {key: given.pop(key) for key in list(given) if key in Case.__dataclass_fields__}
    return Case(f"{name} {kind}".strip(), f"torch.optim.{name}", given or {"lr": 0.01}, **fields)


AO, HF, FREE = "torchao 0.18.0", "transformers 5.24.0", "schedulefree 1.4.1"
HEAVY, MORE = "heavyball 3.2.1", "pytorch_optimizer 4.1.0"
NEEDS_WHOLE = "cannot step parameters that are sharded|steps sharded parameters differently"
OTHERWISE_BESIDE = f"{NEEDS_WHOLE}|steps a parameter differently when others are present"

CASES = (
    torchs("SGD", momentum=0.9, lr=0.05),
    torchs("SGD", "fused", momentum=0.9, lr=0.05, fused=True, shards=ROUNDING),
    torchs("Adam", amsgrad=True, lr=0.01),
    torchs("AdamW"),
    torchs("AdamW", "foreach", foreach=True, lr=0.01),
    torchs("AdamW", "fused", fused=True, lr=0.01, shards=ROUNDING),
    torchs("AdamW", "not foreach", foreach=False, lr=0.01),
    torchs("Adagrad"),
    torchs("Adagrad", "fused", fused=True, lr=0.01, shards=ROUNDING),
    torchs("Adadelta"),
    torchs("Adamax"),
    torchs("NAdam"),
    torchs("RAdam"),
    torchs("RMSprop", centered=True, momentum=0.9, lr=0.01),
    torchs("ASGD"),
    torchs("Rprop"),
    torchs("SparseAdam", plain=REFUSED, shards=REFUSED, whole=REFUSED, says="takes only sparse gradients"),
    torchs("Adafactor", shards=REFUSED, says=NEEDS_WHOLE),
    torchs("Muon", shards="≈ 0.2", matrices=True),
    torchs("LBFGS", lr=0.1, max_iter=3, shards=REFUSED, whole=REFUSED, says="LBFGS flattens it|LBFGS concatenates it"),
    torchs(
        "LBFGS", "of even rows", lr=0.1, max_iter=3, whole=REFUSED,
        says="LBFGS concatenates it", model=even,
    ),
    Case("AdamW8bit", "torchao.optim.AdamW8bit", release=AO),
    Case("AdamW4bit", "torchao.optim.AdamW4bit", release=AO),
    Case("AdamWFp8", "torchao.optim.AdamWFp8", release=AO),
    Case("AdamW8bit of half blocks", "torchao.optim.AdamW8bit", shards="≈ 0.1", model=half_blocks, release=AO),
    Case("AdamW4bit of half blocks", "torchao.optim.AdamW4bit", shards="≈ 0.5", model=half_blocks, release=AO),
    Case("AdamWFp8 of half blocks", "torchao.optim.AdamWFp8", shards="≈ 0.1", model=half_blocks, release=AO),
    Case(
        "Adafactor of transformers", "transformers.optimization.Adafactor", {}, shards=REFUSED, says=NEEDS_WHOLE,
        release=HF,
    ),
    Case("AdamWScheduleFree", "schedulefree.AdamWScheduleFree", release=FREE),
    Case("SGDScheduleFree", "schedulefree.SGDScheduleFree", release=FREE),
    Case("RAdamScheduleFree", "schedulefree.RAdamScheduleFree", steps=8, release=FREE),
    Case("AdamW of heavyball", "heavyball.AdamW", release=HEAVY),
    Case("SOAP of heavyball", "heavyball.SOAP", release=HEAVY),
    Case("Lion", "pytorch_optimizer.Lion", release=MORE),
    Case("Adan", "pytorch_optimizer.Adan", release=MORE),
    Case("Lamb", "pytorch_optimizer.Lamb", shards="≈ 1e-5", release=MORE),
    Case("LARS", "pytorch_optimizer.LARS", shards=REFUSED, says=NEEDS_WHOLE, release=MORE),
    Case("CAME", "pytorch_optimizer.CAME", shards=REFUSED, says=NEEDS_WHOLE, release=MORE),
    Case("SOAP", "pytorch_optimizer.SOAP", shards=REFUSED, says=NEEDS_WHOLE, release=MORE),
    Case("Shampoo", "pytorch_optimizer.Shampoo", shards=REFUSED, says=NEEDS_WHOLE, release=MORE),
    Case(
        "Prodigy", "pytorch_optimizer.Prodigy", {"lr": 1.0}, shards=REFUSED, whole=REFUSED, says=OTHERWISE_BESIDE,
        release=MORE,
    ),
    Case(
        "DAdaptAdam", "pytorch_optimizer.DAdaptAdam", {"lr": 1.0}, shards=REFUSED, whole=REFUSED,
        says=OTHERWISE_BESIDE, release=MORE,
    ),
)  # fmt: skip

AVERAGES = (
    "SWA",
    "SWA of buffers, too",
    "EMA by multi_avg_fn",
    "EMA by multi_avg_fn, of buffers, too",
    "EMA by avg_fn",
)
"""What `torch.optim.swa_utils.AveragedModel` is made with; all of it gives the same bits."""


def table() -> list[str]:
    """The rows of the page: the optimizers of a release that give the same in every column."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in CASES:
        rows.setdefault((case.release, case.plain, case.shards, case.whole), []).append(case.name)
    return [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
