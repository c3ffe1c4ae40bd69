"""Local steps: an optimizer steps this rank's parts as plain tensors if it treats each element by itself.

Most of torch's do, and on DTensors each of their operations costs a dispatch; others are tried. A parameter with an
owner is stepped there as a plain tensor by any optimizer; on other ranks the optimizer does not see it.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from zcompile.errors import ParameterError
from zcompile.runtime.gradients.optimizer_trials import parameters_held, sharing, small_parameter, steps_local_tensors
from zcompile.runtime.tensors.explained import ExplainedDTensor
from zcompile.runtime.tensors.owned import is_here, owner_of, part_of
from zcompile.runtime.tensors.placement import Placing
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import gradients_laid_out_alike, local_tensor, local_values
from zcompile.torch_internals.optimizers import innermost_hooks, no_step_hooks


class LocalSteps:
    """Which optimizers step local tensors, determined at the first step of each."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._known = WeakTensorKeyDictionary()
        """The local parameter of each parameter, always the same object: optimizers may key state of their own by
        it."""
        self._sets: WeakKeyDictionary[Optimizer, dict[Any, LocalParameters]] = WeakKeyDictionary()
        """By the ids of the parameters in each group of a step."""

    def wanted(self, optimizer: Optimizer) -> bool:
        """True if `optimizer` is to step local tensors, even if only for parameters that have an owner.

        Collective at its first step, where it is tried on DTensors.

        Raises:
            OptimizerError: on every rank: it cannot step sharded parameters, or would step them differently.
        """
        params = parameters_held(optimizer)
        sharded = itertools.compress(params, map(isinstance, params, itertools.repeat(DTensor)))
        return self._steps_rows(optimizer) or any(owner_of(param) is not None for param in sharded)

    def _steps_rows(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._found:
            self._found[optimizer] = steps_local_tensors(optimizer)
        return self._found[optimizer]

    def begin(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], *, whole: bool = True) -> LocalStep:
        """A step of `optimizer` on local tensors for the parameters in `groups`; `whole`: these are all that it has.

        In such a step every group has a parameter, because many optimizers look at its first one: if other ranks own
        all of a group's parameters, it gets a dummy.
        """
        with no_torch_function():  # a parameter's own costs more than these queries
            return LocalStep(optimizer, groups, self._local_parameters(optimizer, groups, whole), whole=whole)

    def _local_parameters(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], whole: bool) -> LocalParameters:
        key = tuple([tuple(map(id, group["params"])) for group in groups])
        sets = self._sets.setdefault(optimizer, {})
        if key not in sets:
            if whole:  # the groups have changed: parameters that have left them must not be kept alive
                sets.clear()
            rows = self._steps_rows(optimizer)
            sets[key] = LocalParameters([group["params"] for group in groups], self._known, rows=rows)
        return sets[key]


