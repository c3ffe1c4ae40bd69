"""Forecasts: what a training step takes under each choice of options, and the plan that compares them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import MemoryKind
from zcompile.errors import OptionError
from zcompile.ir.layout import Hybrid

WIDE = 140
"""Columns from which on tables say what memory is for."""

Checkpoint = str | int | float | None


@dataclass(frozen=True)
class Choice:
    """Options of `zcompile.compile`."""

    stage: int
    prefetch: int
    checkpoint: Checkpoint
    dtype: torch.dtype | None
    replicas: int = 1
    """Ranks along the first of two dimensions of the mesh, the outer one; 1 for a mesh of one."""
    hybrid: Hybrid = Hybrid.HSDP
    """What the two divide."""
    owners: bool = False
    """True where one rank each keeps the parameters of `whole=`; False where all of them have rows."""

    def __str__(self) -> str:
        """The line to write."""
        return self.call("model")

    def call(self, *given_first: str) -> str:
        """The call of `zcompile.compile` with these arguments before the options."""
        given = [f"stage={self.stage}"] + ([f"prefetch={self.prefetch}"] if self.stage else [])
        given += [f"checkpoint={self.checkpoint!r}"] if self.checkpoint is not None else []
        given += [f"dtype={self.dtype}"] if self.dtype is not None else []
        given += [f"shard={str(self.hybrid)!r}"] if self.replicas > 1 and self.hybrid is not Hybrid.HSDP else []
        return f"zcompile.compile({', '.join([*given_first, *given])})"


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """What a step takes on the rank that holds most, in bytes, and in seconds."""

    parameters: int
    """Bytes of its shards, in all of the step."""
    optimizer: int
    """Bytes of two moments (Adam), in all of the step."""
    held: Mapping[MemoryKind, int]
    """What is held with them at the peak of the step."""
    seconds: float
    """Of a step, the optimizer's included."""
    flops: float
    """Of a step on one device, what is computed again left out."""

    @property
    def nbytes(self) -> int:
        """The peak, everything included."""
        return self.parameters + self.optimizer + sum(self.held.values())

    @property
    def rate(self) -> float:
        """FLOP per second on each device."""
        return self.flops / self.seconds if self.seconds else math.inf

    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak, by what they are for."""
        held = {str(kind): nbytes for kind, nbytes in self.held.items()}
        return {"shards": self.parameters, "optimizer state": self.optimizer, **held}

    def figures(self, dtype: torch.dtype | None) -> dict[str, Any]:
        """What `zcompile plan --json` prints of it, computed in `dtype`, beyond the choice."""
        return {
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "bytes": self.nbytes,
            "bytes_by_kind": self.by_kind(),
            "seconds": self.seconds,
            "flops_per_second": self.rate,
        }


@dataclass(frozen=True, kw_only=True)
class Forecast(StepForecast):
    """What a rank takes under one choice, in bytes and seconds."""

    choice: Choice
    world: int
    exposed: float
    """Of the seconds, those that stand for communication."""
    hidden: float
    """Seconds of communication behind compute."""

    @property
    def hidden_share(self) -> float | None:
        """Share of communication that is hidden, 0 to 1; None where there is none."""
        total = self.hidden + self.exposed
        return self.hidden / total if total else None

    def as_dict(self) -> dict[str, Any]:
        """What `zcompile plan --json` prints of it."""
        choice = self.choice
        return {
            "world": self.world,
            "stage": choice.stage,
            "replicas": choice.replicas,
            "shard": str(choice.hybrid) if choice.replicas > 1 else None,
            "owners": choice.owners,
            "prefetch": choice.prefetch,
            "checkpoint": choice.checkpoint,
            **self.figures(choice.dtype),
            "hidden_share": self.hidden_share,
        }


class PrintedPlan:
    """A plan as a page of text."""

    def __str__(self) -> str:
        out = io.StringIO()
        self.print(Console(file=out, width=140))
        return out.getvalue()

    def print(self, console: Console) -> None:
        """The tables, and what is recommended."""
        raise NotImplementedError

    def _say(self, console: Console, text: str) -> None:
        """Print a text that may have anybody's names in it."""
        console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


