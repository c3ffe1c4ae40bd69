"""Forecasts: what a training step takes under each choice of options or on each mesh, and plans that compare them."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import RankMemory
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
class StepForecast(RankMemory):
    """What a step takes on the rank that holds most, in bytes, and in seconds."""

    seconds: float
    """Of a step, the optimizer's included."""
    flops: float
    """Of a step on one device, what is computed again left out."""

    @property
    def rate(self) -> float:
        """FLOP per second on each device."""
        return self.flops / self.seconds if self.seconds else math.inf

    def cells(self) -> tuple[str, ...]:
        """Texts of FIGURES."""
        return f"{self.nbytes / 1e9:.2f}", f"{self.seconds:.3g}", f"{self.rate / 1e12:.3g}"

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


@dataclass(frozen=True, repr=False)
class PrintedPlan:
    """Forecasts of a model on some hardware, as a page of text."""

    model: str
    """What it is called."""
    parameters: int
    """How many it has."""
    hardware: Hardware
    memory_limit: float
    """Bytes of a rank."""
    forecasts: Sequence[Any]

    _compared: ClassVar[str]
    """What there is a forecast of each of."""

    def __str__(self) -> str:
        out = io.StringIO()
        self.print(Console(file=out, width=140))
        return out.getvalue()

    def __repr__(self) -> str:
        many = f"{len(self.forecasts)} {self._compared}"
        return f"<{type(self).__name__} of {self.model}: {many}; print it, or see .forecasts>"

    def print(self, console: Console) -> None:
        """The tables, and what is recommended."""
        raise NotImplementedError

    def check_fits(self) -> None:
        """Raise OptionError where no choice fits: on any of the worlds, if there are several."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """What `zcompile plan --json` prints."""
        raise NotImplementedError

    def _say(self, console: Console, text: str) -> None:
        """Print a text that may have anybody's names in it."""
        console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _about(self) -> dict[str, Any]:
        """What `zcompile plan --json` prints first."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "hardware": self.hardware.name,
            "memory_limit": self.memory_limit,
        }

    def _nothing_fits(self, world: int, nearest: StepForecast, fix: str) -> OptionError:
        """The error where no choice fits on `world` ranks."""
        least, over = _gigabytes(nearest.nbytes), _gigabytes(nearest.nbytes - self.memory_limit)
        problem = f"{_gigabytes(self.memory_limit)} holds nothing on {world} ranks: the least is {least}, {over} more"
        return OptionError("memory_limit", problem, fix)


@dataclass(frozen=True, repr=False)
class Plan(PrintedPlan):
    """Forecasts of a model on some hardware; printed as a table for each world."""

    forecasts: Sequence[Forecast]
    arguments: str = ""
    """Types of the tensors that a rank's call is given."""
    tensor_parallel: int = 1
    """Ranks that each have a part of the model; each of them has as many data-parallel ranks as a world."""
    whole: Sequence[str] = ()
    """Parameters that one rank each must keep whole: choices without owners are there to be compared."""

    _compared: ClassVar[str] = "forecasts"

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
        fix = f"take more ranks or a smaller batch; nearest is {self.line(nearest)}"
        raise self._nothing_fits(world, nearest, fix)

    def check_fits(self) -> None:
        """Raise OptionError for the first world on which no choice fits."""
        for world in self.worlds:
            self.best(world)

    def as_dict(self) -> dict[str, Any]:
        """What `zcompile plan --json` prints."""
        fastest = {str(world): self.fastest(world) for world in self.worlds}
        return {
            **self._about(),
            "arguments": self.arguments,
            "tensor_parallel": self.tensor_parallel,
            "recommended": {world: best and self.line(best) for world, best in fastest.items()},
            "forecasts": [{**forecast.as_dict(), "fits": self.fits(forecast)} for forecast in self.forecasts],
        }

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
        for heading in (*(kind.split()[0] for kind in kinds), *FIGURES, "hidden"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for before, forecast in zip([None, *forecasts], forecasts, strict=False):
            choice = forecast.choice
            if before and choice_cells(before.choice)[:: len(CHOICE) - 1] != choice_cells(choice)[:: len(CHOICE) - 1]:
                table.add_section()
            verdict = self.verdict(forecast)
            style = {"best": "bold", "too big": "dim", "rows": "dim"}.get(verdict)
            by_kind_cells = (f"{forecast.by_kind()[kind] / 1e9:.2f}" for kind in kinds)
            hidden = "" if forecast.hidden_share is None else f"{forecast.hidden_share:.0%}"
            table.add_row(*choice_cells(choice), *by_kind_cells, *forecast.cells(), hidden, verdict, style=style)
        return table


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.4g} GB"


