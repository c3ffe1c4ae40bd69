"""Delivery of gradients: reduced shards are added to `.grad`, all those of a backward at once."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from zcompile.errors import BackwardError, ParameterError
from zcompile.ir.layout import Unit
from zcompile.runtime.device import current_stream, is_gpu
from zcompile.runtime.executor import BoundUnit, Gradients, accumulate, average
from zcompile.runtime.gradients.local_steps import plain_gradient
from zcompile.runtime.lockstep import Lockstep, RunExchange, RunKind
from zcompile.runtime.recorder import Recorder
from zcompile.runtime.shards import UnitShards
from zcompile.runtime.tensors.parameter import ShardedParameter, single_gradient_error
from zcompile.torch_internals.autograd import (
    after_backward,
    backward_number,
    have_post_accumulate_hooks,
    is_asked_for,
    post_accumulate_hooks,
    wants_gradient,
    within_compiled_autograd,
)
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.distributed import add_all
from zcompile.torch_internals.dtensor import local_tensor

Unreached = Callable[[], Collection[str]]
"""Returns the parameters that no gradient has reached on any rank, for which zeros are delivered; call it only once the
ranks are known to be in step."""
HOLDS = 0
"""The mark, in the messages of a backward, of a rank that holds gradients back."""


def _none() -> Collection[str]:
    return ()


@dataclass
class _Backward:
    """A backward that is running: its gradients so far, and what is reduced at its end."""

    keeps: bool
    """True if there were averaged gradients when it began."""
    gradients: list[tuple[Gradients, Unreached]] = field(default_factory=list)
    calls: list[RunExchange] = field(default_factory=list)
    """The ranks' exchanges about its programs."""
    late: list[Callable[[], Sequence[Gradients]]] = field(default_factory=list)
    events: list[torch.Event] = field(default_factory=list)
    may_overflow: bool = False
    discarded: bool = False


