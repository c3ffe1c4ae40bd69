"""Checks that the communications of all ranks fit together, whether or not they run the same program.

    rank 0                                      rank 1
    h_sent = send(h, pp, to=1)  # f32[8, 64]    h_recv = recv(pp, source=0)  # f32[8, 64]
    wait(h_sent)                                h = wait(h_recv)

- The ranks of a group, which differ along one axis alone, launch the same collectives in the same order.
- A rank receives exactly the messages that another sends to it: the same number, types and order.
- Ranks do not deadlock. A launch does not block; a wait blocks until all participants have launched.

Backends execute the communications of a group in launch order, so each one completes once all participants have
launched it. The two directions between a pair of ranks count as separate groups: the runtime gives each its own group,
or launches both together. Under these rules, the relative speed of ranks does not matter: either they always finish or
never. So a single run through all events is a proof, in time linear in their number.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zcompile.errors import ProofError
from zcompile.proof.checker_texts import file_text
from zcompile.proof.rank_events import PHASES, Act, RankEvent, RankEvents, read_events

Ranks = Mapping[int, RankEvents]
_SUBJECT = "the ranks' communications"
_FIX = "make all participants launch the same communications, in one order: see docs/design.md"


def check_ranks(ranks: Ranks) -> None:
    """Check that the communications of all ranks, by their rank in the mesh, fit together.

    Raises:
        ProofError: they do not; names the first conflict, its ranks and lines, and what each rank launches.
    """
    if problem := first_conflict(ranks):
        raise ProofError(_SUBJECT, problem, _FIX)


def first_conflict(ranks: Ranks) -> str:
    """Return the first conflict, as in the error of `check_ranks`; "" if the communications fit together.

    Raises:
        ProofError: a rank communicates with a rank that is missing.
    """
    if problem := _meshes(ranks):
        return problem
    streams = _streams(ranks)
    differences = [found for stream in streams if (found := stream.difference(ranks))]
    if differences:
        return min(differences)[1]
    return _circle(ranks, streams)


def conflict_along(texts: Sequence[str], *axes: str) -> str:
    """Return `first_conflict` of ranks that differ only along some axes, considering only these axes.

    Args:
        texts: The result of `Program.text(regions=True)` on each of these ranks, in order.
        axes: The names of the axes.

    Raises:
        ProofError: a text cannot be read.
    """
    return first_conflict({rank: read.along(*axes) for rank, read in _read_texts(dict(enumerate(texts))).items()})


def check_texts(texts: Mapping[int, str]) -> None:
    """Run `check_ranks` on texts printed by `Program.text(regions=True)`, by rank.

    Raises:
        ProofError: as for `check_ranks`, or a text cannot be read.
    """
    check_ranks(_read_texts(texts))


def check_folders(folders: Mapping[int, Path]) -> None:
    """Run `check_ranks` on the n-th programs in the dumps of all ranks, for each n.

    A folder holds a whole dump, or a single program.

    Raises:
        ProofError: as for `check_ranks`, or a folder is not a dump.
    """
    programs = {rank: _programs(rank, Path(folder)) for rank, folder in folders.items()}
    for number, row in enumerate(itertools.zip_longest(*programs.values())):
        found = dict(zip(programs, row, strict=True))
        if lacking := [rank for rank, folder in found.items() if folder is None]:
            having = next(rank for rank, folder in found.items() if folder is not None)
            raise ProofError(_SUBJECT, f"rank {having} has program {number}, {_named(lacking)} not", _FIX)
        try:
            check_ranks({rank: _read(rank, _sources(rank, folder)) for rank, folder in found.items() if folder})
        except ProofError as error:
            raise ProofError(f"program {number}: {error.subject}", error.problem, error.fix) from error


def lacking_ranks(folders: Mapping[int, Path]) -> list[int]:
    """Return the ranks of the mesh, as given by the first dump, that have no folder.

    Raises:
        ProofError: the first folder is not a dump.
    """
    first, folder = next(iter(folders.items()))
    axes = _read(first, _sources(first, _programs(first, Path(folder))[0])).axes
    return [rank for rank in range(math.prod(axis.size for axis in axes.values())) if rank not in folders]


# -- dumps ------------------------------------------------------------------------------------------------------------


def _programs(rank: int, folder: Path) -> list[Path]:
    """Return the folders of a dump's programs, in order."""
    if (folder / "forward.py").exists():
        return [folder]
    found = [path for path in folder.glob("program_*") if path.name.removeprefix("program_").isdigit()]
    if not found:
        raise ProofError(f"rank {rank}: {folder}", "is not a dump: it has no program", "give folders written by dump=")
    return sorted(found, key=lambda path: int(path.name.removeprefix("program_")))


