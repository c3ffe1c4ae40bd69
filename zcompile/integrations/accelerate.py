"""Accelerate, with models sharded by zcompile in the place of DistributedDataParallel.

    from zcompile.integrations.accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", zcompile={"stage": 3})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Everything else of a script stays, and `accelerate launch` starts it as ever.
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
"""Accelerate's names of dtypes to compute in."""
_OWN_WAYS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


class Accelerator(accelerate.Accelerator):
    """Accelerate's, whose `prepare` shards models by `zcompile.compile`, and points optimizers at the shards.

    `save_state` writes a checkpoint that loads in any stage and world, `get_state_dict` and `save_model` give what the
    plain model loads, and mixed precision gathers and computes in its dtype.

    Args:
        *args: As Accelerate has them, and so are other keyword arguments.
        zcompile: Options of `zcompile.compile`, but for `optimizer`, which `prepare` finds.

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
        """Accelerate's; of models that are given with their optimizers, both are sharded. Collective."""
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
        """Accelerate's; sharded, unless it is for evaluation only. Collective."""
        if evaluation_mode and not isinstance(model, CompiledModule):
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        made = self._sharded(model, [], place=device_placement is not False)
        if not any(known is made for known in self._models):
            self._models.append(made)
        return made

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Accelerate's; its state is where the shards are already.

        Raises:
            OptionError: it holds parameters from before its model was prepared.
        """
        params = (param for group in optimizer.param_groups for param in group["params"])
        if any(isinstance(param, (RetiredParameter, RetiredDTensor)) for param in params):
            problem = "is given an optimizer whose model was prepared before, alone"
            raise OptionError("prepare", problem, "give both to one call: accelerator.prepare(model, optimizer)")
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
        """Accelerate's; the norm is that of the whole gradients. Collective."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state on the first rank, as the plain model has it, and nothing on others. Collective."""
        if isinstance(model, CompiledModule):
            return model.full_state_dict()
        return super().get_state_dict(model, unwrap)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Accelerate's, with a checkpoint of each sharded model and its optimizer beside it. Collective."""
        found = self._sharded_models("save_state", self._save_model_state_pre_hook)
        with self._without_sharded():
            place = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, (model, optimizer) in enumerate(found):
            model.save_checkpoint(folder_in(place, number), optimizer)
        return place

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Accelerate's, in any stage and world; random states come back to ranks that had one. Collective."""
        place = self._latest() if input_dir is None else os.path.expanduser(input_dir)
        found = self._sharded_models("load_state", self._load_model_state_pre_hook)
        for number, (model, optimizer) in enumerate(found):
            model.load_checkpoint(folder_in(place, number), optimizer)
        with self._without_sharded():
            super().load_state(place, load_kwargs, **kwargs)

    def _latest(self) -> str:
        """The last folder of `automatic_checkpoint_naming`, which is that of the greatest number."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise OptionError("input_dir", "is not given, and checkpoints are not named", "give the folder")
        folder = os.path.join(self.project_dir, "checkpoints")
        numbered = [(int(name.rpartition("_")[2]), name) for name in os.listdir(folder)]
        return os.path.join(folder, max(numbered)[1])

    def _sharded_models(self, what: str, hooks: Mapping[Any, Any]) -> list[tuple[CompiledModule, Optimizer | None]]:
        """Each with its optimizer, for `what`, which Accelerate has `hooks` for.

        Raises:
            OptionError: a model has several, or one with another model, and a checkpoint has room for one of its own;
                or there are hooks, which save or load models by themselves.
        """
        found: list[tuple[CompiledModule, Optimizer | None]] = []
        for model in self._models:
            if not isinstance(model, CompiledModule):
                continue
            own = [one.optimizer for one in self._optimizers if holds_any(one, model)]
            if len(own) > 1 or any(holds_others(one, model) for one in own):
                problem = f"meets {len(own)} optimizers of one model" if len(own) > 1 else "meets one of several models"
                fix = "give each model one optimizer with several groups, or call model.save_checkpoint for each"
                raise OptionError(what, problem, fix)
            found.append((model, own[0] if own else None))
        if found and hooks:
            fix = "leave them out, and save beside it what accelerator.get_state_dict(model) gives"
            raise OptionError(what, "meets hooks that save or load models, whose parameters are shards here", fix)
        return found

    @contextlib.contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """While Accelerate saves or loads the rest: what is sharded has a checkpoint of its own."""
        models, optimizers = self._models, self._optimizers
        apart = [model for model in models if isinstance(model, CompiledModule)]
        self._models = [model for model in models if not isinstance(model, CompiledModule)]
        self._optimizers = [one for one in optimizers if not any(holds_any(one, model) for model in apart)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def compile_options(given: Mapping[str, Any] | None, mixed_precision: str) -> dict[str, Any]:
    """Options of `zcompile.compile`, with the dtype that Accelerate was asked for.

    Raises:
        OptionError: it is one that zcompile does not compute in; or it is said twice, and differently.
    """
    options = dict(given or {})
    check_options(options)
    if mixed_precision not in PRECISIONS:
        raise OptionError("mixed_precision", f"is {mixed_precision!r}", f"take one of {', '.join(PRECISIONS)}")
    dtype = PRECISIONS[mixed_precision]
    if dtype is not None and options.setdefault("dtype", dtype) is not dtype:
        problem = f"is {mixed_precision!r}, and dtype= of zcompile {options['dtype']}"
        raise OptionError("mixed_precision", problem, "leave one of them out")
    if dtype is not None:
        options.setdefault("output_dtype", torch.float32)  # as Accelerate converts what models give
    return options
