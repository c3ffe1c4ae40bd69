"""The page: all of a program in one file that fetches nothing, and what it does in a browser."""

from __future__ import annotations

import contextlib
import html
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.cases import quickly
from tests.models import batch, make
from tests.test_dumps import steps
from zcompile.cost.forecast import Choice, Forecast, Plan
from zcompile.cost.hardware import CPU, Hardware, load_profile
from zcompile.cost.memory import MemoryKind, alive_at, live_by_kind
from zcompile.cost.simulator import simulate, simulate_pipeline
from zcompile.cost.timeline import Sent
from zcompile.ir.printer import lines_with_nodes
from zcompile.ir.tensor_type import human_bytes
from zcompile.report.axes import decimal_bytes, human_seconds, ticks
from zcompile.report.charts import memory_curve, step_chart
from zcompile.report.pages import coloured
from zcompile.report.plan_page import PlannedWorld, name_of, plan_page_text
from zcompile.report.program_page import _changes, page_text
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal
from zcompile.tools.inspection import of_pipeline
from zcompile.tools.named_models import subject_of

RATES = Hardware.of(flops=1e9, memory_bandwidth=1e9, latency=1e-5, bandwidth=1e8)


def journal_of(model: nn.Module, *given: torch.Tensor) -> Journal:
    compiled = zcompile.compile(model, backend="eager")
    compiled(*given).sum().backward()
    (journal,) = compiled._engine.journals
    return journal


@pytest.fixture(scope="module")
def journal() -> Journal:
    return journal_of(make("gpt"), *batch("gpt", 0, 0))


@pytest.fixture(scope="module")
def text(journal: Journal) -> str:
    return page_text("a GPT", [journal], RATES)


@pytest.mark.slow
def test_every_line_of_the_program_is_there(journal: Journal, text: str) -> None:
    """As it is printed, blank for blank: parts of a line are in tags and nothing else."""
    shown = re.findall(r'<div class="line[^>]*?(?: data-node="([^"]*)"[^>]*)?>(.*?)</div>', text)
    printed = [(node, line) for line, node in lines_with_nodes(journal.entries[-1].after)]
    assert [(node, html.unescape(re.sub(r"</?i[^>]*>", "", line))) for node, line in shown] == printed[1:]
    assert printed[0] == ("", ""), "the blank line before the first function"


@pytest.mark.parametrize(
    ("line", "made"),
    [
        (
            "    a = wait(b)  #  -2 KiB  a.b",
            '    a = <i class="operation">wait</i>(b)<i class="margin">  #  <i class="freed">-2 KiB</i>  a.b</i>',
        ),
        (
            "    y = region_0(x)  # &bf16[8, s0=4], 3 values  +3.5 MiB",
            '    y = <i class="region">region_0</i>(x)<i class="margin">  # <i class="type">&amp;bf16[8, s0=4]</i>, '
            '<i class="type">3 values</i>  <i class="gained">+3.5 MiB</i></i>',
        ),
        (
            "y = aten.mm.default(a, 'return # <b>')",
            'y = <i class="function">aten.mm.default</i>(a, <i class="string">&#39;return # &lt;b&gt;&#39;</i>)',
        ),
        ("    return [returned]", '    <i class="keyword">return</i> [returned]'),
    ],
)
def test_parts_of_a_line_have_colours(line: str, made: str) -> None:
    assert str(coloured(line)) == made


def test_a_difference_is_not_in_columns_that_were_aligned_anew() -> None:
    before = ["def forward(box):", "    a = f(x)  # f32[4]", "    b = g(a)  # f32[4]"]
    after = [
        "def forward(box):",
        "    a = f(x)        # f32[4]",
        "    long = h(a)     # f32[4]",
        "    b = g(a)        # f32[4]",
    ]
    kinds = [(kind, line) for kind, _, line in _changes(before, after)]
    assert [line for kind, line in kinds if kind == "added"] == [after[2]]
    assert [line for kind, line in kinds if kind == "removed"] == []
    assert ("context", after[1]) in kinds


