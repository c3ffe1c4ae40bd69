"""Scaling of the loss for float16, by a `torch.amp.GradScaler` that ranks keep alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from zcompile.errors import OptimizerError, OptionError
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.optimizers import steps_of_scale


def check_scaler(scaler: object, dtype: torch.dtype | None) -> GradScaler | None:
    """The scaler, if there is one that scales.

    Raises:
        OptionError: it is none, or gradients are float16 without one.
        OptimizerError: gradients are bfloat16.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        problem = f"is a {type(scaler).__name__}"
        raise OptionError("grad_scaler", problem, "give a torch.amp.GradScaler, or leave it out")
    if scaler is None or not scaler.is_enabled():
        if dtype is torch.float16:
            given = "" if scaler is None else ", and the one that is given is disabled, as one for another device is"
            problem = f"is float16, whose gradients want a GradScaler{given}"
            raise OptionError("dtype", problem, "give torch.bfloat16, or grad_scaler=torch.amp.GradScaler(device)")
        return None
    if dtype is torch.bfloat16:
        problem = "scales the loss of a model that computes in bfloat16, whose range is that of float32"
        raise OptimizerError("GradScaler", problem, "leave it out, or give it enabled=False")
    return scaler


def scale_of(scaler: GradScaler, device: torch.device) -> torch.Tensor:
    """What a loss is multiplied by now, []."""
    scaled: torch.Tensor = scaler.scale(torch.ones((), device=device))
    return scaled


def settings_of(scaler: GradScaler) -> str:
    """The scale and how it changes, which all ranks must have in common."""
    state = {key: value for key, value in scaler.state_dict().items() if not key.startswith("_")}
    return ", ".join(f"{key} {value}" for key, value in state.items())


def unscale(scaler: GradScaler | None, optimizers: Iterable[Optimizer]) -> None:
    """Let gradients be what they are without a scale, if there is one."""
    for optimizer in optimizers if scaler is not None else ():
        scaler.unscale_(optimizer)  # type: ignore[union-attr]


def step_all(scaler: GradScaler | None, optimizers: Iterable[Optimizer]) -> None:
    """Step the optimizers, where there is a scaler if their gradients are finite."""
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


class Overflow:
    """Gradients that are not finite, told to ranks that have none of them: all skip a step, or none.

    A scaler looks at the gradients of this rank's optimizers. So where any rank has one that is not finite, one is put
    among those of each, and among those of a parameter of its own, for ranks whose optimizers have none.
    """

    def __init__(self, device: torch.device) -> None:
        self._flag = nn.Parameter(torch.zeros((), device=device))
        self._flags = torch.optim.SGD([self._flag], lr=0.0)

    def found(self, parameters: Sequence[nn.Parameter], scaler: GradScaler) -> torch.Tensor:
        """1 if a gradient here is not finite, else 0; the scale and for how many steps it has stood; these negated.

        float32 [5]. Of their maxima over all ranks the last four tell whether all have scaled alike.
        """
        gradients = [local_tensor(one.grad) for one in parameters if one.grad is not None]
        flags = [(~torch.isfinite(one)).any().to(self._flag.device) for one in gradients if one.numel()]
        found = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=self._flag.device)
        own = [scale_of(scaler, self._flag.device).float(), steps_of_scale(scaler).float()]
        return torch.stack([found.float(), *own, *(-one for one in own)])

    def spread(self, scaler: GradScaler, optimizers: Iterable[Optimizer], found: torch.Tensor) -> list[Optimizer]:
        """Let each optimizer have a gradient that is not finite, if any rank has; gives those that are to step."""
        stepping = []
        for optimizer in optimizers:
            params = (one for group in optimizer.param_groups for one in group["params"])
            gradients = [local_tensor(one.grad) for one in params if one.grad is not None]
            if gradients:
                stepping.append(optimizer)
            for gradient in gradients:
                gradient.masked_fill_(found[0].to(gradient.device, torch.bool), torch.inf)
        self._flag.grad = torch.where(found[0] > 0, torch.inf, 0.0)
        scaler.unscale_(self._flags)
        return stepping
