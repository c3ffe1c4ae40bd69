"""Forecasts of the time and memory of a training step by options or by mesh, and plans that compare them."""

from __future__ import annotations

import functools
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
from zcompile.cost.text_console import TextConsole
from zcompile.errors import OptionError
from zcompile.ir.layout import Hybrid

WIDE = 140
"""Least console width, in columns, at which tables show memory by kind."""

Checkpoint = str | int | float | None


@dataclass(frozen=True)
class Choice:
    """Options of `zcompile.compile`."""

    stage: int
    prefetch: int
    checkpoint: Checkpoint
    dtype: torch.dtype | None
    replicas: int = 1
    """Ranks along the first, outer, dimension of a 2-D mesh; 1 for a 1-D mesh."""
    hybrid: Hybrid = Hybrid.HSDP
    """How shards are laid out over the two dimensions."""
    owners: bool = False
    """True if each parameter in `whole=` is kept whole by one rank; False if its rows are sharded."""

    def __str__(self) -> str:
        """The call of `zcompile.compile` for a `model`."""
        return self.call("model")

    def call(self, *given_first: str) -> str:
        """Return the call of `zcompile.compile` with these arguments before the options."""
        given = [f"stage={self.stage}"] + ([f"prefetch={self.prefetch}"] if self.stage else [])
        given += [f"checkpoint={self.checkpoint!r}"] if self.checkpoint is not None else []
        given += [f"dtype={self.dtype}"] if self.dtype is not None else []
        given += [f"shard={str(self.hybrid)!r}"] if self.replicas > 1 and self.hybrid is not Hybrid.HSDP else []
        return f"zcompile.compile({', '.join([*given_first, *given])})"


@dataclass(frozen=True, kw_only=True)
class StepForecast(RankMemory):
    """Predicted time of a step, and memory of the rank that holds most."""

    seconds: float
    """Seconds of a step, the optimizer's included."""
    flops: float
    """FLOPs of a step on one device, without recomputation."""

    @property
    def rate(self) -> float:
        """FLOP per second on each device."""
        return self.flops / self.seconds if self.seconds else math.inf

    def cells(self) -> tuple[str, ...]:
        """Return the table cells for FIGURES."""
        return f"{self.nbytes / 1e9:.2f}", f"{self.seconds:.3g}", f"{self.rate / 1e12:.3g}"

    def figures(self, dtype: torch.dtype | None) -> dict[str, Any]:
        """Return the figures that `zcompile plan --json` prints for compute in `dtype`, without the choice."""
        return {
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "bytes": self.nbytes,
            "bytes_by_kind": self.by_kind(),
            "seconds": self.seconds,
            "flops_per_second": self.rate,
        }


