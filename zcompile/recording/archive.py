"""Read a recording: its programs and values. Each file is compared with its checksum, and errors name the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

from zcompile.errors import ParseError, ReplayError
from zcompile.ir.operation import Phase
from zcompile.ir.parser import parse
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.recording.recording import FORMAT, INDEX, rank_folder
from zcompile.recording.values import Described, RecordedUnit, Tensor, digest_of, dtype_named
from zcompile.runtime.executor import Gradients
from zcompile.runtime.shards import Full, UnitShards
from zcompile.torch_internals.pytree import tree_map_only
from zcompile.torch_internals.sizes import FakeTensorMode, empty_laid_out


def damaged(subject: str | Path, problem: str) -> ReplayError:
    """The error for an unusable part of a recording."""
    return ReplayError(str(subject), problem, "record the step again")


@dataclass(frozen=True)
class ArchivedRun:
    """A run in the index."""

    name: str
    phase: Phase
    program: str
    """The folder of its program."""
    raised: str
    """The error that ended it; empty if it finished."""


class Archive:
    """The recording of one rank.

    Raises:
        ReplayError: there is no recording, or its index is damaged or of other versions.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.home = rank_folder(folder, rank)
        if not (self.home / INDEX).exists():
            raise ReplayError(str(self.home / INDEX), "does not exist", _other_ranks(folder))
        self.about = self._index()
        self._check_versions()

    def _index(self) -> dict[str, Any]:
        path = self.home / INDEX
        try:
            outer = json.loads(path.read_text())
            index: str = outer["index"]
            if digest_of(index.encode()) != outer["checksum"]:
                raise damaged(path, "was edited: its checksum does not match")
            found: dict[str, Any] = json.loads(index)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise damaged(path, f"is not the index of a recording: {error}") from error
        return found

    def _check_versions(self) -> None:
        here = {"format": FORMAT, "zcompile": metadata.version("zcompile"), "torch": torch.__version__}
        for name, version in here.items():
            if (recorded := self.about.get(name)) != version:
                problem = f"was recorded with {name} {recorded}, and this is {version}"
                fix = f"replay it with {name} {recorded}: other versions compute other bits"
                raise ReplayError(str(self.home), problem, fix)

    @cached_property
    def runs(self) -> list[ArchivedRun]:
        """The runs in order. Raises ReplayError if there are none."""
        found = [ArchivedRun(**{**run, "phase": Phase(run["phase"])}) for run in self.about["runs"]]
        if not found:
            fix = "record a call of the model: `record=` waits for the first training call"
            raise ReplayError(str(self.home / INDEX), "has no runs: nothing ran during the recording", fix)
        return found

    @property
    def device(self) -> torch.device:
        """The device for the replay, of the recorded kind. Raises ReplayError if there is none."""
        recorded = torch.device(self.about["device"])
        if recorded.type == "cpu":
            return recorded
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != recorded.type:
            problem = f"was recorded on {self.about['processor']} ({recorded}), and there is no such device here"
            raise ReplayError(str(self.home), problem, "replay it on a machine with such a device")
        return torch.device(recorded.type, torch.accelerator.current_device_index())

    def text(self, name: str) -> str:
        """A text file of the recording. Raises ReplayError if it is missing, truncated or edited."""
        return self._content(self.home / name, self.about["files"].get(name)).decode()

    def _content(self, path: Path, digest: str | None) -> bytes:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}") from error
        if digest_of(content) != digest:
            raise damaged(path, f"was truncated or edited: the checksum of its {len(content)} bytes does not match")
        return content

    def calls(self, run: ArchivedRun) -> dict[str, Any]:
        """The record of a run: states of random generators before it, and its calls."""
        text = self.text(f"{run.name}.json")
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise damaged(self.home / f"{run.name}.json", f"is not the record of a run: {error}") from error
        return found

    def tensor(self, noted: Tensor) -> torch.Tensor:
        """A tensor whose bytes were kept. Raises ReplayError if they are missing or do not match their digest."""
        content = self._content(self.home / "values" / f"{noted.digest}.bin", noted.digest)
        device = torch.device(noted.device)
        return noted.made(content, device if device.type == "cpu" else self.device)

    def described(self) -> str:
        """A description in one line."""
        about, runs = self.about, len(self.about["runs"])
        return (
            f"rank {about['rank']}: {runs} run{'s' * (runs != 1)}, {about['backend']} on {about['device']} "
            f"({about['processor']}), {about['numerics']['threads']} threads, torch {about['torch']}"
        )


def ranks_of(folder: Path) -> list[int]:
    """The ranks with recordings in a folder."""
    found = folder.glob(f"rank_*/{INDEX}")
    return sorted(int(path.parent.name.removeprefix("rank_")) for path in found if path.parent.name[5:].isdigit())


def _other_ranks(folder: Path) -> str:
    ranks = ranks_of(folder)
    if not ranks:
        return "give the folder of zcompile.compile(..., record=FOLDER) or compiled.record(FOLDER)"
    shown = ", ".join(map(str, ranks[:12])) + (", ..." if len(ranks) > 12 else "")
    return f"there are recordings of ranks {shown}"


# -- values and programs made again -----------------------------------------------------------------------------------


Find = Callable[[Tensor], torch.Tensor]


def rebuilt(value: Described, program: Program, find: Find) -> Any:
    """Rebuild a recorded value; `find` returns the tensors."""
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
    """Parse a recorded program, and restore the layouts of its regions' traced values. Raises ReplayError."""
    text, name = archive.text(f"{folder}/program.py"), str(archive.home / folder / "program.py")
    values: Mapping[str, Any] = json.loads(archive.text(f"{folder}/regions.json"))
    for region, about in values.items():
        if about["graphs"]:
            problem = f"{region} calls subgraphs ({', '.join(about['graphs'])}), which have no text in programs"
            raise ReplayError(name, problem, "record without higher-order operations: flex_attention, torch.cond")
    try:
        program = parse(text)
    except ParseError as error:
        raise ReplayError(f"{name}, {error.subject}", error.problem, error.fix) from error
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for found in program.regions.values():
        _lay_out(found, values[found.name]["values"], archive.device, mode, name)
    return program


def varying(archive: Archive, folder: str) -> frozenset[str]:
    """The regions of a program that were compiled with dynamic sizes."""
    about = json.loads(archive.text(f"{folder}/regions.json"))
    return frozenset(name for name, one in about.items() if any(value["varies"] for value in _flat(one["values"])))


def _flat(values: Any) -> Iterator[dict[str, Any]]:
    for one in values if isinstance(values, list) else [values]:
        if isinstance(one, list):
            yield from _flat(one)
        elif one is not None:
            yield one


def _lay_out(region: Region, values: Sequence[Any], device: torch.device, mode: FakeTensorMode, name: str) -> None:
    """Give the nodes of a parsed region fake values with the recorded layouts, on the devices of this process."""
    nodes = list(region.printed_nodes())
    if len(nodes) != len(values):
        problem = f"{region.name} has {len(nodes)} values, and {len(values)} were recorded"
        raise damaged(name, problem)
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
        return empty_laid_out(shape, stride, offset, dtype, place)
