"""Devices: streams, events and settings of GPUs, memory of GPUs and hosts. No other file names a kind of device.

A GPU is any device with streams and memory of its own. Streams and events are classes of torch's module for its kind
(`torch.cuda`, `torch.xpu`), as torch itself uses; collectives are those of its group's backend.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOST, CUDA = "cpu", "cuda"
KINDS = (HOST, CUDA, "xpu")
"""Kinds of devices that have hardware profiles."""
NCCL = "nccl"
"""The backend that can average, instead of only sum."""
_WITHOUT_STREAMS = (HOST, "meta", "mps")
"""Kinds of devices that do not count as GPUs: they have no streams for collectives."""


def gpu_kind() -> str:
    """The kind of GPU that this process can use, as torch calls it; `cuda` if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return CUDA if found is None or found.type in _WITHOUT_STREAMS else found.type


def backend_of(kind: str) -> str:
    """The default backend of torch for collectives on devices of this kind; gloo if it has none."""
    try:
        return str(dist.get_default_backend_for_device(kind))
    except ValueError:
        return str(dist.Backend.GLOO)


def is_gpu(device: torch.device) -> bool:
    """True for a device with streams and memory of its own."""
    return device.type not in _WITHOUT_STREAMS


def has_graphs(device: torch.device) -> bool:
    """True for CUDA devices, the only ones that torch's CUDA graph trees support."""
    return device.type == CUDA


def is_host(device: torch.device) -> bool:
    """True for the CPU."""
    return device.type == HOST


# -- what there is ----------------------------------------------------------------------------------------------------


def gpu_count() -> int:
    """The number of GPUs that this process can use."""
    gpus = torch.get_device_module(gpu_kind())
    return int(gpus.device_count()) if gpus.is_available() else 0


def usual_kind() -> str:
    """The kind of device that ranks train on by default on this machine."""
    return gpu_kind() if gpu_count() else HOST


def describe(index: int) -> str:
    """A GPU's name and memory."""
    about = torch.get_device_module(gpu_kind()).get_device_properties(index)
    return f"{about.name}, {about.total_memory / 1e9:.0f} GB"


def use_gpu(index: int) -> None:
    """Make a GPU this process's current one, if there are any."""
    if gpu_count():
        torch.get_device_module(gpu_kind()).set_device(index)


def own_device(kind: str) -> torch.device:
    """This process's current device of a kind."""
    device = torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device()) if is_gpu(device) else device


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that code on `device` draws from: the host's, and a GPU's own."""
    result = [torch.default_generator]
    if is_gpu(device):
        index = torch.empty(0, device=device).get_device()
        result.append(torch.get_device_module(device).default_generators[index])
    return result


# -- kernels ----------------------------------------------------------------------------------------------------------

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Getter and setter of a process-wide setting."""


def setting_of(owner: Any, name: str) -> Setting:
    """An attribute as a setting."""
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def kernel_settings() -> dict[str, Setting]:
    """Settings that choose between GPU kernels, and so can change the last bits of results."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return {
        **{f"cudnn.{one}": setting_of(cudnn, one) for one in ("enabled", "benchmark", "deterministic", "allow_tf32")},
        "matmul.fp16_reduced": setting_of(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        "matmul.bf16_reduced": setting_of(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        "matmul.fp16_accumulation": setting_of(cuda.matmul, "allow_fp16_accumulation"),
        "sdp.flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "sdp.mem_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "sdp.math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "sdp.cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    }


# -- streams and events -----------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.Stream:
    """A new stream of a GPU."""
    result: torch.Stream = torch.get_device_module(device).Stream(device)
    return result


def current_stream(device: torch.device) -> torch.Stream:
    """A GPU's current stream."""
    result: torch.Stream = torch.get_device_module(device).current_stream(device)
    return result


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Launch kernels on `stream` inside; None, for the host, does nothing."""
    if stream is None:
        return contextlib.nullcontext()
    entered: contextlib.AbstractContextManager[Any] = torch.get_device_module(stream.device).stream(stream)
    return entered


def stream_number(device: torch.device) -> int:
    """A number for the current stream; 0 on the host."""
    return int(current_stream(device).stream_id) if is_gpu(device) else 0


def event_here(device: torch.device, event: torch.Event | None = None, *, timed: bool = False) -> torch.Event | None:
    """Record `event`, or a new one (with its time, if `timed`), on the current stream.

    Returns None while the stream is captured into a graph, which the event would become a part of.
    """
    if is_capturing(device):
        return None
    made: torch.Event = event or torch.get_device_module(device).Event(enable_timing=timed)
    made.record(current_stream(device))
    return made


def only_asks(device: torch.device) -> None:
    """Prepare this thread to query events of `device`: without using memory on other GPUs or breaking captures.

    While any thread captures a graph, CUDA takes an event query on another thread for an error and invalidates the
    capture, unless the capture mode of that other thread is thread-local.
    """
    if is_gpu(device):
        torch.get_device_module(device).set_device(device)
    if device.type == CUDA:
        with contextlib.suppress(OSError, AttributeError):  # ROCm has another driver
            own = ctypes.c_int(_OWN_CAPTURES)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(own))


_OWN_CAPTURES = 1
"""CUDA's CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