class LocalParameters:
    """Plain parameters that alias this rank's parts, which an optimizer steps in place of its own.

    They are made once for the groups of a step. Each step then takes few calls for all of them: models have thousands
    of parameters, and on a GPU a step is bound by the host.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        known: MutableMapping[torch.Tensor, nn.Parameter],
        *,
        rows: bool,
    ) -> None:
        """`known`: the local parameters of other sets. `rows`: include parameters whose rows are divided."""
        self._held = [*itertools.chain(*groups)]  # kept alive, so that their ids, the key of this set, are not reused
        self.sharded: list[DTensor] = []
        self.local: list[nn.Parameter] = []
        self.groups: list[list[torch.Tensor]] = [[] for _ in groups]
        """The parameters that the optimizer sees in each group: none that other ranks own."""
        for params, mine in zip(groups, self.groups, strict=True):
            for param in params:
                owner = owner_of(param)
                if not isinstance(param, DTensor) or not (rows or owner is not None):
                    mine.append(param)
                elif owner is None or is_here(param):
                    if param not in known:
                        known[param] = nn.Parameter(local_tensor(param), requires_grad=param.requires_grad)
                    mine.append(known[param])
                    self.sharded.append(param)
                    self.local.append(known[param])
        self._stepped = {*map(id, self.sharded)}
        self._own = {*map(id, self.local)}
        self._others = {*map(id, self._held)} - self._stepped

    def refresh(self) -> None:
        """Update memory, attributes and gradients from the parameters."""
        for param, mine, memory in zip(self.sharded, self.local, local_values(self.sharded), strict=True):
            mine.data = memory  # an earlier step may have replaced it
            mine.requires_grad = param.requires_grad
            mine.__dict__.update(param.__dict__)  # marks that the optimizer reads
        self.take_gradients()

    def take_gradients(self) -> None:
        """Update the gradients; collective if one has other placements than its parameter."""
        alike = gradients_laid_out_alike(self.sharded, ExplainedDTensor)
        for param, mine, gradient in zip(self.sharded, self.local, alike, strict=True):
            mine.grad = _local_gradient(param) if gradient is None else gradient

    def settle(self) -> None:
        """After a step: copy a replaced `.data` into the parameter's memory, and drop gradients."""
        memories = local_values(self.sharded)
        addresses = zip(map(torch.Tensor.data_ptr, self.local), map(torch.Tensor.data_ptr, memories), strict=True)
        for mine, memory, (put, held) in zip(self.local, memories, addresses, strict=True):
            if put != held:
                memory.copy_(mine.detach())
            mine.grad = None  # or it would outlive the parameter's own, which is dropped before the next step

    def local_state(self, state: Mapping[Any, Any], *, whole: bool) -> defaultdict[Any, Any]:
        """An optimizer's state with local tensors; if not `whole`, without the state of other parameters.

        Tensors are looked up by id: hashing one is a Python call.
        """
        by_id = dict(zip(map(id, state), state.values(), strict=True))
        kept = [*map(by_id.get, map(id, self.sharded))]
        there = [one is not None for one in kept]
        values = iter(local_values([one[name] for one in kept if one is not None for name in one]))
        local = [one if one is None else dict(zip(one, values, strict=False)) for one in kept]
        made = defaultdict[Any, Any](dict, _where(zip(self.local, local, strict=True), there))
        are_tensors = map(isinstance, state, itertools.repeat(torch.Tensor))
        pairs = zip(by_id, are_tensors, strict=True)
        shown = [key not in self._stepped and (whole or not other or key in self._others) for key, other in pairs]
        made.update(_where(state.items(), shown))
        return made

    def sharded_state(self, state: Mapping[Any, Any], before: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """A step's local state as DTensors, for the parameters; `before`: their state before the step."""
        for param, mine in zip(self.sharded, self.local, strict=True):
            if mine in state:
                old = before.get(param, {})
                yield param, {key: _sharded(param, key, value, old.get(key)) for key, value in state[mine].items()}
        yield from _where(state.items(), [key not in self._own for key in map(id, state)])


def _where(pairs: Iterable[tuple[Any, Any]], chosen: Iterable[bool]) -> Iterator[tuple[Any, Any]]:
    return itertools.compress(pairs, chosen)


class LocalStep:
    """One step of `optimizer` on local tensors, by its attribute `optimizer`, which shares state and has `groups`."""

    def __init__(
        self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], params: LocalParameters, *, whole: bool
    ) -> None:
        self._real, self._groups, self._params = optimizer, groups, params
        params.refresh()
        local = [{**group, "params": [*mine]} for group, mine in zip(groups, params.groups, strict=True)]
        self.is_idle = not any(params.groups)
        """True if other ranks own all parameters of the step."""
        self._unread: list[nn.Parameter] = []
        for group, mine in zip(groups, local, strict=True):
            if whole and group["params"] and not mine["params"]:
                mine["params"] = [small_parameter(group["params"][0])]
                self._unread += mine["params"]
        state = params.local_state(optimizer.state, whole=whole)
        self._before = contents(state)
        self.optimizer = sharing(optimizer, param_groups=local, state=state)

    def refresh(self) -> None:
        """Update the gradients after a closure."""
        with no_torch_function():
            self._params.take_gradients()

    def finish(self) -> None:
        """Write back the results: state as DTensors placed like their parameters, groups, attributes."""
        stepped = self.optimizer
        with no_torch_function():
            self._params.settle()
            for unread in self._unread:
                stepped.state.pop(unread, None)
            if not are_same(self._before, contents(stepped.state)):  # otherwise all was changed in place
                self._real.state.update(self._params.sharded_state(stepped.state, self._real.state))
        for group, left in zip(self._groups, stepped.param_groups, strict=True):
            group.update({key: value for key, value in left.items() if key != "params"})
        own = {"state", "param_groups", *no_step_hooks()}
        self._real.__dict__.update({key: value for key, value in stepped.__dict__.items() if key not in own})


def contents(state: Mapping[Any, Any]) -> list[Any]:
    """All objects in an optimizer's state, with their keys, in order."""
    nested = [value for value in state.values() if value.__class__ is dict]
    named = [part for value in nested for key in value for part in (key, value[key])]
    return [*state, *state.values(), *named]


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if they are the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def plain_gradient(name: str) -> ParameterError:
    """The error for a plain gradient, which nobody has averaged."""
    problem = "is a DTensor, and its `.grad` was set to a plain tensor, by code or by a torch.autograd.Function"
    fix = "change it by operations on it, which return a DTensor; pass such a function parameter.clone()"
    return ParameterError(name, problem, fix)


def _local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient; collective if the user has given it other placements than its parameter's.

    Raises:
        ParameterError: it is a plain tensor, and the parameter a DTensor.
    """
    grad = param.grad
    if grad is None or not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        name = getattr(param, "zcompile_name", "a parameter")
        raise plain_gradient(name)
    if owner_of(param) is not None and owner_of(grad) is None:  # every rank has it, or rows of it
        return part_of(grad.full_tensor(), param)
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_tensor(grad)


class HookedStep:
    """The next `optimizer.step()`, on local tensors, between the optimizer's own hooks.

    These see and change the optimizer on which they are registered: the step uses what they change before it, and keeps
    what they change after it. Remove it once the step is over.
    """

    def __init__(self, optimizer: Optimizer, steps: LocalSteps) -> None:
        self._steps = steps
        self._local: LocalStep | None = None
        self._handles = innermost_hooks(optimizer, self._begin, self._finish)

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if args[0] is not optimizer:  # it has parameters of two models, and the other model already runs this step
            return None
        self._local = self._steps.begin(optimizer, optimizer.param_groups)
        return (self._local.optimizer, *args[1:]), kwargs

    def refresh(self) -> None:
        """Update the gradients after a closure."""
        if self._local is not None:
            self._local.refresh()

    def _finish(self, *_: object) -> None:
        if self._local is not None:
            self._local.finish()

    def remove(self) -> None:
        """Restore the optimizer."""
        for handle in self._handles:
            handle.remove()


def _sharded(param: torch.Tensor, key: str, value: Any, before: Any) -> Any:
    """A value of local state, as a DTensor placed like its parameter if it has the parameter's shape."""
    if isinstance(before, DTensor) and local_tensor(before) is value:
        return before
    follows = isinstance(value, torch.Tensor) and value.shape == local_tensor(param).shape and key != "step"
    if not follows or not isinstance(param, DTensor):
        return value
    return Placing.of(param).place(value)
