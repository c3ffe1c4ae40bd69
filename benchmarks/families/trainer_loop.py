"""The Trainer of Transformers: zcompile's, or its own without options."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.families.family import STEPS, Batch, Family
from benchmarks.families.recorder import Recorder
from zcompile.integrations.transformers import ShardedTrainerMixin


class _Recorded(transformers.Trainer):
    """Takes batches as they are, and keeps each loss."""

    recorder: Recorder

    def get_train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train_dataset, batch_size=None, shuffle=False)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.recorder.begin()
        found: Tensor = super().compute_loss(*args, **kwargs)
        self.recorder.loss(found)
        return found


class _Sharded(ShardedTrainerMixin, _Recorded):
    pass


def train(family: Family, options: Mapping[str, Any] | None) -> Recorder:
    recorder = Recorder()
    model = family.models()["model"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # a norm of shards is a sum in another order
            optim="adamw_torch",  # fused, its kernel for CPUs rounds the last elements of a tensor otherwise
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
            ddp_find_unused_parameters=True,
            ddp_broadcast_buffers=False,
        )
        given: dict[str, Any] = {"args": arguments, "train_dataset": family.batches(dist.get_rank())}
        trainer: Any = _Recorded(model, **given) if options is None else _Sharded(model, **given, zcompile=options)
        trainer.recorder = recorder
        trainer.train()
    return recorder.end({"model": model if options is None else trainer.compiled})
