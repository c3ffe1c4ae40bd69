"""Which parameters are gathered together: derived from the module tree, or given by `units=`."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.errors import OptionError, nearest
from zcompile.ir.axis import Axis, axes_of
from zcompile.ir.layout import Hybrid, Layout, Param, Stage, Unit
from zcompile.ir.spelling import identifier
from zcompile.torch_internals.dtensor import local_tensor, mesh_size

UnitChoice = Sequence[str] | Callable[[str, nn.Module], bool]
"""The modules that are units: patterns of their paths, or a predicate of a path and its module."""

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
NORMALISES_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose parameters keep their dtype in mixed precision, as their running statistics do (as in FSDP)."""


def find_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the outermost repeated blocks of `model`, in module order.

    A repeated block is a child with parameters whose class at least two children of the same container have.
    """
    return list(_blocks(model, ""))


def _blocks(module: nn.Module, path: str) -> Iterator[str]:
    kinds = Counter(type(child) for child in module.children() if _has_parameters(child))
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        repeated = isinstance(module, CONTAINERS) and kinds[type(child)] > 1
        if repeated and not isinstance(child, CONTAINERS) and _has_parameters(child):
            yield child_path
        else:
            yield from _blocks(child, child_path)


def blocks_of_names(names: Iterable[str]) -> list[str]:
    """Return paths of repeated blocks inferred from names of parameters: `layers.3` from `layers.3.mlp.weight`."""
    numbered: dict[str, dict[str, None]] = {}
    for name in names:
        if match := re.match(r"(?:(.*?)\.)?(\d+)\.", name):
            numbered.setdefault(match[1] or "", {})[name[: match.end() - 1]] = None
    return [path for paths in numbered.values() if len(paths) > 1 for path in paths]


def match_blocks(model: nn.Module, units: UnitChoice) -> list[str]:
    """Return paths of the modules that `units=` selects, in order; raise OptionError for none or nested ones."""
    paths = {name: module for name, module in model.named_modules() if name and _has_parameters(module)}
    if callable(units):
        result = [path for path, module in paths.items() if units(path, module)]
        if not result:
            fix = f"let it be true for paths such as {next(iter(paths), 'blocks.0')!r}"
            raise OptionError("units", "is a function that is true for no module with parameters", fix)
    else:
        result = _matching(paths, units, "units", "module with parameters")
    for outer in result:
        inner = next((path for path in result if path.startswith(outer + ".")), None)
        if inner:
            raise OptionError("units", f"{inner!r} is inside {outer!r}", "name only one of the two")
    return result


def match_called(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules, by path, that match the patterns of `keep_dtype=` (shell wildcards), in module order.

    Raise OptionError for a pattern without a match, and for a module that is never called or has several dtypes.
    """
    option, fix = "keep_dtype", "give paths of model.named_modules(), such as ['blocks.*.router', 'lm_head']"
    if not _are_patterns(patterns):
        raise OptionError(option, f"{patterns!r} is not a list of paths", fix)
    named = model.named_modules(remove_duplicate=False)  # a module with two paths may be named by either
    paths = {path: module for path, module in named if path and _has_parameters(module)}
    matching = _matching(paths, patterns, option, "module with parameters")
    found = {path: module for module, path in {paths[path]: path for path in matching}.items()}  # each module once
    for path, module in found.items():
        if is_container(module):
            fix = f"name what it holds: '{path}.*'"
            raise OptionError(option, f"{path!r} is a {type(module).__name__}, which is never called", fix)
        if len(dtypes := {str(param.dtype) for param in module.parameters()}) > 1:
            problem = f"{path!r} has parameters of {' and '.join(sorted(dtypes))}"
            raise OptionError(option, problem, "name its modules one by one")
    return found


def _are_patterns(given: object) -> bool:
    """Return True for a collection of strings; not for an iterator, which could be read only once."""
    return isinstance(given, Collection) and not isinstance(given, str) and all(isinstance(text, str) for text in given)


def is_container(module: nn.Module) -> bool:
    """Return True for a module that is never called, such as a ModuleList, ModuleDict or ParameterList."""
    return type(module).forward is nn.Module.forward


