"""What the person sees while training runs: a live panel on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

LINE_EVERY = 25  # steps between two plain lines
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Reading:
    """The state of training after one step."""

    step: int  # from 1
    loss: float  # of this step, nats per byte, mean over all ranks
    tokens_per_second: float | None  # of all ranks together; None before a step was timed
    held: int  # bytes one rank keeps: parameters, gradients, optimizer state
    expected: int  # the same by the formula
    formula: str
    sent_step: int  # bytes one rank sent in this step's collectives
    sent: int  # bytes one rank sent in all steps so far
    hidden: float | None  # share of communication that compute covered, 0..1; None before a step was timed
    waited: float  # seconds the program stood waiting for communication since the first step, which compiles


class Screen(Protocol):
    """Something that shows readings for the length of a `with`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, reading: Reading) -> None:
        """Show the newest reading."""
        ...


def choose_screen(console: Console, steps: int) -> Screen:
    """The live panel where the console can redraw, plain lines where it cannot, nothing where it is quiet."""
    if console.quiet:
        return NoScreen()
    return LiveScreen(console, steps) if console.is_terminal else PlainScreen(console, steps)


class NoScreen:
    """Shows nothing: for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, reading: Reading) -> None:
        """Nothing."""


class PlainScreen(NoScreen):
    """A line for the first step, the last, and every LINE_EVERY between."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def __enter__(self) -> Self:
        self._print("the first step compiles; it can take a minute")
        return self

    def show(self, reading: Reading) -> None:
        """Print a line if this step is due one."""
        if reading.step in (1, self._steps) or reading.step % LINE_EVERY == 0:
            self._print(line(reading, self._steps))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveScreen:
    """A progress bar over a table of the newest reading, redrawn in place."""

    def __init__(self, console: Console, steps: int) -> None:
        self._losses: list[float] = []
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("compiling", total=steps)
        self._live = Live(self._progress, console=console)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, reading: Reading) -> None:
        """Redraw."""
        self._losses.append(reading.loss)
        self._progress.update(self._task, completed=reading.step, description="training ")
        self._live.update(Group(self._progress, panel(reading, self._losses)))


def panel(reading: Reading, losses: Sequence[float]) -> Table:
    """The newest reading, a row for each figure, with the curve of the loss so far."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(no_wrap=True)
    table.add_row("loss", Text.assemble((f"{reading.loss:.3f}", "bold"), "  ", (curve(losses, 40), "cyan")))
    table.add_row("speed", f"{rate(reading)} over all ranks")
    table.add_row("held per rank", f"{size(reading.held)} (formula {reading.formula} = {size(reading.expected)})")
    table.add_row("sent per rank", f"{size(reading.sent_step)} a step, {size(reading.sent)} so far")
    table.add_row(
        "communication", f"{share(reading.hidden)} hidden behind compute, {reading.waited:.1f} s waited for so far"
    )
    return table


def line(reading: Reading, steps: int) -> str:
    """The newest reading on one line."""
    return (
        f"step {reading.step:>{len(str(steps))}}/{steps}  loss {reading.loss:.3f}  {rate(reading)}  "
        f"held {size(reading.held)} ({reading.formula} = {size(reading.expected)})  "
        f"sent {size(reading.sent_step)}/step, {size(reading.sent)} so far  "
        f"hidden {share(reading.hidden)}, waited {reading.waited:.1f} s"
    )


def curve(values: Sequence[float], width: int) -> str:
    """A line of at most `width` bars, each the mean of a stretch of the values, the highest value full."""
    stretches = min(width, len(values))
    edges = [index * len(values) // stretches for index in range(stretches + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / ((high - low) or 1) * (len(BARS) - 1))] for mean in means)


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    if count < 1_000_000:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1_000_000_000 else f"{count / 1e9:.2f} GB"


def rate(reading: Reading) -> str:
    """Tokens per second for people."""
    return "- tokens/s" if reading.tokens_per_second is None else f"{reading.tokens_per_second:,.0f} tokens/s"


def share(value: float | None) -> str:
    """A share of 0..1 for people."""
    return "-" if value is None else f"{value:.0%}"
