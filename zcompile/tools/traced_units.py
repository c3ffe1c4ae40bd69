"""The units of a model as they are traced for plans: of any part of tensor parallelism, and any size of batch.

A model of many equal blocks is traced as a whole once. That shows which of them compute the same, and a model with one
of each stands for it from then on: if it was traced, too, and has the same units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from zcompile.model.units import find_blocks
from zcompile.pipelining.guard import check_traced
from zcompile.tools.tracing import trace
from zcompile.tools.unit_costs import UnitStages, costs_of_units
from zcompile.torch_internals.pytree import tree_map_only


@dataclass
class TracedUnits:
    """A model whose units are traced as they are asked for.

    Attributes:
        model: A plain module; it is not changed.
        args: Of one call; rows are those of the smallest micro-batch.
        kwargs: Likewise.
        dtype: To compute in.
        units: As for `zcompile.compile`.
        hardware: What it runs on.
        plan: By what tensor parallelism divides it; None if it does not.
        loss_fn: Called as `loss_fn(model, *args, **kwargs)`, it gives the loss; None: the model does.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype | None
    units: Sequence[str] | None
    hardware: Hardware
    plan: Mapping[str, ParallelStyle] | None = None
    loss_fn: Callable[..., Any] | None = None
    _whole: UnitStages | None = None
    """All units, of the first size that was asked for."""
    _kept: tuple[int, ...] = ()
    """The units of the model that stands for the whole."""
    _traced: dict[tuple[int, int], UnitStages] = field(default_factory=dict)
    _costs: dict[tuple[int, int, bool], PipelineCosts] = field(default_factory=dict)

    def costs(self, parts: int, times: int, *, checkpoint: bool) -> PipelineCosts:
        """What the units of one of `parts` of the model take, for a micro-batch `times` as large.

        Raises:
            CaptureError, OptionError: see `zcompile.tools.tracing.trace`; or what it gives is no loss.
            ModelError: see there; or it cannot be copied, or divided so.
            GroupError: there is a process group, and parts of a model are traced with one that stands for others.
        """
        key = parts, times, checkpoint
        if key not in self._costs:
            units, whole = self._of(parts, times), self._whole
            assert whole is not None, "what was traced first is the whole"
            alike: Sequence[int] = range(len(units.names))
            if len(units.names) < len(whole.names):
                first = {whole.keys[unit]: number for number, unit in enumerate(self._kept)}
                alike = [first[key] for key in whole.keys]
            else:
                whole = units
            self._costs[key] = costs_of_units(whole, checkpoint=checkpoint, like=units, alike=alike)
        return self._costs[key]

    def _of(self, parts: int, times: int) -> UnitStages:
        if (parts, times) not in self._traced:
            if self._whole is None:
                self._whole = self._trace(parts, times)
                self._kept = _some_of_each(self._whole)
                shorter = self._shorter(parts, times)
                if shorter is None or shorter.keys != tuple(self._whole.keys[unit] for unit in self._kept):
                    self._kept = tuple(range(len(self._whole.names)))
                    shorter = self._whole
                self._traced[parts, times] = shorter
            else:
                self._traced[parts, times] = self._shorter(parts, times) or self._trace(parts, times)
        return self._traced[parts, times]

    def _shorter(self, parts: int, times: int) -> UnitStages | None:
        """The units of the model that stands for the whole; None if there is none, or it does not."""
        assert self._whole is not None, "what was traced first is the whole"
        blocks, names = find_blocks(self.model), self._whole.names
        dropped = {name for unit, name in enumerate(names) if unit not in self._kept}
        if not dropped or not dropped.issubset(blocks) or self._names_blocks():
            return None
        try:
            found = self._trace(parts, times, without=dropped)
        except Exception:  # code that counts on all of its blocks raises whatever it likes
            return None
        wanted = [self._whole.stages[unit].boundary for unit in self._kept]
        return found if [one.boundary.shape for one in found.stages] == [one.shape for one in wanted] else None

    def _names_blocks(self) -> bool:
        """True if single blocks are named, so that a model with others would be treated otherwise."""
        return any(part.isdecimal() for name in (*(self.units or ()), *(self.plan or ())) for part in name.split("."))

    def _trace(self, parts: int, times: int, without: set[str] = frozenset()) -> UnitStages:  # type: ignore[assignment]
        model = _without(_copied(self.model), without)

        def larger(tensor: torch.Tensor) -> torch.Tensor:
            shape = (tensor.shape[0] * times, *tensor.shape[1:]) if tensor.dim() else tensor.shape
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        args, kwargs = tree_map_only(torch.Tensor, larger, (tuple(self.args), dict(self.kwargs)))
        with _divided(model, parts, self.plan):
            device, results = self.hardware.device, FlatResults()
            dtype, units, loss_fn = self.dtype, self.units, self.loss_fn
            traced = trace(
                model, args, kwargs, dtype=dtype, units=units, device=device, loss_fn=loss_fn, results=results
            )
        check_traced(traced, len(results.names or ()))
        return UnitStages.of(traced, guess_for(self.hardware.device), self.hardware)


def _some_of_each(whole: UnitStages) -> tuple[int, ...]:
    """The units that stand for all that are equal: two, as a block is what there are several of."""
    found: dict[str, list[int]] = {}
    for number, key in enumerate(whole.keys):
        found.setdefault(key, []).append(number)
    return tuple(sorted(number for numbers in found.values() for number in numbers[:2]))


def _copied(model: nn.Module) -> nn.Module:
    """A copy that has no memory for parameters.

    Raises:
        ModelError: it cannot be copied.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        problem = f"cannot be copied to be traced: {type(error).__name__}: {error}"
        raise ModelError(type(model).__name__, problem, "let copy.deepcopy work on it") from error


def _without(model: nn.Module, blocks: set[str]) -> nn.Module:
    """`model` without some of its blocks."""
    for path in sorted(blocks, key=lambda path: int(path.rpartition(".")[2]), reverse=True):  # those behind move up
        container, _, name = path.rpartition(".")
        del model.get_submodule(container)[int(name)]  # type: ignore[operator]
    return model


def check_no_group() -> None:
    """Raise GroupError where there is a process group already."""
    if dist.is_initialized():
        fix = "plan before init_process_group, in a process of its own, or without tensor parallelism"
        raise GroupError("process group", "is there, and parts of a model are traced with one that is not real", fix)


@contextmanager
def _divided(model: nn.Module, parts: int, plan: Mapping[str, ParallelStyle] | None) -> Iterator[None]:
    """A model that tensor parallelism has divided, with a group that stands for other ranks.

    Raises:
        GroupError: there is a group already.
        ModelError: it cannot be divided.
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
            problem = f"cannot be divided into {parts} parts: {type(error).__name__}: {error}"
            raise ModelError(type(model).__name__, problem, "give a plan for parallelize_module that does") from error
        yield
    finally:
        dist.destroy_process_group()
