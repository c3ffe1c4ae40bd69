"""Builds the simulated device, once for each version of its sources, of torch and of the compiler's options.

Nothing here imports torch: the device has to be loaded before it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
OPTIONS = ("-std=c++20", "-O1", "-DNDEBUG", "-w", "-shared", "-fPIC", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
LIBRARIES = {"device": ("c10", "torch_cpu", "torch"), "nccl": ("c10", "torch_cpu", "torch", "torch_python")}
SOURCES = {"device": ("device.cpp", "graphs.cpp"), "nccl": ("nccl.cpp",)}
VERSIONS = ("2.13.",)
"""Those whose C++ headers it is written for."""


def unavailable() -> str:
    """Why there can be no simulated device here; empty if there can."""
    if shutil.which("g++") is None:
        return "the simulated device is built by g++, which is not installed"
    version = importlib.metadata.version("torch")
    if not version.startswith(VERSIONS):
        return f"the simulated device is written for torch {', '.join(VERSIONS)}x, not {version}"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "the simulated device is for the CPU build of torch, and this one is built for CUDA"
    return ""


def build() -> dict[str, Path]:
    """The libraries by name; made where they are not yet there, which takes about half a minute.

    Raises:
        RuntimeError: they cannot be built, with what the compiler says.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    folder = _cache() / _digest()
    built = {name: folder / f"simulated_{name}.so" for name in LIBRARIES}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of a test run want it at once
        if not all(path.exists() for path in built.values()):
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _compile(Path(scratch), folder)
    return built


def _compile(scratch: Path, folder: Path) -> None:
    """Both at once; a library comes to its place whole."""
    started = {name: subprocess.Popen(_command(name, scratch), stderr=subprocess.PIPE, text=True) for name in LIBRARIES}
    for name, process in started.items():
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(f"g++ cannot build the simulated device:\n{said[:4000]}")
        (scratch / f"{name}.so").rename(folder / f"simulated_{name}.so")


def _command(name: str, scratch: Path) -> list[str]:
    headers = [_torch() / "include", _torch() / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = [f"-l{library}" for library in LIBRARIES[name]]
    paths = [f"-I{path}" for path in headers] + [f"-L{_torch() / 'lib'}"]
    sources = [str(NATIVE / source) for source in SOURCES[name]]
    return ["g++", *OPTIONS, *paths, *sources, "-o", str(scratch / f"{name}.so"), *libraries]


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    origin = found.origin if found is not None else None
    assert origin is not None, "torch is installed"
    return Path(origin).parent


def _cache() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return default / "zcompile" / "simulated"


def _digest() -> str:
    versions = importlib.metadata.version("torch"), sysconfig.get_config_var("SOABI"), *OPTIONS
    digest = hashlib.sha256(repr(versions).encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def preload() -> None:
    """Load what the device needs of torch, and the device, in this process, which has not imported torch yet."""
    assert "torch" not in sys.modules, "torch asks for CUDA once, when it is imported"
    built = build()
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built["device"]), mode=ctypes.RTLD_GLOBAL)
