"""Options: keywords of `zcompile.compile` and `zcompile.backend`, by subject, and all of them as one value."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

import torch

from zcompile.errors import OptionError, nearest
from zcompile.ir.layout import STAGES, Hybrid
from zcompile.model.units import Precision, UnitChoice
from zcompile.model.weights import Source
from zcompile.schedule.default_pipeline import UPDATES, Schedule, pipeline
from zcompile.schedule.option_checks import (
    AUTO,
    FLAT,
    Chunk,
    CudaGraphs,
    Sequencing,
    bytes_of,
    check_backend,
    check_chunk,
    check_dtype,
    check_gather_wire,
    check_graphs,
    check_prefetch,
    check_sequence,
    check_shard,
    check_stage,
    check_wire,
    checkpoint_of,
)
from zcompile.schedule.pipeline import Pass, Pipeline, Trait
from zcompile.torch_internals.inductor import loss_decompositions

_UPDATING = frozenset(step.name for step in UPDATES)
_OF_PASSES = (
    *("memory_limit", "chunk", "sequence", "arenas"),
    *("offload_activations", "partition_activations", "cuda_graphs"),
)
"""Options that `pipeline` takes as they are given."""
_OWN = "a rank's own"
_PLACE = "each rank may have another disk"


class PrecisionOptions(TypedDict, total=False):
    """Dtypes other than `dtype`, the compute dtype."""

    reduce_dtype: torch.dtype | None
    outer_dtype: torch.dtype | None
    outer_gather_dtype: torch.dtype | None


class MemoryOptions(TypedDict, total=False):
    """How memory is used, and where values that do not fit are kept."""

    memory_limit: int | str | None
    bucket: int | str | None
    arenas: bool
    offload_activations: str | None
    cuda_graphs: CudaGraphs
    chunk: Chunk
    sequence: Sequencing


class InspectionOptions(TypedDict, total=False):
    """The passes, and where their programs and recordings of runs are written."""

    passes: Pipeline | Mapping[str, Pass | None] | None
    dump: str | os.PathLike[str] | None
    record: str | os.PathLike[str] | None


class BackendOptions(PrecisionOptions, MemoryOptions, InspectionOptions, total=False):
    """The keyword arguments of `zcompile.backend`."""

    shard: str | None


class ModuleOptions(TypedDict, total=False):
    """Options that need the module itself: a backend receives only graphs."""

    units: UnitChoice | None
    whole: Sequence[str] | None
    ignore: Sequence[str] | None
    keep_dtype: Sequence[str] | None
    output_dtype: torch.dtype | None
    partition_activations: bool
    offload_parameters: str | None
    weights: Source | None


class CompileOptions(BackendOptions, ModuleOptions, total=False):
    """The keyword arguments of `zcompile.compile`."""


def names_of(function: Callable[..., Any], kind: type) -> frozenset[str]:
    """Return the options of a function: its keyword-only parameters, and the keys of the TypedDict `kind`."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset({p.name for p in parameters if p.kind is p.KEYWORD_ONLY} | kind.__annotations__.keys())


def check_known(options: Iterable[str], known: Collection[str], function: str) -> None:
    """Raise OptionError for an option that `function` does not have."""
    if unknown := [name for name in options if name not in known]:
        raise OptionError(unknown[0], f"is not an option of {function}", nearest(unknown[0], known))


