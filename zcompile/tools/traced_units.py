"""Trace the units of a model for plans: for any degree of tensor parallelism and any micro-batch size.

A model of many equal blocks is traced in full once, which shows the blocks that compute the same. From then on a
reduced model with up to two of each is traced instead, provided that a trial trace of it has the same units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from zcompile.cost.divided import PipelineCosts
from zcompile.cost.hardware import Hardware, guess_for
from zcompile.engine.train_steps import FlatResults
from zcompile.errors import GroupError, ModelError
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.program import Program
from zcompile.model.units import find_blocks
from zcompile.pipelining.guard import check_traced
from zcompile.schedule.default_pipeline import of_sequences
from zcompile.schedule.pipeline import Verified
from zcompile.tools.tracing import trace
from zcompile.tools.unit_costs import UnitStages, costs_of_units
from zcompile.torch_internals.pytree import tree_map_only


@dataclass
class TracedUnits:
    """A model whose units are traced on demand.

    Attributes:
        model: A plain module; it is not changed.
        args: Positional arguments of a call with the smallest micro-batch.
        kwargs: Keyword arguments of this call.
        dtype: Dtype to compute in; None for the model's own.
        units: As for `zcompile.compile`.
        hardware: The hardware that costs are predicted for.
        plan: Tensor-parallel plan; None for no tensor parallelism.
        loss_fn: Called as `loss_fn(model, *args, **kwargs)`, returns the loss; None: the model returns it.
        sequence: The number of ranks that divide the tokens.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype | None
    units: Sequence[str] | None
    hardware: Hardware
    plan: Mapping[str, ParallelStyle] | None = None
    loss_fn: Callable[..., Any] | None = None
    sequence: int = 1
    _whole: dict[int, tuple[UnitStages, tuple[int, ...]]] = field(default_factory=dict)
    """By degree of tensor parallelism, all units, traced for any size, and which of them the reduced model has."""
    _programs: dict[tuple[int, int, frozenset[str], bool], Program] = field(default_factory=dict)
    """The traced steps, as they are for any number of ranks that divide tokens."""
    _traced: dict[tuple[int, int], UnitStages] = field(default_factory=dict)
    _costs: dict[tuple[int, int, bool], PipelineCosts] = field(default_factory=dict)

    def costs(self, parts: int, times: int, *, checkpoint: bool) -> PipelineCosts:
        """Costs of the units on a rank with tensor parallelism of degree `parts`, for `times` the smallest micro-batch.

        Raises:
            CaptureError, OptionError: see `zcompile.tools.tracing.trace`; or the result is not a loss, or the tokens
                cannot be divided.
            ModelError: see there; or the model cannot be copied or parallelized.
            GroupError: a process group exists, and tensor parallelism is traced with a fake group.
        """
        key = parts, times, checkpoint
        if key not in self._costs:
            units = self._of(parts, times)
            whole, kept = self._whole[parts]
            alike: Sequence[int] = range(len(units.names))
            if len(units.names) < len(whole.names):
                first = {whole.keys[unit]: number for number, unit in enumerate(kept)}
                alike = [first[key] for key in whole.keys]
            else:
                whole = units
            self._costs[key] = costs_of_units(whole, checkpoint=checkpoint, like=units, alike=alike)
        return self._costs[key]

    def over(self, sequence: int) -> TracedUnits:
        """Return the same model, whose tokens so many ranks divide; its units need not be alike where others' are."""
        return replace(self, sequence=sequence, _whole={}, _traced={}, _costs={})

    def _of(self, parts: int, times: int) -> UnitStages:
        if (parts, times) not in self._traced:
            reference = self._whole.get(parts) or next(iter(self._whole.values()), None)
            shorter = reference and self._shorter(parts, times, *reference)
            if shorter is None:
                whole = self._trace(parts, times)
                kept = _some_of_each(whole)
                shorter = self._shorter(parts, times, whole, kept)
                if shorter is None or shorter.keys != tuple(whole.keys[unit] for unit in kept):
                    shorter, kept = whole, tuple(range(len(whole.names)))
                reference = whole, kept
            assert reference is not None, "what is shorter was compared with it"
            self._traced[parts, times], self._whole[parts] = shorter, reference
        return self._traced[parts, times]

    def _shorter(self, parts: int, times: int, whole: UnitStages, kept: Sequence[int]) -> UnitStages | None:
        """Trace the reduced model; None if nothing can be left out, or its units differ."""
        blocks = find_blocks(self.model)
        dropped = frozenset(name for unit, name in enumerate(whole.names) if unit not in kept)
        if not dropped or not dropped.issubset(blocks) or self._names_blocks():
            return None
        try:
            found = self._trace(parts, times, without=dropped)
        except Exception:  # code that relies on all blocks may raise anything
            return None
        wanted = [whole.stages[unit].boundary for unit in kept]
        return found if [one.boundary.shape for one in found.stages] == [one.shape for one in wanted] else None

    def _names_blocks(self) -> bool:
        """True if options name blocks by index, which would mean other blocks in the reduced model."""
        return any(part.isdecimal() for name in (*(self.units or ()), *(self.plan or ())) for part in name.split("."))

    def _trace(self, parts: int, times: int, without: frozenset[str] = frozenset()) -> UnitStages:
        key = parts, times, without, self.sequence > 1
        if key not in self._programs:
            self._programs[key] = self._program(parts, times, without)
        traced = self._programs[key]
        if self.sequence > 1:
            axis = Axis("sp", AxisKind.SEQUENCE, self.sequence, parts)
            traced = replace(traced, layout=replace(traced.layout, axes=(*traced.layout.axes, axis)))
            traced = Verified.traced(traced).after(of_sequences("auto", self.hardware)).program
        return UnitStages.of(traced, guess_for(self.hardware.device), self.hardware)

    def _program(self, parts: int, times: int, without: frozenset[str]) -> Program:
        model = _without(_copied(self.model), without)

        def larger(tensor: torch.Tensor) -> torch.Tensor:
            shape = (tensor.shape[0] * times, *tensor.shape[1:]) if tensor.dim() else tensor.shape
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        args, kwargs = tree_map_only(torch.Tensor, larger, (tuple(self.args), dict(self.kwargs)))
        with _divided(model, parts, self.plan):
            device, results = self.hardware.device, FlatResults()
            given = {"dtype": self.dtype, "units": self.units, "loss_fn": self.loss_fn, "chunks": self.sequence > 1}
            traced = trace(model, args, kwargs, device=device, results=results, **given)  # type: ignore[arg-type]
        check_traced(traced, len(results.names or ()))
        return traced


