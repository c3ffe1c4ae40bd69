"""Optimizers: pointed at shards, refused if their step would be wrong, and watched, so that steps are counted."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zcompile.engine.model_runtime import ModelRuntime
from zcompile.errors import OptimizerError, ParameterError
from zcompile.model.sharding import Retired
from zcompile.runtime.device import is_host
from zcompile.runtime.gradients.local_steps import HookedStep, LocalSteps
from zcompile.runtime.gradients.optimizer_trials import parameters_held
from zcompile.runtime.shards import UnitShards
from zcompile.runtime.tensors.sharded_state import optimizer_state_of
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.optimizers import has_step_pre_hooks


def watch_optimizers(owner: object, runtime: ModelRuntime, retired: Retired) -> None:
    """Refuse steps that would be wrong, and note the others, for as long as `owner` lives.

    torch's hooks on optimizers apply to the whole process; these are removed with `owner`.
    """
    reporting = runtime.communicator.waits.reporting
    local_steps, stepping, watched = LocalSteps(), WeakKeyDictionary[Optimizer, HookedStep](), WeakSet[Optimizer]()

    def before(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        start = runtime.recorder.now()
        _refuse_retired(optimizer, retired)
        names = _names_in(optimizer, runtime)
        if not names:
            return None
        _refuse_mistaken(optimizer, runtime)
        runtime.lockstep.enter_step(optimizer)
        if optimizer not in watched:
            watched.add(optimizer)
            optimizer.register_state_dict_post_hook(_not_pickled)
        closure: Any = None
        if len(args) > 1 or kwargs:  # otherwise args is just the optimizer
            bound = inspect.signature(type(optimizer).step).bind(*args, **kwargs)
            closure = bound.arguments.get("closure")
        if closure is None:
            _refuse_held(names, runtime)
        if (failed := stepping.pop(optimizer, None)) is not None:
            failed.remove()
        if local_steps.wanted(optimizer):
            stepping[optimizer] = HookedStep(optimizer, local_steps)

        def closed() -> Any:
            loss = closure()  # this runs the backwards of the step
            _refuse_held(names, runtime)
            if optimizer in stepping:
                stepping[optimizer].refresh()
            return loss

        if closure is not None:
            bound.arguments["closure"] = closed
        reporting.stepping = True
        runtime.recorder.begin_optimizer(start)
        return None if closure is None else (bound.args, bound.kwargs)

    def after(optimizer: Optimizer, *_: object) -> None:
        if _names_in(optimizer, runtime):
            if (stepped := stepping.pop(optimizer, None)) is not None:
                stepped.remove()
            with no_torch_function():
                idle = all(param.grad is None for param in parameters_held(optimizer))
            reporting.stepping = False
            runtime.freshness.step(idle=idle)
            runtime.recorder.end_optimizer()

    for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        weakref.finalize(owner, handle.remove)


def _names_in(optimizer: Optimizer, runtime: ModelRuntime) -> set[str]:
    """The model's parameters that the optimizer has."""
    names = runtime.names()
    return {names[key] for key in map(id, parameters_held(optimizer)) if key in names}


def _refuse_held(names: set[str], runtime: ModelRuntime) -> None:
    """Raise OptimizerError for a step with gradients that are not averaged."""
    if held := names.intersection(runtime.names_held()):
        problem = "its gradient was held back by no_sync and is not reduced yet: it is this rank's own"
        raise OptimizerError(min(held), problem, "run the last micro-batch's backward outside of no_sync")