CHOICE = ("stage", "prefetch", "checkpoint", "dtype")
FIGURES = ("GB", "step s", "TFLOP/s")
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


# -- meshes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeshChoice:
    """A mesh, and the options of `zcompile.train_step` on it.

    Attributes:
        pipeline: Ranks along the pipeline dimension.
        data: Ranks along that of data parallelism.
        tensor: Ranks along that of tensor parallelism.
        microbatch_size: Samples of a micro-batch.
        microbatches: Of a step, on each rank.
        schedule: See `zcompile.pipelining.action_tables`.
        stages_per_rank: Pipeline stages that each rank has.
        stage: The ZeRO stage.
        checkpoint: "unit", or None.
        dtype: To compute in; None: the model's own.
    """

    pipeline: int
    data: int
    tensor: int
    microbatch_size: int
    microbatches: int
    schedule: str
    stages_per_rank: int
    stage: int
    checkpoint: str | None
    dtype: torch.dtype | None

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Sizes of the dimensions "pp", "dp" and "tp"."""
        return self.pipeline, self.data, self.tensor

    def lines(self, device: str, texts: ChoiceTexts) -> list[str]:
        """The lines of Python that make it, of a `model` and an `optimizer`."""
        names = ("pp", "dp", "tp")[: 3 if self.tensor > 1 else 2]
        lines = [f"mesh = init_device_mesh({device!r}, {self.mesh[: len(names)]}, mesh_dim_names={names})"]
        if self.tensor > 1:
            lines.append(f'parallelize_module(model, mesh["tp"], {texts.tensor_parallel})')
        given = [f"schedule={self.schedule!r}", f"microbatches={self.microbatches}"]
        given += [f"stages_per_rank={self.stages_per_rank}"] if self.stages_per_rank > 1 else []
        given += [f"stage={self.stage}"]
        given += [f"checkpoint={self.checkpoint!r}"] if self.checkpoint else []
        given += [f"dtype={self.dtype}"] if self.dtype is not None else []
        given += [f"units={list(texts.units)}"] if texts.units else []
        lines.append(f"step = zcompile.train_step(model, {texts.loss}, optimizer, mesh=mesh, {', '.join(given)})")
        return lines


@dataclass(frozen=True)
class ChoiceTexts:
    """What lines of Python say beside a choice.

    Attributes:
        loss: What computes the loss.
        tensor_parallel: The plan of tensor parallelism.
        units: As they were given.
    """

    loss: str = "None"
    tensor_parallel: str = "zcompile.tensor_parallel_plan(model)"
    units: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class MeshForecast(StepForecast):
    """What a step takes with one choice: of the rank that holds most, in bytes, and in seconds."""

    choice: MeshChoice
    idle_share: float
    """Of all ranks' time that in which they neither compute nor update, 0 to 1."""

    def as_dict(self) -> dict[str, Any]:
        """What `zcompile plan --mesh auto --json` prints of it."""
        choice = self.choice
        return {
            "mesh": {"pp": choice.pipeline, "dp": choice.data, "tp": choice.tensor},
            "microbatch_size": choice.microbatch_size,
            "microbatches": choice.microbatches,
            "schedule": choice.schedule,
            "stages_per_rank": choice.stages_per_rank,
            "stage": choice.stage,
            "checkpoint": choice.checkpoint,
            **self.figures(choice.dtype),
            "idle_share": self.idle_share,
        }