def match_params(params: Mapping[str, torch.Tensor], patterns: Sequence[str], option: str = "whole") -> list[str]:
    """Return the names of parameters that match the patterns of an option (shell wildcards), in module order.

    Raise OptionError for a pattern without a match, and for a parameter that tensor parallelism divides.
    """
    fix = "give names of model.named_parameters(), such as [n for n, p in model.named_parameters() if p.ndim == 2]"
    if not _are_patterns(patterns):
        raise OptionError(option, f"{patterns!r} is not a list of names", fix)
    within = "a wildcard stays within one name, as in 'blocks.*.mlp.*.weight'; "
    found = _matching(params, patterns, option, "parameter", within)
    if divided := next((name for name in found if isinstance(params[name], DTensor)), None):
        problem = f"matches {divided!r}, which tensor parallelism divides: no rank has all of it"
        raise OptionError(option, problem, "leave it out, or do not parallelize its module")
    return found


def _matching(paths: Collection[str], patterns: Sequence[str], option: str, kind: str, hint: str = "") -> list[str]:
    """Return the paths that match a pattern, in order; raise OptionError for a pattern that matches none."""
    for pattern in patterns:
        if not any(_matches(path, pattern) for path in paths):
            raise OptionError(option, f"{pattern!r} matches no {kind}", hint + nearest(pattern, paths))
    return [path for path in paths if any(_matches(path, pattern) for pattern in patterns)]


def _matches(path: str, pattern: str) -> bool:
    """Return True if every component of a path matches; wildcards match no dots, so `blocks.*` not `blocks.0.mlp`."""
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatch.fnmatchcase, names, wanted))


AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that `torch.autocast` casts; not float64, for example."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Mixed precision; shards keep the model's dtype.

    `dtype`: floating-point parameters are gathered and computed with in it; None for their own.
    `reduce_dtype`: gradients are averaged in it; None for float32 if `dtype` is given, else the gradient's own.
    `outer_dtype`: averages are sent between replicas in it; None for their own.
    `outer_gather_dtype`: shards are sent along the outer axis in it, if both axes divide them; None for their own.
    """

    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    outer_dtype: torch.dtype | None = None
    outer_gather_dtype: torch.dtype | None = None

    def compute(self, param: torch.Tensor) -> torch.dtype | None:
        """Return the dtype to which `param` is cast for a gather; None if it is not cast."""
        return self.dtype if param.dtype in AUTOCAST and param.dtype != self.dtype else None

    def reduction(self, param: torch.Tensor, compute: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype to which the gradient of `param` is cast for its reduction; None if it is not cast."""
        wanted = self.reduce_dtype or (torch.float32 if self.dtype else None)
        full = compute or param.dtype
        return wanted if param.is_floating_point() and wanted != full else None


def axes_over(model: nn.Module, world: int, replicas: int = 1) -> tuple[Axis, ...]:
    """Return the axes for `world` data-parallel ranks, with a tensor axis if `model` is divided; see `axes_of`."""
    return axes_of(world, max(map(mesh_size, model.parameters()), default=1), replicas=replicas)


def make_layout(
    model: nn.Module,
    stage: Stage,
    axes: tuple[Axis, ...],
    units: UnitChoice | None = None,
    precision: Precision = Precision(),
    whole: Sequence[str] | None = None,
    hybrid: Hybrid = Hybrid.HSDP,
    ignore: Sequence[str] | None = None,
    keep_dtype: Sequence[str] | None = None,
) -> Layout:
    """Return the layout of `model`: one unit per block, and one for each run of parameters between blocks.

    Parameters that match `whole` are each kept by one rank; parameters that match `ignore` are in no unit; parameters
    of modules that match `keep_dtype` are gathered in their own dtype.

    Raises:
        OptionError: `units`, `whole`, `ignore` or `keep_dtype` matches nothing, or something that is not supported.
    """
    kept = _keeping_their_dtype(model)
    if keep_dtype:
        own = {id(param) for module in match_called(model, keep_dtype).values() for param in module.parameters()}
        kept |= {name for name, param in model.named_parameters() if id(param) in own}  # tied ones by first name
    blocks = find_blocks(model) if units is None else match_blocks(model, units)
    params = dict(model.named_parameters())
    for name in match_params(params, ignore, "ignore") if ignore else ():
        del params[name]
    layout = Layout((), stage, axes, hybrid=hybrid)
    layout = layout.with_units(tuple(make_units(params, blocks, layout, precision, kept=kept)))
    return layout.owned(match_params(params, whole)) if whole else layout


