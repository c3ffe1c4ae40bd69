"""Local steps: an optimizer steps this rank's parts as plain tensors where it treats each element by itself.

torch's own mostly do, and on DTensors each of their operations costs a dispatch; of others a trial tells. A parameter
with an owner is stepped there as a plain tensor by any optimizer; on the other ranks the optimizer does not see it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from zcompile.errors import ParameterError
from zcompile.runtime.gradients.optimizer_trials import parameters_of, sharing, small_parameter, steps_local_tensors
from zcompile.runtime.tensors.owned import is_here, owner_of, part_of
from zcompile.runtime.tensors.placement import Placing
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.optimizers import innermost_hooks, no_step_hooks


class LocalSteps:
    """Which optimizers step local tensors, found out at the first step of each."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._locals = WeakTensorKeyDictionary()
        """What stands for each parameter, always the same: optimizers may keep state of their own by it."""

    def wanted(self, optimizer: Optimizer) -> bool:
        """True if `optimizer` is to step local tensors, be it only for those parameters that have an owner.

        Collective at its first step, where it is tried on DTensors.

        Raises:
            OptimizerError: on every rank: it cannot step parameters that are sharded, or would step them otherwise.
        """
        return self._steps_rows(optimizer) or any(owner_of(p) is not None for p in parameters_of(optimizer))

    def _steps_rows(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._found:
            self._found[optimizer] = steps_local_tensors(optimizer)
        return self._found[optimizer]

    def begin(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], *, whole: bool = True) -> LocalStep:
        """A step of `optimizer` on local tensors, for the parameters in `groups`: `whole` if these are all that it has.

        Of such a step every group has a parameter: where other ranks own all of them one that nobody reads, as many
        optimizers look at their first.
        """
        with no_torch_function():  # a parameter's own costs more than what it is asked for
            return LocalStep(optimizer, groups, self._locals, rows=self._steps_rows(optimizer), whole=whole)


class LocalStep:
    """One step of `optimizer` on local tensors: `optimizer` in it shares its state, and has `groups` of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[dict[str, Any]],
        known: MutableMapping[torch.Tensor, nn.Parameter],
        *,
        rows: bool,
        whole: bool,
    ) -> None:
        """`known`: what has stood for parameters in steps before. `rows`: also of those whose rows are divided."""
        self._real, self._groups, self._known, self._rows = optimizer, groups, known, rows
        self._locals: list[tuple[torch.Tensor, torch.Tensor]] = []
        here = [[param for param in group["params"] if owner_of(param) is None or is_here(param)] for group in groups]
        local = [{**group, "params": [self._local(p) for p in some]} for group, some in zip(groups, here, strict=True)]
        self.is_idle = not any(group["params"] for group in local)
        """True where other ranks own all parameters of the step."""
        self._unread: set[int] = set()
        for group, mine in zip(groups, local, strict=True):
            if whole and group["params"] and not mine["params"]:
                mine["params"] = [unread := small_parameter(group["params"][0])]
                self._unread.add(id(unread))
        state: dict[Any, Any] = defaultdict(dict)
        stepped = {id(param) for param, _ in self._locals}
        state |= {key: value for key, value in optimizer.state.items() if id(key) not in stepped}
        state |= {
            mine: {k: local_tensor(v) if isinstance(v, DTensor) else v for k, v in optimizer.state[param].items()}
            for param, mine in self._locals
            if param in optimizer.state
        }
        self.optimizer = sharing(optimizer, param_groups=local, state=state)

    def _local(self, param: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor) or not (self._rows or owner_of(param) is not None):
            return param
        if param not in self._known:
            self._known[param] = nn.Parameter(local_tensor(param), requires_grad=param.requires_grad)
        made = self._known[param].requires_grad_(param.requires_grad)
        made.data = local_tensor(param)  # whatever a step before has put there
        vars(made).update(vars(param))  # marks that the optimizer reads
        self._locals.append((param, made))
        made.grad = _local_gradient(param)
        return made

    def refresh(self) -> None:
        """Take over the gradients that a closure has brought."""
        with no_torch_function():
            for param, mine in self._locals:
                mine.grad = _local_gradient(param)

    def finish(self) -> None:
        """Hand over what the step has left: state as DTensors that follow their parameters, groups, attributes."""
        with no_torch_function():
            self._hand_over_state(self.optimizer.state)
        for group, stepped in zip(self._groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        own = {"state", "param_groups", *no_step_hooks()}
        self._real.__dict__.update({key: value for key, value in self.optimizer.__dict__.items() if key not in own})

    def _hand_over_state(self, state: MutableMapping[Any, Any]) -> None:
        for param, mine in self._locals:
            if mine.data_ptr() != (held := local_tensor(param)).data_ptr():
                held.copy_(mine.detach())  # the step has put another tensor into `.data`
            mine.grad = None  # it would outlive the parameter's, which is dropped before the next step
            if mine in state:
                before = self._real.state.get(param, {})
                kept = {key: _sharded(param, key, value, before.get(key)) for key, value in state[mine].items()}
                self._real.state[param] = kept
        local = {id(mine) for _, mine in self._locals} | self._unread
        self._real.state.update({key: value for key, value in state.items() if id(key) not in local})


def plain_gradient(name: str) -> ParameterError:
    """The refusal of a gradient that nobody has averaged."""
    problem = "is a DTensor, and its `.grad` was set to a plain tensor, by code or by a torch.autograd.Function"
    fix = "change it by operations on it, which give a DTensor; give such a function parameter.clone()"
    return ParameterError(name, problem, fix)


def _local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient; collective where the user has given it other placements than its parameter's.

    Raises:
        ParameterError: it is a plain tensor, the parameter a DTensor.
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
    """The next `optimizer.step()`, on local tensors, between the hooks of the optimizer's own.

    These see and change the optimizer that they are registered on: what they do before the step is in it, and what they
    do after it stays. To be removed once the step is over.
    """

    def __init__(self, optimizer: Optimizer, steps: LocalSteps) -> None:
        self._steps = steps
        self._local: LocalStep | None = None
        self._handles = innermost_hooks(optimizer, self._begin, self._finish)

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if args[0] is not optimizer:  # it holds parameters of two models, and the other's step is this one
            return None
        self._local = self._steps.begin(optimizer, optimizer.param_groups)
        return (self._local.optimizer, *args[1:]), kwargs

    def refresh(self) -> None:
        """Take over the gradients that a closure has brought."""
        if self._local is not None:
            self._local.refresh()

    def _finish(self, *_: object) -> None:
        if self._local is not None:
            self._local.finish()

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()


def _sharded(param: torch.Tensor, key: str, value: Any, before: Any) -> Any:
    """State as it stands beside a parameter that is sharded."""
    if isinstance(before, DTensor) and local_tensor(before) is value:
        return before
    follows = isinstance(value, torch.Tensor) and value.shape == local_tensor(param).shape and key != "step"
    if not follows or not isinstance(param, DTensor):
        return value
    return Placing.of(param).place(value)
