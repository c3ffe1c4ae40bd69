from __future__ import annotations

import gc
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.garbage import Collector
from tests.lacking import NO_LOOPBACK, has_loopback, reason_of
from tests.ranks import Ranks
from tests.threads import Threads
from zcompile.engine.interpreter import in_large_frame

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ZCOMPILE_CACHE", "0")  # what a test is about happens, though another one has compiled the same
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
STARTED = pytest.StashKey[float]()
torch.set_num_threads(1)
gc.disable()  # garbage is collected between tests
settings.register_profile("no deadline", deadline=None)  # a shared machine is slow at times
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four rank processes, started as they are needed and shared by all tests."""
    if not has_loopback():
        pytest.skip(NO_LOOPBACK)  # at once: processes would try to meet until a timeout
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def threads(without_group: None) -> Threads:
    """Ranks that are threads of this process, for whatever is not about processes, connections, time or tracing."""
    return Threads()


@pytest.fixture(scope="session")
def garbage() -> Collector:
    return Collector()


@pytest.fixture(autouse=True)
def fresh_compiler(garbage: Collector) -> Iterator[None]:
    yield
    torch.compiler.reset()
    garbage.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    names = pyfuncitem._fixtureinfo.argnames
    in_large_frame(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    return True


@contextmanager
def skipped_where_something_lacks() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if reason := reason_of(error):
            pytest.skip(reason)
        raise


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: `make browser`")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="start no test later: what is left is skipped")
    parser.addoption("--order", metavar="TEXT", help="run the tests in an order of TEXT's own")
    parser.addoption("--part", metavar="K/N", help="run one of N parts of the tests, the one for the number K")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    within = item.config.getoption("--within")
    if within is not None and time.monotonic() - item.config.stash[STARTED] > within:
        pytest.skip("no time was left")
    with skipped_where_something_lacks():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with skipped_where_something_lacks():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if order := config.getoption("--order"):
        items.sort(key=lambda item: number_of(f"{order} {item.nodeid}"))
    if part := config.getoption("--part"):
        k, n = map(int, part.split("/"))
        chosen = [item for item in items if (number_of(item.nodeid) - k) % n == 0]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


@pytest.fixture
def without_group() -> Iterator[None]:
    """No group before, and none left behind."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
