"""The Trainer of Transformers, with a model sharded by zcompile instead of DistributedDataParallel.

    from zcompile.integrations.transformers import Trainer

    trainer = Trainer(model, arguments, train_dataset=data, zcompile={"stage": 3})
    trainer.train(resume_from_checkpoint=True)

For other trainers that derive from it, such as those of trl, use the mixin:

    class SFTTrainer(ShardedTrainerMixin, trl.SFTTrainer): ...
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from zcompile.compiled import CompiledModule, compiled_of
from zcompile.errors import OptionError, StateError
from zcompile.integrations.accelerate import compile_options
from zcompile.integrations.models import folder_in, missing, read, sharded

try:
    import transformers
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as error:
    raise missing("Transformers", "transformers") from error


class ShardedTrainerMixin:
    """Makes a `transformers.Trainer` shard its model.

    Besides the files for `from_pretrained`, checkpoints have a folder `zcompile` with shards of parameters and
    optimizer state. Training resumes from it in any stage and world, and from checkpoints of a plain Trainer.

    Args:
        *args: As for the Trainer, like other keyword arguments.
        zcompile: Options of `zcompile.compile` except `optimizer`. `bf16` and `fp16` of TrainingArguments set `dtype`.
    """

    def __init__(self, *args: Any, zcompile: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._asked = dict(zcompile or {})
        self._sharded: tuple[nn.Module, CompiledModule] | None = None
        super().__init__(*args, **kwargs)
        _check(self.args)
        compile_options(self._asked, self.args.mixed_precision)  # raise for invalid options right away

    @property
    def compiled(self) -> CompiledModule | None:
        """The sharded model; None before training or evaluation."""
        return self._sharded[1] if self._sharded is not None and self._sharded[0] is self.model else None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._compiled_now()

    def _compiled_now(self) -> CompiledModule:
        """The sharded model; shards it in the first call. Collective."""
        if self.compiled is not None:
            return self.compiled
        held = [self.optimizer] if isinstance(self.optimizer, Optimizer) else []
        compiled = sharded(self.model, held, compile_options(self._asked, self.args.mixed_precision))
        self._sharded, self.model_wrapped = (self.model, compiled), compiled
        return compiled

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if compiled_of(model) is None:  # else another trainer has sharded it, on the right device
            super()._move_model_to_device(model, device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer. To generate, unshard first, since ranks generate different numbers of tokens."""
        compiled = self._compiled_now()
        generates = getattr(self.args, "predict_with_generate", False)
        with compiled.unsharded() if generates else contextlib.nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    # -- saving ---------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and self.compiled is not None:
            state_dict = self.compiled.full_state_dict(rank0_only=not self.args.save_on_each_node)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.compiled is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.compiled.save_checkpoint(folder_in(output_dir), _inner(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # -- resuming -------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.compiled is not None and folder_in(resume_from_checkpoint).is_dir():
            self.compiled.load_checkpoint(folder_in(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, self.compiled if model is None else model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.compiled is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        own, plain = folder_in(checkpoint), Path(checkpoint, OPTIMIZER_NAME)
        if own.is_dir():
            self.compiled.load_checkpoint(own, _inner(self.optimizer))
        elif plain.is_file():
            self.compiled.load_full_optimizer_state_dict(_inner(self.optimizer), read(plain))
        else:
            problem = f"has neither {own.name}/ nor {plain.name}, so there is no optimizer state to resume from"
            fix = "save without save_only_model, or start from its weights: from_pretrained(folder)"
            raise StateError(checkpoint, problem, fix)
        self.lr_scheduler.load_state_dict(read(Path(checkpoint, SCHEDULER_NAME)))


class Trainer(ShardedTrainerMixin, transformers.Trainer):
    """The Trainer of Transformers with a sharded model: see `ShardedTrainerMixin`."""


class Seq2SeqTrainer(ShardedTrainerMixin, transformers.Seq2SeqTrainer):
    """The Seq2SeqTrainer of Transformers with a sharded model: see `ShardedTrainerMixin`."""


def _check(arguments: Any) -> None:
    """Raise OptionError for arguments that shard the model otherwise, or use several GPUs in one process."""
    if arguments.fsdp or arguments.deepspeed:
        other = "fsdp" if arguments.fsdp else "deepspeed"
        problem = "is given, and zcompile shards the model already"
        raise OptionError(other, problem, f"remove it from the arguments; zcompile={{'stage': 3}} replaces {other}")
    if arguments.n_gpu > 1:
        problem = f"has {arguments.n_gpu} GPUs in one process"
        raise OptionError("Trainer", problem, "start one process per GPU: torchrun --nproc-per-node")


def _inner(optimizer: Any) -> Optimizer:
    """An optimizer without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