@dataclass(frozen=True, kw_only=True)
class Forecast(StepForecast):
    """Predicted time and memory of a rank under one choice of options."""

    choice: Choice
    world: int
    exposed: float
    """Seconds of the step that are spent waiting for communication."""
    hidden: float
    """Seconds of communication that compute hides."""

    @property
    def hidden_share(self) -> float | None:
        """Share of communication that is hidden, 0 to 1; None without communication."""
        total = self.hidden + self.exposed
        return self.hidden / total if total else None

    def as_dict(self) -> dict[str, Any]:
        """Return what `zcompile plan --json` prints for this forecast."""
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
    """Forecasts of a model on some hardware, printed as text."""

    model: str
    """The name of the model."""
    parameters: int
    """The number of its parameters."""
    hardware: Hardware
    memory_limit: float
    """Bytes that each rank has."""
    forecasts: Sequence[Any]

    _compared: ClassVar[str]
    """The plural noun for what is compared, for `repr`."""

    def __str__(self) -> str:
        console = TextConsole(160)
        self.print(console)
        return console.text

    def __repr__(self) -> str:
        many = f"{len(self.forecasts)} {self._compared}"
        return f"<{type(self).__name__} of {self.model}: {many}; print it, or see .forecasts>"

    def print(self, console: Console) -> None:
        """Print the tables and the recommendation."""
        raise NotImplementedError

    def check_fits(self) -> None:
        """Raise OptionError if no choice fits, on any of the worlds if there are several."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return what `zcompile plan --json` prints."""
        raise NotImplementedError

    def _say(self, console: Console, text: str) -> None:
        """Print text that may contain arbitrary names, without interpreting markup."""
        console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _about(self) -> dict[str, Any]:
        """Return the first entries that `zcompile plan --json` prints."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "hardware": self.hardware.name,
            "memory_limit": self.memory_limit,
        }

    def _nothing_fits(self, world: int, nearest: StepForecast, fix: str) -> OptionError:
        """Return the error for no choice that fits on `world` ranks."""
        least, over = _gigabytes(nearest.nbytes), _gigabytes(nearest.nbytes - self.memory_limit)
        problem = f"{_gigabytes(self.memory_limit)} fits no choice on {world} ranks: the least is {least}, {over} more"
        return OptionError("memory_limit", problem, fix)


@dataclass(frozen=True, repr=False)
class Plan(PrintedPlan):
    """Forecasts of a model on some hardware; printed as a table for each world."""

    forecasts: Sequence[Forecast]
    arguments: str = ""
    """Types of the tensors in a rank's batch."""
    tensor_parallel: int = 1
    """The number of parts of the model under tensor parallelism; a world counts the data-parallel ranks of one part."""
    whole: Sequence[str] = ()
    """Parameters that must each be kept whole by one rank; choices without owners are shown only for comparison."""

    _compared: ClassVar[str] = "forecasts"

    @property
    def worlds(self) -> list[int]:
        return sorted({forecast.world for forecast in self.forecasts})

    def of(self, world: int) -> list[Forecast]:
        """Return the forecasts for one world size."""
        return [forecast for forecast in self.forecasts if forecast.world == world]

    def fits(self, forecast: Forecast) -> bool:
        return forecast.nbytes <= self.memory_limit

    def serves(self, forecast: Forecast) -> bool:
        """Return True for a choice that keeps the parameters in `whole` whole on a rank."""
        return not self.whole or forecast.choice.owners or not forecast.choice.stage

    def verdict(self, forecast: Forecast) -> str:
        """Return "best" for the fastest choice that fits, "too big", "rows" if required owners are missing, or ""."""
        if forecast is self.fastest(forecast.world):
            return "best"
        return "too big" if not self.fits(forecast) else "" if self.serves(forecast) else "rows"

    def line(self, forecast: Forecast) -> str:
        """Return the call of `zcompile.compile` for a forecast's choice."""
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
        """Return the fastest choice that fits, the smallest if several are as fast; None if none fits."""
        fitting = [forecast for forecast in self.of(world) if self.serves(forecast) and self.fits(forecast)]
        return min(fitting, key=lambda forecast: (forecast.seconds, forecast.nbytes), default=None)

    def best(self, world: int) -> Forecast:
        """Return the fastest choice that fits.

        Raises:
            OptionError: none fits; names the closest choice, and by how much it exceeds the limit.
        """
        if (fastest := self.fastest(world)) is not None:
            return fastest
        nearest = min(filter(self.serves, self.of(world)), key=lambda forecast: forecast.nbytes)
        fix = f"take more ranks or a smaller batch; nearest is {self.line(nearest)}"
        raise self._nothing_fits(world, nearest, fix)

    def check_fits(self) -> None:
        """Raise OptionError for the first world size for which no choice fits."""
        for world in self.worlds:
            self.best(world)

    def as_dict(self) -> dict[str, Any]:
        """Return what `zcompile plan --json` prints."""
        fastest = {str(world): self.fastest(world) for world in self.worlds}
        return {
            **self._about(),
            "arguments": self.arguments,
            "tensor_parallel": self.tensor_parallel,
            "recommended": {world: best and self.line(best) for world, best in fastest.items()},
            "forecasts": [{**forecast.as_dict(), "fits": self.fits(forecast)} for forecast in self.forecasts],
        }

    def print(self, console: Console) -> None:
        """Print the tables and the recommendations."""
        about = (
            f"{self.parameters:,} parameters on {self.hardware.name}, at most {_gigabytes(self.memory_limit)} a rank"
        )
        self._say(console, f"{self.model}: {about}")
        if self.arguments:
            self._say(console, f"a rank's batch: {self.arguments}")
        for world in self.worlds:
            console.print(self._table(world, by_kind=console.width >= WIDE))
            label = "fastest that fits: " if self.fastest(world) else ""
            self._say(console, f"{label}{self.advice(world)}")

    def title(self, world: int) -> str:
        """Return the title for a number of ranks."""
        parts = f" for each of {self.tensor_parallel} parts of the model" if self.tensor_parallel > 1 else ""
        return f"{world} rank{'s' * (world > 1)}{parts}"

    def advice(self, world: int) -> str:
        """Return the call for the fastest choice that fits, or the problem and its fix if none does."""
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
"""Table headings: the options of a choice, and the figures of its forecast."""


