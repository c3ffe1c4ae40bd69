"""The page that says what of FSDP2's tests is tested here: it names every test of this folder, and no other."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "fsdp2_tests.md"


def test_every_test_of_this_folder_is_on_the_page_and_no_other() -> None:
    files = [path for path in HERE.glob("test_*.py") if path.name != Path(__file__).name]
    defined = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert set(re.findall(r"`(test_\w+)`", PAGE.read_text())) == defined