@pytest.mark.slow
def test_figures_have_units_and_few_digits(text: str) -> None:
    shown = html.unescape(
        re.sub(r"<(style|script)>.*?</\1>|<div class=\"line.*?</div>|<[^>]*>", " ", text, flags=re.DOTALL)
    )
    assert not re.findall(r"\b0\.0\d+ ?(?:ms|s)\b", shown), "a smaller unit"
    figures = re.findall(r"\b([\d.]+) (?:s|ms|µs|ns|[KMGT]iB)\b", shown)
    assert figures
    assert [figure for figure in figures if len(figure.replace(".", "").lstrip("0")) > 4] == []


@pytest.mark.slow
def test_the_hardware_is_named_and_why_it_was_taken(tmp_path: Path) -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    steps(compiled, 1)
    told = html.unescape(compiled.report(tmp_path / "report.html").read_text())
    assert f"<strong>{CPU.name}</strong>, taken because no hardware= was given" in told
    assert CPU.source in told
    assert "50 GFLOP/s in every dtype; memory 10 GB/s; between ranks 125 MB/s, 200 µs latency" in told
    assert "given as hardware=" in compiled.report(tmp_path / "report.html", hardware=RATES).read_text()


@pytest.mark.slow
def test_hardware_that_was_measured_is_said_to_be(tmp_path: Path) -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager", prefetch="auto")
    steps(compiled, 1)
    told = html.unescape(compiled.report(tmp_path / "report.html").read_text())
    assert "<strong>measured</strong>, taken because no hardware= was given" in told
    assert "measured when the model was compiled, on all ranks at once (1)" in told


@pytest.mark.slow
def test_memory_is_drawn_over_the_time_of_the_step(journal: Journal) -> None:
    program = journal.entries[-1].after
    timeline = simulate(program, RATES, steps=True)
    curve = memory_curve(program, timeline)
    assert curve is not None
    computed = [event for event in timeline.events if event.is_line]
    for event in computed:
        assert curve.spans[event.node] == pytest.approx(
            (100 * event.start / timeline.seconds, 100 * event.end / timeline.seconds)
        )
    places = [place for span in curve.spans.values() for place in span]
    assert places == sorted(places)
    assert curve.held[curve.peak_node] == curve.most == max(curve.held.values())
    assert re.fullmatch(r"region_\d+ of [\w.]+, in the (forward|backward)", curve.peak), curve.peak


def test_forward_backward_and_optimizer_follow_each_other(journal: Journal) -> None:
    parts = step_chart(simulate(journal.entries[-1].after, RATES, steps=True), "", journal.entries[-1].after).parts
    assert [part.name for part in parts] == ["forward", "backward", "optimizer"]
    for part, after in itertools.pairwise(parts):
        assert part.start + part.width == pytest.approx(after.start)
    assert parts[0].start == 0.0
    assert parts[-1].start + parts[-1].width == pytest.approx(100.0)


def test_messages_at_the_same_time_are_in_rows_of_one_lane(journal: Journal) -> None:
    program = journal.entries[-1].after
    sent = [Sent("all_gather", "a", 8, at, at + 2.0) for at in (0.0, 1.0, 2.0)]
    sent.append(Sent("all_reduce", "a", 8, 0.0, 1.0, group="replicate"))
    timeline = replace(simulate(program, RATES), messages=sent)
    lanes = {lane.name: lane for lane in step_chart(timeline, "", program).lanes}
    assert [bar.row for bar in lanes["communication"].bars] == [0, 0, 1]
    assert [bar.row for bar in lanes["along replicate"].bars] == [0]
    assert lanes["communication"].row_height < lanes["along replicate"].row_height


