"""Where non-finite values come from: the first line with such a value, and the operation within its region."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile.engine.region_cache import operations_of
from zcompile.engine.row_loops import turn_of, turns
from zcompile.ir.operation import Phase, op_of
from zcompile.ir.ops import Receive, WaitReceive
from zcompile.ir.printer import region_text
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.recording.values import Tensor, non_finite, norm_of
from zcompile.runtime.device import generators_of
from zcompile.runtime.executor import Gradients
from zcompile.runtime.shards import Full
from zcompile.torch_internals.operators import OpOverload, writes_arguments
from zcompile.torch_internals.pytree import tree_leaves

KINDS = {"nan": "NaN", "inf": "inf"}
"""Display names of the kinds."""


@dataclass(frozen=True)
class RunLine:
    """A line of a run: where it is, and its text."""

    line: str
    code: str


@dataclass(frozen=True)
class NonFinite:
    """The first value with NaN or infinite elements."""

    kind: str
    place: RunLine
    name: str
    count: int
    """Number of such elements in the value `name`."""
    reasons: Sequence[str]
    """Explanation of the origin, as lines of text."""


@dataclass
class Tracer:
    """Looks for non-finite values while the lines of one run are replayed."""

    program: Program
    phase: Phase
    device: torch.device
    _given: list[Any] = field(default_factory=list)
    _states: list[torch.Tensor] = field(default_factory=list)

    def before(self, name: str, args: Sequence[Any]) -> None:
        """Keep the arguments of region `name`, which is about to run, until `look` has seen its line."""
        graph = self.program.regions[name].graph
        targets = (node.target for node in graph.nodes)
        writes = any(writes_arguments(target) for target in targets if isinstance(target, OpOverload))
        self._given = [one.clone() if writes and isinstance(one, torch.Tensor) else one for one in args]
        self._states = [generator.get_state() for generator in generators_of(self.device)]

    def look(
        self,
        findings: MutableMapping[str, NonFinite],
        place: RunLine,
        operation: str,
        result: Any,
        values: Sequence[tuple[str, Tensor]],
    ) -> None:
        """Record the first value of each kind in the result of a line."""
        counts = {kind: [(name, getattr(noted, kind)) for name, noted in values] for kind in KINDS}
        for kind, counted in counts.items():
            bad = next(((name, count) for name, count in counted if count), None)
            if bad is not None and kind not in findings:
                findings[kind] = NonFinite(kind, place, *bad, self._reasons(kind, bad[0], operation, result))
        self._given, self._states = [], []

    def _reasons(self, kind: str, name: str, operation: str, result: Any) -> list[str]:
        match operation, result:
            case "unbox", _:
                return [self._of_inputs(name)]
            case "wait", Full():
                return list(self._of_ranks(kind, result))
            case "wait", Gradients():
                return [
                    "It was received. No earlier value of this rank has one, so it is from another rank's gradients:",
                    "`zcompile replay FOLDER` shows where each recorded rank has its first one.",
                ]
            case "wait", _:
                return [self._of_messages(name)]
        if operation in self.program.regions:
            return list(self._of_operations(kind, self.program.regions[operation]))
        return []

    def _of_inputs(self, name: str) -> str:
        """Explain what the input `name` is."""
        if name in {param.name for param in self.program.layout.params}:
            return "It is in this rank's shard of the parameter, which was not finite before this run."
        if self.phase is Phase.STEP:
            return "It is an input of the step: in the batch, a buffer, a constant, or the loss scale."
        if self.phase is Phase.FORWARD:
            return "It is an input of the model: in the batch, a buffer, or a constant of its code."
        return "It came from autograd: in the gradient of an output, or in a saved value that was changed."

    def _of_messages(self, name: str) -> str:
        """Name the rank that sent the received value `name`, if a line says so."""
        for node in self.program.nodes(WaitReceive):
            sent = op_of(node.all_input_nodes[0], Receive)
            if node.name == name:
                return (
                    f"It was received from rank {sent.source} along {sent.axis}, as {sent.message}: "
                    "`zcompile replay FOLDER` shows where each recorded rank has its first one."
                )
        return "It was received."

    def _of_ranks(self, kind: str, full: Full) -> Iterator[str]:
        """Name the ranks whose rows of gathered parameters have such values."""
        for param, tensor in zip(full.unit.params, full.tensors, strict=True):
            if tensor is None or not Tensor.of(tensor)[0].described()[kind]:
                continue
            ranks = [rank for rank in range(max(param.shards, 1)) if _count(kind, tensor, *param.shard_rows(rank))]
            whose = f"in the rows of rank {', '.join(map(str, ranks))}" if param.shards else "on every rank"
            yield f"{param.name} has it {whose}: the parameter was not finite before this step."

    # -- within a region ------------------------------------------------------------------------------------------

    def _of_operations(self, kind: str, region: Region) -> Iterator[str]:
        """Run the operations of a region one by one, and name the operation that made the value."""
        given = [self._given[i] if item is None else self._given[i][item] for i, item in region.takes]
        with generators_back(self.device):
            for generator, state in zip(generators_of(self.device), self._states, strict=True):
                generator.set_state(state)
            for _, count, taken in turns(region.rows, given):
                watched = _Watched(operations_of(turn_of(region, count)))
                watched.run(*taken)
                if kind in watched.first:
                    break
        text = region_text(region)
        if kind not in watched.first:
            yield f"Run one by one, no operation of {region.name} makes one: it comes from how the backend fuses them."
            return
        made = watched.first[kind]
        yield f"{region.name} made it, from arguments without one, in"
        yield f"    {_line_of(text, made.node)}"
        for name, about in made.arguments.items():
            yield f"    {name}: {about}"
        if kind == "nan" and (inf := watched.first.get("inf")) is not None and inf.node is not made.node:
            yield "Before that, the first infinity of the region was made in"
            yield f"    {_line_of(text, inf.node)}"


@contextlib.contextmanager
def generators_back(device: torch.device) -> Iterator[None]:
    """Restore the states of random generators on exit."""
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@dataclass(frozen=True)
class _Made:
    node: fx.Node
    arguments: dict[str, str]


class _Watched(fx.Interpreter):
    """Runs operations one by one, and finds the first that makes a non-finite value from finite arguments."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.first: dict[str, _Made] = {}
        self._has: dict[fx.Node, tuple[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        arguments = {one: self.env[one] for one in n.all_input_nodes}
        about = {one.name: summary(value) for one, value in arguments.items() if isinstance(value, torch.Tensor)}
        result = super().run_node(n)
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        counted = [non_finite(one) for one in tensors]
        self._has[n] = (sum(nan for nan, _ in counted), sum(inf for _, inf in counted))
        for index, kind in enumerate(KINDS):
            clean = n.op == "call_function" and not any(self._has[one][index] for one in arguments)
            if self._has[n][index] and clean and kind not in self.first:
                self.first[kind] = _Made(n, about)
        return result


def summary(value: torch.Tensor) -> str:
    """Summarize a tensor in one line: shape, norm, extremes and non-finite elements."""
    norm, least, most = norm_of(value)
    nan, inf = non_finite(value)
    bad = "".join(f", {count} {KINDS[kind]}" for kind, count in (("nan", nan), ("inf", inf)) if count)
    return f"{list(value.shape)} norm {norm:.4g}, min {least:.4g}, max {most:.4g}{bad}"


def _count(kind: str, tensor: torch.Tensor, start: int, stop: int) -> int:
    nan, inf = non_finite(tensor[start:stop] if tensor.dim() else tensor)
    return nan if kind == "nan" else inf


def _line_of(text: str, node: fx.Node) -> str:
    """The line of a region's text that makes `node`."""
    names = [node.name, *(user.name for user in node.users)]
    for name in names:
        named = re.compile(rf"^ *(?:[\w*, ]+, )?{re.escape(name)}(?:, [\w*, ]+)? = .*")
        for line in text.splitlines():
            if named.match(line):
                return re.sub(r"  +", "  ", line.strip())
    return f"{node.name} = {node.target}"
