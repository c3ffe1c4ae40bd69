"""Delivery of gradients: reduced shards into `.grad`, all of a backward at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile._torch import after_backward, backward_number, local_tensor, post_accumulate_hooks
from zcompile.runtime.executor import Gradients


@dataclass
class _Backward:
    """One backward while it runs: what it has reduced so far, and what is to be reduced at its end."""

    reduced: list[Gradients] = field(default_factory=list)
    late: list[Callable[[], Sequence[Gradients]]] = field(default_factory=list)
    events: list[torch.cuda.Event] = field(default_factory=list)


class Delivery:
    """Collects the gradients of a backward and adds them to `.grad` when all of it has run.

    So a backward that fails half-way leaves every `.grad` as it was, a parameter that several programs read gets one
    sum, and hooks of `register_post_accumulate_grad_hook` run once.
    """

    def __init__(self) -> None:
        self._running: dict[int, _Backward] = {}

    def forget(self) -> None:
        """Drop what backwards that failed have left; called where no backward runs."""
        if self._running and backward_number() is None:
            self._running.clear()

    def add(self, reduced: Sequence[Gradients]) -> None:
        """Take gradients of the backward that runs now, for delivery at its end."""
        running = self._current()
        running.reduced += reduced
        if reduced and torch.cuda.is_available():
            # Delivery runs on the caller's stream, which autograd joins only with the streams of its leaves.
            running.events.append(torch.cuda.current_stream().record_event())

    def at_end(self, reduce: Callable[[], Sequence[Gradients]]) -> None:
        """Call `reduce` when the backward that runs now has come to its end, and deliver what it gives."""
        self._current().late.append(reduce)

    def _current(self) -> _Backward:
        number = backward_number()
        assert number is not None, "gradients come from a backward"
        if number not in self._running:
            self._running[number] = _Backward()
            after_backward(lambda: self._finish(number))
        return self._running[number]

    @torch.no_grad()
    def _finish(self, number: int) -> None:
        ended = self._running.pop(number)
        for event in ended.events:
            torch.cuda.current_stream().wait_event(event)
        for reduce in ended.late:
            ended.reduced += reduce()
        changed: dict[nn.Parameter, None] = {}
        for gradients in ended.reduced:
            for name, tensor in gradients.tensors.items():
                parameter = gradients.shards.parameters[name]
                if parameter.grad is None:
                    parameter.grad = _like(gradients, name, tensor)
                else:
                    _local(parameter.grad).add_(tensor)
                changed[parameter] = None
        for parameter in changed:
            for hook in post_accumulate_hooks(parameter):
                hook(parameter)


def _like(gradients: Gradients, name: str, tensor: torch.Tensor) -> torch.Tensor:
    shards = gradients.shards
    if not isinstance(shards.parameters[name], DTensor):
        return tensor
    unit = shards.unit
    return shards.distribute(unit.params[unit.index(name)], tensor)


def _local(gradient: torch.Tensor | nn.Parameter) -> torch.Tensor:
    return local_tensor(gradient) if isinstance(gradient, DTensor) else gradient