@pytest.mark.slow
def test_a_rank_of_a_pipeline_is_shown_beside_the_others(tmp_path: Path) -> None:
    """A rank alone would not wait for what the others have yet to compute."""
    hardware = load_profile("h100")
    subject = subject_of("gpt:2x64", batch=1, sequence=32)
    made = of_pipeline(subject, Options(stage=1), (2, 2), ("1f1b", 4, None), hardware)
    step = max(timeline.seconds for timeline in simulate_pipeline(made.programs, hardware))
    assert min(simulate(program, hardware, steps=True).seconds for program in made.programs) < step
    for journal in made.journals:
        text = page_text(
            "a GPT",
            [journal],
            hardware,
            ranks=[zcompile.parse(program.text(regions=True)) for program in made.programs],
        )
        assert f'<dd class="figure">{human_seconds(step)}</dd>' in text
        assert re.search(r"in (region_\d+|\w+) of [\w.]+, in \d[FB]\d</dd>", text)
        assert 'class="bar backward' in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0"), (3e-7, "300 ns"), (7.806e-7, "781 ns"), (0.0007806, "781 µs"), (0.9999, "1 s"), (83.26, "83.3 s")],
)
def test_seconds_for_reading(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_ticks_are_at_round_figures() -> None:
    assert [(tick.at, tick.text) for tick in ticks(0.05, human_seconds)] == [
        (0.0, "0"), (pytest.approx(40.0), "20 ms"), (pytest.approx(80.0), "40 ms"),
    ]  # fmt: skip
    assert [tick.text for tick in ticks(650 * 2**20, human_bytes, base=1024)] == [
        "0 B",
        "200 MiB",
        "400 MiB",
        "600 MiB",
    ]
    assert ticks(0, human_bytes) == []


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


@pytest.mark.slow
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
    assert 'svg class="curve"' not in (tmp_path / "report.html").read_text()


# -- in a browser -----------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
def test_a_page_without_a_line_works(browser: Any, tmp_path: Path) -> None:
    compiled = zcompile.compile(Given(), backend="eager")
    compiled(torch.ones(2))
    with opened(browser, page_text("Given", compiled._engine.journals, RATES), tmp_path) as made:
        made.locator("h1").hover()
        made.locator(".text").click()
        made.keyboard.press("ArrowDown")


@pytest.mark.slow
def test_a_click_on_a_line_marks_it_everywhere(page: Any) -> None:
    line = page.locator(".text .line[data-node$='_gather']").nth(1)
    node = line.get_attribute("data-node")
    line.click()
    assert "kept" in line.get_attribute("class")
    assert line.get_attribute("aria-selected") == "true"
    assert "kept" in page.locator(f"table.collectives tr[data-node='{node}']").get_attribute("class")
    assert page.locator("i.cursor").evaluate("one => one.style.left") == f"{float(line.get_attribute('data-start')):g}%"
    assert line.get_attribute("data-about") in page.locator("output.readout").inner_text()
    line.click()
    assert "kept" not in line.get_attribute("class"), "a second click takes the mark away"


@pytest.mark.slow
def test_a_click_on_the_timeline_marks_the_line(page: Any) -> None:
    bar = page.locator("rect.bar.compute[data-node]").nth(1)
    bar.click()
    node = bar.get_attribute("data-node")
    assert page.locator(f".text .line.kept[data-node='{node}']").count() >= 1


@pytest.mark.slow
def test_hovering_marks_and_leaves_nothing(page: Any) -> None:
    line = page.locator(".text .line[data-node]").nth(2)
    line.hover()
    assert "hover" in line.get_attribute("class")
    page.locator("h1").hover()
    assert "hover" not in line.get_attribute("class")


@pytest.mark.slow
def test_the_memory_leads_to_its_line(page: Any) -> None:
    button = page.locator("button.to-line")
    button.click()
    kept = page.locator(".text .line.kept")
    assert kept.first.get_attribute("data-node") == button.get_attribute("data-node")
    peak = page.locator("i.peak").evaluate("one => parseFloat(one.style.left)")
    assert float(kept.first.get_attribute("data-start")) <= peak <= float(kept.first.get_attribute("data-end"))
    box, line = page.locator(".text").first.bounding_box(), kept.first.bounding_box()
    assert box["y"] <= line["y"] <= box["y"] + 0.6 * box["height"]
    page.locator("svg.curve").click(position={"x": 3, "y": 20})
    assert kept.first.get_attribute("data-node") != button.get_attribute("data-node")


@pytest.mark.slow
def test_lanes_memory_and_axis_are_on_one_time_axis(page: Any) -> None:
    """What is drawn at a moment is at one place: bars, the border before the backward, and the memory."""
    left, width = page.locator("svg.curve").evaluate("one => [one.getBoundingClientRect().x, one.clientWidth]")
    for lane in page.locator(".lane svg").all():
        assert lane.evaluate("one => [one.getBoundingClientRect().x, one.clientWidth]") == [left, width]
    border = page.locator("i.border").first
    at = border.evaluate("one => [one.getBoundingClientRect().x, parseFloat(one.style.left)]")
    assert at[0] == pytest.approx(left + width * at[1] / 100, abs=1.0)
    assert border.is_visible()
    assert page.locator(".axis span").count() > 3


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


@quickly("width", [360, 390, 800, 1280, 2400], [390])
def test_no_width_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("rect.bar").first.is_visible()
    cut = "one => one.scrollWidth > one.clientWidth"
    assert not page.locator(".text").evaluate(cut), "types and modules are not cut"


@pytest.mark.slow
def test_passes_show_what_they_change(page: Any) -> None:
    step = page.locator("details.pass", has_text="insert_gathers")
    step.locator("summary").click()
    assert "all_gather(" in step.locator(".diff").inner_text()
    assert step.locator(".added").first.is_visible()


@pytest.mark.slow
def test_each_line_of_a_difference_is_a_line(page: Any) -> None:
    step = page.locator("details.pass", has_text="insert_gathers")
    step.locator("summary").click()
    boxes = step.locator(".diff > div").evaluate_all("all => all.map((one) => one.getBoundingClientRect().toJSON())")
    assert len(boxes) > 10
    for above, below in itertools.pairwise(boxes):
        assert below["y"] == pytest.approx(above["y"] + above["height"], abs=1.0)
        assert below["x"] == above["x"]
        assert below["height"] < 30
    assert max(box["width"] for box in boxes) < 1300


@pytest.mark.slow
def test_the_scheme_of_the_system_is_taken_without_a_click(browser: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(text)
    papers = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, java_script_enabled=False)
        page = context.new_page()
        page.goto(f"file://{tmp_path}/report.html")
        papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert papers == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]


