"""The ZeRO paper's table of model state, from programs: `python -m benchmarks.memory.zero_table`, some minutes.

GPTs of 7.5, 128 and 1000 billion parameters are traced on meta in float16 and taken through the passes of stages 1, 2
and 3; counted is what they hold between the backward and the optimizer's step, two moments (Adam) included. The paper's
figures (Rajbhandari et al. 2020, table 1, K = 12) are for 2Ψ bytes of parameters, 2Ψ of gradients and 12Ψ of optimizer
state, each over the ranks where the stage divides it. GB are 10^9 bytes.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from zcompile.cost.forecast import Choice
from zcompile.cost.memory import model_state
from zcompile.ir.operation import op_of
from zcompile.ir.ops import AllGather, Release, WaitReduce
from zcompile.ir.program import Program
from zcompile.tools.named_models import subject_of
from zcompile.tools.planner import Rewriter
from zcompile.tools.tracing import trace

MODELS = {"gpt:7.5b": 7.5e9, "gpt:128b": 128e9, "gpt:1t": 1e12}
WORLDS = (1, 4, 16, 64, 256, 1024)
STAGES = (1, 2, 3)


def paper(parameters: float, stage: int, world: int) -> float:
    """Bytes of model state of a rank, as the paper has them."""
    weights, gradients, optimizer = (size * parameters for size in (2, 2, 12))
    return weights / (world if stage == 3 else 1) + gradients / (world if stage >= 2 else 1) + optimizer / world


def held(program: Program) -> int:
    """Bytes of model state that a rank holds of `program` from the end of its backward to the optimizer's step.

    Shards and moments, what was gathered and not released, and the averaged gradients that are handed out.
    """
    state, layout = model_state(program.layout), program.layout
    copies = sum(program.memory(node) for node in program.nodes(AllGather, Release))
    given = (layout.param(name) for node in program.nodes(WaitReduce) for name in op_of(node, WaitReduce).params)
    return state.parameters + state.moments + copies + sum(p.shard_numel * p.dtype.itemsize for p in given)


def main() -> int:
    console = Console(width=100)
    for name, said in MODELS.items():
        subject = subject_of(name, batch=1, sequence=128)
        count = sum(parameter.numel() for parameter in subject.model.parameters())
        traced = trace(subject.model, subject.args, dtype=torch.float16)
        rewriter = Rewriter(subject.model, traced, None)
        title = f"{name}: Ψ = {count / 1e9:,.5g} billion; GB, counted / the paper's"
        table = Table("ranks", *(f"stage {stage}" for stage in STAGES), title=title, title_justify="left")
        for world in WORLDS:
            cells = []
            for stage in STAGES:
                program = rewriter.program(Choice(stage, 2, None, torch.float16), min(world, 2))
                found = held(replace(program, layout=program.layout.over(world)))
                cells.append(f"{found / 1e9:,.5g} / {paper(said, stage, world) / 1e9:,.5g}")
            table.add_row(str(world), *cells)
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
