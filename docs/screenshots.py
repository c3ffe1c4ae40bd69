"""Take pictures of the pages that people look at; `make browser` installs what it wants.

python docs/screenshots.py             those that the documentation shows, into docs/images
python docs/screenshots.py FOLDER      a report, a plan and every page of site/ (`make docs`), as a desktop and a phone
                                       show them, light and dark: to be looked at. Says which scroll sideways.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright

from zcompile.cost.hardware import load_profile
from zcompile.report.plan_page import write_plan_page
from zcompile.report.program_page import write_page
from zcompile.schedule.options import Options
from zcompile.tools.inspection import of_subject
from zcompile.tools.named_models import subject_of
from zcompile.tools.planner import plan

ROOT = Path(__file__).parent.parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SCREENS = {"desktop": (1280, 1000), "phone": (390, 844)}
SCHEMES = ("light", "dark")
MEMORY = "13 GB"
"""A limit between the plan's choices."""
SHOWN = {
    "report": ("report", "desktop", "light", "h1"),
    "report-phone": ("report", "phone", "dark", ".timeline"),
    "plan": ("plan", "desktop", "light", "h1"),
}
"""The pictures of the documentation: the page, the screen and the scheme of each, and what is at the top."""


def main() -> None:
    """Write the pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium: run `make browser`")
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    target = given or ROOT / "docs" / "images"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        pages = written(Path(folder))
        if given is None:
            for name, (page, screen, scheme, top) in SHOWN.items():
                take(browser, pages[page], target / f"{name}.png", screen, scheme, top)
            return
        pages |= {f"site-{path.stem}": path for path in sorted((ROOT / "site").glob("[!_]*.html"))}
        wide = list(all_of(browser, pages, target))
        browser.close()
    raise SystemExit(f"these scroll sideways: {', '.join(wide)}" if wide else 0)


def written(folder: Path) -> dict[str, Path]:
    """A report and a plan, in files."""
    hardware = load_profile("h100")
    subject = subject_of("llama:8x1024", batch=4, sequence=512)
    options = Options(stage=3, prefetch=2, dtype=torch.bfloat16)
    (journal,) = of_subject(subject, options, world=8, hardware=hardware).journals
    report = write_page(folder / "report.html", subject.name, [journal], hardware)
    subject = subject_of("gpt:24x1536", batch=8, sequence=1024)
    few: dict[str, Any] = {"worlds": [8], "prefetches": [0, 2], "dtypes": [torch.bfloat16]}
    made = plan(subject.model, subject.args, hardware="a100", memory_limit=MEMORY, **few)
    return {"report": report, "plan": write_plan_page(folder / "plan.html", replace(made, model=subject.name))}


def all_of(browser: Any, pages: dict[str, Path], target: Path) -> Iterator[str]:
    """Take every page on every screen in both schemes; gives those that are wider than the screen."""
    for name, path in pages.items():
        for screen in SCREENS:
            for scheme in SCHEMES:
                if take(browser, path, target / f"{name}-{screen}-{scheme}.png", screen, scheme):
                    yield f"{name} on a {screen}"


def take(browser: Any, page: Path, picture: Path, screen: str, scheme: str, top: str = "") -> bool:
    """Take a picture, of a screen from `top` on or of the whole page; True if the page scrolls sideways."""
    width, height = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened = context.new_page()
    opened.goto(f"file://{page}")
    if top:
        opened.locator(top).first.evaluate("one => one.scrollIntoView()")
    opened.screenshot(path=picture, full_page=not top)
    is_wide = opened.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    context.close()
    return bool(is_wide)


if __name__ == "__main__":
    main()
