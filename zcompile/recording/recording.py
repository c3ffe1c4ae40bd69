"""Recording: run programs and copy the results of their lines to a folder that `zcompile replay` reads.

The folder has, for each rank that records,

    rank_0/
        recording.json              the runs, device and versions; checksums of the other text files
        run_000_forward.json        a run, call by call: digests of all results; states of random generators
        run_001_backward.json
        programs/2f6c.../
            program.py              the program with its units and regions, for `zcompile.parse`
            forward.py backward.py  the text that runs
            regions.json            strides and devices, which the text of regions lacks
        values/9b1e....bin          bytes of values that cannot be recomputed: inputs, results of communications

`recording.json` is rewritten after each run, so that finished runs can be replayed whatever happens next.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zcompile.errors import OptionError
from zcompile.ir.operation import Phase
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.recording.values import Described, Tensor, described, described_fake, digest_of
from zcompile.runtime.device import Setting, describe, generators_of, is_gpu, kernel_settings, setting_of
from zcompile.runtime.executor import OPERATIONS, Gradients
from zcompile.runtime.loader import load
from zcompile.torch_internals.operators import CollectiveCalls, is_collective

FORMAT = 1
INDEX = "recording.json"
GIVEN = frozenset({"unbox", "wait", "offload"})
"""Operations whose results come from outside of the program. These are kept in full; others are recomputed."""
Line = Callable[..., Any]


@dataclass(frozen=True)
class Recorded:
    """A phase that can be recorded, and what it needs to run."""

    program: Program
    phase: Phase
    regions: Mapping[str, Line]
    lent: Collection[int]
    """Indices in its box of borrowed memory and storage, which are not recorded."""


@dataclass(frozen=True)
class Origin:
    """The rank, backend and device of a recording."""

    rank: int
    data_rank: int
    """Rank among those that shard the parameters, which determines its rows."""
    backend: str
    device: torch.device

    def described(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "zcompile": metadata.version("zcompile"),
            "torch": torch.__version__,
            "rank": self.rank,
            "data_rank": self.data_rank,
            "backend": self.backend,
            "device": str(self.device),
            "processor": processor(self.device),
            "numerics": numerics(),
        }


class Recording:
    """A recording of one rank that is being written.

    Raises:
        OptionError: the folder cannot be written, or has files that are not of a recording.
    """

    def __init__(self, folder: str | os.PathLike[str], origin: Origin) -> None:
        self.home, self.origin = rank_folder(Path(folder), origin.rank), origin
        self.has_ended = False
        self._about = origin.described()
        self._files: dict[str, str] = {}
        self._runs: list[dict[str, Any]] = []
        self._kept: set[str] = set()
        self._made: dict[object, str] = {}
        """The places ("RUN CALL ITEM") of values that a replay recomputes in earlier runs, by key."""
        try:
            self._begin()
        except OSError as error:
            problem = f"is {os.fspath(folder)!r}, which cannot be written: {error.strerror or error}"
            raise OptionError("record", problem, "give another folder") from error

    def _begin(self) -> None:
        if self.home.exists():
            if any(self.home.iterdir()) and not (self.home / INDEX).exists():
                problem = f"{str(self.home)!r} has files that are not of a recording, which would be deleted"
                raise OptionError("record", problem, "give another folder, or empty this one")
            shutil.rmtree(self.home)
        (self.home / "values").mkdir(parents=True)
        self._write_index()

    def loaded(self, part: Recorded) -> Callable[[list[Any]], Any]:
        """The text of a phase as a function that records the results of its lines."""
        return functools.partial(self._run, part)

    def _run(self, part: Recorded, box: list[Any]) -> Any:
        made = Run(self, part, f"run_{len(self._runs):03}_{part.phase}")
        try:
            made.generators = [self.kept(one.get_state()).described() for one in generators_of(self.origin.device)]
            result = made.load()(box)
        except BaseException as error:
            made.raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._write(made)
        return result

    # -- what is written ------------------------------------------------------------------------------------------

    def kept(self, value: torch.Tensor) -> Tensor:
        """Keep the bytes of a tensor, unless a replay recomputes them in an earlier run; returns its description."""
        noted, content = Tensor.of(value)
        if noted.key in self._made:
            return replace(noted, place=self._made[noted.key])
        if noted.digest not in self._kept and not self.has_ended:
            self._guarded(lambda: (self.home / "values" / f"{noted.digest}.bin").write_bytes(content))
            self._kept.add(noted.digest)
        return replace(noted, place="file")

    def _write(self, run: Run) -> None:
        if not self.has_ended:
            self._guarded(lambda: self._write_run(run))

    def _write_run(self, run: Run) -> None:
        program = self._write_program(run.part)
        self._text(f"{run.name}.json", json.dumps(run.described()))
        self._runs.append({"name": run.name, "phase": str(run.part.phase), "program": program, "raised": run.raised})
        self._made = {**run.made, **self._made}
        self._write_index()

    def _write_program(self, part: Recorded) -> str:
        """Write the texts of a program once; returns the name of its folder."""
        text = part.program.text(regions=True)
        name = f"programs/{digest_of(text.encode())[:12]}"
        if f"{name}/program.py" not in self._files:
            (self.home / name).mkdir(parents=True)
            self._text(f"{name}/program.py", text)
            regions = {one: described_region(region) for one, region in part.program.regions.items()}
            self._text(f"{name}/regions.json", json.dumps(regions))
        if f"{name}/{part.phase}.py" not in self._files:
            self._text(f"{name}/{part.phase}.py", part.program.phase(part.phase).text())
        return name

    def _text(self, name: str, text: str) -> None:
        content = text.encode()
        (self.home / name).write_bytes(content)
        self._files[name] = digest_of(content)

    def _write_index(self) -> None:
        """Write the index atomically: if the process is killed, the previous index remains."""
        index = json.dumps({**self._about, "runs": self._runs, "files": self._files})
        temporary = self.home / f"{INDEX}.new"
        temporary.write_text(json.dumps({"checksum": digest_of(index.encode()), "index": index}))
        temporary.replace(self.home / INDEX)

    def _guarded(self, write: Callable[[], object]) -> None:
        """Call `write`. If it fails, end the recording but not training, since other ranks wait for this one."""
        try:
            write()
        except OSError as error:
            self.has_ended = True
            warnings.warn(f"zcompile: the recording in {self.home} ends here: {error}", stacklevel=2)


@dataclass
class Run:
    """A run of a phase that is being recorded."""

    recording: Recording
    part: Recorded
    name: str
    generators: list[Described] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    made: dict[object, str] = field(default_factory=dict)
    """The places ("RUN CALL ITEM") of values that a replay recomputes in this run, by key."""
    raised: str = ""

    def load(self) -> Callable[[list[Any]], Any]:
        """Load its text as a recording function, separate from the one that runs without recording."""
        operations = {name: self._recorded(name, function) for name, function in OPERATIONS.items()}
        regions = {
            name: self._recorded(name, run, collective=_communicates(self.part.program.regions[name]))
            for name, run in self.part.regions.items()
        }
        text = self.part.program.phase(self.part.phase).text()
        return load(text, str(self.part.phase), regions, f"<zcompile {self.name}>", operations=operations)

    def _recorded(self, name: str, function: Line, *, collective: bool = False) -> Line:
        def line(*args: Any, **kwargs: Any) -> Any:
            if not collective:
                result = function(*args, **kwargs)
                self._keep(name, result, [])
                return result
            with CollectiveCalls(self._received) as seen:
                result = function(*args, **kwargs)
            self._keep(name, result, seen.results)
            return result

        return line

    def _received(self, known: bool, result: torch.Tensor) -> Described:
        """Describe a result of a collective within a region: in full once it is known, before that only its layout."""
        if known:
            return self.recording.kept(result).described()
        shape, stride = list(map(int, result.shape)), list(map(int, result.stride()))
        return {"kind": "pending", "dtype": str(result.dtype).removeprefix("torch."), "shape": shape, "stride": stride}

    def _keep(self, name: str, result: Any, inside: list[Any]) -> None:
        if self.recording.has_ended:
            return
        number, items = len(self.calls), iter(range(1 << 62))

        def noted(value: torch.Tensor) -> Tensor:
            item = next(items)
            if name in GIVEN:
                return self.recording.kept(value)
            made, _ = Tensor.of(value)
            self.made.setdefault(made.key, f"{self.name} {number} {item}")
            return made

        if isinstance(result, Gradients):
            # Hazard: with shards on the host, gradients are still being copied there, on another stream. Wait for it.
            result.shards.memory.landed()
        if name == "unbox":
            lent = self.part.lent
            result = [None if place in lent else value for place, value in enumerate(result)]
        call: dict[str, Any] = {"function": name, "gives": described(result, noted)}
        self.calls.append({**call, "inside": inside} if inside else call)

    def described(self) -> dict[str, Any]:
        return {"generators": self.generators, "calls": self.calls}


class Recordings:
    """The recordings of a model's runs. `folder`: record the first training step there."""

    def __init__(self, folder: str | os.PathLike[str] | None, origin: Origin) -> None:
        self.origin = origin
        self.current: Recording | None = None
        """The recording to which runs are added; None for no recording. Programs read it once per run."""
        self._first = None if folder is None else Recording(folder, origin)
        self._version: int | None = None

    def begin_call(self, version: int, *, trains: bool) -> None:
        """Note a call of the model: the first training step begins, or, with another `version` of parameters, ends."""
        if self._first is None:
            return
        if self._version is None and trains:
            self._version, self.current = version, self._first
        elif self._version not in (None, version):
            self._end_first()

    @contextlib.contextmanager
    def into(self, folder: str | os.PathLike[str]) -> Iterator[None]:
        """Record all runs within the context. Raises OptionError if another recording is active."""
        self._end_first()
        if self.current is not None:
            problem = f"another recording is active in {self.current.home}"
            raise OptionError("record", problem, "leave its `with` block first")
        self.current = Recording(folder, self.origin)
        try:
            yield
        finally:
            self.current = None

    def _end_first(self) -> None:
        """End the recording of the first step: it is complete, or another recording begins."""
        if self.current is self._first:
            self.current = None
        self._first = None


