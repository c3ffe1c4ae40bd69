"""Steps of pipelines, as the texts of all their ranks: `python -m benchmarks.mutants.steps` makes mistakes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Input, Kind, Shards
from zcompile.ir.printer import inputs_of, region_text
from zcompile.ir.program import Program
from zcompile.model.units import make_layout
from zcompile.pipelining.action_tables import action_table
from zcompile.pipelining.program import PipelinePlace, choose_starts, rewrite
from zcompile.proof.checker import RankPart, prove_step
from zcompile.proof.checker_texts import CAPTURE, STEP
from zcompile.proof.parts import check_parts, part_of
from zcompile.proof.rank_events import read_events
from zcompile.proof.ranks import check_ranks
from zcompile.schedule.options import Options
from zcompile.tools.tracing import trace

Texts = dict[str, str]


@dataclass(frozen=True)
class Steps:
    """The steps of the ranks along a pipeline, of which there are several columns.

    Attributes:
        texts: The files of each.
        heads: What is said before their functions.
        parts: What of the traced step is theirs.
        programs: The same as programs.
    """

    model: nn.Module
    texts: tuple[Texts, ...]
    heads: tuple[str, ...]
    parts: tuple[RankPart, ...]
    programs: tuple[Program, ...]
    columns: int

    def prove(self, texts: Sequence[Texts], place: int | None = None) -> None:
        """Prove the step of one rank, or those of all of them, and that they fit together.

        Raises:
            ProofError: it is not proven.
        """
        for number in range(len(texts)) if place is None else (place,):
            prove_step(texts[number], self.parts[number])
        if place is None:
            ranks = {
                place * self.columns + column: place for place in range(len(texts)) for column in range(self.columns)
            }
            check_parts({rank: (texts[at][CAPTURE], self.parts[at]) for rank, at in ranks.items()})
            sources = [
                {**{k: v for k, v in one.items() if k != CAPTURE}, "": head}
                for one, head in zip(texts, self.heads, strict=True)
            ]
            check_ranks({rank: read_events(sources[at]) for rank, at in ranks.items()})

    def given(self, number: int, seed: int = 0) -> dict[str, Any]:
        """What a rank of the mesh gives its step: parameters as all have them, and the data of its column."""
        from benchmarks.mutants.step_oracle import Unit

        place, column = divmod(number, self.columns)
        program, found = self.programs[place], dict[str, Any]()
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for node in inputs_of(program, program.phases[0]):
            op = data(node).op
            if isinstance(op, Shards):
                params = program.layout.unit(op.unit).params
                found[node.name] = Unit({param.name: own[param.name].detach() for param in params})
            elif isinstance(op, Input):
                found[node.name] = self._input(program, node, column, seed)
            else:
                found[node.name] = None
        return found

    def _input(self, program: Program, node: Any, column: int, seed: int) -> torch.Tensor:
        op, type_ = op_of(node, Input), data(node).type
        assert type_ is not None, "inputs are tensors"
        if op.kind is Kind.CONSTANT:
            constant: torch.Tensor = program.constants[node.name]
            return constant
        if op.kind is Kind.TANGENT:
            return torch.full(type_.shape, 1 / self.parts[0].microbatches)
        if op.held:
            return self.model.get_buffer(op.held)
        source = torch.Generator().manual_seed(hash((seed, column, op.index, op.microbatch)) % 2**31)
        if type_.dtype.is_floating_point:
            return torch.randn(type_.shape, generator=source, dtype=type_.dtype)
        return torch.randint(0, 8, type_.shape, generator=source)


def steps_of(
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    schedule: str,
    *,
    pipeline: int = 2,
    columns: int = 1,
    replicas: int = 1,
    microbatches: int = 4,
    units: Sequence[str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Steps:
    """The steps of a model that gives its loss, for a micro-batch."""
    options = Options(**(given or {}))
    traced = trace(model, batch, {}, dtype=options.dtype, reduce_dtype=options.reduce_dtype, units=units)
    axes = [Axis("pp", AxisKind.PIPELINE, pipeline, columns), Axis("dp", AxisKind.SHARD, columns // replicas)]
    if replicas > 1:
        axes.insert(1, Axis("replicate", AxisKind.REPLICATE, replicas, columns // replicas))
    layout = make_layout(model, STAGES[options.stage], tuple(axes), units, options.precision, hybrid=options.hybrid)
    traced, table = replace(traced, layout=layout), action_table(schedule, pipeline, microbatches)
    starts = choose_starts(traced, table, None, options=options)
    journals = [rewrite(traced, PipelinePlace(table, at, "pp", starts), options).journal for at in range(pipeline)]
    programs = tuple(journal.entries[-1].after for journal in journals)
    return Steps(
        model,
        tuple(_texts(traced, program) for program in programs),
        tuple(program.text(regions=True).partition("\ndef ")[0] for program in programs),
        tuple(
            part_of(journal.part, program) for journal, program in zip(journals, programs, strict=True) if journal.part
        ),
        programs,
        columns,
    )


def _texts(traced: Program, program: Program) -> Texts:
    regions = {f"regions/{name}.py": region_text(region) for name, region in program.regions.items()}
    return {CAPTURE: traced.text(regions=True), STEP: str(program.phase(program.phases[0])), **regions}
