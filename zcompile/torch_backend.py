"""The backend for `torch.compile`: the same pipeline, for scripts that compile their model themselves.

    model = torch.compile(model, backend=zcompile.backend(stage=3))        # or backend="zcompile", options={"stage": 3}

A backend sees graphs, not modules, so a parameter is sharded when it first appears as an input of a graph. The module
keeps its `nn.Parameter` objects, whose memory is freed: their `.grad` is the shards' gradient, `state_dict()` returns
the shards, and an optimizer that holds them is moved to the shards at its first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zcompile.engine.engine import Engine
from zcompile.engine.interpreter import in_large_frame
from zcompile.engine.model_runtime import ModelRanks, ModelRuntime
from zcompile.engine.optimizers import hooked, point_at_shards, watch_optimizers
from zcompile.engine.reports import Reported, Reports
from zcompile.engine.sharding_plan import choose_shard, data_ranks
from zcompile.errors import ModelError, OptimizerError, OptionError, ParameterError, nearest
from zcompile.frontend.capture import Names
from zcompile.frontend.graph_edits import varying_floats
from zcompile.frontend.links import linked
from zcompile.ir.layout import STAGES, Layout
from zcompile.ir.program import Program
from zcompile.ir.spelling import identifier
from zcompile.model.graph_parameter import give_to_graphs
from zcompile.model.sharding import check_kind, placeholder_of
from zcompile.model.units import blocks_of_names, make_units
from zcompile.runtime.agreement import Agreement, propagate_failure
from zcompile.runtime.gradients.delivery import Refusal
from zcompile.runtime.gradients.optimizer_trials import parameters_held
from zcompile.runtime.groups import (
    Communicator,
    axes_of_mesh,
    check_inside,
    check_mesh,
    ranks_of,
    resolve_mesh,
    sequence_axes,
    with_sequence,
)
from zcompile.runtime.shards import UnitShards
from zcompile.schedule.option_checks import AUTO, check_dimensions
from zcompile.schedule.options import BackendOptions, ModuleOptions, Options, check_known, names_of
from zcompile.torch_internals.aot_autograd import path_of_input
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dynamo import (
    AroundCompiling,
    compile_plainly,
    modules_given_to,
    retracing,
    tracing_context,
)
from zcompile.torch_internals.modules import with_gradient_hooks
from zcompile.torch_internals.sizes import of_fixed_sizes


@dataclass(frozen=True, slots=True)
class _Known:
    """A parameter that has been sharded: the user's object, and the placeholder that graphs take instead."""

    name: str
    parameter: nn.Parameter
    placeholder: nn.Parameter


