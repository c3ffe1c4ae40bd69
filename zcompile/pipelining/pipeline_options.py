"""What a pipeline is asked to do, and which options of `zcompile.compile` it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from zcompile.errors import OptionError
from zcompile.ir.actions import ActionTable
from zcompile.pipelining.program import check_options
from zcompile.pipelining.results import ResultsOn
from zcompile.schedule.options import Options

LossFunction = Callable[..., torch.Tensor]
_TAKEN = frozenset({"stage", "prefetch", "dtype", "reduce_dtype", "backend", "bucket", "checkpoint", "memory_limit"})
_TAKEN |= {"shard", "outer_dtype", "outer_gather_dtype", "offload_parameters", "offload_activations", "dump", "record"}
"""Options of `zcompile.compile` that a pipeline takes, beside `units` and `mesh`."""


@dataclass(frozen=True)
class PipelineOptions:
    """What a pipeline is asked to do.

    Attributes:
        schedule: A name of `zcompile.pipelining.action_tables.SCHEDULES`, or a table of actions.
        microbatches: Into how many equal parts a batch is cut along dimension 0.
        split: The units with which stages begin, the first stage's left out; None: so that all compute about as long.
        stages_per_rank: None for as many as is usual for the schedule.
        clip_grad_norm: The largest 2-norm of all gradients together, of all stages.
        grad_scaler: What scales the loss, for gradients in float16.
        results: Which ranks along the pipeline axis are given the loss and metrics.
        offload_optimizer: Where the optimizers' state is; None: where shards are.
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
        """True if all gradients are looked at before the first optimizer steps."""
        return self.clip_grad_norm is not None or self.grad_scaler is not None


def options_of(given: dict[str, Any]) -> Options:
    """The options of a pipeline.

    Raises:
        OptionError: one that it does not take.
    """
    known = {field.name: field for field in fields(Options)}
    if unknown := [name for name in given if name not in known]:
        raise OptionError(unknown[0], "is no option of a pipeline", f"choose among {', '.join(sorted(_TAKEN))}")
    for name, value in given.items():
        if name not in _TAKEN and value != known[name].default:
            raise OptionError(name, "is not combined with a pipeline so far", "leave it out")
    options = Options.among(given)
    check_options(options)
    return options


def check_scales(model: nn.Module, options: Options) -> None:
    """Raise OptionError where a scaler cannot look at the gradients of all parameters."""
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    if len(kinds) > 1 and options.stage == 0:
        problem = (
            "looks at all gradients at once, and under stage 0 only those that tensor parallelism divides are DTensors"
        )
        raise OptionError("grad_scaler", problem, "choose stage 1, 2 or 3, or compute in bfloat16")
