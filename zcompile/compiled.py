"""The compiled module: a model whose parameters are shards, under the model's own names."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.engine.calls.fragments import Tree, tree_of
from zcompile.engine.calls.interceptors import taken_out
from zcompile.engine.engine import Engine
from zcompile.engine.model_runtime import ModelRanks, ModelRuntime
from zcompile.engine.optimizers import watch_optimizers
from zcompile.engine.reports import Reported, Reports
from zcompile.engine.sharding_plan import ignored_names, model_lines
from zcompile.errors import ModelError, ParameterError, StateError
from zcompile.ir.layout import Layout
from zcompile.ir.program import Program
from zcompile.model.conversion import OwnDtype, check_unhooked, convert, copy_model, kinds_made
from zcompile.model.sharding import Retired, Site
from zcompile.model.units import AUTOCAST, converted
from zcompile.runtime.async_work import TrafficMeter
from zcompile.runtime.gradients.delivery import Outside
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards
from zcompile.runtime.tensors.sharded_state import model_state_of
from zcompile.schedule.option_checks import check_gathered
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal, Pipeline
from zcompile.state.model_state import ModelState, for_others
from zcompile.state.savable import Savable
from zcompile.torch_internals.modules import IGNORED_BY_DDP, STATE_HOOKS, replace_state_dict
from zcompile.torch_internals.pytree import tree_map_only


def _copied(model: nn.Module, tree: Tree, memo: dict[int, Any]) -> CompiledModule:
    """Copy a compiled module: a copy of the model with copies of its shards. Collective."""
    before = tree.engine.runtime
    # The copy gets no dump and no recording: they would overwrite those of the original.
    options = replace(before.options, dump="", record=None)
    data = Communicator(before.communicator.mesh, before.communicator.device, options.hybrid)
    lines = ["a copy", str(options), *model_lines(model, before.layout)]
    ranks = ModelRanks.agreed(data, before.ranks.parallel, lines)
    trainable = {site.name: site.shard.requires_grad for site in tree.sites}
    runtime = ModelRuntime(before.layout.with_trainable(trainable), ranks, options)
    runtime.output_dtype = before.output_dtype
    engine = Engine(runtime, title=type(model).__name__)
    with taken_out([*tree.interceptors, *tree.loading]):
        given = before.shards, tree.sites, data, runtime.memory, memo
        copied, shards, sites = copy_model(model, runtime.layout, *given)
    return CompiledModule(copied, engine, shards, sites, tree.retired)


def _forward_like(model: nn.Module, tree: Tree) -> Callable[..., Any]:
    """A function that calls the model and has the signature of its forward."""
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
    """The compiled module of `model`; None if it is not compiled."""
    tree = None if isinstance(model, CompiledModule) else tree_of(model)
    return model if isinstance(model, CompiledModule) else tree.face if tree is not None else None  # type: ignore[return-value]


def options_of(compiled: CompiledModule) -> Options:
    """The options it was compiled with, except `units=`, `whole=` and `ignore=`.

    Not an attribute, because a model may have an attribute `options`.
    """
    return compiled._engine.runtime.options


_CONTAINER = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__", "__reversed__")
"""Methods that Python looks up on the class, never on the instance."""


def _special(name: str) -> Callable[..., Any]:
    """A method that calls the model's method of this name."""

    def method(self: CompiledModule, *args: Any) -> Any:
        if name == "__setitem__":
            self._tree.refuse_stranger(str(args[0]), args[1])
        return getattr(type(self._model), name)(self._model, *args)

    method.__name__ = name
    return method


@dataclass
class _NotWrapped:
    """Stands for the names that DistributedDataParallel ignores; raises when DDP, put on by a trainer, reads them."""

    model: str

    def __iter__(self) -> Iterator[str]:
        problem = "is compiled, and cannot be wrapped in DistributedDataParallel, which does not see its gradients"
        fix = "remove it: zcompile averages them; with Accelerate, use zcompile.integrations.accelerate.Accelerator"
        raise ModelError(self.model, problem, fix)


