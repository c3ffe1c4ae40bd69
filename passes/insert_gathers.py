"""insert_gathers: gather a unit before its first use, release it after its last use.

    y = region_0(u0, x)         ->      u0_gather = all_gather(u0)
                                        u0_full = wait(u0_gather)
                                        y = region_0(u0_full, x)
                                        release(u0_full)

Under stage 3 a unit is full from the first to the last of the regions that read it, as long as none between them reads
another one, in the forward and again in the backward. Under stages 1 and 2 the full copy is kept (`keep=True`): one
gather in the forward, none in the backward, no release. Stage 0 gathers only units that compute in another dtype, and
sends nothing: its "gather" is a cast.

Where two axes both divide shards (`Hybrid`), a unit is gathered along the outer axis first, once per step. The inner
gathers of both the forward and the backward then read its secondary shards:

    u0_outside = all_gather(u0, replicate)
    u0_secondary = wait(u0_outside)
    u0_gather = all_gather(u0, u0_secondary)

A gradient of an input that is a view of a parameter is copied: the parameter's memory is released or gathered into.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import (
    AllGather,
    Call,
    Copy,
    GatherInside,
    GatherOutside,
    Input,
    Item,
    Release,
    Shards,
    WaitGather,
    WaitSecondary,
)
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items
from zcompile.ir.shared_memory import memory_of_values
from zcompile.ir.tensor_type import TensorType
from zcompile.passes.common.lines import copy_of, group_of, shards_of


@dataclass(frozen=True, slots=True)
class _Use:
    """Calls that read one unit, and between which none reads another."""

    unit: str
    calls: tuple[fx.Node, ...]


def insert_gathers(program: Program) -> Program:
    """Return a program in which every call reads full parameters that were gathered and waited for."""
    program = program.copy()
    _gather_for_uses(program)
    _own_returned(program)
    return program


def _gather_for_uses(program: Program) -> None:
    if not program.layout.stage.parameters_sharded:
        for unit in program.layout.units:
            calls = tuple(node for node in program.nodes(Call) if unit.name in op_of(node, Call).units)
            if calls and program.layout.must_gather(unit.name):
                _gather(program, _Use(unit.name, calls), keep=True)
        return
    for use in (use for phase in program.phases for use in _uses(program, phase)):
        full = _gather(program, use, keep=False)
        meta = Data(Release(use.unit), data(use.calls[-1]).phase, source=use.unit)
        with program.graph.inserting_after(after_items(use.calls[-1])):
            program.add((full,), meta, f"{full.name}_release")


def _own_returned(program: Program) -> None:
    """Copy gradients of inputs that alias the memory of a parameter."""
    returned = [value for value in program.results.input_gradients if isinstance(value, fx.Node)]
    memory = memory_of_values(program) if returned else {}
    for value in dict.fromkeys(returned):
        line = memory[value].line
        if value is not line and isinstance(data(line).op, (Shards, WaitGather)):
            copied = copy_of(program, value, replace(data(value), op=Copy(strided=True), view=False), "copy")
            program.graph.output_node().replace_input_with(value, copied)


def _uses(program: Program, phase: Phase) -> list[_Use]:
    """Return the uses in `phase`, in the order of their first call."""
    uses: list[_Use] = []
    for call in program.nodes(Call, phase=phase):
        previous = uses
        for unit in op_of(call, Call).units:
            last = next((use for use in previous if use.unit == unit and _follows(program, use.calls[-1], call)), None)
            if last is None:
                uses = [*uses, _Use(unit, (call,))]
            else:
                uses = [_Use(unit, (*use.calls, call)) if use is last else use for use in uses]
    return uses


def _follows(program: Program, earlier: fx.Node, later: fx.Node) -> bool:
    """Return True if no call between two reads a unit."""
    calls = program.nodes(Call, phase=data(later).phase)
    between = calls[calls.index(earlier) + 1 : calls.index(later)]
    return not any(op_of(call, Call).units for call in between)


def _gather(program: Program, use: _Use, *, keep: bool) -> fx.Node:
    """Insert a gather and its wait before the first call of `use`, let all its calls read the result, and return it."""
    unit = program.layout.unit(use.unit)
    shards, phase = shards_of(program, unit), data(use.calls[0]).phase
    kind: type[AllGather] = AllGather
    given: tuple[fx.Node, ...] = (shards,)
    if program.layout.has_secondary and unit.is_sharded:
        kind, given = GatherInside, (shards, _secondary(program, shards, use.calls[0]))
    gather_data = Data(kind(use.unit, keep, unit.compute_dtype), phase, source=use.unit)
    with program.graph.inserting_before(use.calls[0]):
        gather = program.add(given, gather_data, f"{shards.name}_gather")
        full = program.add((gather,), Data(WaitGather(use.unit), phase, source=use.unit), f"{shards.name}_full")
    for call in use.calls:
        call.replace_input_with(shards, full)
    return full


def _secondary(program: Program, shards: fx.Node, call: fx.Node) -> fx.Node:
    """Return the secondary shards of a unit: from the gather of an earlier use, or gathered before `call`."""
    unit, layout = op_of(shards, Shards).unit, program.layout
    for node in program.nodes(WaitSecondary):
        if op_of(node, WaitSecondary).unit == unit:
            return node
    (axis,) = layout.outside
    dtype, wire = layout.unit(unit).compute_dtype, layout.unit(unit).outer_gather_dtype
    op = GatherOutside(unit, axis.name, layout.keeps_secondary, dtype, wire)
    phase = data(call).phase
    type_ = TensorType.make(torch.uint8, (op.buffer_bytes(layout),))
    group = group_of(program, axis)
    with program.graph.inserting_before(call):
        started = program.add((shards, group), Data(op, phase, type_, unit), f"{shards.name}_outside")
        meta = Data(WaitSecondary(unit), phase, type_, unit, view=True)
        arrived = program.add((started,), meta, f"{shards.name}_secondary")
    arrived.meta["val"] = _fake(program, op.buffer_bytes(layout))
    return arrived


def _fake(program: Program, nbytes: int) -> object:
    """Return a uint8 fake tensor [nbytes] on the device of the model's inputs; None if the program was not traced."""
    values = (node.meta.get("val") for node in program.nodes(Input, Call, Item))
    like = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return None if like is None else like.new_empty(nbytes, dtype=torch.uint8)
