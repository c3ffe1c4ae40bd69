"""The page: all of a program in one file that fetches nothing, and what it does in a browser."""

from __future__ import annotations

import contextlib
import html
import itertools
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.models import batch, make
from tests.test_dumps import steps
from zcompile.cost.forecast import Plan
from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import alive_at, live_by_kind
from zcompile.ir.printer import lines_with_nodes
from zcompile.report.plan_page import plan_page_text
from zcompile.report.program_page import page_text
from zcompile.schedule.pipeline import Journal

RATES = Hardware.of(flops=1e9, memory_bandwidth=1e9, latency=1e-5, bandwidth=1e8)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def journal_of(model: nn.Module, *given: torch.Tensor) -> Journal:
    compiled = zcompile.compile(model, backend="eager")
    compiled(*given).sum().backward()
    (journal,) = compiled._engine.compiler.journals
    return journal


@pytest.fixture(scope="module")
def journal() -> Journal:
    return journal_of(make("gpt"), *batch("gpt", 0, 0))


@pytest.fixture(scope="module")
def text(journal: Journal) -> str:
    return page_text("a GPT", [journal], RATES)


def test_every_line_of_the_program_is_there(journal: Journal, text: str) -> None:
    for line, node in lines_with_nodes(journal.entries[-1].after):
        assert html.escape(line).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in text, line
        assert not node or f'data-node="{node}"' in text


def test_every_pass_is_there_with_its_facts(journal: Journal, text: str) -> None:
    for entry in journal.entries:
        assert f"<code>{entry.name}</code>" in text
        assert all(html.escape(str(fact)) in text for fact in entry.step.ensures)


def test_nothing_is_fetched(text: str) -> None:
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "http" not in text
    assert "url(" not in text


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("<img src=x onerror=alert(1)>", nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, "<img src=x onerror=alert(1)>")(x)


def test_names_with_html_in_them_are_text() -> None:
    made = page_text("<script>alert(2)</script>", [journal_of(Named(), torch.ones(2, 4))], RATES)
    assert "<img" not in made
    assert "<script>alert" not in made
    assert "&lt;img src=x onerror=alert(1)&gt;" in made


def test_what_is_alive_is_no_more_than_what_is_held(journal: Journal) -> None:
    program = journal.entries[-1].after
    held = {line: sum(kinds.values()) for line, kinds in live_by_kind(program).items()}
    for line, most in held.items():
        assert sum(size for *_, size in alive_at(program, line)) <= most
    peak = max(held, key=lambda line: held[line])
    assert sum(size for *_, size in alive_at(program, peak)) > 0.3 * held[peak]


def test_a_measured_step_stands_beside_the_predicted_one(tmp_path: Path) -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    steps(compiled, 1)
    with compiled.profile():
        steps(compiled, 1)
    text = compiled.report(tmp_path / "report.html", hardware=RATES).read_text()
    assert "predicted for unnamed" in text
    assert "measured: step 1, rank 0" in text
    assert (compiled.dump(tmp_path / "dump") / "report.html").exists()


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_program_without_a_line_has_a_page(tmp_path: Path) -> None:
    compiled = zcompile.compile(Given(), backend="eager", dump=tmp_path)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
    assert "Memory of a rank" not in (tmp_path / "report.html").read_text()


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: `make browser`")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@contextlib.contextmanager
def opened(browser: Any, text: str, folder: Path) -> Iterator[Any]:
    """A page with this text, which says nothing on the console."""
    (folder / "report.html").write_text(text)
    context = browser.new_context(viewport={"width": 1300, "height": 900}, color_scheme="light")
    made, said = context.new_page(), list[str]()
    made.on("console", lambda message: said.append(message.text))
    made.on("pageerror", lambda error: said.append(str(error)))
    made.goto(f"file://{folder}/report.html")
    yield made
    assert said == [], "nothing is said on the console"
    context.close()


@pytest.fixture
def page(browser: Any, text: str, tmp_path: Path) -> Iterator[Any]:
    with opened(browser, text, tmp_path) as made:
        yield made


def test_a_page_without_a_line_works(browser: Any, tmp_path: Path) -> None:
    compiled = zcompile.compile(Given(), backend="eager")
    compiled(torch.ones(2))
    with opened(browser, page_text("Given", compiled._engine.compiler.journals, RATES), tmp_path) as made:
        made.locator("h1").hover()
        made.locator(".text").click()
        made.keyboard.press("ArrowDown")


def test_a_click_on_a_line_marks_it_everywhere(page: Any) -> None:
    line = page.locator(".text .line[data-node$='_gather']").nth(1)
    node = line.get_attribute("data-node")
    line.click()
    assert "kept" in line.get_attribute("class")
    assert line.get_attribute("aria-selected") == "true"
    assert "kept" in page.locator(f"table.collectives tr[data-node='{node}']").get_attribute("class")
    assert page.locator("line.cursor").get_attribute("x1") == line.get_attribute("data-at")
    line.click()
    assert "kept" not in line.get_attribute("class"), "a second click takes the mark away"


def test_a_click_on_the_timeline_marks_the_line(page: Any) -> None:
    bar = page.locator("rect.bar.compute[data-node]").nth(1)
    bar.click()
    node = bar.get_attribute("data-node")
    assert page.locator(f".text .line.kept[data-node='{node}']").count() >= 1