def _sources(rank: int, folder: Path) -> dict[str, str]:
    """Return the texts of a program by file: its phases, its regions, and the head of the last pass's file."""
    passes = sorted(folder.glob("[0-9][0-9]_*.py")) or [folder / "00_capture.py"]
    last = _text(rank, passes[-1])
    begin = re.search(r"^(@|def )", last, re.MULTILINE)
    phases = [phase for phase in PHASES if re.search(rf"^def {phase}\(", last, re.MULTILINE)]
    regions = sorted(path for path in folder.glob("regions/region_*.py") if not path.name.endswith(".inductor.py"))
    files = [*(folder / f"{phase}.py" for phase in phases), *regions]
    texts = {str(path.relative_to(folder)): _text(rank, path) for path in files}
    for phase in phases:
        if not re.search(rf"^def {phase}\(", texts[f"{phase}.py"], re.MULTILINE):
            raise ProofError(f"rank {rank}: {folder / phase}.py", f"has no function {phase}", "dump the program again")
    return {**texts, passes[-1].name: last[: begin.start()] if begin else last}


def _text(rank: int, path: Path) -> str:
    try:
        return file_text(path)
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ProofError(f"rank {rank}: {path}", f"cannot be read: {problem}", "dump the program again") from error


def _read_texts(texts: Mapping[int, str]) -> dict[int, RankEvents]:
    """Return the events of each rank; equal texts, as of ranks that differ only in data, are read once."""
    read: dict[str, RankEvents] = {}
    for rank, text in texts.items():
        if text not in read:
            read[text] = _read(rank, {"": text})
    return {rank: read[text] for rank, text in texts.items()}


def _read(rank: int, sources: Mapping[str, str]) -> RankEvents:
    try:
        return read_events(sources)
    except ProofError as error:
        raise ProofError(f"rank {rank}, {error.subject}", error.problem, error.fix) from error


# -- streams ----------------------------------------------------------------------------------------------------------


@dataclass
class _Stream:
    """The messages of one group, or from one rank to another: the event numbers of each participant's launches."""

    over: str
    launches: dict[int, list[int]] = field(default_factory=dict)

    def difference(self, ranks: Ranks) -> tuple[int, str] | None:
        """Return the first message that differs, after the least event number at which a rank launches it, or None."""
        for number, row in enumerate(itertools.zip_longest(*self.launches.values())):
            found = dict(zip(self.launches, row, strict=True))
            events = {rank: None if at is None else ranks[rank].events[at] for rank, at in found.items()}
            if len({event and event.what for event in events.values()}) > 1:
                first = min(at for at in found.values() if at is not None)
                return first, f"message {number + 1} {self.over} differs: {_wanted(events)}"
        return None


def _streams(ranks: Ranks) -> list[_Stream]:
    streams: dict[tuple[str, int, int], _Stream] = {}
    for rank, events in ranks.items():
        for number, event in enumerate(events.events):
            if event.act is Act.WAIT:
                continue
            group = list(events.axes[event.axis].ranks(rank))
            first, last = group[0], group[-1]
            over = f"over {event.axis}"
            if event.act is not Act.JOIN:
                peer = _peer(rank, event, group)
                first, last = (rank, peer) if event.act is Act.SEND else (peer, rank)
                group, over = [first, last], f"from rank {first} to rank {last} over {event.axis}"
            key = (event.axis, first, last if event.act is not Act.JOIN else -1)
            stream = streams.get(key)
            if stream is None:
                _present(ranks, rank, group, event)
                stream = streams[key] = _Stream(over, {member: [] for member in group})
            stream.launches[rank].append(number)
    return list(streams.values())


def _peer(rank: int, event: RankEvent, group: list[int]) -> int:
    """Return the rank that an event sends to or receives from."""
    if event.peer is None or not 0 <= event.peer < len(group) or group[event.peer] == rank:
        places = f"{len(group)} places along {event.axis}, of which this is {group.index(rank)}"
        raise ProofError(f"rank {rank}, {event.where}", f"{event.act} {event.peer}, and there are {places}", _FIX)
    return group[event.peer]


def _present(ranks: Ranks, rank: int, group: list[int], event: RankEvent) -> None:
    if lacking := [member for member in group if member not in ranks]:
        problem = f"{event.act} {event.what!r} with {_named(lacking)}, whose text is missing"
        raise ProofError(
            f"rank {rank}, {event.where}", problem, "give the texts of all ranks: compiled.dump(folder, all_ranks=True)"
        )


