"""Reports of compiled models, backends of torch.compile and pipelines: programs, timelines, pages, dumps."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from zcompile.cost.hardware import Hardware, load_profile
from zcompile.cost.timeline import Timeline
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.region_cache import generated_code
from zcompile.errors import OptionError, TimelineError
from zcompile.ir.program import Program
from zcompile.recording.recording import rank_folder
from zcompile.report.dumps import check_dump, write_dump, writing
from zcompile.report.program_page import GIVEN, write_page
from zcompile.runtime.device import is_gpu
from zcompile.schedule.pipeline import Journal


class Shown(Protocol):
    """A source of rewritten programs of a model: an engine, or the ranks of a pipeline."""

    hardware: Hardware

    @property
    def programs_along(self) -> Sequence[Program]:
        """In a pipeline, the programs of the ranks along its axis."""

    @property
    def journals(self) -> Sequence[Journal]:
        """What passes did to the programs of this rank."""

    def explain(self) -> str:
        """See `CompiledModule.explain`."""


class Reports:
    """Reports of one model. Creating it raises OptionError on every rank if the dump cannot be written on one."""

    def __init__(self, title: str, runtime: ModelRuntime, shown: Shown) -> None:
        self.title, self.runtime, self.shown = title, runtime, shown
        self.profiled: list[Timeline] = []
        """The steps within the last `profile()`."""
        self.folder = Path(runtime.options.dump) if runtime.options.dump else None
        # Every rank takes part: only the first may know the folder, from its environment.
        first = self.rank == 0
        runtime.agreement.attempt("the folder of the dump", lambda: check_dump(self.folder) if first else None)

    @property
    def rank(self) -> int:
        """This rank among all that have a part of the model."""
        return self.runtime.everyone.communicator.rank

    @property
    def timelines(self) -> list[Timeline]:
        """The last few finished steps, oldest first."""
        rank, world = self.runtime.communicator.rank, self.runtime.communicator.size
        return [
            Timeline.of(step, rank, world) for step in self.runtime.recorder.ended(self.runtime.freshness.version())
        ]

    def dump(
        self,
        folder: str | os.PathLike[str],
        hardware: str | Hardware | None = None,
        *,
        code: bool = False,
        all_ranks: bool = False,
    ) -> Path:
        """See `CompiledModule.dump`."""
        if all_ranks or self.rank == 0:
            chosen, why = self.profile_of(hardware)
            home = rank_folder(Path(folder), self.rank) if all_ranks else Path(folder)
            written = generated_code if code else None
            with writing("dump", folder):
                text = self.shown.explain()
                write_dump(home, self.shown.journals, text, chosen, measured=self.profiled, code=written)
                self.write_page(home / "report.html", chosen, why)
        return Path(folder)

    def write_page(self, path: Path, hardware: Hardware, why: str) -> None:
        shown = self.shown
        write_page(path, self.title, shown.journals, hardware, self.profiled, shown.programs_along, why=why)

    def dump_if_asked(self) -> None:
        """Write the dump that the options ask for, as of now."""
        if self.folder:
            try:
                self.dump(self.folder)
            except OptionError as error:  # on one rank only: raising here would leave the others waiting
                warnings.warn(f"zcompile: the program is not dumped: {error}", stacklevel=3)

    def profile_of(self, hardware: str | Hardware | None) -> tuple[Hardware, str]:
        """The hardware that steps are predicted for, and why."""
        if hardware is None:
            return self.shown.hardware, "taken because no hardware= was given"
        return (load_profile(hardware) if isinstance(hardware, str) else hardware), GIVEN

    @contextlib.contextmanager
    def profile(self) -> Iterator[None]:
        """See `CompiledModule.profile`."""
        recorder, device = self.runtime.recorder, self.runtime.communicator.device
        before, started = recorder.device, time.perf_counter()
        recorder.device = device if is_gpu(device) else before
        try:
            yield
        finally:
            recorder.device = before
        self.profiled = [timeline for timeline in self.timelines if timeline.began >= started]
        if not self.profiled:
            fix = "take a whole step within it: a call, the backward and optimizer.step()"
            raise TimelineError("profile", "no step has begun and ended within it", fix)


class Reported:
    """Mixin for objects with reports: timelines of steps, pages, dumps."""

    def _shown(self) -> Reports:
        """The reports. Raises StateError: there is no program yet."""
        raise NotImplementedError

    @property
    def timeline(self) -> Timeline:
        """Where the time of the last step went: print it, read its fields, `save("trace.json")` it.

        A step begins with the first call of the model after its parameters have changed and lasts until the next step
        begins; if it is read before that, it ends with the last thing recorded. A call without gradients between two
        steps is a step of its own.

        Raises:
            TimelineError: no step has ended so far.
        """
        if not (timelines := self._shown().timelines):
            fix = "read it after optimizer.step(), or after a call without gradients"
            raise TimelineError("timeline", "no step has ended so far", fix)
        return timelines[-1]

    @property
    def timelines(self) -> list[Timeline]:
        """The last four steps at most, oldest first; see `timeline`."""
        return self._shown().timelines

    def record_timeline(self, *, device: bool) -> None:
        """With `device=True`, timelines from the next step on are those of the CUDA stream, not of the host.

        A pair of events is recorded around every line; reading a timeline then waits for the device.

        Raises:
            OptionError: the model is not on a CUDA device.
        """
        runtime = self._shown().runtime
        own = runtime.communicator.device
        if device and not is_gpu(own):
            problem = f"the model is on {own}, where the host's clock is all there is"
            raise OptionError("device", problem, "leave device=True to models on CUDA")
        runtime.recorder.device = own if device else None

    def explain(self) -> str:
        """A page of text: units, bytes, volume against 2Ψ or 3Ψ, predicted peak memory, overlaps, graph breaks."""
        return self._shown().shown.explain()

    def profile(self) -> contextlib.AbstractContextManager[None]:
        """Inside, steps are measured for the traces of `dump()`: `with compiled.profile(): train_one_step()`.

        Of the steps that begin inside, at most the last four are kept. On CUDA, times are those of the stream, as with
        `record_timeline(device=True)`.

        Raises:
            TimelineError: at its end: no step has begun and ended inside.
        """
        return self._shown().profile()

    def report(self, path: str | os.PathLike[str], *, hardware: str | Hardware | None = None) -> Path:
        """Write an HTML page on the programs, for a browser: text, timeline, memory, collectives and passes.

        It is one file, which fetches nothing, written on the mesh's first rank only. Next to the predicted step it
        shows the last one of `with compiled.profile():`, if there was one. `hardware`: as for `dump`.

        Raises:
            OptionError: it cannot be written.
        """
        shown = self._shown()
        if shown.rank == 0:
            chosen, why = shown.profile_of(hardware)
            with writing("report", path):
                shown.write_page(Path(path), chosen, why)
        return Path(path)

    def dump(
        self,
        folder: str | os.PathLike[str],
        *,
        hardware: str | Hardware | None = None,
        code: bool = False,
        all_ranks: bool = False,
    ) -> Path:
        """Write every program under `folder`, on the mesh's first rank only. For its files see `zcompile.report.dumps`.

        Args:
            folder: Created if it is missing; files in it with the same names are overwritten.
            hardware: What predicted times are for: a profile, its name or its path; by default a guess for the device.
            code: Also write Inductor's code for each region, which compiles them again.
            all_ranks: Every rank writes its own, under `folder/rank_0` and so on: `zcompile prove` compares them.

        Raises:
            OptionError: the folder cannot be written.
        """
        return self._shown().dump(folder, hardware, code=code, all_ranks=all_ranks)

    def record(self, folder: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
        """Inside, all inputs and results of programs are recorded in `folder`, for `zcompile replay`.

        On this rank only: each rank that is asked records, and none waits for another. For its cost see docs/replay.md.

        Raises:
            OptionError: the folder cannot be written or has files that belong to no recording; or one is being made.
        """
        return self._shown().runtime.recordings.into(folder)
