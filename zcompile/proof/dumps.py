"""The manifest of a dump: the files that a proof reads, with checksums of their lines as they were written."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from zcompile.errors import ProofError
from zcompile.ir.spelling import counted
from zcompile.proof.checker import Proof, RankPart, prove, prove_step
from zcompile.proof.checker_texts import BACKWARD, CAPTURE, FORWARD, STEP, file_text
from zcompile.proof.parts import check_parts, pipeline_of, read_part
from zcompile.proof.ranks import check_folders, lacking_ranks

FORMAT = 2
MANIFEST = "manifest.json"
TRUSTED = (
    "Trusted: that operations mean what ATen says, Inductor, the runtime's collectives, and the step as it was traced."
)
PHASES = (FORWARD, BACKWARD, STEP)
"""The files that run."""
_AGAIN = "write the dump again, with the zcompile that is installed"


@dataclass(frozen=True)
class ProofVerdict:
    """The result for one program: its proof, or the error why there is none; neither if it was not read.

    Attributes:
        part: For the step of a pipeline rank, the text of the traced step and the part of it that the rank computes.
    """

    program: str
    seconds: float
    proof: Proof | None = None
    error: ProofError | None = None
    part: tuple[str, RankPart] | None = None

    @property
    def is_unread(self) -> bool:
        """True for a program that the manifest does not name."""
        return self.proof is None and self.error is None

    def __str__(self) -> str:
        if self.is_unread:
            return f"{self.program}: not proven: it was not read, for the manifest does not name it"
        if self.proof is None:
            return f"{self.program}: not proven"
        lines, terms, parameters, modulo = self.proof
        verdict = f"proven modulo {'; '.join(modulo)}" if modulo else "proven"
        verdict += ", if it receives what is named" if self.part is not None and self.part[1].received else ""
        return (
            f"{self.program}: {verdict}: {lines:,} lines, {terms:,} terms, {parameters:,} gradients of parameters, "
            f"{self.seconds:.2f} s of processor time"
        )


def write_manifest(
    folder: Path,
    programs: Mapping[str, Sequence[str]],
    torch: str,
    rules: Mapping[str, Sequence[Mapping[str, str]]] | None = None,
    parts: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write the manifest of a dump, with checksums of its files as they are now.

    Args:
        folder: The folder of the dump.
        programs: The files in each program's folder, by its name.
        torch: The release of torch that traced the programs.
        rules: By program, the rules by which passes changed values: each has a `name`, a `pattern` such as
            `cast(x, torch.bfloat16)`, in which lowercase words are variables, and its `replacement`.
        parts: By program, for steps of a pipeline rank, the result of `zcompile.proof.parts.described`.
    """
    described = {
        program: {
            "files": {file: _sums(file_text(folder / program / file)) for file in files},
            "rules": [dict(rule) for rule in (rules or {}).get(program, ())],
            "part": (parts or {}).get(program),
        }
        for program, files in programs.items()
    }
    made_by = {"format": FORMAT, "zcompile": metadata.version("zcompile"), "torch": torch}
    (folder / MANIFEST).write_text(json.dumps({**made_by, "programs": described}))


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the dumps of several ranks in a folder, ordered by rank; empty if the folder itself is a dump."""
    found = [path for path in folder.glob("rank_*") if path.name.removeprefix("rank_").isdigit() and path.is_dir()]
    return dict(sorted((int(path.name.removeprefix("rank_")), path) for path in found))


def prove_dump(folder: Path) -> Iterator[ProofVerdict]:
    """Yield, for each program of a dump, the proof that it computes the traced step, or why it is not proven.

    Raises:
        ProofError: the folder is not a dump, or was written by another version.
    """
    programs = _manifest(folder)["programs"]
    for program, described in programs.items():
        started = time.process_time()
        try:
            proof, part = _proof(folder, program, described)
            yield ProofVerdict(program, time.process_time() - started, proof, part=part)
        except ProofError as error:
            named = ProofError(f"{program}/{error.subject}", error.problem, error.fix)
            yield ProofVerdict(program, time.process_time() - started, error=named)
    found = (path.name for path in sorted(folder.glob("program_*")) if next(path.glob("*.py"), None) is not None)
    yield from (ProofVerdict(name, 0.0) for name in found if name not in programs)


def _manifest(folder: Path) -> Any:
    subject = str(folder / MANIFEST)
    try:
        found = json.loads((folder / MANIFEST).read_text())
        versions = found["format"], found["zcompile"]
        for name, described in found["programs"].items():
            _check_described(name, described)
    except FileNotFoundError as error:
        raise ProofError(subject, "is not there, so this is not a dump that can be proven", _AGAIN) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ProofError(subject, f"cannot be read: {type(error).__name__}: {error}", _AGAIN) from error
    wanted = FORMAT, metadata.version("zcompile")
    if versions != wanted:
        problem = f"is of format {versions[0]!r} and zcompile {versions[1]!r}; this is {wanted[0]} and {wanted[1]!r}"
        raise ProofError(subject, problem, _AGAIN)
    if not found["programs"]:
        raise ProofError(subject, "names no program", "run the model before it is dumped")
    return found


def _check_described(program: str, described: Mapping[str, Any]) -> None:
    """Raise ValueError, LookupError or TypeError if `described` does not describe a program in the dump's folder."""
    for path in (program, *described["files"]):
        if Path(path).is_absolute() or ".." in Path(path).parts or path != Path(path).as_posix() or path == ".":
            raise ValueError(f"{path!r} is not a file or folder in the dump")
    for file, sums in described["files"].items():
        if not isinstance(sums, list) or not all(type(checksum) is int for checksum in sums):
            raise ValueError(f"the checksums of {file} are not numbers")
    for rule in described["rules"]:
        if not all(isinstance(rule[key], str) for key in ("name", "pattern", "replacement")):
            raise ValueError(f"{rule} is not a rule")
    if (described["part"] is None) is (STEP in described["files"]):
        raise ValueError(f"{program} is {'no ' * (described['part'] is None)}step of a pipeline, by what is its part")
    if described["part"] is not None:
        read_part(described["part"])


