"""chunk_rows: compute what is wide, such as logits, for some rows after the other.

    logits = aten.mm.default(h, t)                       loss_rows, dh, dw = chunked(chunk_0, h, t, targets)
    ... = aten._log_softmax.default(logits, ...)         loss = aten.sum.default(loss_rows)
    loss = aten.sum.default(loss_rows)            ->
    dlogits = ...                                        gw = aten.mul.Tensor(dw, tangent)
    gw = aten.mm.default(aten.t(dlogits), h)             gh = aten.mul.Tensor(dh, tangent)
    gh = aten.mm.default(dlogits, w)

A run of operations that treat rows alike (`zcompile.ir.rows`), between narrow values, becomes a loop: no wide value
exists for all rows. Where gradients are known but for one number, as those of a loss are, the loop computes them with
the forward, and the backward multiplies. Elsewhere there are two loops, and that of the backward repeats the forward of
its rows. Results that add up over rows, gradients of weights, are added in float32, turn by turn: only this and the
product are rounded otherwise than without chunks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from zcompile.cost.hardware import CPU
from zcompile.cost.memory import peak_bytes
from zcompile.cost.roofline import operation_seconds
from zcompile.errors import OptionError
from zcompile.ir.operation import Data, Phase, data, line_of, set_data
from zcompile.ir.ops import Chunked, Compute, Input, Item, Kind, Results, chunked
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.placement import PARTIAL, WHOLE, Divided, RowLoop
from zcompile.ir.program import Program
from zcompile.ir.row_axes import MixedRowsError, is_same_in_parts, shape_of
from zcompile.ir.rows import with_rows
from zcompile.ir.side_effects import is_collective, is_wait
from zcompile.ir.tensor_type import TensorType, human_bytes
from zcompile.passes.common.row_runs import Ahead, NoRunError, RowRun, ahead_of_backward, check_sizes

_LEAST = 2
"""A run is worth a loop if its widest value has at least this many times the elements of what it takes or returns."""
_SHARE = 0.02
"""The share of a run's time that adding up its sums, turn by turn, may take if rows are chosen."""
_MOST = 256
"""Rows that are always computed at once if they are chosen: kernels want some."""
_FEWER = (4096, 2048, 1024, 512, 256, 128)
"""Rows to try where memory is short."""


def chunk_rows(
    program: Program,
    *,
    rows: int | None = None,
    limit: int | None = None,
    least: bool = False,
    finish: Callable[[Program], Program] = lambda program: program,
    whole: bool = True,
) -> Program:
    """Return a program that computes wide values for some rows at once.

    Args:
        program: A traced step.
        rows: How many, counted over all dimensions of a value but the last: the tokens of all sequences. None to choose
            them: losses first, whose chunks cost next to nothing; then all that is wide, for fewer and fewer rows.
        limit: Without `rows`, the bytes that the finished program may hold, shards and optimizer state excluded; None
            for any number.
        least: Change nothing in a step that is within the limit, and refuse one that no chunks bring within it.
        finish: Runs the remaining passes.
        whole: False for a part of a model, which may compute nothing wide.

    Raises:
        OptionError: nothing in a training step is wide, or what is mixes rows, or the limit is too small, or a size is
            dynamic.
    """
    check_sizes(program, "chunk")
    if rows is not None:
        found = _in_chunks(program, rows)
        if not found.notes and program.has_backward and whole:
            fix = "leave it out" if found.refused is None else found.refused.fix
            raise OptionError("chunk", f"has no effect: {found.why}", fix)
        return found.noted
    if not program.has_backward:
        return _in_chunks(program, None, ahead=True).noted
    peaks = list[int]()
    for attempt in _attempts(program, unchanged=least):
        if limit is None:
            return attempt.noted
        peaks.append(peak_bytes(finish(attempt.program)))
        if peaks[-1] <= limit:
            return attempt.noted
    if least:
        less = f"{human_bytes(limit or 0)} is less than the {human_bytes(min(peaks))} that this step takes at the least"
        raise OptionError("chunk", less, f"give at least {min(peaks)} bytes, or a smaller batch")
    return attempt.noted


