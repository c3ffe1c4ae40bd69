"""Faults of checkpoints: kills, corruptions, full disks and strange folders, and what can be loaded afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.loop import SOMETIME, Op
from benchmarks.faults.ranks import Seen, run
from benchmarks.faults.verdicts import SKIPPED, Found

Values = list[Any]
STEP = "FBSZ"
PLACES = ((2, 3), (3, 1), (2, 0), (2, 2))
"""Worlds and stages that save; each is loaded in the next one's."""
MANIFEST = "zcompile.json"
SMALL = 1024
"""KiB of the disks that fill up."""
OUTSIDE, ABSENT = "outside.txt", "absent.distcp"


class Verdict(Exception):
    """What came of a trial, raised where it is known."""

    def __init__(self, verdict: str, why: str = "") -> None:
        super().__init__(verdict)
        self.verdict, self.why = verdict, why


@dataclass(frozen=True)
class Disk:
    """A folder for one trial, with a checkpoint in it or a place for one."""

    root: Path
    world: int
    stage: int
    timeout: float
    name: str = "checkpoint"

    @property
    def checkpoint(self) -> Path:
        return self.root / self.name

    @property
    def file(self) -> Path:
        """The first file of tensors."""
        return sorted(self.checkpoint.glob("*.distcp"))[0]

    def do(self, letters: str, *, faulty: Sequence[int] = (), fault: str = "") -> list[Seen]:
        """Let every rank do `letters`, and the faulty ones do `fault`."""
        scripts = [_script(fault if rank in faulty else letters) for rank in range(self.world)]
        absent = faulty if set(SOMETIME) & set(fault) else ()
        seen = run(scripts, self.stage, self.timeout, absent, self.checkpoint)
        for rank, one in enumerate(seen):
            if one.died is not None and rank not in absent:
                raise Verdict("abort", f"rank {rank} ended with {one.died} in {one.doing}: {one.log}")
            if rank not in absent and one.late(self.timeout):
                raise Verdict("hang", f"rank {rank} in {one.doing}: {one.raised}")
        return seen

    def done(self, letters: str) -> list[Values]:
        """The states that `letters` tell on the first rank; nothing may fail."""
        seen = self.do(letters)
        for rank, one in enumerate(seen):
            if one.raised:
                raise Verdict("refused", f"rank {rank} in {one.doing}: {one.raised.kind}: {one.raised.text}")
        return list(seen[0].states.values())

    def elsewhere(self) -> Disk:
        """The same folder for another world and stage."""
        world, stage = PLACES[(PLACES.index((self.world, self.stage)) + 1) % len(PLACES)]
        return Disk(self.root, world, stage, self.timeout, self.name)


def _script(letters: str) -> list[Op]:
    return [Op(letter, place) for place, letter in enumerate(letters)]


def errors(seen: Sequence[Seen], *named: str) -> str:
    """The error of all ranks, if it is a StateError that says one of `named`; else a verdict is raised."""
    for rank, one in enumerate(seen):
        if not one.raised:
            raise Verdict("some", f"no error on rank {rank}: {[other.raised for other in seen]}")
        if one.raised.kind != "StateError":
            raise Verdict("raw", f"rank {rank}: {one.raised.kind}: {one.raised.text}")
        if not any(name in one.raised.text for name in named):
            raise Verdict("unnamed", f"rank {rank}: {one.raised.text}")
    assert seen[0].raised is not None
    return seen[0].raised.text


def loads(disk: Disk, *allowed: Values) -> None:
    """Load in another world and stage: there is a complete checkpoint, and it is one of the `allowed`."""
    (found,) = disk.elsewhere().done("OM")
    if found not in allowed:
        raise Verdict("silent", "what was loaded is no state that was saved")


def loads_or_says(disk: Disk, right: Values, *named: str) -> None:
    """Load in another world and stage: the right values, or an error that names the file."""
    seen = disk.elsewhere().do("OM")
    if any(one.raised for one in seen):
        raise Verdict("error", errors(seen, *named))
    if list(seen[0].states.values()) != [right]:
        raise Verdict("silent", "what was loaded is no state that was saved")


def trains_on(disk: Disk, *kept: Path) -> None:
    """Save and load once more, and see that nothing is left over and what is not zcompile's is `kept`."""
    (saved,) = disk.done(f"{STEP}MC")
    loads(disk, saved)
    known = {disk.name, OUTSIDE, *(path.name for path in kept)}
    if left := [path.name for path in disk.root.iterdir() if path.name not in known]:
        raise Verdict("left", f"{left} lie beside the checkpoint")
    foreign(kept)