def is_capturing(device: torch.device) -> bool:
    """True while the current stream is captured into a graph; not every kind of device has graphs."""
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


@contextlib.contextmanager
def captured(stream: torch.Stream, pool: Any = None) -> Iterator[Any]:
    """Capture what is launched inside, on `stream` and those that wait for it, into a graph; nothing of it runs.

    Yields the graph, with `replay()` and `pool()`. `pool`: that of another graph, to use the same memory: what one of
    them has computed is lost once the other is replayed. Threads of other groups' watchdogs may query events meanwhile.
    """
    gpus = torch.get_device_module(stream.device)
    graph = gpus.CUDAGraph()
    with gpus.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if is_gpu(device):
        torch.get_device_module(device).synchronize(device)


# -- memory -----------------------------------------------------------------------------------------------------------


def total_bytes(device: torch.device, ranks: int) -> float:
    """A rank's memory in bytes: its GPU's, or its share of the host's. `ranks`: the size of the world."""
    if is_gpu(device):
        return float(torch.get_device_module(device).get_device_properties(device).total_memory)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / here


def free_bytes(device: torch.device) -> int:
    """Free bytes of `device`: what a GPU's driver and allocator hold unused, or a rank's share of the host's.

    Ranks of one host (torchrun's LOCAL_WORLD_SIZE) share its memory, or what the limit of their cgroup leaves.
    """
    if is_gpu(device):
        gpus = torch.get_device_module(device)
        return int(gpus.mem_get_info(device)[0] + gpus.memory_reserved(device) - gpus.memory_allocated(device))
    return min(_available(), _left_of_group()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _available() -> int:
    """Bytes that the kernel can allocate without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_of_group() -> int:
    """Bytes that this process's cgroup may still use; `_ALL` if it has no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
        folder = Path("/sys/fs/cgroup") / path
        most = (folder / "memory.max").read_text().strip()
        return _ALL if most == "max" else int(most) - int((folder / "memory.current").read_text())
    except (OSError, StopIteration):
        return _ALL


_ALL = 2**63


# -- random numbers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def numbers_of_rank(rank: int, device: torch.device, *, others_draw: bool = False) -> Iterator[None]:
    """Draw this rank's own random numbers inside; generators that were equal on all ranks are equal again afterwards.

    What is drawn inside follows from the generators' states and the rank. A generator that was not used is unchanged;
    otherwise it advances by a single draw. With `others_draw` it always advances, because other ranks have drawn.
    """
    generators = generators_of(device)
    states = [_reseeded(generator, rank) for generator in generators]
    try:
        yield
    finally:
        for generator, (untouched, begun, drawn) in zip(generators, states, strict=True):
            unused = not others_draw and torch.equal(generator.get_state(), begun)
            generator.set_state(untouched if unused else drawn)


def within_numbers_of_rank(device: torch.device) -> bool:
    """True inside `numbers_of_rank`, and where a recomputation has restored its generator states."""
    return any(generator.initial_seed() >= _OWN for generator in generators_of(device))


_OWN = 1 << 62
"""Ranks' seeds begin here. The user's are smaller, unless drawn at random, which each rank does by itself."""


def _reseeded(generator: torch.Generator, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed `generator` for this rank; returns its old state, its new state, and the one to restore if it is used."""
    untouched = generator.get_state()
    seed = _draw(generator)
    drawn = generator.get_state()
    generator.manual_seed(_OWN + (seed + rank) % _OWN)
    return untouched, generator.get_state(), drawn


def _draw(generator: torch.Generator) -> int:
    """A number determined by the generator's state, which it advances."""
    if not is_host(generator.device):
        # Drawing on a GPU would launch a kernel and wait for it; seed and offset are known on the host.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        generator = torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)
    return int(torch.randint(2**62, (), generator=generator))
