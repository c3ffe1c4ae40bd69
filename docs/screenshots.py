"""Take pictures of the pages that zcompile writes; `make browser` installs what this needs.

python docs/screenshots.py             those that the documentation shows, into docs/images
python docs/screenshots.py FOLDER      a report, a plan and every page of site/ (`make docs`), as a desktop and a phone
                                       show them, light and dark: to be looked at. Says which scroll sideways.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SCREENS = {"desktop": (1280, 1000), "phone": (390, 844)}
SCHEMES = ("light", "dark")
GALLERY = ROOT / "docs" / "gallery.md"
PAGES = {
    "report": "report/report.html",
    "no-prefetch": "no-prefetch/report.html",
    "pipeline": "pipeline/rank_0/report.html",
    "plan": "plan.html",
}
SHOWN = {
    "report": ("report", "desktop", "light", "h1", False),
    "report-phone": ("report", "phone", "dark", ".timeline", False),
    "plan": ("plan", "desktop", "light", "h1", False),
    "no-prefetch": ("no-prefetch", "desktop", "light", ".timeline", True),
    "prefetch": ("report", "desktop", "light", ".timeline", True),
    "stages": ("plan", "desktop", "light", ".choices", True),
    "pipeline": ("pipeline", "desktop", "light", ".timeline", True),
}
"""The pictures of the documentation: the page, the screen and the scheme of each, what is at the top, and whether that
is all."""


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
            for name, (page, screen, scheme, *what) in SHOWN.items():
                take(browser, pages[page], target / f"{name}.png", screen, scheme, *what)
            return
        pages |= {f"site-{path.stem}": path for path in sorted((ROOT / "site").glob("[!_]*.html"))}
        wide = list(all_of(browser, pages, target))
        browser.close()
    raise SystemExit(f"these scroll sideways: {', '.join(wide)}" if wide else 0)


def written(folder: Path) -> dict[str, Path]:
    """Run the commands of the gallery, and return their pages."""
    for command in re.findall(r"^zcompile .*$", GALLERY.read_text(), re.MULTILINE):
        subprocess.run([Path(sys.executable).with_name("zcompile"), *shlex.split(command)[1:]], cwd=folder, check=True)
    return {name: folder / page for name, page in PAGES.items()}


def all_of(browser: Any, pages: dict[str, Path], target: Path) -> Iterator[str]:
    """Take every page on every screen in both schemes; gives those that are wider than the screen."""
    for name, path in pages.items():
        for screen in SCREENS:
            for scheme in SCHEMES:
                if take(browser, path, target / f"{name}-{screen}-{scheme}.png", screen, scheme):
                    yield f"{name} on a {screen}"


def take(browser: Any, page: Path, picture: Path, screen: str, scheme: str, top: str = "", alone: bool = False) -> bool:
    """Take a picture of a screen from `top` on, of `top` alone, or of the whole page.

    Returns:
        True if the page scrolls sideways.
    """
    width, height = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened = context.new_page()
    opened.goto(f"file://{page}")
    if alone:
        opened.locator(top).first.screenshot(path=picture)
    else:
        if top:
            opened.locator(top).first.evaluate("one => one.scrollIntoView()")
        opened.screenshot(path=picture, full_page=not top)
    is_wide = opened.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    context.close()
    return bool(is_wide)


if __name__ == "__main__":
    main()
