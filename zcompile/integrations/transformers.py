"""The Trainer of Transformers, with its model sharded by zcompile in the place of DistributedDataParallel.

    from zcompile.integrations.transformers import Trainer

    trainer = Trainer(model, arguments, train_dataset=data, zcompile={"stage": 3})
    trainer.train(resume_from_checkpoint=True)

For other trainers that are built on it, such as those of trl, there is the mixin:

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
    """What a `transformers.Trainer` does otherwise where its model is sharded.

    Checkpoints hold, beside what `from_pretrained` reads, the folder `zcompile` with shards of parameters and optimizer
    state, and training resumes from it in any stage and world; also from the checkpoints of a plain Trainer.

    Args:
        *args: As the Trainer has them, and so are other keyword arguments.
        zcompile: Options of `zcompile.compile`, but for `optimizer`; `bf16` and `fp16` of the arguments set its dtype.
    """

    def __init__(self, *args: Any, zcompile: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._asked = dict(zcompile or {})
        self._sharded: tuple[nn.Module, CompiledModule] | None = None
        super().__init__(*args, **kwargs)
        _check(self.args)
        compile_options(self._asked, self.args.mixed_precision)  # what is wrong with them is said at once

    @property
    def compiled(self) -> CompiledModule | None:
        """The model sharded, once it has been trained or evaluated."""
        return self._sharded[1] if self._sharded is not None and self._sharded[0] is self.model else None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._compiled_now()

    def _compiled_now(self) -> CompiledModule:
        """The model sharded, from now on if it was not. Collective."""
        if self.compiled is not None:
            return self.compiled
        held = [self.optimizer] if isinstance(self.optimizer, Optimizer) else []
        compiled = sharded(self.model, held, compile_options(self._asked, self.args.mixed_precision))
        self._sharded, self.model_wrapped = (self.model, compiled), compiled
        return compiled

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if compiled_of(model) is None:  # another trainer has sharded it, where it is to be
            super()._move_model_to_device(model, device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; where it generates, ranks do so alone, each for as long as its texts are."""
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
            problem = f"has neither {own.name}/ nor {plain.name}, so no optimizer state to resume from"
            fix = "save without save_only_model, or begin anew from its weights: from_pretrained(folder)"
            raise StateError(checkpoint, problem, fix)
        self.lr_scheduler.load_state_dict(read(Path(checkpoint, SCHEDULER_NAME)))


class Trainer(ShardedTrainerMixin, transformers.Trainer):
    """The Trainer of Transformers, its model sharded: `ShardedTrainerMixin` says how."""


class Seq2SeqTrainer(ShardedTrainerMixin, transformers.Seq2SeqTrainer):
    """The Seq2SeqTrainer of Transformers, its model sharded: `ShardedTrainerMixin` says how."""


def _check(arguments: Any) -> None:
    """Refuse what would shard the model in another way, or train on one device of several."""
    if arguments.fsdp or arguments.deepspeed:
        other = "fsdp" if arguments.fsdp else "deepspeed"
        problem = "is given, and zcompile shards the model already"
        raise OptionError(other, problem, f"leave it out of the arguments; zcompile={{'stage': 3}} is what {other} was")
    if arguments.n_gpu > 1:
        problem = f"is one process for {arguments.n_gpu} GPUs"
        raise OptionError("Trainer", problem, "start a process for each: torchrun --nproc-per-node")


def _inner(optimizer: Any) -> Optimizer:
    """An optimizer without what Accelerate puts around it."""
    return getattr(optimizer, "optimizer", optimizer)