def choice_cells(choice: Choice) -> tuple[str, ...]:
    """Return the table cells for CHOICE; "" for an option that does not apply or is not set."""
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
        data: Ranks along the data-parallel dimension.
        tensor: Ranks along the tensor-parallel dimension.
        microbatch_size: Samples in a micro-batch.
        microbatches: Micro-batches in a step, on each rank.
        schedule: See `zcompile.pipelining.action_tables`.
        stages_per_rank: Pipeline stages that each rank has.
        stage: The ZeRO stage.
        checkpoint: "unit", or None.
        dtype: The dtype to compute in; None for the model's own.
        sequence: Ranks along the dimension that divides the tokens of a sequence.
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
    sequence: int = 1

    @property
    def mesh(self) -> tuple[int, ...]:
        """The sizes of its dimensions, outermost first."""
        return tuple(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dimensions "pp", "dp" and "tp", and "sp" if sequences are divided, outermost first."""
        divided = {"sp": self.sequence} if self.sequence > 1 else {}
        return {"pp": self.pipeline, "dp": self.data, **divided, "tp": self.tensor}

    def lines(self, device: str, texts: ChoiceTexts) -> list[str]:
        """Return the lines of Python that make this choice for a `model` and an `optimizer`."""
        names = tuple(name for name, size in self.sizes.items() if name != "tp" or size > 1)
        lines = [f"mesh = init_device_mesh({device!r}, {self.mesh[: len(names)]}, mesh_dim_names={names})"]
        if self.tensor > 1:
            lines.append(f'parallelize_module(model, mesh["tp"], {texts.tensor_parallel})')
        given = [f"schedule={self.schedule!r}", f"microbatches={self.microbatches}"]
        given += [f"stages_per_rank={self.stages_per_rank}"] if self.stages_per_rank > 1 else []
        given += [f"stage={self.stage}"]
        given += ['sequence="auto"'] if self.sequence > 1 else []
        given += [f"checkpoint={self.checkpoint!r}"] if self.checkpoint else []
        given += [f"dtype={self.dtype}"] if self.dtype is not None else []
        given += [f"units={list(texts.units)}"] if texts.units else []
        lines.append(f"step = zcompile.train_step(model, {texts.loss}, optimizer, mesh=mesh, {', '.join(given)})")
        return lines


@dataclass(frozen=True)
class ChoiceTexts:
    """Python expressions in the lines for a choice that do not depend on it.

    Attributes:
        loss: The loss function.
        tensor_parallel: The tensor-parallel plan.
        units: The `units` option, as given.
    """

    loss: str = "None"
    tensor_parallel: str = "zcompile.tensor_parallel_plan(model)"
    units: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class MeshForecast(StepForecast):
    """Predicted time of a step with one choice, and memory of the rank that holds most."""

    choice: MeshChoice
    idle_share: float
    """Share of all ranks' time in which they neither compute nor update, 0 to 1."""

    def as_dict(self) -> dict[str, Any]:
        """Return what `zcompile plan --mesh auto --json` prints for this forecast."""
        choice = self.choice
        return {
            "mesh": choice.sizes,
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
        world: The number of ranks.
        global_batch: Samples in a step, over all ranks.
        smallest: The choice that takes the least memory; None if `forecasts` is not empty.
        searched: The number of choices that were compared.
        took: Seconds of the search.
        texts: Python expressions in the lines for every choice.
        notes: What was excluded, and why.
    """

    forecasts: Sequence[MeshForecast]
    """One forecast for each mesh on which a choice fits."""
    world: int
    global_batch: int
    smallest: MeshForecast | None
    searched: int
    took: float
    texts: ChoiceTexts = ChoiceTexts()
    notes: Sequence[str] = ()

    _compared: ClassVar[str] = "meshes"

    def best(self) -> MeshForecast:
        """Return the fastest choice that fits.

        Raises:
            OptionError: none fits; names the closest choice, and by how much it exceeds the limit.
        """
        if self.forecasts:
            return self.forecasts[0]
        if self.smallest is None:
            problem = f"{self.world} ranks have no mesh on which {self.global_batch} samples are micro-batches"
            raise OptionError("global_batch", problem, "give a larger batch, or smaller micro-batches")
        fix = f"use more ranks; the closest choice is {'; '.join(self.lines(self.smallest))}"
        raise self._nothing_fits(self.world, self.smallest, fix)

    def check_fits(self) -> None:
        """Raise OptionError if no choice fits."""
        self.best()

    def lines(self, forecast: MeshForecast) -> list[str]:
        """Return the lines of Python for a forecast's choice."""
        return forecast.choice.lines(self.hardware.device, self.texts)

    def as_dict(self) -> dict[str, Any]:
        """Return what `zcompile plan --mesh auto --json` prints."""
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
        """Print the table, and the lines for the recommended choice."""
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
        names = max((forecast.choice.sizes for forecast in self.forecasts), key=len)
        for heading in (*names, "micro-batches"):
            table.add_column(heading, justify="right", no_wrap=True)
        for heading in ("schedule", "stages", "ZeRO", "checkpoint"):
            table.add_column(heading, no_wrap=True)
        for heading in (*FIGURES, "idle"):
            table.add_column(heading, justify="right", no_wrap=True)
        for index, forecast in enumerate(self.forecasts):
            choice = forecast.choice
            table.add_row(
                *(str(choice.sizes.get(name, 1)) for name in names),
                f"{choice.microbatches} of {choice.microbatch_size}",
                choice.schedule if choice.pipeline > 1 else "",
                str(choice.stages_per_rank * choice.pipeline) if choice.pipeline > 1 else "",
                str(choice.stage),
                choice.checkpoint or "",
                *forecast.cells(),
                f"{forecast.idle_share:.0%}",
                style=None if index else "bold",
            )
        return table
