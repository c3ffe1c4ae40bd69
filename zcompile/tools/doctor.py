"""The doctor: checks what zcompile needs on this machine, and measures a hardware profile."""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from scipy.optimize import least_squares
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile.compile_model import compile
from zcompile.cost.hardware import Hardware, load_profile, profile_text
from zcompile.cost.roofline import region_seconds
from zcompile.cost.timeline import Spent
from zcompile.engine.calibration import survey
from zcompile.errors import GroupError, OptionError
from zcompile.ir.region import Region
from zcompile.runtime.device import HOST, backend_of, describe, gpu_count, gpu_kind, own_device, use_gpu, usual_kind
from zcompile.runtime.groups import Communicator
from zcompile.tools.gpt import GPT, GPTShape
from zcompile.torch_range import TESTED, is_tested

PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str
    found: str
    is_well: bool = True
    fix: str = ""
    """How to get what is missing."""
    is_needed: bool = True
    """False if zcompile works without it."""


def examine() -> Iterator[Finding]:
    """Check Python, torch, devices, backends, compilers and optional packages, without measuring anything."""
    yield Finding("Python", platform.python_version(), sys.version_info >= (3, 11), "install Python 3.11 or later")
    yield Finding("torch", _torch_release())
    yield from _devices()
    yield from _backends()
    yield from _compilers()
    dot = shutil.which("dot")
    yield Finding("graphviz", dot or "not found", bool(dot), "install graphviz, to draw programs", is_needed=False)
    for package, use in (("safetensors", "checkpoints of Hugging Face"), ("transformers", "plans from their configs")):
        yield _package(package, use)


def _torch_release() -> str:
    """The version, and whether the tests have run on it. Importing zcompile raises on unsupported versions."""
    if is_tested(torch.__version__):
        return torch.__version__
    return f"{torch.__version__}, on which the tests have not run; they have on {', '.join(TESTED)}"


def _devices() -> Iterator[Finding]:
    for index in range(gpu_count()):
        yield Finding(f"{gpu_kind()}:{index}", describe(index))
    if not gpu_count():
        yield Finding("devices", f"{os.cpu_count()} CPU cores, no GPU that torch can use")


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("torch.distributed", "not built", False, "install a torch that has it")
        return
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    yield Finding(
        "backends", ", ".join(name for name, there in has.items() if there), has["gloo"], "install another torch"
    )
    if gpu_count():
        name, fix = backend_of(gpu_kind()), "install a torch built for these GPUs"
        there = dist.is_backend_available(name)
        yield Finding(name, "found" if there else "not built", there, fix)


def _compilers() -> Iterator[Finding]:
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    fix = "install g++, or choose backend='eager'"
    yield Finding("C++ compiler", compiler or "not found", bool(compiler), fix)
    if gpu_count():
        yield replace(_package("triton", "Inductor on a GPU"), is_needed=True)


def _package(name: str, use: str) -> Finding:
    try:
        return Finding(name, version(name), is_needed=False)
    except PackageNotFoundError:
        return Finding(name, "not installed", False, f"pip install {name}, for {use}", is_needed=False)


# -- measuring --------------------------------------------------------------------------------------------------------


