"""The default pipelines of passes, for each stage and for pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from zcompile import facts
from zcompile.cost.hardware import CPU, Hardware
from zcompile.cost.roofline import bucket_for
from zcompile.errors import OptionError
from zcompile.ir.layout import SMALL_BYTES, STAGES
from zcompile.ir.program import Program
from zcompile.passes.accumulate_gradients import accumulate_gradients
from zcompile.passes.assign_units import assign_units
from zcompile.passes.capture_graphs import capture_graphs
from zcompile.passes.chunk_rows import chunk_rows
from zcompile.passes.defer_weights import defer_weights
from zcompile.passes.divide_sequence import divide_sequence
from zcompile.passes.gather_ahead import gather_ahead
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.insert_updates import insert_updates
from zcompile.passes.keep_full import keep_full
from zcompile.passes.keep_within import keep_within
from zcompile.passes.merge_regions import merge_regions
from zcompile.passes.offload_activations import offload_activations as offload_activations_pass
from zcompile.passes.outline_regions import outline_regions
from zcompile.passes.pack_small import pack_small
from zcompile.passes.partition_activations import partition_activations as partition_activations_pass
from zcompile.passes.pipelining.divide_backward import divide_backward
from zcompile.passes.pipelining.keep_between_actions import keep_between_actions
from zcompile.passes.pipelining.offload_microbatches import offload_microbatches
from zcompile.passes.pipelining.receive_ahead import receive_ahead
from zcompile.passes.pipelining.reduce_microbatches import reduce_microbatches
from zcompile.passes.plan_memory import plan_memory
from zcompile.passes.recompute_activations import recompute_activations
from zcompile.passes.schedule_prefetch import schedule_prefetch
from zcompile.passes.sink_waits import sink_waits
from zcompile.passes.split_large import split_large
from zcompile.passes.split_phases import split_phases
from zcompile.schedule.option_checks import (
    Chunk,
    CudaGraphs,
    Sequencing,
    bytes_of,
    check_chunk,
    check_prefetch,
    check_sequence,
    check_stage,
    checkpoint_of,
    offload_of,
)
from zcompile.schedule.pipeline import Pass, Pipeline, Trait

Partition = Literal["min_cut", "default"]
"""How to decide what the forward saves: see `pipeline`."""


@dataclass(frozen=True)
class Schedule:
    """How far ahead gathers start, which parameters are packed, and which units are kept full."""

    prefetch: int = 2
    """How many units are gathered ahead."""
    small: int = SMALL_BYTES
    """Bytes up to which a parameter is packed with its neighbors."""
    bucket: int = bucket_for(CPU)
    """Most bytes of a packed message, and of a piece that is copied to be sent."""
    kept: tuple[str, ...] = ()
    """Units kept full from the forward to the backward because the memory limit allows it."""


ACCUMULATE = Pass("accumulate_gradients", accumulate_gradients, (facts.REDUCED_ONCE,))
"""Not part of a pipeline: applied to a finished program of stage 0 or 1, for backwards under `no_sync`."""
UPDATES = (
    Pass("insert_updates", insert_updates, (facts.WAITS_SUNK,), (facts.UPDATED_ONCE,), Trait.UPDATES),
    Pass("gather_ahead", gather_ahead, (facts.UPDATED_ONCE,), (facts.GATHERED_AHEAD,), Trait.UPDATES),
)
"""Passes added for a train step; without prefetch, `gather_ahead` is left out."""
GATHERED = (facts.GATHERED_BEFORE_USE, facts.RELEASED_ONCE)
_FULL = Trait.SCHEDULES | Trait.KEEPS_FULL
ASSIGN = Pass("assign_units", assign_units, (facts.PHASES_SPLIT,), (facts.UNITS_ASSIGNED,), Trait.BEFORE_LAYOUT)
DEFER = Pass("defer_weights", defer_weights, (facts.UNITS_ASSIGNED,))
GATHER = Pass("insert_gathers", insert_gathers, (facts.REGIONS_OUTLINED,), GATHERED)
MERGE = Pass("merge_regions", merge_regions, (facts.WAITS_SUNK,))
CAPTURE = Pass("capture_graphs", capture_graphs, (facts.PLACES_DISJOINT,), (facts.RESULTS_OWNED,))
REDUCE = Pass("insert_reductions", insert_reductions, (facts.REGIONS_OUTLINED,), (facts.REDUCED_ONCE,))

REDUCE_MICROBATCHES = Pass("reduce_microbatches", reduce_microbatches, ensures=(facts.REDUCED_ONCE,))


def pipeline(
    *,
    stage: int = 3,
    prefetch: int = 2,
    partition: Partition = "min_cut",
    memory_limit: int | str | None = None,
    kept: Sequence[str] | None = None,
    small: int = SMALL_BYTES,
    bucket: int | str | None = None,
    checkpoint: str | int | float | None = None,
    whole: bool = True,
    updates: bool = False,
    arenas: bool = False,
    offload_activations: str | None = None,
    partition_activations: bool = False,
    cuda_graphs: CudaGraphs = False,
    chunk: Chunk = None,
    sequence: Sequencing = None,
    free: int | None = None,
) -> Pipeline:
    """Return the passes that make a ZeRO program, in the order derived from their facts; prints as a table.

    Args:
        stage: What is sharded: 0 (nothing), 1 (optimizer state), 2 (also gradients) or 3 (also parameters).
        prefetch: How many units are gathered ahead of the unit that computes; 0 for none.
        partition: What the forward saves: "default" for what eager PyTorch saves, "min_cut" for less, with Inductor.
        memory_limit: Bytes, or a string such as "2 GiB", that a step may hold in addition to shards and optimizer
            state, as predicted by `zcompile.cost.memory`. Only the excess is offloaded; stage 3 keeps units full
            as far as they fit.
        kept: The units to keep full, if already chosen; the limit is then not checked again.
        small: Parameters of at most this many bytes are packed with their neighbors.
        bucket: Most bytes of a packed message, and of a piece copied to be sent; the default suits gloo on 1 Gbit/s.
        checkpoint: What the backward recomputes: all of a unit except its input ("unit"), or the cheapest choice that
            holds at most this many bytes ("512 MiB", an int) or this share of the peak (a float).
        whole: False for a program of a part of a model, where a checkpoint setting may have no effect.
        updates: Run the optimizer on gradients as they are reduced, for `zcompile.train_step`.
        arenas: Keep gathered parameters, copied gradients and saved activations in preallocated memory.
        offload_activations: Where to offload saved activations: "cpu" or "disk:FOLDER".
        partition_activations: Shard saved activations that are the same on all tensor-parallel ranks.
        cuda_graphs: Capture regions as CUDA graphs, with gathered parameters and copied gradients at fixed addresses;
            or "step", for a step that is captured as a whole, and in which nothing is gathered for the next one.
        chunk: The most rows, such as tokens, for which wide values, such as logits, are computed at once; a size such
            as "8 GiB", within which the step is kept by it; or "auto": losses are, and more if memory is short.
        sequence: How ranks of the sequence axis compute attention: "ulysses", "ring" or "auto"; see `divide_sequence`.
        free: Bytes that the step may hold with chunk="auto"; None for any number.

    Raises:
        OptionError: a stage outside 0 to 3, a negative prefetch, an invalid size, or an unknown checkpoint setting.
    """
    check_stage(stage)
    check_prefetch(prefetch)
    limit = bytes_of("memory_limit", memory_limit)
    split, outline = _regions(partition)
    pack, pieces = _messages(small, bytes_of("bucket", bucket) or bucket_for(CPU))
    keep, ahead, sink = _schedule(prefetch, bounded=limit is None, consumed=updates)
    passes = [DEFER, outline, pack, GATHER, REDUCE]
    passes += [keep] if STAGES[stage].parameters_sharded else []
    passes += [pieces, ahead, sink] if STAGES[stage].optimizer_sharded else [sink]
    away = offload_of("offload_activations", offload_activations) is not None
    passes += _offloads(max(prefetch, 1), shards=partition_activations, away=away, whole=whole, limit=limit)
    budget = checkpoint_of(checkpoint)
    last = [*(UPDATES[: 2 if prefetch and cuda_graphs != "step" else 1] if updates else ())]
    last += _arenas(activations=budget is not None, arenas=arenas, graphs=cuda_graphs is True)
    recompute = _recomputes(budget, [*passes, *last], fuses=partition == "min_cut", whole=whole)
    goals = (facts.in_training(facts.memory_bounded(budget)),) if isinstance(budget, int) and not limit else ()
    rest = (split, ASSIGN, *recompute, *passes, *_within(limit, kept), *last)
    check_sequence(sequence)
    first = of_sequences(sequence)
    chosen = (*first, *_chunks(chunk, free, rest, whole=whole), *rest)
    return Pipeline(STAGES[stage], chosen, (facts.VOLUME_RIGHT, *goals))


def of_stages(
    *,
    partition: Partition,
    sent: int | None = None,
    small: int = SMALL_BYTES,
    bucket: int,
    checkpoint: Literal["unit"] | int | None = None,
    at_once: bool = True,
    others: int = 0,
    step: Callable[[Program], Program] | None = None,
    chunk: Chunk = None,
) -> tuple[Pass, ...]:
    """Return the passes for the program of a pipeline stage, for one micro-batch.

    Args:
        partition: See `pipeline`.
        sent: If the schedule runs gradients of weights separately, how many gradients of inputs other stages wait for.
        small: See `pipeline`.
        bucket: See `pipeline`.
        checkpoint: What is recomputed: all of a unit except its input ("unit"), or what is needed for the step to hold
            at most this many bytes.
        at_once: False if other micro-batches run between the forward of a stage and its backward.
        others: The most micro-batches that hold their saved values at the same time as this one.
        step: For a limit in bytes, turns the finished program into a step.
        chunk: See `pipeline`; no size.
    """
    split, outline = _regions(partition)
    following = [outline, _messages(small, bucket)[0]]
    if sent is not None:
        following.insert(0, Pass("divide_backward", partial(divide_backward, sent=sent), (facts.UNITS_ASSIGNED,)))
    chunks = _chunks(chunk, None, (), whole=False)
    if checkpoint is None:
        return (*chunks, split, ASSIGN, *following)

    def finish(program: Program) -> Program:
        finished = run_passes(following, program)
        return finished if step is None else step(finished)

    common: dict[str, Any] = {"fuses": partition == "min_cut", "whole": False, "at_once": at_once, "others": others}
    again = partial(recompute_activations, checkpoint=checkpoint, finish=finish, **common)
    return (*chunks, split, ASSIGN, Pass("recompute_activations", again, (facts.UNITS_ASSIGNED,)), *following)


def of_steps(
    stage: int,
    *,
    prefetch: int,
    small: int = SMALL_BYTES,
    bucket: int,
    updates: bool = True,
    memory_limit: int | None = None,
    away: bool = False,
) -> tuple[Pass, ...]:
    """Return the passes for a step of several micro-batches, after `unroll_microbatches`.

    Args:
        stage: See `pipeline`.
        prefetch: See `pipeline`.
        small: See `pipeline`.
        bucket: See `pipeline`.
        updates: Run the optimizer on gradients as they are reduced.
        memory_limit: Bytes that the step may hold in addition to shards and optimizer state; units stay full from one
            action to a later one as far as it allows.
        away: Offload values saved from one action for another; with a limit, only as many as needed.
    """
    _, pieces = _messages(small, bucket)
    _, ahead, sink = _schedule(prefetch, bounded=False, consumed=updates)
    passes = [GATHER, REDUCE_MICROBATCHES]
    passes += [pieces, ahead, sink] if STAGES[stage].optimizer_sharded else [sink]
    receive = Pass("receive_ahead", partial(receive_ahead, depth=max(prefetch, 1)), traits=Trait.SCHEDULES)
    last = [*(UPDATES[:1] if updates else ()), *([receive] if prefetch else [])]
    if away:
        move = partial(offload_microbatches, ahead=max(prefetch, 1), memory_limit=memory_limit)
        last.append(Pass("offload_microbatches", move, (facts.WAITS_SUNK,), traits=Trait.SCHEDULES))
    if memory_limit is not None:
        between, fits = partial(keep_between_actions, memory_limit=memory_limit), facts.memory_bounded(memory_limit)
        last.append(Pass("keep_between_actions", between, (facts.WAITS_SUNK,), (fits,), _FULL))
    return (*passes, *last)


def run_passes(passes: Sequence[Pass], program: Program) -> Program:
    """Run passes on a program, without checking facts or values."""
    for step in passes:
        program = step(program)
    return program


def _regions(partition: Partition) -> tuple[Pass, Pass]:
    """Return the passes that split the traced step into phases, and outline its compute."""
    split, outline = partial(split_phases, partition=partition), partial(outline_regions, fuses=partition == "min_cut")
    return (
        Pass("split_phases", split, ensures=(facts.PHASES_SPLIT,), traits=Trait.BEFORE_LAYOUT),
        Pass("outline_regions", outline, (facts.UNITS_ASSIGNED,), (facts.REGIONS_OUTLINED,)),
    )


def _chunks(chunk: Chunk, free: int | None, following: Sequence[Pass], *, whole: bool) -> list[Pass]:
    """Return the pass that computes wide values in chunks of rows, if any are; it measures with those `following`."""
    check_chunk(chunk)
    if chunk is None:
        return []
    given: dict[str, Any] = {"rows": chunk} if isinstance(chunk, int) else {"limit": free}
    if isinstance(chunk, str) and chunk != "auto":
        given = {"limit": bytes_of("chunk", chunk), "least": True}
    run = partial(chunk_rows, **given, finish=partial(run_passes, following), whole=whole)
    return [Pass("chunk_rows", run, traits=Trait.BEFORE_LAYOUT)]


def _schedule(prefetch: int, *, bounded: bool, consumed: bool) -> tuple[Pass, Pass, Pass]:
    """Return the passes that move communications: gathers earlier, and waits for reductions later."""
    ensures = (facts.units_bounded(prefetch),) if bounded else ()
    full, ahead = partial(keep_full, prefetch=prefetch), partial(schedule_prefetch, prefetch=prefetch)
    sink = partial(sink_waits, depth=max(prefetch, 1), consumed=consumed)
    return (
        Pass("keep_full", full, GATHERED, traits=_FULL),
        Pass("schedule_prefetch", ahead, GATHERED, ensures, Trait.SCHEDULES),
        Pass("sink_waits", sink, (facts.REDUCED_ONCE,), (facts.WAITS_SUNK,), Trait.SCHEDULES),
    )


def _messages(small: int, bucket: int) -> tuple[Pass, Pass]:
    """Return the passes that pack small parameters, and reduce large gradients in pieces."""
    packed, split_up = partial(pack_small, small=small, bucket=bucket), partial(split_large, bucket=bucket)
    return (
        Pass("pack_small", packed, (facts.REGIONS_OUTLINED,), (facts.MESSAGES_PACKED,)),
        Pass("split_large", split_up, (facts.REDUCED_ONCE,), (facts.buffers_bounded(bucket),)),
    )


def _arenas(*, activations: bool, arenas: bool, graphs: bool) -> list[Pass]:
    """Return the passes that place buffers, after all others; with graphs, activations stay in graph memory."""
    plan = partial(plan_memory, activations=activations and not graphs)
    places = Pass("plan_memory", plan, (facts.WAITS_SUNK,), (facts.PLACES_DISJOINT,))
    return [MERGE, places, CAPTURE] if graphs else [places] if arenas else []


def _offloads(ahead: int, *, shards: bool, away: bool, whole: bool, limit: int | None) -> list[Pass]:
    """Return the passes that shard saved activations and offload the others, fetched as early as parameters."""
    part = partial(partition_activations_pass, ahead=ahead, moved=away, whole=whole)
    parts = Pass("partition_activations", part, (facts.WAITS_SUNK,))
    move = partial(offload_activations_pass, ahead=ahead, memory_limit=limit)
    moves = Pass("offload_activations", move, (facts.WAITS_SUNK,))
    return [*([parts] if shards else []), *([moves] if away else [])]


def _within(limit: int | None, kept: Sequence[str] | None) -> list[Pass]:
    """Return the pass that keeps more units full, or exactly `kept`, within the memory limit, if there is one."""
    if limit is None:
        return []
    fits = (facts.memory_bounded(limit),) if kept is None else ()
    within = partial(keep_within, memory_limit=limit, units=kept)
    return [Pass("keep_within", within, (facts.WAITS_SUNK,), fits, _FULL)]


def _recomputes(
    checkpoint: Literal["unit", "auto"] | int | float | None, following: Sequence[Pass], *, fuses: bool, whole: bool
) -> list[Pass]:
    """Return the pass that recomputes activations, if any; it measures with the passes that are `following`.

    `keep_within` is not among them: units kept full within a memory limit come on top of the budget.
    """
    if checkpoint is None:
        return []
    if checkpoint == "auto":
        raise OptionError("checkpoint", "'auto' needs a device", "give it to zcompile.compile, or a size here")

    finish = partial(run_passes, following)
    run = partial(recompute_activations, checkpoint=checkpoint, finish=finish, fuses=fuses, whole=whole)
    return [Pass("recompute_activations", run, (facts.UNITS_ASSIGNED,))]


def of_sequences(sequence: Sequencing, hardware: Hardware | None = None) -> list[Pass]:
    """Return the passes that come before all others, also before a step is cut into stages of a pipeline."""
    if sequence is None:
        return []
    return [Pass("divide_sequence", partial(divide_sequence, how=sequence, hardware=hardware))]
