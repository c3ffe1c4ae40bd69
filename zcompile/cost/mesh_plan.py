"""Plans over meshes: how to divide ranks between pipeline, data and tensor parallelism, and what a step takes then."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zcompile.cost.forecast import PrintedPlan, StepForecast
from zcompile.cost.hardware import Hardware
from zcompile.errors import OptionError


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
        model: What it is called.
        parameters: How many it has.
        hardware: What is planned for.
        memory_limit: Bytes of a rank.
        world: Ranks.
        global_batch: Samples of a step, of all ranks.
        forecasts: One for each mesh that something fits on.
        smallest: What takes least memory of everything that was looked at; None if `forecasts` are not empty.
        searched: How many choices were compared.
        took: Seconds of the search.
        texts: What lines of Python say beside a choice.
        notes: What was left out, and why.
    """

    model: str
    parameters: int
    hardware: Hardware
    memory_limit: float
    world: int
    global_batch: int
    forecasts: Sequence[MeshForecast]
    smallest: MeshForecast | None
    searched: int
    took: float
    texts: ChoiceTexts = ChoiceTexts()
    notes: Sequence[str] = ()

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
        least = f"{self.smallest.nbytes / 1e9:.4g} GB, {(self.smallest.nbytes - self.memory_limit) / 1e9:.4g} GB more"
        problem = f"{self.memory_limit / 1e9:.4g} GB holds nothing on {self.world} ranks: the least is {least}"
        raise OptionError("memory_limit", problem, f"use more ranks; the closest choice is {self._call(self.smallest)}")

    def lines(self, forecast: MeshForecast) -> list[str]:
        """The lines of Python that make a choice."""
        return forecast.choice.lines(self.hardware.device, self.texts)

    def _call(self, forecast: MeshForecast) -> str:
        return "; ".join(self.lines(forecast))

    def as_dict(self) -> dict[str, Any]:
        """What `zcompile plan --mesh auto --json` prints."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "hardware": self.hardware.name,
            "memory_limit": self.memory_limit,
            "world": self.world,
            "global_batch": self.global_batch,
            "searched": self.searched,
            "took": self.took,
            "recommended": self.lines(self.forecasts[0]) if self.forecasts else None,
            "forecasts": [forecast.as_dict() for forecast in self.forecasts],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<MeshPlan of {self.model}: {len(self.forecasts)} meshes; print it, or see .forecasts>"

    def print(self, console: Console) -> None:
        """The table, and the lines that do what is recommended."""
        say = functools.partial(self._say, console)
        say(f"{self.model}: {self.parameters:,} parameters on {self.hardware.name}, {self.world} ranks")
        say(f"{self.global_batch} samples a step, at most {self.memory_limit / 1e9:.4g} GB a rank")
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
        for heading in ("GB", "step s", "TFLOP/s", "idle"):
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
                f"{forecast.nbytes / 1e9:.2f}",
                f"{forecast.seconds:.3g}",
                f"{forecast.rate / 1e12:.3g}",
                f"{forecast.idle_share:.0%}",
                style=None if place else "bold",
            )
        return table