def rank_folder(folder: Path, rank: int) -> Path:
    """The folder of a rank's recording."""
    return folder / f"rank_{rank}"


def described_region(region: Region) -> dict[str, Any]:
    """What the text of a region lacks: layouts of its traced values, in the order of `printed_nodes`; its subgraphs."""
    fakes = [described_fake(node.meta.get("val")) for node in region.printed_nodes()]
    return {"values": fakes, "graphs": sorted(region.modules)}


def _communicates(region: Region) -> bool:
    return any(is_collective(node.target) for node in region.graph.nodes)


SETTINGS: Mapping[str, Setting] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": setting_of(torch.backends.mkldnn, "enabled"),
    **kernel_settings(),
}
"""Process-wide settings that affect numerical results: functions to read and to set each."""


def numerics() -> dict[str, Any]:
    """The current values of `SETTINGS`, as JSON."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


@contextlib.contextmanager
def with_numerics(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Apply recorded settings within the context, and restore the process's own afterwards."""
    before = numerics()
    try:
        _set(wanted, before)
        yield
    finally:
        _set(before, numerics())


def _set(wanted: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if name in SETTINGS and now[name] != value:
            SETTINGS[name][1](value)


def processor(device: torch.device) -> str:
    """The processor of `device`, on which kernels' numerical results may depend."""
    return describe(device.index or 0) if is_gpu(device) else torch.backends.cpu.get_cpu_capability()
