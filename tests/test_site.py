"""The documentation as a site, in a browser: no page scrolls sideways, and the start page shows a program."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
WIDTHS = (360, 390, 768, 1100, 1280, 1920)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if any(importlib.util.find_spec(name) is None for name in ("sphinx", "furo", "myst_parser", "sphinx_copybutton")):
        pytest.skip("what builds the site is not installed: `make browser`")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(ROOT / "docs"), str(target)]
    subprocess.run(command, check=True, cwd=ROOT)
    return target


@pytest.mark.nightly
def test_no_page_scrolls_sideways(browser: Any, site: Path) -> None:
    files = sorted(site.glob("*.html"))
    assert len(files) > 20
    page, wide = browser.new_page(), []
    for file in files:
        page.goto(f"file://{file}")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append((file.stem, width))
    assert wide == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_start_page_shows_a_program(browser: Any, site: Path, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"file://{site}/index.html")
    program = page.locator("pre").first
    assert "all_gather(layers_0)" in program.inner_text()
    box = program.bounding_box()
    assert box["y"] + box["height"] < 900, "on the first screen"
    assert not program.evaluate("one => one.scrollWidth > one.clientWidth"), "with its margin"
    red, green, blue = map(
        int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert (red + green + blue > 380) is (scheme == "light")
    context.close()


def test_the_start_page_says_what_was_run_on_a_gpu() -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    assert "one H100 and one H200, each alone" in page.partition("## Install")[0]
    table = (ROOT / "docs" / "torch_releases.md").read_text()
    assert "a world of one, and two and four ranks that share the GPU" in table, "then the start page says no more"
