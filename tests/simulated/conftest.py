from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks
from tests.simulated import library


@pytest.fixture(scope="session")
def gpus() -> Iterator[Ranks]:
    """Two ranks with a simulated GPU each, or the first one of a larger world."""
    if reason := library.unavailable():
        pytest.skip(reason)
    pool = Ranks(2, on="simulated")
    yield pool
    pool.close()
