"""The configurations that are measured beside each other, as data: nothing here imports torch or a peer."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

MIB = 2**20
Device = Literal["cuda", "cpu"]
Precision = Literal["bf16", "tf32", "fp32"]
Family = Literal["alone", "ddp", "zero1", "fsdp2", "deepspeed", "zcompile"]


@dataclass(frozen=True)
class Sizes:
    """The model and the batch; the defaults make 33.7 million parameters."""

    blocks: int = 8
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    sequence: int = 256
    batch: int = 4
    """Sequences in a step on each rank."""


LONG = Sizes(blocks=12, sequence=512)
SMALL = Sizes(blocks=6, width=256, heads=4, vocabulary=4096, sequence=128, batch=2)
"""6.9 million parameters."""


def add_sizes(parser: argparse.ArgumentParser, usual: Sizes) -> None:
    """Let a command be given sizes, each in place of a usual one."""
    for size in fields(Sizes):
        value = getattr(usual, size.name)
        parser.add_argument(f"--{size.name}", type=int, default=value, help=f"of the model and its batch ({value})")


def sizes_of(options: argparse.Namespace) -> Sizes:
    """The sizes that a command was given."""
    return Sizes(**{size.name: getattr(options, size.name) for size in fields(Sizes)})


@dataclass(frozen=True)
class Configuration:
    """One way to train the model on two ranks."""

    name: str
    family: Family
    stage: int
    """What is sharded, in ZeRO's words: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    compiled: bool = False
    """Whether a peer runs with torch.compile; zcompile always compiles."""
    ahead: bool = False
    """Whether FSDP2 is told what to gather ahead; on gloo it overlaps no other gather."""
    graphs: bool | Literal["step"] = False
    """Whether there are CUDA graphs: by torch.compile's `mode="reduce-overhead"`, or by zcompile's `cuda_graphs=`."""
    cast: bool = False
    """In bf16: whether zcompile casts parameters (`dtype=`); else the call runs under the autocast of the peers."""
    checkpoint: Literal["unit"] | None = None
    """Whether the backward computes each block again from its input."""

    updates: bool = False
    """Whether zcompile updates each unit within the backward (`train_step`), in place of the loop."""

    @property
    def communicates(self) -> bool:
        """Whether the ranks train one model together, rather than each one its own."""
        return self.family != "alone"

    @property
    def ours(self) -> bool:
        return self.family == "zcompile"


COMPUTE = "compute-compiled"
"""The compute of the floor: the compiled model and its optimizer on both ranks at once, without communication."""
BASELINE = "ddp"
"""What every time is also shown as a multiple of, and whose losses the others are held against."""
REFERENCES = (COMPUTE, BASELINE)

CONFIGURATIONS = (
    Configuration("compute", "alone", 0),
    Configuration(COMPUTE, "alone", 0, compiled=True),
    Configuration(BASELINE, "ddp", 0),
    Configuration("ddp-compiled", "ddp", 0, compiled=True),
    Configuration("zcompile-0", "zcompile", 0),
    Configuration("zero-optimizer", "zero1", 1),
    Configuration("deepspeed-1", "deepspeed", 1),
    Configuration("zcompile-1", "zcompile", 1),
    Configuration("fsdp2-2", "fsdp2", 2),
    Configuration("fsdp2-2-compiled", "fsdp2", 2, compiled=True),
    Configuration("deepspeed-2", "deepspeed", 2),
    Configuration("zcompile-2", "zcompile", 2),
    Configuration("fsdp2-3", "fsdp2", 3),
    Configuration("fsdp2-3-compiled", "fsdp2", 3, compiled=True),
    Configuration("fsdp2-3-ahead", "fsdp2", 3, compiled=True, ahead=True),
    Configuration("deepspeed-3", "deepspeed", 3),
    Configuration("zcompile-3", "zcompile", 3),
)
BY_NAME = {configuration.name: configuration for configuration in CONFIGURATIONS}


def peers(stage: int, among: Sequence[Configuration] = CONFIGURATIONS) -> tuple[str, ...]:
    """The names of the other ways to train at `stage`."""
    return tuple(c.name for c in among if c.stage == stage and c.communicates and not c.ours)


def groups(names: Iterable[str], largest: int) -> list[tuple[Configuration, ...]]:
    """Split `names` into groups of at most about `largest` that are in memory together, stage by stage.

    Each group holds the references among `names`, so that ratios are always taken inside one group. All are one
    group where `largest` allows.
    """
    chosen = [configuration for configuration in CONFIGURATIONS if configuration.name in set(names)]
    if len(chosen) <= largest:
        return [tuple(chosen)]
    shared = [configuration for configuration in chosen if configuration.name in REFERENCES]
    rest = [configuration for configuration in chosen if configuration.name not in REFERENCES]
    return [tuple(shared + part) for part in _stages_together(rest, max(1, largest - len(shared))) or [[]]]


def _stages_together(rest: Sequence[Configuration], room: int) -> list[list[Configuration]]:
    """Parts of whole stages, each of at most `room` unless one stage alone is larger."""
    parts: list[list[Configuration]] = []
    for stage in sorted({configuration.stage for configuration in rest}):
        here = [configuration for configuration in rest if configuration.stage == stage]
        if parts and len(parts[-1]) + len(here) <= room:
            parts[-1] += here
        else:
            parts.append(here)
    return parts