def _meshes(ranks: Ranks) -> str:
    """Return how the meshes of ranks, and so their groups, differ; "" if they do not."""
    by_mesh: dict[str, list[int]] = {}
    for rank, events in ranks.items():
        by_mesh.setdefault(events.mesh, []).append(rank)
    meshes = "; ".join(f"{_named(members)}: {mesh}" for mesh, members in by_mesh.items())
    return f"they are over different groups: {meshes}" if len(by_mesh) > 1 else ""


def _wanted(events: Mapping[int, RankEvent | None]) -> str:
    """Return what each rank launches: ranks with equal messages together, with the line of one of them."""
    by_want: dict[str, list[int]] = {}
    for rank, event in events.items():
        want = "nothing more" if event is None else f"{event.act} " * (event.act is not Act.JOIN) + repr(event.what)
        by_want.setdefault(want, []).append(rank)
    texts = []
    for want, members in by_want.items():
        event = events[members[0]]
        texts.append(f"{_named(members)}: {want}" + (f" ({event.where}: `{event.text}`)" if event else ""))
    return "; ".join(texts)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}"


# -- waits ------------------------------------------------------------------------------------------------------------


class _Run:
    """A run through the events of all ranks, in which each rank proceeds as far as it can.

    Args:
        ranks: The events of all ranks.
        streams: Their messages, which are equal for all participants.
    """

    def __init__(self, ranks: Ranks, streams: list[_Stream]) -> None:
        self.ranks = ranks
        self.launched_by: list[dict[int, int]] = []
        """For each message, the ranks that launch it, each with its event."""
        self.message: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
        """For each rank and event, the message that the event launches."""
        for stream in streams:
            for row in zip(*stream.launches.values(), strict=True):
                launches = dict(zip(stream.launches, row, strict=True))
                for rank, event in launches.items():
                    self.message[rank][event] = len(self.launched_by)
                self.launched_by.append(launches)
        self.lacking = [len(launches) for launches in self.launched_by]
        """For each message, how many participants have not launched it yet."""
        self.at = dict.fromkeys(ranks, 0)
        """The next event of each rank."""

    def awaited(self, rank: int, event: RankEvent) -> int | None:
        """Return the message that a wait is for; None for any other event."""
        return None if event.awaits is None else self.message[rank][event.awaits]

    def run(self) -> None:
        ready = list(self.ranks)
        waiting: dict[int, list[int]] = {}
        while ready:
            rank = ready.pop()
            events = self.ranks[rank].events
            while self.at[rank] < len(events):
                awaited = self.awaited(rank, events[self.at[rank]])
                if awaited is not None and self.lacking[awaited]:
                    waiting.setdefault(awaited, []).append(rank)
                    break
                launched = self.message[rank].get(self.at[rank])
                if launched is not None:
                    self.lacking[launched] -= 1
                    ready += waiting.pop(launched, []) if not self.lacking[launched] else []
                self.at[rank] += 1

    def stuck(self) -> dict[int, tuple[RankEvent, int, int]]:
        """Return, for each blocked rank, its wait, the rank that it waits for, and that rank's missing event."""
        result = {}
        for rank, at in self.at.items():
            if at < len(self.ranks[rank].events):
                event = self.ranks[rank].events[at]
                message = self.awaited(rank, event)
                assert message is not None, "only waits block"
                launches = self.launched_by[message].items()
                other, launch = next((other, launch) for other, launch in launches if self.at[other] <= launch)
                result[rank] = event, other, launch
        return result


def _circle(ranks: Ranks, streams: list[_Stream]) -> str:
    """Return which ranks wait for each other; "" if all ranks finish."""
    run = _Run(ranks, streams)
    run.run()
    stuck = run.stuck()
    if not stuck:
        return ""
    path = [min(stuck)]
    while (following := stuck[path[-1]][1]) not in path:
        path.append(following)
    return f"ranks wait for each other: {'; '.join(_wait_texts(ranks, stuck, path[path.index(following) :]))}"


def _wait_texts(ranks: Ranks, stuck: Mapping[int, tuple[RankEvent, int, int]], circle: list[int]) -> Iterator[str]:
    for rank in circle:
        wait, other, launch = stuck[rank]
        later = ranks[other].events[launch]
        yield (
            f"rank {rank} waits at {wait.where} (`{wait.text}`) for {wait.what!r}, "
            f"which rank {other} launches at {later.where} (`{later.text}`) only"
        )