def converted(layout: Layout, model: nn.Module, precision: Precision, dtypes: Mapping[str, torch.dtype]) -> Layout:
    """Return the layout of `model` after its parameters are converted to `dtypes`, by name."""
    kept = _keeping_their_dtype(model)

    def in_its_dtype(param: Param) -> Param:
        like = torch.empty(0, dtype=dtypes[param.name], device="meta")
        mixed = replace(precision, dtype=None) if param.name in kept else precision
        compute = mixed.compute(like)
        made = replace(param, dtype=like.dtype, compute_dtype=compute, reduction_dtype=mixed.reduction(like, compute))
        return made.gathered_as(precision.outer_gather_dtype if layout.has_secondary else None)

    params = [sorted(map(in_its_dtype, unit.params), key=_order) for unit in layout.units]
    units = zip(layout.units, params, strict=True)
    made = layout.with_units(tuple(Unit(unit.name, tuple(own), unit.modules) for unit, own in units))
    return made.owned_by({param.name: param.owner for param in layout.params if param.owner is not None})


def _keeping_their_dtype(model: nn.Module) -> set[str]:
    """Return the names of parameters that keep their dtype in mixed precision."""
    return {
        name
        for path, module in model.named_modules()
        if isinstance(module, NORMALISES_BATCHES)
        for name in (f"{path}.weight", f"{path}.bias")
    }


def make_units(
    params: Mapping[str, torch.Tensor],
    blocks: Sequence[str],
    layout: Layout,
    precision: Precision,
    *,
    kept: Set[str] = frozenset(),
    taken: Set[str] = frozenset(),
) -> Iterator[Unit]:
    """Yield units of named parameters for a layout: one per block, and one for each run between blocks.

    Parameters in `kept` keep their dtype; identifiers in `taken` belong to other units.
    """
    groups: list[tuple[str, list[Param]]] = []
    for name, param in params.items():
        block = next((path for path in blocks if name.startswith(path + ".")), "")
        index = next((i for i, (path, _) in enumerate(groups) if block and path == block), None)
        if index is None and (block or not groups or groups[-1][0]):
            groups.append((block, []))
        mixed = replace(precision, dtype=None) if name in kept else precision
        groups[-1 if index is None else index][1].append(_param(name, param, layout, mixed))
    return _named(groups, {*taken})


def _named(groups: list[tuple[str, list[Param]]], taken: set[str]) -> Iterator[Unit]:
    """Yield units with unique names; a unit between blocks is named after the largest of its modules."""
    for block, params in groups:
        sizes = Counter[str]()
        for param in params:
            sizes[param.name.rpartition(".")[0]] += param.numel
        modules = (block,) if block else tuple(sizes)
        name = block or max(sizes, key=sizes.__getitem__) or max(params, key=lambda param: param.numel).name
        while identifier(name) in taken:
            name += "_"
        taken.add(identifier(name))
        # Whole parameters last, small ones after large ones: packed parameters must be adjacent in a shard's buffer.
        yield Unit(name, tuple(sorted(params, key=_order)), modules)


def _order(param: Param) -> tuple[bool, str, str, bool, str]:
    """Return the sort key of a parameter in its unit, which makes parameters adjacent that may be packed together."""
    return not param.shards, str(param.dtype), str(param.full_dtype), param.is_small, str(param.outer_gather_dtype)


def _param(name: str, param: torch.Tensor, layout: Layout, precision: Precision) -> Param:
    held = local_tensor(param)  # the layout of a tensor-parallel parameter describes this rank's part
    sharded = layout.stage.optimizer_sharded and held.dim() > 0 and held.numel() > 0
    compute = precision.compute(param)
    made = Param(
        name,
        tuple(held.shape),
        param.dtype,
        param.requires_grad,
        layout.shards if sharded else 0,
        compute,
        precision.reduction(param, compute),
        outer_dtype=precision.outer_dtype if sharded else None,
    )
    return made.gathered_as(precision.outer_gather_dtype if layout.has_secondary else None)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
