"""Lightning's Trainer: zcompile's strategy, or DDPStrategy without options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.families.family import Batch, Family
from benchmarks.families.loops import DDP
from benchmarks.families.recorder import Recorder
from zcompile.integrations.lightning import ShardedStrategy

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class _Module(lightning.LightningModule):
    """Each phase of a step by hand where there are several, as GANs are trained in Lightning."""

    def __init__(self, family: Family, recorder: Recorder) -> None:
        super().__init__()
        self.family, self.recorder = family, recorder
        self.models = nn.ModuleDict(family.models())
        self.automatic_optimization = len(family.phases) == 1

    def training_step(self, batch: Batch, number: int) -> Tensor | None:
        self.recorder.begin()
        models = dict(self.models.items())
        if self.automatic_optimization:
            loss = self.family.phases[0].loss(models, batch)
            self.recorder.loss(loss)
            return loss
        for phase, optimizer in zip(self.family.phases, self.optimizers(), strict=True):
            optimizer.zero_grad()
            loss = phase.loss(models, batch)
            self.manual_backward(loss)
            optimizer.step()
            self.recorder.loss(loss)
        return None

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW([p for p in self.models[phase.model].parameters() if p.requires_grad], lr=1e-3)
            for phase in self.family.phases
        ]


def train(family: Family, options: Mapping[str, Any] | None) -> Recorder:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    recorder = Recorder()
    module = _Module(family, recorder)
    strategy: Any = DDPStrategy(**DDP) if options is None else ShardedStrategy(**options)
    world = dist.get_world_size()
    trainer = lightning.Trainer(accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, **QUIET)
    batches: Any = family.batches(dist.get_rank())
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return recorder.end({"": module if options is None else strategy.compiled})
