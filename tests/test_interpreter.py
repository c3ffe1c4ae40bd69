"""What Python does while models are compiled: which objects its collector looks at, and where frames are."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import zcompile
from zcompile.engine.interpreter import in_large_frame, old_objects_frozen


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The collector is on, and nothing is frozen at first: as in programs of users, and not as in tests."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.enable()
    yield
    gc.disable()
    if was_frozen:
        gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def garbage() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_objects_are_frozen_within_and_thawed_after() -> None:
    with old_objects_frozen():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError, match="within"), old_objects_frozen():
        raise ValueError("within")
    assert gc.get_freeze_count() == 0
    gc.disable()
    with old_objects_frozen():
        assert gc.get_freeze_count() == 0


def test_garbage_of_within_is_freed_within_and_older_garbage_after() -> None:
    older = garbage()
    with old_objects_frozen():
        newer = garbage()
        gc.collect()
        assert newer() is None
        assert older() is not None
    gc.collect()
    assert older() is None


def test_the_outermost_one_thaws() -> None:
    with old_objects_frozen():
        with old_objects_frozen():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_the_user_has_frozen_stays_so() -> None:
    gc.freeze()
    with old_objects_frozen():
        pass
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_compiling_leaves_the_collector_as_it_was(without_group: None, enabled: bool) -> None:
    seen = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                note()
            return super().forward(x)

    @torch.compiler.assume_constant_result
    def note() -> int:
        seen.append(gc.get_freeze_count() > 0)
        return 0

    if not enabled:
        gc.disable()
    try:
        zcompile.compile(Model(3, 2), backend="eager")(torch.ones(2, 3)).sum().backward()
        assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, 0)
    finally:
        gc.enable()
    assert seen[:1] == [enabled], "torch.compile traces with frozen objects where a collector looks at them"


def called(x: int) -> int:
    """Its frame has room for all names that it might have."""
    if x < 0:
        a = b = c = d = e = f = g = h = i = j = k = l = m = n = o = p = q = r = s = t = u = v = w = x  # noqa: E741, F841
    return x


def faults_below(depth: int) -> int:
    """Page faults of calls of a function from a stack that is so much deeper."""
    if depth:
        return faults_below(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(1000):
        called(number)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults() -> int:
    return max(map(faults_below, range(300)))


def test_calls_from_a_large_frame_need_no_memory_however_deep_the_stack_is() -> None:
    assert in_large_frame(most_faults) < 500


def test_arguments_may_have_any_name() -> None:
    assert in_large_frame(dict, function=1, args=2) == {"function": 1, "args": 2}