def _some_of_each(whole: UnitStages) -> tuple[int, ...]:
    """Indices of the first two of all equal units: `find_blocks` finds only blocks that repeat."""
    found: dict[str, list[int]] = {}
    for number, key in enumerate(whole.keys):
        found.setdefault(key, []).append(number)
    return tuple(sorted(number for numbers in found.values() for number in numbers[:2]))


def _copied(model: nn.Module) -> nn.Module:
    """A copy of the model with parameters on meta.

    Raises:
        ModelError: it cannot be copied.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        problem = f"cannot be copied for tracing: {type(error).__name__}: {error}"
        raise ModelError(type(model).__name__, problem, "make it work with copy.deepcopy") from error


def _without(model: nn.Module, blocks: Collection[str]) -> nn.Module:
    """Delete some blocks of `model`, in place."""
    for path in sorted(blocks, key=lambda path: int(path.rpartition(".")[2]), reverse=True):  # deletion renumbers
        container, _, name = path.rpartition(".")
        del model.get_submodule(container)[int(name)]  # type: ignore[operator]
    return model


def check_no_group() -> None:
    """Raise GroupError if there is a process group already."""
    if dist.is_initialized():
        fix = "plan before init_process_group, in a process of its own, or without tensor parallelism"
        raise GroupError("process group", "exists, and tensor parallelism is traced with a fake group", fix)


@contextmanager
def _divided(model: nn.Module, parts: int, plan: Mapping[str, ParallelStyle] | None) -> Iterator[None]:
    """Parallelize the model over a fake group of `parts` ranks, which exists until exit.

    Raises:
        GroupError: there is a process group already.
        ModelError: the model cannot be parallelized.
    """
    if parts == 1:
        yield
        return
    check_no_group()
    dist.init_process_group("fake", rank=0, world_size=parts, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (parts,), mesh_dim_names=("tp",))
        try:
            parallelize_module(model, mesh, dict(plan or {}))
        except Exception as error:
            problem = f"cannot be parallelized over {parts} ranks: {type(error).__name__}: {error}"
            raise ModelError(type(model).__name__, problem, "give a valid plan for parallelize_module") from error
        yield
    finally:
        dist.destroy_process_group()
