"""`zcompile.compile`: shard a model's parameters and give back a module that is called like the model."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import os
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zcompile._torch import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    Unsupported,
    has_gradient_hooks,
    keeps_graph,
    tree_leaves,
)
from zcompile.capture import Capture, Names, Runner
from zcompile.errors import (
    BackwardError,
    CaptureError,
    ModelError,
    OptimizerError,
    OptionError,
    ParameterError,
    ZcompileError,
)
from zcompile.layout import STAGES, Layout
from zcompile.lower import RegionCache, Session, Step
from zcompile.ops import Phase
from zcompile.options import check_backend, check_prefetch, check_stage
from zcompile.pipeline import Journal, Pass, Pipeline
from zcompile.pipelines import pipeline
from zcompile.program import Program
from zcompile.report import dump_programs, explain
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.freshness import Freshness
from zcompile.runtime.gradients import deliver
from zcompile.runtime.groups import Communicator, Traffic, resolve_mesh
from zcompile.sharding import Retired, shard_model
from zcompile.units import make_layout


def compile(
    model: nn.Module,
    *,
    stage: int = 3,
    prefetch: int = 2,
    mesh: DeviceMesh | None = None,
    units: Sequence[str] | None = None,
    passes: Pipeline | Mapping[str, Pass | None] | None = None,
    backend: str = "inductor",
    dump: str | os.PathLike[str] | None = None,
) -> CompiledModule:
    """Shard `model` by ZeRO and compile its training step into a program of regions and communications.

    When this returns, every rank holds its shards of rank 0's values, and the memory of the full parameters is free.
    The model itself holds the shards now; call the returned module in its place. Collective: every rank calls it.

    Args:
        model: Any module whose parameters are all on one device. Its code is not touched.
        stage: What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        prefetch: How many units are gathered ahead of the one that computes; 0 means none.
        mesh: The data-parallel `DeviceMesh` of one dimension; by default all ranks. Without `torchrun` a world of one.
        units: Module paths (shell wildcards allowed) whose parameters are gathered together; by default the
            repeated blocks of the model.
        passes: A whole `Pipeline`, or changes to the default one by name: a `Pass` replaces or adds, None leaves out.
        backend: `"inductor"` compiles regions; `"eager"` runs them as they are, bit for bit like eager PyTorch.
        dump: A folder for the programs' text after every pass; by default the environment's ZCOMPILE_DUMP, if set.

    Raises:
        OptionError: a stage, prefetch, backend or unit pattern that cannot be meant.
        PipelineError: a pass that is unknown, missing or out of place.
        ModelError: no parameters, parameters on several devices, or a model that is sharded already.
        GroupError: several ranks and no process group, or a mesh that does not fit.
        AgreementError: the ranks hold different models or options.
    """
    check_stage(stage)
    check_prefetch(prefetch)
    check_backend(backend)
    steps = _pipeline(stage, prefetch, passes, backend)
    device = _device(model)
    communicator = Communicator(resolve_mesh(mesh, device), device)
    layout = make_layout(model, STAGES[stage], communicator.size, units)
    agreement = Agreement(communicator)
    agreement.reach("the model", [f"stage {stage} prefetch {prefetch} backend {backend}", *_model_lines(model, layout)])
    return CompiledModule(
        model, layout, steps, communicator, agreement, backend, dump or os.environ.get("ZCOMPILE_DUMP")
    )


def _pipeline(stage: int, prefetch: int, passes: Pipeline | Mapping[str, Pass | None] | None, backend: str) -> Pipeline:
    if isinstance(passes, Pipeline):
        if passes.stage != STAGES[stage]:
            found = f"is {stage}, but passes is a pipeline of stage {passes.stage.number}"
            raise OptionError("stage", found, f"give stage={passes.stage.number}, or changes to the pipeline by name")
        return passes
    # Eager regions fuse nothing, so recomputing cheap operations would only cost time: save what eager PyTorch saves.
    default = pipeline(stage=stage, prefetch=prefetch, partition="min_cut" if backend == "inductor" else "default")
    return default.changed(passes) if passes else default


def _device(model: nn.Module) -> torch.device:
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ModelError(name, "is a DTensor already", "compile a plain model, and compile it once")
        if param.is_meta:
            raise ModelError(
                name, "is on the meta device and has no values", "materialise the model before compiling it"
            )
        devices.setdefault(param.device, name)
    if not devices:
        raise ModelError(type(model).__name__, "has no parameters", "compile a model that has something to train")
    _refuse_shared_storage(model)
    if len(devices) > 1:
        found = ", ".join(f"{name} is on {device}" for device, name in devices.items())
        raise ModelError("parameters", f"on several devices: {found}", "move the model to one device: model.to(device)")
    return next(iter(devices))


def _refuse_shared_storage(model: nn.Module) -> None:
    """Two parameters in one memory are one to an optimizer, and would be two once sharded."""
    places = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), n) for n, p in model.named_parameters() if p.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(places):
        if start < end:
            fix = "tie them by one Parameter: b.weight = a.weight"
            raise ModelError(other, f"shares its memory with {name}, but is another Parameter", fix)


def _model_lines(model: nn.Module, layout: Layout) -> list[str]:
    lines = [f"{p.name} {list(p.shape)} {p.dtype} trainable={p.trainable}" for p in layout.params]
    return [*lines, *(f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers())]


class CompiledModule(nn.Module):
    """A model whose parameters are shards; called like the model, it runs the compiled programs.

    It shows the model's own tree: parameters, buffers, modules and state under the model's own names.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        steps: Pipeline,
        communicator: Communicator,
        agreement: Agreement,
        backend: str,
        dump: str | os.PathLike[str] | None,
    ) -> None:
        super().__init__()
        self.pipeline = steps
        self.layout = layout
        self.journals: list[Journal] = []
        self._steps: list[Step] = []
        self._dump = Path(dump) if dump else None
        self._communicator, self._agreement = communicator, agreement
        self._agreed: set[str] = set()
        self._regions = RegionCache(backend)
        self._shards, self._sites, retired = shard_model(model, layout, communicator)
        self._freshness = Freshness(list(self._shards.values()), communicator)
        self._session = Session(self._shards, deliver, self._agree, self._freshness.refresh)
        # Seen through object.__setattr__, the model is no submodule: names would begin with its attribute's name.
        object.__setattr__(self, "_model", model)
        for tree in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, tree, getattr(model, tree))
        self.training = model.training
        self._retired = retired
        _watch_optimizers(self, retired)
        self._traced = torch.compile(_fresh(_traced_call(model)), backend=self._capture, fullgraph=True)

    # -- calling --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Collective: every rank calls it, with batches of its own of any size.

        Raises:
            CaptureError: the model's code cannot be traced into one graph.
            ProgramError, PipelineError: the rewriting went wrong; nothing has run.
            AgreementError: another rank runs other communications.
            ParameterError: a parameter was replaced since `zcompile.compile`.
        """
        with self._in_place(), _typed_errors():
            result = self._traced(*args, **kwargs)
        self._watch_backward(result)
        return result

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Husks in the module tree while the call runs; shards at all other times, also after an exception."""
        for site in self._sites:
            if site.owner._parameters[site.key] is not site.shard:
                fix = "change its values in place: with torch.no_grad(): p.copy_(...)"
                raise ParameterError(site.name, "was replaced after zcompile.compile", fix)
            if has_gradient_hooks(site.shard):
                fix = "use register_post_accumulate_grad_hook, or change p.grad after the backward"
                raise ParameterError(site.name, "has a hook of register_hook, which would not run", fix)
        try:
            for site in self._sites:
                site.husk.requires_grad_(site.shard.requires_grad)
                site.owner._parameters[site.key] = site.husk
            yield
        finally:
            for site in self._sites:
                site.owner._parameters[site.key] = site.shard

    def _capture(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that torch.compile calls, once for every graph."""
        for value in inputs:
            if name := self._retired.get(id(value), (None, ""))[1]:
                found = "the model's code reads this parameter past its module, where it is empty now"
                raise ParameterError(name, found, "read it as an attribute of its module, not from a list or a closure")
        names = Names(
            {id(site.husk): site.name for site in self._sites},
            {id(buffer): name for name, buffer in self.named_buffers()},
            frozenset(name for name, _ in self.named_modules()),
            tuple(inspect.signature(self._model.forward).parameters),
        )
        layout = self.layout.with_trainable({site.name: site.husk.requires_grad for site in self._sites})
        return Capture(names, layout, self._lower)(module, inputs)

    def _lower(self, traced: Program) -> Runner:
        journal = Journal()
        with _collector_paused():
            program = self.pipeline.run(traced, journal)
            step = Step(traced, program, self._regions, self._session)
        self._steps.append(step)
        self.journals.append(journal)
        if self._dump:
            self.dump(self._dump)
        return step

    def _agree(self, program: Program) -> None:
        """Compare the program's communications with the other ranks', unless an agreed program has the same ones."""
        digest = program.digest()
        if digest not in self._agreed:
            self._agreement.reach("the program's communications", program.communications())
            self._agreed.add(digest)

    def _watch_backward(self, result: Any) -> None:
        """Refuse, when it comes, a backward that would be wrong: a second one, or one after parameters changed."""
        nodes = {node for tensor in _tensors_in(result) for node in _origins(tensor)}
        if nodes:
            call = _Call(weakref.ref(self), self._total_version())
            for node in nodes:
                node.register_prehook(call.check)

    def _total_version(self) -> int:
        return self._freshness.steps + sum(shards.version() for shards in self._shards.values())

    # -- the module -----------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        fix = "move or convert the model before zcompile.compile"
        raise ParameterError(type(self._model).__name__, "a sharded model cannot be moved or converted", fix)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_model"), name)

    def extra_repr(self) -> str:
        stage, world = self.layout.stage.number, self.layout.world
        return f"zcompile of {type(self._model).__name__}: stage {stage}, world {world}, {len(self.layout.units)} units"

    # -- looking inside -------------------------------------------------------------------------------------------

    @property
    def programs(self) -> list[Program]:
        """The rewritten programs in the order of their capture: forward, backward (if any), forward, ..."""
        found = []
        for step in self._steps:
            phases = Phase if step.program.has_backward else (Phase.FORWARD,)
            found += [step.program.phase(phase) for phase in phases]
        return found

    @property
    def traffic(self) -> Traffic:
        """What this rank's collectives have sent so far, and how long it waited for them."""
        return self._communicator.traffic

    def explain(self) -> str:
        """A page of text: units, bytes, volume against 2Ψ or 3Ψ, predicted peak memory, what overlaps what."""
        return explain(self.layout, [step.program for step in self._steps], len(self._regions.compiled))

    def dump(self, folder: str | os.PathLike[str]) -> Path:
        """Write the text of every program after every pass under `folder`; on the mesh's first rank only."""
        if self._communicator.rank == 0:
            dump_programs(Path(folder), self.journals, self.explain())
        return Path(folder)


@dataclass
class _Call:
    """One forward, until its graph is gone."""

    module: weakref.ref[CompiledModule]
    version: int
    freed: bool = False

    def check(self, _: object) -> None:
        """Runs before the backward of this forward.

        Raises:
            BackwardError: the graph was freed by an earlier backward, or a parameter changed since the forward.
        """
        if self.freed:
            fix = "call the model again, or the first backward with retain_graph=True"
            raise BackwardError("backward", "the graph of this forward was freed by an earlier backward", fix)
        module = self.module()
        if module is not None and module._total_version() != self.version:
            fix = "call backward before optimizer.step(), once for each forward"
            raise BackwardError("backward", "parameters changed since the forward whose graph this is", fix)
        self.freed = not keeps_graph()


def _tensors_in(result: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in what a model returns: containers, dataclasses and other objects with attributes."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            yield from _tensors_in(list(vars(leaf).values()), depth - 1)


def _origins(tensor: torch.Tensor) -> list[Node]:
    """The compiled function's node behind `tensor`, through views made on the way out."""
    node = tensor.grad_fn
    while node is not None and "CompiledFunction" not in node.name():
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return [] if node is None else [node]


def _traced_call(model: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # Parameters are husks here: run as plain Python, the model's code would read memory that is not there.
        if not torch.compiler.is_compiling():
            fix = "leave torch.compile enabled (TORCHDYNAMO_DISABLE, torch.compiler.set_stance, disable)"
            raise CaptureError(type(model).__name__, "its forward was not compiled but called", fix)
        return model(*args, **kwargs)

    return call


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a code object of its own: torch.compile counts recompilations by code object."""
    assert isinstance(function, types.FunctionType), "a plain function"
    code = function.__code__.replace(co_name=f"zcompile_{function.__name__}")
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection: a deep model's graphs are millions of objects, all in use, scanned in vain at each one.

    Measured at 48 blocks: the passes take 2.2 s in place of 4.0 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Our own errors out of torch.compile's wrapping, and what cannot be traced as a CaptureError."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(inner := error.inner_exception, ZcompileError):
            raise inner from None
        raise
    except (Unsupported, FailOnRecompileLimitHit) as error:
        found = "\n".join(line for line in str(error).splitlines() if line.strip())
        raise CaptureError(
            "the model's forward", f"cannot be traced into one graph: {found}", "rewrite that line"
        ) from error


# -- optimizers ------------------------------------------------------------------------------------------------------


def _watch_optimizers(compiled: CompiledModule, retired: Retired) -> None:
    """Refuse optimizers over parameters from before `compile`, and take note of steps of the ones there are now.

    torch's hooks on optimizers are for all of the process; these go with the compiled module.
    """
    current = {id(parameter) for parameter in compiled.parameters()}
    freshness = compiled._freshness

    def refuse(optimizer: Optimizer, *_: object) -> None:
        for param in _parameters_of(optimizer):
            if id(param) in retired:
                name, kind = retired[id(param)][1], type(optimizer).__name__
                found = f"{kind} holds this parameter from before zcompile.compile; it has no memory any more"
                raise OptimizerError(name, found, f"build it afterwards: {kind}(compiled.parameters(), ...)")

    def note(optimizer: Optimizer, *_: object) -> None:
        if any(id(param) in current for param in _parameters_of(optimizer)):
            freshness.step()

    for handle in (register_optimizer_step_pre_hook(refuse), register_optimizer_step_post_hook(note)):
        weakref.finalize(compiled, handle.remove)


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