class Backend(Reported):
    """A backend for `torch.compile` that shards the parameters of the graphs it compiles; see `zcompile.backend`."""

    __name__ = "zcompile"

    def __init__(self, options: Options, mesh: DeviceMesh | None = None, sequence: DeviceMesh | None = None) -> None:
        if options.cuda_graphs == "step":
            fix = "give cuda_graphs=True, or call zcompile.train_step(model, ...)"
            raise OptionError(
                "cuda_graphs", "'step' captures the optimizer's step, too, which torch.compile never sees", fix
            )
        self.options, self.mesh, self.sequence = options, mesh, sequence
        self._known: dict[int, _Known] = {}
        self._engine: Engine | None = None
        self._stepping: weakref.ref[Optimizer] | None = None
        """The optimizer whose step is running: its closure may make the first call of the model."""
        self._hidden: dict[int, torch.Tensor] = {}
        self._nan: dict[torch.dtype, torch.Tensor] = {}
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers without parameters of a module that was given to this backend."""
        self._watch_steps()

    # -- compiling ------------------------------------------------------------------------------------------------

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs. Collective.

        Raises:
            ModelError: a parameter cannot be sharded in place.
            CaptureError: the code writes to a parameter or returns one.
        """
        self._around_compiling.ensure()
        self._shard_new(module, inputs)
        if self._engine is None:
            return compile_plainly(module, inputs, self.options.backend)
        context = tracing_context()
        floats = {read.args[0] for read in varying_floats(module.graph)}
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            if node in floats:  # torch finds the symbol of a float by the tensor that stands for it
                node.meta["example_value"] = value
        bound: dict[tuple[str, ...], Callable[..., Any]] = {self._names(inputs): self._compile(module, inputs)}

        def run(*args: Any) -> Any:
            # Dynamo's guards do not tell apart parameters of equal shape and dtype: equal blocks share one graph.
            self._shard_new(module, args)
            names = self._names(args)
            if names not in bound:
                with retracing(context):
                    bound[names] = self._compile(module, args)
            return self._run(bound[names], args)

        return run

    def _names(self, inputs: Sequence[Any]) -> tuple[str, ...]:
        return tuple(self._known[id(value)].name for value in inputs if isinstance(value, nn.Parameter))

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        engine = self.engine
        nodes = module.graph.find_nodes(op="placeholder")
        parameters = [value for value in inputs if isinstance(value, nn.Parameter)]
        fakes = {id(value): of_fixed_sizes(self._placeholder(value)) for value in parameters}
        given = [
            fakes[id(value)] if isinstance(value, nn.Parameter) else node.meta.get("example_value", value)
            for node, value in zip(nodes, inputs, strict=True)
        ]
        names = Names({id(fake): self._known[index].name for index, fake in fakes.items()}, {}, frozenset())
        trainable = {known.name: known.parameter.requires_grad for known in self._known.values()}
        with engine.runtime.autocast():
            compiled = in_large_frame(engine.capture, module, given, names, trainable, whole=False)
        return linked(compiled, inputs, {id(value): value for value in parameters})

    def _placeholder(self, parameter: nn.Parameter) -> nn.Parameter:
        placeholder = self._known[id(parameter)].placeholder
        placeholder.requires_grad_(parameter.requires_grad)
        return placeholder

    def _run(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        engine = self.engine
        engine.runtime.delivery.forget()
        self._follow_users()
        call = engine.runtime.new_call()
        with engine.runtime.random_numbers():
            result = compiled(*(self._placeholder(arg) if isinstance(arg, nn.Parameter) else arg for arg in args))
        call.watch(result, args)
        call.end(result)
        if not torch.is_grad_enabled():
            engine.runtime.lockstep.check()  # after a backward, delivery does it
        return result

    # -- sharding -------------------------------------------------------------------------------------------------

    def _shard_new(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Shard those parameters among `inputs` that are not sharded yet."""
        fresh: dict[str, nn.Parameter] = {}
        kept: set[str] = set()
        normalising = _normalising(module)
        taken = {known.name for known in self._known.values()}
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            if isinstance(value, nn.Parameter) and id(value) not in self._known:
                name = path = path_of_input(node)
                number = 1
                while name in taken or name in fresh:  # graphs of several modules may use the same names
                    number += 1
                    name = f"{path}_{number}"
                fresh[name] = value
                kept |= {name} if node in normalising else set()
        if not fresh:
            return
        _check(fresh)
        if self._engine is None:
            self._engine = self._make_engine(fresh, kept)
        engine = self._engine
        lines = [f"axis {axis.name}: {axis}" for axis in engine.runtime.layout.axes]
        lines += [f"{name} {list(param.shape)} {param.dtype}" for name, param in fresh.items()]
        engine.runtime.agreement.reach("the parameters of a graph", [str(self.options), *lines])
        check_inside(engine.runtime.communicator.mesh, self.options.hybrid)
        self._shard(engine, fresh, kept)

    def _make_engine(self, fresh: Mapping[str, nn.Parameter], kept: Set[str]) -> Engine:
        """The engine of all graphs. `shard="auto"` is decided by the parameters of the first graph."""
        mesh = resolve_mesh(self.mesh, device := next(iter(fresh.values())).device)
        remarks = list[str]()
        with propagate_failure(lambda: ranks_of(mesh)):
            if self.options.shard == AUTO:
                self.options, remarks = self._with_chosen_shard(Communicator(mesh, device), fresh, kept)
            data = data_ranks(mesh, device, self.options)
            check_dimensions(self.options.shard, self.options.outer_dtype, data.mesh.ndim)
        agreement = Agreement(data)
        ranks = ModelRanks(data, agreement, agreement, None, sequence=self.sequence)
        layout = _empty_layout(data.mesh, self.options)
        layout = replace(layout, axes=(*layout.axes, *sequence_axes(self.sequence)))
        runtime = ModelRuntime(layout, ranks, self.options)
        runtime.remarks += remarks
        engine = Engine(runtime)
        watch_optimizers(self, engine.runtime, {})
        return engine

    def _with_chosen_shard(
        self, data: Communicator, fresh: Mapping[str, nn.Parameter], kept: Set[str]
    ) -> tuple[Options, list[str]]:
        """See `choose_shard`."""

        def over(mesh: DeviceMesh, options: Options) -> Layout:
            layout = _empty_layout(mesh, options)
            units = make_units(fresh, blocks_of_names(fresh), layout, options.precision, kept=kept)
            return layout.with_units(tuple(units))

        return choose_shard(self.options, data, over, held=sum(param.nbytes for param in fresh.values()))

    def _watch_steps(self) -> None:
        """Hook optimizer steps and Dynamo's compilations, before and after, for the lifetime of this backend."""
        weak = weakref.ref(self)

        def calling(method: Callable[..., None]) -> Callable[..., None]:
            def call(*given: Any) -> None:
                if (backend := weak()) is not None:
                    method(backend, *given)

            return call

        before, after = calling(Backend._before_step), calling(Backend._after_step)
        self._around_compiling = AroundCompiling(calling(Backend._hide_gradients), calling(Backend._show_gradients))
        self._around_compiling.ensure()
        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        for handle in (*hooks, self._around_compiling):
            weakref.finalize(self, handle.remove)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._stepping = weakref.ref(optimizer)
        self._move_to_shards(optimizer)

    def _after_step(self, *_: object) -> None:
        self._stepping = None

    def _shard(self, engine: Engine, fresh: Mapping[str, nn.Parameter], kept: Set[str]) -> None:
        """Shard the parameters in `fresh`; parameters in `kept` are gathered in their own dtype."""
        layout, communicator = engine.runtime.layout, engine.runtime.communicator
        blocks, precision = blocks_of_names(fresh), self.options.precision
        taken = {identifier(unit.name) for unit in layout.units}
        units = list(make_units(fresh, blocks, layout, precision, kept=kept, taken=taken))
        plain = not layout.stage.optimizer_sharded
        shards: dict[str, UnitShards] = {}
        made: dict[int, _Known] = {}
        if not plain:
            self._make_nan(fresh.values())
        with torch.no_grad():
            for unit in units:
                shards[unit.name] = held = UnitShards(unit, communicator)
                for param in unit.params:
                    old = fresh[param.name]
                    adopt = held.adopt_plain if plain else held.adopt
                    adopt(param, old)
                    made[id(old)] = _Known(param.name, old, placeholder_of(old, param.full_dtype, old.device)[0])
                    old.zcompile_backend = weakref.ref(self)  # type: ignore[attr-defined]
                    old.zcompile_name = param.name  # type: ignore[attr-defined]
                    old.requires_grad_(True).register_hook(Refusal(param.name))
                    old.requires_grad_(param.trainable)
                    if not plain:
                        held.user_params[param.name] = old
                        give_to_graphs(old, param.name, held, engine.runtime.freshness, self._nan[old.dtype])
        engine.runtime.extend(units, shards)
        self._known |= made
        stepping = self._stepping() if self._stepping else None
        if stepping is not None:
            self._move_to_shards(stepping)

    def _make_nan(self, params: Iterable[nn.Parameter]) -> None:
        """Fill one buffer per dtype with NaN, large enough for the largest parameter; all parameters view it."""
        for param in sorted(params, key=nn.Parameter.numel, reverse=True):
            if param.dtype not in self._nan or self._nan[param.dtype].numel() < param.numel():
                self._nan[param.dtype] = torch.full((param.numel(),), torch.nan, device=param.device).to(param.dtype)

    # -- gradients ------------------------------------------------------------------------------------------------

    def _hide_gradients(self, *_: object) -> None:
        """Detach gradients while Dynamo traces: it cannot handle a plain parameter whose `.grad` is a DTensor."""
        for parameter in self._user_parameters():
            if parameter.grad is not None:
                self._hidden[id(parameter)] = parameter.grad
                parameter.grad = None

    def _show_gradients(self, *_: object) -> None:
        for parameter in self._user_parameters():
            if id(parameter) in self._hidden:
                parameter.grad = self._hidden.pop(id(parameter))

    def _user_parameters(self) -> Iterator[nn.Parameter]:
        for unit in self.engine.runtime.shards.values() if self._engine else ():
            yield from unit.user_params.values()

    # -- optimizers -----------------------------------------------------------------------------------------------

    def _move_to_shards(self, optimizer: Optimizer) -> None:
        """Replace the parameters that an optimizer holds by their shards.

        Raises:
            OptimizerError: it also holds unsharded parameters with a gradient, which nobody has averaged: either mixed
                with sharded parameters, or of a module that was compiled with this backend.
            ParameterError: a plain tensor was assigned to the `.grad` of a sharded parameter.
        """
        known = self._known.keys() | {id(param) for param in self.shards().values()}
        if not any(id(param) in known for param in parameters_held(optimizer)):
            if self._world > 1 and optimizer not in self._others:
                refuse_unseen(optimizer, (self, compiler), self._others)
            return
        self._follow_users()
        self._refuse_strangers(optimizer)
        user_params = {id(known.parameter): (known.parameter, known.name) for known in self._known.values()}
        point_at_shards([optimizer], self.engine.runtime.shards.values(), user_params)

    @property
    def _world(self) -> int:
        if self._engine is not None:
            return self._engine.runtime.layout.world
        if self.mesh is not None:
            return self.mesh.size()
        return dist.get_world_size() if dist.is_initialized() else 1

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        known = {id(param) for param in self.shards().values()} | self._known.keys()
        if self.engine.runtime.layout.world > 1:
            for index, param in enumerate(parameters_held(optimizer)):
                if id(param) not in known and _is_plain(param):
                    problem = "is in no compiled graph, so its gradient is not averaged over the ranks"
                    fix = "let torch.compile trace the code that reads it, or use zcompile.compile"
                    raise OptimizerError(f"parameter {index} of {type(optimizer).__name__}", problem, fix)

    def _follow_users(self) -> None:
        """Apply the user's changes of `.grad` of the original parameters to the shards.

        A gradient set to None on a parameter or its shard is set to None on both; a new one is assigned to the shard.

        Raises:
            ParameterError: the gradient is a plain tensor, or a parameter has a hook, which would not run.
        """
        units = self.engine.runtime.shards.values()
        if found := with_gradient_hooks([known.parameter for known in self._known.values()]):
            raise hooked(next(known.name for known in self._known.values() if known.parameter is found[0]))
        with no_torch_function():
            pairs = [(name, unit.parameters[name], user) for unit in units for name, user in unit.user_params.items()]
            pairs = [pair for pair in pairs if pair[1].grad is not pair[2].grad]
        for name, shard, parameter in pairs:
            if shard.grad is None or parameter.grad is None:
                shard.grad = parameter.grad = None
            elif isinstance(parameter.grad, DTensor):
                shard.grad = parameter.grad
            else:
                fix = "change the gradient in place, or assign a DTensor computed from it"
                raise ParameterError(name, "has a plain tensor in .grad, which cannot be a shard's gradient", fix)

    # -- looking inside -------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine that runs the programs.

        Raises:
            ModelError: nothing has been compiled yet.
        """
        if self._engine is None:
            raise ModelError("zcompile.backend", "has compiled nothing yet", "call the model first")
        return self._engine

    @property
    def programs(self) -> list[Program]:
        """The rewritten programs in order of capture."""
        return self.engine.programs

    def shards(self) -> dict[str, nn.Parameter]:
        """The shards by name, of the parameters that graphs have taken so far."""
        shards = self._engine.runtime.shards.values() if self._engine else ()
        return {name: param for unit in shards for name, param in unit.parameters.items()}

    def _shown(self) -> Reports:
        return self.engine.reports


def backend(
    *,
    stage: int = 3,
    prefetch: int | Literal["auto"] = 2,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    checkpoint: str | int | float | None = None,
    backend: str = "inductor",
    **options: Unpack[BackendOptions],
) -> Backend:
    """Make a backend for `torch.compile(model, backend=zcompile.backend(stage=3))`; options as for `zcompile.compile`.

    Parameters are sharded in the first call that uses them, from the values of the mesh's first rank. The model keeps
    its own `nn.Parameter` objects: their gradients are the shards', an optimizer that holds them is moved to the shards
    at its first step, and `clip_grad_norm_` and `state_dict()` see the shards. Code outside of compiled graphs that
    reads or writes a parameter raises an error that names the parameter.

    Raises:
        OptionError: an unknown option, or an invalid stage, prefetch, dtype or backend.
        PipelineError: a pass is unknown, missing or out of place.
        GroupError: the mesh has an unsupported shape, or leaves ranks out.
    """
    given = {**locals(), **options}
    check_known(options, _NAMES, "zcompile.backend")
    parsed = Options.among(given)
    mesh, sequence = with_sequence(mesh, parsed.sequence)
    if mesh is not None:
        check_mesh(mesh)
    return Backend(parsed, mesh, sequence)


_NAMES = names_of(backend, BackendOptions)


def compiler(module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """Compile one graph for `torch.compile(model, backend="zcompile", options={...})`. Collective.

    Raises:
        OptionError: `zcompile.backend` does not have this option.
    """
    for option in options or {}:
        if option in _NAMES:
            continue
        if option in ("optimizer", *ModuleOptions.__annotations__):
            fix = "call zcompile.compile(model, ...) instead of torch.compile"
            raise OptionError(f"options[{option!r}]", "is an option of zcompile.compile only, which sees modules", fix)
        raise OptionError(f"options[{option!r}]", "is not an option of zcompile.backend", nearest(option, _NAMES))
    return _backend_of(inputs, options or {})(module, inputs)


def _backend_of(inputs: Sequence[Any], options: Mapping[str, Any]) -> Backend:
    """The backend shared by all graphs of a module, found by the parameters among the `inputs` of one of its graphs."""
    params = {id(value): value for value in inputs if isinstance(value, nn.Parameter)}
    known = next(filter(None, map(_backend_that_has, params.values())), None)
    if known is not None:
        return known
    made = backend(**options)
    for module in modules_given_to((compiler,)) if params else ():
        of_module = list(module.parameters())
        if any(id(param) in params for param in of_module):
            for param in of_module:
                if _backend_that_has(param) is None:
                    param.zcompile_backend = weakref.ref(made)  # type: ignore[attr-defined]
    return made


def _backend_that_has(param: nn.Parameter) -> Backend | None:
    """The backend that has sharded a parameter or another of the same module; None if there is none (any more)."""
    known: weakref.ref[Backend] | None = getattr(param, "zcompile_backend", None)
    return None if known is None else known()


def refuse_unseen(optimizer: Optimizer, backends: Sequence[object], others: weakref.WeakSet[Optimizer]) -> None:
    """Refuse a step over parameters that are in no compiled graph, of a module that was given to one of `backends`.

    Code that Dynamo does not trace runs eagerly, and nobody averages its gradients. An optimizer that holds gradients,
    but of no such parameter, is added to `others`, and need not be checked again.

    Raises:
        OptimizerError: the optimizer holds such a parameter.
    """
    params = {id(param) for param in parameters_held(optimizer) if _is_plain(param)}
    if not params:
        return
    for module in modules_given_to(backends):
        for name, param in module.named_parameters():
            if id(param) in params:
                problem = "is in no compiled graph, so its gradient is not averaged over the ranks"
                fix = f"use zcompile.compile, which handles code that Dynamo skips in {type(module).__name__}; "
                raise OptimizerError(name, problem, f"{fix}TORCH_LOGS=graph_breaks shows why it is skipped")
    others.add(optimizer)


def _is_plain(param: torch.Tensor) -> bool:
    """True for a parameter with a gradient that is neither a DTensor nor sharded by a backend of zcompile."""
    return param.grad is not None and not isinstance(param, DTensor) and not hasattr(param, "zcompile_name")


def _empty_layout(mesh: DeviceMesh, options: Options) -> Layout:
    return Layout((), STAGES[options.stage], axes_of_mesh(mesh), hybrid=options.hybrid)


def _check(fresh: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError for a parameter that cannot be sharded in place."""
    devices = {param.device for param in fresh.values()}
    for name, param in fresh.items():
        if hasattr(param, "zcompile_name"):
            fix = "give one backend to all of torch.compile: backend=zcompile.backend(...)"
            raise ModelError(name, "was sharded by another backend, for another graph", fix)
        check_kind(name, param)
        if isinstance(param, DTensor):
            raise ModelError(name, "is a DTensor already", "compile a plain model")
        if not param.is_contiguous():
            fix = "make it contiguous before torch.compile, or use zcompile.compile"
            raise ModelError(name, f"has strides {param.stride()}, for which the graph was traced", fix)
        if param.grad is not None:
            raise ModelError(name, "has a gradient from before its first compiled call", "call zero_grad() first")
        if len(devices) > 1:
            raise ModelError(name, f"is on {param.device}, others are not", "move the model to one device")


def _normalising(module: fx.GraphModule) -> set[fx.Node]:
    """Parameters read by batch normalization, which computes in the dtype of its running statistics."""
    calls = module.graph.find_nodes(op="call_function", target=nn.functional.batch_norm)
    return {
        value
        for call in calls
        for value in (*call.args[3:5], call.kwargs.get("weight"), call.kwargs.get("bias"))
        if isinstance(value, fx.Node)
    }
