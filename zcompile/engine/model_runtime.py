"""The runtime of one model: its shards, and what all runs of its programs share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.engine.calls.model_calls import ModelCall
from zcompile.engine.cuda_graphs import Graphs
from zcompile.engine.offloading import make_offloads, optimizer_states, shard_memory
from zcompile.engine.progress import CompileProgress
from zcompile.engine.region_cache import RegionCache
from zcompile.engine.rewritten import StepPrograms
from zcompile.engine.tensor_parallel_group import TensorParallelGroup
from zcompile.errors import OptionError
from zcompile.frontend.dynamo import autocast
from zcompile.ir.layout import Layout, Unit
from zcompile.ir.program import Program
from zcompile.model.tensor_parallel import check_replicated
from zcompile.proof.ranks import conflict_along
from zcompile.recording.recording import Origin, Recordings
from zcompile.report.explain import Break
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.arena import Arenas
from zcompile.runtime.device import numbers_of_rank, within_numbers_of_rank
from zcompile.runtime.gradients.delivery import Delivery
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.groups import SEQUENCE, Communicator
from zcompile.runtime.lockstep import Lockstep
from zcompile.runtime.optimizer_settings import OptimizerSettings
from zcompile.runtime.shards import Freshness, UnitShards
from zcompile.runtime.tensors.placement import ModelParallel
from zcompile.schedule.option_checks import check_place
from zcompile.schedule.options import Options
from zcompile.torch_internals.dispatch import TorchDispatchMode, modes_aside, modes_back, modes_of_user
from zcompile.torch_internals.inductor import prepare_inductor


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that train a model, as seen by one of them.

    Attributes:
        data: Those with the same parameters and different data.
        agreement: That of `data`.
        everyone: That of all ranks with a part of the model, for choices that are made once.
        parallel: How tensor parallelism divides the model; None if it does not.
        sequence: Those that divide the tokens of one batch, of `data`; None if none do.
    """

    data: Communicator
    agreement: Agreement
    everyone: Agreement
    parallel: ModelParallel | None
    sequence: DeviceMesh | None = field(default=None, kw_only=True)

    @classmethod
    def agreed(cls, data: Communicator, parallel: ModelParallel | None, lines: Sequence[str]) -> ModelRanks:
        """The ranks, once those of `data` are known to have the same model, described by `lines`. Collective."""
        agreement = Agreement(data)
        agreement.reach("the model", lines)
        everyone = agreement if parallel is None else Agreement(Communicator(parallel.ranks, data.device))
        return cls(data, agreement, everyone, parallel)

    @property
    def device(self) -> torch.device:
        """The device of tensors."""
        return self.data.device

    @property
    def in_step(self) -> Agreement:
        """That of the ranks that number their runs together."""
        return self.agreement

    def with_replicated(self, model: nn.Module, *, first: bool) -> Self:
        """The same, once values of a tensor-parallel model that are no DTensors are known to be equal. Collective."""
        if self.parallel is None:
            return self
        return replace(self, parallel=check_replicated(model, self.parallel, self.everyone, first=first))