class Delivery:
    """Collects the gradients of a backward and adds them to `.grad` when all of it has run.

    So a backward that fails half-way leaves every `.grad` as it was, a parameter that several programs read gets one
    sum, and hooks of `register_post_accumulate_grad_hook` run once.
    """

    def __init__(
        self, units: Mapping[str, UnitShards], *, scatter: bool, recorder: Recorder, lockstep: Lockstep
    ) -> None:
        self.units, self.scatter, self.recorder, self.lockstep = units, scatter, recorder, lockstep
        self.synchronises = True
        """False under `no_sync`: stages that keep full gradients hold them back."""
        self.flowing: Sequence[bool] | None = None
        """Set before the backward of a program: which results of its forward get a gradient from autograd."""
        self.kinds: Sequence[Any] | None = None
        """Set with `flowing` if some get none and the program has to handle that: what autograd knows of the
        results."""
        self.results: int | None = None
        """Set by the forward of a program: its number of results; None if others may be among them."""
        self._running: dict[int, _Backward] = {}

    def forget(self) -> None:
        """Drop what failed backwards have left; does nothing while a backward runs."""
        if backward_number() is None:
            self._running.clear()

    def enter(
        self, kind: RunKind, program: str, marks: Sequence[int] = (), variant: int = 0, *, is_new: bool = False
    ) -> RunExchange:
        """Report a part of the current backward to the other ranks; see `Lockstep.enter`.

        Raises:
            AgreementError: an earlier run is known to be out of step.
        """
        holds = [HOLDS] if any(unit.names_held() for unit in self.units.values()) else []
        running = self._current()
        call = self.lockstep.enter(kind, program, [*holds, *marks], variant, keeps=running.keeps, is_new=is_new)
        running.calls.append(call)
        return call

    def add(self, gradients: Sequence[Gradients], unreached: Unreached = _none) -> None:
        """Collect gradients of the current backward, for delivery at its end."""
        running = self._current()
        running.gradients += [(one, unreached) for one in gradients]
        devices = {one.shards.communicator.device for one in gradients}
        # Delivery runs on the caller's stream, which autograd synchronizes only with the streams of its leaves. Use
        # the model's device: the caller's current device may be another one.
        running.events += [current_stream(device).record_event() for device in devices if is_gpu(device)]

    def at_end(self, reduce: Callable[[], Sequence[Gradients]]) -> None:
        """Call `reduce` at the end of the current backward, and deliver its result."""
        self._current().late.append(reduce)

    def runs(self, number: int) -> bool:
        """True while the backward with this number delivers gradients, and is not known to have failed."""
        return number in self._running

    def expect_overflow(self) -> None:
        """The current backward has scaled float16 gradients, whose overflow must reach every rank."""
        self._current().may_overflow = True

    def discard(self) -> None:
        """The current backward does not ask for gradients of all parameters: deliver none.

        Raises:
            BackwardError: it asks for those of some.
        """
        self._current().discarded = True
        for unit in self.units.values():
            for name, parameter in (unit.parameters | unit.user_params).items():
                is_leaf = parameter.requires_grad and not isinstance(parameter, ShardedParameter)
                with no_torch_function():
                    is_asked = is_leaf and is_asked_for(get_gradient_edge(parameter).node)
                if is_asked:
                    raise single_gradient_error(name)

    def reduce(self, bound: BoundUnit, grads: Sequence[torch.Tensor | None]) -> Gradients:
        """Average gradients of a unit over the ranks and wait for them."""
        return average(bound, list(grads), scattered=self.scatter)

    def _current(self) -> _Backward:
        refuse_compiled_autograd()
        number = backward_number()
        assert number is not None, "gradients come from a backward"
        if number not in self._running:
            self._running[number] = _Backward(self._has_gradients())
            after_backward(lambda: self._end(number))
        return self._running[number]

    def _has_gradients(self) -> bool:
        """True if a parameter has an averaged gradient that this backward adds to."""
        with no_torch_function():
            grads = [(unit, name, one.grad) for unit in self.units.values() for name, one in unit.parameters.items()]
            return bool([name for unit, name, grad in grads if grad is not None and unit.held(name) is None])

    def _end(self, number: int) -> None:
        with self.recorder.span("delivery"):
            self._finish(number)

    @torch.no_grad()
    def _finish(self, number: int) -> None:
        ended = self._running[number]
        if ended.discarded:
            del self._running[number]
            return
        for event in ended.events:
            current_stream(event.device).wait_event(event)
        for gradients in [one for one, _ in ended.gradients if is_gpu(one.shards.communicator.device)]:
            for tensor in gradients.tensors.values():
                if is_gpu(tensor.device):
                    # Allocated on the backward's stream, which must not reuse it while this stream still reads it.
                    tensor.record_stream(current_stream(tensor.device))
        for reduce in ended.late:
            ended.gradients += [(one, _none) for one in reduce()]
        if self.synchronises:
            self.lockstep.check()  # if this raises, every `.grad` is as it was
            alone = self.lockstep.alone and any(unit.names_held() for unit in self.units.values())
            if alone or any(HOLDS in call.marks for call in ended.calls):
                ended.gradients += [(one, _none) for one in self._reduce_rest()]
        for memory in {unit.memory for unit in self.units.values()}:
            memory.landed()
        changed: dict[str, UnitShards] = {}
        # Call all before the first is delivered: if one raises, every `.grad` is as it was.
        delivered = [(gradients, unreached()) for gradients, unreached in ended.gradients]
        del self._running[number]
        with no_torch_function():
            for gradients, without in delivered:
                shards = gradients.shards
                given = _given(gradients, without)
                if gradients.held:
                    for name, tensor in given.items():
                        shards.hold(name, tensor)
                    continue
                shards.settle(gradients.tensors, number)
                _accumulate(shards, given)
                changed |= dict.fromkeys(given, shards)
        if ended.may_overflow:
            communicator = self.lockstep.communicator
            with communicator.waits.explained("a comparison of float16 gradients"):
                _spread_overflow(changed, communicator.device)
        holders = [shards.parameters[name] for name, shards in changed.items()]
        holders += [shards.user_params[name] for name, shards in changed.items() if name in shards.user_params]
        run_hooks(holders)

    def _reduce_rest(self) -> list[Gradients]:
        """Reduce the gradients that any rank holds back for parameters that this backward did not reach. Collective."""
        named = [(unit, name) for unit in self.units.values() for name in unit.parameters]
        held = {name for unit in self.units.values() for name in unit.names_held() if not unit.is_taken(name)}
        flags = torch.tensor([name in held for _, name in named], dtype=torch.int32)
        on_any = self.lockstep.communicator.any_rank(flags).tolist()
        waiting = {name for _, name in itertools.compress(named, on_any)}
        rest = []
        for unit in self.units.values():
            if params := tuple(param for param in unit.unit.params if param.name in waiting):
                device = unit.communicator.device
                # The reduction adds the held gradients to these zeros.
                zeros = [torch.zeros(param.shape, dtype=param.dtype, device=device) for param in params]
                rest.append(self.reduce(BoundUnit(unit, Unit(unit.unit.name, params)), zeros))
        return rest