def measured(name: str, ranks: int | None = None) -> Hardware | None:
    """A profile of this machine, measured by several ranks at the same time.

    Under torchrun, its ranks measure, links between them included; None on ranks other than 0. Otherwise `ranks`
    processes are started on this machine; default: one per GPU, or two without GPUs.

    Raises:
        OptionError: `ranks` is less than one, or more than the number of GPUs.
        GroupError: a rank failed.
    """
    if "WORLD_SIZE" in os.environ:
        _join(None, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        try:
            profile = profile_of_ranks(name)
            return profile if dist.get_rank() == 0 else None
        finally:
            dist.destroy_process_group()
    gpus = gpu_count()
    world = (gpus or 2) if ranks is None else ranks
    if world < 1 or (gpus and world > gpus):
        raise OptionError("ranks", f"is {world}, and there are {gpus} GPUs", "give at least 1, and at most one per GPU")
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(_rank, (world, folder, name), nprocs=world)
        except Exception as error:
            fix = "fix this error, or run `zcompile doctor` without --write, which does not measure"
            raise GroupError("a measuring rank", f"failed: {error}", fix) from error
        return load_profile(str(Path(folder) / "profile.toml"))


def _rank(rank: int, world: int, folder: str, name: str) -> None:
    """The main function of a measuring process."""
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(max((os.cpu_count() or 1) // world, 1))
    _join(f"file://{folder}/store", rank, world)
    profile = profile_of_ranks(name)
    if rank == 0:
        (Path(folder) / "profile.toml").write_text(profile_text(profile))
    dist.destroy_process_group()


def _join(store: str | None, rank: int, world: int) -> None:
    use_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    backend = backend_of(usual_kind())
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=PATIENCE)


def profile_of_ranks(name: str) -> Hardware:
    """The profile that the ranks of the default group measure together. Collective.

    On a CPU, the rates of the cost model are fitted to measured regions: least squares of the logarithms of seconds,
    weighted by the seconds of each region.
    """
    kind, world = usual_kind(), dist.get_world_size()
    result = survey(Communicator(init_device_mesh(kind, (world,)), own_device(kind)), name)
    if kind == HOST:
        result = fit(result, _observed(mesh_of_this_rank(kind)))
    return result


def mesh_of_this_rank(kind: str) -> DeviceMesh:
    """A mesh of this rank only, detached from the mesh of all ranks: for a model that trains alone. Collective."""
    both = init_device_mesh(kind, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "alone"))
    return DeviceMesh.from_group(both.get_group("alone"), kind)


def _observed(alone: DeviceMesh) -> list[Observation]:
    seen: list[Observation] = []
    for reference in REFERENCES:
        dist.barrier()
        seen += observe(alone, reference)
    return seen


FITTED = ("flops", "elementwise", "attention", "functions", "launch")
MOST = 8.0
"""Largest factor between a fitted rate and the rate measured separately."""
STEPS = 5
"""Measured steps of each reference model, after a first step that compiles."""


@dataclass(frozen=True)
class Reference:
    """A GPT whose regions are timed, and its batch."""

    shape: GPTShape
    batch: int
    length: int
    vocabulary: int


REFERENCES = (
    Reference(GPTShape(2, 512, 8), batch=4, length=256, vocabulary=8192),
    Reference(GPTShape(2, 256, 4), batch=8, length=512, vocabulary=2048),
)


@dataclass(frozen=True)
class Observation:
    """A timed region."""

    region: Region
    seconds: float
    """Median over its runs."""
    times: int
    """Number of runs in a step."""


def observe(mesh: DeviceMesh, reference: Reference, backend: str = "inductor") -> list[Observation]:
    """Train a reference model on this rank alone, and time its regions. `mesh` has one rank."""
    torch.manual_seed(0)
    model = GPT(reference.shape, reference.length, reference.vocabulary)
    compiled = compile(model, mesh=mesh, stage=0, backend=backend)
    tokens, targets = torch.randint(0, reference.vocabulary, (2, reference.batch, reference.length))
    result: dict[str, list[float]] = defaultdict(list)
    for step in range(STEPS + 1):
        compiled(tokens, targets).backward()
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.sub_(1e-4)  # writing to a parameter ends the step, as an optimizer would
                parameter.grad = None
        for line in compiled.timeline.lines if step else ():
            if line.spent is Spent.COMPUTE:
                result[line.operation].append(line.seconds)
    regions = compiled.programs[0].regions
    return [
        Observation(regions[name], median(seconds), len(seconds) // STEPS)
        for name, seconds in result.items()
        if name in regions
    ]


def fit(hardware: Hardware, observations: Sequence[Observation]) -> Hardware:
    """`hardware` with its rates fitted to the observations, each changed by a factor of at most `MOST`."""
    whole = sum(seen.seconds * seen.times for seen in observations)
    weights = [math.sqrt(seen.seconds * seen.times / whole) for seen in observations]

    def residuals(logarithms: Sequence[float]) -> list[float]:
        tried = _scaled(hardware, logarithms)
        ratios = (region_seconds(seen.region, tried) / seen.seconds for seen in observations)
        return [weight * math.log(max(ratio, 1e-6)) for weight, ratio in zip(weights, ratios, strict=True)]

    bound = math.log(MOST)
    found = least_squares(residuals, [0.0] * len(FITTED), bounds=(-bound, bound), diff_step=0.02, max_nfev=40)
    return _scaled(hardware, found.x)


def _scaled(hardware: Hardware, logarithms: Sequence[float]) -> Hardware:
    """`hardware` with each fitted rate multiplied by the exponential of its entry in `logarithms`."""
    products, *rest = map(math.exp, logarithms)
    factors = dict(zip(FITTED[1:], rest, strict=True))
    flops = {dtype: rate * products for dtype, rate in hardware.flops.items()}
    changes: dict[str, Any] = {name: getattr(hardware, name) * factor for name, factor in factors.items()}
    changes |= {share: min(changes[share], 1.0) for share in ("elementwise", "attention")}
    return replace(hardware, flops=flops, **changes)