@dataclass(frozen=True)
class Options:
    """The options that all ways of compiling have in common.

    Raises:
        OptionError: an option has an invalid value, or options contradict each other.
        PipelineError: a pass is unknown, missing or out of place.
    """

    stage: int = 3
    shard: str | None = None
    prefetch: int | Literal["auto"] = 2
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    outer_dtype: torch.dtype | None = None
    outer_gather_dtype: torch.dtype | None = None
    checkpoint: str | int | float | None = None
    passes: Pipeline | Mapping[str, Pass | None] | None = field(default=None, metadata={_OWN: True})
    """Functions cannot be compared between ranks; the programs that they make are."""
    backend: str = "inductor"
    dump: str | os.PathLike[str] | None = field(default=None, metadata={_OWN: True})
    """None for the environment variable ZCOMPILE_DUMP, if set; "" for no dump."""
    record: str | os.PathLike[str] | None = field(default=None, metadata={_OWN: True})
    memory_limit: int | str | None = None
    bucket: int | str | None = None
    arenas: bool = False
    offload_activations: str | None = field(default=None, metadata={_PLACE: True})
    partition_activations: bool = False
    offload_parameters: str | None = field(default=None, metadata={_PLACE: True})
    cuda_graphs: CudaGraphs = False
    chunk: Chunk = None
    sequence: Sequencing = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dump", os.environ.get("ZCOMPILE_DUMP") if self.dump is None else self.dump)
        check_stage(self.stage)
        check_shard(self.shard, self.stage)
        check_prefetch(self.prefetch, auto=True)
        check_backend(self.backend)
        check_dtype("dtype", self.dtype)
        check_dtype("reduce_dtype", self.reduce_dtype)
        check_wire(self.outer_dtype, self.stage)
        divides = self.hybrid is not Hybrid.HSDP or self.shard == AUTO
        check_gather_wire(self.outer_gather_dtype, self.stage, divides=divides)
        checkpoint_of(self.checkpoint)
        check_graphs(self.cuda_graphs)
        check_chunk(self.chunk)
        check_sequence(self.sequence)
        keeping = [option for option in ("cuda_graphs", "arenas") if getattr(self, option)]
        if self.memory_limit is not None and keeping:
            fix = "leave one of the two out: an arena has room for what is alive at most, and has it all the time"
            raise OptionError(keeping[0], "cannot be combined with a memory_limit", fix)
        if self.offload_parameters is not None and self.stage == 0:
            fix = "choose stage 1, 2 or 3, or leave it out"
            raise OptionError("offload_parameters", "moves shards, and stage 0 has none", fix)
        if self.offload_parameters == "cpu" and self.stage == 1:
            problem = "takes gradients to the host, and stage 1 keeps full ones"
            raise OptionError("offload_parameters", problem, "choose stage 2 or 3, or leave it out")
        self.pipeline()

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Options:
        """Return the options among the arguments of a function."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def __str__(self) -> str:
        """The options that all ranks must agree on, except those left at their default."""
        given = {field: getattr(self, field.name) for field in fields(self) if not field.metadata.get(_OWN)}
        return " ".join(
            f"{field.name} {value.partition(':')[0] if field.metadata.get(_PLACE) else value}"
            for field, value in given.items()
            if field.name == "stage" or value != field.default
        )

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype, self.reduce_dtype, self.outer_dtype, self.outer_gather_dtype)

    @property
    def hybrid(self) -> Hybrid:
        """How shards are laid out over two data-parallel axes."""
        return Hybrid(self.shard) if self.shard in list(Hybrid) else Hybrid.HSDP

    @property
    def has_one_axis(self) -> bool:
        """True if all ranks are treated as one dimension."""
        return self.shard == FLAT or not STAGES[self.stage].optimizer_sharded

    @property
    def divides_outside(self) -> bool:
        """True if both axes divide shards."""
        return self.shard is not None and self.shard not in (Hybrid.HSDP, AUTO)

    @property
    def tracing(self) -> dict[str, Any]:
        """What changes a step as it is traced: see `Capture`."""
        decompositions = loss_decompositions(fuses=self.backend == "inductor", chunks=self.wants_sizes)
        return {"decompositions": decompositions, "divides_heads": self.sequence == "ulysses"}

    @property
    def wants_sizes(self) -> bool:
        """True if passes have to know the sizes of batches, and losses are to be sums."""
        return self.chunk is not None or self.sequence is not None

    @property
    def limit(self) -> int | None:
        """The memory limit in bytes."""
        return bytes_of("memory_limit", self.memory_limit)

    @property
    def has_budget(self) -> bool:
        """True if what the forward saves depends on a memory budget."""
        return checkpoint_of(self.checkpoint) not in (None, "unit")

    @property
    def has_chunk_budget(self) -> bool:
        """True if what is computed in chunks depends on a memory budget."""
        return isinstance(self.chunk, str) and self.chunk != "auto"

    @property
    def schedule(self) -> Schedule:
        """The schedule before, or without, a choice by the traced program."""
        return Schedule() if self.prefetch == "auto" else Schedule(self.prefetch)

    @property
    def chooses(self) -> bool:
        """True if the schedule depends on the traced program."""
        return self.prefetch == "auto" or self.limit is not None

    def pipeline(
        self,
        schedule: Schedule | None = None,
        *,
        keeps: bool = True,
        free: int | None = None,
        updates: bool = False,
    ) -> Pipeline:
        """Return the passes: the given pipeline, or the stage's default with the given changes.

        Without `keeps`, no unit stays full from the forward to the backward. `free`: bytes that checkpoint="auto" and
        chunk="auto" may use; None leaves checkpointing out. `updates`: True for programs of a train step.
        """
        if isinstance(self.passes, Pipeline):
            self._check_whole_pipeline(self.passes)
            return self.passes
        _check_changes(self.passes)
        # Eager regions fuse nothing, so recomputing cheap operations only costs time: save what eager PyTorch saves.
        partition: Literal["min_cut", "default"] = "min_cut" if self.backend == "inductor" else "default"
        schedule = schedule or self.schedule
        default = pipeline(
            stage=self.stage,
            prefetch=schedule.prefetch,
            partition=partition,
            kept=schedule.kept,
            small=schedule.small,
            bucket=schedule.bucket if self.bucket is None else self.bucket,
            checkpoint=free if self.checkpoint == "auto" else self.checkpoint,
            whole=keeps,
            updates=updates,
            free=free,
            **{name: getattr(self, name) for name in _OF_PASSES},
        )
        # Changes to passes of a train step do not apply to other programs.
        changes = {n: step for n, step in (self.passes or {}).items() if updates or n not in _UPDATING}
        changed = default.changed(changes)
        return changed if keeps else changed.without_any(Trait.KEEPS_FULL)

    def _check_whole_pipeline(self, passes: Pipeline) -> None:
        """Raise OptionError for options that a complete pipeline would ignore."""
        if passes.stage != STAGES[self.stage]:
            problem = f"is {self.stage}, but passes is a pipeline of stage {passes.stage.number}"
            fix = f"give stage={passes.stage.number}, or changes to the pipeline by name"
            raise OptionError("stage", problem, fix)
        options = dict.fromkeys(("memory_limit", "checkpoint", "bucket", *_OF_PASSES))
        ignored = (name for name in options if getattr(self, name) not in (None, False))
        if option := next(ignored, "prefetch" if self.chooses else None):
            fix = "give it to zcompile.pipeline(...), or changes to the pipeline by name here"
            if option == "prefetch":
                fix = "give a number, or changes to the pipeline by name"
            raise OptionError(option, "has no effect on a pipeline given as a whole", fix)


def _check_changes(passes: object) -> None:
    """Raise OptionError unless `passes` is a mapping of changes to a pipeline, or None."""
    fix = "give a pipeline, or a dict of names to zcompile.Pass(name, function), or to None to leave one out"
    if passes is not None and not isinstance(passes, Mapping):
        raise OptionError("passes", f"is a {type(passes).__name__}", fix)
    for name, step in (passes or {}).items():
        if step is not None and not isinstance(step, Pass):
            raise OptionError("passes", f"has a {type(step).__name__} under {name!r}", fix)
