"""Devices: what a GPU has and the host has not, and the memory of both. No other file names a kind of device.

A GPU is any device with streams and memory of its own. Streams and events are those of torch's module for its kind
(`torch.cuda`, `torch.xpu`), of which torch makes its own; collectives are those of its group's backend.
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
"""Kinds of devices that profiles of hardware are about."""
NCCL = "nccl"
"""The backend that averages on the wire."""
_WITHOUT_STREAMS = (HOST, "meta", "mps")
"""Kinds of devices that are no GPU here: there are no streams for collectives to run on."""


def gpu_kind() -> str:
    """The kind of GPU that this process can use, as torch calls it; CUDA's where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return CUDA if found is None or found.type in _WITHOUT_STREAMS else found.type


def backend_of(kind: str) -> str:
    """What torch takes for collectives of tensors on devices of this kind; gloo where it knows of nothing."""
    try:
        return str(dist.get_default_backend_for_device(kind))
    except ValueError:
        return str(dist.Backend.GLOO)


def is_gpu(device: torch.device) -> bool:
    """True for a device with streams and memory of its own."""
    return device.type not in _WITHOUT_STREAMS


def has_graphs(device: torch.device) -> bool:
    """True for a device of CUDA, whose graphs torch's trees are of."""
    return device.type == CUDA


def is_host(device: torch.device) -> bool:
    """True for the device whose memory Python's own threads read and write."""
    return device.type == HOST


# -- what there is ----------------------------------------------------------------------------------------------------


def gpu_count() -> int:
    """The number of GPUs that this process can use."""
    gpus = torch.get_device_module(gpu_kind())
    return int(gpus.device_count()) if gpus.is_available() else 0


def usual_kind() -> str:
    """The kind of device that ranks of this machine train on."""
    return gpu_kind() if gpu_count() else HOST


def describe(index: int) -> str:
    """What a GPU is called, and its memory."""
    about = torch.get_device_module(gpu_kind()).get_device_properties(index)
    return f"{about.name}, {about.total_memory / 1e9:.0f} GB"


def use_gpu(index: int) -> None:
    """Make a GPU this process's own, where there is one."""
    if gpu_count():
        torch.get_device_module(gpu_kind()).set_device(index)


def own_device(kind: str) -> torch.device:
    """The device of this kind that this process works with."""
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
"""How something that a process has set is read, and how it is set."""


def setting_of(owner: Any, name: str) -> Setting:
    """An attribute as a setting."""
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def kernel_settings() -> dict[str, Setting]:
    """What decides which kernels compute on a GPU, and with it the last bit of what they give."""
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
    """A stream beside the current one of a GPU."""
    result: torch.Stream = torch.get_device_module(device).Stream(device)
    return result


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that a GPU's kernels are launched on now."""
    result: torch.Stream = torch.get_device_module(device).current_stream(device)
    return result


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Inside, kernels are launched on `stream`; on the host there is none."""
    if stream is None:
        return contextlib.nullcontext()
    entered: contextlib.AbstractContextManager[Any] = torch.get_device_module(stream.device).stream(stream)
    return entered


def stream_number(device: torch.device) -> int:
    """A number for the current stream; 0 on the host."""
    return int(current_stream(device).stream_id) if is_gpu(device) else 0


def event_here(device: torch.device, event: torch.Event | None = None, *, timed: bool = False) -> torch.Event | None:
    """`event`, or a new one, which tells its time if `timed`, at this point of the current stream.

    None while that is captured into a graph, of which it would become a part.
    """
    gpus = torch.get_device_module(device)
    if _is_capturing(gpus):
        return None
    made: torch.Event = event or gpus.Event(enable_timing=timed)
    made.record(current_stream(device))
    return made


def only_asks(device: torch.device) -> None:
    """Make this thread one that asks for events of `device` alone: without memory on another GPU, nor harm to captures.

    While any thread captures a graph, CUDA takes a question about an event from another one for an error of the
    capture's, unless that other thread has said that it minds only its own.
    """
    if is_gpu(device):
        torch.get_device_module(device).set_device(device)
    if device.type == CUDA:
        with contextlib.suppress(OSError, AttributeError):  # ROCm's driver is another one
            own = ctypes.c_int(_OWN_CAPTURES)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(own))


_OWN_CAPTURES = 1
"""CUDA's CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


def _is_capturing(gpus: Any) -> bool:
    """Whether the current stream is captured into a graph; not every kind of GPU has these."""
    asked = getattr(gpus, "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def synchronize(device: torch.device) -> None:
    """Return when the device has nothing left to do."""
    if is_gpu(device):
        torch.get_device_module(device).synchronize(device)


# -- memory -----------------------------------------------------------------------------------------------------------


def total_bytes(device: torch.device, ranks: int) -> float:
    """Bytes of memory that a rank has: of its GPU, or its part of the host's; `ranks`: of the world."""
    if is_gpu(device):
        return float(torch.get_device_module(device).get_device_properties(device).total_memory)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / here


def free_bytes(device: torch.device) -> int:
    """Free bytes of `device`: of a GPU what the driver has and what the allocator holds unused, of a host its share.

    Ranks of one host (torchrun's LOCAL_WORLD_SIZE) share its memory, or what the control group leaves of it.
    """
    if is_gpu(device):
        gpus = torch.get_device_module(device)
        return int(gpus.mem_get_info(device)[0] + gpus.memory_reserved(device) - gpus.memory_allocated(device))
    return min(_available(), _left_of_group()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _available() -> int:
    """What the kernel could give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_of_group() -> int:
    """What the control group of this process may still take; all there is where it has no limit."""
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
    """Draw random numbers of this rank's own inside; outside, generators that were equal on all ranks stay equal.

    What is drawn inside follows from the generators' states and the rank. Where nothing is drawn nothing changes; else
    each generator goes on as after a single draw. With `others_draw` it does so in any case: other ranks have drawn.
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
    """True if generators are in a state that `numbers_of_rank` has begun, as a recomputation of it restores it."""
    return any(generator.initial_seed() >= _OWN for generator in generators_of(device))


_OWN = 1 << 62
"""Seeds of ranks begin here; the user's are smaller, unless they were drawn, which is done on each rank apart."""


def _reseeded(generator: torch.Generator, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed `generator` for this rank; gives its state before, as it begins now, and as it is to be if used."""
    untouched = generator.get_state()
    seed = _draw(generator)
    drawn = generator.get_state()
    generator.manual_seed(_OWN + (seed + rank) % _OWN)
    return untouched, generator.get_state(), drawn


def _draw(generator: torch.Generator) -> int:
    """A number that follows from the generator's state, which goes on."""
    if not is_host(generator.device):
        # Drawing on a GPU would launch a kernel and wait for it; seed and offset are known on the host.
        offset = generator.get_offset()
        generator.set_offset(offset + 4)
        generator = torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)
    return int(torch.randint(2**62, (), generator=generator))
