"""A train step as one CUDA graph: forward, backward, communication and update are replayed by a single launch.

The first steps for a batch's shapes run line by line. The next one is captured, which runs nothing, and then replayed,
as are all others:

    copy the batch into the graph's inputs, launch the graph, copy its results out

What a graph has captured must not change unnoticed. Each step still goes through the guards of torch.compile, up to
where the forward would begin. There the parameters, buffers, optimizer state and settings of the graph are compared
with the current ones; if some were replaced or changed, the step is captured anew. Learning rates are tensors on the
device while a step runs, and are updated before each replay. Ranks decide together: if one of them has to run the step
line by line, for a batch of other shapes or because it has compiled something, all of them do, and they capture
together.

Streams: steps run on a stream of their own, because a node of autograd that another stream has created would draw that
stream into the capture. It waits for the caller's stream at the beginning of a step and the other way round at its end,
so memory that one of them frees is used by the other only after that.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from zcompile.engine.model_runtime import ModelRuntime
from zcompile.errors import CaptureError, OptimizerError
from zcompile.runtime.device import captured, current_stream, is_gpu, is_host, new_stream, on_stream
from zcompile.runtime.gradients.local_steps import are_same, contents
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.waits import Place, where_of
from zcompile.torch_internals.autograd import version_of
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.distributed import copy_all
from zcompile.torch_internals.dtensor import local_values
from zcompile.torch_internals.optimizers import has_step_hooks
from zcompile.torch_internals.pytree import tree_map_only

StepResults = tuple[torch.Tensor, dict[str, torch.Tensor] | None, torch.Tensor | None]
"""Loss, metrics, and the norm of all gradients."""
RUNS = 2
"""Steps before a capture: in the first, programs are compiled and optimizers create their state."""
MOST = 8
"""Graphs that are kept, one for each set of shapes; the one unused for longest is dropped for another."""


class StepAction(IntEnum):
    """What ranks do in a step: the least that one of them has to do."""

    RUN = 0
    CAPTURE = 1
    REPLAY = 2


@dataclass(eq=False)
class _Graph:
    """The step for one set of shapes.

    Attributes:
        runs: How often it ran line by line.
        number: That of its capture, the same on all ranks; 0 until it is captured.
        replay: Launches it; None until it is captured.
        inputs: Where it reads the batch.
        outputs: What the forward returned in it, detached.
        copied: Which of them are in the graph's memory, and copied out of it.
        norm: The norm of all gradients, if they are clipped.
        held: What it has captured by address, kept alive so that identities are not reused.
        addresses: Those of the tensors in `held`.
        settings: What it has captured by value.
        steps: Optimizer steps that one replay makes, and how many of them found no gradient.
    """

    runs: int = 0
    number: int = 0
    replay: Callable[[], None] | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: Sequence[Any] = ()
    copied: list[bool] = field(default_factory=list)
    norm: torch.Tensor | None = None
    held: list[Any] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    settings: list[Any] = field(default_factory=list)
    steps: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Inputs:
    """The arguments of a program, by index.

    Attributes:
        fixed: Parameters and buffers, which a graph reads and writes where they are.
        numbers: Tensors of one element on the host, of which a kernel gets the value, and what is no tensor.
        batch: The other tensors.
    """

    fixed: list[int]
    numbers: list[int]
    batch: list[int]

    @classmethod
    def of(cls, given: Sequence[Any], known: Container[int]) -> Inputs:
        """Those of a program that is compiled for arguments like `given`; `known`: `id`s of parameters and buffers."""
        tensors = [isinstance(one, torch.Tensor) for one in given]
        kept = [id(one) in known or isinstance(one, nn.Parameter) for one in given]
        numbers = [
            not (tensor and (one.ndim or is_gpu(one.device))) for one, tensor in zip(given, tensors, strict=True)
        ]
        places = range(len(given))
        return cls(
            [at for at in places if kept[at] and not numbers[at]],
            [at for at in places if numbers[at]],
            [at for at in places if not kept[at] and not numbers[at]],
        )


class StepGraphs:
    """The graphs of one train step.

    Args:
        runtime: That of the model.
        optimizers: Those that it steps.
        options: Returns what else the step depends on, compared by value.
    """

    def __init__(
        self, runtime: ModelRuntime, optimizers: Sequence[Optimizer], options: Callable[[], tuple[Any, ...]]
    ) -> None:
        self._runtime, self._optimizers, self._options = runtime, optimizers, options
        self._stream = new_stream(runtime.communicator.device)
        self._rates: dict[int, tuple[torch.Tensor, float]] = {}
        """By the number of a group: its learning rate on the device, and the value there."""
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        """By program and sizes, the one used last at the end."""
        self._captures = 0
        self._current_graph: Any = None
        """The graph that is being captured."""
        self._captured: Any = None
        """The graph captured last. Its pool is that of all: none reads what another one has computed. Keep it alive:
        torch frees the pool of graphs that are gone, and asserts where it is used again."""
        self._states: list[tuple[list[Any], dict[Any, Any]]] = []
        """The state of the optimizers when a capture began: what is in it, and a copy."""
        self._stack = contextlib.ExitStack()
        """What a step that runs or is captured has entered."""
        self._current: _Graph | None = None
        self._action = StepAction.RUN

    @property
    def replays(self) -> bool:
        """True if the current step is a replay: there is nothing to do after its forward."""
        return self._action is StepAction.REPLAY

    def run(self, step: Callable[[], StepResults]) -> StepResults:
        """Run `step`, whose forward is a program from `within`.

        Raises:
            CaptureError: something in it cannot be captured.
            OptimizerError: an optimizer has step hooks, which a graph would not call, or its step changes values on
                the host.
        """
        for optimizer in self._optimizers:
            if has_step_hooks(optimizer):
                fix = "remove it, or leave cuda_graphs='step' out"
                raise OptimizerError(type(optimizer).__name__, "has a step hook, which a graph would not call", fix)
        here, self._current, self._action = current_stream(self._stream.device), None, StepAction.RUN
        self._stream.wait_stream(here)
        try:
            with self._runtime.random_numbers(), on_stream(self._stream):
                return self._in_graph(step)
        finally:
            here.wait_stream(self._stream)

    def _in_graph(self, step: Callable[[], StepResults]) -> StepResults:
        try:
            with contextlib.ExitStack() as self._stack:
                loss, metrics, norm = step()
        except BaseException as error:
            if self._action is StepAction.CAPTURE:
                self._abandon()
                if isinstance(error, Exception):
                    self._refuse(error)
            raise
        graph = self._current
        if graph is None:
            return loss, metrics, norm
        if self._action is StepAction.RUN:
            graph.runs += 1
            return loss, metrics, norm
        if self._action is StepAction.CAPTURE:
            static = loss, metrics, norm
            self._finish(graph, norm)
            loss, metrics, norm = tree_map_only(torch.Tensor, torch.clone, static)
        elif graph.norm is not None:
            norm = graph.norm.clone()
        return loss, metrics, norm

    def within(self, program: Callable[..., Any], inputs: Inputs) -> Callable[..., Any]:
        """The callable for `program`, the forward of the step."""
        weak = weakref.ref(self)  # torch keeps the callable until `torch.compiler.reset()`

        def call(*args: Any) -> Any:
            alive = weak()
            assert alive is not None, "a step is alive while it runs"
            numbers = [
                one.item() if isinstance(one, torch.Tensor) else one for one in [args[at] for at in inputs.numbers]
            ]
            sizes = [(args[at].shape, args[at].stride()) for at in inputs.batch]
            return alive._forward((call, *numbers, *sizes), program, args, inputs)

        return call

    def _forward(self, key: tuple[Any, ...], program: Callable[..., Any], args: Sequence[Any], inputs: Inputs) -> Any:
        """Call the program, or replay all of the step."""
        graph, settings = self._graph(key), self._settings()
        batch, held = [args[at] for at in inputs.batch], self._held([args[at] for at in inputs.fixed])
        self._current, self._action = graph, self._agreed(graph, held, settings)
        if self._action is StepAction.REPLAY:
            return self._replay(graph, batch)
        self._stack.enter_context(self._on_device(checked=graph.runs + 1 == RUNS))
        if self._action is StepAction.RUN:
            self._stack.enter_context(_host_draws_refused(checked=graph.runs + 1 == RUNS))
            return _run_checked(program, args, batch)
        held = self._held([args[at] for at in inputs.fixed])  # with step counts that have come to the device
        graph.held, graph.addresses, graph.settings = held, _addresses(held), settings
        moved = dict(zip(inputs.batch, self._begin(graph, batch), strict=True))
        graph.outputs = program(*[moved.get(at, arg) for at, arg in enumerate(args)])
        return graph.outputs

    def _graph(self, key: tuple[Any, ...]) -> _Graph:
        graph = self._graphs.pop(key, None)
        if graph is None:
            graph = _Graph()
            if len(self._graphs) >= MOST:
                del self._graphs[next(iter(self._graphs))]
                text = f"zcompile: a train step with cuda_graphs='step' keeps {MOST} graphs, and there are more sets of"
                warnings.warn(f"{text} shapes or numbers: pad batches to fewer shapes", stacklevel=2)
        self._graphs[key] = graph
        return graph

    # -- what a graph depends on ----------------------------------------------------------------------------------

    def _held(self, fixed: Sequence[Any]) -> list[Any]:
        """What a graph reads and writes where it is; `fixed`: arguments of the program."""
        states = [one for optimizer in self._optimizers for one in contents(optimizer.state)]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        units = self._runtime.shards
        shards = [units[unit].parameters[name] for unit in units for name in units[unit].parameters]
        return [*fixed, *states, *shards, *[param for group in groups for param in group["params"]]]

    def _settings(self) -> list[Any]:
        """What is captured by value: settings and attributes of optimizers, and options."""
        settings: list[Any] = [self._options()]
        for optimizer in self._optimizers:
            held = vars(optimizer)
            settings.append({name: held[name] for name in held if held[name].__class__ in _NUMBERS})
            for group in optimizer.param_groups:
                own = _own(group)
                kept = {key: group[key] for key in group if key not in own}
                changing = [key for key in kept if kept[key].__class__ in (torch.Tensor, list)]
                settings += [len(group["params"]), kept | {key: _value(kept[key]) for key in changing}]
        return settings

    def _agreed(self, graph: _Graph, held: list[Any], settings: list[Any]) -> StepAction:
        """What to do in this step. Collective.

        NCCL wants a collective to be captured by all ranks at once, and replayed by graphs of the same capture.
        """
        wanted = StepAction.REPLAY
        if graph.runs < RUNS:
            wanted = StepAction.RUN
        elif graph.replay is None or not (
            are_same(graph.held, held) and graph.addresses == _addresses(held) and _are_equal(graph.settings, settings)
        ):
            wanted = StepAction.CAPTURE
        lockstep = self._runtime.lockstep
        call = lockstep.enter(RunKind.STEP, "0", [wanted], graph.number)
        lockstep.check()
        least = StepAction(min(call.marks))
        is_one_capture = least is not StepAction.REPLAY or len(call.variants) == 1
        return least if is_one_capture else StepAction.CAPTURE

    @contextlib.contextmanager
    def _on_device(self, *, checked: bool) -> Iterator[None]:
        """Inside, optimizers that can be captured have their learning rates and step counts on the device.

        `checked`: refuse optimizers whose step changes numbers on the host, or replaces tensors of their state.
        """
        self._update_rates()
        before = []
        groups = [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]
        for number, (optimizer, group) in enumerate(groups):
            if "capturable" in group:
                before.append((group, {key: group[key] for key in _own(group) if key != "params"}))
                group["capturable"] = True
                if number in self._rates:
                    group["lr"] = self._rates[number][0]
                _move_step_counts(optimizer, group["params"])
        values = [_values(optimizer) for optimizer in self._optimizers]
        try:
            yield
        finally:
            after = [_values(optimizer) for optimizer in self._optimizers]
            for group, settings in before:
                group.update(settings)
        for optimizer, old, new in zip(self._optimizers, values, after, strict=True):
            if checked and (changed := [name for name, value in new.items() if old.get(name) != value]):
                problem = f"changes {changed[0]} on the host in each step, which a replay of a graph would not"
                raise OptimizerError(type(optimizer).__name__, problem, _OTHER_OPTIMIZER)

    def _update_rates(self) -> None:
        """Write learning rates that have changed to the device."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for number, group in enumerate(groups):
            if "lr" not in _own(group):
                continue
            known, rate = self._rates.get(number), float(group["lr"])
            if known is None:
                made = torch.full((), rate, dtype=torch.float32, device=self._stream.device)
                self._rates[number] = made, rate
            elif known[1] != rate:
                self._rates[number] = known[0].fill_(rate), rate

    # -- steps ----------------------------------------------------------------------------------------------------

    def _begin(self, graph: _Graph, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Begin the capture of a step; returns where it reads the batch."""
        runtime = self._runtime
        _drop_copies(runtime)  # all that the graph reads is gathered in it
        bases = [base.new_empty_strided(base.shape, base.stride()) for base in map(_base, batch)]
        graph.replay, graph.inputs = None, bases
        graph.steps = runtime.freshness.steps, runtime.freshness.idle
        self._states = [(contents(one.state), _copied(one.state)) for one in self._optimizers]
        _copy(bases, batch)
        self._stack.enter_context(runtime.lockstep.unreported())
        pool = None if self._captured is None else self._captured.pool()
        self._current_graph = self._stack.enter_context(captured(self._stream, pool))
        return [base.expand(one.shape) for base, one in zip(bases, batch, strict=True)]

    def _finish(self, graph: _Graph, norm: torch.Tensor | None) -> None:
        """The capture has ended: make the step itself, once all ranks have come here.

        Raises:
            OptimizerError: an optimizer has put other tensors into its state, which replays would not.
            AgreementError: another rank could not capture its step.
        """
        for optimizer, (before, state) in zip(self._optimizers, self._states, strict=True):
            if not are_same(contents(optimizer.state), before):
                optimizer.state.clear()
                optimizer.state.update(state)
                self._abandon()
                problem = "puts other tensors into its state, which a replay of a graph would not"
                raise OptimizerError(type(optimizer).__name__, problem, _OTHER_OPTIMIZER)
        freshness, (steps, idle) = self._runtime.freshness, graph.steps
        graph.steps = freshness.steps - steps, freshness.idle - idle
        _drop_copies(self._runtime)  # in memory that replays overwrite
        self._runtime.lockstep.enter(RunKind.STEP, "0")
        self._runtime.lockstep.check()
        self._captured, self._captures = self._current_graph, self._captures + 1
        graph.replay, graph.number, graph.norm = self._captured.replay, self._captures, norm
        made, held = graph.outputs, {*map(id, graph.held)}
        graph.copied = [isinstance(one, torch.Tensor) and id(one) not in held for one in made]
        graph.outputs = [one.detach() if is_made else one for one, is_made in zip(made, graph.copied, strict=True)]
        self._launch(graph)
        for one in itertools.compress(made, graph.copied):  # the model's code may have stored it
            one.data = one.data.clone()

    def _replay(self, graph: _Graph, batch: Sequence[torch.Tensor]) -> Any:
        """Replay the step; returns the results of its forward, in memory that other replays do not overwrite."""
        self._update_rates()
        _copy(graph.inputs, batch)
        self._launch(graph)
        self._runtime.freshness.steps += graph.steps[0]
        self._runtime.freshness.idle += graph.steps[1]
        return [one.clone() if is_made else one for one, is_made in zip(graph.outputs, graph.copied, strict=True)]

    def _launch(self, graph: _Graph) -> None:
        assert graph.replay is not None, "it is captured"
        graph.replay()
        self._runtime.communicator.collectives.passed()

    def _abandon(self) -> None:
        """Forget the capture of the current step, which has run nothing."""
        assert self._current is not None, "a step is captured"
        self._current.replay, self._current.number = None, 0
        self._captured = None  # before torch 2.12.1 a pool cannot be used again after a capture that has failed
        _drop_copies(self._runtime)
        with no_torch_function():
            for shards in self._runtime.shards.values():
                for parameter in shards.parameters.values():
                    parameter.grad = None

    def _refuse(self, error: BaseException) -> NoReturn:
        """Raise CaptureError for what stopped a capture."""
        while error.__context__ is not None:  # the end of a capture that has failed raises again
            error = error.__context__
        fix = "change that line, or leave it out: cuda_graphs=True captures the regions between communications"
        if isinstance(error, torch.OutOfMemoryError):
            fix = "use a smaller batch, or fewer shapes: each keeps a graph; or leave cuda_graphs='step' out"
        problem = f"cannot be captured as one CUDA graph: {str(error).splitlines()[0]}"
        refusal = CaptureError(f"the train step, at {_line_of(error)}", problem, fix)
        self._runtime.communicator.waits.report_failure("a train step", refusal)
        raise refusal from error


_OTHER_OPTIMIZER = "choose an optimizer with the option capturable, or leave cuda_graphs='step' out"
_NUMBERS = (int, float)


def _run_checked(program: Callable[..., Any], args: Sequence[Any], batch: Sequence[torch.Tensor]) -> Any:
    """Run the forward line by line.

    Raises:
        CaptureError: a tensor of the batch is on the host, requires a gradient, or is written to.
    """
    for tensor in batch:
        if not is_gpu(tensor.device):
            problem, fix = f"is on {tensor.device}, from where a graph does not read it", "move it to the GPU first"
            raise CaptureError(f"a tensor {list(tensor.shape)} of the batch", problem, fix)
        if tensor.requires_grad:
            problem, fix = "requires a gradient, which a graph would not give to it", "detach it"
            raise CaptureError(f"a tensor {list(tensor.shape)} of the batch", problem, fix)
    versions = [version_of(tensor) for tensor in batch]
    result = program(*args)
    for tensor, version in zip(batch, versions, strict=True):
        if version_of(tensor) != version:
            problem = "is written to by the model, and a graph would write to its own copy"
            raise CaptureError(f"a tensor {list(tensor.shape)} of the batch", problem, "give the model a clone of it")
    return result


@contextlib.contextmanager
def _host_draws_refused(*, checked: bool) -> Iterator[None]:
    """Refuse a step that draws random numbers on the host, which replays would not.

    Raises:
        CaptureError: it has drawn some.
    """
    before = torch.default_generator.get_state() if checked else None
    yield
    if before is not None and not torch.equal(before, torch.default_generator.get_state()):
        problem, fix = "draws random numbers on the host, and a graph would keep the first", "draw them on the GPU"
        raise CaptureError("the train step", problem, fix)


def _addresses(held: Sequence[Any]) -> list[int]:
    """Where the tensors lie: `.data = value` moves one that stays the same object."""
    tensors = local_values([*itertools.compress(held, map(isinstance, held, itertools.repeat(torch.Tensor)))])
    with no_torch_function():
        return [*map(torch.Tensor.data_ptr, tensors)]


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that others repeat, as in an expanded one."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def _copy(bases: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        copy_all(bases, [_base(one) for one in batch])


def _drop_copies(runtime: ModelRuntime) -> None:
    """Drop the full parameters that the model keeps: on all ranks, or on none."""
    for shards in [one for one in runtime.shards.values() if one.kept or one.ahead or one.secondary]:
        shards.drop_copies()


def _own(group: Mapping[str, Any]) -> Sequence[str]:
    """Keys of a group that are not compared as settings: parameters, and what is on the device while a step runs."""
    if "capturable" not in group:
        return ("params",)
    on_device = isinstance(group["lr"], torch.Tensor) and is_gpu(group["lr"].device)
    return ("params", "capturable") if on_device else ("params", "capturable", "lr")


def _value(setting: Any) -> Any:
    """A setting that may change in place, by value; a tensor on the device, which a graph reads, stays one."""
    if isinstance(setting, list):
        return tuple(setting)
    return setting.tolist() if is_host(setting.device) else setting


def _are_equal(some: object, others: object) -> bool:
    try:
        return bool(some == others)
    except RuntimeError:  # tensors of several elements, which are not the same objects
        return False


def _move_step_counts(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Move step counts, which are on the host by default, to the device."""
    for param in params:
        count = optimizer.state[param].get("step") if param in optimizer.state else None
        if isinstance(count, torch.Tensor) and not is_gpu(count.device):
            optimizer.state[param]["step"] = count.to(param.device, torch.float32)


def _copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state, with the same tensors."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}


def _values(optimizer: Optimizer) -> dict[str, Any]:
    """All numbers that an optimizer has on the host, and the identities of tensors on the device, by where they are."""
    places: dict[str, Any] = {f"its attribute {name!r}": value for name, value in vars(optimizer).items()}
    for number, group in enumerate(optimizer.param_groups):
        places |= {f"{key!r} of group {number}": value for key, value in group.items()}
    for number, state in enumerate(optimizer.state.values()):
        if isinstance(state, dict):
            places |= {f"{key!r} in the state of parameter {number}": value for key, value in state.items()}
    found = dict[str, Any]()
    for name, value in places.items():
        if isinstance(value, torch.Tensor):
            found[name] = value.tolist() if type(value) is torch.Tensor and is_host(value.device) else id(value)
        elif value.__class__ in _NUMBERS:
            found[name] = value
    return found


def _line_of(error: BaseException) -> str:
    """The program line that has raised an error, or else the user's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = (Place.here(frame) for frame in reversed(frames))
    return next((str(place) for place in places if place is not None), where_of("code outside of programs", frames[-1]))
