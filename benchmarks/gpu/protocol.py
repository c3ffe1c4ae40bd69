"""What `benchmarks.gpu` measures, as data, and what its workers answer: no torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.common.configurations import Configuration, Precision, Sizes

PRECISIONS: tuple[Precision, ...] = ("bf16", "tf32", "fp32")
"""bf16: autocast; tf32: float32 whose products may use TF32; fp32: float32 throughout."""

LARGE = Sizes(blocks=24, width=1024, heads=16, vocabulary=50304, sequence=1024, batch=8)
TINY = Sizes(blocks=2, width=32, heads=2, vocabulary=64, sequence=16, batch=2)
RATE = 1e-4
"""Slower than on the CPU: rounding of 16 bits is to stay rounding over all steps of a run."""

ALONE, TOGETHER = "compile", "ddp-compiled"
"""What every time is also shown as a multiple of, and whose losses the others are held against: in a world of one, and
in a larger one."""

CONFIGURATIONS = (
    Configuration(ALONE, "alone", 0, compiled=True),
    Configuration("eager", "alone", 0),
    Configuration("compile-graphs", "alone", 0, compiled=True, graphs=True),
    Configuration(TOGETHER, "ddp", 0, compiled=True),
    Configuration("ddp", "ddp", 0),
    Configuration("zero-optimizer", "zero1", 1),
    Configuration("fsdp2-2", "fsdp2", 2),
    Configuration("fsdp2-2-compiled", "fsdp2", 2, compiled=True),
    Configuration("fsdp2-3", "fsdp2", 3),
    Configuration("fsdp2-3-compiled", "fsdp2", 3, compiled=True),
    *(Configuration(f"zcompile-{stage}", "zcompile", stage) for stage in range(4)),
    *(Configuration(f"zcompile-{stage}-cast", "zcompile", stage, cast=True) for stage in range(4)),
    *(Configuration(f"zcompile-{stage}-graphs", "zcompile", stage, graphs=True) for stage in (0, 3)),
    *(Configuration(f"zcompile-{stage}-step", "zcompile", stage, graphs="step", updates=True) for stage in (0, 3)),
)
BY_NAME = {configuration.name: configuration for configuration in CONFIGURATIONS}


def reference(world: int) -> str:
    """The name of the configuration that the others are compared with."""
    return ALONE if world == 1 else TOGETHER


def usual(world: int) -> list[str]:
    """What is measured unless asked for otherwise: alone what one device can do, together the peers."""
    if world > 1:
        return [c.name for c in CONFIGURATIONS if c.communicates]
    left_out = ("zcompile-1-cast", "zcompile-2-cast")
    return [c.name for c in CONFIGURATIONS if (c.family == "alone" or c.ours) and c.name not in left_out]


def chosen(names: list[str], precision: Precision) -> list[Configuration]:
    """The configurations of these names that there are in `precision`, in order."""
    return [c for c in CONFIGURATIONS if c.name in names and (precision == "bf16" or not c.cast)]


@dataclass(frozen=True)
class Built:
    """The first answer: the model is there, nothing is compiled yet."""

    parameters: int
    device: str
    """Its name."""
    memory: int
    """Bytes of the device."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Warm:
    """Steps of the warm-up."""

    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Turn:
    """What a rank found in a turn; seconds are those of one step."""

    seconds: float
    """From a device that has nothing to do to one that has nothing to do any more."""
    on_device: float | None
    """The same between two events in the device's stream; None on the CPU."""
    host: float
    """Of a step that begins with an idle device: until its last launch has returned."""
    single: float
    """Of such a step as a whole."""
    losses: list[float]
    """Of all steps of the turn, in order."""
    allocated: int
    """Peak of bytes in tensors, after settling; resident bytes of the process on the CPU."""
    reserved: int
    """Peak of bytes that the allocator holds; 0 on the CPU."""


@dataclass(frozen=True)
class Counts:
    """Of one step, as torch's profiler saw it."""

    launches: int
    """Calls of the host that launch a kernel."""
    graphs: int
    """Calls that launch a CUDA graph."""
    kernels: int
    """Kernels that ran, those in graphs included."""
    copies: int
    """Copies and fills of memory that ran."""
    waits: int
    """Calls in which the host waits for a stream or an event."""
    busy: float
    """Seconds in which the device ran something."""
    longest: list[tuple[str, int, float]] = field(default_factory=list)
    """Kernels by name: how many, and their seconds, most first."""


@dataclass(frozen=True)
class Inspection:
    """What was found; files are beside it."""

    counts: Counts | None = None
    """None without a device, or where the profiler saw nothing of it."""
    timelines: dict[str, dict[str, float]] = field(default_factory=dict)
    """Zcompile's own, by clock (host, device): seconds by what they were spent on."""
