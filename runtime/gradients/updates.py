"""Updates: optimizers step some of their parameters within the backward, as gradients arrive."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from zcompile.errors import OptimizerError
from zcompile.runtime.executor import Gradients
from zcompile.runtime.gradients.delivery import set_gradients
from zcompile.runtime.gradients.local_steps import LocalSteps
from zcompile.runtime.gradients.optimizer_trials import first_state, sharing
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.optimizers import unhooked_step


class States(Protocol):
    """Where optimizer state is between updates."""

    def begin(self) -> None:
        """A step begins."""

    def before(self, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters, all of one unit, are about to be updated: make their state available."""

    def after(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """`optimizer` has updated these parameters."""

    def end(self) -> None:
        """The updates of the step are over, or one has failed."""


class Updater:
    """Steps optimizers for the parameters of one unit at a time.

    The step is the optimizer's own, on an object that shares its state and whose groups have these parameters only. It
    equals one step for all if the optimizer treats each parameter by itself. Changes to its groups, such as a step
    count, are dropped: all units start from the same, and the optimizer's own step at the end (`finish`) makes them
    once.

    Raises:
        OptimizerError: an optimizer does not (L-BFGS, those that count in attributes).
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.slots = [_check_separable(optimizer) for optimizer in optimizers]
        """The names of each optimizer's state in the shape of a parameter, with its dtype for a float32 parameter."""
        self.optimizers = optimizers
        self.states: States | None = None
        """Where optimizer state is, if it is not in the device's memory."""
        self._local = LocalSteps()
        self._seen: list[list[int]] = []
        """The ids of the parameters in all groups when the next two were made."""
        self._groups: dict[int, list[tuple[Optimizer, int]]] = {}
        """By the id of a parameter: the optimizers that have it, and the number of the group."""
        self._steps: dict[tuple[str, ...], list[tuple[Optimizer, dict[int, list[nn.Parameter]]]]] = {}
        """By the names of an update's parameters: the optimizers that step, with their parameters by group number."""
        self._by_rows: dict[Optimizer, bool] = {}
        """Which optimizers step this rank's parts as plain tensors in the current step."""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the backward that updates. After it, even if it fails, optimizer state may be read and written."""
        self._read_groups()
        try:
            if self.states is not None:
                self.states.begin()
            yield
        finally:
            if self.states is not None:
                self.states.end()

    def _read_groups(self) -> None:
        """Groups may have grown since the last step."""
        self._by_rows = {optimizer: self._local.wanted(optimizer) for optimizer in self.optimizers}
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        if (seen := [[*map(id, params)] for params in groups]) == self._seen:
            return
        self._seen, self._groups, self._steps = seen, {}, {}
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._groups.setdefault(id(parameter), []).append((optimizer, number))

    @torch.no_grad()
    def __call__(self, gradients: Gradients) -> None:
        """Step every optimizer for the parameters of `gradients`."""
        shards = gradients.shards
        parameters = [shards.parameters[name] for name in gradients.tensors]
        try:
            set_gradients(gradients)
            if self.states is not None:
                self.states.before(parameters)
            for optimizer, groups in self._held(tuple(gradients.tensors), parameters):
                _step(optimizer, groups, self._local if self._by_rows[optimizer] else None)
                if self.states is not None:
                    self.states.after(optimizer, parameters)
        finally:
            with no_torch_function():
                for parameter in parameters:
                    parameter.grad = None

    def finish(self) -> None:
        """Step the optimizers for parameters that still have a gradient: those that are not the model's.

        This calls their own `step`, so schedulers and hooks see one step. All other parameters are out of the groups
        meanwhile: some optimizers raise for a parameter without a gradient, or decay it.
        """
        for optimizer in self.optimizers:
            groups = optimizer.param_groups
            every = [group["params"] for group in groups]
            try:
                with no_torch_function():
                    for group in groups:
                        group["params"] = [parameter for parameter in group["params"] if parameter.grad is not None]
                optimizer.step()
            finally:
                for group, params in zip(groups, every, strict=True):
                    group["params"] = params

    def _held(
        self, names: tuple[str, ...], parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Optimizer, dict[int, list[nn.Parameter]]]]:
        """The optimizers of `parameters`, which are called `names`, each with its parameters by group number."""
        if names not in self._steps:
            result: dict[int, tuple[Optimizer, dict[int, list[nn.Parameter]]]] = {}
            for parameter in parameters:
                for optimizer, number in self._groups.get(id(parameter), ()):
                    _, groups = result.setdefault(id(optimizer), (optimizer, defaultdict(list)))
                    groups[number].append(parameter)
            self._steps[names] = list(result.values())
        return self._steps[names]


def _step(optimizer: Optimizer, groups: dict[int, list[nn.Parameter]], local: LocalSteps | None = None) -> None:
    """Step `optimizer` for the parameters in `groups` only; with `local`, this rank's parts as plain tensors."""
    narrowed = [{**optimizer.param_groups[number], "params": params} for number, params in sorted(groups.items())]
    if local is None:
        unhooked_step(sharing(optimizer, param_groups=narrowed))
        return
    step = local.begin(optimizer, narrowed, whole=False)
    if step.is_idle:
        return
    unhooked_step(step.optimizer)
    step.finish()


def _check_separable(optimizer: Optimizer) -> dict[str, torch.dtype]:
    """Compare steps for two parameters at once with steps for one after the other, with the options of each group.

    Returns the names and dtypes of the optimizer's state in the shape of a parameter.

    Raises:
        OptimizerError: they differ, in the parameters or in the groups after a step.
    """
    kind, fix = type(optimizer).__name__, "use the loop: loss.backward(); optimizer.step(); optimizer.zero_grad()"
    groups: list[dict[str, Any]] = []
    if sharing(optimizer, param_groups=groups).param_groups is not groups:
        problem = f"{kind} only wraps another optimizer"
        raise OptimizerError("optimizer", problem, "give the one that it wraps")
    slots: dict[str, torch.dtype] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for scale in (1.0, 1e3):
            try:
                together, group, state = _tried(optimizer, options, scale, apart=False)
                apart, after, _ = _tried(optimizer, options, scale, apart=True)
            except Exception as error:
                problem = f"{kind} cannot step for some of its parameters alone: {type(error).__name__}: {error}"
                raise OptimizerError("optimizer", problem, fix) from error
            same = all(_equal(group.get(key), after.get(key)) for key in {**group, **after})
            if not same or any(not torch.equal(one, other) for one, other in zip(together, apart, strict=True)):
                problem = f"{kind} steps some of its parameters alone differently from all at once"
                raise OptimizerError("optimizer", problem, fix)
        kept = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
        slots |= {name: value.dtype for name, value in kept.items() if value.shape == together[0].shape}
    return slots


def _tried(
    optimizer: Optimizer, options: dict[str, Any], scale: float, *, apart: bool
) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Two parameters after three steps, at once or one after the other; options of the group; state of the first.

    Raises:
        ValueError: a step changes an attribute, which would be lost in a step for part of a group; or no parameter.
    """
    devices = (p.device for group in optimizer.param_groups for p in group["params"] if not p.is_meta)
    device = next(devices, torch.device("cpu"))
    values = torch.arange(32, dtype=torch.float32, device=device).view(2, 4, 4) / 32
    parameters = [nn.Parameter(value.clone()) for value in values]
    group = {**copy.deepcopy(options), "params": parameters}
    if "lr" in group:  # a schedule may begin at 0
        group["lr"] = torch.full_like(group["lr"], _RATE) if isinstance(group["lr"], torch.Tensor) else _RATE
    tried = sharing(optimizer, state=first_state(optimizer, group), param_groups=[group])
    attributes = dict(tried.__dict__)
    for _ in range(3):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = scale * (value.flip(0) - 0.25)
        if apart:
            for parameter in parameters:
                _step(tried, {0: [parameter]})
            group["params"] = []
            unhooked_step(tried)
            group["params"] = parameters
        else:
            unhooked_step(tried)
    if changed := [key for key, value in tried.__dict__.items() if attributes.get(key) is not value]:
        raise ValueError(f"it changes its attribute {changed[0]!r}")
    if all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True)):
        raise ValueError("it changes no parameter")
    after = {key: value for key, value in group.items() if key != "params"}
    return [parameter.detach() for parameter in parameters], after, tried.state[parameters[0]]


_RATE = 0.01


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