# -- a plan's page ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    few: dict[str, Any] = {"worlds": [2, 4], "stages": [1, 3], "prefetches": [0, 2], "dtypes": [None]}
    made = zcompile.plan(make("gpt"), batch("gpt", 0, 0), hardware=RATES, memory_limit="1 GB", **few)
    least = min(forecast.nbytes for forecast in made.of(2))
    return replace(made, memory_limit=least)  # one choice fits on two ranks


@pytest.mark.slow
def test_every_choice_of_a_plan_is_there(plan: Plan) -> None:
    text = plan_page_text(plan)
    for forecast in plan.forecasts:
        assert f"{decimal_bytes(forecast.nbytes)}</td>" in text
        assert f"{human_seconds(forecast.seconds)}</td>" in text
        assert html.escape(str(forecast.choice)).replace("&#x27;", "&#39;") in text
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert "http" not in text


@pytest.mark.slow
def test_the_memory_limit_has_a_line_wherever_it_is(plan: Plan) -> None:
    largest = max(forecast.nbytes for forecast in plan.of(2))
    for limit in (1, largest // 2, 2 * largest):
        place = PlannedWorld(replace(plan, memory_limit=limit), 2).limit
        assert place is not None
        assert 0 < place <= 100
    above = replace(plan, memory_limit=100 * largest)
    assert PlannedWorld(above, 2).limit == 0.0
    assert f"limit {decimal_bytes(100 * largest)}, far above</text>" in plan_page_text(above)
    boundless = replace(plan, memory_limit=math.inf)
    assert PlannedWorld(boundless, 2).limit is None
    assert "<dd>none of a rank" in plan_page_text(boundless)


@pytest.mark.slow
def test_the_best_choice_and_its_neighbours_have_names(plan: Plan) -> None:
    chart, best = PlannedWorld(plan, 2), plan.fastest(2)
    assert best is not None
    for screen, text in (("wide", f"best: {name_of(best)}"), ("narrow", "best")):
        labels = [label for label in chart.labels if label.screen == screen]
        assert [label.text for label in labels if label.is_best] == [text]
        assert len(labels) > 1
    assert chart.dots[-1].forecast is best, "no other dot covers it"


def told(seconds: float, nbytes: int, **choice: Any) -> Forecast:
    held = {MemoryKind.ACTIVATIONS: nbytes}
    figures: dict[str, Any] = {"parameters": 0, "optimizer": 0, "held": held, "seconds": seconds, "flops": 1}
    return Forecast(choice=Choice(3, 0, None, None, **choice), world=8, exposed=0.0, hidden=0.0, **figures)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ([], "1 s per step and 2 GB per rank. Nothing else fits."),
        (
            [told(1.0, 3 * 10**9)],
            "1 s per step and 2 GB per rank. Of 2 equally fast choices it takes the least memory "
            "(the others: stage 3, prefetch 0).",
        ),
        (
            [told(1.0, 2 * 10**9), told(1.0, 3 * 10**9)],
            "1 s per step and 2 GB per rank. Of 3 equally fast choices it is the first with the least "
            "memory (the others: stage 3, prefetch 0; stage 3, prefetch 0).",
        ),
        (
            [told(1.005, 10**9), told(1.001, 3 * 10**9)],
            "1 s per step and 2 GB per rank. The next, stage 3, prefetch 0, takes 0.1% longer. "
            "With 1 GB, stage 3, prefetch 0 takes 0.5% longer.",
        ),
    ],
)
def test_what_is_best_has_a_reason(others: list[Forecast], reason: str) -> None:
    made = Plan("m", 1, RATES, 10**10, [told(1.0, 2 * 10**9), *others, told(0.5, 10**11)])
    assert f'<p class="reason">{reason}</p>' in plan_page_text(made)


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
    assert "fits no choice on 2 ranks" in text
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
        step = world.get_by_role("button", name="step")
        taken = "all => all.map((one) => Number(one.dataset.value))"
        step.click()
        seconds = rows.locator("td:nth-child(6)").evaluate_all(taken)
        assert seconds == sorted(seconds)
        step.click()
        seconds = rows.locator("td:nth-child(6)").evaluate_all(taken)
        assert seconds == sorted(seconds, reverse=True)
        rows.first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert "kept" in (rows.nth(1).get_attribute("class") or "")
        world.locator(".copy").click()
        page.wait_for_function("document.querySelector('.copy').textContent !== 'Copy'")


