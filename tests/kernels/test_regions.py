"""Regions as machine code for a GPU, and what would be said of others."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.kernels import __main__ as command
from tests.kernels import installed, regions
from tests.kernels.report import Binary, Compiled, Row
from tests.ranks import Ranks

CODE = '''
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', """def triton_(): extern_kernels.bmm()""")
triton_red_fused_sum_1 = async_compile.triton('triton_red_fused_sum_1', """...""", device_str='cuda')

class Runner:
    def call(self, args):
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        triton_poi_fused_add_0.run(buf0, 16, stream=raw_stream0)
        buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf0)
        extern_kernels.mm(arg0_1, buf1[0], out=buf2)
'''
TIMEOUT = 900
"""It takes half a minute where nothing else runs."""
BINARY = Binary("triton_poi_fused_add_0", registers=24, spills=0, shared=128)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ranks]:
    if reason := installed.unavailable():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(installed.FOLDER))
        pool = Ranks(1, on="simulated")
        yield pool
        pool.close()


def wrong_architecture(rank: int) -> list[Row]:
    from tests.kernels import driver

    with mock.patch.object(driver, "ARCHITECTURE", "sm_80"):
        return regions.check(rank, "tiny gpt", "bf16")


def spilling(rank: int) -> tuple[Binary, str]:
    """A kernel that wants more registers than it may have, and what ptxas says of it."""
    from triton import compile, jit, knobs, language
    from triton.compiler import ASTSource

    from tests.kernels import driver

    @jit
    def square(source, target, size: language.constexpr):
        rows, columns = language.arange(0, size), language.arange(0, size)
        tile = language.load(source + rows[:, None] * size + columns[None, :])
        product = language.dot(tile, tile)
        language.store(target + rows[:, None] * size + columns[None, :], product + tile * language.sum(product))

    loaded = driver.install()
    source = ASTSource(square, {"source": "*fp32", "target": "*fp32", "size": "constexpr"}, {"size": 128})
    said = io.StringIO()
    with contextlib.redirect_stdout(said), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        kernel = compile(source, target=driver.Driver().get_current_target(), options={"maxnreg": 96})
    kernel._init_handles()
    return loaded[-1], said.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_all_regions_of_a_gpt_become_code_for_a_gpu(gpu: Ranks) -> None:
    (rows,) = gpu.run(regions.WORLD, regions.check, "tiny gpt", "bf16", timeout=TIMEOUT)
    assert [row.compiled.problem for row in rows] == [""] * len(rows)
    assert {row.phase for row in rows} == {"forward", "backward"}
    assert all(0 < binary.registers < 256 for row in rows for binary in row.compiled.binaries)
    attention = [name for row in rows for name in row.compiled.calls if "attention" in name]
    assert set(attention) == {f"_scaled_dot_product_flash_attention{end}" for end in ("", "_backward")}


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_code_for_another_gpu_is_a_failure_that_is_named(gpu: Ranks) -> None:
    (rows,) = gpu.run(regions.WORLD, wrong_architecture, timeout=TIMEOUT)
    problems = {row.compiled.problem for row in rows}
    assert all("is not for sm_80" in problem for problem in problems), problems


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_registers_and_spills_are_what_ptxas_says(gpu: Ranks) -> None:
    ((binary, said),) = gpu.run(1, spilling, timeout=TIMEOUT)
    assert f"Used {binary.registers} registers" in said
    assert binary.spills > 0
    assert f"{4 * binary.spills} bytes stack frame" in said


def test_calls_and_kernels_are_read_off_the_code() -> None:
    from tests.kernels import inductor

    assert inductor.library_calls(CODE) == {"mm": 2, "_scaled_dot_product_flash_attention": 1}
    assert inductor.kernels_by_compiler(CODE) == {"triton": ["triton_poi_fused_add_0", "triton_red_fused_sum_1"]}


@pytest.mark.parametrize(
    ("kernels", "code", "problem"),
    [
        ({"triton": [BINARY.kernel]}, CODE, ""),
        ({}, CODE, ""),
        ({"triton": [BINARY.kernel, "triton_red_fused_sum_1"]}, CODE, "not compiled: triton_red_fused_sum_1"),
        ({"cpp_pybinding": ["cpp_fused_0"]}, CODE, "not written in Triton but for cpp_pybinding: cpp_fused_0"),
        ({}, "", "Inductor has written no code"),
    ],
)
def test_what_is_no_region_for_a_gpu(kernels: dict[str, list[str]], code: str, problem: str) -> None:
    assert regions.problem_of(kernels, (BINARY,), code) == problem


def test_the_variant_that_needs_most_is_shown() -> None:
    wide = Binary("triton_red_fused_sum_1", registers=255, spills=3, shared=0)
    region = Compiled((BINARY, BINARY, wide), {"mm": 2, "bmm": 1})
    assert command.figures(region) == ["2", "3", "255", "128", "3", "2 mm, 1 bmm"]
    assert command.summary([Row("forward", "region_0", 1, region), Row("forward", "region_1", 1, Compiled())]) == (
        "2 regions, 0 failed: 2 kernels, 0 of templates, in 3 variants for sm_90a, 1 of which spill; 3 library calls."
    )


@pytest.mark.parametrize(("problem", "status"), [("", 0), ("an error of Inductor's", 1)])
def test_a_failed_region_is_shown_and_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str, status: int
) -> None:
    monkeypatch.setattr(installed, "unavailable", lambda: "")
    monkeypatch.setattr(installed, "make_importable", lambda: None)
    monkeypatch.setattr(
        Ranks, "run", lambda *args, **options: [[Row("forward", "region_0", 1, Compiled((), {}, problem))]]
    )
    assert command.main(["--models", "gpt", "--dtypes", "bf16"]) == status
    said = capsys.readouterr().out
    assert problem in said
    assert f"1 regions, {status} failed" in said


def test_without_triton_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "unavailable", lambda: "Triton is not installed: `make triton` does it")
    assert command.main([]) == 2
    assert "make triton" in capsys.readouterr().err
