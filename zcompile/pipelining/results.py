"""What a step of a pipeline gives: the mean loss of its micro-batches, and metrics of each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from zcompile.engine.metrics import StepResult
from zcompile.ir.actions import ActionTable
from zcompile.ir.operation import data
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import TensorType
from zcompile.passes.common.boundary import written_results
from zcompile.pipelining.guard import results_of
from zcompile.pipelining.program import PipelinedProgram
from zcompile.runtime.stage_links import StageLinks

ResultsOn = Literal["all", "last"]
"""Which ranks along the pipeline axis are given the results: all of them, or the one that has computed the loss."""


@dataclass(frozen=True)
class ResultPlaces:
    """The results of a traced step, the loss first: what they are, and where they are computed.

    Attributes:
        names: Of those behind the loss; None if there is the loss alone.
        types: Of all, for one micro-batch.
        ranks: The places along the pipeline axis of the ranks that compute them.
        own: What this rank's program returns, in order: which result, and of which micro-batch.
    """

    names: tuple[str, ...] | None
    types: tuple[TensorType, ...]
    ranks: tuple[int, ...]
    own: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, names: tuple[str, ...] | None, traced: Program, made: PipelinedProgram, table: ActionTable
    ) -> ResultPlaces:
        """Those of a traced step, and of what a rank makes of it; new values of buffers are no results."""
        first = len(written_results(traced))
        ranks = dict[int, int]()
        for stage in made.stages:
            for end in stage.boundary.outputs:
                if isinstance(end, int) and end >= first:
                    ranks[end - first] = table.rank_of(stage.number)
        types = tuple(type_ for result in results_of(traced) if (type_ := data(result).type) is not None)
        own = tuple((result - first, number) for result, number in made.results)
        return cls(names, types, tuple(ranks[result] for result in range(len(types))), own)


class StepResults:
    """Makes the results of a step of what the programs of all ranks return.

    Args:
        places: Of the results.
        microbatches: How many there are.
        links: To the other ranks along the pipeline axis.
        on: Which of them get the results.
    """

    def __init__(self, places: ResultPlaces, microbatches: int, links: StageLinks, on: ResultsOn) -> None:
        self._places, self._microbatches, self._links, self._on = places, microbatches, links, on

    def zero(self) -> torch.Tensor:
        """A loss of zero."""
        return torch.zeros(self._places.types[0].shape, dtype=self._places.types[0].dtype, device=self._links.device)

    def of(self, outputs: Sequence[torch.Tensor]) -> StepResult | None:
        """The mean loss, with metrics behind it if there are; None on ranks that are to have none. Collective."""
        own: dict[int, dict[int, torch.Tensor]] = {}
        for (result, number), value in zip(self._places.own, outputs, strict=True):
            own.setdefault(result, {})[number] = value
        joined = {result: self._joined(result, values) for result, values in own.items()}
        home = self._places.ranks[0]
        for rank in sorted({*self._places.ranks}):
            if self._links.size > 1 and (self._on == "all" or rank != home):
                self._share(rank, joined)
        if self._on == "last" and self._links.rank != home:
            return None
        if (names := self._places.names) is None:
            return joined[0]
        return joined[0], {name: joined[1 + at] for at, name in enumerate(names)}

    def _joined(self, result: int, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The mean of losses; metrics one behind the other."""
        in_order = [values[number] for number in range(self._microbatches)]
        if result:
            return torch.stack(in_order)
        total = self.zero()
        for loss in in_order:
            total += loss
        return total / self._microbatches

    def _share(self, rank: int, joined: dict[int, torch.Tensor]) -> None:
        """Give all ranks along the axis what one of them has computed, as one message."""
        device = self._links.device
        results = [result for result, at in enumerate(self._places.ranks) if at == rank]
        for result in results if self._links.rank != rank else ():
            type_ = self._places.types[result]
            shape = (self._microbatches, *type_.shape) if result else type_.shape
            joined[result] = torch.empty(shape, dtype=type_.dtype, device=device)
        flat = [joined[result].contiguous().view(-1).view(torch.uint8) for result in results]
        sent = torch.cat(flat)
        with self._links.waits.explained("the loss and metrics"):
            dist.broadcast(sent, group=self._links.group, group_src=rank)
        for result, part in zip(results, sent.split([one.numel() for one in flat]), strict=True):
            # Copied: parts of a message may begin at addresses that the dtype does not allow.
            joined[result] = part.clone().view(joined[result].dtype).view(joined[result].shape)