@dataclass(frozen=True, repr=False)
class MeshPlan(PrintedPlan):
    """The fastest choice that fits on each mesh, the fastest mesh first; printed as a table.

    Attributes:
        world: Ranks.
        global_batch: Samples of a step, of all ranks.
        smallest: What takes least memory of everything that was looked at; None if `forecasts` are not empty.
        searched: How many choices were compared.
        took: Seconds of the search.
        texts: What lines of Python say beside a choice.
        notes: What was left out, and why.
    """

    forecasts: Sequence[MeshForecast]
    """One for each mesh that something fits on."""
    world: int
    global_batch: int
    smallest: MeshForecast | None
    searched: int
    took: float
    texts: ChoiceTexts = ChoiceTexts()
    notes: Sequence[str] = ()

    _compared: ClassVar[str] = "meshes"

    def best(self) -> MeshForecast:
        """The fastest choice that fits.

        Raises:
            OptionError: none does; the message says which comes nearest, and by how much it does not.
        """
        if self.forecasts:
            return self.forecasts[0]
        if self.smallest is None:
            problem = f"{self.world} ranks have no mesh on which {self.global_batch} samples are micro-batches"
            raise OptionError("global_batch", problem, "give a larger batch, or smaller micro-batches")
        fix = f"use more ranks; the closest choice is {'; '.join(self.lines(self.smallest))}"
        raise self._nothing_fits(self.world, self.smallest, fix)

    def check_fits(self) -> None:
        """Raise OptionError where no choice fits."""
        self.best()

    def lines(self, forecast: MeshForecast) -> list[str]:
        """The lines of Python that make a choice."""
        return forecast.choice.lines(self.hardware.device, self.texts)

    def as_dict(self) -> dict[str, Any]:
        """What `zcompile plan --mesh auto --json` prints."""
        return {
            **self._about(),
            "world": self.world,
            "global_batch": self.global_batch,
            "searched": self.searched,
            "took": self.took,
            "recommended": self.lines(self.forecasts[0]) if self.forecasts else None,
            "forecasts": [forecast.as_dict() for forecast in self.forecasts],
            "notes": list(self.notes),
        }

    def print(self, console: Console) -> None:
        """The table, and the lines that do what is recommended."""
        say = functools.partial(self._say, console)
        say(f"{self.model}: {self.parameters:,} parameters on {self.hardware.name}, {self.world} ranks")
        say(f"{self.global_batch} samples a step, at most {_gigabytes(self.memory_limit)} a rank")
        if self.forecasts:
            console.print(self._table())
        for note in self.notes:
            say(note)
        meshes = f"{len(self.forecasts)} mesh{'es' * (len(self.forecasts) != 1)}"
        say(f"{self.searched} choices compared, {meshes} with one that fits, in {self.took:.0f} s")
        if self.forecasts:
            say("fastest that fits:")
            for line in self.lines(self.forecasts[0]):
                say(f"    {line}")
        else:
            try:
                self.best()
            except OptionError as error:
                say(f"{error.problem}.\n{error.fix}.")

    def _table(self) -> Table:
        caption = "GB: 10^9 bytes of the fullest rank at the peak of a step; idle: share of all ranks' time"
        table = Table(caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1))
        for heading in ("pp", "dp", "tp", "micro-batches"):
            table.add_column(heading, justify="right", no_wrap=True)
        for heading in ("schedule", "stages", "ZeRO", "checkpoint"):
            table.add_column(heading, no_wrap=True)
        for heading in (*FIGURES, "idle"):
            table.add_column(heading, justify="right", no_wrap=True)
        for place, forecast in enumerate(self.forecasts):
            choice = forecast.choice
            table.add_row(
                *map(str, choice.mesh),
                f"{choice.microbatches} of {choice.microbatch_size}",
                choice.schedule if choice.pipeline > 1 else "",
                str(choice.stages_per_rank * choice.pipeline) if choice.pipeline > 1 else "",
                str(choice.stage),
                choice.checkpoint or "",
                *forecast.cells(),
                f"{forecast.idle_share:.0%}",
                style=None if place else "bold",
            )
        return table
