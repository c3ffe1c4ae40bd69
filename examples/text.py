"""The text a byte-level model learns from: this Python's own library, or files of your own."""

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from errors import FixableError
from torch import Tensor

MEGABYTE = 1_000_000
LARGEST = 16 * MEGABYTE  # bytes read at most
HELD_OUT = 0.05  # share of the text, at its end, that training never sees
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
)


class TextError(FixableError):
    """The text to learn from cannot be used."""


class TextMissing(TextError):
    """There is no file or folder of that name."""


class TextEmpty(TextError):
    """The file or folder holds no text."""


class TextTooSmall(TextError):
    """The text is too short to cut a training and a validation window from."""


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, its last part held out."""

    train: Tensor  # (bytes,) uint8
    validation: Tensor  # (bytes,) uint8, what follows `train` in the text
    source: str  # where it came from, for people


def load_corpus(path: Path | None, context: int) -> Corpus:
    """Read the file or folder at `path`, or the standard library's sources when there is none.

    context: tokens in a window; both parts of the corpus have room for one and the byte after it.
    """
    if path is None:
        source, files = "the Python standard library", library_files()
    else:
        source, files = str(path), given_files(path)
    text = read(files)
    if not text:
        raise TextEmpty(f"{source} holds no text", "name a UTF-8 text file, or a folder of them, with --data")
    held_out = max(int(len(text) * HELD_OUT), context + 1)
    if len(text) < held_out + context + 1:
        raise TextTooSmall(
            f"{source} holds {len(text)} bytes of text, and windows of {context} need at least {2 * (context + 1)}",
            "name a longer text with --data, best a megabyte or more",
        )
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(train=whole[:-held_out], validation=whole[-held_out:], source=source)


def library_files() -> list[Path]:
    """The standard library's *.py files, by name, without its tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    if not files:
        raise TextMissing(f"this Python keeps no library sources in {root}", "name a text of your own with --data")
    return files


def given_files(path: Path) -> list[Path]:
    """`path` itself when it is a file, or all files below it, by name, without hidden ones."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TextMissing(f"there is no file or folder {path}", "name one that exists with --data, or leave --data out")
    below = (found for found in path.rglob("*") if found.is_file())
    return sorted(file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts))


def read(files: Iterable[Path]) -> bytes:
    """The texts of the files one after another, LARGEST bytes at most; binary files are left out."""
    parts: list[bytes] = []
    room = LARGEST
    for file in files:
        part = file.read_bytes()
        if b"\0" in part[:8192]:
            continue
        parts.append(part[:room])
        room -= len(parts[-1])
        if room == 0:
            break
    return b"".join(parts)


def sample_batch(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cut `batch` windows from random places of a text, (bytes,) uint8.

    Returns tokens and targets, both (batch, context) int64; the targets are the tokens one byte on.
    """
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    return split_window(text[starts + torch.arange(context + 1)])


def spread_windows(text: Tensor, count: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut `count` windows evenly spread over a text: tokens and targets, both (1, context) int64."""
    for start in torch.linspace(0, len(text) - context - 1, count).long().tolist():
        yield split_window(text[start : start + context + 1].unsqueeze(0))


def split_window(window: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, context + 1) bytes -> tokens and targets, both (batch, context) int64."""
    window = window.long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
