"""What train steps share: their options, the call that they train, results and optimizers.

A loss function may return metrics with the loss, `(loss, {"accuracy": tensor, ...})`, without gradients. For float16
the loss is scaled, by a `torch.amp.GradScaler` that is the same on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zcompile.engine.optimizers import check_before_step, scaled_bfloat16
from zcompile.errors import OptionError
from zcompile.ir.actions import ActionTable
from zcompile.runtime.gradients.optimizer_trials import parameters_held
from zcompile.runtime.gradients.updates import Updater
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.optimizers import steps_of_scale
from zcompile.torch_internals.pytree import tree_leaves

StepResult = torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The result of a train step: the loss, or the loss and metrics, detached."""
ResultsOn = Literal["all", "last"]
"""Which ranks along a pipeline axis get the results: all of them, or the last, which has computed the loss."""
LossFunction = Callable[..., Any]
"""`loss_fn(model, *batch)`: calls `model` and returns the loss, a tensor of one element, or `(loss, metrics)`."""


@dataclass(frozen=True)
class StepOptions:
    """The options of a train step: see `zcompile.train_step`.

    Attributes:
        schedule: A name in `zcompile.pipelining.action_tables.SCHEDULES`, or a table of actions.
        split: None: balance the compute time of stages.
        stages_per_rank: None for the schedule's usual number.
        grad_scaler: None if nothing is scaled.
        offload_optimizer: Where optimizer state is kept; None: with the shards.
    """

    schedule: str | ActionTable = "1f1b"
    microbatches: int = 1
    split: Sequence[str] | None = None
    stages_per_rank: int | None = None
    clip_grad_norm: float | None = None
    grad_scaler: GradScaler | None = None
    results: ResultsOn = "all"
    offload_optimizer: Path | Literal["cpu"] | None = None

    @property
    def keeps_gradients(self) -> bool:
        """True if all gradients are needed before the first optimizer steps."""
        return self.clip_grad_norm is not None or self.grad_scaler is not None


@dataclass(frozen=True)
class Training:
    """A model, its loss and its optimizers.

    Attributes:
        model: A plain or a compiled one.
        loss_fn: Computes the loss; None: the model itself does.
        optimizers: Those of the model's parameters.
    """

    model: nn.Module
    loss_fn: LossFunction | None
    optimizers: Sequence[Optimizer]

    def call(self, then: Callable[[Any], Any]) -> tuple[Callable[..., Any], inspect.Signature]:
        """A function of a batch that returns `then(loss)`, and the signature of the loss function or the model."""
        model, loss_fn = self.model, self.loss_fn
        call: Callable[..., Any] = model if loss_fn is None else loss_fn
        first = () if loss_fn is None else (model,)
        signature = inspect.signature(type(model).forward if loss_fn is None else loss_fn)
        return lambda *args, **kwargs: then(call(*first, *args, **kwargs)), signature