def foreign(kept: Sequence[Path]) -> None:
    for path in kept:
        if not (path.is_file() and path.read_text() == "mine"):
            raise Verdict("deleted", str(path))


# -- kills --------------------------------------------------------------------------------------------------------


def kill(disk: Disk, *, everyone: bool, save: str) -> None:
    """Kill one rank or all at a random moment of the second save."""
    (old,) = disk.done(f"{STEP}MC")
    faulty = range(disk.world) if everyone else [random.Random(disk.name).randrange(disk.world)]
    seen = disk.do(f"O{STEP}M{save}", faulty=faulty, fault=f"O{STEP}Mk{save}")
    new = [state for one in seen for state in one.states.values()]
    for rank, one in enumerate(seen):
        if one.raised and not one.raised.typed:
            raise Verdict("raw", f"rank {rank}: {one.raised.kind}: {one.raised.text}")
    loads(disk, old, *new)
    trains_on(disk)


# -- corruptions --------------------------------------------------------------------------------------------------


def flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def cut(path: Path, where: float) -> None:
    os.truncate(path, int(where * path.stat().st_size))


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped-first": partial(flip, where=0.0),
    "flipped-middle": partial(flip, where=0.5),
    "flipped-last": partial(flip, where=1.0),
    "emptied": partial(cut, where=0.0),
    "halved": partial(cut, where=0.5),
    "shortened": partial(cut, where=0.999),
    "lengthened": lengthen,
    "removed": Path.unlink,
    "folder": to_folder,
}


def damage(disk: Disk, *, which: str, act: Callable[[Path], object]) -> None:
    """Damage one file."""
    (right,) = disk.done(f"{STEP}MC")
    path = damaged(disk, which)
    act(path)
    loads_or_says(disk, right, path.name, *([str(disk.checkpoint)] if which == MANIFEST else []))


def damaged(disk: Disk, which: str) -> Path:
    """A file of a checkpoint: by its name, or the first or last one of tensors."""
    data = sorted(disk.checkpoint.glob("*.distcp"))
    return {"first": data[0], "last": data[-1]}.get(which, disk.checkpoint / which)


def swap(disk: Disk, *, which: str) -> None:
    """Bring one file of another checkpoint of the same model."""
    (right,) = disk.done(f"{STEP}MC")
    other = Disk(disk.root, disk.world, disk.stage, disk.timeout, "other")
    other.done(f"{STEP}{STEP}C")
    path = damaged(disk, which)
    shutil.copy(damaged(other, which), path)
    loads_or_says(disk, right, path.name, *([str(disk.checkpoint)] if which == MANIFEST else []))


def manifest(disk: Disk, *, edit: Callable[[Disk, dict[str, Any]], object], sealed: bool) -> None:
    """Edit the manifest, with its digest made right again if `sealed`."""
    (right,) = disk.done(f"{STEP}MC")
    path = disk.checkpoint / MANIFEST
    content = json.loads(path.read_text())
    edit(disk, content)
    if sealed:
        del content["sha256"]
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))
    (disk.root / OUTSIDE).write_text("mine")
    loads_or_says(disk, right, MANIFEST, disk.file.name, OUTSIDE, ABSENT, ".metadata")
    if edit is names_outside:
        raise Verdict("silent", "a file outside of the checkpoint's folder was taken for a part of it")


def names_outside(disk: Disk, content: dict[str, Any]) -> None:
    text = b"mine"
    about = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    content["files"][f"../{OUTSIDE}"] = about


def names_less(disk: Disk, content: dict[str, Any]) -> None:
    """And the file that is named no more is damaged."""
    del content["files"][disk.file.name]
    flip(disk.file, 0.5)


def names_nothing(disk: Disk, content: dict[str, Any]) -> None:
    content["files"] = {}
    flip(disk.file, 0.5)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def bomb(disk: Disk) -> None:
    """Put a pickle that makes a folder in the place of .metadata, with the digests that belong to it."""
    (right,) = disk.done(f"{STEP}MC")
    gone_off = disk.root / "gone-off"
    path, listing = disk.checkpoint / ".metadata", disk.checkpoint / MANIFEST
    path.write_bytes(pickle.dumps(_Bomb(gone_off)))
    content = json.loads(listing.read_text())
    code = path.read_bytes()
    content["files"][path.name] = {"bytes": len(code), "sha256": hashlib.sha256(code).hexdigest()}
    del content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    listing.write_text(json.dumps(content))
    try:
        loads_or_says(disk, right, path.name)
    finally:
        if gone_off.exists():
            raise Verdict("silent", "code in .metadata was run")


