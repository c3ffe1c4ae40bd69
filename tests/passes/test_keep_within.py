from __future__ import annotations

from functools import partial

import pytest

from tests.passes.programs import CHAIN, GATHERED, GATHERED_TWICE, KEPT, check, parsed
from zcompile import OptionError
from zcompile.cost.memory import live_bytes, peak_bytes
from zcompile.facts import memory_bounded
from zcompile.passes.keep_within import choose_kept_units, keep_within


def test_a_unit_stays_full_where_that_raises_no_peak() -> None:
    least = peak_bytes(parsed(CHAIN, GATHERED))
    check(partial(keep_within, memory_limit=least), CHAIN, GATHERED, KEPT)


def test_a_limit_below_what_the_step_takes_is_refused_with_what_it_takes() -> None:
    program = parsed(CHAIN, GATHERED)
    least = peak_bytes(program)
    with pytest.raises(OptionError, match=rf"memory_limit(.|\n)*give at least {least}"):
        keep_within(program, memory_limit=least - 1)


def test_the_fact_holds_of_what_fits_only() -> None:
    program = keep_within(parsed(CHAIN, GATHERED), memory_limit=10_000)
    most = peak_bytes(program)
    assert not list(memory_bounded(most).violations(program))
    (violation,) = memory_bounded(most - 1).violations(program)
    assert live_bytes(program)[violation.node] == most


def test_live_bytes_follow_the_lines_of_the_program() -> None:
    found = {node.name: live for node, live in live_bytes(parsed(CHAIN, GATHERED)).items()}
    assert found == {
        "a_gather": 64,
        "a_full": 64,
        "ya": 192,
        "release": 128,
        "b_gather": 192,
        "b_full": 192,
        "yb": 320,
        "release_1": 256,
        "c_gather": 320,
        "c_full": 320,
        "yc": 448,
        "region_1_results": 640,  # before yb is dropped
        "release_2": 448,
        "b_gather_1": 512,
        "b_full_1": 512,
        "region_1_results_1": 704,
        "release_3": 384,
        "ga": 448,
    }


def test_units_that_are_given_are_kept_whatever_is_held_then() -> None:
    check(partial(keep_within, memory_limit=1, units=["b"]), CHAIN, GATHERED, KEPT)


def test_what_fits_is_what_the_kept_program_holds() -> None:
    program = parsed(CHAIN, GATHERED_TWICE)
    least = peak_bytes(program)
    for limit in range(least, least + 400, 32):
        kept = keep_within(program, memory_limit=limit)
        assert peak_bytes(kept) <= limit
    assert len(choose_kept_units(program, least + 400)) == 2