@dataclass(frozen=True, repr=False)
class Plan(PrintedPlan):
    """Forecasts of a model on some hardware; printed as a table for each world."""

    model: str
    parameters: int
    hardware: Hardware
    memory_limit: float
    """Bytes of a rank."""
    forecasts: Sequence[Forecast]
    arguments: str = ""
    """Types of the tensors that a rank's call is given."""
    tensor_parallel: int = 1
    """Ranks that each have a part of the model; each of them has as many data-parallel ranks as a world."""
    whole: Sequence[str] = ()
    """Parameters that one rank each must keep whole: choices without owners are there to be compared."""

    @property
    def worlds(self) -> list[int]:
        return sorted({forecast.world for forecast in self.forecasts})

    def of(self, world: int) -> list[Forecast]:
        """The forecasts for one world."""
        return [forecast for forecast in self.forecasts if forecast.world == world]

    def fits(self, forecast: Forecast) -> bool:
        return forecast.nbytes <= self.memory_limit

    def serves(self, forecast: Forecast) -> bool:
        """True for a choice by which parameters that must be whole on a rank are."""
        return not self.whole or forecast.choice.owners or not forecast.choice.stage

    def verdict(self, forecast: Forecast) -> str:
        """What is said of it: "best" of the fastest that fits, "too big", "rows" where owners must be, or nothing."""
        if forecast is self.fastest(forecast.world):
            return "best"
        return "too big" if not self.fits(forecast) else "" if self.serves(forecast) else "rows"

    def line(self, forecast: Forecast) -> str:
        """The call of `zcompile.compile` that makes the choice."""
        replicas, names = forecast.choice.replicas, ("replicate", "shard")
        shape, device = (replicas, forecast.world // replicas), self.hardware.device
        mesh = {
            (False, False): "",
            (True, False): "mesh=mesh['dp']",
            (False, True): f"mesh=init_device_mesh({device!r}, {shape}, mesh_dim_names={names})",
            (True, True): f"mesh=mesh{list(names)}",
        }[self.tensor_parallel > 1, replicas > 1]
        whole = f"whole={list(self.whole)}" if forecast.choice.owners else ""
        return forecast.choice.call("model", *filter(None, [mesh, whole]))

    def fastest(self, world: int) -> Forecast | None:
        """The fastest choice that fits, of equals the smallest; None if none does."""
        fitting = [forecast for forecast in self.of(world) if self.serves(forecast) and self.fits(forecast)]
        return min(fitting, key=lambda forecast: (forecast.seconds, forecast.nbytes), default=None)

    def best(self, world: int) -> Forecast:
        """The fastest choice that fits.

        Raises:
            OptionError: none does; the message says which comes nearest, and by how much it does not.
        """
        if (fastest := self.fastest(world)) is not None:
            return fastest
        nearest = min(filter(self.serves, self.of(world)), key=lambda forecast: forecast.nbytes)
        least, over = _gigabytes(nearest.nbytes), _gigabytes(nearest.nbytes - self.memory_limit)
        problem = f"{_gigabytes(self.memory_limit)} holds nothing on {world} ranks: the least is {least}, {over} more"
        fix = f"take more ranks or a smaller batch; nearest is {self.line(nearest)}"
        raise OptionError("memory_limit", problem, fix)

    def as_dict(self) -> dict[str, Any]:
        """What `zcompile plan --json` prints."""
        fastest = {str(world): self.fastest(world) for world in self.worlds}
        return {
            "model": self.model,
            "parameters": self.parameters,
            "hardware": self.hardware.name,
            "memory_limit": self.memory_limit,
            "arguments": self.arguments,
            "tensor_parallel": self.tensor_parallel,
            "recommended": {world: best and self.line(best) for world, best in fastest.items()},
            "forecasts": [{**forecast.as_dict(), "fits": self.fits(forecast)} for forecast in self.forecasts],
        }

    def __repr__(self) -> str:
        return f"<Plan of {self.model}: {len(self.forecasts)} forecasts; print it, or see .forecasts>"

    def print(self, console: Console) -> None:
        """The tables, and what is recommended."""
        about = (
            f"{self.parameters:,} parameters on {self.hardware.name}, at most {_gigabytes(self.memory_limit)} a rank"
        )
        self._say(console, f"{self.model}: {about}")
        if self.arguments:
            self._say(console, f"a rank's batch: {self.arguments}")
        for world in self.worlds:
            console.print(self._table(world, by_kind=console.width >= WIDE))
            said = "fastest that fits: " if self.fastest(world) else ""
            self._say(console, f"{said}{self.advice(world)}")

    def title(self, world: int) -> str:
        """What a number of ranks is called."""
        parts = f" for each of {self.tensor_parallel} parts of the model" if self.tensor_parallel > 1 else ""
        return f"{world} rank{'s' * (world > 1)}{parts}"

    def advice(self, world: int) -> str:
        """The line that compiles the fastest choice that fits; or that none does, and what to do."""
        try:
            return self.line(self.best(world))
        except OptionError as error:
            return f"{error.problem}.\n{error.fix}."

    def _table(self, world: int, *, by_kind: bool) -> Table:
        forecasts = self.of(world)
        kinds = [kind for kind in forecasts[0].by_kind() if any(forecast.by_kind()[kind] for forecast in forecasts)]
        kinds = kinds if by_kind else []
        caption = "GB: 10^9 bytes of a rank at the peak of a step" + (", by what they are for" if kinds else "")
        lines = box.HEAVY_HEAD if by_kind else box.SIMPLE_HEAD
        table = Table(title=self.title(world), title_justify="left", caption=caption, box=lines, padding=(0, by_kind))
        for heading in CHOICE:
            table.add_column(heading, no_wrap=True)
        for heading in (*(kind.split()[0] for kind in kinds), *FIGURES):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for before, forecast in zip([None, *forecasts], forecasts, strict=False):
            choice = forecast.choice
            if before and choice_cells(before.choice)[:: len(CHOICE) - 1] != choice_cells(choice)[:: len(CHOICE) - 1]:
                table.add_section()
            verdict = self.verdict(forecast)
            style = {"best": "bold", "too big": "dim", "rows": "dim"}.get(verdict)
            table.add_row(*_row(forecast, kinds), verdict, style=style)
        return table


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.4g} GB"