@dataclass(frozen=True)
class Refusal:
    """A hook on a parameter without memory: autograd has a gradient for it only if it was read outside of programs.

    One of `register_hook`: it runs before the gradient is added to `.grad`, which may be a shard's.
    """

    name: str
    is_own = True
    """Not a hook of the user's."""

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Refuse the gradient, if there is one: programs give autograd none.

        Raises:
            ParameterError: there is one.
        """
        if gradient is not None:
            raise read_outside(self.name)


def read_outside(name: str) -> ParameterError:
    """The error for plain Python that has read a sharded parameter."""
    why = "fullgraph=True shows what breaks the graph, or that recompile_limit is reached"
    fix = f"let torch.compile trace that code ({why}), or use zcompile.compile"
    return ParameterError(name, "was read outside of compiled graphs, where it is sharded", fix)


def refuse_compiled_autograd() -> None:
    """Refuse compiled autograd, which reorders hooks and ends of backwards, and adds gradients twice.

    Raises:
        BackwardError: torch's compiled autograd runs the backward.
    """
    if within_compiled_autograd():
        fix = "leave torch._dynamo.config.compiled_autograd off, and call backward outside of what enables it"
        raise BackwardError("backward", "runs under torch's compiled autograd; it is compiled by zcompile already", fix)


def run_hooks(holders: Sequence[nn.Parameter]) -> None:
    """Run the user's hooks of `register_post_accumulate_grad_hook`, once the gradients are in `.grad`."""
    if have_post_accumulate_hooks(holders):
        for holder in holders:
            for hook in post_accumulate_hooks(holder):
                hook(holder)


def set_gradients(gradients: Gradients) -> list[nn.Parameter]:
    """Put averaged gradients into `.grad` and run hooks; returns the parameters."""
    shards = gradients.shards
    with no_torch_function():
        for name, gradient in shards.gradients(gradients.tensors).items():
            shards.parameters[name].grad = gradient
    parameters = [shards.parameters[name] for name in gradients.tensors]
    run_hooks(parameters)
    return parameters


def _spread_overflow(changed: Mapping[str, UnitShards], device: torch.device) -> None:
    """Make unsharded gradients infinite on all ranks if any gradient on any rank is not finite.

    `changed`: the parameters that got gradients. `device`: where the ranks' collectives run.

    GradScaler asks the other ranks only if the first gradient that it checks is sharded; if that one is not, its own
    finding must already be that of all ranks.
    """
    by_name = [(name, unit, unit.parameters[name].grad) for name, unit in changed.items()]
    gradients = [grad for _, _, grad in by_name if isinstance(grad, DTensor)]
    whole = [grad for name, unit, grad in by_name if isinstance(grad, DTensor) and not unit.is_sharded(name)]
    if not whole:
        return
    finite = torch.stack([torch.isfinite(local_tensor(gradient)).all() for gradient in gradients]).all()
    overflowed = (~finite).to(device, torch.int32).view(1)
    for group in whole[0].device_mesh.get_all_groups():
        dist.all_reduce(overflowed, op=dist.ReduceOp.MAX, group=group)
    for gradient in whole:
        local_tensor(gradient).masked_fill_(overflowed[0].to(gradient.device, torch.bool), torch.inf)


def _given(gradients: Gradients, without: Collection[str]) -> dict[str, torch.Tensor]:
    """The gradients to deliver: not those of `without`, nor of parameters that were frozen after their forward.

    Autograd delivers nothing to these. With a gradient held back before, this backward's gradient is one number.
    """
    shards = gradients.shards
    known = shards.parameters | shards.user_params
    return {
        name: tensor
        for name, tensor in gradients.tensors.items()
        if name not in without and (known[name].requires_grad or shards.held(name) is not None)
    }


