"""The planner over meshes: how many ranks for pipeline, data and tensor parallelism, and which options on them.

A model is traced for each degree of tensor parallelism and each micro-batch size, and the cost of each unit is taken
from its rewritten program. Every mesh and schedule is forecast from these costs: `zcompile.cost.pipeline_forecast`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from zcompile.cost.forecast import Checkpoint, ChoiceTexts, MeshPlan
from zcompile.cost.hardware import Hardware
from zcompile.errors import ModelError, OptionError, nearest
from zcompile.model.sharding import check_kinds
from zcompile.model.tensor_parallel import check_divided, tensor_parallel_plan
from zcompile.pipelining.action_tables import SCHEDULES
from zcompile.schedule.option_checks import check_stage
from zcompile.tools.mesh_search import MeshSearch, MeshSpace
from zcompile.tools.planner import Progress, name_and_size, target_of
from zcompile.tools.traced_units import TracedUnits, check_no_group
from zcompile.torch_internals.pytree import tree_leaves

TIMES = (1, 2, 4)
"""Micro-batch sizes that are compared, as multiples of the given batch."""


def plan_meshes(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world: int,
    loss_fn: Callable[..., Any] | None = None,
    global_batch: int | None = None,
    hardware: str | Hardware = "h100",
    memory_limit: int | str | None = None,
    tensor_parallel: Mapping[str, ParallelStyle] | None = None,
    times: Sequence[int] = TIMES,
    schedules: Sequence[str] = tuple(SCHEDULES),
    stages: Sequence[int] = (0, 1, 2, 3),
    checkpoints: Sequence[Checkpoint] = (None, "unit"),
    dtype: torch.dtype | str | None = "auto",
    units: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> MeshPlan:
    """Find the fastest configuration to train `model` on `world` ranks within memory: mesh, schedule and options.

    Sequences are divided, too, where a step has fewer samples than there are ranks, or nothing fits otherwise.

    Args:
        model: A plain module, on any device or on meta. It is not run: no group, GPU or memory for it is needed.
        args: Positional arguments of a call with the smallest micro-batch. Tensors may be on meta.
        kwargs: Keyword arguments of this call.
        world: Total number of ranks.
        loss_fn: As for `zcompile.train_step`; default: the model's forward returns the loss.
        global_batch: Samples of a step over all ranks; default: `world` times those of the smallest micro-batch.
        hardware: A `Hardware`, the name of a built-in profile ("h100"), or the path of a profile.
        memory_limit: Bytes per rank, or "70 GB"; default: nine tenths of a device's memory.
        tensor_parallel: A plan for `parallelize_module`; default: the model's own; empty: no tensor parallelism.
        times: Micro-batch sizes to compare, as multiples of the smallest.
        schedules: Pipeline schedules to compare.
        stages: ZeRO stages to compare.
        checkpoints: Values of `checkpoint=` to compare: None, "unit", or both.
        dtype: Dtype to compute in; None: the model's own; "auto": bfloat16 if the hardware has a rate for it.
        units: As for `zcompile.compile`.
        progress: Called with the next task, the number of tasks done, and their total number.

    Raises:
        OptionError: an option is invalid, or the result is not a loss.
        ProfileError: the profile does not exist or is invalid.
        ModelError, CaptureError: see `zcompile.tools.tracing.trace`; or the model is tensor-parallel already.
        GroupError: there is a process group, and tensor parallelism is to be compared.
    """
    began = time.perf_counter()
    device, limit = target_of(hardware, memory_limit)
    rows = _rows_of(args, dict(kwargs or {}))
    _check(model, world, dtype, global_batch, rows)
    _check_compared(times, schedules, stages, checkpoints)
    notes: list[str] = []
    plan = _plan_of(model, tensor_parallel, notes)
    computed = _low_precision(device, notes) if isinstance(dtype, str) else dtype
    traced = TracedUnits(model, args, dict(kwargs or {}), computed, units, device, plan, loss_fn)
    recomputed = tuple(None if one is None else "unit" for one in checkpoints)
    compared = tuple(times), tuple(schedules), tuple(stages), recomputed
    space = MeshSpace(world, global_batch or world * rows, rows, *compared)
    search = MeshSearch(traced, space, limit, progress or (lambda *_: None), notes)
    search.run()
    own = "zcompile.tensor_parallel_plan(model)" if tensor_parallel is None else "tensor_parallel"
    return MeshPlan(
        *name_and_size(model),
        device,
        limit,
        sorted(search.best.values(), key=lambda forecast: (forecast.seconds, forecast.nbytes)),
        world=world,
        global_batch=space.global_batch,
        searched=search.searched,
        took=time.perf_counter() - began,
        smallest=None if search.best else search.smallest,
        texts=ChoiceTexts("None" if loss_fn is None else "loss_fn", own, tuple(units or ())),
        notes=notes,
    )


def _check(model: nn.Module, world: int, dtype: torch.dtype | str | None, global_batch: int | None, rows: int) -> None:
    """Raise OptionError for an invalid option, and ModelError for a model that cannot be planned."""
    check_kinds(model)
    if check_divided(model) is not None:
        fix = "give the plain model, and its tensor-parallel plan as tensor_parallel="
        raise ModelError(type(model).__name__, "is tensor-parallel already", fix)
    if isinstance(dtype, str) and dtype != "auto":
        raise OptionError("dtype", f"is {dtype!r}", "give a torch.dtype, None or 'auto'")
    if dtype is torch.float16:
        problem = "is float16, which needs a GradScaler and so keeps all gradients, and this is not forecast"
        raise OptionError("dtype", problem, "give torch.bfloat16, or None")
    _check_count("world", world)
    if global_batch is not None:
        _check_count("global_batch", global_batch)
        if global_batch % rows:
            problem = f"is {global_batch}, and micro-batches have a multiple of {rows} rows"
            raise OptionError("global_batch", problem, f"give a multiple of {rows}")


def _check_count(name: str, count: object) -> None:
    """Raise OptionError for anything but a positive integer."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise OptionError(name, f"is {count!r}", "give a positive integer")


