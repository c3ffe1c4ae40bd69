"""Take the pictures of reports that the documentation shows: `make browser`, then `python docs/screenshots.py`."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from zcompile.cost.hardware import load_profile
from zcompile.report.plan_page import write_plan_page
from zcompile.report.program_page import write_page
from zcompile.schedule.options import Options
from zcompile.tools.inspection import of_subject
from zcompile.tools.named_models import subject_of
from zcompile.tools.planner import plan

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
VIEWS = {"report": (1280, 1000, "light"), "report-phone": (390, 844, "dark")}
MEMORY = "13 GB"
"""A limit between the plan's choices."""


def main() -> None:
    """Write the pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium: run `make browser`")
    IMAGES.mkdir(exist_ok=True)
    subject = subject_of("gpt:8x512", batch=4, sequence=512)
    journal = of_subject(subject, Options(stage=3, prefetch=2), world=8, hardware=load_profile("a100"))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        file = write_page(Path(folder) / "report.html", subject.name, [journal], load_profile("a100"))
        browser = started.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, (width, height, scheme) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"file://{file}")
            page.locator(".text .line[data-node='blocks_3_gather']").click()
            page.locator(".timeline").first.scroll_into_view_if_needed()
            page.screenshot(path=IMAGES / f"{name}.png")
        subject = subject_of("gpt:24x1536", batch=8, sequence=1024)
        few = {"worlds": [8], "prefetches": [0, 2], "dtypes": [torch.bfloat16]}
        made = plan(subject.model, subject.args, hardware="a100", memory_limit=MEMORY, **few)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(f"file://{write_plan_page(Path(folder) / 'plan.html', replace(made, model=subject.name))}")
        page.locator("tr.best").click()
        page.locator("h1").scroll_into_view_if_needed()
        page.screenshot(path=IMAGES / "plan.png")
        browser.close()


if __name__ == "__main__":
    main()