@dataclass(frozen=True)
class _Found:
    """A program with loops."""

    program: Program
    notes: Sequence[str] = ()
    refused: NoRunError | None = None

    @property
    def why(self) -> str:
        """Why there is no loop."""
        return "nothing is much wider than what it is computed from" if self.refused is None else _why(self.refused)

    @property
    def noted(self) -> Program:
        """The program, whose notes say what is computed in chunks."""
        why = [f"chunk_rows: not in chunks: {self.why}"] if self.refused is not None else []
        return replace(self.program, notes=(*self.program.notes, *self.notes, *why))


def _attempts(program: Program, *, unchanged: bool) -> Iterator[_Found]:
    """Yield programs that take less and less memory, and more and more time."""
    if unchanged:
        yield _Found(program.copy())
    yield _in_chunks(program, None, ahead=True)
    for rows in (None, *_FEWER):
        yield _in_chunks(program, rows)


def _in_chunks(program: Program, rows: int | None, *, ahead: bool = False) -> _Found:
    """Compute wide values for `rows` rows at once, or as many as are worth it; with `ahead` only losses."""
    program = program.copy()
    notes, few, refused = list[str](), list[str](), list[NoRunError]()
    for wide in _wide_values(program):
        if not wide.users:
            continue  # a loop computes it
        try:
            run = RowRun.around(program, wide)
            worth = _rows_worth(run) if rows is None else rows
            early = not ahead or not run.of(Phase.BACKWARD) or ahead_of_backward(run) is not None
            if early and worth and _narrow(run) * _LEAST <= wide.meta["val"].numel():
                if worth >= run.count:
                    few = few or [f"chunk_rows: {wide.name} has {run.count} rows, which are few"]
                    continue
                program, note = _Chunks(program, run, worth).written()
                notes.append(note)
        except NoRunError as error:
            refused += [error] if not notes else []  # smaller values may well be narrow
    return _Found(program, [*notes, *few], refused[0] if refused else None)


