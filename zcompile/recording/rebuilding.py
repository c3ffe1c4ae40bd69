"""Programs of a recording, and values of their lines, made again from what was kept of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from zcompile.errors import ParseError, ReplayError
from zcompile.ir.layout import Unit
from zcompile.ir.parser import parse
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.recording.archive import Archive
from zcompile.recording.values import Described, Tensor, dtype_named
from zcompile.runtime.executor import Gradients
from zcompile.runtime.shards import Full, UnitShards
from zcompile.torch_internals.pytree import tree_map_only
from zcompile.torch_internals.sizes import FakeTensorMode

Find = Callable[[Tensor], torch.Tensor]


@dataclass(frozen=True)
class RecordedUnit:
    """A unit as the program of one rank sees it, without groups: its parameters as they were."""

    unit: Unit
    tensors: Sequence[torch.Tensor]

    @property
    def shards(self) -> UnitShards:
        """Nothing that the program of one rank alone does with shards is done with these."""
        return cast(UnitShards, None)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors[index]


def rebuilt(value: Described, program: Program, find: Find) -> Any:
    """A value that was recorded; `find` gives tensors."""
    kind = value["kind"]
    if kind == "tensor":
        return find(Tensor.read(value))
    if kind == "number":
        return value["value"]
    items = [rebuilt(item, program, find) for item in value.get("items", ())]
    match kind:
        case "list":
            return items
        case "full":
            return Full(program.layout.unit(value["unit"]), items)
        case "gradients":
            return Gradients(cast(UnitShards, None), dict(zip(value["names"], items, strict=True)), value["held"])
        case "unit":
            return RecordedUnit(program.layout.unit(value["unit"]), items)
    return None


def read_program(archive: Archive, folder: str) -> Program:
    """A program of a recording, its regions' values laid out as they were when they were traced.

    Raises:
        ReplayError: a file that is missing, damaged or no program, or a region that has no text of its own.
    """
    text, name = archive.text(f"{folder}/program.py"), str(archive.home / folder / "program.py")
    values: Mapping[str, Any] = json.loads(archive.text(f"{folder}/regions.json"))
    for region, about in values.items():
        if about["graphs"]:
            problem = (
                f"{region} calls graphs of its own ({', '.join(about['graphs'])}), which programs have no text for"
            )
            raise ReplayError(name, problem, "compile without what makes them, such as flex_attention or torch.cond")
    try:
        program = parse(text)
    except ParseError as error:
        raise ReplayError(f"{name}, {error.subject}", error.problem, error.fix) from error
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for found in program.regions.values():
        _lay_out(found, values[found.name]["values"], archive.device, mode, name)
    return program


def varying(archive: Archive, folder: str) -> frozenset[str]:
    """The regions of a program that were compiled for any size of some dimension."""
    about = json.loads(archive.text(f"{folder}/regions.json"))
    return frozenset(name for name, one in about.items() if any(value["varies"] for value in _flat(one["values"])))


def _flat(values: Any) -> Iterator[dict[str, Any]]:
    for one in values if isinstance(values, list) else [values]:
        if isinstance(one, list):
            yield from _flat(one)
        elif one is not None:
            yield one


def _lay_out(region: Region, values: Sequence[Any], device: torch.device, mode: FakeTensorMode, name: str) -> None:
    """Give the nodes of a region that was parsed the values that were traced; devices are those of this process."""
    nodes = list(region.printed_nodes())
    if len(nodes) != len(values):
        problem = f"{region.name} has {len(nodes)} values, and {len(values)} were recorded"
        raise ReplayError(name, problem, "record the step again")
    for node, value in zip(nodes, values, strict=True):
        if value is not None:
            node.meta["val"] = _fake(value, device, mode)
    for node in region.graph.nodes:
        node.args, node.kwargs = tree_map_only(
            torch.device, lambda one: one if one.type == "cpu" else device, (node.args, node.kwargs)
        )


def _fake(value: Any, device: torch.device, mode: FakeTensorMode) -> Any:
    if isinstance(value, list):
        return tuple(None if one is None else _fake(one, device, mode) for one in value)
    shape, stride, offset = value["shape"], value["stride"], value["offset"]
    dtype = dtype_named(value["dtype"])
    place = device if torch.device(value["device"]).type != "cpu" else torch.device("cpu")
    with mode:
        if not offset:
            return torch.empty_strided(shape, stride, dtype=dtype, device=place)
        extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return torch.empty(extent, dtype=dtype, device=place).as_strided(shape, stride, offset)
