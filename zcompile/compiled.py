"""`zcompile.compile`: shard a model's parameters and give back a module that is called like the model."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zcompile._torch import local_tensor, replace_state_dict, tree_map_only
from zcompile.engine.automatic_shard import choose_shard
from zcompile.engine.calls.entries import taken_out
from zcompile.engine.calls.fragments import Tree, tree_of
from zcompile.engine.engine import Engine
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.optimizers import check_optimizers, point_at_shards, watch_optimizers
from zcompile.engine.reported import Reported
from zcompile.engine.reports import Reports
from zcompile.engine.state_places import shard_memory
from zcompile.errors import ModelError, OptionError, ParameterError, StateError
from zcompile.ir.layout import STAGES, Layout
from zcompile.ir.program import Program
from zcompile.model.conversion import check_unhooked, convert
from zcompile.model.materialise import check_weights
from zcompile.model.model_copies import copy_model
from zcompile.model.sharding import Retired, Site, shard_model
from zcompile.model.tensor_kinds import check_kinds
from zcompile.model.tensor_parallel import check_replicated, model_parallel
from zcompile.model.units import AUTOCAST, UnitChoice, converted, make_layout
from zcompile.model.weights import Source, Weights, open_weights
from zcompile.runtime.agreement import Agreement, told_to_others
from zcompile.runtime.async_work import TrafficMeter
from zcompile.runtime.gradients.outside import Outside
from zcompile.runtime.groups import (
    Communicator,
    as_one,
    axes_of_mesh,
    check_inside,
    default_device,
    ranks_of,
    resolve_mesh,
)
from zcompile.runtime.shards import UnitShards
from zcompile.runtime.tensors.placement import ModelParallel
from zcompile.runtime.tensors.sharded_state import model_state_of
from zcompile.schedule.option_checks import (
    AUTO,
    check_axes,
    check_dtype,
    check_gathered,
    check_outer,
)
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal, Pass, Pipeline
from zcompile.state.model_state import ModelState, for_others
from zcompile.state.savable import Savable


def compile(
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    stage: int = 3,
    prefetch: int | Literal["auto"] = 2,
    mesh: DeviceMesh | None = None,
    shard: str | None = None,
    units: UnitChoice | None = None,
    whole: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    outer_dtype: torch.dtype | None = None,
    outer_gather_dtype: torch.dtype | None = None,
    checkpoint: str | int | float | None = None,
    memory_limit: int | str | None = None,
    bucket: int | str | None = None,
    arenas: bool = False,
    offload_activations: str | None = None,
    partition_activations: bool = False,
    offload_parameters: str | None = None,
    cuda_graphs: bool = False,
    passes: Pipeline | Mapping[str, Pass | None] | None = None,
    backend: str = "inductor",
    dump: str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    weights: Source | None = None,
) -> CompiledModule:
    """Shard `model` by ZeRO, with rank 0's values, into a module that runs its training step as a program. Collective.

    Args:
        model: Any module, all on one device or on meta, where its own code gives values. Its code is not touched.
        optimizer: One or several built over the model's parameters: pointed at the shards. Later ones need no mention.
        stage: What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        prefetch: How many units are gathered ahead of the one that computes; "auto": by the cost model, once measured.
        mesh: The data-parallel `DeviceMesh`, by default all ranks; of two dimensions, "replicate" repeats the shards.
        shard: What its two dimensions divide: "hsdp" (default), "hfsdp", "hpz", "flat" (docs/stages.md), or "auto".
        units: Module paths (shell wildcards) whose parameters are gathered together, or a function of a path and its
            module that is true for them; by default the repeated blocks.
        whole: Parameters (shell wildcards) that one rank each keeps whole, for Muon, Shampoo or SOAP; stages 1 to 3.
        ignore: Parameters (shell wildcards) that stay as they are on each rank, values and gradients: left to the user.
        dtype: In which parameters are gathered and computed with, under `torch.autocast`; shards keep the model's.
        reduce_dtype: In which gradients are averaged; by default float32 where `dtype` is given.
        output_dtype: What results of a call of 16 or 32 bits are cast to; by default they are as the model gives them.
        outer_dtype: bfloat16 or int8, in which averages travel along a mesh's "replicate"; changes numbers.
        outer_gather_dtype: The same for shards that "hfsdp" and "hpz" gather along it.
        checkpoint: What is computed again: "unit", all but units' inputs; "2 GiB", 0.6 of a peak, "auto": what must be.
        memory_limit: Bytes, or "2 GiB", beside shards and optimizer state: stage 3 keeps as many units full as fit.
        bucket: Bytes, or "25 MiB", of what is copied at a time to be sent; by default the cost model decides.
        arenas: Keep memory from step to step for what is gathered, copied to be sent or saved as a checkpoint.
        offload_activations: Where what is saved for the backward waits: "cpu", for a GPU, or "disk:FOLDER", for a CPU.
        partition_activations: Of what all ranks of a tensor-parallel mesh save for the backward, keep a part on each.
        offload_parameters: Where shards are: "cpu", pinned memory, for a GPU; "disk:FOLDER", a file there, for a CPU.
        cuda_graphs: Capture the compute between communications as CUDA graphs, over parameters at fixed places.
        passes: A whole `Pipeline`, or changes to the default one by name: a `Pass` replaces or adds, None leaves out.
        backend: `"inductor"` compiles regions; `"eager"` runs them as they are, bit for bit like eager PyTorch.
        dump: A folder for the programs' text after every pass; by default the environment's ZCOMPILE_DUMP, if set.
        record: A folder for a recording of the first training step, which `zcompile replay` runs again.
        weights: Values to start from, by name: a mapping, or the path of a file or folder; read unit by unit.

    Raises: OptionError, PipelineError, ModelError, OptimizerError, GroupError or AgreementError, for what does not fit.
    """
    check_dtype("output_dtype", output_dtype)
    parts = Parts(units, whole, ignore)
    return _compiled(model, locals(), mesh, parts, optimizer, weights, output_dtype)


class Parts(NamedTuple):
    """What of a model is treated in which way: the options of these names."""

    units: UnitChoice | None
    whole: Sequence[str] | None
    ignore: Sequence[str] | None


class _Divided(NamedTuple):
    """A model as it is to be divided, as far as a rank knows alone."""

    asked: Options
    remarks: Sequence[str]
    parallel: ModelParallel | None
    communicator: Communicator
    layout: Layout


def _divided(
    model: nn.Module,
    asked: Options,
    mesh: DeviceMesh | None,
    parts: Parts,
) -> _Divided:
    check_kinds(model)
    asked, remarks = _settled(model, asked, mesh, parts)
    parallel = model_parallel(model, mesh, flat=asked.divides_outside)
    communicator = _communicator(model, asked, mesh, parallel)
    check_outer(asked.outer_dtype, communicator.mesh.ndim)
    check_axes(asked.shard, communicator.mesh.ndim, whole=bool(parts.whole))
    layout = _layout(model, asked, communicator.mesh, parallel, parts)
    for name in _ignored(model, layout):
        if model.get_parameter(name).is_meta:
            fix = "give it values before zcompile.compile, or do not ignore it"
            raise OptionError("ignore", f"leaves {name} to you, which is on the meta device", fix)
    return _Divided(asked, remarks, parallel, communicator, layout)


def _compiled(
    model: nn.Module,
    given: Mapping[str, Any],
    mesh: DeviceMesh | None,
    parts: Parts,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    weights: Source | None,
    output_dtype: torch.dtype | None,
) -> CompiledModule:
    with told_to_others(lambda: ranks_of(mesh)):
        optimizers = _optimizers(optimizer, model)
        asked, remarks, parallel, communicator, layout = _divided(model, Options.among(given), mesh, parts)
    agreement = _agreed(communicator, [str(asked), *_model_lines(model, layout)])
    check_inside(communicator.mesh, asked.hybrid)
    check_gathered(layout, asked.outer_gather_dtype)
    read = None if weights is None else agreement.attempt("the weights", lambda: open_weights(weights))[0]
    everyone = agreement
    if parallel is not None:
        everyone = Agreement(Communicator(parallel.ranks, communicator.device))
        parallel = _checked_parallel(model, parallel, everyone, asked, read, communicator.rank)
    elif asked.partition_activations:
        problem = "is for models that a model-parallel mesh divides, and no parameter of this one is a DTensor"
        raise OptionError("partition_activations", problem, "call parallelize_module before, or leave it out")
    # What can fail comes before the model is touched.
    if read is not None:
        _check_weights(read, model, agreement)
    rank = communicator.dividing.rank
    memory = shard_memory(asked, layout, communicator.device, rank, agreement)
    layout = replace(layout, away=memory.is_away)
    runtime = ModelRuntime(layout, communicator, agreement, asked, parallel, everyone)
    runtime.remarks += remarks
    runtime.output_dtype = output_dtype
    engine = Engine(runtime, title=type(model).__name__)
    shards, sites, retired = shard_model(model, layout, communicator, read, parallel, memory)
    point_at_shards(optimizers, shards.values(), retired)
    runtime.has_optimizer_state = any(optimizer.state for optimizer in optimizers)
    return _over(model, engine, shards, sites, retired)


def _over(
    model: nn.Module, engine: Engine, shards: Mapping[str, UnitShards], sites: Sequence[Site], retired: Retired
) -> CompiledModule:
    """The compiled module of a model that has shards in the place of its parameters."""
    runtime = engine.runtime
    runtime.extend((), shards)
    if not runtime.layout.stage.optimizer_sharded and runtime.layout.world > 1:
        Outside(shards, runtime.delivery).watch()
    # The model's state is that of all ranks that have a part of it.
    ignored = _ignored(model, runtime.layout)
    state = ModelState(model, runtime.everyone.communicator, runtime.everyone, runtime.options.stage, ignored)
    return CompiledModule(model, engine, sites, retired, state)


def _copied(model: nn.Module, tree: Tree, memo: dict[int, Any]) -> CompiledModule:
    """A compiled module of its own: a copy of the model, over copies of its shards. Collective."""
    before = tree.engine.runtime
    # Beside the dump, or the recording, of the model that is copied another one would take its place.
    asked = replace(before.options, dump="", record=None)
    communicator = Communicator(before.communicator.mesh, before.communicator.device, asked.hybrid)
    agreement = _agreed(communicator, ["a copy", str(asked), *_model_lines(model, before.layout)])
    parallel, everyone = None if before.tensor is None else before.tensor.parallel, agreement
    if parallel is not None:
        everyone = Agreement(Communicator(parallel.ranks, communicator.device))
    trainable = {site.name: site.shard.requires_grad for site in tree.sites}
    layout = before.layout.with_trainable(trainable)
    memory = shard_memory(asked, layout, communicator.device, communicator.dividing.rank, agreement)
    runtime = ModelRuntime(layout, communicator, agreement, asked, parallel, everyone)
    runtime.output_dtype = before.output_dtype
    engine = Engine(runtime, title=type(model).__name__)
    with taken_out(tree.entries):
        copied, shards, sites = copy_model(model, layout, before.shards, tree.sites, communicator, memory, memo)
    return _over(copied, engine, shards, sites, tree.retired)


def _ignored(model: nn.Module, layout: Layout) -> list[str]:
    """The parameters that are in no unit."""
    known = {param.name for param in layout.params}
    return [name for name, _ in model.named_parameters() if name not in known]


def _layout(
    model: nn.Module,
    asked: Options,
    mesh: DeviceMesh,
    parallel: ModelParallel | None,
    parts: Parts,
) -> Layout:
    axes = axes_of_mesh(mesh, None if parallel is None else parallel.mesh)
    stage, (units, whole, ignore) = STAGES[asked.stage], parts
    return make_layout(model, stage, axes, units, asked.precision, whole, asked.hybrid, ignore)


def _settled(
    model: nn.Module,
    asked: Options,
    mesh: DeviceMesh | None,
    parts: Parts,
) -> tuple[Options, list[str]]:
    """Options without shard="auto", and what is said of the choice. Collective where there is one."""
    if asked.shard != AUTO:
        return asked, []
    parallel = model_parallel(model, mesh)
    communicator = _communicator(model, asked, mesh, parallel)
    if communicator.outside is None:
        return replace(asked, shard=None), []

    def layout_of(shard: str) -> Layout:
        settled = replace(asked, shard=shard)
        laid_over = as_one(communicator.mesh) if settled.has_one_axis else communicator.mesh
        return _layout(model, settled, laid_over, parallel, parts)

    held = sum(local_tensor(p).nbytes for p in model.parameters() if not p.is_meta)
    others = (None, None) if parallel is None else (parallel.mesh, parallel.ranks)
    tensor, everyone = (None if one is None else Communicator(one, communicator.device) for one in others)
    choice = choose_shard(
        asked, communicator, layout_of, whole=bool(parts.whole), held=held, model_parallel=tensor, everyone=everyone
    )
    return replace(asked, shard=choice.chosen.shard), [str(choice)]


def _check_weights(weights: Weights, model: nn.Module, agreement: Agreement) -> None:
    """Compare the weights with the model on all ranks; the first one says what will be rounded."""
    rounded, _ = agreement.attempt("the weights", lambda: check_weights(weights, model))
    if rounded and agreement.communicator.rank == 0:
        warnings.warn(f"zcompile: weights {rounded}", stacklevel=4)


def _communicator(
    model: nn.Module, asked: Options, mesh: DeviceMesh | None, parallel: ModelParallel | None
) -> Communicator:
    device = _device(model, mesh)
    mesh = resolve_mesh(mesh, device, None if parallel is None else parallel.mesh)
    return Communicator(as_one(mesh) if asked.has_one_axis else mesh, device, asked.hybrid)


def _checked_parallel(
    model: nn.Module, parallel: ModelParallel, everyone: Agreement, asked: Options, weights: Weights | None, rank: int
) -> ModelParallel:
    if weights is not None:
        fix = "load them before parallelize_module, or with load_full_state_dict afterwards"
        raise OptionError("weights", "cannot be read into a tensor-parallel model", fix)
    everyone.reach("the options", [str(asked)])
    return check_replicated(model, parallel, everyone, first=rank == 0)


def _optimizers(given: Optimizer | Sequence[Optimizer] | None, model: nn.Module) -> Sequence[Optimizer]:
    optimizers = [given] if isinstance(given, Optimizer) else given or ()
    check_optimizers(optimizers, model)
    return optimizers


def _agreed(communicator: Communicator, lines: Sequence[str]) -> Agreement:
    """What ranks agree by, once they have the same model."""
    agreement = Agreement(communicator)
    agreement.reach("the model", lines)
    return agreement


def _device(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """The device of the model's parameters, or of its buffers if it has none; of what is on meta the one it is for."""
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ModelError(name, "has a gradient, which would be lost", "step or zero_grad() before zcompile.compile")
        if not param.is_meta:
            devices.setdefault(param.device, name)
    if next(model.parameters(), None) is None:
        devices = {buffer.device: name for name, buffer in reversed([*model.named_buffers()]) if not buffer.is_meta}
    _refuse_shared_storage(model)
    if len(devices) > 1:
        problem = ", ".join(f"{name} is on {device}" for device, name in devices.items())
        raise ModelError("the model", f"is on several devices: {problem}", "move it to one: model.to(device)")
    return next(iter(devices)) if devices else default_device(mesh)