CHOICE = ("stage", "prefetch", "checkpoint", "dtype")
FIGURES = ("GB", "step s", "TFLOP/s", "hidden")
"""What is shown of a forecast: the choice, and what it gives."""


def choice_cells(choice: Choice) -> tuple[str, ...]:
    """Texts of CHOICE; empty where there is nothing to choose, or nothing chosen."""
    prefetch = str(choice.prefetch) if choice.stage else ""
    stage = [str(choice.stage), *([f"{choice.hybrid} on {choice.replicas} nodes"] if choice.replicas > 1 else [])]
    return (
        ", ".join([*stage, *(["owners"] if choice.owners else [])]),
        prefetch,
        str(choice.checkpoint or ""),
        str(choice.dtype or "").removeprefix("torch."),
    )


def figure_cells(forecast: Forecast) -> tuple[str, ...]:
    """Texts of FIGURES."""
    hidden = "" if forecast.hidden_share is None else f"{forecast.hidden_share:.0%}"
    return f"{forecast.nbytes / 1e9:.2f}", f"{forecast.seconds:.3g}", f"{forecast.rate / 1e12:.3g}", hidden


def _row(forecast: Forecast, kinds: Sequence[str]) -> Iterator[str]:
    yield from choice_cells(forecast.choice)
    yield from (f"{forecast.by_kind()[kind] / 1e9:.2f}" for kind in kinds)
    yield from figure_cells(forecast)
