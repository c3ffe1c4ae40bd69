"""Recording: programs run with a copy of what their lines give, in a folder that `zcompile replay` reads.

A folder has, for each rank that records,

    rank_0/
        recording.json              what ran, on what, by which versions; checksums of the other texts
        run_000_forward.json        a run, call by call: digests of what each gave; states of random generators
        run_001_backward.json
        programs/2f6c.../
            program.py              the program with its units and regions: `zcompile.parse` reads it
            forward.py backward.py  the text that runs
            regions.json            what the text of regions leaves out: strides and devices
        values/9b1e....bin          bytes of what cannot be computed again: inputs, what communications received

`recording.json` is written anew behind each run, so that what has run is there whatever happens next.
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
"""Operations whose results come from outside of the program. They are kept in full; others are computed again."""
Line = Callable[..., Any]


@dataclass(frozen=True)
class Recorded:
    """A phase that can be recorded: its program, what it calls, and how many of what it unboxes is what."""

    program: Program
    phase: Phase
    regions: Mapping[str, Line]
    lent: Collection[int]
    """The places in its box of memory and storage that it is lent."""


@dataclass(frozen=True)
class Origin:
    """Where a recording is made."""

    rank: int
    data_rank: int
    """Among the ranks that share parameters, by which their rows are divided."""
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
    """The folder of one rank, while it is filled.

    Raises:
        OptionError: the folder cannot be written, or has files that are no recording's.
    """

    def __init__(self, folder: str | os.PathLike[str], origin: Origin) -> None:
        self.home, self.origin = rank_folder(Path(folder), origin.rank), origin
        self.has_ended = False
        self._about = origin.described()
        self._files: dict[str, str] = {}
        self._runs: list[dict[str, Any]] = []
        self._kept: set[str] = set()
        self._made: dict[object, str] = {}
        """Where values of earlier runs come from that replay computes again, by their keys."""
        try:
            self._begin()
        except OSError as error:
            problem = f"is {os.fspath(folder)!r}, which cannot be written: {error.strerror or error}"
            raise OptionError("record", problem, "give another folder") from error

    def _begin(self) -> None:
        if self.home.exists():
            if any(self.home.iterdir()) and not (self.home / INDEX).exists():
                problem = f"{str(self.home)!r} has files that are no recording's, which would be deleted"
                raise OptionError("record", problem, "give another folder, or empty this one")
            shutil.rmtree(self.home)
        (self.home / "values").mkdir(parents=True)
        self._write_index()

    def loaded(self, part: Recorded) -> Callable[[list[Any]], Any]:
        """The text of a phase as a function that leaves here what its lines give."""
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
        """What is known of a tensor whose bytes are kept, unless replay computes them in an earlier run."""
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
        """Write the texts of a program, once; gives the name of its folder."""
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
        """Write the index whole or not at all: a process that is killed leaves the one before."""
        index = json.dumps({**self._about, "runs": self._runs, "files": self._files})
        temporary = self.home / f"{INDEX}.new"
        temporary.write_text(json.dumps({"checksum": digest_of(index.encode()), "index": index}))
        temporary.replace(self.home / INDEX)

    def _guarded(self, write: Callable[[], object]) -> None:
        """Call `write`; where it fails the recording ends, and training goes on: other ranks wait for this one."""
        try:
            write()
        except OSError as error:
            self.has_ended = True
            warnings.warn(f"zcompile: the recording in {self.home} ends here: {error}", stacklevel=2)


@dataclass
class Run:
    """A phase while it runs and is recorded."""

    recording: Recording
    part: Recorded
    name: str
    generators: list[Described] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    made: dict[object, str] = field(default_factory=dict)
    """Where replay computes which values again, by their keys."""
    raised: str = ""

    def load(self) -> Callable[[list[Any]], Any]:
        """Its text as a function. Nothing of the one that runs unrecorded is touched."""
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

    def _received(self, operation: str, result: torch.Tensor) -> Described:
        """What a collective within a region gave: in full behind its wait, before that only how it is laid out."""
        if operation == "wait_tensor":
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
            # Gradients of shards in the host's memory are on their way there, on a stream of their own.
            result.shards.memory.landed()
        if name == "unbox":
            lent = self.part.lent
            result = [None if place in lent else value for place, value in enumerate(result)]
        call: dict[str, Any] = {"function": name, "gives": described(result, noted)}
        self.calls.append({**call, "inside": inside} if inside else call)

    def described(self) -> dict[str, Any]:
        return {"generators": self.generators, "calls": self.calls}


class Recordings:
    """Whether the runs of a model are recorded, and where; `folder`: for a recording of the first step of training."""

    def __init__(self, folder: str | os.PathLike[str] | None, origin: Origin) -> None:
        self.origin = origin
        self.current: Recording | None = None
        """What runs are recorded in; programs look at it once a run, and run as ever where there is none."""
        self._first = None if folder is None else Recording(folder, origin)
        self._version: int | None = None

    def begin_call(self, version: int, *, trains: bool) -> None:
        """The model is called, with parameters of this `version`: the first step of training begins, or has ended."""
        if self._first is None:
            return
        if self._version is None and trains:
            self._version, self.current = version, self._first
        elif self._version not in (None, version):
            self._end_first()

    @contextlib.contextmanager
    def into(self, folder: str | os.PathLike[str]) -> Iterator[None]:
        """Record all runs inside; raise OptionError while another recording is being made."""
        self._end_first()
        if self.current is not None:
            problem = f"one is being made in {self.current.home}"
            raise OptionError("record", problem, "end that first: leave its `with`")
        self.current = Recording(folder, self.origin)
        try:
            yield
        finally:
            self.current = None

    def _end_first(self) -> None:
        """The recording of the first step is complete, or another one is to begin."""
        if self.current is self._first:
            self.current = None
        self._first = None


def rank_folder(folder: Path, rank: int) -> Path:
    """Where the recording of a rank is."""
    return folder / f"rank_{rank}"


def described_region(region: Region) -> dict[str, Any]:
    """What the text of a region leaves out: what its values were when they were traced, in the order of `traced`."""
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
"""How each is read and set."""


def numerics() -> dict[str, Any]:
    """The settings of this process, as JSON."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


@contextlib.contextmanager
def with_numerics(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the process has the settings of another one; afterwards its own."""
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
    """What computes on `device`: kernels choose what they do by it."""
    return describe(device.index or 0) if is_gpu(device) else torch.backends.cpu.get_cpu_capability()