def _proof(folder: Path, program: str, described: Mapping[str, Any]) -> tuple[Proof, tuple[str, RankPart] | None]:
    texts = {file: _text(folder / program / file, file) for file in described["files"]}
    part = None if described["part"] is None else (texts.get(CAPTURE, ""), read_part(described["part"]))
    if missing := {CAPTURE, FORWARD if part is None else STEP} - set(texts):
        raise ProofError(min(missing), "does not belong to the dump, by its manifest", _AGAIN)
    edited = [place for file, sums in described["files"].items() for place in _edited(file, texts[file], sums)]
    read = {file: text for file, text in texts.items() if file in (CAPTURE, *PHASES) or file.startswith("regions/")}
    try:
        proof = prove(read, described["rules"]) if part is None else prove_step(read, part[1], described["rules"])
    except ProofError as error:
        if not edited:
            raise
        problem = f"{error.problem}\n  Changed since the dump was written: {_listed(edited)}"
        raise ProofError(error.subject, problem, error.fix) from error
    if edited:
        problem = (
            f"was changed since the dump was written ({_listed(edited)}); it computes what was traced all the same"
        )
        raise ProofError(edited[0], problem, _AGAIN)
    return proof, part


def _text(path: Path, file: str) -> str:
    try:
        return file_text(path)
    except (OSError, ValueError) as error:
        raise ProofError(file, f"is missing or cannot be read: {error}", _AGAIN) from error


def _sums(text: str) -> list[int]:
    """Return a checksum of each line."""
    return [zlib.crc32(line.encode()) for line in text.split("\n")]


def _edited(file: str, text: str, sums: Sequence[int]) -> Iterator[str]:
    """Yield the lines that have changed; only the first one if lines were added or removed."""
    now = _sums(text)
    if len(now) != len(sums):
        first = next(i for i, (new, old) in enumerate(zip_longest(now, sums)) if new != old)
        yield f"{file} line {first + 1}: it has {len(now)} lines, and had {len(sums)}"
        return
    for number, (new, old) in enumerate(zip(now, sums, strict=True), 1):
        if new != old:
            yield f"{file} line {number}"


def _listed(places: Sequence[str]) -> str:
    return ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")


_FIX = "give the folder of dump(folder, all_ranks=True)"


class Together(NamedTuple):
    """Lines about all programs together, and whether a program that belongs to them was not read."""

    said: list[str]
    unread: bool


def prove_together(ranks: Mapping[int, Path], verdicts: Mapping[int, Sequence[ProofVerdict]]) -> Together:
    """Check that the programs of all ranks fit together.

    Args:
        ranks: The dumps of all ranks, by rank; empty for a single dump.
        verdicts: The verdicts on the programs of each rank; a single dump is rank 0.

    Raises:
        ProofError: they do not fit together.
    """
    parts: dict[str, dict[int, ProofVerdict]] = {}
    for rank, found in verdicts.items():
        for verdict in found:
            parts.setdefault(verdict.program, {})[rank] = verdict
    if not ranks:
        alone = [v for v in verdicts[0] if v.part is not None and pipeline_of(v.part[0]).size > 1]
        problem = "is the step of one rank of a pipeline, and those of the others were not read"
        return Together([f"not proven: {verdict.program} {problem}: {_FIX}" for verdict in alone], bool(alone))
    if lacking := lacking_ranks(ranks):
        named = ", ".join(map(str, lacking[:8])) + (" and others" if len(lacking) > 8 else "")
        return Together([f"not proven: {counted(len(lacking), 'rank')} of the mesh not read, {named}: {_FIX}"], True)
    check_folders(ranks)
    said = [f"{len(ranks)} ranks: their communications fit together"]
    for program, by_rank in parts.items():
        pieces = {rank: verdict.part for rank, verdict in by_rank.items() if verdict.part is not None}
        if len(pieces) == len(ranks):
            check_parts(pieces)
            said.append(f"{program}: the parts of all ranks are the whole step")
    return Together(said, unread=False)
