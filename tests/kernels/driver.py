"""Triton's driver of an H100 that is not there: to load machine code is to read off what it needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.runtime import driver as drivers

from tests.kernels.report import Binary

ARCHITECTURE = "sm_90a"
THREADS = 1024
"""That a block may have."""
SHARED_MEMORY = 232448
"""Bytes of it that a block may have."""
WORD = 4


class Utilities:
    """What Triton's own driver does by a library that calls CUDA's."""

    def __init__(self) -> None:
        self.loaded: list[Binary] = []

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        """Module, function, registers, spills, and how many threads a block may have."""
        binary = binary_of(name, code, shared)
        self.loaded.append(binary)
        return object(), object(), binary.registers, binary.spills, THREADS

    def get_device_properties(self, device: int) -> Mapping[str, int]:
        return {"max_shared_mem": SHARED_MEMORY}


class Launcher:
    """Of a kernel that nothing can run."""

    def __init__(self, *made_of: object) -> None:
        pass

    def __call__(self, *arguments: object) -> None:
        raise AssertionError("kernels are compiled here, not launched")


class Driver(GPUDriver):
    """As Triton's own for CUDA."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        super().__init__()
        self.utils = Utilities()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise AssertionError("kernels are compiled here, not launched")

    def get_benchmarker(self) -> Any:
        raise AssertionError("kernels are compiled here, not measured")


def install() -> list[Binary]:
    """Put the driver in the place of Triton's own, for the whole process; gives the list of what it loads."""
    backends["nvidia"] = replace(backends["nvidia"], driver=Driver)
    driver = Driver()
    drivers.set_active(driver)
    return driver.utils.loaded


def binary_of(name: str, code: bytes, shared: int) -> Binary:
    """What the tools that come with Triton read off machine code; shared memory is asked for at the launch."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(code)
        made_for, usage = (_cuobjdump(option, file) for option in ("--list-elf", "--dump-resource-usage"))
    assert f".{ARCHITECTURE}." in made_for, f"{name} is not for {ARCHITECTURE}: {made_for}"
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+) ", usage)
    assert found is not None, f"cuobjdump does not say what {name} needs: {usage}"
    registers, stack = map(int, found.groups())
    return Binary(name, registers, stack // WORD, shared)


def _cuobjdump(option: str, file: Path) -> str:
    command = [knobs.nvidia.cuobjdump.path, option, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
