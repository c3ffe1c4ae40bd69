"""The planner: memory and time of a model under every choice, before any machine is rented.

A model is traced once for each precision; each choice is a pipeline over that program, which the simulator runs on a
profile of hardware. What choices have in common is rewritten once.
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
from zcompile.schedule.option_checks import bytes_of, check_worlds
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Pass, Trait, Verified
from zcompile.tools.choices import CHECKPOINTS, PREFETCHES
from zcompile.tools.choices import STAGES as STAGE_NUMBERS
from zcompile.tools.tracing import trace
from zcompile.torch_internals.dtensor import mesh_size
from zcompile.torch_internals.pytree import tree_leaves

RESERVED = 0.1
"""Share of a device's memory that a plan leaves to what it does not count: workspaces, fragments, libraries."""

Progress = Callable[[str, int, int], None]
"""Called with what is done next, how much is done, and how much there is."""


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
    dtypes: Sequence[torch.dtype | None] | None = None,
    replicas: Sequence[int] = (1,),
    hybrids: Sequence[str] = tuple(Hybrid),
    units: Sequence[str] | None = None,
    whole: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Forecast memory and time of a training step of `model(*args, **kwargs)` on each rank, for every choice.

    Nothing is run: no process group, no GPU, and no memory for a model on meta.

    Args:
        model: A plain module, on any device or on meta, or one that `parallelize_module` has divided over any group.
        args: Of one rank's call: one micro-batch. Tensors may be on meta.
        kwargs: Likewise.
        worlds: Numbers of data-parallel ranks.
        hardware: A `Hardware`, the name of a profile that comes along ("h100"), or the path of one.
        memory_limit: Bytes, or "70 GB", of a rank; by default nine tenths of what the hardware's devices have.
        stages: ZeRO stages to compare.
        prefetches: Numbers of units gathered ahead to compare.
        checkpoints: Settings of `checkpoint=` to compare; one without effect on this model is left out.
        dtypes: Dtypes to compute in to compare, None for the model's own; by default that and the hardware's low one.
        replicas: Ranks along the outer of two dimensions of a mesh to compare, 1 for a mesh of one.
        hybrids: Settings of `shard=` to compare on meshes of two dimensions.
        units: As for `zcompile.compile`.
        whole: Likewise; choices by which all ranks have rows of these parameters are compared, and not recommended.
        progress: Called with what is done next, how much is done, and how much there is.

    Raises:
        OptionError: an option that cannot be meant.
        ProfileError: no such profile, or one that cannot be meant.
        ModelError, CaptureError: see `zcompile.tools.tracing.trace`.
    """
    device, limit = target_of(hardware, memory_limit)
    check_worlds(worlds)
    divided = divisions_of(replicas, hybrids, (True, False) if whole else (False,))
    low = torch.bfloat16 if "bfloat16" in device.flops else torch.float16
    choices = choices_of(dtypes or (None, low), stages, checkpoints, prefetches, divided)
    tell = progress or (lambda *_: None)
    rewriters, forecasts = dict[torch.dtype | None, Rewriter](), list[Forecast]()
    for done, choice in enumerate(choices):
        if choice.dtype not in rewriters:
            tell(f"tracing in {str(choice.dtype or 'its own dtype').removeprefix('torch.')}", done, len(choices))
            traced = trace(model, args, kwargs, dtype=choice.dtype, units=units, whole=whole, device=device.device)
            rewriters[choice.dtype] = Rewriter(model, traced, units, whole)
        tell(str(choice), done, len(choices))
        forecasts += rewriters[choice.dtype].forecasts(choice, list(dict.fromkeys(worlds)), device)
    tell("done", len(choices), len(choices))
    if not forecasts:
        fix = "let None be among them, or give units= of modules that compute something"
        raise OptionError("checkpoints", f"of {list(checkpoints)} none has an effect on this model", fix)
    parts = max(mesh_size(parameter) for parameter in model.parameters())
    tensors = (leaf for leaf in tree_leaves((args, dict(kwargs or {}))) if isinstance(leaf, torch.Tensor))
    types = ", ".join(str(TensorType.make(tensor.dtype, tuple(tensor.shape))) for tensor in tensors)
    return Plan(*name_and_size(model), device, limit, forecasts, types, parts, tuple(whole or ()))


def target_of(hardware: str | Hardware, memory_limit: int | str | None) -> tuple[Hardware, float]:
    """What is planned for, and the bytes that a rank may take of it.

    Raises:
        OptionError: the limit is no size.
        ProfileError: no such profile, or one that cannot be meant.
    """
    device = load_profile(hardware) if isinstance(hardware, str) else hardware
    return device, bytes_of("memory_limit", memory_limit) or (1 - RESERVED) * device.memory


def name_and_size(model: nn.Module) -> tuple[str, int]:
    """What a model is called in a plan, and how many parameters it has."""
    return type(model).__name__, sum(parameter.numel() for parameter in model.parameters())


Division = tuple[int, Hybrid, bool]
"""Ranks along the outer axis, what the two axes divide, and whether there are owners."""


def divisions_of(replicas: Sequence[int], hybrids: Sequence[str], owners: Sequence[bool]) -> list[Division]:
    """All that can be meant: a mesh of one dimension has nothing to choose, and secondary shards have no owners.

    Raises:
        OptionError: one of them is no setting.
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
    divided: Sequence[Division] = ((1, Hybrid.HSDP, False),),
) -> list[Choice]:
    """All of them that can be meant; under stage 0 nothing is gathered, ahead or not, and nothing is divided.

    Raises:
        OptionError: one of them is no setting.
    """
    made = (
        Choice(stage, prefetch, checkpoint, dtype, *(division if stage else ()))
        for dtype in dtypes
        for stage in stages
        for division in divided
        if stage == 3 or division[1] is not Hybrid.HPZ  # where full copies are kept, hpZ is HFSDP
        for checkpoint in checkpoints
        for prefetch in (prefetches if stage else prefetches[:1])
    )
    result = list(dict.fromkeys(made))
    for choice in result:
        _options_of(choice)
    if not result:
        raise OptionError("plan", "has nothing to compare", "give at least one stage, prefetch, checkpoint and dtype")
    return result