def _refuse_shared_storage(model: nn.Module) -> None:
    """Two parameters in one memory are one to an optimizer, and would be two once sharded."""
    places = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, n)
        for n, p in ((name, local_tensor(param)) for name, param in model.named_parameters())
        if p.numel() and not p.is_meta
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(places):
        if start < end:
            fix = "tie them by one Parameter: b.weight = a.weight"
            raise ModelError(other, f"shares its memory with {name}, but is another Parameter", fix)


def _model_lines(model: nn.Module, layout: Layout) -> list[str]:
    return [*layout.lines, *(f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers())]


def _forward_like(model: nn.Module, tree: Tree) -> Callable[..., Any]:
    """A function that calls the model, and has its signature."""
    output_dtype = tree.engine.runtime.output_dtype

    def cast(result: torch.Tensor) -> torch.Tensor:
        return result.to(output_dtype) if result.dtype in AUTOCAST else result

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = tree.run(tree.root, args, kwargs)
        return result if output_dtype is None else tree_map_only(torch.Tensor, cast, result)

    forward = torch.compiler.disable(forward, reason="it is compiled by zcompile already")
    forward.__dict__["__signature__"] = inspect.signature(model.forward)
    return forward


def compiled_of(model: nn.Module) -> CompiledModule | None:
    """What `model` was compiled into, if it was."""
    tree = None if isinstance(model, CompiledModule) else tree_of(model)
    return model if isinstance(model, CompiledModule) else tree.face if tree is not None else None  # type: ignore[return-value]


