"""Lightning strategies that shard models by zcompile, for the Trainer and for Fabric.

    from zcompile.integrations.lightning import ShardedStrategy

    trainer = lightning.Trainer(strategy=ShardedStrategy(stage=3), devices=8)

    from zcompile.integrations.lightning import ShardedFabricStrategy

    fabric = lightning.Fabric(strategy=ShardedFabricStrategy(stage=3), devices=8)

The steps of a LightningModule remain plain Python; the modules that they call run as programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from zcompile.compiled import CompiledModule, compiled_of
from zcompile.errors import StateError
from zcompile.integrations.models import check_options, holds_any, missing, sharded

try:
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies.ddp import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise missing("Lightning", "lightning") from error

_LAUNCH = frozenset(
    {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "process_group_backend", "timeout"}
    | {"start_method"}
)
"""Options of Lightning's strategies about processes; all other options are for zcompile."""


def _split_options(options: Mapping[str, Any], launch: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of Lightning and those of `zcompile.compile`.

    Raises:
        OptionError: an option belongs to neither.
    """
    rest = {name: value for name, value in options.items() if name not in launch}
    check_options(rest)
    return {name: value for name, value in options.items() if name in launch}, rest


class ShardedStrategy(DDPStrategy):
    """Trains, validates and predicts with a LightningModule whose parameters are shards.

    Checkpoints are whole, as those of plain training, and resume in any stage and world, or in plain training.

    Args:
        **options: Options of `zcompile.compile` except `optimizer`, and these of Lightning's strategies: `accelerator`,
            `parallel_devices`, `cluster_environment`, `checkpoint_io`, `precision_plugin`, `process_group_backend`,
            `timeout`, `start_method`.
    """

    strategy_name = "zcompile"

    def __init__(self, **options: Any) -> None:
        for_lightning, self._options = _split_options(options, _LAUNCH | {"precision_plugin"})
        super().__init__(**for_lightning)
        self._compiled: tuple[nn.Module | None, CompiledModule | None] = None, None

    @property
    def compiled(self) -> CompiledModule | None:
        """The sharded LightningModule; None before setup."""
        module, compiled = self._compiled
        return compiled if module is self.lightning_module else None

    def setup(self, trainer: Any) -> None:
        """Shard the module, and then make its optimizers. Collective."""
        self.accelerator.setup(trainer)
        if compiled_of(self.lightning_module) is None:
            # Convert and move the module first, also for evaluation: shards cannot be moved.
            module = self._layer_sync.apply(self.lightning_module) if self._layer_sync else self.lightning_module
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
        self.configure_ddp()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Shard the module. The strategy's model is not replaced, since its steps are called directly."""
        self._compiled = self.lightning_module, sharded(self.lightning_module, [], self._options)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients in backwards within the context."""
        with self._stored().no_sync():
            yield

    def teardown(self) -> None:
        """Tear down as Lightning, but leave shards on their device."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: state is loaded after sharding, and each rank takes its part."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict on the first rank; empty on others. Collective."""
        return self._stored().full_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._stored().load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state dict on the first rank; empty on others. Collective."""
        return self._stored().full_optimizer_state_dict(_inner(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._stored().load_full_optimizer_state_dict(_inner(optimizer), state)

    def _stored(self) -> CompiledModule:
        if self.compiled is None:
            problem = "is not set up, so it has no state"
            raise StateError("ShardedStrategy", problem, "save and load within fit, validate, test or predict")
        return self.compiled


class _SyncControl(_BackwardSyncControl):
    """Lightning's interface to `no_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        if enabled and isinstance(module, CompiledModule):
            return module.no_sync()
        return contextlib.nullcontext()


class ShardedFabricStrategy(FabricDDPStrategy):
    """`fabric.setup(model, optimizer)` shards both; files of `fabric.save` and `fabric.load` are as in plain training.

    Args:
        **options: As for `ShardedStrategy`, with `precision` instead of `precision_plugin`.
    """

    def __init__(self, **options: Any) -> None:
        for_lightning, self._options = _split_options(options, _LAUNCH | {"precision"})
        super().__init__(**for_lightning)
        self._backward_sync_control = _SyncControl()
        self._models: list[CompiledModule] = []

    def setup_module(self, module: nn.Module) -> CompiledModule:
        """Shard a module. Collective."""
        return self._sharded(module, [])

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a module, and move its optimizers to the shards. Collective."""
        return self._sharded(module, optimizers), optimizers, scheduler

    def _sharded(self, module: nn.Module, optimizers: list[Optimizer]) -> CompiledModule:
        compiled = sharded(module, optimizers, self._options)
        self._models.append(compiled)
        return compiled

    # -- state ----------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole state dict on the first rank; empty on others. Collective."""
        return module.full_state_dict() if isinstance(module, CompiledModule) else module.state_dict()

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state dict on the first rank; empty on others. Collective."""
        model = self._model_of(optimizer)
        return super().get_optimizer_state(optimizer) if model is None else model.full_optimizer_state_dict(optimizer)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load as Lightning; each rank takes its part of an optimizer's state. Collective."""
        alone = isinstance(state, Optimizer)
        given = {"": state} if alone else dict(state) if isinstance(state, Mapping) else {}
        optimizers = {name: (self._model_of(one), one) for name, one in given.items() if isinstance(one, Optimizer)}
        apart = {name: (model, one) for name, (model, one) in optimizers.items() if model is not None}
        if not apart:
            return super().load_checkpoint(path, state, strict, weights_only)
        rest = {name: one for name, one in given.items() if name not in apart}
        left = super().load_checkpoint(path, rest, strict, weights_only) if rest else None
        whole = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        for name, (model, optimizer) in apart.items():
            if alone or name in whole:
                model.load_full_optimizer_state_dict(optimizer, whole if alone else whole[name])
            elif strict:
                fix = "give the keys that were saved, or strict=False"
                raise StateError(str(path), f"has no {name!r}", fix)
        if isinstance(state, dict):
            state.update(rest)  # replace values other than modules, as Lightning does
        left = whole if left is None else left
        return {} if alone else {name: value for name, value in left.items() if name not in apart}

    def _model_of(self, optimizer: Optimizer) -> CompiledModule | None:
        return next((one for one in self._models if holds_any(optimizer, one)), None)


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
