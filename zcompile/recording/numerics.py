"""What of a process decides the last bit of a result: threads, flags of torch, the processor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zcompile.runtime.device import Setting, describe, is_gpu, kernel_settings, setting_of

SETTINGS: Mapping[str, Setting] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": setting_of(torch.backends.mkldnn, "enabled"),
    **kernel_settings(),
}
"""How each is read and set."""


def numerics() -> dict[str, Any]:
    """The settings of this process, as JSON."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


@contextlib.contextmanager
def with_numerics(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the process has the settings of another one; afterwards its own."""
    before = numerics()
    try:
        _set(wanted, before)
        yield
    finally:
        _set(before, numerics())


def _set(wanted: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if name in SETTINGS and now[name] != value:
            SETTINGS[name][1](value)


def processor(device: torch.device) -> str:
    """What computes on `device`: kernels choose what they do by it."""
    return describe(device.index or 0) if is_gpu(device) else torch.backends.cpu.get_cpu_capability()
