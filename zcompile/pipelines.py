"""The pipeline of each stage: the passes, in one screen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from zcompile import facts
from zcompile.layout import SMALL_BYTES, STAGES
from zcompile.options import bytes_of, check_prefetch, check_stage
from zcompile.passes.accumulate_gradients import accumulate_gradients
from zcompile.passes.assign_units import assign_units
from zcompile.passes.defer_weights import defer_weights
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.keep_full import keep_full
from zcompile.passes.keep_within import keep_within
from zcompile.passes.outline_regions import outline_regions
from zcompile.passes.pack_small import pack_small
from zcompile.passes.schedule_prefetch import schedule_prefetch
from zcompile.passes.sink_waits import sink_waits
from zcompile.passes.split_phases import split_phases
from zcompile.pipeline import Pass, Pipeline

ACCUMULATE = Pass("accumulate_gradients", accumulate_gradients, (facts.REDUCED_ONCE,), (facts.ACCUMULATED_ONCE,))
"""Not part of a pipeline: applied to a finished program of stage 0 or 1, for backwards under `no_sync`."""
GATHERED = (facts.GATHERED_BEFORE_USE, facts.RELEASED_ONCE)


def pipeline(
    *,
    stage: int = 3,
    prefetch: int = 2,
    partition: Literal["min_cut", "default"] = "min_cut",
    memory_limit: int | str | None = None,
    kept: Sequence[str] | None = None,
    small: int = SMALL_BYTES,
) -> Pipeline:
    """The passes that make a ZeRO program of `stage`, in the order derived from their facts; printed as a table.

    Args:
        stage: 0 (nothing sharded), 1 (optimizer state), 2 (and gradients) or 3 (and parameters).
        prefetch: How many units are gathered ahead of the one that computes; 0 means none.
        partition: What the forward saves: `min_cut` recomputes cheap operations in the backward, as Inductor likes it;
            `default` saves what eager PyTorch saves.
        memory_limit: Bytes, or a text such as "2 GiB": what a step may hold beside shards and optimizer state, as
            `zcompile.memory` predicts it. Under stage 3 as many units as fit are kept from the forward to the backward.
        kept: Those units, where they have been chosen already; the limit is then not checked again.
        small: Parameters of at most so many bytes travel packed with their neighbours.

    Raises:
        OptionError: a stage outside 0 to 3, a negative prefetch, a limit that is no size.
    """
    check_stage(stage)
    check_prefetch(prefetch)
    limit = bytes_of("memory_limit", memory_limit)
    bounded = facts.units_bounded(prefetch)
    split = Pass("split_phases", partial(split_phases, partition=partition), ensures=(facts.PHASES_SPLIT,))
    assign = Pass("assign_units", assign_units, (facts.PHASES_SPLIT,), (facts.UNITS_ASSIGNED,))
    defer = Pass("defer_weights", defer_weights, (facts.UNITS_ASSIGNED,))
    outline = Pass("outline_regions", outline_regions, (facts.UNITS_ASSIGNED,), (facts.REGIONS_OUTLINED,))
    pack = Pass("pack_small", partial(pack_small, small=small), (facts.REGIONS_OUTLINED,), (facts.MESSAGES_PACKED,))
    gather = Pass("insert_gathers", insert_gathers, (facts.REGIONS_OUTLINED,), GATHERED)
    reduce = Pass("insert_reductions", insert_reductions, (facts.REGIONS_OUTLINED,), (facts.REDUCED_ONCE,))
    keep = Pass("keep_full", partial(keep_full, prefetch=prefetch), GATHERED)
    ensures = () if limit else (bounded,)
    ahead = Pass("schedule_prefetch", partial(schedule_prefetch, prefetch=prefetch), GATHERED, ensures)
    sink = Pass("sink_waits", partial(sink_waits, depth=max(prefetch, 1)), (facts.REDUCED_ONCE,), (facts.WAITS_SUNK,))
    passes = [split, assign, defer, outline, pack, gather, reduce]
    if STAGES[stage].parameters_sharded:
        passes.append(keep)
    if STAGES[stage].optimizer_sharded:
        passes.append(ahead)
    passes.append(sink)
    if limit:
        within = partial(keep_within, memory_limit=limit, units=kept)
        fits = (facts.memory_bounded(limit),) if kept is None else ()
        passes.append(Pass("keep_within", within, (facts.WAITS_SUNK,), fits))
    return Pipeline(STAGES[stage], tuple(passes))
