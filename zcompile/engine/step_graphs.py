"""A train step as one CUDA graph: forward, backward, communication and update are replayed by a single launch.

The first steps for a batch's shapes run line by line. The next one is captured, which runs nothing, and then replayed,
as are all others:

    copy the batch into the graph's inputs, launch the graph, copy its results out

What a graph has captured must not change unnoticed. Each step still goes through the guards of torch.compile, up to
where the forward would begin. There the parameters, buffers, optimizer state and settings of the graph are compared
with the current ones; if some were replaced or changed, the step is captured anew. Learning rates are tensors on the
device while a step runs, and are updated before each replay. Ranks decide together: if one of them has to run the step
line by line, for a batch of other shapes or because it has compiled something, all of them do.

Streams: steps run on a stream of their own, because a node of autograd that another stream has created would draw that
stream into the capture. It waits for the caller's stream at the beginning of a step and the other way round at its end,
so memory that one of them frees is used by the other only after that.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from zcompile.engine.model_runtime import ModelRuntime
from zcompile.errors import CaptureError, OptimizerError, OptionError
from zcompile.runtime.device import captured, current_stream, is_gpu, is_host, new_stream, on_stream
from zcompile.runtime.gradients.local_steps import are_same, contents
from zcompile.runtime.lockstep import RunKind
from zcompile.runtime.waits import Place, where_of
from zcompile.torch_internals.autograd import version_of
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.distributed import copy_all
from zcompile.torch_internals.optimizers import has_step_hooks
from zcompile.torch_internals.pytree import tree_map_only

RUNS = 2
"""Steps before a capture: in the first, programs are compiled and optimizers create their state."""
MOST = 8
"""Graphs that are kept, one for each set of shapes; the one unused for longest is dropped for another."""


class StepAction(IntEnum):
    """What a rank does in a step; if any of them has to run it line by line, all do."""

    RUN = 0
    CAPTURE = 1
    REPLAY = 2


@dataclass(eq=False)
class _Graph:
    """The step for one set of shapes.

    Attributes:
        runs: How often it ran line by line.
        replay: Launches it; None until it is captured.
        inputs: Where it reads the batch.
        outputs: What the forward returned in it, detached.
        results: What the step returned in it: tensors, names of tensors, or None.
        held: The tensors that it has captured by their addresses, kept alive so that their identities are not reused.
        settings: Those of the optimizers, which it has captured by value.
        steps: Optimizer steps that one replay makes, and how many of them found no gradient.
    """

    runs: int = 0
    replay: Callable[[], None] | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: Any = None
    results: Any = None
    held: list[Any] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    steps: tuple[int, int] = (0, 0)

    def copied(self) -> Any:
        """The results, in memory that replays do not overwrite."""
        made: list[Any] = []
        for one in self.results:
            if isinstance(one, dict):
                made.append({name: tensor.clone() for name, tensor in one.items()})
            else:
                made.append(None if one is None else one.clone())
        return made


class StepGraphs:
    """The graphs of one train step.

    Args:
        runtime: That of the model.
        optimizers: Those that it steps.

    Raises:
        OptionError: an option makes the host wait within a step, or keeps memory that a graph cannot share.
    """

    def __init__(self, runtime: ModelRuntime, optimizers: Sequence[Optimizer]) -> None:
        for option in ("offload_parameters", "offload_activations", "record", "arenas"):
            if getattr(runtime.options, option):
                why = "keeps memory of its own" if option == "arenas" else "makes the host act within a step"
                fix = "leave one of the two out, or capture regions only: cuda_graphs=True"
                raise OptionError("cuda_graphs", f"'step' captures all of a step, and {option} {why}", fix)
        self._runtime, self._optimizers = runtime, optimizers
        self._stream = new_stream(runtime.communicator.device)
        self._rates: dict[int, tuple[torch.Tensor, float]] = {}
        """By the number of a group: its learning rate on the device, and the value there."""
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        """By program and sizes, the one used last at the end."""
        self._pool: Any = None
        """Memory of all graphs: none reads what another one has computed."""
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

    def run(self, step: Callable[[], Any]) -> Any:
        """Run `step`, whose forward is a program from `within`; returns its results: tensors, dicts of them, or None.

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
        with self._runtime.random_numbers(), on_stream(self._stream):
            results = self._in_graph(step)
        here.wait_stream(self._stream)
        return results

    def _in_graph(self, step: Callable[[], Any]) -> Any:
        try:
            with contextlib.ExitStack() as self._stack:
                results = step()
        except Exception as error:
            if self._action is StepAction.CAPTURE:
                self._refuse(error)
            raise
        graph = self._current
        if graph is None:
            return results
        if self._action is StepAction.RUN:
            graph.runs += 1
            return results
        if self._action is StepAction.CAPTURE:
            self._finish(graph, results)
        return graph.copied()

    def within(self, program: Callable[..., Any], fixed: Sequence[bool]) -> Callable[..., Any]:
        """The callable for `program`, the forward of the step.

        `fixed`: which of its arguments are parameters and buffers, which a graph reads where they are.
        """
        kept = [index for index, is_fixed in enumerate(fixed) if is_fixed]
        batch = [index for index, is_fixed in enumerate(fixed) if not is_fixed]
        weak = weakref.ref(self)  # torch keeps the callable until `torch.compiler.reset()`

        def call(*args: Any) -> Any:
            alive = weak()
            assert alive is not None, "a step is alive while it runs"
            given = [args[index] for index in batch]
            given = [one.item() if isinstance(one, torch.Tensor) and _is_number(one) else one for one in given]
            tensors = {index: one for index, one in zip(batch, given, strict=True) if isinstance(one, torch.Tensor)}
            sizes = [(one.shape, one.stride()) if isinstance(one, torch.Tensor) else one for one in given]
            return alive._forward((call, *sizes), program, args, [args[index] for index in kept], tensors)

        return call

    def _forward(
        self,
        key: tuple[Any, ...],
        program: Callable[..., Any],
        args: Sequence[Any],
        fixed: list[Any],
        batch: Mapping[int, torch.Tensor],
    ) -> Any:
        """Call the program, or replay all of the step.

        `fixed`: parameters and buffers among `args`; `batch`: the other tensors, by index.
        """
        graph, settings = self._graph(key), self._settings()
        self._current, self._action = graph, self._agreed(graph, self._held(fixed), settings)
        if self._action is StepAction.REPLAY:
            self._replay(graph, [*batch.values()])
            return graph.outputs
        self._stack.enter_context(self._on_device(checked=graph.runs + 1 == RUNS))
        if self._action is StepAction.RUN:
            return _run_checked(program, args, [*batch.values()])
        graph.held, graph.settings = self._held(fixed), settings
        inputs = dict(zip(batch, self._begin(graph, [*batch.values()]), strict=True))
        graph.outputs = program(*[inputs.get(index, arg) for index, arg in enumerate(args)])
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
        """All tensors that a graph reads and writes where they are; `fixed`: those that the program is given."""
        states = [one for optimizer in self._optimizers for one in contents(optimizer.state)]
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [*fixed, *states, *[param for group in groups for param in group["params"]]]

    def _settings(self) -> list[dict[str, Any]]:
        """The optimizers' settings by group, without what is on the device."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        own = [_own(group) for group in groups]
        pairs = zip(groups, own, strict=True)
        return [{key: value for key, value in group.items() if key not in keys} for group, keys in pairs]

    def _agreed(self, graph: _Graph, held: list[Any], settings: list[dict[str, Any]]) -> StepAction:
        """What to do in this step. Collective."""
        wanted = StepAction.REPLAY
        if graph.runs < RUNS:
            wanted = StepAction.RUN
        elif graph.replay is None or not (are_same(graph.held, held) and _are_equal(graph.settings, settings)):
            wanted = StepAction.CAPTURE
        lockstep = self._runtime.lockstep
        call = lockstep.enter(RunKind.STEP, "0", [wanted])
        lockstep.check()
        return StepAction.RUN if StepAction.RUN in call.marks else wanted

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
                made = torch.full((), rate, device=self._stream.device)
                self._rates[number] = made, rate
            elif known[1] != rate:
                self._rates[number] = known[0].fill_(rate), rate

    # -- steps ----------------------------------------------------------------------------------------------------

    def _begin(self, graph: _Graph, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """Begin the capture of a step; returns where it reads the batch."""
        runtime = self._runtime
        _drop_copies(runtime)  # all that the graph reads is gathered in it
        graph.replay = None
        graph.inputs = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in batch
        ]
        copy_all(graph.inputs, batch)
        graph.steps = runtime.freshness.steps, runtime.freshness.idle
        self._states = [(contents(one.state), _copied(one.state)) for one in self._optimizers]
        self._stack.enter_context(runtime.lockstep.unreported())
        made = self._stack.enter_context(captured(self._stream, self._pool))
        graph.replay, self._pool = made.replay, made.pool()
        return graph.inputs

    def _finish(self, graph: _Graph, results: Any) -> None:
        """The capture has ended: make the step itself.

        Raises:
            OptimizerError: an optimizer has put other tensors into its state, which replays would not.
        """
        for optimizer, (before, state) in zip(self._optimizers, self._states, strict=True):
            if not are_same(contents(optimizer.state), before):
                optimizer.state.clear()
                optimizer.state.update(state)
                graph.replay = None
                problem = "puts other tensors into its state, which a replay of a graph would not"
                raise OptimizerError(type(optimizer).__name__, problem, _OTHER_OPTIMIZER)
        freshness, (steps, idle) = self._runtime.freshness, graph.steps
        graph.steps = freshness.steps - steps, freshness.idle - idle
        # Others may be buffers, which the model's code is to find as they are.
        graph.outputs = tree_map_only(
            torch.Tensor, lambda one: one.detach() if one.requires_grad else one, graph.outputs
        )
        graph.results = results
        _drop_copies(self._runtime)  # in memory that replays overwrite
        assert graph.replay is not None, "it is captured"
        graph.replay()

    def _replay(self, graph: _Graph, batch: list[torch.Tensor]) -> None:
        assert graph.replay is not None, "it is captured"
        self._update_rates()
        copy_all(graph.inputs, batch)
        graph.replay()
        _drop_copies(self._runtime)  # as ranks do that capture the step
        self._runtime.freshness.steps += graph.steps[0]
        self._runtime.freshness.idle += graph.steps[1]

    def _refuse(self, error: BaseException) -> NoReturn:
        """Raise CaptureError for what stopped a capture, which has run nothing."""
        assert self._current is not None, "a step is captured"
        self._current.replay = None
        _drop_copies(self._runtime)
        with no_torch_function():
            for shards in self._runtime.shards.values():
                for parameter in shards.parameters.values():
                    parameter.grad = None
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


def _run_checked(program: Callable[..., Any], args: Sequence[Any], batch: Sequence[torch.Tensor]) -> Any:
    """Run the forward line by line.

    Raises:
        CaptureError: a tensor of the batch is on the host, or is written to.
    """
    for tensor in batch:
        if not is_gpu(tensor.device):
            problem, fix = f"is on {tensor.device}, from where a graph does not read it", "move it to the GPU first"
            raise CaptureError(f"a tensor {list(tensor.shape)} of the batch", problem, fix)
    versions = [version_of(tensor) for tensor in batch]
    result = program(*args)
    for tensor, version in zip(batch, versions, strict=True):
        if version_of(tensor) != version:
            problem = "is written to by the model, and a graph would write to its own copy"
            raise CaptureError(f"a tensor {list(tensor.shape)} of the batch", problem, "give the model a clone of it")
    return result


def _is_number(tensor: torch.Tensor) -> bool:
    """True for a number of the model's code that torch.compile passes as a tensor; a kernel gets its value."""
    return not tensor.ndim and is_host(tensor.device)


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
        elif isinstance(value, int | float):
            found[name] = value
    return found


def _line_of(error: BaseException) -> str:
    """The program line that has raised an error, or else the user's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = (Place.here(frame) for frame in reversed(frames))
    return next((str(place) for place in places if place is not None), where_of("code outside of programs", frames[-1]))
