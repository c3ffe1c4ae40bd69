"""The planner over meshes: how many ranks for pipeline, data and tensor parallelism, and what to do on them.

A model is traced for each part of tensor parallelism and each size of micro-batch; what its units take is measured in
their rewritten programs. Every mesh, schedule and layout is then forecast from that: `zcompile.cost.pipeline_forecast`.
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
"""Sizes of micro-batches that are compared, in those of the batch that is given."""


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
    """Find the fastest way to train `model` on `world` ranks that fits: a mesh, a schedule, and options beside it.

    Args:
        model: A plain module, on any device or on meta. Nothing is run: it takes no group, GPU or memory.
        args: Of a call with the smallest micro-batch. Tensors may be on meta.
        kwargs: Likewise.
        world: Ranks in all.
        loss_fn: As of `zcompile.train_step`; by default the model's forward gives the loss.
        global_batch: Samples of a step, of all ranks; by default as many as `world` of these micro-batches have.
        hardware: A `Hardware`, the name of a profile that comes along ("h100"), or the path of one.
        memory_limit: Bytes, or "70 GB", of a rank; by default nine tenths of what the hardware's devices have.
        tensor_parallel: A plan for `parallelize_module`; by default the model's own. An empty one: none.
        times: Sizes of micro-batches to compare, in those of the call.
        schedules: Pipeline schedules to compare.
        stages: ZeRO stages to compare.
        checkpoints: None and "unit", or one of them.
        dtype: To compute in; None: the model's own; "auto": bfloat16 where the hardware has it.
        units: As for `zcompile.compile`.
        progress: Called with what is done next, how much is done, and how much there is.

    Raises:
        OptionError: an option that is not valid, or what is computed is no loss.
        ProfileError: there is no such profile, or it is not valid.
        ModelError, CaptureError: see `zcompile.tools.tracing.trace`; or the model is divided already.
        GroupError: there is a process group, and a plan of tensor parallelism.
    """
    began = time.perf_counter()
    device, limit = target_of(hardware, memory_limit)
    least = _rows_of(args, dict(kwargs or {}))
    _check(model, world, dtype, global_batch, least)
    _check_compared(times, schedules, stages, checkpoints)
    notes: list[str] = []
    plan = _plan_of(model, tensor_parallel, notes)
    computed = _low_precision(device, notes) if isinstance(dtype, str) else dtype
    traced = TracedUnits(model, args, dict(kwargs or {}), computed, units, device, plan, loss_fn)
    recomputed = tuple(None if one is None else "unit" for one in checkpoints)
    compared = tuple(times), tuple(schedules), tuple(stages), recomputed
    space = MeshSpace(world, global_batch or world * least, least, *compared)
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


def _check(model: nn.Module, world: int, dtype: torch.dtype | str | None, global_batch: int | None, least: int) -> None:
    """Raise OptionError for what is not valid, and ModelError for a model that cannot be planned."""
    check_kinds(model)
    if check_divided(model) is not None:
        fix = "give the plain model, and what divides it as tensor_parallel="
        raise ModelError(type(model).__name__, "is divided by tensor parallelism already", fix)
    if isinstance(dtype, str) and dtype != "auto":
        raise OptionError("dtype", f"is {dtype!r}", "give a torch.dtype, None or 'auto'")
    if dtype is torch.float16:
        problem = (
            "is float16, whose gradients want a GradScaler and are kept until all are there, which is not forecast"
        )
        raise OptionError("dtype", problem, "give torch.bfloat16, or None")
    _check_count("world", world)
    if global_batch is not None:
        _check_count("global_batch", global_batch)
        if global_batch % least:
            problem = f"is {global_batch}, and a micro-batch has {least} rows or a multiple of that"
            raise OptionError("global_batch", problem, f"give a multiple of {least}")


def _check_count(name: str, count: object) -> None:
    """Raise OptionError for what is no number of things."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise OptionError(name, f"is {count!r}", "give a whole number, 1 or more")


def _check_compared(
    times: Sequence[int], schedules: Sequence[str], stages: Sequence[int], checkpoints: Sequence[Checkpoint]
) -> None:
    """Raise OptionError for what cannot be compared."""
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
            raise OptionError("checkpoints", f"has {checkpoint!r}", "pipelines have None and 'unit'")


def _low_precision(hardware: Hardware, notes: list[str]) -> torch.dtype | None:
    """The dtype of 16 bits to compute in."""
    if "bfloat16" in hardware.flops:
        return torch.bfloat16
    notes.append(f"in the model's own dtype: {hardware.name} has no rate of bfloat16, and float16 wants a GradScaler")
    return None


def _plan_of(
    model: nn.Module, given: Mapping[str, ParallelStyle] | None, notes: list[str]
) -> Mapping[str, ParallelStyle] | None:
    """The plan of tensor parallelism, if there is one.

    Raises:
        GroupError: there is, and a process group, too.
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
    """Samples of a call: rows of its tensors.

    Raises:
        OptionError: they have several numbers of rows, or none has any.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    found = {tensor.shape[0] for tensor in tensors}
    if found == {0}:
        raise OptionError("args", "has tensors without rows", "give a batch of at least one sample")
    if len(found) != 1:
        problem = f"has tensors of {sorted(found)} rows, and micro-batches are cut along dimension 0"
        raise OptionError("args", problem, "let all that the model is given have a row for each sample")
    return found.pop()
