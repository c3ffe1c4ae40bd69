"""The engine of one model: compiles Dynamo's graphs into programs with one schedule, runs and shows them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zcompile.cost.hardware import CPU, GPU, Hardware
from zcompile.cost.roofline import bucket_for
from zcompile.engine.calibration import measure
from zcompile.engine.interpreter import collector_paused, old_objects_frozen
from zcompile.engine.lowering import CompiledStep
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.reports import Reports
from zcompile.engine.rewritten import CachedStep, PassInputs, Rewritten
from zcompile.engine.step_trace import is_intercepting, offer
from zcompile.errors import AgreementError, OptionError, PipelineError, ProgramError
from zcompile.frontend.capture import Capture, Names
from zcompile.frontend.kept_results import without_wide_results
from zcompile.frontend.local_graphs import Locals, on_locals
from zcompile.frontend.step_cache import Runner, StepCache, own_source
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Parameter, Update
from zcompile.ir.program import Program
from zcompile.model.tensor_parallel import check_collectives
from zcompile.report.dumps import dumping_failures
from zcompile.report.explain import explain
from zcompile.runtime.device import free_bytes, is_gpu
from zcompile.runtime.gradients.updates import Updater
from zcompile.schedule.decision import Request, checkpoint_budget, decide
from zcompile.schedule.pipeline import Journal, Pipeline
from zcompile.torch_internals.dynamo import tracing_context


class Engine:
    """Compiles the programs of one model, and shows them. Creating one is collective.

    Callers trace graphs, and decide when placeholder parameters are in the module tree: `fragments` for
    `zcompile.compile`, `torch_backend` for `torch.compile`.

    Args:
        runtime: What its programs run with.
        title: The model's name.

    Raises:
        OptionError: on every rank: the folder of the dump cannot be written.
    """

    programs_along: Sequence[Program] = ()

    def __init__(self, runtime: ModelRuntime, *, title: str = "a model") -> None:
        self.runtime, self.options = runtime, runtime.options
        runtime.progress.what = title
        self.hardware = GPU if is_gpu(runtime.communicator.device) else CPU
        """The machine as the cost model sees it; measured, if the schedule is chosen."""
        self.schedule = replace(self.options.schedule, bucket=bucket_for(self.hardware))
        self._chosen = False
        self.reports = Reports(title, runtime, self)

    def capture(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        names: Names,
        trainable: Mapping[str, bool],
        *,
        whole: bool = True,
        updater: Updater | None = None,
        locals_: Locals | None = None,
    ) -> Callable[..., Any]:
        """The callable for one graph of Dynamo; ranks agree on its programs when they first run.

        `whole`: the graph is the whole model's; a partial one gathers only the parameters that it reads. `updater`:
        programs update parameters with it and return no gradients. `locals_`: what programs get for parameters that are
        DTensors.
        """
        weak = weakref.ref(self)

        def lower(traced: Program) -> Runner:
            # Dynamo keeps what it compiled until `torch.compiler.reset()`; that must not keep the model alive.
            if not whole:
                names = {op_of(node, Parameter).name for node in traced.nodes(Parameter)}
                traced = replace(traced, layout=traced.layout.restricted(names), unused=traced.unused & names)
            return weakref.proxy(alive()._lower(traced, updater))  # type: ignore[no-any-return]

        def restore(content: bytes) -> Runner:
            return weakref.proxy(alive()._restore(content, updater))  # type: ignore[no-any-return]

        def alive() -> Engine:
            engine = weak()
            assert engine is not None, "it is alive while it compiles"
            return engine

        layout = self.runtime.layout.with_trainable(trainable)
        cache = StepCache(self._depends_on(whole, updater), restore) if self._is_cached else None

        def capturing(called: Names) -> Capture:
            # Other names than those given belong to a graph of DTensors, whose layouts are not in torch's key.
            kept = cache if called is names else None
            return Capture(called, layout, lower, cache=kept, **self.options.tracing)

        def compiled(graph: torch.fx.GraphModule) -> Callable[..., Any]:
            return on_locals(graph, inputs, names, locals_ or {}, capturing)

        with self.runtime.progress.doing("tracing its backward"), old_objects_frozen():
            return without_wide_results(module, compiled) if self.options.wants_sizes else compiled(module)

    @property
    def _is_cached(self) -> bool:
        """True if steps are looked up and stored in torch's cache folder.

        The user's passes are functions, which have no name to be found by; a dump shows what passes do.
        """
        options = self.options
        own = options.passes is not None or options.dump or options.sequence is not None
        own = own or self.runtime.tensor is not None or is_intercepting()
        return not own and os.environ.get("ZCOMPILE_CACHE") != "0"

    def _depends_on(self, whole: bool, updater: Updater | None) -> str:
        device = self.runtime.communicator.device  # including its index: values and arguments in the graph name it
        return f"{own_source()} {self.options} {device} whole={whole} updates={updater is not None}"

    def _restore(self, content: bytes, updater: Updater | None) -> CompiledStep:
        self.runtime.progress.at("taking it from the cache")
        mode = tracing_context().fake_mode
        kept = CachedStep.read(content, mode)

        def rewritten(journal: Journal) -> Rewritten:
            request = self._request(kept.program, updater)
            if self._undecided(request, kept.program):
                self._decide(kept.traced(mode), request, journal)
            settled, pipeline = PassInputs.of(request, self.schedule), request.pipeline(self.schedule)
            if kept.settled == settled:
                return kept.rewritten(pipeline, mode)
            kept.check_fixed()
            return Rewritten.now(kept.traced(mode), pipeline, settled, journal)

        return self._in_step(rewritten, updater)

    def _lower(self, traced: Program, updater: Updater | None) -> CompiledStep:
        offer(traced, lambda: self._request(traced, updater))
        return self._in_step(lambda journal: self._rewritten(traced, updater, journal), updater)

    def _in_step(self, rewritten: Callable[[Journal], Rewritten], updater: Updater | None) -> CompiledStep:
        """A step that runs; if this rank has none, report that to the others."""
        try:
            if self.runtime.tensor is None:
                return self._lowered(rewritten, updater)
            return self.runtime.tensor.together(lambda: self._lowered(rewritten, updater))
        except (OptionError, PipelineError, ProgramError) as error:  # which may depend on this rank's batch only
            for group in (self.runtime.communicator, *(one.communicator for one in [self.runtime.sequence] if one)):
                if group.size > 1:
                    problem = f"rank {group.waits.rank} has none: {error.subject} {error.problem}"
                    group.waits.refuse(AgreementError("the program", problem, error.fix))
            raise

    def _lowered(self, make: Callable[[Journal], Rewritten], updater: Updater | None) -> CompiledStep:
        journal = Journal()
        # Casts are in the graph already: compiled under autocast, a region would get them twice.
        no_autocast = torch.autocast(self.runtime.communicator.device.type, enabled=False)
        with (
            dumping_failures(self.reports.folder if self.reports.rank == 0 else None, len(self.runtime.steps), journal),
            collector_paused(),
            no_autocast,
            torch.no_grad(),  # part of the keys of Inductor's cache, which a step from the step cache uses, too
        ):
            rewritten = make(journal)
            if updater is None and rewritten.program.nodes(Update):
                fix = "leave it out, or call zcompile.train_step"
                raise PipelineError("insert_updates", "updates parameters, and no optimizer is known", fix)
            step = CompiledStep(rewritten, self.runtime, updater)
        self.runtime.steps.append(step)
        self.runtime.recorder.captured()
        self.reports.dump_if_asked()
        return step

    @property
    def programs(self) -> list[Program]:
        """The rewritten programs in the order of their capture: forward, backward, that of `no_sync` if any, ..."""
        return [program for step in self.runtime.steps for program in step.programs]

    def explain(self) -> str:
        """See `CompiledModule.explain`."""
        runtime, steps = self.runtime, self.runtime.steps
        earlier = sum(step.rewritten.is_from_cache for step in steps)
        found = f"{earlier} of {len(steps)} programs from torch's cache, as an earlier run made them"
        remarks = [*runtime.remarks, found] if earlier else runtime.remarks
        programs, regions = [step.program for step in steps], len(runtime.regions.compiled)
        return explain(runtime.layout, programs, regions, runtime.breaks, remarks)

    @property
    def journals(self) -> list[Journal]:
        """What passes did to each program; for a program from the cache they run again."""
        return [step.rewritten.journal for step in self.runtime.steps]

    def _rewritten(self, traced: Program, updater: Updater | None, journal: Journal) -> Rewritten:
        if self.runtime.tensor is not None and self.options.partition_activations and traced.has_backward:
            traced = self.runtime.tensor.marked(traced)
        check_collectives(traced, None if self.runtime.tensor is None else self.runtime.tensor.parallel)
        request = self._request(traced, updater)
        if self._undecided(request, traced):
            self._decide(traced, request, journal)
        self.runtime.progress.at("rewriting it, and proving what passes did")
        settled = PassInputs.of(request, self.schedule)
        return Rewritten.now(traced, request.pipeline(self.schedule), settled, journal)

    def _undecided(self, request: Request, program: Program) -> bool:
        return not self._chosen and request.chooses(program)

    def _decide(self, traced: Program, request: Request, journal: Journal) -> None:
        """Choose the schedule of this program and all later ones. Collective."""
        self.schedule = decide(traced, request, self._measured, self.runtime.everyone.share, journal)
        self._chosen = True

    def _keeps(self, traced: Program) -> bool:
        """True if the program may keep units full from its forward to its backward: if it reads all parameters.

        If a model runs as several programs, each would keep its own: together the whole model.

        Raises:
            OptionError: it may not, and there is a memory limit, which separate programs cannot keep.
        """
        keeps = len(traced.layout.params) == len(self.runtime.layout.params)
        bounds = {"memory_limit": self.options.limit is not None, "checkpoint": self.options.has_budget}
        bounds["chunk"] = self.options.has_chunk_budget
        for option, given in bounds.items():
            if given and not keeps and traced.has_backward:
                problem = "cannot be kept: the model runs as several programs, each of which knows only itself"
                raise OptionError(option, problem, "fix the graph breaks (see explain()), or leave it out")
        return keeps

    def _request(self, traced: Program, updater: Updater | None) -> Request:
        """The request to compile `traced` with. Raises OptionError: see `_keeps`."""
        free = checkpoint_budget(
            self.options, self.runtime.layout, lambda: free_bytes(self.runtime.communicator.device)
        )
        updates = updater is not None and traced.has_backward
        return Request(self.options, self.schedule, self._keeps(traced), updates, free)

    def _measured(self) -> Hardware:
        """The measured rates of the ranks' machines and links. Collective."""
        tensor = self.runtime.tensor.communicator if self.runtime.tensor else None
        self.hardware = measure(self.runtime.communicator, self.options.dtype or torch.float32, tensor)
        return self.hardware

    @property
    def pipeline(self) -> Pipeline:
        """The passes that programs go through."""
        return Request(self.options, self.schedule).pipeline()