def _options_of(choice: Choice) -> Options:
    return Options(stage=choice.stage, prefetch=choice.prefetch, checkpoint=choice.checkpoint, dtype=choice.dtype)


class Rewriter:
    """The programs of one traced model; what they have in common is rewritten once."""

    def __init__(
        self, model: nn.Module, traced: Program, units: Sequence[str] | None, whole: Sequence[str] | None = None
    ) -> None:
        self.model, self.units, self.whole = model, units, whole
        self.flops = sum(aten_cost(node)[0] for node in traced.graph.nodes if node.op == "call_function")
        self._traced = Verified.traced(traced)
        self._done: dict[tuple[Any, ...], Verified] = {}

    def forecasts(self, choice: Choice, worlds: Sequence[int], hardware: Hardware) -> Iterator[Forecast]:
        """What each world takes; nothing where the checkpoint setting has no effect."""
        for world in (world for world in worlds if world % choice.replicas == 0):
            # From two ranks on along each axis, programs differ in the sizes of shards alone; and in who owns what.
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
        """The finished program of a choice, laid out for `world` ranks, so many of them along the outer axis.

        Raises:
            OptionError: the checkpoint setting has no effect, or cannot be met.
        """
        before, behind = _options_of(choice).pipeline().until(Trait.SCHEDULES)
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
        # A budget is kept by the whole of the program, its schedule included; the other settings do not look at it.
        budget = choice.prefetch if choice.checkpoint not in (None, "unit") else None
        head = (choice.stage, choice.checkpoint, world, replicas, choice.hybrid, choice.owners, budget)
        placed = self._run(head, at_stage, [step for step in before if step not in first])
        return self._run((*head, choice.prefetch), placed, behind).program

    def _run(self, key: tuple[Any, ...], begun: Verified, passes: Sequence[Pass]) -> Verified:
        """What `passes` make of a program, made once for each `key`."""
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