EDITS: dict[str, Callable[[Disk, dict[str, Any]], object]] = {
    "outside": names_outside,
    "less": names_less,
    "nothing": names_nothing,
    "bytes": lambda disk, content: content["files"][disk.file.name].update(bytes=1),
    "digest": lambda disk, content: content["files"][disk.file.name].update(sha256="0" * 64),
    "absent": lambda disk, content: content["files"].update({ABSENT: content["files"][disk.file.name]}),
    "format": lambda disk, content: content.update(format=99),
    "files-list": lambda disk, content: content.update(files=["x"]),
    "no-files": lambda disk, content: content.pop("files"),
    "no-format": lambda disk, content: content.pop("format"),
    "no-size": lambda disk, content: content["files"][disk.file.name].pop("bytes"),
}


# -- disks and folders --------------------------------------------------------------------------------------------


@contextmanager
def small_disk(disk: Disk) -> Iterator[None]:
    """The trial's folder on a disk of its own."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}k", "tmpfs", str(disk.root)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk.root)], check=True)


def full(disk: Disk, *, save: str, room: int) -> None:
    """Save where there is room for `room` KiB more."""
    with small_disk(disk):
        (old,) = disk.done(f"{STEP}MC")
        filler = disk.root / "filler"
        free = os.statvfs(disk.root)
        filler.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - room * 1024)))
        seen = disk.do(f"O{STEP}M{save}")
        if not any(one.raised for one in seen):
            loads(disk, seen[0].states[5])
            raise Verdict("harmless")
        text = errors(seen, disk.name)
        loads(disk, old)
        filler.unlink()
        trains_on(disk)
        raise Verdict("error" if "space" in text or "full" in text else "unnamed", text)


def read_only(disk: Disk, *, save: str) -> None:
    with small_disk(disk):
        (old,) = disk.done(f"{STEP}MC")
        subprocess.run(["mount", "-o", "remount,ro", str(disk.root)], check=True)
        seen = disk.do(f"{STEP}{save}")
        loads(disk, old)
        subprocess.run(["mount", "-o", "remount,rw", str(disk.root)], check=True)
        text = errors(seen, disk.name)
        trains_on(disk)
        raise Verdict("error", text)


def strange(disk: Disk, *, make: Callable[[Disk], Sequence[Path]]) -> None:
    """Save twice and load where `make` has put something; a refusal must name the folder and change nothing."""
    kept = make(disk)
    linked = disk.checkpoint.is_symlink()
    for _ in range(2):
        seen = disk.do(f"{STEP}MC")
        foreign(kept)
        if linked and not disk.checkpoint.is_symlink():
            raise Verdict("deleted", "the symbolic link is replaced")
        if any(one.raised for one in seen):
            raise Verdict("error", errors(seen, disk.name))
        loads(disk, *seen[0].states.values())
    foreign(kept)


def mine(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    return path


def link(disk: Disk, *, save: bool = False) -> Sequence[Path]:
    """A link to a folder, which is empty or holds a checkpoint."""
    target = Disk(disk.root, disk.world, disk.stage, disk.timeout, "target")
    if save:
        target.done(f"{STEP}C")
    target.checkpoint.mkdir(exist_ok=True)
    disk.checkpoint.symlink_to(target.checkpoint)
    return [mine(disk.root / "beside.txt")]


def dangling(disk: Disk) -> Sequence[Path]:
    disk.checkpoint.symlink_to(disk.root / "nowhere")
    return []


def with_notes(disk: Disk, *, names: Sequence[str]) -> Sequence[Path]:
    """A checkpoint with somebody's files in it, or beside it."""
    disk.done(f"{STEP}C")
    return [mine(disk.root / name) for name in names]


FOLDERS: dict[str, Callable[[Disk], Sequence[Path]]] = {
    "link-to-empty": link,
    "link-to-checkpoint": partial(link, save=True),
    "link-to-nothing": dangling,
    "notes-within": partial(with_notes, names=["checkpoint/notes.txt"]),
    "notes-in-a-folder-within": partial(with_notes, names=["checkpoint/mine/notes.txt"]),
    "temporary-name": partial(with_notes, names=[".checkpoint.new/notes.txt"]),
    "temporary-names": partial(with_notes, names=[".checkpoint.old/notes.txt", ".checkpoint.new"]),
    "other-things": lambda disk: [mine(disk.checkpoint / "notes.txt")],
    "a-file": lambda disk: [mine(disk.checkpoint)],
    "data-like-ours": partial(with_notes, names=["checkpoint/__9_9.distcp"]),
}


