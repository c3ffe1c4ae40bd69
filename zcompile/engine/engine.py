"""The engine: a model's shards, and everything that runs on them. It turns traced graphs into steps that run.

What traces the graphs, and when placeholder parameters stand in the module tree, is the business of those who call it:
`fragments` for `zcompile.compile`, `torch_backend` for `torch.compile`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zcompile._torch import prepare_inductor
from zcompile.cost.hardware import CPU, GPU, Hardware, load_profile
from zcompile.cost.roofline import bucket_for
from zcompile.cost.timeline import Timeline
from zcompile.engine.activation_offload import make_stashes
from zcompile.engine.calibration import measure
from zcompile.engine.interception import offer
from zcompile.engine.lowering import Session, Step
from zcompile.engine.model_calls import ModelCall
from zcompile.engine.region_cache import RegionCache, generated_code
from zcompile.engine.tensor_parallel_group import TensorParallelGroup
from zcompile.errors import AgreementError, OptionError, PipelineError, ProgramError, TimelineError
from zcompile.frontend.capture import Capture, Names, Runner
from zcompile.frontend.dynamo import autocast
from zcompile.frontend.local_graphs import Locals, on_locals
from zcompile.ir.layout import Layout, Unit
from zcompile.ir.operation import Phase, op_of
from zcompile.ir.ops import Parameter, Update
from zcompile.ir.program import Program
from zcompile.report.dumps import check_dump, write_dump, writing
from zcompile.report.explain import Break, explain
from zcompile.report.program_page import write_page
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.arena import Arenas
from zcompile.runtime.device import free_bytes, is_gpu
from zcompile.runtime.gradients.delivery import Delivery
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.groups import Communicator
from zcompile.runtime.lockstep import Lockstep
from zcompile.runtime.placement import ModelParallel
from zcompile.runtime.random_numbers import numbers_of_rank
from zcompile.runtime.shards import UnitShards
from zcompile.runtime.stale_copies import Freshness
from zcompile.schedule.decision import Request, checkpoint_budget, decide
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal, Pipeline


class Engine:
    """What runs the programs of one sharded model. Making one is collective.

    Raises:
        OptionError: on every rank: the folder of the dump cannot be written.
    """

    def __init__(
        self,
        layout: Layout,
        shards: Mapping[str, UnitShards],
        communicator: Communicator,
        agreement: Agreement,
        options: Options,
        parallel: ModelParallel | None = None,
        everyone: Agreement | None = None,
    ) -> None:
        self.layout, self.shards, self.options = layout, dict(shards), options
        self.hardware = GPU if is_gpu(communicator.device) else CPU
        """What the cost model takes the machine for; measured, where the schedule is chosen."""
        self.title = "a model"
        """What the model is called in a report."""
        self.profiled: list[Timeline] = []
        """The steps within the last `profile()`."""
        self.schedule = replace(options.schedule, bucket=bucket_for(self.hardware))
        self._chosen = False
        self.communicator, self.agreement = communicator, agreement
        self.journals: list[Journal] = []
        self.steps: list[Step] = []
        self.breaks: list[Break] = []
        self.regions = RegionCache(options.backend, communicator.rank)
        if options.backend == "inductor":
            self.regions.ready = prepare_inductor(communicator.device)
        self.freshness = Freshness(self.shards, communicator, lambda: self.lockstep.check())
        self.recorder = communicator.recorder
        self.lockstep = Lockstep(communicator, agreement.number, lambda: (self.freshness.steps, self.freshness.idle))
        scatter = layout.stage.optimizer_sharded
        self.delivery = Delivery(self.shards, scatter=scatter, recorder=self.recorder, lockstep=self.lockstep)
        self.arenas = Arenas(communicator.device)
        self.everyone = everyone or agreement
        """Of all ranks that have a part of the model: choices that are made once are theirs."""
        self.tensor = TensorParallelGroup(parallel, communicator.device) if parallel is not None else None
        if self.tensor is not None:
            self.lockstep.tensor = self.tensor.lockstep(self.lockstep.steps)
        self._session = Session(
            self.shards,
            self.delivery,
            self._agree,
            lambda digest: digest not in self._agreed,
            self.lockstep,
            self.freshness.refresh,
            self.recorder,
            self.arenas,
            make_stashes(options, communicator, agreement, self.tensor if options.partition_activations else None),
        )
        self.accumulates = False
        """True within `no_sync`."""
        self._seeded_alike: bool | None = None
        self._dump = Path(options.dump) if options.dump else None
        # Every rank asks, for the folder may be known to the first alone, from its environment.
        agreement.attempt("the folder of the dump", lambda: None if communicator.rank else check_dump(self._dump))
        self._agreed: set[str] = set()

    def extend(self, units: Sequence[Unit], shards: Mapping[str, UnitShards]) -> None:
        """Take in parameters that were not known before."""
        self.layout = self.layout.with_units((*self.layout.units, *units))
        self.shards.update(shards)

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
        """The callable for one graph of Dynamo's; its programs are agreed with the other ranks when they first run.

        `whole`: the graph is the whole model's; a part of it gathers only those parameters that it reads. With
        `updater`, programs update parameters with it and return no gradients. `locals_`: what programs are given for
        parameters that are DTensors.
        """
        weak = weakref.ref(self)

        def lower(traced: Program) -> Runner:
            # Dynamo keeps what it compiled until `torch.compiler.reset()`; the model must not live as long by it.
            engine = weak()
            assert engine is not None, "an engine is alive while it compiles"
            runner: Runner = weakref.proxy(engine._lower(traced if whole else _restricted(traced), updater))
            return runner

        layout = self.layout.with_trainable(trainable)
        return on_locals(module, inputs, names, locals_ or {}, lambda called: Capture(called, layout, lower))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What a call of the model runs under: with low-precision parameters, code that mixes dtypes must still work.

        Where the user has set autocast of the same dtype himself, this changes nothing.
        """
        return autocast(self.communicator.device.type, self.options.dtype)

    def random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """What a call of the model draws random numbers under: each rank its own, unless the user has seen to it.

        The first call tells: collective.
        """
        if self._seeded_alike is None:
            seeds = self.agreement.share("the seed of random numbers", str(torch.initial_seed()))
            self._seeded_alike = len(set(seeds)) < self.communicator.size
        if not self._seeded_alike:
            return contextlib.nullcontext()
        return numbers_of_rank(self.communicator.rank, self.communicator.device)

    def new_call(self) -> ModelCall:
        """A call of the model, or of one graph of it."""
        self.communicator.waits.over()  # what was told the others of an earlier one is told no more
        kind = self.communicator.device.type
        # By `dtype` or by the user's autocast. Whole gradients (stage 0) carry an overflow to every rank by themselves.
        float16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        if float16 and self.layout.away:
            found = (
                "is 'cpu', and gradients are float16: GradScaler's flags for the host are read before they are there"
            )
            raise OptionError("offload_parameters", found, "compute in bfloat16, or leave it out")
        spread = float16 and self.layout.stage.optimizer_sharded and self.layout.world > 1
        call = ModelCall(self.version, self.delivery, self._returned, may_overflow=spread)
        self.recorder.begin_call(call.seen, trains=torch.is_grad_enabled())
        return call

    def settle(self) -> None:
        """Return when shards may be written to: where they are away, copies of them may be on their way."""
        for memory in {shards.memory for shards in self.shards.values()}:
            memory.settle()

    def _returned(self) -> None:
        self.recorder.end_call(split=bool(self.breaks))

    def _lower(self, traced: Program, updater: Updater | None) -> Runner:
        offer(traced, lambda: self._request(traced, updater))
        try:
            if self.tensor is None:
                return self._lowered(traced, updater)
            return self.tensor.together(lambda: self._lowered(traced, updater))
        except (OptionError, PipelineError, ProgramError) as error:  # as its batch alone may have it
            if self.communicator.size > 1:
                found = f"rank {self.communicator.waits.rank} has none: {error.subject} {error.found}"
                self.communicator.waits.refuse(AgreementError("the program", found, error.fix))
            raise

    def _lowered(self, traced: Program, updater: Updater | None) -> Runner:
        journal = Journal()
        # Casts are in the graph already: compiled under autocast, a region would get them twice.
        no_autocast = torch.autocast(self.communicator.device.type, enabled=False)
        with _collector_paused(), no_autocast:
            if self.tensor is not None and self.options.partition_activations and traced.has_backward:
                traced = self.tensor.marked(traced)
            request = self._request(traced, updater)
            if not self._chosen and request.chooses(traced):
                self.schedule, self._chosen = decide(traced, request, self._measured, self.everyone.share), True
            pipeline = request.pipeline(self.schedule)
            program = pipeline.run(traced, journal)
            if updater is None and program.nodes(Update):
                fix = "leave it out, or call zcompile.train_step"
                raise PipelineError("insert_updates", "updates parameters, and no optimizer is known", fix)
            step = Step(traced, program, self.regions, replace(self._session, updater=updater))
        self.steps.append(step)
        self.recorder.captured()
        self.journals.append(journal)
        if self._dump:
            try:
                self.dump(self._dump)
            except OptionError as error:  # of one rank alone, which is no reason for the others to wait for it
                warnings.warn(f"zcompile: the program is not dumped: {error}", stacklevel=2)
        return step

    def _keeps(self, traced: Program) -> bool:
        """True if the program may keep units full from its forward to its backward: if it reads all parameters.

        Of a model that runs as several programs, each would keep its own: together the whole model.

        Raises:
            OptionError: it does not, and there is a memory limit, which programs of their own cannot keep.
        """
        keeps = len(traced.layout.params) == len(self.layout.params)
        bounds = {"memory_limit": self.options.limit is not None, "checkpoint": self.options.has_budget}
        for option, given in bounds.items():
            if given and not keeps and traced.has_backward:
                found = "cannot be kept: the model runs as several programs, each of which knows of itself alone"
                raise OptionError(option, found, "fix the graph breaks (see explain()), or leave it out")
        return keeps

    def _request(self, traced: Program, updater: Updater | None) -> Request:
        """What `traced` is to be compiled with.

        Raises:
            OptionError: see `_keeps`.
        """
        free = checkpoint_budget(self.options, self.layout, lambda: free_bytes(self.communicator.device))
        updates = updater is not None and traced.has_backward
        return Request(self.options, self.schedule, self._keeps(traced), updates, free)

    def _measured(self) -> Hardware:
        """What the ranks' machines and links reach. Collective."""
        tensor = self.tensor.communicator if self.tensor else None
        self.hardware = measure(self.communicator, self.options.dtype or torch.float32, tensor)
        return self.hardware

    @property
    def pipeline(self) -> Pipeline:
        """The passes that programs go through."""
        return Request(self.options, self.schedule).pipeline()

    def _agree(self, program: Program) -> None:
        """Compare the program's communications with the other ranks', unless an agreed program has the same ones."""
        if self.tensor is not None:
            self.tensor.agree(program)
        digest = program.digest()
        if digest not in self._agreed:
            fix = (
                "let every rank run the same modules, also where data choose them (experts, layers that are dropped): "
                "choose by what all ranks have in common, or run all and weight what they give; "
                "otherwise run the same code, options and environment on every rank"
            )
            self.agreement.reach("the program's communications", program.communications(), fix)
            self._agreed.add(digest)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside hold gradients back where the stage keeps full gradients; see `CompiledModule.no_sync`."""
        before = self.delivery.synchronises, self.accumulates
        self.delivery.synchronises, self.accumulates = self.layout.stage.gradients_sharded, True
        try:
            yield
        finally:
            self.delivery.synchronises, self.accumulates = before

    def names_held(self) -> list[str]:
        """Parameters with gradients that `no_sync` holds back."""
        return [name for shards in self.shards.values() for name in shards.names_held()]

    def version(self) -> int:
        """A number that grows with every change of a parameter that an optimizer or autograd makes known."""
        return self.freshness.steps + sum(shards.version() for shards in self.shards.values())

    @property
    def programs(self) -> list[Program]:
        """The rewritten programs in the order of their capture: forward, backward, that of `no_sync` if any, ..."""
        found = []
        for step in self.steps:
            phases = Phase if step.program.has_backward else (Phase.FORWARD,)
            found += [step.program.phase(phase) for phase in phases]
            if step.accumulating is not None:
                found.append(step.accumulating.phase(Phase.BACKWARD))
        return found

    @property
    def timelines(self) -> list[Timeline]:
        """The last few steps that have ended, oldest first."""
        rank, world = self.communicator.rank, self.communicator.size
        return [Timeline.of(step, rank, world) for step in self.recorder.ended(self.version())]

    @property
    def timeline(self) -> Timeline:
        """The last step that has ended.

        Raises:
            TimelineError: none has ended so far.
        """
        steps = self.recorder.ended(self.version())
        if not steps:
            fix = "read it after optimizer.step(), or after a call without gradients"
            raise TimelineError("timeline", "no step has ended so far", fix)
        return Timeline.of(steps[-1], self.communicator.rank, self.communicator.size)

    def record_timeline(self, *, device: bool) -> None:
        """From the next step on, record the device's stream too, or no longer.

        Raises:
            OptionError: the model is not on a CUDA device.
        """
        if device and not is_gpu(self.communicator.device):
            found = f"the model is on {self.communicator.device}, where the host's clock tells all"
            raise OptionError("device", found, "leave device=True to models on CUDA")
        self.recorder.device = self.communicator.device if device else None

    def explain(self) -> str:
        """A page of text: units, bytes, volume against 2Ψ or 3Ψ, predicted peak memory, overlaps, graph breaks."""
        return explain(self.layout, [step.program for step in self.steps], len(self.regions.compiled), self.breaks)

    def dump(
        self, folder: str | os.PathLike[str], hardware: str | Hardware | None = None, *, code: bool = False
    ) -> Path:
        """See `CompiledModule.dump`."""
        if self.communicator.rank == 0:
            chosen, home = self._profile_of(hardware), Path(folder)
            written = generated_code if code else None
            with writing("dump", folder):
                write_dump(home, self.journals, self.explain(), chosen, measured=self.profiled, code=written)
                write_page(home / "report.html", self.title, self.journals, chosen, self.profiled)
        return Path(folder)

    def report(self, path: str | os.PathLike[str], hardware: str | Hardware | None = None) -> Path:
        """See `CompiledModule.report`."""
        if self.communicator.rank == 0:
            chosen = self._profile_of(hardware)
            with writing("report", path):
                write_page(Path(path), self.title, self.journals, chosen, self.profiled)
        return Path(path)

    def _profile_of(self, hardware: str | Hardware | None) -> Hardware:
        return load_profile(hardware) if isinstance(hardware, str) else hardware or self.hardware

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """See `CompiledModule.profile`."""
        before, started = self.recorder.device, time.perf_counter()
        self.recorder.device = self.communicator.device if is_gpu(self.communicator.device) else before
        try:
            yield
        finally:
            self.recorder.device = before
        self.profiled = [timeline for timeline in self.timelines if timeline.began >= started]
        if not self.profiled:
            fix = "take a whole step within it: a call, the backward and optimizer.step()"
            raise TimelineError("profile", "no step has begun and ended within it", fix)


def _restricted(traced: Program) -> Program:
    names = {op_of(node, Parameter).name for node in traced.nodes(Parameter)}
    return replace(traced, layout=traced.layout.restricted(names), unused=traced.unused & names)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection: a deep model's graphs are millions of objects, all in use, scanned in vain at each one.

    Measured at 48 blocks: the passes take 2.2 s in place of 4.0 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
