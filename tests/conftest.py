from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.garbage import Collector
from tests.ranks import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
settings.register_profile("no deadline", deadline=None)  # a shared machine is slow at times
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four rank processes, started as they are needed and shared by all tests."""
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def garbage() -> Collector:
    return Collector()


@pytest.fixture(autouse=True)
def fresh_compiler(garbage: Collector) -> Iterator[None]:
    yield
    torch.compiler.reset()
    garbage.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
