"""Gradients from outside of programs: of plain parameters (stage 0) that code beside the model's own call reads.

    hidden = compiled.encode(x)             # the model's own modules and methods: plain PyTorch, nothing is compiled
    compiled.head(hidden).sum().backward()  # autograd brings this rank's own gradients to the parameters

They are averaged like all others: what autograd brings is taken before it gets into `.grad`, averaged when the backward
has ended, and delivered with what programs give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from zcompile.errors import ParameterError
from zcompile.runtime.executor import BoundUnit, Gradients, accumulate
from zcompile.runtime.gradients.delivery import Delivery
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.shards import UnitShards
from zcompile.torch_internals.autograd import backward_number, post_accumulate_hooks, wants_gradient


@dataclass
class Outside:
    """What autograd has brought to the parameters of a model in the backwards that run."""

    units: Mapping[str, UnitShards]
    delivery: Delivery
    _brought: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By the number of the backward, and the name of the parameter."""

    def watch(self) -> None:
        """Take what autograd brings to the parameters from now on."""
        for unit in self.units.values():
            for name, parameter in unit.parameters.items():
                if parameter.requires_grad:
                    parameter.register_hook(EagerGradHook(self, name, parameter))
                else:  # only what requires gradients takes hooks, and it may do so later
                    parameter.requires_grad_(True).register_hook(EagerGradHook(self, name, parameter))
                    parameter.requires_grad_(False)

    def take(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Take a gradient; gives the zeros that get into `.grad` in its place."""
        number = backward_number()
        assert number is not None, "autograd calls hooks within a backward"
        if number not in self._brought:  # a checkpoint runs a backward within another
            self._brought = {n: brought for n, brought in self._brought.items() if self.delivery.runs(n)}
            self._brought[number] = {}
            self.delivery.at_end(lambda: self._reduce(self._brought.pop(number)))
        brought = self._brought[number]
        brought[name] = brought[name] + gradient if name in brought else gradient.clone()
        return torch.zeros_like(gradient)

    def _reduce(self, brought: Mapping[str, torch.Tensor]) -> Sequence[Gradients]:
        """Average what any rank's autograd has brought. Collective."""
        if not self.delivery.synchronises:
            return [accumulate(bound, grads) for bound, grads in self._bound(brought, set(brought))]
        names = [name for unit in self.units.values() for name in unit.parameters]
        self.delivery.enter(RunKind.GRADIENTS, hashlib.sha256(b"outside of programs").hexdigest())
        self.delivery.lockstep.check()  # the host waits here anyway
        communicator = self.delivery.lockstep.communicator
        flags = torch.tensor([name in brought for name in names], dtype=torch.int32)
        on_any = communicator.any_rank(flags).tolist()
        wanted = {name for name, flag in zip(names, on_any, strict=True) if flag}
        return [self.delivery.reduce(bound, grads) for bound, grads in self._bound(brought, wanted)]

    def _bound(
        self, brought: Mapping[str, torch.Tensor], wanted: set[str]
    ) -> Iterator[tuple[BoundUnit, list[torch.Tensor | None]]]:
        """For each unit with `wanted` parameters their gradients, zeros where this rank has none."""
        for unit in self.units.values():
            if wanted.intersection(names := unit.unit.names):
                full = [
                    self._full(unit.parameters[name], brought.get(name)) if name in wanted else None for name in names
                ]
                yield BoundUnit(unit, unit.unit), full

    @staticmethod
    def _full(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(parameter.detach()) if gradient is None else gradient


@dataclass(frozen=True)
class EagerGradHook:
    """A hook on a parameter."""

    outside: Outside
    name: str
    parameter: torch.nn.Parameter
    is_own = True
    """Tells it from the user's hooks."""
    __torch_unserializable__ = True

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Take the gradient, unless it is not for `.grad`: `torch.autograd.grad` gets it as it is.

        None: a program brings it.

        Raises:
            ParameterError: the parameter is tensor-parallel, or has a hook that would run before the average.
        """
        if gradient is None or not wants_gradient(get_gradient_edge(self.parameter).node):
            return None
        if post_accumulate_hooks(self.parameter):
            fix = "remove the hook, or let the forward of the model do it and call the compiled model"
            raise ParameterError(self.name, "was read outside of the model's call, and has a hook on its gradient", fix)
        if isinstance(gradient, DTensor):
            fix = "let the forward of the model do it, and call the compiled model"
            raise ParameterError(self.name, "is tensor-parallel, and was read outside of the model's call", fix)
        return self.outside.take(self.name, gradient)
