"""Fragments: modules whose calls run as programs of their own.

The whole model is one fragment as long as it can be traced into one graph. A module whose code breaks the graph is
split: its own code runs as plain Python, with its own parameters gathered for the call, and each module that it calls
is a fragment. So is a module that is called directly, as in `model.head(x)`, and so are methods that read a parameter
of their own module, which run as if their graph was broken. Code that is not traced never gets a parameter without
memory, whatever it reads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.engine.calls.interceptors import MethodInterceptor, draws_in_place, intercepted_methods, put, taken_out
from zcompile.engine.calls.leaves import FullParameter, Leaf, Leaves, check_in_place, digest, write_back
from zcompile.engine.calls.model_calls import ModelCall, tensors_in
from zcompile.engine.calls.module_guards import HookWatch, TreeWatch
from zcompile.engine.calls.plain_reads import PlainReads
from zcompile.engine.engine import Engine
from zcompile.engine.interpreter import in_large_frame, old_objects_frozen
from zcompile.engine.optimizers import hooked
from zcompile.errors import CaptureError, OptionError, ParameterError, ZcompileError, shortened
from zcompile.frontend.capture import Names, refuse_handed_on
from zcompile.frontend.dynamo import BREAKS, traceable, typed_errors
from zcompile.frontend.links import linked
from zcompile.frontend.local_graphs import Locals
from zcompile.ir.tensor_type import human_bytes
from zcompile.model.conversion import kinds_made
from zcompile.model.sharding import Retired, Site
from zcompile.model.units import is_container
from zcompile.report.explain import Break, explain_breaks
from zcompile.runtime.executor import BoundUnit, gathered
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.lockstep import RunKind
from zcompile.torch_internals.autograd import backward_number, version_of, within_transform
from zcompile.torch_internals.dispatch import no_torch_function
from zcompile.torch_internals.dtensor import with_local
from zcompile.torch_internals.dynamo import traced_whole
from zcompile.torch_internals.modules import hook_tables, parameters_at, put_parameters, with_gradient_hooks


@dataclass(repr=False)
class Tree:
    """A sharded model's module tree: where its parameters are, and its fragments."""

    model: nn.Module
    engine: Engine
    sites: Sequence[Site]
    retired: Retired

    def __post_init__(self) -> None:
        self._paths = {id(module): path for path, module in self.model.named_modules()}
        named = [(module, name) for module in self.model.modules() for name in intercepted_methods(module)]
        self.interceptors = [MethodInterceptor(module, name, self.enter) for module, name in named]
        owning = [module for module in self.model.modules() if next(module.parameters(), None) is not None]
        self.interceptors += [MethodInterceptor(module, "_apply", self.convert) for module in owning]
        self.loading = [MethodInterceptor(module, "load_state_dict", self.load) for module in owning]
        """Traced code never calls these."""
        self.root = Fragment(self, self.model, "", lambda *args, **kwargs: self.model(*args, **kwargs))
        self.call: ModelCall | None = None
        self.face: nn.Module | None = None
        """The compiled module, for holders of the original one."""
        self._fragments: dict[MethodInterceptor, Fragment] = {}
        self._plain: set[MethodInterceptor] = set()
        self._known = {id(parameter) for site in self.sites for parameter in (site.shard, site.placeholder)}
        self._ignored = {id(p): name for name, p in self.model.named_parameters() if id(p) not in self._known}
        """Parameters left to the user, since all others in the tree are shards."""
        self._known.update(self._ignored)
        self.watch = TreeWatch(self.model)
        self.reads = PlainReads(
            self.sites, self.root._gathered, functools.partial(write_back, runtime=self.engine.runtime)
        )
        put((*self.interceptors, *self.loading))

    def run(self, fragment: Fragment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, or a module of it, and set up what its backward needs."""
        if self.engine.runtime.is_full:
            with self.engine.runtime.autocast():
                return fragment.forward(*args, **kwargs)
        if within_transform():
            problem = "is called within torch.func or forward-mode differentiation, which programs do not support"
            fix = "do so within compiled.unsharded(), where it is the plain model, or use torch.autograd.grad"
            raise CaptureError(fragment.path or type(self.model).__name__, problem, fix)
        self.engine.runtime.delivery.forget()
        numbers = contextlib.nullcontext() if fragment.initialises else self.engine.runtime.random_numbers()
        try:
            if self.watch.has_changed():
                self.refuse_strangers(self.model, "")
                self.watch.accept()
            with numbers, self.engine.runtime.autocast():
                self.call = call = self.engine.runtime.new_call()
                call.of_method = not fragment.of_forward
                result = fragment(*args, **kwargs)
        except ZcompileError as error:
            self.engine.runtime.communicator.waits.report_failure("a call of the model", error)
            raise shortened(error)  # noqa: B904  # the same error, with its causes
        finally:
            if self.call is not None:
                self.call.nodes.clear()
            self.call = None
            self.engine.runtime.settle()
        for tensor in tensors_in(result):
            if isinstance(tensor, Leaf):
                problem = "the model returns this parameter, which is not full after the call"
                raise CaptureError(tensor.zcompile_name, problem, "return a copy: .clone()")
        call.end(result)
        if not torch.is_grad_enabled():
            self.engine.runtime.lockstep.check()  # after a training step, delivery does it
        return result

    def enter(self, interceptor: MethodInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module or method from plain Python: the user's, not through the model, or that of a split module."""
        runtime = self.engine.runtime
        if self._runs_plainly(interceptor):
            with runtime.autocast():
                return interceptor.method(*args, **kwargs)
        if self.call is not None:
            return self._fragment_of(interceptor)(*args, **kwargs)
        if backward_number() is None:
            return self.run(self._fragment_of(interceptor), args, kwargs)
        with runtime.replayed_random_numbers(), runtime.autocast():  # a recomputation of a direct call
            return self._fragment_of(interceptor)(*args, **kwargs)

    def convert(self, interceptor: MethodInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        """Convert the original model, as its `to()` does; torch's own way would create parameters unknown to programs.

        Raises:
            ParameterError: it cannot be converted or moved, or only a module of it would be.
        """
        if interceptor.module is self.model and self.face is not None:
            self.face._apply(*args, **kwargs)
        elif any((one.dtype, one.device) != kind for kind, one in kinds_made(interceptor.module, args[0]).items()):
            problem = "is a module of a sharded model, and cannot be converted or moved by itself"
            fix = "convert it before zcompile.compile, or all of the model"
            raise ParameterError(self._paths[id(interceptor.module)], problem, fix)
        return interceptor.module

    def load(self, interceptor: MethodInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Load a state dict into a module of the model: torch's own way would copy all rows into each rank's shard."""
        return cast("Any", self.face)._load_into(interceptor.module, *args, **kwargs)

    def _runs_plainly(self, interceptor: MethodInterceptor) -> bool:
        """Whether a direct call runs unchanged: without shards, gradients from outside of programs are averaged anyway.

        A fragment of a split model stays one, and what has begun as plain Python stays that, wherever it is called: a
        recomputation must run as its call did, and which call it repeats is not known.
        """
        if self.engine.runtime.layout.stage.optimizer_sharded or interceptor in self._fragments:
            return False
        if self.call is None and torch.is_grad_enabled():
            self._plain.add(interceptor)
        return self.call is None or interceptor in self._plain

    def _fragment_of(self, interceptor: MethodInterceptor) -> Fragment:
        is_root = interceptor.module is self.model and interceptor.key == "forward"
        if is_root and not any(hook_tables([self.model])):  # otherwise they would run twice: here, and when traced
            return self.root
        if interceptor not in self._fragments:
            module, path = interceptor.module, self._paths[id(interceptor.module)]
            self._fragments[interceptor] = Fragment(self, module, path, interceptor.method, of_method=interceptor.key)
        return self._fragments[interceptor]

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Inside, the tree has full parameters, and the model's code runs unchanged; see `CompiledModule.unsharded`."""
        runtime = self.engine.runtime
        if runtime.is_full or self.call is not None:
            problem = "is within another one" if runtime.is_full else "is within a call of the model"
            raise OptionError("unsharded()", problem, "gather parameters once, outside")
        full = self._all_full()
        before = self.root.shards_in_place()
        versions = {name: version_of(tensor) for name, tensor in full.items()}
        try:
            _put(self.sites, [full[site.name] for site in self.sites])
            with taken_out([*self.interceptors, *self.loading]), runtime.autocast():
                runtime.is_full = True
                yield
                self._check_unchanged(full, versions)
        finally:
            runtime.is_full = False
            _put(self.sites, before)

    def _check_unchanged(self, full: Mapping[str, nn.Parameter], versions: Mapping[str, int]) -> None:
        """Refuse changes within `unsharded` that would be lost.

        Raises:
            ParameterError: a parameter was written to or replaced. Reported to other ranks, where it may not have been.
        """
        try:
            check_in_place(self.sites, full)
            for name, tensor in full.items():
                if version_of(tensor) != versions[name]:
                    problem = "was written to within unsharded(), which does not change the shards"
                    fix = "write to shards, outside: with torch.no_grad(): parameter.copy_(...)"
                    raise ParameterError(name, problem, fix)
        except ParameterError as error:
            self.engine.runtime.communicator.waits.report_failure("unsharded()", error)
            raise

    def _all_full(self) -> dict[str, nn.Parameter]:
        """Full parameters by name, none of which is trained. Collective.

        Raises:
            OptionError: they exceed the memory limit.
        """
        runtime = self.engine.runtime
        layout, limit = runtime.layout, runtime.options.limit
        nbytes = sum(layout.gathered_bytes(unit.name) for unit in layout.units)
        if limit is not None and nbytes > limit:
            problem = f"{human_bytes(limit)} is less than the {human_bytes(nbytes)} of all parameters"
            raise OptionError("memory_limit", problem, "call the model without unsharded(), unit by unit")
        if any(param.shards for param in layout.params):
            runtime.lockstep.enter(RunKind.MODULE, digest("unsharded"))
        found = dict[str, nn.Parameter]()
        placing = {site.name: site.placeholder for site in self.sites if isinstance(site.placeholder, DTensor)}
        for unit in layout.units:
            with torch.inference_mode(False), torch.no_grad():
                full = gathered(BoundUnit(runtime.shards[unit.name], unit))
                for name, tensor in zip(unit.names, full.tensors, strict=True):
                    assert tensor is not None, "nothing of it was released"
                    whole = with_local(placing[name], tensor) if name in placing else tensor
                    found[name] = FullParameter.named(name, whole, requires_grad=False)
        runtime.lockstep.check()
        return found

    def refuse_strangers(self, module: nn.Module, path: str) -> None:
        """Refuse parameters in `module`, at `path`, that were not in the model when it was compiled.

        Raises:
            ParameterError: there is one: its gradient would be this rank's own.
        """
        for name, parameter in module.named_parameters(prefix=path):
            self.refuse_stranger(name, parameter)

    def refuse_stranger(self, path: str, value: object) -> None:
        """The same for a value to be set at `path`: a parameter, a module, or anything else."""
        if isinstance(value, nn.Module):
            self.refuse_strangers(value, path)
        if isinstance(value, nn.Parameter) and id(value) not in self._known and not isinstance(value, Leaf):
            problem = "was put into the model after zcompile.compile, so that it is not sharded"
            raise ParameterError(
                path, problem, "change the model before zcompile.compile, or values of its parameters in place"
            )

    def names(self, path: str, signature: inspect.Signature) -> Names:
        """The names of a graph's inputs, which was traced from a function of `signature`, at `path`."""
        return Names(
            {id(site.placeholder): site.name for site in self.sites},
            {id(buffer): name for name, buffer in self.model.named_buffers()} | self._ignored,
            frozenset(self._paths.values()),
            tuple(signature.parameters)[1:],
            path,
        )

    @property
    def locals(self) -> Locals:
        """What programs get for parameters that are DTensors."""
        return {id(site.placeholder): site.local for site in self.sites if site.local is not None}


def tree_of(model: nn.Module) -> Tree | None:
    """The tree of a compiled model; None for any other, including a part of such a model."""
    found = vars(model).get("forward")
    if not isinstance(found, MethodInterceptor) or found.module is not model:
        return None
    tree = getattr(found.enter, "__self__", None)
    return tree if isinstance(tree, Tree) and tree.model is model else None


class Fragment:
    """A module whose calls run as programs, or, once its code has broken the graph, as Python around fragments."""

    updater: Updater | None = None
    """Updates parameters, in programs that do."""

    def __init__(
        self, tree: Tree, module: nn.Module, path: str, forward: Callable[..., Any], *, of_method: str = "forward"
    ) -> None:
        self.tree, self.module, self.path, self.forward = tree, module, path, forward
        self.of_forward = of_forward = of_method == "forward"
        owners = {id(owner) for owner in module.modules()}
        self._interceptors = [interceptor for interceptor in tree.interceptors if id(interceptor.module) in owners]
        self.sites = [site for site in tree.sites if id(site.owner) in owners]
        self._own_interceptors = [
            e for e in self._interceptors if e.module is module and (of_forward or e.key != "forward")
        ]
        self.initialises = not of_forward and draws_in_place(module, of_method)
        """True for a method that draws values for parameters: the same on all ranks, if they have the same seed."""
        self._is_split = not of_forward
        self._is_split_under_hooks = False
        """True if global module hooks, such as those of operation counters, break its graph."""
        self._hooks = HookWatch(module, itself=not path)
        self._was_called = False
        # Dynamo does not support DTensors with varying sizes, and loops have a number of rows: a program for each size.
        static = any(site.local is not None for site in tree.sites) or tree.engine.options.wants_sizes
        lines = [f"{path} {type(module).__qualname__}"]
        lines += [f"{site.name} {list(site.placeholder.shape)}" for site in self.sites]
        call = traceable(module, forward, lines)
        self._traced = traced_whole(call, _backend(self), static=static)

    @property
    def is_split(self) -> bool:
        """True if its code runs as plain Python."""
        return self._is_split or (self._is_split_under_hooks and any(hook_tables([])))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Collective.

        Raises:
            CaptureError: its graph cannot be sharded.
            ParameterError: a parameter was replaced, or is read where it is not full.
        """
        if self.tree.reads.running:
            self.tree.reads.settle()
        if not self.is_split:
            try:
                runtime = self.tree.engine.runtime
                first = contextlib.nullcontext() if self._was_called else self._first_call()
                traced = self._traced if self._was_called else functools.partial(in_large_frame, self._traced)
                with self._placeholders_in_place(), typed_errors(), runtime.modes.aside(), first:
                    result = traced(self._hooks.text(self.tree.watch.version), *args, **kwargs)
            except BREAKS as error:
                self._split(error)
            else:
                # In a recomputation within a backward there is no call: gradients use the graph of the first run.
                if self.tree.call is not None:
                    self.tree.call.watch(result, (args, kwargs))
                return result
        with self._own_parameters_full(), taken_out(self._own_interceptors):
            return self.forward(*args, **kwargs)

    @contextlib.contextmanager
    def _first_call(self) -> Iterator[None]:
        """Around the first call, which is traced and takes a while."""
        self._was_called = True
        with self.tree.engine.runtime.progress.doing(f"tracing {self.path or 'its forward'}"), old_objects_frozen():
            yield

    def _capture(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that torch.compile calls, once for every graph."""
        for value in inputs:
            if name := self.tree.retired.get(id(value), (None, ""))[1]:
                problem = "the model's code does not read this parameter from its module, and it is empty now"
                raise ParameterError(
                    name, problem, "read it as an attribute of its module, not from a list or a closure"
                )
        self.tree.refuse_strangers(self.module, self.path)
        refuse_handed_on(self.names)
        trainable = {site.name: site.shard.requires_grad for site in self.tree.sites}
        compiled = self.tree.engine.capture(
            module,
            inputs,
            self.names,
            trainable,
            whole=not self.path,
            updater=self.updater,
            locals_=self.tree.locals,
        )
        return linked(compiled, inputs, {id(site.placeholder): site.shard for site in self.sites})

    @property
    def names(self) -> Names:
        """The names of its graphs' inputs."""
        return self.tree.names(self.path, inspect.signature(type(self.module).forward))

    def _split(self, error: Exception) -> None:
        graph_break = Break.of(self.path, type(self.module).__name__, error)
        breaks = self.tree.engine.runtime.breaks
        if all(graph_break.where != known.where for known in breaks):
            warnings.warn(f"zcompile: {explain_breaks([graph_break])}", stacklevel=2)
        breaks.append(graph_break)
        if any(hook_tables([])):
            self._is_split_under_hooks = True
        else:
            self._is_split = True

    # -- parameters in the module tree ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _placeholders_in_place(self) -> Iterator[None]:
        """Placeholders in the module's tree while a traced call runs; shards otherwise, even after an exception."""
        before = self._check(self.sites)
        try:
            with no_torch_function():
                for site in self.sites:
                    if site.placeholder.requires_grad is not site.shard.requires_grad:
                        site.placeholder.requires_grad = site.shard.requires_grad
                _put(self.sites, [site.placeholder for site in self.sites])
            with taken_out(self._interceptors), self.tree.reads.aside():
                yield
        finally:
            _put(self.sites, before)

    @contextlib.contextmanager
    def _own_parameters_full(self) -> Iterator[None]:
        """The module's own parameters gathered, as autograd leaves, while its code runs as plain Python."""
        owners = {id(owner) for owner in _owners(self.module)}
        own = [site for site in self.sites if id(site.owner) in owners]
        before = self._check(own)
        leaves = self._gathered(own)
        call = self.tree.call
        writes = not self.of_forward and call is not None and call.of_method
        place = f" in the code of {self.path or type(self.module).__name__}"
        try:
            _put(own, [leaves[site.name] for site in own])
            with self.tree.reads.within(self._gathered, leaves, writes=writes, place=place):
                yield
                check_in_place(own, leaves)
        finally:
            _put(own, before)

    def _gathered(self, sites: Sequence[Site], reader: str = "") -> dict[str, Leaf]:
        """Full parameters for plain Python, whose gradients are averaged at the end of a backward. Collective."""
        for site in sites:
            if site.local is not None:
                problem = (
                    f"is tensor-parallel, and the code of {self.path or 'the model'} that reads it breaks the graph"
                )
                raise CaptureError(site.name, problem, "fix the graph break (see explain())")
        runtime = self.tree.engine.runtime
        trainable = {site.name: site.shard.requires_grad for site in sites}
        leaves: dict[str, Leaf] = {}
        units = runtime.layout.restricted(trainable).units
        if any(param.shards for unit in units for param in unit.params):
            runtime.lockstep.enter(RunKind.MODULE, digest(self.path, *filter(None, [reader])))
        for unit in units:
            made = Leaves.gathered(BoundUnit(runtime.shards[unit.name], unit), trainable, runtime.delivery)
            leaves |= made.tensors
            if torch.is_grad_enabled() and any(trainable[name] for name in unit.names):
                self._reduce_later(made)
        return leaves

    def _reduce_later(self, leaves: Leaves) -> None:
        if self.tree.call is not None:
            self.tree.call.reduce_later(leaves.tensors.values(), leaves.reduce)
        else:  # a reentrant checkpoint, which runs the forward again within a backward and then its backward
            leaves.delivery.at_end(leaves.reduce)

    def shards_in_place(self) -> list[nn.Parameter | None]:
        """The current parameters of the whole tree: shards.

        Raises:
            ParameterError: one was replaced, or has a hook that would not run.
        """
        return self._check(self.sites)

    def _check(self, sites: Sequence[Site]) -> list[nn.Parameter | None]:
        """The current parameters at `sites`: shards, or full parameters for the plain Python around this call."""
        if found := with_gradient_hooks([site.shard for site in sites]):
            raise hooked(next(site.name for site in sites if site.shard is found[0]))
        result = parameters_at([(site.owner, site.key) for site in sites])
        for site, current in zip(sites, result, strict=True):
            if current is not site.shard and not isinstance(current, Leaf):
                fix = "change its values in place: with torch.no_grad(): p.copy_(...)"
                there: object = current
                if there is not None and not isinstance(there, nn.Parameter):  # only functional_call does that
                    fix = "call torch.func.functional_call within compiled.unsharded()"
                raise ParameterError(site.name, "was replaced or removed after zcompile.compile", fix)
        return result


def _put(sites: Sequence[Site], values: Sequence[nn.Parameter | None]) -> None:
    """Set the values of `sites` in the module tree."""
    put_parameters([(site.owner, site.key) for site in sites], values)


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and the containers that only its code can read."""
    yield module
    for child in module.children():
        if is_container(child):
            yield from _owners(child)


def _backend(fragment: Fragment) -> Callable[..., Any]:
    """The backend of torch.compile for `fragment`. torch keeps it for good, which must not keep the model alive."""
    weak = weakref.ref(fragment)

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        alive = weak()
        assert alive is not None, "a fragment is alive while it is called"
        return alive._capture(module, inputs)

    return backend
