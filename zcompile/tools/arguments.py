"""Arguments shared by several commands: models, batches, hardware, dtypes; and the progress bar.

As in every module that declares a command, modules that need torch are imported inside functions, so that `--help` and
the message for a wrong command do not wait for torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from zcompile.cost.profile_files import DTYPES, profiles
from zcompile.errors import OptionError, nearest
from zcompile.tools.choices import OWN, two_sizes

if TYPE_CHECKING:
    import torch

    from zcompile.tools.named_models import Subject

Model = Annotated[
    str,
    typer.Argument(
        help="gpt:7.5b, llama:8b, gpt:LAYERSxWIDTH, module:factory, file.py:factory, or the folder of a Hugging Face "
        "config. A factory returns (model, args) or (model, args, kwargs).",
        show_default=False,
    ),
]
BATCH = "Sequences in one rank's batch, of language models"
Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help=f"{BATCH}.")]
Chunk = Annotated[
    str, typer.Option("--chunk", help="'none', 'auto', or the rows for which wide values are computed at once.")
]


def tokens_of(text: str | int) -> int:
    """Return a number of tokens: `4096`, `128k` or `1M`, in powers of two."""
    if match := re.fullmatch(r"([1-9]\d*)([kM]?)", str(text)):
        return int(match[1]) << 10 * " kM".index(match[2] or " ")
    raise typer.BadParameter(f"{text!r} is not a number of tokens, such as 4096, 128k or 1M")


_LENGTH = "Tokens in a sequence, such as 4096, 128k or 1M."
Sequence_ = Annotated[int, typer.Option("--sequence", "-s", parser=tokens_of, metavar="TOKENS", help=_LENGTH)]
Hardware_ = Annotated[
    str, typer.Option("--hardware", "-p", help=f"A profile: {', '.join(profiles())}, or the path of a profile.")
]
Units = Annotated[list[str], typer.Option("--units", help="Module paths gathered together; repeat for several.")]

Whole = Annotated[
    list[str], typer.Option("--whole", help="Parameters each kept whole on one rank, for Muon or Shampoo; repeat.")
]


def is_given(context: typer.Context, name: str) -> bool:
    """True if an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def model_of(context: typer.Context, name: str) -> Subject:
    """Return the model that a command was given, with a batch of --batch and --sequence.

    Raises:
        OptionError: one of these was given for a factory, which makes its own batch.
    """
    from zcompile.tools.named_models import is_factory, subject_of

    sizes = {size: context.params[size] for size in ("batch", "sequence")}
    for size in sizes:
        if is_factory(name) and is_given(context, size):
            raise OptionError(size, "does not apply here: the factory makes the batch", "leave it out")
    return subject_of(name, **sizes)


def sizes_of(mesh: str, problem: str, fix: str) -> tuple[int, int]:
    """The two sizes of a mesh such as 8x4.

    Raises:
        OptionError: `mesh` has another form; with the given `problem` and `fix`.
    """
    if (sizes := two_sizes(mesh)) is None:
        raise OptionError("mesh", f"{mesh!r} {problem}", fix)
    return sizes


def check_target(option: str, target: Path, suffix: str) -> None:
    """Raise OptionError if a file cannot be written, before its content is computed, which takes time."""
    if target.suffix != suffix:
        raise OptionError(option, f"{str(target)!r} is not a {suffix} file", f"give a name that ends in {suffix}")
    is_new = not target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.open("a").close()
        if is_new:
            target.unlink()
    except OSError as error:
        problem = f"{str(target)!r} cannot be written: {error.strerror}"
        raise OptionError(option, problem, "give a file in a folder that you can write to") from error


def checkpoint_of(text: str) -> str | float | None:
    """Parse a value of `checkpoint=`."""
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def chunk_of(text: str) -> int | str | None:
    """Parse a value of `chunk=`."""
    if text == "none":
        return None
    return int(text) if text.isdecimal() else text


def dtype_of(text: str) -> torch.dtype | None:
    """The dtype of this name; None for the model's own.

    Raises:
        OptionError: the name is unknown.
    """
    if text == OWN:
        return None
    if text not in DTYPES:
        raise OptionError("dtype", f"{text!r} is unknown", nearest(text, (OWN, *DTYPES)))
    import torch

    result: torch.dtype = getattr(torch, text)
    return result


@contextlib.contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Any]:
    """A progress bar on stderr, which is erased at the end."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True, disable=quiet) as bar:
        task = bar.add_task("making the model", total=None)

        def progress(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        yield progress