def _not_pickled(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return optimizer_state_of(state)


def _refuse_mistaken(optimizer: Optimizer, runtime: ModelRuntime) -> None:
    """Raise OptimizerError for a step that would have no effect, or that a scaler makes in bfloat16."""
    if runtime.is_full:
        problem = "steps within unsharded(), after which the model would have the parameters from before"
        raise OptimizerError(type(optimizer).__name__, problem, "step it outside")
    if isinstance(optimizer, torch.optim.SparseAdam):
        problem = "takes only sparse gradients, but those of a compiled model are dense, even with sparse=True"
        raise OptimizerError("SparseAdam", problem, "take Adam or AdamW")
    if runtime.options.dtype is torch.bfloat16 and _called_by_scaler():
        raise scaled_bfloat16()


def scaled_bfloat16() -> OptimizerError:
    """The error for a scaler with bfloat16."""
    problem = "scales the loss of a model that computes in bfloat16, whose range is that of float32"
    return OptimizerError("GradScaler", problem, "leave it out, or give it enabled=False")


def hooked(name: str) -> ParameterError:
    """The error for a parameter with a hook of `register_hook`, which is in no graph."""
    fix = "use register_post_accumulate_grad_hook, or change p.grad after the backward"
    return ParameterError(name, "has a hook of register_hook, which would not run", fix)


def _refuse_retired(optimizer: Optimizer, retired: Retired) -> None:
    """Raise OptimizerError for an optimizer of parameters that shards have replaced."""
    kind = type(optimizer).__name__
    if found := [retired[key][1] for key in map(id, parameters_held(optimizer)) if key in retired]:
        problem = f"{kind} holds this parameter from before zcompile.compile; it has no memory any more"
        fix = f"build it afterwards, {kind}(compiled.parameters(), ...), or give it to compile(optimizer=...)"
        raise OptimizerError(found[0], problem, fix)


def check_optimizers(optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    """Raise OptimizerError for an optimizer that holds none of the model's parameters."""
    params = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        if not any(id(param) in params for param in parameters_held(optimizer)):
            problem = f"{type(optimizer).__name__} holds none of the model's parameters"
            raise OptimizerError("optimizer", problem, "give the optimizer that was built over model.parameters()")


def point_at_shards(optimizers: Iterable[Optimizer], shards: Iterable[UnitShards], retired: Retired) -> None:
    """Replace parameters by their shards, in the optimizers' groups and state.

    State shaped like its parameter is sharded like it; other state (steps) stays.
    """
    by_name = {name: (unit, param) for unit in shards for name, param in unit.parameters.items()}
    stands_for = {key: by_name[name] for key, (_, name) in retired.items()}
    stands_for |= {id(param): (unit, param) for unit, param in by_name.values()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [_pointed(optimizer, param, stands_for) for param in group["params"]]


def _pointed(
    optimizer: Optimizer, old: torch.Tensor, stands_for: dict[int, tuple[UnitShards, nn.Parameter]]
) -> torch.Tensor:
    """The replacement for `old`, to which its state is moved."""
    if id(old) not in stands_for:
        return old
    unit, new = stands_for[id(old)]
    if old is not new and old in optimizer.state:
        state: dict[str, Any] = optimizer.state[old]
        name = next(name for name, param in unit.parameters.items() if param is new)
        optimizer.state[new] = {
            key: unit.shard_of(name, local_tensor(value)) if _is_like(key, value, new) else _moved_to_host(value, new)
            for key, value in state.items()
        }
        del optimizer.state[old]
    return new


def _is_like(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """True for state in the shape of its parameter; a step count is not, though it may have a scalar's shape."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"


def _moved_to_host(value: Any, new: torch.Tensor) -> Any:
    """State not in the shape of its parameter: also moved to the host, if the parameter went there from a GPU."""
    moves = isinstance(value, torch.Tensor) and is_host(new.device) and not is_host(value.device)
    return value.to(new.device) if moves else value


def _called_by_scaler() -> bool:
    """True within `GradScaler.step`: only the stack shows that gradients were scaled."""
    frame = inspect.currentframe()
    for _ in range(13):
        frame = frame.f_back if frame else None
        scaler = frame.f_locals.get("self") if frame else None
        if isinstance(scaler, torch.amp.GradScaler):
            return bool(scaler.is_enabled())
    return False


def check_before_step(parameters: Iterable[tuple[str, torch.Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Refuse a train step that would go wrong; `optimizers`: those that use gradients as they arrive.

    Raises:
        OptimizerError: one of them has a hook before its step, which would find no gradients.
        ParameterError: a parameter has a gradient already.
    """
    for optimizer in optimizers:
        if has_step_pre_hooks(optimizer):
            problem = f"{type(optimizer).__name__} has a hook before its step, which would find no gradients"
            raise OptimizerError("optimizer", problem, "use a hook after the step")
    with no_torch_function():
        found = [name for name, parameter in parameters if parameter.grad is not None]
    if found:
        fix = "call optimizer.step() or zero_grad() before the train step"
        raise ParameterError(found[0], "has a gradient already, which the train step would not add to its own", fix)
