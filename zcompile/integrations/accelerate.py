"""Accelerate with models sharded by zcompile instead of DistributedDataParallel.

    from zcompile.integrations.accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", zcompile={"stage": 3})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of a script does not change, and `accelerate launch` starts it as usual.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zcompile.compiled import CompiledModule, compiled_of
from zcompile.errors import OptionError
from zcompile.integrations.models import check_options, folder_in, holds_any, holds_others, missing, sharded
from zcompile.model.sharding import RetiredDTensor, RetiredParameter

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing("Accelerate", "accelerate") from error

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Accelerate's names for dtypes to compute in."""
_OWN_WAYS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` whose `prepare` shards models by `zcompile.compile`, and moves optimizers to shards.

    `save_state` writes a checkpoint that loads in any stage and world. `get_state_dict` and `save_model` return and
    write state for the plain model. Mixed precision sets the dtype that models are gathered and computed in.

    Args:
        *args: As for `accelerate.Accelerator`, like other keyword arguments.
        zcompile: Options of `zcompile.compile` except `optimizer`, which `prepare` finds.

    Raises:
        OptionError: Accelerate is configured for FSDP, DeepSpeed, Megatron-LM or XLA; or for fp8.
    """

    _models: list[nn.Module]
    _optimizers: list[Optimizer]

    def __init__(self, *args: Any, zcompile: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = compile_options(zcompile, self.mixed_precision)
        if self.distributed_type.value in _OWN_WAYS:
            problem = f"is configured for {self.distributed_type.value}, which shards the model by itself"
            raise OptionError("Accelerator", problem, "run `accelerate config` for multi-GPU or multi-CPU")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard models together with the optimizers that are given for them, then prepare as Accelerate. Collective."""
        optimizers = [one for one in args if isinstance(one, Optimizer)]
        placed = device_placement or [True] * len(args)
        prepared = [
            self._sharded(one, optimizers, place) if isinstance(one, nn.Module) else one
            for one, place in zip(args, placed, strict=True)
        ]
        return super().prepare(*prepared, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard the model; with `evaluation_mode`, prepare a plain model as Accelerate. Collective."""
        if evaluation_mode and not isinstance(model, CompiledModule):
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        made = self._sharded(model, [], place=device_placement is not False)
        if not any(known is made for known in self._models):
            self._models.append(made)
        return made

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare an optimizer as Accelerate, but do not move its state, which is with the shards.

        Raises:
            OptionError: it holds parameters that were replaced when its model was prepared.
        """
        params = (param for group in optimizer.param_groups for param in group["params"])
        if any(isinstance(param, (RetiredParameter, RetiredDTensor)) for param in params):
            problem = "is given an optimizer whose model was prepared in an earlier call"
            raise OptionError("prepare", problem, "prepare both in one call: accelerator.prepare(model, optimizer)")
        return super().prepare_optimizer(optimizer, device_placement=False)

    def _sharded(self, model: nn.Module, optimizers: list[Optimizer], place: bool) -> CompiledModule:
        if (
            compiled_of(model) is None
            and place
            and self.device_placement
            and not any(param.is_meta for param in model.parameters())
        ):
            model = model.to(self.device)
        return sharded(model, optimizers, self._options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip as Accelerate; returns the norm over all ranks as a plain tensor. Collective."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict for the plain model on the first rank, and an empty one on others. Collective."""
        if isinstance(model, CompiledModule):
            return model.full_state_dict()
        return super().get_state_dict(model, unwrap)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save as Accelerate, with a checkpoint of each sharded model and its optimizer. Collective."""
        found = self._sharded_models("save_state", self._save_model_state_pre_hook)
        with self._without_sharded():
            place = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, (model, optimizer) in enumerate(found):
            model.save_checkpoint(folder_in(place, number), optimizer)
        return place

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load as Accelerate, in any stage and world. Only ranks of the saving world get a random state. Collective."""
        place = self._latest() if input_dir is None else os.path.expanduser(input_dir)
        found = self._sharded_models("load_state", self._load_model_state_pre_hook)
        for number, (model, optimizer) in enumerate(found):
            model.load_checkpoint(folder_in(place, number), optimizer)
        with self._without_sharded():
            super().load_state(place, load_kwargs, **kwargs)

    def _latest(self) -> str:
        """The folder of `automatic_checkpoint_naming` with the greatest number."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise OptionError("input_dir", "is missing, and automatic_checkpoint_naming is off", "give the folder")
        folder = os.path.join(self.project_dir, "checkpoints")
        numbered = [(int(name.rpartition("_")[2]), name) for name in os.listdir(folder)]
        return os.path.join(folder, max(numbered)[1])

    def _sharded_models(self, what: str, hooks: Mapping[Any, Any]) -> list[tuple[CompiledModule, Optimizer | None]]:
        """The sharded models with their optimizers, for `what` ("save_state" or "load_state"), with its `hooks`.

        Raises:
            OptionError: a model does not have exactly one optimizer of its own, as checkpoints require; or there are
                hooks, which would save or load models themselves.
        """
        found: list[tuple[CompiledModule, Optimizer | None]] = []
        for model in self._models:
            if not isinstance(model, CompiledModule):
                continue
            own = [one.optimizer for one in self._optimizers if holds_any(one, model)]
            if len(own) > 1 or any(holds_others(one, model) for one in own):
                problem = f"finds {len(own)} optimizers of a model" if len(own) > 1 else "finds a shared optimizer"
                fix = "give each model one optimizer with several groups, or call model.save_checkpoint for each"
                raise OptionError(what, problem, fix)
            found.append((model, own[0] if own else None))
        if found and hooks:
            fix = "remove the hooks, and save accelerator.get_state_dict(model) yourself"
            raise OptionError(what, "finds hooks that save or load models, and these are sharded here", fix)
        return found

    @contextlib.contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Hide sharded models and their optimizers while Accelerate saves or loads everything else."""
        models, optimizers = self._models, self._optimizers
        apart = [model for model in models if isinstance(model, CompiledModule)]
        self._models = [model for model in models if not isinstance(model, CompiledModule)]
        self._optimizers = [one for one in optimizers if not any(holds_any(one, model) for model in apart)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def compile_options(given: Mapping[str, Any] | None, mixed_precision: str) -> dict[str, Any]:
    """Options of `zcompile.compile`, with the dtype of Accelerate's `mixed_precision`.

    Raises:
        OptionError: zcompile does not support this precision, or `dtype` is given, too, and differs.
    """
    options = dict(given or {})
    check_options(options)
    if mixed_precision not in PRECISIONS:
        raise OptionError("mixed_precision", f"is {mixed_precision!r}", f"choose from {', '.join(PRECISIONS)}")
    dtype = PRECISIONS[mixed_precision]
    if dtype is not None and options.setdefault("dtype", dtype) is not dtype:
        problem = f"is {mixed_precision!r}, and dtype= of zcompile is {options['dtype']}"
        raise OptionError("mixed_precision", problem, "give only one of them")
    if dtype is not None:
        options.setdefault("output_dtype", torch.float32)  # Accelerate converts the outputs of models, too
    return options
