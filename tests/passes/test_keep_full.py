from __future__ import annotations

from functools import partial

import pytest

from tests.passes.programs import CHAIN, GATHERED, GATHERED_TWICE, KEPT, check, parsed
from zcompile.ir.operation import Phase, op_of
from zcompile.ir.ops import AllGather, Release
from zcompile.passes.keep_full import keep_full


def test_without_prefetch_only_the_last_unit_is_kept() -> None:
    check(partial(keep_full, prefetch=0), CHAIN, GATHERED_TWICE, GATHERED)


@pytest.mark.parametrize("prefetch", [1, 2, 9])
def test_units_that_would_be_gathered_again_at_once_are_kept_over_the_turn(prefetch: int) -> None:
    check(partial(keep_full, prefetch=prefetch), CHAIN, GATHERED_TWICE, KEPT)


def test_what_is_kept_is_gathered_once_and_released_once() -> None:
    program = keep_full(parsed(CHAIN, GATHERED_TWICE), prefetch=1)
    assert [op_of(node, AllGather).unit for node in program.nodes(AllGather)] == ["a", "b", "c"]
    assert [op_of(node, Release).unit for node in program.nodes(Release, phase=Phase.BACKWARD)] == ["c", "b"]
