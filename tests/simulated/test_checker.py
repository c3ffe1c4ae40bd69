"""The rules of the checker, each on a few launches."""

from __future__ import annotations

import pytest

from tests.simulated.checker import HOST, Access, Checker

MAIN, SIDE, OTHER = 0, 1, 2
MEMORY = 1024


@pytest.fixture
def checker() -> Checker:
    """One that has 64 bytes at MEMORY, of the default stream."""
    made = Checker(lambda: "here")
    made.launch(MAIN, "before", [])
    made.allocate(MEMORY, 64, MAIN)
    return made


def read(begin: int = 0, end: int = 64) -> list[Access]:
    return [Access(MEMORY + begin, MEMORY + end, writes=False)]


def write(begin: int = 0, end: int = 64) -> list[Access]:
    return [Access(MEMORY + begin, MEMORY + end, writes=True)]


def kinds(checker: Checker) -> list[str]:
    return [finding.kind for finding in checker.findings.values()]


def waits_for(checker: Checker, stream: int, other: int) -> None:
    checker.record(7, other)
    checker.block(stream, 7)


def test_a_stream_is_in_order(checker: Checker) -> None:
    checker.launch(MAIN, "write", write())
    checker.launch(MAIN, "read", read())
    assert not checker.findings


def test_another_stream_is_not(checker: Checker) -> None:
    waits_for(checker, SIDE, MAIN)
    checker.launch(MAIN, "write", write())
    checker.launch(SIDE, "read", read())
    (finding,) = checker.findings.values()
    assert str(finding) == (
        "not ordered: the default stream writes it by write at here; stream 1 reads it by read at here;"
        " it was allocated at here"
    )


def test_an_event_orders_what_was_before_it(checker: Checker) -> None:
    checker.launch(MAIN, "write", write())
    waits_for(checker, SIDE, MAIN)
    checker.launch(SIDE, "read", read())
    assert not checker.findings
    checker.launch(MAIN, "write again", write())
    assert kinds(checker) == ["not ordered"], "the default stream does not know of the read"


def test_order_goes_from_one_stream_to_the_next(checker: Checker) -> None:
    checker.launch(MAIN, "write", write())
    waits_for(checker, SIDE, MAIN)
    checker.launch(SIDE, "something else", [])
    waits_for(checker, OTHER, SIDE)
    checker.launch(OTHER, "read", read())
    assert not checker.findings


def test_reads_may_come_in_any_order(checker: Checker) -> None:
    checker.launch(MAIN, "write", write())
    waits_for(checker, SIDE, MAIN)
    checker.launch(MAIN, "read", read())
    checker.launch(SIDE, "read", read())
    assert not checker.findings


@pytest.mark.parametrize(("begin", "end", "races"), [(32, 64, False), (31, 64, True)])
def test_other_bytes_are_other_memory(checker: Checker, begin: int, end: int, *, races: bool) -> None:
    waits_for(checker, SIDE, MAIN)
    checker.launch(MAIN, "write", write(0, 32))
    checker.launch(SIDE, "write", write(begin, end))
    assert bool(checker.findings) == races


def test_a_part_that_is_written_again_hides_nothing_of_the_rest(checker: Checker) -> None:
    waits_for(checker, SIDE, MAIN)
    checker.launch(MAIN, "write", write())
    checker.launch(MAIN, "write a part", write(0, 32))
    checker.launch(SIDE, "read the rest", read(32, 64))
    assert kinds(checker) == ["not ordered"]


def test_the_host_waits_for_a_stream_or_an_event(checker: Checker) -> None:
    checker.pin(MEMORY * 2, 64)
    pinned = [Access(MEMORY * 2, MEMORY * 2 + 64, writes=True)]
    checker.launch(SIDE, "copy", pinned)
    checker.sync_stream(SIDE, "synchronize")
    checker.host("write", pinned)
    checker.launch(SIDE, "copy", pinned)
    checker.record(3, SIDE)
    checker.sync_event(3, "synchronize")
    checker.host("write", pinned)
    assert not checker.findings
    assert checker.waits == {"synchronize at here": 2}
    checker.launch(SIDE, "copy", pinned)
    checker.host("write", pinned)
    assert kinds(checker) == ["not ordered"]


def test_a_launch_comes_behind_the_host(checker: Checker) -> None:
    checker.pin(MEMORY * 2, 64)
    pinned = [Access(MEMORY * 2, MEMORY * 2 + 64, writes=True)]
    checker.host("write", pinned)
    checker.launch(SIDE, "copy", pinned)
    assert not checker.findings
    assert checker._clock(SIDE)[HOST] > 0


def test_an_event_that_the_host_has_seen_orders_without_a_wait(checker: Checker) -> None:
    checker.launch(MAIN, "write", write())
    checker.record(3, MAIN)
    checker.seen(3)
    checker.launch(SIDE, "read", read())
    assert not checker.findings
    assert not checker.waits


def test_memory_that_is_freed_must_not_be_in_use_elsewhere(checker: Checker) -> None:
    waits_for(checker, SIDE, MAIN)
    checker.launch(SIDE, "read", read())
    checker.free(MEMORY)
    checker.allocate(MEMORY, 32, MAIN)
    assert not checker.findings, "nobody has used it again"
    checker.launch(MAIN, "write", write(0, 4))
    assert kinds(checker) == ["freed too early"]


def test_memory_that_is_used_again_behind_its_last_use(checker: Checker) -> None:
    waits_for(checker, SIDE, MAIN)
    checker.launch(SIDE, "read", read())
    checker.free(MEMORY)
    waits_for(checker, MAIN, SIDE)
    checker.allocate(MEMORY, 32, MAIN)
    checker.launch(MAIN, "write", write(0, 4))
    assert not checker.findings


@pytest.mark.parametrize("safe", ["told", "ordered", "waited"])
def test_memory_is_freed_safely(checker: Checker, safe: str) -> None:
    waits_for(checker, SIDE, MAIN)
    checker.launch(SIDE, "read", read())
    if safe == "told":
        checker.keep(MEMORY + 8, SIDE)
    elif safe == "ordered":
        waits_for(checker, MAIN, SIDE)
    else:
        checker.sync_stream(SIDE, "synchronize")
    checker.free(MEMORY)
    checker.allocate(MEMORY, 32, MAIN)
    checker.launch(MAIN, "write", write(0, 4))
    assert not checker.findings


def test_what_is_allocated_may_be_busy_with_its_owner_before(checker: Checker) -> None:
    checker.launch(SIDE, "write", write())
    assert kinds(checker) == ["not ordered"], "the side stream has not waited since the default one got the memory"


def test_what_is_freed_is_forgotten(checker: Checker) -> None:
    checker.launch(MAIN, "write", write())
    checker.free(MEMORY)
    checker.launch(SIDE, "read", read())
    assert not checker.findings
