"""Steps of pipelines, traced once in a process and not by every rank of every test.

Within `sharing_steps`, what the first step of a model has been traced to is taken for that of an equal model with equal
micro-batches; ranks that run the same actions take the same program, too. Whether a model has changed since its first
step is not looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.shared_traces import Key, described_arguments, described_model, reads_of
from zcompile.engine.step_trace import CallSpec, StepTrace
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Input
from zcompile.ir.program import Program
from zcompile.model.sharding import placeholder_of
from zcompile.pipelining import preparation
from zcompile.pipelining.preparation import StepSetup
from zcompile.pipelining.program import PipelinedProgram

_TRACES: dict[Key, SharedTrace] = {}
_PROGRAMS: dict[Key, PipelinedProgram] = {}
trace_step, rewrite = preparation.trace_step, preparation.rewrite


class SharedTrace(StepTrace):
    """What another rank has traced."""

    def __init__(self, trace: StepTrace, setup: StepSetup, like: StepTrace | None, flat: Any) -> None:
        self.program, self.writes, self.flat = trace.program, trace.writes, flat
        layout, device = self.program.layout, setup.ranks.device
        self._placeholders = (
            like._placeholders
            if like is not None
            else {
                name: placeholder_of(parameter, layout.param(name).full_dtype, device)
                for name, parameter in setup.trained.model.named_parameters()
            }
        )

    def others(self, called: CallSpec) -> list[torch.Tensor]:
        return []


@contextlib.contextmanager
def sharing_steps() -> Iterator[None]:
    """Within, what steps of pipelines trace is kept, and taken where it is there."""
    with mock.patch.multiple(preparation, trace_step=traced, rewrite=rewritten):
        yield


@contextlib.contextmanager
def own_steps() -> Iterator[None]:
    """Within, ranks trace for themselves: whether a model has changed since its first step is looked at."""
    with mock.patch.object(preparation, "trace_step", trace_step):
        yield


def traced(setup: StepSetup, first: CallSpec, like: StepTrace | None = None) -> StepTrace:
    key = key_of(setup, first, like)
    if key is None:
        return trace_step(setup, first, like)
    if key not in _TRACES:
        trace = trace_step(setup, first, like)
        if reads_more(trace.program, first):
            return trace
        _TRACES[key] = SharedTrace(trace, setup, like, setup.flat._found)
    setup.flat._found = _TRACES[key].flat
    return SharedTrace(_TRACES[key], setup, like, setup.flat._found)


def key_of(setup: StepSetup, first: CallSpec, like: StepTrace | None) -> Key | None:
    reads = set[str]()
    if setup.trained.loss_fn is not None and not reads_of(setup.trained.loss_fn, reads, set()):
        return None
    model = described_model(setup.trained.model)
    given = described_arguments((first.args, dict(first.kwargs)))
    if model is None or given is None:
        return None
    layout = preparation._layout(setup) if like is None else like.program.layout
    is_mean = setup.table.microbatches > 1  # what is no mean over the batch is refused then
    return model, given, str(sorted(reads)), first.arguments, repr(layout), setup.options.dtype, like is None, is_mean


def reads_more(program: Program, first: CallSpec) -> bool:
    """Whether it reads tensors that are no arguments."""
    inputs = [op_of(node, Input) for node in program.nodes(Input)]
    return any(op.leaf is not None and op.leaf >= len(first.leaves()) for op in inputs)


def rewritten(traced: Program, *how: Any, **options: Any) -> PipelinedProgram:
    if not any(traced is shared.program for shared in _TRACES.values()):
        return rewrite(traced, *how, **options)
    key = id(traced), repr((how, options))
    if key not in _PROGRAMS:
        _PROGRAMS[key] = rewrite(traced, *how, **options)
    return _PROGRAMS[key]
