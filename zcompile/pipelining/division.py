"""Dividing a model between the ranks of a pipeline: each keeps shards of its own units, and nothing of all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from zcompile._torch import buffers_of, give_up, local_tensor, parameters_of
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.optimizers import point_at_shards
from zcompile.engine.state_places import shard_memory
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Input
from zcompile.ir.program import Program
from zcompile.model.sharding import Retired, retire, shard_model
from zcompile.pipelining.ranks import PipelineRanks
from zcompile.runtime.agreement import Agreement
from zcompile.schedule.options import Options


def divide_model(
    model: nn.Module,
    program: Program,
    traced: Program,
    ranks: PipelineRanks,
    options: Options,
    optimizers: Sequence[Optimizer],
) -> tuple[ModelRuntime, Retired]:
    """What the program of a rank runs with: the rank's units, sharded. Collective.

    Parameters of other units, and buffers that only other ranks write to, are on meta behind it, and in no group of the
    optimizers. All begin with the values of the first rank.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    blank = [name for name, tensor in named if tensor.is_meta]
    ranks.agreement.reach("what of the model is on meta", blank, "build it on meta on all ranks, or on none")
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            ranks.links.broadcast(local_tensor(tensor))
    agreement = Agreement(ranks.data)
    runtime = ModelRuntime(
        program.layout, ranks.data, agreement, options, ranks.parallel, ranks.agreement, in_step=ranks.everyone
    )
    memory = shard_memory(options, program.layout, ranks.device, ranks.data.dividing.rank, ranks.agreement)
    shards, _, retired = shard_model(
        model, program.layout, ranks.data, parallel=ranks.parallel, memory=memory, whole=traced.layout
    )
    runtime.extend((), shards)
    point_at_shards(optimizers, shards.values(), retired)
    _leave_parameters(model, {id(p) for unit in shards.values() for p in unit.parameters.values()}, optimizers)
    runtime.lockstep.place = ranks.links.rank
    for optimizer in optimizers:
        runtime.settings.know(optimizer)
    _leave_buffers(model, written_buffers(traced) - written_buffers(program))
    return runtime, retired


def written_buffers(program: Program) -> set[str]:
    """The buffers that a program writes to."""
    inputs = (op_of(node, Input) for node in program.nodes(Input))
    return {op.held for op in inputs if op.mutated}


def _leave_parameters(model: nn.Module, own: set[int], optimizers: Sequence[Optimizer]) -> None:
    """Free the parameters that other ranks keep: what stands in their place has a shape and no memory."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:
                    optimizer.state.pop(parameter, None)
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
    others = {
        id(parameter): (name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in own
    }
    empty = {
        key: nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
        for key, (_, parameter) in others.items()
    }
    for module in model.modules():
        table = parameters_of(module)
        table.update({key: empty[id(old)] for key, old in table.items() if old is not None and id(old) in empty})
    for name, parameter in others.values():
        give_up(parameter)
        retire(parameter, name)


def _leave_buffers(model: nn.Module, names: set[str]) -> None:
    """Let buffers that change on other ranks alone be on meta: their values here would be old ones."""
    left = {id(buffer) for name, buffer in model.named_buffers() if name in names}
    for module in model.modules():
        table = buffers_of(module)
        table.update(
            {k: torch.empty_like(b, device="meta") for k, b in table.items() if b is not None and id(b) in left}
        )