class CompiledModule(Savable, Reported, nn.Module):
    """A model whose parameters are shards. It is called like the model, and runs the compiled programs.

    Parameters, buffers, submodules and state dict entries have the model's own names.
    """

    _model: nn.Module
    _engine: Engine
    _tree: Tree
    _model_state: ModelState

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        shards: Mapping[str, UnitShards],
        sites: Sequence[Site],
        retired: Retired,
    ) -> None:
        super().__init__()
        runtime = engine.runtime
        runtime.extend((), shards)
        if not runtime.layout.stage.optimizer_sharded and runtime.layout.world > 1:
            Outside(shards, runtime.delivery).watch()
        # All ranks that hold a part of the model take part in its state, tensor-parallel ranks included.
        left = ignored_names(model, runtime.layout)
        state = ModelState(model, runtime.everyone.communicator, runtime.everyone, runtime.options.stage, left)
        # object.__setattr__ keeps the model from becoming a submodule, whose name would prefix every parameter's.
        object.__setattr__(self, "_model", model)
        for tree in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", *STATE_HOOKS):
            object.__setattr__(self, tree, getattr(model, tree))
        object.__setattr__(self, "training", model.training)
        object.__setattr__(self, "_engine", engine)
        object.__setattr__(self, "_tree", Tree(model, engine, sites, retired))
        object.__setattr__(self, "_model_state", state)
        self._tree.face = self
        # Trainers read the signature to choose the entries of a batch that the model takes.
        object.__setattr__(self, "forward", _forward_like(model, self._tree))
        replace_state_dict(model, model_state_of)
        vars(model)[IGNORED_BY_DDP] = _NotWrapped(type(model).__name__)
        watch_optimizers(self._tree, runtime, dict(retired))  # for the lifetime of the tree

    # -- calling --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Collective: every rank calls it, each with its own batch of any size.

        A model that cannot be traced into one graph runs as several programs with Python between them, with a warning.

        Raises:
            CaptureError: the model's graph cannot be sharded.
            ProgramError, PipelineError: a pass failed; nothing has run.
            AgreementError: another rank would run different communications.
            ParameterError: a parameter was replaced after `zcompile.compile`, or is read while it is not gathered.
        """
        return self._tree.run(self._tree.root, args, kwargs)

    def no_sync(self, *, full_gradients: bool = False) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients over micro-batches: `with compiled.no_sync(): compiled(batch).backward()`.

        Stages 0 and 1 keep full gradients and communicate nothing in such a backward; the next backward outside reduces
        the sum. Until then `.grad` is this rank's local gradient (in stage 1 a DTensor placed `Partial`), and an
        optimizer step raises. Stages 2 and 3 never keep full gradients: they reduce each micro-batch into the shards,
        with or without `no_sync`. The context matters around the backward, not around the forward.

        Args:
            full_gradients: In stages 2 and 3 also keep full gradients, as FSDP2 does: each rank sends less, and needs
                memory for the gradients of the whole model.
        """
        return self._engine.runtime.no_sync(full_gradients=full_gradients)

    @property
    def require_backward_grad_sync(self) -> bool:
        """False while backwards accumulate, as in `no_sync`. For loops that set DistributedDataParallel's attribute."""
        return not self._engine.runtime.accumulates

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._engine.runtime.accumulate(not wanted)

    def unsharded(self) -> contextlib.AbstractContextManager[None]:
        """Gather all parameters and run the plain model: `with compiled.unsharded(): generate()`.

        For evaluation and text generation: parameters are gathered once, on entry, which is collective. Inside, nothing
        is communicated: each rank may call the model, its submodules and methods independently, and read whole
        parameters and a whole `state_dict()`. Training and writing to parameters are not allowed.

        Raises:
            OptionError: the full parameters exceed the memory limit, or this is called within a call of the model.
            ParameterError: on exit, if a parameter was written to.
        """
        return self._tree.unsharded()

    # -- the module -----------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        self._model.train(mode)
        object.__setattr__(self, "training", mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        """Convert dtypes, for `to`, `half` and the like, as long as nothing has been trained or compiled.

        Does nothing if nothing would change.

        Raises:
            ParameterError: `fn` moves tensors, or it is too late to convert; nothing has changed.
        """
        kinds = kinds_made(self, fn)
        ours = self._engine.runtime.communicator.device
        for (dtype, device), one in kinds.items():
            if one.device not in (device, ours):
                problem = f"has {dtype} tensors on {device}, and a sharded model cannot be moved"
                raise ParameterError(type(self._model).__name__, problem, "move the model before zcompile.compile")
        if any(one.dtype != dtype for (dtype, _), one in kinds.items()):
            self._convert({dtype: one.dtype for (dtype, _), one in kinds.items()}, fn)
        return self

    def _convert(self, dtypes: Mapping[torch.dtype, torch.dtype], fn: Callable[..., Any]) -> None:
        self._check_sharded()
        runtime, sites = self._engine.runtime, self._tree.sites
        reason = runtime.why_not_converted()
        if any(isinstance(one.method, OwnDtype) for one in self._tree.interceptors):
            reason = "the modules that keep_dtype= names compute in its present dtypes"
        if reason:
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
        """Do nothing: the module is compiled already."""

    def __new__(cls, model: nn.Module, *_: Any) -> CompiledModule:
        """Make an instance that can be indexed, iterated and so on if the model can: see `_CONTAINER`."""
        special = {name: _special(name) for name in _CONTAINER if hasattr(type(model), name)}
        return super().__new__(type(cls.__name__, (cls,), special) if special else cls)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's class, so that `isinstance(compiled, type(model))` is true, as for FSDP2's modules."""
        model = vars(self).get("_model")
        return type(self) if model is None else type(model)

    def __reduce_ex__(self, _: object) -> NoReturn:
        fix = "save compiled.full_state_dict(), or a checkpoint: compiled.save_checkpoint(folder)"
        raise ModelError(type(self._model).__name__, "is compiled, and cannot be pickled", fix)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Return an independent compiled model, with its own shards, buffers and programs. Collective.

        Raises:
            StateError: within `unsharded()`.
        """
        self._check_sharded()
        memo[id(self)] = copied = _copied(self._model, self._tree, memo)
        kept = ("training", "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", *STATE_HOOKS)
        for name in vars(nn.Module()).keys() - {*kept}:  # hooks
            object.__setattr__(copied, name, copy.deepcopy(vars(self)[name], memo))
        object.__setattr__(copied, "training", self.training)
        return copied

    def __copy__(self) -> NoReturn:
        fix = "use the model itself, or copy.deepcopy(model), which has its own shards"
        raise ModelError(type(self._model).__name__, "is compiled, and a shallow copy would share its shards", fix)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = object.__getattribute__(self, "_model")
            # `module` is DistributedDataParallel's name for the wrapped model; some scripts unwrap it.
            return model if name == "module" and not hasattr(model, name) else getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, or of this module if it is its own. Programs that read it are traced again.

        Raises:
            ParameterError: the value is a parameter, or a module with parameters, that was never sharded; or the
                compiled module has an attribute of the same name with another meaning.
        """
        ours = hasattr(CompiledModule, name) and not hasattr(nn.Module, name)
        if ours and hasattr(self._model, name):
            problem = f"has an attribute {name!r}, which is something else on the compiled module"
            fix = "keep a reference to the model that was given to zcompile.compile, and set model.NAME there"
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
        """The model's state dict: this rank's shards as DTensors (plain tensors in stage 0), and persistent buffers.

        With shards, pickling it raises, as in `torch.save`: the file would hold only a part of the state.
        """
        state = self._model.state_dict(*args, **kwargs)
        for name, value in state.items():
            state[name] = for_others(value)
        self._engine.runtime.freshness.give(value for value in state.values() if isinstance(value, DTensor))
        return state if args or "destination" in kwargs else model_state_of(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a result of `state_dict`, or whole plain tensors. Collective, but nothing is communicated.

        Values are copied into the shards, even with `assign`, because optimizers hold the shards.

        Returns the missing and unexpected keys, as `nn.Module.load_state_dict` does.

        Raises:
            StateError: a name, shape or dtype does not match; raised on every rank, before anything is written.
        """
        return self._load_into(self._model, state_dict, strict)

    def _load_into(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into `module`: the model or one of its submodules."""
        self._check_sharded()
        return self._model_state.of(module).load(state_dict, strict)

    def _stored(self) -> ModelState:
        self._check_sharded()
        return self._model_state

    def _check_sharded(self) -> None:
        if self._engine.runtime.is_full:
            problem = "is within unsharded(), where its parameters are not sharded"
            raise StateError(
                type(self._model).__name__, problem, "save and load outside of it; inside, state_dict() is whole"
            )

    # -- looking inside -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The units of the model, the stage and the world."""
        return self._engine.runtime.layout

    @property
    def pipeline(self) -> Pipeline:
        """The passes that make this model's programs."""
        return self._engine.pipeline

    @property
    def journals(self) -> list[Journal]:
        """The changes that the pipeline made to each program, pass by pass."""
        return self._engine.journals

    @property
    def programs(self) -> list[Program]:
        """The rewritten programs in order of capture: forward, backward (if any), forward, ..."""
        return self._engine.programs

    @property
    def traffic(self) -> TrafficMeter:
        """Bytes that this rank's collectives have sent so far, and seconds that it waited for them."""
        return self._engine.runtime.communicator.traffic

    def _shown(self) -> Reports:
        return self._engine.reports
