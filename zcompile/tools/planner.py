"""The planner: forecasts memory and time of a model for every choice of options, without a device.

A model is traced once per dtype. Each choice is a pipeline of passes over this program, and the simulator runs the
result on a hardware profile. Passes that choices share run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zcompile.cost.forecast import Checkpoint, Choice, Forecast, Plan
from zcompile.cost.hardware import Hardware, load_profile
from zcompile.cost.memory import live_by_kind, model_state
from zcompile.cost.roofline import aten_cost
from zcompile.cost.simulator import simulate
from zcompile.errors import OptionError, nearest
from zcompile.ir.layout import STAGES, Hybrid
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import TensorType
from zcompile.model.units import Precision, axes_over, make_layout
from zcompile.schedule.option_checks import Chunk, bytes_of, check_worlds
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Pass, Trait, Verified
from zcompile.tools.choices import CHECKPOINTS, PREFETCHES
from zcompile.tools.choices import STAGES as STAGE_NUMBERS
from zcompile.tools.tracing import trace
from zcompile.torch_internals.dtensor import mesh_size
from zcompile.torch_internals.pytree import tree_leaves

RESERVED = 0.1
"""Share of a device's memory left for uncounted uses: workspaces, fragmentation, libraries."""

Progress = Callable[[str, int, int], None]
"""Called with the next task, the number of tasks done, and their total number."""


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    worlds: Sequence[int] = (1,),
    hardware: str | Hardware = "h100",
    memory_limit: int | str | None = None,
    stages: Sequence[int] = STAGE_NUMBERS,
    prefetches: Sequence[int] = PREFETCHES,
    checkpoints: Sequence[Checkpoint] = CHECKPOINTS,
    chunk: Chunk = None,
    dtypes: Sequence[torch.dtype | None] | None = None,
    replicas: Sequence[int] = (1,),
    hybrids: Sequence[str] = tuple(Hybrid),
    units: Sequence[str] | None = None,
    whole: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Forecast the memory per rank and the time of a training step of `model(*args, **kwargs)` for every choice.

    Nothing is run: no process group, no GPU, and no memory for a model on meta.

    Args:
        model: A plain module on any device or on meta, or a module that `parallelize_module` has divided.
        args: Positional arguments of one rank's call, with one micro-batch. Tensors may be on meta.
        kwargs: Keyword arguments of this call.
        worlds: Numbers of data-parallel ranks to compare.
        hardware: A `Hardware`, the name of a built-in profile ("h100"), or the path of a profile.
        memory_limit: Bytes per rank, or "70 GB"; default: nine tenths of a device's memory.
        stages: ZeRO stages to compare.
        prefetches: Values of `prefetch=` to compare.
        checkpoints: Values of `checkpoint=` to compare; values without effect on this model are left out.
        chunk: As for `zcompile.compile`, of all choices: a number of rows, or "auto", with which losses are in chunks.
        dtypes: Dtypes to compute in, None for the model's own; default: that, and a 16-bit dtype of the hardware.
        replicas: Sizes of the outer mesh dimension to compare; 1 for a mesh of one dimension.
        hybrids: Values of `shard=` to compare on meshes of two dimensions.
        units: As for `zcompile.compile`.
        whole: As for `zcompile.compile`; choices that shard these parameters are compared, too, but not recommended.
        progress: Called with the next task, the number of tasks done, and their total number.

    Raises:
        OptionError: an option is invalid.
        ProfileError: the profile does not exist or is invalid.
        ModelError, CaptureError: see `zcompile.tools.tracing.trace`.
    """
    device, limit = target_of(hardware, memory_limit)
    _check_compared(worlds, chunk)
    divisions = divisions_of(replicas, hybrids, (True, False) if whole else (False,))
    low = torch.bfloat16 if "bfloat16" in device.flops else torch.float16
    choices = choices_of(dtypes or (None, low), stages, checkpoints, prefetches, divisions)
    report_progress = progress or (lambda *_: None)
    rewriters, forecasts = dict[torch.dtype | None, Rewriter](), list[Forecast]()
    for done, choice in enumerate(choices):
        if choice.dtype not in rewriters:
            report_progress(
                f"tracing in {str(choice.dtype or 'its own dtype').removeprefix('torch.')}", done, len(choices)
            )
            asked: Any = {"dtype": choice.dtype, "units": units, "whole": whole, "chunks": chunk is not None}
            traced = trace(model, args, kwargs, device=device.device, **asked)
            rewriters[choice.dtype] = Rewriter(model, traced, units, whole, chunk)
        report_progress(str(choice), done, len(choices))
        forecasts += rewriters[choice.dtype].forecasts(choice, list(dict.fromkeys(worlds)), device)
    report_progress("done", len(choices), len(choices))
    if not forecasts:
        fix = "add None, or give units= of modules that compute something"
        raise OptionError("checkpoints", f"{list(checkpoints)} have no effect on this model", fix)
    parts = max(mesh_size(parameter) for parameter in model.parameters())
    tensors = (leaf for leaf in tree_leaves((args, dict(kwargs or {}))) if isinstance(leaf, torch.Tensor))
    types = ", ".join(str(TensorType.make(tensor.dtype, tuple(tensor.shape))) for tensor in tensors)
    return Plan(*name_and_size(model), device, limit, forecasts, types, parts, tuple(whole or ()))


def _check_compared(worlds: Sequence[int], chunk: Chunk) -> None:
    check_worlds(worlds)
    if isinstance(chunk, str) and chunk != "auto":
        raise OptionError("chunk", f"{chunk!r} is a budget, which no plan compares", "give a number of rows, or 'auto'")


def target_of(hardware: str | Hardware, memory_limit: int | str | None) -> tuple[Hardware, float]:
    """The hardware of a plan, and the memory limit of a rank in bytes.

    Raises:
        OptionError: the limit is not a size.
        ProfileError: the profile does not exist or is invalid.
    """
    device = load_profile(hardware) if isinstance(hardware, str) else hardware
    return device, bytes_of("memory_limit", memory_limit) or (1 - RESERVED) * device.memory


def name_and_size(model: nn.Module) -> tuple[str, int]:
    """The name of a model in a plan, and its number of parameters."""
    return type(model).__name__, sum(parameter.numel() for parameter in model.parameters())


Division = tuple[int, Hybrid, bool]
"""Size of the outer axis, what the two axes shard, and whether parameters have owners."""


def divisions_of(replicas: Sequence[int], hybrids: Sequence[str], owners: Sequence[bool]) -> list[Division]:
    """All valid combinations: a mesh of one dimension has no hybrids, and owners are possible with HSDP only.

    Raises:
        OptionError: a value is invalid.
    """
    check_worlds(replicas)
    for one in hybrids:
        if one not in list(Hybrid):
            raise OptionError("hybrids", f"has {one!r}", nearest(str(one), list(Hybrid)))
    meshes = [
        (times, Hybrid(one) if times > 1 else Hybrid.HSDP)
        for times in replicas
        for one in (hybrids if times > 1 else [Hybrid.HSDP])
    ]
    return [(*mesh, whole) for whole in owners for mesh in meshes if not whole or mesh[1] is Hybrid.HSDP]


def choices_of(
    dtypes: Sequence[torch.dtype | None],
    stages: Sequence[int],
    checkpoints: Sequence[Checkpoint],
    prefetches: Sequence[int],
    divisions: Sequence[Division] = ((1, Hybrid.HSDP, False),),
) -> list[Choice]:
    """All valid combinations. Stage 0 neither gathers nor shards, so prefetches and divisions do not multiply it.

    Raises:
        OptionError: a value is invalid, or there is no combination.
    """
    made = (
        Choice(stage, prefetch, checkpoint, dtype, *(division if stage else ()))
        for dtype in dtypes
        for stage in stages
        for division in divisions
        if stage == 3 or division[1] is not Hybrid.HPZ  # in stages 1 and 2, which keep full copies, hpZ equals HFSDP
        for checkpoint in checkpoints
        for prefetch in (prefetches if stage else prefetches[:1])
    )
    result = list(dict.fromkeys(made))
    for choice in result:
        _options_of(choice)
    if not result:
        raise OptionError("plan", "has nothing to compare", "give at least one stage, prefetch, checkpoint and dtype")
    return result


def _options_of(choice: Choice, chunk: Chunk = None) -> Options:
    given: Any = {name: getattr(choice, name) for name in ("stage", "prefetch", "checkpoint", "dtype")}
    return Options(**given, chunk=chunk)


class Rewriter:
    """Makes the programs of one traced model for each choice; passes that choices share run once."""

    def __init__(
        self,
        model: nn.Module,
        traced: Program,
        units: Sequence[str] | None,
        whole: Sequence[str] | None = None,
        chunk: Chunk = None,
    ) -> None:
        self.model, self.units, self.whole, self.chunk = model, units, whole, chunk
        self.flops = sum(aten_cost(node)[0] for node in traced.graph.nodes if node.op == "call_function")
        self._traced = Verified.traced(traced)
        self._done: dict[tuple[Any, ...], Verified] = {}

    def forecasts(self, choice: Choice, worlds: Sequence[int], hardware: Hardware) -> Iterator[Forecast]:
        """Forecasts for each world; none if the checkpoint setting has no effect."""
        for world in (world for world in worlds if world % choice.replicas == 0):
            # With two or more ranks along each axis, programs differ only in shard sizes, and in the owners if any.
            most = world if choice.owners else 2
            shards, times = min(world // choice.replicas, most), min(choice.replicas, most)
            try:
                program = self.program(choice, shards * times, times)
            except OptionError as error:
                if error.subject != "checkpoint":
                    raise
                return
            layout = program.layout if choice.owners else program.layout.over(world, choice.replicas)
            yield self._forecast(replace(program, layout=layout), choice, hardware)

    def program(self, choice: Choice, world: int, replicas: int = 1) -> Program:
        """The rewritten program of a choice for `world` ranks, `replicas` of them along the outer axis.

        Raises:
            OptionError: the checkpoint setting has no effect, or its budget cannot be met.
        """
        before, after = _options_of(choice, self.chunk).pipeline().until(Trait.SCHEDULES)
        first = [step for step in before if Trait.BEFORE_LAYOUT in step.traits]
        shared = self._run((), self._traced, first)
        layout = make_layout(
            self.model,
            STAGES[choice.stage],
            axes_over(self.model, world, replicas),
            self.units,
            Precision(choice.dtype),
            self.whole if choice.owners else None,
            choice.hybrid,
        )
        at_stage = shared.laid_out(layout)
        # Only a checkpoint budget depends on the schedule, and so on prefetch: it must hold for the final program.
        budget = choice.prefetch if choice.checkpoint not in (None, "unit") else None
        head = (choice.stage, choice.checkpoint, world, replicas, choice.hybrid, choice.owners, budget)
        placed = self._run(head, at_stage, [step for step in before if step not in first])
        return self._run((*head, choice.prefetch), placed, after).program

    def _run(self, key: tuple[Any, ...], begun: Verified, passes: Sequence[Pass]) -> Verified:
        """Run `passes` on a program; results are cached by `key`."""
        if key not in self._done:
            self._done[key] = begun.after(passes)
        return self._done[key]

    def _forecast(self, program: Program, choice: Choice, hardware: Hardware) -> Forecast:
        state = model_state(program.layout)
        timeline = simulate(program, hardware, steps=True)
        return Forecast(
            choice=choice,
            world=program.layout.world,
            parameters=state.parameters,
            optimizer=state.moments,
            held=max(live_by_kind(program).values(), key=lambda held: sum(held.values())),
            seconds=timeline.seconds,
            exposed=timeline.exposed,
            hidden=timeline.hidden or 0.0,
            flops=self.flops,
        )
