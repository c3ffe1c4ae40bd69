"""Inductor on a machine without a GPU, and what can be read off the code that it writes."""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

LIBRARIES = ("extern_kernels.", "torch.ops.aten.", "aten.")


@contextlib.contextmanager
def without_gpu(written: list[str]) -> Iterator[None]:
    """Inside, Inductor compiles for a GPU where there is none; code that it writes is appended to `written`.

    It compiles in this process, which has the driver; its own launcher of kernels is part of torch's CUDA build; and
    kernels are not measured beside each other, since none can run.
    """
    with (
        fresh_cache(),
        config.patch(compile_threads=1, use_static_cuda_launcher=False, force_disable_caches=True),
        mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block"),
        mock.patch.object(GraphLowering, "save_output_code", written.append),
    ):
        yield


def library_calls(code: str) -> Counter[str]:
    """What generated code calls beside its kernels, and how often: mm, convolution, ..."""
    names = (ast.unparse(call.func) for call in _calls(code))
    return Counter(_short(name) for name in names if name.startswith(LIBRARIES))


def kernels_by_compiler(code: str) -> dict[str, list[str]]:
    """The kernels that generated code defines: `{"triton": ["triton_poi_fused_add_0", ...]}`."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr=compiler) as function)):
                if ast.unparse(function).startswith("async_compile."):
                    found.setdefault(compiler, []).append(name)
    return found


def _calls(code: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))


def _short(name: str) -> str:
    library = next(library for library in LIBRARIES if name.startswith(library))
    return name.removeprefix(library).removesuffix(".default")
