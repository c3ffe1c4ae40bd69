"""The planner over meshes: how many ranks for pipeline, data and tensor parallelism, and what to do on them.

A model is traced for each part of tensor parallelism and each size of micro-batch; what its units take is measured in
their rewritten programs. Every mesh, schedule and layout is then forecast from that: `zcompile.planning`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from zcompile._torch import tree_leaves
from zcompile.cost.forecast import Checkpoint
from zcompile.cost.hardware import Hardware, load_profile
from zcompile.cost.mesh_plan import MeshPlan
from zcompile.errors import ModelError, OptionError, nearest
from zcompile.model.tensor_parallel import check_divided, tensor_parallel_plan
from zcompile.pipelining.action_tables import SCHEDULES
from zcompile.schedule.option_checks import bytes_of, check_stage
from zcompile.tools.mesh_search import MeshSearch, MeshSpace
from zcompile.tools.planner import RESERVED, Progress, low_precision
from zcompile.tools.traced_units import TracedUnits

TIMES = (1, 2, 4)
"""Sizes of micro-batches that are compared, in those of the batch that is given."""


def plan_meshes(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world: int,
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

    Nothing is run: no process group, no GPU, and no memory for a model on meta.

    Args:
        model: A plain module whose forward gives the loss, on any device or on meta.
        args: Of a call with the smallest micro-batch. Tensors may be on meta.
        kwargs: Likewise.
        world: Ranks in all.
        global_batch: Samples of a step, of all ranks; by default as many as `world` of these micro-batches have.
        hardware: A `Hardware`, the name of a profile that comes along ("h100"), or the path of one.
        memory_limit: Bytes, or "70 GB", of a rank; by default nine tenths of what the hardware's devices have.
        tensor_parallel: A plan for `parallelize_module`; by default the model's own, if it has one.
        times: Sizes of micro-batches to compare, in those of the call.
        schedules: Pipeline schedules to compare; likewise `stages` of ZeRO.
        stages: The same.
        checkpoints: None and "unit", or one of them.
        dtype: To compute in; None: the model's own; "auto": the hardware's low precision.
        units: As for `zcompile.compile`.
        progress: Called with what is done next, how much is done, and how much there is.

    Raises:
        OptionError: an option that cannot be meant.
        ProfileError: no such profile, or one that cannot be meant.
        ModelError, CaptureError: see `zcompile.tools.tracing.trace`; or the model is divided already.
        GroupError: there is a process group, and a plan of tensor parallelism.
    """
    began = time.perf_counter()
    device = load_profile(hardware) if isinstance(hardware, str) else hardware
    limit = bytes_of("memory_limit", memory_limit) or (1 - RESERVED) * device.memory
    _check(model, world, dtype, times, schedules, stages, checkpoints)
    notes: list[str] = []
    plan = _plan_of(model, tensor_parallel, notes)
    computed = low_precision(device) if isinstance(dtype, str) else dtype
    least = _rows_of(args, dict(kwargs or {}))
    traced = TracedUnits(model, args, dict(kwargs or {}), computed, units, device, plan)
    compared = tuple(times), tuple(schedules), tuple(stages), tuple(checkpoints)
    space = MeshSpace(world, global_batch or world * least, least, *compared)
    search = MeshSearch(traced, space, device, limit, computed, progress or (lambda *_: None), notes)
    search.run()
    return _planned(model, search, time.perf_counter() - began)


def _planned(model: nn.Module, search: MeshSearch, took: float) -> MeshPlan:
    """The plan that a search has found."""
    return MeshPlan(
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        search.hardware,
        search.limit,
        search.space.world,
        search.space.global_batch,
        sorted(search.best.values(), key=lambda forecast: (forecast.seconds, forecast.nbytes)),
        None if search.best else search.smallest,
        search.searched,
        took,
        notes=search.notes,
    )


def _check(
    model: nn.Module,
    world: int,
    dtype: torch.dtype | str | None,
    times: Sequence[int],
    schedules: Sequence[str],
    stages: Sequence[int],
    checkpoints: Sequence[Checkpoint],
) -> None:
    """Raise OptionError for what cannot be meant, and ModelError for a model that is divided already."""
    if check_divided(model) is not None:
        fix = "give the plain model, and what divides it as tensor_parallel="
        raise ModelError(type(model).__name__, "is divided by tensor parallelism already", fix)
    if isinstance(dtype, str) and dtype != "auto":
        raise OptionError("dtype", f"is {dtype!r}", "give a torch.dtype, None or 'auto'")
    if world < 1:
        raise OptionError("world", f"{world} is none", "give the number of ranks")
    for name, given in (("times", times), ("schedules", schedules), ("stages", stages), ("checkpoints", checkpoints)):
        if not given:
            raise OptionError(name, "has nothing to compare", "give at least one")
    if any(one < 1 for one in times):
        raise OptionError("times", f"has {min(times)}", "give how many of the batch a micro-batch is: 1 or more")
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise OptionError("schedules", f"has {schedule!r}", nearest(str(schedule), SCHEDULES))
    for stage in stages:
        check_stage(stage)
    for checkpoint in checkpoints:
        if checkpoint not in (None, "unit"):
            raise OptionError("checkpoints", f"has {checkpoint!r}", "pipelines have None and 'unit'")


def _plan_of(
    model: nn.Module, given: Mapping[str, ParallelStyle] | None, notes: list[str]
) -> Mapping[str, ParallelStyle] | None:
    """The plan of tensor parallelism, if there is one."""
    if given is not None:
        return given
    try:
        return tensor_parallel_plan(model)
    except ModelError as error:
        notes.append(f"no tensor parallelism: {error.subject} {error.problem}")
        return None


def _rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Samples of a call: rows of its tensors.

    Raises:
        OptionError: they have several numbers of rows, or none has any.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    found = {tensor.shape[0] for tensor in tensors}
    if len(found) != 1:
        problem = f"has tensors of {sorted(found)} rows, and micro-batches are cut along dimension 0"
        raise OptionError("args", problem, "let all that the model is given have a row for each sample")
    return found.pop()