# -- two at once, other worlds ------------------------------------------------------------------------------------


def together(disk: Disk, *, letters: str) -> None:
    """Saves and loads of one run that follow each other before they have ended."""
    disk.done(f"{STEP}C")
    states = disk.done(letters)
    loads(disk, states[-1])
    trains_on(disk)


def elsewhere(disk: Disk, *, world: int, stage: int) -> None:
    """Load in another world and stage, save there, and load back."""
    (saved,) = disk.done(f"{STEP}{STEP}MC")
    other = Disk(disk.root, world, stage, disk.timeout, disk.name)
    first, second = other.done(f"OM{STEP}MC")
    (back,) = disk.done("OM")
    if first != saved or back != second:
        raise Verdict("silent", "what was loaded is not what was saved")


# -- all of them --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One fault of a checkpoint; its name says all of it."""

    kind: str
    detail: str
    world: int
    stage: int
    act: Callable[[Disk], None]

    @property
    def name(self) -> str:
        return f"checkpoint/{self.kind}/{self.detail}/world{self.world}/stage{self.stage}"


def _acts() -> Iterator[tuple[str, str, Callable[[Disk], None]]]:
    """Everything that is done to a checkpoint, of one saving world and stage."""
    for number in range(8):
        for who in ("one", "all"):
            for save in ("C", "cw"):
                moment = f"{who}-{'meanwhile' if 'c' in save else 'waiting'}-{number}"
                yield "killed", moment, partial(kill, everyone=who == "all", save=save)
    for which in ("first", "last", ".metadata", MANIFEST):
        for how, act in DAMAGES.items():
            yield "damaged", f"{which}-{how}", partial(damage, which=which, act=act)
        yield "swapped", which, partial(swap, which=which)
    for what, edit in EDITS.items():
        for sealed in (False, True):
            yield "manifest", f"{what}{'-sealed' * sealed}", partial(manifest, edit=edit, sealed=sealed)
    yield "code", "metadata", bomb
    for room in (0, 20, 40, 60, 76, 84, 120):
        for save in ("C", "cw"):
            yield "full", f"{room}-{'meanwhile' if 'c' in save else 'waiting'}", partial(full, save=save, room=room)
    for save in ("C", "cw"):
        yield "read-only", "meanwhile" if "c" in save else "waiting", partial(read_only, save=save)
    for what, make in FOLDERS.items():
        yield "folder", what, partial(strange, make=make)
    for letters in ("OMcFBSZMcw", "OcFBSZMC", "cFBSZMcOMw", "ccMcw"):
        yield "together", letters, partial(together, letters=letters)
    for world in (1, 2, 3, 4):
        for stage in range(4):
            yield "elsewhere", f"to-world{world}-stage{stage}", partial(elsewhere, world=world, stage=stage)


def all_trials() -> list[Trial]:
    """Each fault once, then each again from another saving world and stage, and so on."""
    return [
        Trial(kind, detail, *PLACES[(number + turn) % len(PLACES)], act)
        for turn in range(len(PLACES))
        for number, (kind, detail, act) in enumerate(_acts())
    ]


def trials(count: int, seed: int) -> list[Trial]:
    """The first of them, beginning with the places that the seed says."""
    every = all_trials()
    start = len(every) // len(PLACES) * (seed % len(PLACES))
    return (every[start:] + every[:start])[:count]


def try_out(trial: Trial, timeout: float) -> Found:
    """Run a trial and say what came of it."""
    if trial.kind in ("full", "read-only") and os.geteuid() != 0:
        return Found(trial.name, trial.kind, SKIPPED, "only root can mount a small disk")
    with tempfile.TemporaryDirectory() as folder:
        name = trial.detail if trial.kind == "killed" else "checkpoint"  # moments follow from names
        try:
            trial.act(Disk(Path(folder), trial.world, trial.stage, timeout, name))
        except Verdict as verdict:
            return Found(trial.name, trial.kind, verdict.verdict, verdict.why)
    return Found(trial.name, trial.kind, "harmless", "")
