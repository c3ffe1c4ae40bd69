"""Regions compiled in an order of each rank's own, and models that are traced apart from each other."""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import zcompile
from zcompile.engine.region_cache import RegionCache, spread
from zcompile.ir.region import Region
from zcompile.runtime.loader import load
from zcompile.torch_internals.inductor import compile_with_inductor, prepare_inductor
from zcompile.torch_internals.sizes import is_symbolic


def test_few_neighbouring_ranks_begin_far_apart() -> None:
    assert [spread(rank) for rank in range(8)] == [0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]


def test_each_rank_compiles_all_regions_beginning_elsewhere() -> None:
    compiled = zcompile.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), backend="eager")
    compiled(torch.randn(2, 4)).sum().backward()
    regions: dict[str, Region] = dict(compiled._engine.runtime.steps[0].program.regions)
    keys = [regions[name].key() for name in regions]
    half = len(keys) // 2
    first, second = RegionCache("eager", rank=0), RegionCache("eager", rank=1)
    assert list(first.get_all(regions)) == list(second.get_all(regions)) == list(regions)
    assert list(first.compiled) == keys
    assert list(second.compiled) == keys[half:] + keys[:half]


def test_a_second_model_is_traced_with_the_sizes_that_it_sees() -> None:
    zcompile.compile(nn.Linear(4, 4), backend="eager")(torch.randn(2, 4)).sum().backward()
    compiled = zcompile.compile(nn.Linear(8, 8), backend="eager")
    compiled(torch.randn(3, 8)).sum().backward()
    program = compiled._engine.runtime.steps[0].program
    sizes = [size for node in program.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
    assert sizes
    assert not any(map(is_symbolic, sizes))


@pytest.mark.slow
def test_inductor_is_prepared_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = importlib.import_module("torch._inductor.codecache")
    bindings = codecache.CppPythonBindingsCodeCache
    asked = []
    load = bindings.load_pybinding

    def loaded(*args: Any) -> None:
        asked.append(threading.current_thread())
        load(*args)  # which fails without g++

    monkeypatch.setattr(bindings, "load_pybinding", loaded)
    ready = prepare_inductor(torch.device("cpu"))
    ready()
    (thread,) = asked
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    prepare_inductor(torch.device("cuda"))()
    assert len(asked) == 1


def test_a_preparation_that_fails_leaves_the_error_to_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = importlib.import_module("torch._inductor.codecache")
    bindings = codecache.CppPythonBindingsCodeCache
    monkeypatch.setattr(bindings, "load_pybinding", lambda *args: 1 / 0)
    prepare_inductor(torch.device("cpu"))()


STEP = """
def forward(box):
    (
        a,
        x,
    ) = unbox(box)
    y = region_0(a, x)
    del x
    z = region_0(a, y)
    return [y, z], []
"""


def test_what_is_deleted_behind_a_region_is_freed_within_it() -> None:
    dead = []

    def region(box: list[Any]) -> torch.Tensor:
        a, x = box
        box.clear()
        result: torch.Tensor = a + x
        seen = weakref.ref(x)
        del x
        dead.append(seen() is None)
        return result

    run = load(STEP, "forward", {"region_0": region}, "<step>")
    (y, z), _ = run([torch.ones(2), torch.ones(2)])
    assert dead == [True, False], "y is returned, and lives on"
    assert torch.equal(y, torch.full((2,), 2.0))
    assert torch.equal(z, torch.full((2,), 3.0))


@pytest.mark.slow
def test_regions_are_no_cuda_graphs() -> None:
    """Whatever the user has set: they read parameters that are somewhere else in each step."""
    config = importlib.import_module("torch._inductor.config")
    seen: list[bool] = []
    graph = make_fx(lambda x: (x.cos(),), tracing_mode="fake")(torch.ones(2))
    looks = {"post_grad_custom_post_pass": lambda _: seen.append(config.triton.cudagraphs)}
    with config.patch({"triton.cudagraphs": True, **looks}):
        compile_with_inductor(graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    assert seen == [False]


@pytest.mark.slow
def test_what_inductor_compiles_takes_a_list_and_empties_it() -> None:
    """Positional arguments, to which a torch that wraps otherwise would bring us back, live until the call returns."""
    graph = make_fx(lambda x: (x.sin(),), tracing_mode="fake")(torch.ones(2))
    run = compile_with_inductor(graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    box = [torch.ones(2)]
    assert torch.equal(run(box)[0], torch.ones(2).sin())
    assert box == []
    assert getattr(run, "__name__", "") != "<lambda>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "is_direct"),
    [
        (lambda x, y: (x.sin(), (x + y).t()), True),
        (lambda x, y: (x.sin(), x.t()), False),
        (lambda x, y: (x.sin(), x.split(1)[1]), False),
        (lambda x, y: (y.add_(x).cos(), y), False),
    ],
    ids=["plain", "view", "split", "write"],
)
def test_functions_of_torch_around_a_plain_region_are_skipped(function: Callable[..., Any], is_direct: bool) -> None:
    """What they do for other regions is still done: a view of an argument has its version counter, a write arrives."""
    graph = make_fx(function, tracing_mode="fake")(torch.ones(2, 2), torch.ones(2, 2))
    run = compile_with_inductor(graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    called = set[str]()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    for number in range(2):
        given, wanted = ([torch.full((2, 2), 3.0), torch.full((2, 2), 4.0)] for _ in range(2))
        called.clear()
        sys.setprofile(note)
        try:
            with torch.no_grad():
                results = run([*given])
        finally:
            sys.setprofile(None)
        for one, want in zip((*results, *given), (*function(*wanted), *wanted), strict=True):
            assert torch.allclose(one, want)
        if function(*wanted)[1]._base is wanted[0]:
            given[0].add_(1)
            assert results[1]._version == given[0]._version
        passed = any("runtime_wrappers" in name for name in called)
        assert passed == (number == 0 or not is_direct)
