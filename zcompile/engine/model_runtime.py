"""The runtime of one model: its shards, and what all runs of its programs have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

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
from zcompile.runtime.groups import Communicator
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
    """The ranks that train a model, as one of them sees them.

    Attributes:
        data: Those that have the same parameters, and other data.
        agreement: Of these.
        everyone: Of all that have a part of the model: choices that are made once are theirs.
        parallel: Over what tensor parallelism divides the model; None if it does not.
    """

    data: Communicator
    agreement: Agreement
    everyone: Agreement
    parallel: ModelParallel | None

    @classmethod
    def agreed(cls, data: Communicator, parallel: ModelParallel | None, lines: Sequence[str]) -> ModelRanks:
        """The ranks, once those of `data` have the same model, which `lines` say. Collective."""
        agreement = Agreement(data)
        agreement.reach("the model", lines)
        everyone = agreement if parallel is None else Agreement(Communicator(parallel.ranks, data.device))
        return cls(data, agreement, everyone, parallel)

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return self.data.device

    @property
    def in_step(self) -> Agreement:
        """Of those that number their runs together."""
        return self.agreement

    def with_replicated(self, model: nn.Module, *, first: bool) -> Self:
        """The same, once what is no DTensor of a tensor-parallel model is known to be alike. Collective."""
        if self.parallel is None:
            return self
        return replace(self, parallel=check_replicated(model, self.parallel, self.everyone, first=first))


@dataclass
class Modes:
    """Dispatch modes of the user's: put aside while torch.compile looks at a call, back while its programs run."""

    _aside: Sequence[TorchDispatchMode] = ()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside, torch.compile does not see them."""
        modes = modes_of_user()
        return self._put(modes) if modes else contextlib.nullcontext()

    def back(self) -> contextlib.AbstractContextManager[None]:
        """Inside of `aside`, they see what is computed."""
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
    """Shards of one model, gradients, and the ranks in step. Making one is collective.

    Args:
        layout: The units of the model.
        ranks: Those that train it.
        options: What the model is compiled with.

    Raises:
        OptionError: what is offloaded is to be at no place for a model on its device.
        StateError: on every rank: there is no room for it on one.
    """

    def __init__(self, layout: Layout, ranks: ModelRanks, options: Options) -> None:
        self.ranks, self.options = ranks, options
        self.communicator = communicator = ranks.data
        self.agreement, self.everyone = ranks.agreement, ranks.everyone
        self.memory = shard_memory(options, layout, communicator, self.everyone)
        """Where shards are."""
        self.layout = layout = replace(layout, away=self.memory.is_away)
        self.shards: dict[str, UnitShards] = {}
        self.steps: list[StepPrograms] = []
        """Its programs. A call holds the runtime, so that a loss has them for its backward when the model is gone."""
        self.breaks: list[Break] = []
        """Where graphs break: a model with any runs as several programs."""
        self.remarks: list[str] = []
        """What was chosen for it, and why."""
        self.recorder = communicator.recorder
        self.freshness = Freshness(self.shards, communicator)
        steps = self._steps
        self.tensor = TensorParallelGroup(ranks.parallel, ranks.device) if ranks.parallel is not None else None
        """Those that have the other parts of the model, if it is divided."""
        self.settings = OptimizerSettings(self.names)
        others = self.tensor.lockstep(steps, self.settings) if self.tensor is not None else None
        self.lockstep = Lockstep(ranks.in_step.communicator, ranks.in_step.number, steps, self.settings, others)
        scatter = layout.stage.optimizer_sharded
        self.delivery = Delivery(self.shards, scatter=scatter, recorder=self.recorder, lockstep=self.lockstep)
        self.arenas = Arenas(communicator.device)
        shared = self.tensor if options.partition_activations else None
        self.offloads = make_offloads(options, communicator, self.everyone, shared)
        self.graphs = Graphs.wanted(options, communicator.device)
        origin = Origin(communicator.waits.rank, communicator.dividing.rank, options.backend, communicator.device)
        self.recordings = self.everyone.attempt("the recording", lambda: Recordings(options.record, origin))[0]
        self.progress = CompileProgress("the model", speaks=self.everyone.communicator.rank == 0)
        self.regions = RegionCache(options.backend, self.everyone.communicator.rank, self.graphs, told=self.progress.at)
        if options.backend == "inductor":
            self.regions.ready = prepare_inductor(communicator.device)
        self._agreed: set[str] = set()
        """Digests of programs whose communications ranks have compared."""
        self.scales = False
        """True where a train step scales the loss."""
        self.output_dtype: torch.dtype | None = None
        """What results of a call of the whole model are cast to."""
        self.modes = Modes()
        self.is_full = False
        """True within `unsharded`."""
        self.accumulates = False
        """True within `no_sync`."""
        self.has_optimizer_state = False
        """True where an optimizer had state when it was pointed at the shards."""
        self._seeded_alike: bool | None = None

    def _steps(self) -> tuple[int, int]:
        return self.freshness.steps, self.freshness.idle

    def names(self) -> dict[int, str]:
        """The names of its parameters, by the identity of their shards."""
        units = self.shards.values()
        ids = map(id, [param for unit in units for param in unit.parameters.values()])
        return dict(zip(ids, [name for unit in units for name in unit.parameters], strict=True))

    def keep_states(self, place: Path | Literal["cpu"] | None, updater: Updater | None) -> None:
        """Let the optimizers' state be where `offload_optimizer=` wants it. Collective.

        Raises:
            OptionError: it is no place for a model on its device.
            StateError: on every rank: there is no room for it on one.
        """
        if place is not None and updater is not None:
            check_place("offload_optimizer", place, self.communicator.device)
            units = {name: list(shards.parameters.values()) for name, shards in self.shards.items()}
            updater.states = optimizer_states(place, units, updater, self.everyone)

    def extend(self, units: Sequence[Unit], shards: Mapping[str, UnitShards]) -> None:
        """Take in parameters that were not known before."""
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

    def replayed_random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """What a recomputation within a backward draws them under, from the state in which its call began."""
        if self._seeded_alike and not within_numbers_of_rank(self.communicator.device):
            return numbers_of_rank(self.communicator.rank, self.communicator.device)
        return contextlib.nullcontext()

    def new_call(self) -> ModelCall:
        """A call of the model, or of one graph of it."""
        self.communicator.waits.over()  # what was told the others of an earlier one is told no more
        kind = self.communicator.device.type
        # By `dtype` or by the user's autocast. Whole gradients (stage 0) carry an overflow to every rank by themselves.
        float16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        if float16 and self.layout.away:
            problem = (
                "is 'cpu', and gradients are float16: GradScaler's flags for the host are read before they are there"
            )
            raise OptionError("offload_parameters", problem, "compute in bfloat16, or leave it out")
        spread = (float16 or self.scales) and self.layout.stage.optimizer_sharded and self.layout.world > 1
        call = ModelCall(self.freshness.version, self.delivery, self._returned, may_overflow=spread)
        self.recorder.begin_call(call.seen, trains=torch.is_grad_enabled())
        self.recordings.begin_call(call.seen, trains=torch.is_grad_enabled())
        return call

    def settle(self) -> None:
        """Return when shards may be written to: where they are away, copies of them may be on their way."""
        for memory in {shards.memory for shards in self.shards.values()}:
            memory.settle()

    def _returned(self) -> None:
        self.recorder.end_call(split=bool(self.breaks))

    @contextlib.contextmanager
    def no_sync(self, *, full_gradients: bool = False) -> Iterator[None]:
        """Backwards inside hold gradients back where the stage keeps full gradients; see `CompiledModule.no_sync`."""
        if full_gradients and self.options.offload_parameters is not None:
            problem = "keeps gradients on the device, and shards are away from it"
            raise OptionError("full_gradients", problem, "leave one of the two out")
        before = self.accumulates, self.delivery.synchronises
        self.accumulate(True, full_gradients=full_gradients)
        try:
            yield
        finally:
            self.accumulates, self.delivery.synchronises = before

    def accumulate(self, wanted: bool, *, full_gradients: bool = False) -> None:
        """From now on hold gradients back in backwards, or reduce them with what was held back.

        `full_gradients`: in stages, too, that divide them.
        """
        self.accumulates = wanted
        self.delivery.synchronises = not wanted or (self.layout.stage.gradients_sharded and not full_gradients)

    def names_held(self) -> list[str]:
        """Parameters with gradients that `no_sync` holds back."""
        return [name for shards in self.shards.values() for name in shards.names_held()]

    def is_new(self, digest: str) -> bool:
        """True for the digest of a program on which the ranks have not agreed."""
        return digest not in self._agreed

    def agree(self, program: Program) -> None:
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

            def conflict() -> str:
                texts = self.agreement.share("the texts of programs that differ", program.text(regions=True))
                return conflict_along(texts, *(axis.name for axis in program.layout.averaged))

            self.agreement.reach("the program's communications", program.communications(), fix, conflict)
            self._agreed.add(digest)
