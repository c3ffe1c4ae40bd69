"""The regions that zcompile makes of a model for a GPU, each compiled for one."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

import zcompile
from tests.kernels.models import ALL
from tests.kernels.report import Binary, Compiled, Row
from zcompile.engine import region_cache
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Call
from zcompile.ir.program import Program
from zcompile.ir.region import Region

WORLD, BATCH = 8, 8
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def check(rank: int, model: str, dtype: str, stage: int = 3) -> list[Row]:
    """Compile a model's step on a simulated device; gives what each region of it has become."""
    from tests.kernels import driver, inductor
    from tests.simulated import device

    warnings.simplefilter("ignore")
    device.fuse_attention()
    make, batch_of, loss = ALL[model]
    torch.manual_seed(0)
    batch = {name: value.cuda() for name, value in batch_of(torch.Generator().manual_seed(0), BATCH).items()}
    compiled = zcompile.compile(make().cuda(), stage=stage, dtype=DTYPES[dtype])
    compiler = Compiler(driver.install())
    with inductor.without_gpu(compiler.written), compiler.in_place():
        loss(compiled, batch)
    rows = [row for program in compiled.programs for row in _rows(program, compiler.compiled)]
    called = {id(row.compiled) for row in rows}
    assert called == {id(one) for one in compiler.compiled.values()}, "every region is called, and each was compiled"
    return rows


@dataclass
class Compiler:
    """Compiles regions as zcompile does, and gives for each a function that computes nothing.

    Args:
        loaded: Grows with each kernel that is compiled.
    """

    loaded: list[Binary]
    written: list[str] = field(default_factory=list)
    """Grows with the code of each region."""
    compiled: dict[str, Compiled] = field(default_factory=dict)
    """By the key of the region."""

    def in_place(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, zcompile asks this for its regions."""
        compile_region = region_cache._compile

        def instead(region: Region, backend: str) -> Callable[[list[Any]], Any]:
            self.compiled[region.key()] = self._compile(lambda: compile_region(region, backend))
            return _blank(region)

        return mock.patch.object(region_cache, "_compile", instead)

    def _compile(self, compile_region: Callable[[], object]) -> Compiled:
        from tests.kernels.inductor import kernels_by_compiler, library_calls

        loaded, written = len(self.loaded), len(self.written)
        try:
            compile_region()
        except Exception as error:  # whatever it is: the others are to be compiled, too
            return Compiled(problem=f"{type(error).__name__}: {error}")
        binaries, code = tuple(self.loaded[loaded:]), "\n".join(self.written[written:])
        calls, kernels = library_calls(code), kernels_by_compiler(code)
        return Compiled(binaries, calls, problem_of(kernels, binaries, code))


def problem_of(kernels: dict[str, list[str]], binaries: tuple[Binary, ...], code: str) -> str:
    if not code:
        return "Inductor has written no code"
    for compiler, names in kernels.items():
        if compiler != "triton":
            return f"not written in Triton but for {compiler}: {', '.join(names)}"
    lost = set(kernels.get("triton", ())) - {binary.kernel for binary in binaries}
    return f"not compiled: {', '.join(sorted(lost))}" if lost else ""


def _blank(region: Region) -> Callable[[list[Any]], Any]:
    """A function like that of a compiled region, whose results have whatever is in their memory."""
    results = [value.meta["val"] if isinstance(value, fx.Node) else value for value in region.outputs]

    def call(box: list[Any]) -> Any:
        box.clear()
        made = [_like(value) if isinstance(value, torch.Tensor) else value for value in results]
        return made[0] if len(made) == 1 else made

    return call


def _like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _rows(program: Program, compiled: dict[str, Compiled]) -> Iterator[Row]:
    """One for each region that a phase of `program` calls."""
    for phase in program.phases:
        uses = Counter(op_of(node, Call).region for node in program.nodes(Call, phase=phase))
        for name, count in uses.items():
            yield Row(str(phase), name, count, compiled[program.regions[name].key()])