class BaseStep:
    """A train step. Collective: every rank calls it.

    Args:
        trained: What it trains; the model is compiled, or divided at the first step.
        asked: Its options.
        updater: Steps the optimizers as soon as gradients arrive; None if all gradients are kept.
    """

    grad_norm: torch.Tensor | None = None
    """With `clip_grad_norm=`, the norm of all gradients of the last step before clipping, a plain tensor."""

    def __init__(self, trained: Training, asked: StepOptions, updater: Updater | None) -> None:
        self.model, self.optimizers, self.clip_grad_norm = trained.model, trained.optimizers, asked.clip_grad_norm
        self._trained, self._scaler, self._updater = trained, asked.grad_scaler, updater

    def _check_before(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise ParameterError or OptimizerError if a step would lose a gradient, or a hook would find none."""
        check_before_step(parameters, self.optimizers if self._updater is not None else ())

    def _step_optimizers(self, optimizers: Sequence[Optimizer], clip: Callable[[float], torch.Tensor]) -> None:
        """Step with kept gradients; `clip` scales all of them down to a norm, and returns the norm before."""
        if self.clip_grad_norm is not None:
            for optimizer in optimizers if self._scaler is not None else ():
                self._scaler.unscale_(optimizer)  # type: ignore[union-attr]
            self.grad_norm = clip(self.clip_grad_norm)
        for optimizer in optimizers:
            optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()

    def _drop_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop gradients of the optimizers' parameters and of the model's, some of which may be in no optimizer."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with no_torch_function():
            for parameter in parameters:
                parameter.grad = None


def has_metrics(result: object) -> bool:
    """True for a loss with metrics."""
    return type(result) is tuple and len(result) == 2 and type(result[1]) is dict


def split_results(result: Any) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """The loss, and metrics if there are any."""
    return result if has_metrics(result) else (result, None)


def without_gradients(result: Any) -> Any:
    """The result of a loss function, with metrics detached; traced with it."""
    if not has_metrics(result):
        return result
    loss, metrics = result
    return loss, {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in metrics.items()}


ONE_ELEMENT = "return the loss, a tensor of one element"
"""The fix if a loss function returns anything else."""


def untrained_loss() -> OptionError:
    """The error for a loss without a gradient."""
    fix = "compute it from what model(...) gives, without detach() or no_grad()"
    return OptionError("loss_fn", "gives a loss that depends on no parameter that is trained", fix)


def check_metrics(metrics: dict[Any, bool]) -> None:
    """Raise OptionError if the name of a metric is not a string, or it is not a tensor (False)."""
    for name, is_tensor in metrics.items():
        if not isinstance(name, str):
            raise OptionError("loss_fn", f"gives a metric called {name!r}", "name metrics with strings")
        if not is_tensor:
            problem = f"gives a metric {name!r} that is not a tensor"
            raise OptionError("loss_fn", problem, "give a tensor, or keep what is none out of the metrics")


class FlatResults:
    """Flattens the loss and metrics of a traced call, and remembers the metrics' names."""

    def __init__(self) -> None:
        self._found: dict[Any, bool] | None = None

        def note(*metrics: tuple[Any, bool]) -> int:
            self._found = dict(metrics)
            return 0

        # Called while torch.compile traces, not by what it compiles: the names are in no graph.
        self._note = torch.compiler.assume_constant_result(note)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the last traced call's metrics; None if it returns none.

        Raises:
            OptionError: a metric has no name, or is not a tensor.
        """
        if self._found is None:
            return None
        check_metrics(self._found)
        return tuple(self._found)

    def __call__(self, result: Any) -> Any:
        """A tensor as it is; of anything else the tensors in it, each in its own memory."""
        if isinstance(result, torch.Tensor):
            return _plain(result)
        if has_metrics(result):
            self._note(*((name, isinstance(one, torch.Tensor)) for name, one in result[1].items()))
        leaves = [_plain(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return (*leaves[:1], *(leaf.detach().clone() for leaf in leaves[1:]))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_scaler(scaler: object, dtype: torch.dtype | None) -> GradScaler | None:
    """The scaler, if there is one that scales.

    Raises:
        OptionError: it is not a GradScaler, or gradients are float16 without one.
        OptimizerError: gradients are bfloat16.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        problem = f"is a {type(scaler).__name__}"
        raise OptionError("grad_scaler", problem, "give a torch.amp.GradScaler, or leave it out")
    if scaler is None or not scaler.is_enabled():
        if dtype is torch.float16:
            given = "" if scaler is None else ", and the one that is given is disabled, as one for another device is"
            problem = f"is float16, whose gradients need a GradScaler{given}"
            raise OptionError("dtype", problem, "give torch.bfloat16, or grad_scaler=torch.amp.GradScaler(device)")
        return None
    if dtype is torch.bfloat16:
        raise scaled_bfloat16()
    return scaler


def scale_of(scaler: GradScaler, device: torch.device) -> torch.Tensor:
    """The factor of the loss now, a tensor []."""
    scaled: torch.Tensor = scaler.scale(torch.ones((), device=device))
    return scaled


def settings_of(scaler: GradScaler) -> str:
    """The scale and its settings as text, which must be the same on all ranks."""
    state = {key: value for key, value in scaler.state_dict().items() if not key.startswith("_")}
    return ", ".join(f"{key} {value}" for key, value in state.items())


class Overflow:
    """Spreads non-finite gradients to ranks that have none: all ranks skip a step, or none does.

    A scaler checks the gradients of this rank's optimizers. So if any rank has a non-finite one, each rank's gradients
    are made infinite, and that of a parameter of its own, for ranks whose optimizers have no gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._flag = nn.Parameter(torch.zeros((), device=device))
        self._flags = torch.optim.SGD([self._flag], lr=0.0)

    def found(self, parameters: Sequence[nn.Parameter], scaler: GradScaler) -> torch.Tensor:
        """1 if a gradient here is not finite, else 0; the scale and the steps since it changed; these two negated.

        float32 [5]. The last four of their maxima over all ranks show whether all have scaled alike.
        """
        gradients = [local_tensor(one.grad) for one in parameters if one.grad is not None]
        flags = [(~torch.isfinite(one)).any().to(self._flag.device) for one in gradients if one.numel()]
        found = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=self._flag.device)
        own = [scale_of(scaler, self._flag.device).float(), steps_of_scale(scaler).float()]
        return torch.stack([found.float(), *own, *(-one for one in own)])

    def spread(self, scaler: GradScaler, optimizers: Iterable[Optimizer], found: torch.Tensor) -> list[Optimizer]:
        """Make each optimizer's gradients infinite if any rank has a non-finite one; returns those that step."""
        stepping = []
        for optimizer in optimizers:
            gradients = [local_tensor(one.grad) for one in parameters_held(optimizer) if one.grad is not None]
            if gradients:
                stepping.append(optimizer)
            for gradient in gradients:
                gradient.masked_fill_(found[0].to(gradient.device, torch.bool), torch.inf)
        self._flag.grad = torch.where(found[0] > 0, torch.inf, 0.0)
        scaler.unscale_(self._flags)
        return stepping