def test_hovering_marks_and_leaves_nothing(page: Any) -> None:
    line = page.locator(".text .line[data-node]").nth(2)
    line.hover()
    assert "hover" in line.get_attribute("class")
    page.locator("h1").hover()
    assert "hover" not in line.get_attribute("class")


def test_the_memory_leads_to_its_line(page: Any) -> None:
    page.locator("button.to-line").click()
    at = page.locator("line.peak").get_attribute("x1")
    assert page.locator(".text .line.kept").first.get_attribute("data-at") == at
    box, line = page.locator(".text").first.bounding_box(), page.locator(".text .line.kept").first.bounding_box()
    assert box["y"] <= line["y"] <= box["y"] + 0.6 * box["height"]
    assert "(" in page.locator("button.to-line").inner_text()
    page.locator("svg.curve").click(position={"x": 3, "y": 20})
    assert page.locator(".text .line.kept").first.get_attribute("data-at") != at


def test_the_keyboard_goes_through_the_lines(page: Any) -> None:
    page.locator(".text").focus()
    page.keyboard.press("ArrowDown")
    first = page.locator(".text .line.kept").first.get_attribute("data-node")
    page.keyboard.press("ArrowDown")
    assert page.locator(".text .line.kept").first.get_attribute("data-node") != first
    page.keyboard.press("Escape")
    assert page.locator(".text .line.kept").count() == 0


def test_light_and_dark(page: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("#theme").click()
    assert page.evaluate(paper) != light
    assert page.locator("#theme").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("width", [360, 800, 2400])
def test_no_width_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("rect.bar").first.is_visible()


def test_passes_show_what_they_change(page: Any) -> None:
    step = page.locator("details.pass", has_text="insert_gathers")
    step.locator("summary").click()
    assert "all_gather(" in step.locator(".diff").inner_text()
    assert step.locator(".added").first.is_visible()


# -- a plan's page ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    few: dict[str, Any] = {"worlds": [2, 4], "stages": [1, 3], "prefetches": [0, 2], "dtypes": [None]}
    made = zcompile.plan(make("gpt"), batch("gpt", 0, 0), hardware=RATES, memory_limit="1 GB", **few)
    least = min(forecast.nbytes for forecast in made.of(2))
    return replace(made, memory_limit=least)  # one choice fits on two ranks


def test_every_choice_of_a_plan_is_there(plan: Plan) -> None:
    text = plan_page_text(plan)
    for forecast in plan.forecasts:
        assert f"{forecast.nbytes / 1e9:.2f}</td>" in text
        assert html.escape(str(forecast.choice)).replace("&#x27;", "&#39;") in text
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "http" not in text


def test_bars_of_memory_lie_end_to_end_in_proportion(plan: Plan) -> None:
    forecasts = [forecast for world in plan.worlds for forecast in plan.of(world)]
    rows = re.findall(r'aria-label="by kind">(.*?)</svg>', plan_page_text(plan))
    bars = [[(float(x), float(w)) for x, w in re.findall(r'x="([\d.]+)" width="([\d.]+)"', row)] for row in rows]
    assert len(bars) == len(forecasts)
    for forecast, row in zip(forecasts, bars, strict=True):
        assert row[0][0] == 0.0
        assert all(x + w == pytest.approx(after, abs=0.2) for (x, w), (after, _) in itertools.pairwise(row))
        largest = max(other.nbytes for other in plan.of(forecast.world))
        assert sum(w for _, w in row) == pytest.approx(1000 * forecast.nbytes / largest, abs=0.5)


def test_a_plan_of_a_model_with_html_in_its_name_is_text(plan: Plan) -> None:
    assert "<img" not in plan_page_text(replace(plan, model="<img src=x onerror=alert(1)>"))


def test_a_plan_that_nothing_fits_says_so(plan: Plan) -> None:
    text = plan_page_text(replace(plan, memory_limit=1))
    assert "holds nothing on 2 ranks" in text
    assert 'class="copy"' not in text


def test_a_plan_marks_sorts_and_copies(browser: Any, plan: Plan, tmp_path: Path) -> None:
    with opened(browser, plan_page_text(plan), tmp_path) as page:
        world = page.locator("#world-2")
        dots, rows = world.locator("circle.dot"), world.locator("tbody tr")
        assert dots.count() == rows.count() == len(plan.of(2))
        best = world.locator("tr.best")
        assert best.count() == world.locator("circle.best").count() == 1
        best.click()
        assert "kept" in (world.locator("circle.best").get_attribute("class") or "")
        world.get_by_role("button", name="step s").click()
        seconds = [float(cell) for cell in rows.locator("td:nth-child(6)").all_inner_texts()]
        assert seconds == sorted(seconds)
        world.get_by_role("button", name="step s").click()
        seconds = [float(cell) for cell in rows.locator("td:nth-child(6)").all_inner_texts()]
        assert seconds == sorted(seconds, reverse=True)
        rows.first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert "kept" in (rows.nth(1).get_attribute("class") or "")
        world.locator(".copy").click()
        page.wait_for_function("document.querySelector('.copy').textContent !== 'Copy'")


@pytest.mark.parametrize("width", [360, 768, 1300, 2400])
def test_no_width_scrolls_a_plan_sideways(browser: Any, plan: Plan, tmp_path: Path, width: int) -> None:
    with opened(browser, plan_page_text(plan), tmp_path) as page:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
