"""What is shown of a model's programs: methods that compiled models and pipelines have in common."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from zcompile.cost.hardware import Hardware
from zcompile.cost.timeline import Timeline
from zcompile.engine.reports import Reports


class Reported:
    """Programs that are shown: timelines of their steps, pages, dumps."""

    def _shown(self) -> Reports:
        """What shows them.

        Raises:
            StateError: there is no program yet.
        """
        raise NotImplementedError

    @property
    def timeline(self) -> Timeline:
        """Where the time of the last step went: print it, read its fields, `save("trace.json")` it.

        A step begins with the first call of the model after its parameters have changed and lasts until the next one;
        read before there is a next one, it ends with the last thing that was recorded. A call without gradients
        between two steps is a step of its own.

        Raises:
            TimelineError: no step has ended so far.
        """
        return self._shown().timeline

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
        self._shown().record_timeline(device=device)

    def explain(self) -> str:
        """A page of text: units, bytes, volume against 2Ψ or 3Ψ, predicted peak memory, overlaps, graph breaks."""
        return self._shown().explain()

    def profile(self) -> contextlib.AbstractContextManager[None]:
        """Within this, steps are measured for the traces of `dump()`: `with compiled.profile(): train_one_step()`.

        Of at most the last four steps that begin within it. On CUDA times are those of the stream, as with
        `record_timeline(device=True)`.

        Raises:
            TimelineError: at its end: no step has begun and ended within it.
        """
        return self._shown().profile()

    def report(self, path: str | os.PathLike[str], *, hardware: str | Hardware | None = None) -> Path:
        """Write a page of HTML on the programs, for a browser: text, timeline, memory, collectives and passes.

        It is one file, which fetches nothing; on the mesh's first rank only. Beside the predicted step stands the last
        one of `with compiled.profile():`, if there was one. `hardware`: as for `dump`.

        Raises:
            OptionError: it cannot be written.
        """
        return self._shown().report(path, hardware)

    def dump(
        self,
        folder: str | os.PathLike[str],
        *,
        hardware: str | Hardware | None = None,
        code: bool = False,
        all_ranks: bool = False,
    ) -> Path:
        """Write every program under `folder`, on the mesh's first rank only. What lies there: `zcompile.report.dumps`.

        Args:
            folder: It is made if it is not there; files in it of the same names are written over.
            hardware: What predicted times are for: a profile, its name or its path; by default a guess for the device.
            code: Also write what Inductor makes of each region, which compiles them again.
            all_ranks: Every rank writes its own, under `folder/rank_0` and so on: `zcompile prove` compares them.

        Raises:
            OptionError: the folder cannot be written.
        """
        return self._shown().dump(folder, hardware, code=code, all_ranks=all_ranks)

    def record(self, folder: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
        """Within this, all that programs are given and receive is kept in `folder`, for `zcompile replay`.

        On this rank alone: each rank that is asked records, and none waits for another. What it costs: docs/replay.md.

        Raises:
            OptionError: the folder cannot be written, has files that are no recording's; or one is being made.
        """
        return self._shown().runtime.recordings.into(folder)
