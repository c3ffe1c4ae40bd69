"""Delivery of gradients: reduced shards into `.grad`, all of a backward at once."""

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
"""Gives the parameters that no gradient has flowed to, on any rank, where those that are delivered are zeros; to be
called once the ranks are known to be in step."""
HOLDS = 0
"""The mark of a rank that holds gradients back, in what it tells the others of a backward."""


def _none() -> Collection[str]:
    return ()


@dataclass
class _Backward:
    """One backward while it runs: its gradients so far, and what is to be reduced at its end."""

    keeps: bool
    """True if there were averaged gradients when it began."""
    gradients: list[tuple[Gradients, Unreached]] = field(default_factory=list)
    calls: list[RunExchange] = field(default_factory=list)
    """What the ranks have told each other of its programs."""
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
        """Set before the backward of a program: to which results of its forward autograd brings a gradient."""
        self.kinds: Sequence[Any] | None = None
        """Set beside it where it brings none to some, and leaves that to the program: what autograd knows of them."""
        self.results: int | None = None
        """Set by the forward of a program: how many results it has given; None if others may stand among them."""
        self._running: dict[int, _Backward] = {}

    def forget(self) -> None:
        """Drop what backwards that failed have left; called where no backward runs."""
        if backward_number() is None:
            self._running.clear()

    def enter(
        self, kind: RunKind, program: str, marks: Sequence[int] = (), variant: int = 0, *, is_new: bool = False
    ) -> RunExchange:
        """Tell the other ranks of a part of the backward that runs now; see `Lockstep.enter`.

        Raises:
            AgreementError: a run before is known to be out of step.
        """
        holds = [HOLDS] if any(unit.names_held() for unit in self.units.values()) else []
        running = self._current()
        call = self.lockstep.enter(kind, program, [*holds, *marks], variant, keeps=running.keeps, is_new=is_new)
        running.calls.append(call)
        return call

    def add(self, gradients: Sequence[Gradients], unreached: Unreached = _none) -> None:
        """Take gradients of the backward that runs now, for delivery at its end."""
        running = self._current()
        running.gradients += [(one, unreached) for one in gradients]
        devices = {one.shards.communicator.device for one in gradients}
        # Delivery runs on the caller's stream, which autograd joins only with the streams of its leaves. Streams are
        # those of the model's device: the caller's current device may be another one.
        running.events += [current_stream(device).record_event() for device in devices if is_gpu(device)]

    def at_end(self, reduce: Callable[[], Sequence[Gradients]]) -> None:
        """Call `reduce` when the backward that runs now has come to its end, and deliver what it gives."""
        self._current().late.append(reduce)

    def runs(self, number: int) -> bool:
        """True if a backward that delivers gradients runs, and has not failed as far as is known."""
        return number in self._running

    def expect_overflow(self) -> None:
        """The backward that runs now carries scaled float16 gradients, of which an overflow must reach every rank."""
        self._current().may_overflow = True

    def discard(self) -> None:
        """The backward that runs now was not asked for gradients of all parameters: deliver none.

        Raises:
            BackwardError: it was asked for those of some.
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
        """Average gradients of a unit over the ranks, now."""
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
        """True if a parameter has an averaged gradient, to which another is added."""
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
                    # The backward's stream owns the memory: freed, it must not be used there while this one reads.
                    tensor.record_stream(current_stream(tensor.device))
        for reduce in ended.late:
            ended.gradients += [(one, _none) for one in reduce()]
        if self.synchronises:
            self.lockstep.check()  # what it raises leaves every `.grad` as it was
            alone = self.lockstep.alone and any(unit.names_held() for unit in self.units.values())
            if alone or any(HOLDS in call.marks for call in ended.calls):
                ended.gradients += [(one, _none) for one in self._reduce_rest()]
        for memory in {unit.memory for unit in self.units.values()}:
            memory.landed()
        changed: dict[str, UnitShards] = {}
        # All are asked before the first is delivered: what one raises leaves every `.grad` as it was.
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
        """Reduce what any rank holds back of parameters that this backward did not reach. Collective."""
        named = [(unit, name) for unit in self.units.values() for name in unit.parameters]
        held = {name for unit in self.units.values() for name in unit.names_held() if not unit.is_taken(name)}
        flags = torch.tensor([name in held for _, name in named], dtype=torch.int32)
        on_any = self.lockstep.communicator.any_rank(flags).tolist()
        waiting = {name for _, name in itertools.compress(named, on_any)}
        rest = []
        for unit in self.units.values():
            if params := tuple(param for param in unit.unit.params if param.name in waiting):
                device = unit.communicator.device
                # Zeros, to which the reduction adds what is held back.
                zeros = [torch.zeros(param.shape, dtype=param.dtype, device=device) for param in params]
                rest.append(self.reduce(BoundUnit(unit, Unit(unit.unit.name, params)), zeros))
        return rest


@dataclass(frozen=True)
class Refusal:
    """A hook on a parameter without memory: a gradient that autograd carries there comes from reading it.

    One of `register_hook`: it runs before the gradient is added to `.grad`, which may be a shard's.
    """

    name: str
    is_own = True
    """No hook of the user's."""

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Refuse the gradient, if there is one: a program brings none.

        Raises:
            ParameterError: there is.
        """
        if gradient is not None:
            raise read_outside(self.name)


def read_outside(name: str) -> ParameterError:
    """The refusal of what plain Python has read of a parameter that is sharded."""
    why = "fullgraph=True shows what breaks the graph, or that recompile_limit is reached"
    fix = f"let torch.compile trace that code ({why}), or use zcompile.compile"
    return ParameterError(name, "was read outside of compiled graphs, where it is sharded", fix)


def refuse_compiled_autograd() -> None:
    """Refuse to deliver where hooks and ends of backwards come in another order, and gradients are added twice.

    Raises:
        BackwardError: torch's compiled autograd runs the backward.
    """
    if within_compiled_autograd():
        fix = "leave torch._dynamo.config.compiled_autograd off, and call backward outside of what enables it"
        raise BackwardError("backward", "runs under torch's compiled autograd; it is compiled by zcompile already", fix)


def run_hooks(holders: Sequence[nn.Parameter]) -> None:
    """Run the user's hooks of `register_post_accumulate_grad_hook`: the gradients are in `.grad`."""
    if have_post_accumulate_hooks(holders):
        for holder in holders:
            for hook in post_accumulate_hooks(holder):
                hook(holder)