def _check_compared(
    times: Sequence[int], schedules: Sequence[str], stages: Sequence[int], checkpoints: Sequence[Checkpoint]
) -> None:
    """Raise OptionError for values that cannot be compared."""
    for name, given in (("times", times), ("schedules", schedules), ("stages", stages), ("checkpoints", checkpoints)):
        if not given:
            raise OptionError(name, "has nothing to compare", "give at least one")
    for one in times:
        _check_count("times", one)
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise OptionError("schedules", f"has {schedule!r}", nearest(str(schedule), SCHEDULES))
    for stage in stages:
        check_stage(stage)
    for checkpoint in checkpoints:
        if checkpoint not in (None, "unit"):
            raise OptionError("checkpoints", f"has {checkpoint!r}", "choose from None and 'unit', as pipelines do")


def _low_precision(hardware: Hardware, notes: list[str]) -> torch.dtype | None:
    """bfloat16 if the hardware has a rate for it, else None with a note."""
    if "bfloat16" in hardware.flops:
        return torch.bfloat16
    notes.append(f"in the model's own dtype: {hardware.name} has no bfloat16 rate, and float16 needs a GradScaler")
    return None


def _plan_of(
    model: nn.Module, given: Mapping[str, ParallelStyle] | None, notes: list[str]
) -> Mapping[str, ParallelStyle] | None:
    """The tensor-parallel plan, given or the model's own; None with a note if there is none.

    Raises:
        GroupError: there is a plan, and a process group exists.
    """
    try:
        plan = tensor_parallel_plan(model) if given is None else given
    except ModelError as error:
        notes.append(f"no tensor parallelism: {error.subject} {error.problem}")
        return None
    if plan:
        check_no_group()
    return plan


def _rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Number of samples in a call: the size of its tensors along dimension 0.

    Raises:
        OptionError: these sizes differ or are zero, or there is no tensor with dimensions.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    found = {tensor.shape[0] for tensor in tensors}
    if found == {0}:
        raise OptionError("args", "has tensors with no rows", "give a batch of at least one sample")
    if len(found) != 1:
        problem = f"has tensors of {sorted(found)} rows, and micro-batches are split along dimension 0"
        raise OptionError("args", problem, "give tensors with one row for each sample")
    return found.pop()
