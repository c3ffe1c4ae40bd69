"""Runs the texts of a pipeline's steps as they stand, all ranks in threads of one process, without code of zcompile.

What a step may not rely on is overwritten: released parameters and gradients that were given away become NaN.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

PATIENCE = 5.0
"""Seconds that a rank waits for another one, which may wait for it, too."""
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64, "i64": torch.int64, "b8": torch.bool}
_TAKEN = re.compile(r"^ +\w+,.*argument (\d+)(?: item (\d+))?$", re.MULTILINE)


class Unit:
    """What a rank keeps of a unit."""

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self.params = {name: value.clone() for name, value in params.items()}


class World:
    """All ranks: the queues between the stages of each column, and where those of a stage meet to average."""

    def __init__(self, stages: int, columns: int) -> None:
        self.stages, self.columns = stages, columns
        self.queues: dict[tuple[int, int, int], queue.Queue[Any]] = {}
        self.barriers = [threading.Barrier(columns) for _ in range(stages)]
        self.given: dict[tuple[int, int], Any] = {}
        self.lock = threading.Lock()

    def queue(self, column: int, source: int, to: int) -> queue.Queue[Any]:
        with self.lock:
            return self.queues.setdefault((column, source, to), queue.Queue())

    def mean(self, stage: int, column: int, value: torch.Tensor | None) -> torch.Tensor | None:
        """The mean over the columns; all have to come with a value, or none."""
        self.given[stage, column] = value
        self.barriers[stage].wait(PATIENCE)
        every = [self.given[stage, one] for one in range(self.columns)]
        self.barriers[stage].wait(PATIENCE)
        if any(one is None for one in every):
            assert all(one is None for one in every), "ranks average different gradients"
            return None
        total = every[0].clone()
        for one in every[1:]:
            total = total + one
        mean: torch.Tensor = total / self.columns
        return mean


class Rank:
    """The functions that one rank's text calls."""

    def __init__(self, world: World, stage: int, column: int, group: Any) -> None:
        self.world, self.stage, self.column, self.group = world, stage, column, group
        self.begun, self.arrived = dict[int, int](), dict[int, list[torch.Tensor]]()
        """By who sends it: how many messages this rank has begun to receive, and those that are there."""

    def all_gather(self, unit: Unit, **_: Any) -> list[Any]:
        return ["full", [value.clone() for value in unit.params.values()]]

    def wait(self, started: list[Any]) -> Any:
        kind, *rest = started
        started[0] = "waited for"
        if kind == "full":
            return rest[0]
        if kind == "mean":
            unit, grads = rest
            return dict(zip(unit.params, [self.world.mean(self.stage, self.column, one) for one in grads], strict=True))
        if kind == "recv":
            source, number, type_ = rest
            arrived = self.arrived.setdefault(source, [])
            while len(arrived) <= number:
                arrived.append(self.world.queue(self.column, source, self.stage).get(timeout=PATIENCE))
            value = arrived[number]
            assert type_ == _type(value), "what arrives is something else"
            return value
        assert kind == "send", "waits for what is not under way"
        return None

    def release(self, full: list[torch.Tensor]) -> None:
        _spoil(full)

    def send(self, value: torch.Tensor, group: Any, *, to: int, **_: Any) -> list[Any]:
        assert group is self.group
        assert isinstance(value, torch.Tensor)
        self.world.queue(self.column, self.stage, to).put(value.clone())
        return ["send"]

    def recv(self, group: Any, type_: str, *, source: int, **_: Any) -> list[Any]:
        assert group is self.group
        number = self.begun[source] = self.begun.get(source, -1) + 1
        return ["recv", source, number, type_]

    def reduce_scatter(self, unit: Unit, grads: Any, **_: Any) -> list[Any]:
        return ["mean", unit, self._taken(unit, grads)]

    all_reduce = reduce_scatter

    def add(self, unit: Unit, sums: Any, grads: Any, **_: Any) -> dict[str, Any]:
        one = self._taken(unit, sums)
        other = [None if g is None else g.clone() for g in (grads.values() if isinstance(grads, dict) else grads)]
        pairs = zip(one, other, strict=True)
        return dict(zip(unit.params, [a if b is None else a + b for a, b in pairs], strict=True))

    def plus(self, one: torch.Tensor, other: torch.Tensor, **_: Any) -> torch.Tensor:
        return one + other

    def copy(self, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    def write(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        buffer.copy_(value)

    def update(self, unit: Unit, grads: Mapping[str, Any]) -> None:
        assert grads.keys() == unit.params.keys()
        for name, grad in grads.items():
            if grad is not None:
                unit.params[name].sub_(grad, alpha=0.1)

    def _taken(self, unit: Unit, grads: Any) -> list[Any]:
        given = [*grads.values()] if isinstance(grads, dict) else [*grads]
        assert len(given) == len(unit.params)
        kept = [None if one is None else one.clone() for one in given]
        _spoil([one for one in given if one is not None])
        return kept


def _spoil(tensors: Sequence[torch.Tensor]) -> None:
    for one in tensors:
        if one.dtype.is_floating_point:
            one.fill_(torch.nan)


def _type(value: torch.Tensor) -> str:
    dtype = next(name for name, one in _DTYPES.items() if one is value.dtype)
    return f"{dtype}[{', '.join(map(str, value.shape))}]"


def _region(name: str, text: str, space: dict[str, Any]) -> Any:
    """What calls a region with its arguments, as the margins of its text take them apart."""
    takes = [(int(number), item) for number, item in _TAKEN.findall(text)]
    own = dict(space)
    exec(compile(text, name, "exec"), own)

    def call(*given: Any) -> Any:
        results = own[name]([given[at] if item == "" else _item(given[at], int(item)) for at, item in takes])
        return results[0] if len(results) == 1 else results

    return call


def _item(owner: Any, number: int) -> Any:
    return [*owner.params.values()][number] if isinstance(owner, Unit) else owner[number]


def run(texts: Sequence[Mapping[str, str]], given: Sequence[Mapping[str, Any]], columns: int) -> list[Any]:
    """What the steps of all ranks give: of each its results, its parameters and its buffers.

    Args:
        texts: By place along the pipeline the files of a rank's program.
        given: By rank of the mesh what its step is given, by name.
        columns: How many ranks have the same stages.

    Raises:
        RuntimeError: a rank fails, or ranks wait for each other.
    """
    world, found = World(len(texts), columns), dict[int, Any]()
    threads = [
        threading.Thread(
            target=_run, args=(world, at, column, texts[at], given[at * columns + column], found), daemon=True
        )
        for at in range(len(texts))
        for column in range(columns)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(4 * PATIENCE)
    failed = [one for one in found.values() if isinstance(one, Exception)]
    if failed or len(found) < len(threads):
        raise RuntimeError(f"a rank has failed: {failed[:1]}")
    return [found[number] for number in sorted(found)]


def _run(
    world: World, stage: int, column: int, texts: Mapping[str, str], given: Mapping[str, Any], found: dict[int, Any]
) -> None:
    number = stage * world.columns + column
    try:
        group = object()
        rank = Rank(world, stage, column, group)
        space: dict[str, Any] = {"aten": torch.ops.aten, "ops": torch.ops, "torch": torch, "unbox": tuple}
        regions = {name[8:-3]: text for name, text in texts.items() if name.startswith("regions/")}
        space |= {name: _region(name, text, space) for name, text in regions.items()}
        names = ("all_gather", "wait", "release", "send", "recv", "reduce_scatter", "all_reduce", "add", "plus", "copy")
        space |= {name: getattr(rank, name) for name in (*names, "write", "update")}
        exec(compile(texts["step.py"], "step.py", "exec"), space)
        box = [group if value is None else _own(value) for value in given.values()]
        with torch.no_grad():
            results, _ = space["step"](box)
        units = [one for one in box if isinstance(one, Unit)]
        found[number] = results, [unit.params for unit in units], [one for one in box if isinstance(one, torch.Tensor)]
    except Exception as error:
        world.barriers[stage].abort()
        found[number] = error


def _own(value: Any) -> Any:
    return Unit(value.params) if isinstance(value, Unit) else value.clone()


def same(one: Any, other: Any) -> bool:
    """True if both have the same bits."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same, one, other))
