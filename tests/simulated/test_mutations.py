"""What the checker finds: every wait, event and hold that matters, taken out."""

from __future__ import annotations

import pytest

from tests.simulated import library
from tests.simulated.mutations import MUTATIONS, ROOT, Mutation, findings_of


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_its_line_is_there_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.line) == 1


@pytest.mark.nightly
@pytest.mark.skipif(bool(library.unavailable()), reason=library.unavailable())
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_it_is_found_unless_nothing_depends_on_it(mutation: Mutation) -> None:
    assert bool(findings_of(mutation)) != bool(mutation.survives)