def _accumulate(shards: UnitShards, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add this rank's parts of averaged gradients of a unit to `.grad`."""
    for name, known in shards.user_params.items():
        if name in tensors and known.grad is None:
            shards.parameters[name].grad = None  # the user has dropped it on their own parameter
    added = {name: grad for name in tensors if (grad := shards.parameters[name].grad) is not None}
    for name, grad in added.items():
        if isinstance(shards.parameters[name], DTensor) and not isinstance(grad, DTensor):
            raise plain_gradient(name)
    if added:
        add_all([local_tensor(grad) for grad in added.values()], [tensors[name] for name in added])
    for name, grad in shards.gradients({name: tensor for name, tensor in tensors.items() if name not in added}).items():
        shards.parameters[name].grad = grad
    for name, known in shards.user_params.items():
        if name in tensors:
            known.grad = shards.parameters[name].grad


# -- from outside of programs -----------------------------------------------------------------------------------------


@dataclass
class Outside:
    """Gradients that autograd computes outside of programs for plain parameters (stage 0) in the running backwards.

        hidden = compiled.encode(x)             # the model's own modules and methods: plain PyTorch
        compiled.head(hidden).sum().backward()  # autograd gives this rank's own gradients to the parameters

    They are averaged like all others: hooks take them before they are added to `.grad`; they are averaged when the
    backward has ended, and delivered with those of programs.
    """

    units: Mapping[str, UnitShards]
    delivery: Delivery
    _collected: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By the number of the backward, then the name of the parameter."""

    def watch(self) -> None:
        """Take the gradients that autograd computes for the parameters from now on."""
        for unit in self.units.values():
            for name, parameter in unit.parameters.items():
                if parameter.requires_grad:
                    parameter.register_hook(EagerGradHook(self, name, parameter))
                else:  # it takes a hook only if it requires a gradient, which it may do later
                    parameter.requires_grad_(True).register_hook(EagerGradHook(self, name, parameter))
                    parameter.requires_grad_(False)

    def take(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Take a gradient; returns zeros, which are added to `.grad` in its place."""
        number = backward_number()
        assert number is not None, "autograd calls hooks within a backward"
        if number not in self._collected:  # a checkpoint runs a backward within another
            self._collected = {n: collected for n, collected in self._collected.items() if self.delivery.runs(n)}
            self._collected[number] = {}
            self.delivery.at_end(lambda: self._reduce(self._collected.pop(number)))
        collected = self._collected[number]
        collected[name] = collected[name] + gradient if name in collected else gradient.clone()
        return torch.zeros_like(gradient)

    def _reduce(self, collected: Mapping[str, torch.Tensor]) -> Sequence[Gradients]:
        """Average what autograd has computed on any rank. Collective."""
        if not self.delivery.synchronises:
            return [accumulate(bound, grads) for bound, grads in self._bound(collected, set(collected))]
        names = [name for unit in self.units.values() for name in unit.parameters]
        self.delivery.enter(RunKind.GRADIENTS, hashlib.sha256(b"outside of programs").hexdigest())
        self.delivery.lockstep.check()  # the host waits here anyway
        communicator = self.delivery.lockstep.communicator
        flags = torch.tensor([name in collected for name in names], dtype=torch.int32)
        on_any = communicator.any_rank(flags).tolist()
        wanted = {name for name, flag in zip(names, on_any, strict=True) if flag}
        return [self.delivery.reduce(bound, grads) for bound, grads in self._bound(collected, wanted)]

    def _bound(
        self, collected: Mapping[str, torch.Tensor], wanted: set[str]
    ) -> Iterator[tuple[BoundUnit, list[torch.Tensor | None]]]:
        """Each unit with `wanted` parameters and their gradients; zeros where this rank has none."""
        for unit in self.units.values():
            if wanted.intersection(names := unit.unit.names):
                full = [
                    self._full(unit.parameters[name], collected.get(name)) if name in wanted else None for name in names
                ]
                yield BoundUnit(unit, unit.unit), full

    @staticmethod
    def _full(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(parameter.detach()) if gradient is None else gradient


@dataclass(frozen=True)
class EagerGradHook:
    """A hook on a parameter that takes gradients which autograd computes."""

    outside: Outside
    name: str
    parameter: torch.nn.Parameter
    is_own = True
    """Tells it from the user's hooks."""
    __torch_unserializable__ = True

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Take the gradient, unless it is not for `.grad`: `torch.autograd.grad` gets it unchanged.

        None: a program delivers it.

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