def set_gradients(gradients: Gradients) -> list[nn.Parameter]:
    """Put averaged gradients into `.grad` and run hooks; gives the parameters."""
    shards = gradients.shards
    with no_torch_function():
        for name, gradient in shards.gradients(gradients.tensors).items():
            shards.parameters[name].grad = gradient
    parameters = [shards.parameters[name] for name in gradients.tensors]
    run_hooks(parameters)
    return parameters


def _spread_overflow(changed: Mapping[str, UnitShards], device: torch.device) -> None:
    """Make gradients that are whole on every rank infinite on all of them where a shard on any rank is not finite.

    `changed`: the parameters that have got gradients. `device`: where the ranks' collectives run.

    GradScaler asks the other ranks only if the first gradient that it looks at is sharded; if that is a whole one, its
    own finding must be that of all ranks already.
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
    """The gradients that parameters get: not those `without` any, nor those that were frozen after their forward.

    Autograd delivers nothing to these. With what is held back from before, this backward's gradient is one number.
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
            shards.parameters[name].grad = None  # the user has dropped it by the parameter that he knows
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
    """What autograd has brought to parameters in the backwards that run: to plain ones (stage 0), past programs.

        hidden = compiled.encode(x)             # the model's own modules and methods: plain PyTorch
        compiled.head(hidden).sum().backward()  # autograd brings this rank's own gradients to the parameters

    They are averaged like all others: what autograd brings is taken before it gets into `.grad`, averaged when the
    backward has ended, and delivered with what programs give.
    """

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