def _rows_worth(run: RowRun) -> int:
    """Return for how many rows to compute a run at once, so that adding up takes little of its time; 0 for all."""
    nodes = [node for node in run.members if node.op == "call_function" and isinstance(data(node).op, Compute)]
    seconds = sum(operation_seconds(node, CPU) for node in nodes)
    added = sum(data(node).nbytes for node in run.members if run.placed.of.get(node) is PARTIAL)
    turns = min(int(seconds * _SHARE * CPU.memory_bandwidth / max(3 * added, 1)), run.count // _MOST)
    return -(-run.count // turns) if turns > 1 else 0


def _why(refused: NoRunError) -> str:
    """Return why a value is not computed in chunks, with the operation, its module and the line of the model."""
    source, line = data(refused.node).source, line_of(refused.node)
    where = " ".join([*([f"in {source}"] if source else []), *([f"({line})"] if line else [])])
    return f"{refused.node.name}{', ' if where else ''}{where}: {refused}"


def _wide_values(program: Program) -> list[fx.Node]:
    """Return computed tensors, the largest first; of equally large ones the first."""
    derived = derived_values(program)
    found = [
        node
        for node in program.nodes(Compute)
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        and not isinstance(data(node).op, Chunked)
        and value.dim() > 1
        and node not in derived
        and not data(node).view
        and not (is_collective(node) or is_wait(node))  # what reads it is as large, and has its rows together
        and data(node).phase is Phase.FORWARD
    ]
    return sorted(found, key=lambda node: -node.meta["val"].numel())


def _narrow(run: RowRun) -> int:
    """Return the elements with rows that a run returns in a phase, or those of the largest value that it reads."""
    read = {source for node in run.members for source in node.all_input_nodes if source not in run.members}
    sizes = [_elements(run, [source]) for source in read]
    for phase in run.program.phases:
        made = [node for node in run.of(phase) if any(user not in run.members for user in node.users)]
        sizes.append(_elements(run, made))
    return max(sizes)


def _elements(run: RowRun, values: Iterable[fx.Node]) -> int:
    return sum(node.meta["val"].numel() for node in values if isinstance(run.placed.of.get(node), Divided))


@dataclass
class _Chunks:
    """A run that is being replaced by loops."""

    program: Program
    run: RowRun
    rows: int
    """The most rows at once."""

    def written(self) -> tuple[Program, str]:
        """Return the program with loops in place of the run, and a note about them."""
        if self._size < 2:  # with one row, what has rows looks like what is the same for all of them
            least = 2 * self.run.count // self.run.placed.rows
            raise NoRunError(self.run.wide, f"is computed for {least} rows at once at the least, and not {self.rows}")
        run, ahead = self.run, ahead_of_backward(self.run)
        forward, backward = run.of(Phase.FORWARD), run.of(Phase.BACKWARD)
        if ahead is not None and backward:
            self._loop(forward, Phase.FORWARD, ahead)
        else:
            if backward:
                self._loop([*run.again, *backward], Phase.BACKWARD)
            if forward:
                self._loop(forward, Phase.FORWARD)
        _sort(self.program.graph)
        return self.program, self._note()

    def _available(self, values: Iterable[fx.Node], phase: Phase) -> None:
        """Let what a loop of the forward reads be of the forward, too: it depends on no gradient."""
        waiting = [*values] if phase is Phase.FORWARD else []
        while waiting:
            node = waiting.pop()
            if node.op != "placeholder" and data(node).phase is Phase.BACKWARD:
                set_data(node, replace(data(node), phase=phase))
                node.meta["partitioner_tag"] = f"is_{phase}"
                waiting += node.all_input_nodes

    def _note(self) -> str:
        type_, rows = data(self.run.wide).type, self.run.placed.rows
        assert type_ is not None, "wide values are tensors"
        once = human_bytes(type_.nbytes * self._size // rows)
        what = f"{self.run.wide.name}, {human_bytes(type_.nbytes)},"
        return f"chunk_rows: {what} is computed for {self._size} of {rows} rows at once, {once}"

    @property
    def _size(self) -> int:
        """The rows of a turn: each of the groups of all rows that the wide value has counts."""
        rows = self.run.placed.rows
        most = max(1, self.rows * rows // self.run.count)
        return -(-rows // -(-rows // most))

    def _loop(self, nodes: Sequence[fx.Node], phase: Phase, ahead: Ahead | None = None) -> None:
        """Replace nodes by a loop in `phase`; with `ahead`, by one that also computes the backward."""
        graph, body = self.program.graph, _Body(self.run, self._size, ahead.factor if ahead else None)
        nodes = [*nodes, *(ahead.nodes if ahead else ())]
        members = self.run.members - {*(self.run.again if phase is Phase.BACKWARD else ())}
        removed = members.intersection(nodes)
        results = [node for node in nodes if node in removed and self._leaves(node, removed)]
        needed = _computing(results, nodes)
        for node in nodes:
            if node in needed:
                body.add(node)
        module, loop = body.finished(results)
        self._available(body.reads, phase)
        name = f"chunk_{len(self.program.modules)}"
        self.program = replace(self.program, modules={**self.program.modules, name: module})
        with graph.inserting_before(graph.output_node()):
            attribute = graph.create_node("get_attr", name, name=name)
            call = graph.create_node("call_function", chunked, (attribute, *body.reads), name=f"{name}_results")
        tag = {"partitioner_tag": f"is_{phase}"}
        source = data(self.run.wide).source
        attribute.meta, call.meta = {**tag}, {"val": tuple(node.meta["val"] for node in results), **tag}
        set_data(attribute, Data(Compute(), phase, source=source))
        set_data(call, Data(Chunked(loop), phase, source=source))
        for index, node in enumerate(results):
            self._result(call, index, node, tag, ahead)
        for node in reversed([node for node in graph.nodes if node in removed or (ahead and node in ahead.nodes)]):
            if not node.users:
                graph.erase_node(node)

    def _leaves(self, node: fx.Node, removed: set[fx.Node]) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor) and any(user not in removed for user in node.users)

    def _result(self, call: fx.Node, index: int, node: fx.Node, tag: Mapping[str, str], ahead: Ahead | None) -> None:
        """Let readers of `node` read a result of the loop; a gradient computed ahead is multiplied by its factor."""
        graph, scaled = call.graph, ahead is not None and data(node).phase is Phase.BACKWARD
        with graph.inserting_before(graph.output_node()):
            item = graph.create_node("call_function", operator.getitem, (call, index), name=f"{node.name}_rows")
            item.meta = {**node.meta, **tag}
            set_data(item, replace(data(node), op=Item(index), phase=data(call).phase, view=False))
            given = item
            if scaled and ahead is not None:
                arguments, name = (item, ahead.factor), f"{node.name}_scaled"
                given = graph.create_node("call_function", torch.ops.aten.mul.Tensor, arguments, name=name)
                given.meta = dict(node.meta)
                set_data(given, replace(data(node), op=Compute(), view=False))
        node.replace_all_uses_with(given, delete_user_cb=lambda user: user not in (item, given))


def _computing(results: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return those of `nodes`, in order, that compute `results`."""
    needed = {*results}
    for node in reversed(nodes):
        if node in needed:
            needed |= {*node.all_input_nodes}
    return needed


class _Body:
    """The graph of a loop under construction, for all rows."""

    def __init__(self, run: RowRun, size: int, factor: fx.Node | None) -> None:
        self.run, self.size, self.factor = run, size, factor
        self.graph = fx.Graph()
        self.inside: dict[fx.Node, fx.Node] = {}
        self.reads: list[fx.Node] = []
        """The values from outside that it takes, in order."""

    def add(self, node: fx.Node) -> None:
        """Append an operation."""
        for source in node.all_input_nodes:
            if source in self.inside:
                continue
            if is_same_in_parts(source):
                self.add(source)  # what is zero shows, and the numbers of rows are those of a turn
            else:
                self.inside[source] = self._one(source) if source is self.factor else self._read(source)
        self.inside[node] = self.graph.node_copy(node, self.inside.__getitem__)
        self.inside[node].meta = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
        set_data(self.inside[node], data(node))

    def _one(self, factor: fx.Node) -> fx.Node:
        """Return 1 in place of the factor."""
        value = factor.meta["val"]
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        made = self.graph.create_node("call_function", torch.ops.aten.full.default, ([], 1), options, name="factor")
        made.meta["val"] = value
        return set_data(made, Data(Compute(), type=TensorType.of(value)))

    def _read(self, source: fx.Node) -> fx.Node:
        last = self.inside[self.reads[-1]] if self.reads else None
        with self.graph.inserting_after(last) if last else self.graph.inserting_before(_first(self.graph)):
            made = self.graph.create_node("placeholder", source.name, name=source.name)
        made.meta["val"] = source.meta["val"]
        set_data(made, Data(Input(Kind.DATA, len(self.reads)), type=data(source).type))
        self.reads.append(source)
        return made

    def finished(self, results: Sequence[fx.Node]) -> tuple[fx.GraphModule, RowLoop]:
        """Return the graph for the rows of a turn, which ends in `results`, and its loop.

        Raises:
            NoRunError: a result has no rows, and is no sum over them, or an operation fails with fewer rows.
        """
        of, rows = self.run.placed.of, self.run.placed.rows
        for node in results:
            placement = of[node]
            if placement is WHOLE or (isinstance(placement, Divided) and not node.meta["val"].is_contiguous()):
                raise NoRunError(node, "is not a result that rows are joined to, or add up to")
        set_data(self.graph.output(tuple(self.inside[node] for node in results)), Data(Results()))
        takes = tuple(of.get(node, WHOLE) for node in self.reads)
        factor = self.inside[self.factor].name if self.factor in self.inside else ""
        try:
            graph = with_rows(self.graph, takes, rows, self.size)
            last = with_rows(self.graph, takes, rows, rows % self.size or self.size)
        except MixedRowsError as error:
            raise NoRunError(error.node, str(error)) from error
        for node, few in zip(graph.nodes, last.nodes, strict=True):
            if "val" in node.meta and len(shape_of(node)) != len(shape_of(few)):  # sizes of 1 were left out
                raise NoRunError(node, f"has other dimensions for the {rows % self.size} of {rows} rows that are left")
        return fx.GraphModule(torch.nn.Module(), graph), RowLoop(
            rows, self.size, takes, tuple(of[node] for node in results), factor
        )


def _first(graph: fx.Graph) -> fx.Node | None:
    return next(iter(graph.nodes), None)


def _sort(graph: fx.Graph) -> None:
    """Move each node behind what it reads, the backward behind the forward, and leave the order otherwise as it is."""
    nodes = list(graph.nodes)
    halves = {False: 1, True: 2}
    rank = {"placeholder": 0, "output": 3}
    nodes.sort(key=lambda node: rank.get(node.op, halves[data(node).phase is Phase.BACKWARD]))
    placed: dict[fx.Node, None] = {}
    for node in nodes:
        waiting = [node]
        while waiting:
            left = [source for source in waiting[-1].all_input_nodes if source not in placed]
            if left:
                waiting += reversed(left)
            else:
                placed.setdefault(waiting.pop())
    for before, node in itertools.pairwise(placed):
        before.append(node)