@dataclass
class Modes:
    """The user's dispatch modes: disabled while torch.compile looks at a call, enabled while its programs run."""

    _aside: Sequence[TorchDispatchMode] = ()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside, torch.compile does not see them."""
        modes = modes_of_user()
        return self._put(modes) if modes else contextlib.nullcontext()

    def back(self) -> contextlib.AbstractContextManager[None]:
        """Inside of `aside`, enable them again for what is computed."""
        return modes_back(self._aside) if self._aside else contextlib.nullcontext()

    @contextlib.contextmanager
    def _put(self, modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
        before, self._aside = self._aside, modes
        try:
            with modes_aside(modes):
                yield
        finally:
            self._aside = before


class ModelRuntime:
    """Shards and gradients of one model, and the lockstep of its ranks. Creating one is collective.

    Args:
        layout: The units of the model.
        ranks: Those that train it.
        options: The options that the model is compiled with.

    Raises:
        OptionError: an offload= place does not suit a model on its device.
        StateError: on every rank: one rank has no room for what is offloaded.
    """

    def __init__(self, layout: Layout, ranks: ModelRanks, options: Options) -> None:
        self.ranks, self.options = ranks, options
        self.communicator = communicator = ranks.data
        self.agreement, self.everyone = ranks.agreement, ranks.everyone
        self.memory = shard_memory(options, layout, communicator, self.everyone)
        """Allocates shards."""
        self.layout = layout = replace(layout, away=self.memory.is_away)
        self.shards: dict[str, UnitShards] = {}
        self.steps: list[StepPrograms] = []
        """Its programs. A call holds the runtime, so that a loss can run its backward after the model is gone."""
        self.breaks: list[Break] = []
        """Graph breaks: a model with any runs as several programs."""
        self.remarks: list[str] = []
        """Choices made for it, with reasons."""
        self.recorder = communicator.recorder
        self.freshness = Freshness(self.shards, communicator)
        steps = self._steps
        self.tensor = TensorParallelGroup(ranks.parallel, ranks.device) if ranks.parallel is not None else None
        """The ranks with the other parts of the model, if it is divided."""
        self.settings = OptimizerSettings(self.names)
        others = self.tensor.lockstep(steps, self.settings) if self.tensor is not None else None
        self.lockstep = Lockstep(ranks.in_step.communicator, ranks.in_step.number, steps, self.settings, others)
        self.sequence: Lockstep | None = None
        """That of the ranks that divide the tokens of one batch, whose sizes have to be the same."""
        if ranks.sequence is not None:
            divided = Agreement(Communicator(ranks.sequence, communicator.device))
            self.sequence = Lockstep(divided.communicator, divided.number, steps, self.settings)
        scatter = layout.stage.optimizer_sharded
        self.delivery = Delivery(self.shards, scatter=scatter, recorder=self.recorder, lockstep=self.lockstep)
        self.arenas = Arenas(communicator.device)
        shared = self.tensor if options.partition_activations else None
        self.offloads = make_offloads(options, communicator, self.everyone, shared)
        self.graphs = Graphs.wanted(options, communicator.device)
        origin = Origin(communicator.waits.rank, communicator.dividing.rank, options.backend, communicator.device)
        self.recordings = self.everyone.attempt("the recording", lambda: Recordings(options.record, origin))[0]
        self.progress = CompileProgress("the model", speaks=self.everyone.communicator.rank == 0)
        groups = {} if ranks.sequence is None else {SEQUENCE: ranks.sequence.get_group().group_name}
        rank, note = self.everyone.communicator.rank, self.progress.at
        self.regions = RegionCache(options.backend, rank, self.graphs, groups, note=note)
        if options.backend == "inductor":
            self.regions.ready = prepare_inductor(communicator.device)
        self._agreed: set[str] = set()
        """Digests of programs whose communications the ranks have compared."""
        self.scales = False
        """True if a train step scales the loss."""
        self.output_dtype: torch.dtype | None = None
        """The dtype to which results of a call of the whole model are cast."""
        self.modes = Modes()
        self.is_full = False
        """True within `unsharded`."""
        self.accumulates = False
        """True within `no_sync`."""
        self.has_optimizer_state = False
        """True if an optimizer had state when it was pointed at the shards."""
        self._seeded_alike: bool | None = None

    def _steps(self) -> tuple[int, int]:
        return self.freshness.steps, self.freshness.idle

    def names(self) -> dict[int, str]:
        """Parameter names by the id of their shards."""
        units = self.shards.values()
        ids = map(id, [param for unit in units for param in unit.parameters.values()])
        return dict(zip(ids, [name for unit in units for name in unit.parameters], strict=True))

    def keep_states(self, place: Path | Literal["cpu"] | None, updater: Updater | None) -> None:
        """Put optimizer state where `offload_optimizer=` says. Collective.

        Raises:
            OptionError: that place does not suit a model on its device.
            StateError: on every rank: one rank has no room for it.
        """
        if place is not None and updater is not None:
            check_place("offload_optimizer", place, self.communicator.device)
            units = {name: list(shards.parameters.values()) for name, shards in self.shards.items()}
            updater.states = optimizer_states(place, units, updater, self.everyone)

    def extend(self, units: Sequence[Unit], shards: Mapping[str, UnitShards]) -> None:
        """Add parameters that were not known before."""
        self.layout = self.layout.with_units((*self.layout.units, *units))
        self.shards.update(shards)

    def why_not_converted(self) -> str:
        """Why parameters cannot be converted to another dtype; empty if they can."""
        if self.steps:
            return "programs have been compiled for the dtypes that it has"
        if self.has_optimizer_state or self.freshness.steps:
            return "an optimizer holds state in the dtypes that it has"
        if self.tensor is not None:
            return "tensor parallelism divides it, too"
        if self.options.offload_parameters is not None:
            return "its shards are where offload_parameters= has made room for the dtypes that it has"
        return ""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a model's call: with low-precision parameters, code that mixes dtypes must still work.

        If the user has set autocast with the same dtype, this changes nothing.
        """
        return autocast(self.communicator.device.type, self.options.dtype)

    def random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """The context of random numbers in a call: each rank's own, unless the user has seeded ranks differently.

        The first call finds out: collective.
        """
        if self._seeded_alike is None:
            seeds = self.agreement.share("the seed of random numbers", str(torch.initial_seed()))
            self._seeded_alike = len(set(seeds)) < self.communicator.size
        if not self._seeded_alike or within_numbers_of_rank(self.communicator.device):
            return contextlib.nullcontext()
        return numbers_of_rank(self.communicator.rank, self.communicator.device)

    def replayed_random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """The same for a recomputation within a backward, from the state in which its call began."""
        if self._seeded_alike and not within_numbers_of_rank(self.communicator.device):
            return numbers_of_rank(self.communicator.rank, self.communicator.device)
        return contextlib.nullcontext()

    def new_call(self) -> ModelCall:
        """A call of the model, or of one graph of it."""
        self.communicator.waits.over()  # withdraw the report of an earlier call
        kind = self.communicator.device.type
        # By `dtype` or by the user's autocast. Unsharded gradients (stage 0) take an overflow to every rank anyway.
        float16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        if float16 and self.layout.away:
            problem = (
                "is 'cpu', and gradients are float16: GradScaler would read its flags on the host before they arrive"
            )
            raise OptionError("offload_parameters", problem, "compute in bfloat16, or leave it out")
        spread = (float16 or self.scales) and self.layout.stage.optimizer_sharded and self.layout.world > 1
        call = ModelCall(self.freshness.version, self.delivery, self._returned, may_overflow=spread)
        self.recorder.begin_call(call.seen, trains=torch.is_grad_enabled())
        self.recordings.begin_call(call.seen, trains=torch.is_grad_enabled())
        return call

    def settle(self) -> None:
        """Return when shards may be written to: if they are offloaded, copies of them may be in flight."""
        for memory in {shards.memory for shards in self.shards.values()}:
            memory.settle()

    def _returned(self) -> None:
        self.recorder.end_call(split=bool(self.breaks))

    @contextlib.contextmanager
    def no_sync(self, *, full_gradients: bool = False) -> Iterator[None]:
        """Backwards inside hold gradients back if the stage keeps full gradients; see `CompiledModule.no_sync`."""
        if full_gradients and self.options.offload_parameters is not None:
            problem = "keeps gradients on the device, but shards are offloaded"
            raise OptionError("full_gradients", problem, "leave one of the two out")
        before = self.accumulates, self.delivery.synchronises
        self.accumulate(True, full_gradients=full_gradients)
        try:
            yield
        finally:
            self.accumulates, self.delivery.synchronises = before

    def accumulate(self, wanted: bool, *, full_gradients: bool = False) -> None:
        """From now on hold gradients back in backwards, or reduce them together with held ones.

        `full_gradients`: also in stages that shard gradients.
        """
        self.accumulates = wanted
        self.delivery.synchronises = not wanted or (self.layout.stage.gradients_sharded and not full_gradients)

    def names_held(self) -> list[str]:
        """Parameters with gradients that `no_sync` holds back."""
        return [name for shards in self.shards.values() for name in shards.names_held()]

    def is_new(self, digest: str) -> bool:
        """True for the digest of a program on which the ranks have not agreed yet."""
        return digest not in self._agreed

    def agree(self, program: Program) -> None:
        """Compare the program's communications with the other ranks', unless an agreed program has the same ones."""
        if self.tensor is not None:
            self.tensor.agree(program)
        digest = program.digest()
        if digest not in self._agreed:
            fix = (
                "run the same modules on every rank, even if data choose them (experts, dropped layers): "
                "choose by what all ranks have in common, or run all and weight their results; "
                "otherwise run the same code, options and environment on every rank"
            )

            def conflict() -> str:
                texts = self.agreement.share("the texts of programs that differ", program.text(regions=True))
                return conflict_along(texts, *(axis.name for axis in program.layout.averaged))

            self.agreement.reach("the program's communications", program.communications(), fix, conflict)
            self._agreed.add(digest)