PLACES = "all => all.map((one) => one.getBoundingClientRect().toJSON())"


@quickly("width", [360, 390, 768, 1280, 2400], [390])
def test_no_width_scrolls_a_plan_sideways(browser: Any, plan: Plan, tmp_path: Path, width: int) -> None:
    with opened(browser, plan_page_text(plan), tmp_path) as page:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for part in ("circle.dot", ".chart text", ".choices td"):
            for box in page.locator(part).evaluate_all(PLACES):
                assert box["left"] >= 0, part
                assert box["right"] <= width, part


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_names_cover_neither_dots_nor_each_other(browser: Any, plan: Plan, tmp_path: Path, width: int) -> None:
    with opened(browser, plan_page_text(plan), tmp_path) as page:
        page.set_viewport_size({"width": width, "height": 800})
        world = page.locator("#world-2")
        names = [box for box in world.locator("text.label").evaluate_all(PLACES) if box["width"]]
        dots = world.locator("circle.dot").evaluate_all(PLACES)
        assert len(names) > 1
        for one, other in [*itertools.combinations(names, 2), *itertools.product(names, dots)]:
            across = min(one["right"], other["right"]) - max(one["left"], other["left"])
            down = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
            assert min(across, down) < 3, (one, other)


@pytest.mark.slow
def test_headings_stand_above_their_columns(browser: Any, plan: Plan, tmp_path: Path) -> None:
    with opened(browser, plan_page_text(plan), tmp_path) as page:
        headings = page.locator("#world-2 th:has(button)")
        cells = page.locator("#world-2 tbody tr").first.locator("td")
        inside = """one => {
            const range = document.createRange();
            range.selectNodeContents(one.querySelector("button") || one);
            return range.getBoundingClientRect().toJSON();
        }"""
        compared = 0
        for index in range(headings.count()):
            heading, cell = headings.nth(index).evaluate(inside), cells.nth(index).evaluate(inside)
            side = "right" if "number" in (cells.nth(index).get_attribute("class") or "") else "left"
            if cell["width"]:
                assert heading[side] == pytest.approx(cell[side], abs=1.0)
                compared += 1
        assert compared > 4