def options_of(compiled: CompiledModule) -> Options:
    """What it was compiled with, but for what `units=`, `whole=` and `ignore=` name.

    No attribute: a model may have options of its own.
    """
    return compiled._engine.runtime.options


_CONTAINER = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__", "__reversed__")
"""What Python looks for in the class of an object alone."""


def _special(name: str) -> Callable[..., Any]:
    """A method that is the model's of this name."""

    def method(self: CompiledModule, *args: Any) -> Any:
        if name == "__setitem__":
            self._tree.refuse_stranger(str(args[0]), args[1])
        return getattr(type(self._model), name)(self._model, *args)

    method.__name__ = name
    return method


class CompiledModule(Savable, Reported, nn.Module):
    """A model whose parameters are shards; called like the model, it runs the compiled programs.

    It shows the model's own tree: parameters, buffers, modules and state under the model's own names.
    """

    _model: nn.Module
    _engine: Engine
    _tree: Tree
    _model_state: ModelState

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        sites: Sequence[Site],
        retired: Retired,
        state: ModelState,
    ) -> None:
        super().__init__()
        # Seen through object.__setattr__, the model is no submodule: names would begin with its attribute's name.
        object.__setattr__(self, "_model", model)
        for tree in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, tree, getattr(model, tree))
        object.__setattr__(self, "training", model.training)
        object.__setattr__(self, "_engine", engine)
        object.__setattr__(self, "_tree", Tree(model, engine, sites, retired))
        object.__setattr__(self, "_model_state", state)
        self._tree.face = self
        # With the signature of the model's own, by which trainers tell what of a batch it takes.
        object.__setattr__(self, "forward", _forward_like(model, self._tree))
        replace_state_dict(model, model_state_of)
        watch_optimizers(self._tree, engine.runtime, dict(retired))  # as long as there is a module to call

    # -- calling --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Collective: every rank calls it, with batches of its own of any size.

        What cannot be traced into one graph runs as several programs with Python between them, and a warning says so.

        Raises:
            CaptureError: the model's graph cannot be sharded.
            ProgramError, PipelineError: the rewriting went wrong; nothing has run.
            AgreementError: another rank runs other communications.
            ParameterError: a parameter was replaced since `zcompile.compile`, or is read where it is not full.
        """
        return self._tree.run(self._tree.root, args, kwargs)

    def no_sync(self, *, full_gradients: bool = False) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients over micro-batches: `with compiled.no_sync(): compiled(batch).backward()`.

        Stages 0 and 1, which keep full gradients, communicate nothing in such a backward; the next one outside reduces
        the sum. Until then `.grad` shows this rank's own gradients (under stage 1 as a DTensor placed `Partial`), and
        an optimizer's step is refused. Stages 2 and 3 reduce each micro-batch into the shards, as without `no_sync`:
        full gradients are what they do without. What counts is where the backward runs.

        Args:
            full_gradients: Let stages 2 and 3 keep full gradients, too, as FSDP2 does: a whole model's memory more on
                each rank, and less to send.
        """
        return self._engine.runtime.no_sync(full_gradients=full_gradients)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False where backwards accumulate, as in `no_sync`; DistributedDataParallel's, for loops that set it."""
        return not self._engine.runtime.accumulates

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._engine.runtime.accumulate(not wanted)

    def unsharded(self) -> contextlib.AbstractContextManager[None]:
        """Parameters full, and the plain model in the place of programs: `with compiled.unsharded(): generate()`.

        To evaluate, or to generate text: parameters are gathered once, and inside nothing is communicated, so that
        each rank may call the model, its modules and methods as often as it likes, and read parameters and
        `state_dict()`, which are whole. There is nothing to train inside, nor to write to. Collective where it begins.

        Raises:
            OptionError: full parameters are more than the memory limit; or this is within a call of the model.
            ParameterError: at its end: a parameter was written to.
        """
        return self._tree.unsharded()

    # -- the module -----------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        self._model.train(mode)
        object.__setattr__(self, "training", mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        """Convert to other dtypes, as `to`, `half` and the like ask for, before anything is trained or compiled.

        Nothing is done where nothing would change.

        Raises:
            ParameterError: it cannot be moved, or not be converted any more; nothing has changed.
        """
        kinds = {(tensor.dtype, tensor.device) for tensor in (*self.parameters(), *self.buffers())}
        made = {kind: fn(torch.empty(0, dtype=kind[0], device=kind[1])) for kind in kinds}
        ours = self._engine.runtime.communicator.device
        for (dtype, device), one in made.items():
            if one.device not in (device, ours):
                problem = f"has tensors of {dtype} on {device}, and a sharded model cannot be moved"
                raise ParameterError(type(self._model).__name__, problem, "move the model before zcompile.compile")
        if any(one.dtype != dtype for (dtype, _), one in made.items()):
            self._convert({dtype: one.dtype for (dtype, _), one in made.items()}, fn)
        return self

    def _convert(self, dtypes: Mapping[torch.dtype, torch.dtype], fn: Callable[..., Any]) -> None:
        self._check_sharded()
        runtime, sites = self._engine.runtime, self._tree.sites
        if reason := runtime.why_not_converted():
            problem = f"cannot be converted: {reason}"
            fix = "convert the model before zcompile.compile; to compute in bfloat16, give it dtype="
            raise ParameterError(type(self._model).__name__, problem, fix)
        check_unhooked(sites)
        wanted = {site.name: dtypes[site.shard.dtype] for site in sites}
        layout = converted(runtime.layout, self._model, runtime.options.precision, wanted)
        check_gathered(layout, runtime.options.outer_gather_dtype)
        shards = convert(self._model, layout, runtime.shards, sites, fn)
        runtime.layout = layout
        runtime.extend((), shards)
        for name in self._model_state.ignored:
            parameter = self._model.get_parameter(name)
            parameter.data = fn(parameter.data)

    def compile(self, *_: Any, **__: Any) -> None:
        """Do nothing: it is compiled already."""

    def __new__(cls, model: nn.Module, *_: Any) -> CompiledModule:
        """An instance of a class that can be indexed, iterated and the like as the model's can."""
        special = {name: _special(name) for name in _CONTAINER if hasattr(type(model), name)}
        return super().__new__(type(cls.__name__, (cls,), special) if special else cls)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's class, so that `isinstance(compiled, type(model))` holds, as it does of FSDP2's modules."""
        model = vars(self).get("_model")
        return type(self) if model is None else type(model)

    def __reduce_ex__(self, _: object) -> NoReturn:
        fix = "save compiled.full_state_dict(), or a checkpoint: compiled.save_checkpoint(folder)"
        raise ModelError(type(self._model).__name__, "is compiled, and is not pickled", fix)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A compiled model of its own, with shards, buffers and programs of its own. Collective.

        Raises:
            StateError: it is within `unsharded()`.
        """
        self._check_sharded()
        memo[id(self)] = made = _copied(self._model, self._tree, memo)
        kept = ("training", "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
        for name in vars(nn.Module()).keys() - {*kept}:  # hooks
            object.__setattr__(made, name, copy.deepcopy(vars(self)[name], memo))
        object.__setattr__(made, "training", self.training)
        return made

    def __copy__(self) -> NoReturn:
        fix = "take the model itself, or copy.deepcopy of it, which has shards of its own"
        raise ModelError(type(self._model).__name__, "is compiled, and a shallow copy would share its shards", fix)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = object.__getattribute__(self, "_model")
            # Where DistributedDataParallel has the model, for scripts that unwrap it.
            return model if name == "module" and not hasattr(model, name) else getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, unless it is this module's own; programs that read it are traced again.

        Raises:
            ParameterError: the value is a parameter, or a module with parameters, that was never sharded; or the model
                has an attribute of a name that means something else here.
        """
        ours = hasattr(CompiledModule, name) and not hasattr(nn.Module, name)
        if ours and hasattr(self._model, name):
            problem = f"has an attribute {name!r}, which is something else on the compiled module"
            fix = "keep the model that was given to zcompile.compile, and set it there: model.NAME = value"
            raise ParameterError(type(self._model).__name__, problem, fix)
        if self._is_own(name):
            super().__setattr__(name, value)
        if name == "training" or not self._is_own(name):
            self._tree.refuse_stranger(name, value)
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def _is_own(self, name: str) -> bool:
        return name in vars(self) or hasattr(type(self), name)

    def extra_repr(self) -> str:
        stage, world = self.layout.stage.number, self.layout.world
        return f"zcompile of {type(self._model).__name__}: stage {stage}, world {world}, {len(self.layout.units)} units"

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own: this rank's shards as DTensors (plain tensors in stage 0), and the persistent buffers.

        With shards it is not pickled, as `torch.save` would: what reads the file would have a part of the state.
        """
        state = self._model.state_dict(*args, **kwargs)
        for name, value in state.items():
            state[name] = for_others(value)
        self._engine.runtime.freshness.give(value for value in state.values() if isinstance(value, DTensor))
        return state if args or "destination" in kwargs else model_state_of(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` gives, or plain tensors that are whole. Collective; nothing is communicated.

        Values are copied into the shards, with `assign` too: optimizers hold these.

        Returns what `nn.Module.load_state_dict` does: the names that were missing or unexpected, with `strict=False`.

        Raises:
            StateError: on every rank, and before anything is written: a name, shape or dtype that does not fit.
        """
        self._check_sharded()
        return self._model_state.load(state_dict, strict)

    def _stored(self) -> ModelState:
        self._check_sharded()
        return self._model_state

    def _check_sharded(self) -> None:
        if self._tree.is_full:
            problem = "is within unsharded(), where its parameters are no shards"
            raise StateError(
                type(self._model).__name__, problem, "save and load outside; inside, state_dict() is whole"
            )

    # -- looking inside -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The units of the model, the stage and the world."""
        return self._engine.runtime.layout

    @property
    def pipeline(self) -> Pipeline:
        """The passes that make this model's programs."""
        return self._engine.compiler.pipeline

    @property
    def journals(self) -> list[Journal]:
        """What the pipeline did to each program, pass by pass."""
        return self._engine.compiler.journals

    @property
    def programs(self) -> list[Program]:
        """The rewritten programs in the order of their capture: forward, backward (if any), forward, ..."""
        return self._engine.reports.programs

    @property
    def traffic(self) -> TrafficMeter:
        """What this rank's collectives have sent so far, and how long it waited for them."""
        return self._engine.runtime.communicator.traffic

    def _shown(self) -> Reports:
        return self._engine.reports
