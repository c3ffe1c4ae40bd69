"""The pipeline: its order comes from facts, it is a value that users change, and it says what is missing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import zcompile
from tests.models import batch, make
from tests.passes.programs import CHAIN, OUTLINED, joined
from zcompile import Fact, OptionError, Pass, Pipeline, PipelineError, Program, ProgramError, Violation, facts
from zcompile.errors import nearest
from zcompile.ir.layout import STAGES
from zcompile.schedule.pipeline import Journal, JournalEntry, Trait, Verified, _touches

ORDER = [
    "split_phases",
    "assign_units",
    "defer_weights",
    "outline_regions",
    "pack_small",
    "insert_gathers",
    "insert_reductions",
    "keep_full",
    "split_large",
    "schedule_prefetch",
    "sink_waits",
]


def holds(program: Program) -> Iterator[Violation]:
    yield from ()


FIRST, SECOND, THIRD = (Fact(name, holds) for name in ("the first", "the second", "the third"))


def step(name: str, requires: tuple[Fact, ...] = (), ensures: tuple[Fact, ...] = ()) -> Pass:
    return Pass(name, lambda program: program, requires, ensures)


def built(*steps: Pass) -> Pipeline:
    return Pipeline(STAGES[3], steps, goals=())


def program() -> Program:
    return zcompile.parse(joined(CHAIN, OUTLINED))


# -- the order --------------------------------------------------------------------------------------------------------


def test_the_default_order() -> None:
    assert zcompile.pipeline(stage=3, prefetch=2).names == ORDER
    assert zcompile.pipeline(stage=3, memory_limit="1 GiB").names == [*ORDER, "keep_within"]
    assert zcompile.pipeline(stage=1).names == [name for name in ORDER if name != "keep_full"]
    sharded = ("keep_full", "split_large", "schedule_prefetch")
    assert zcompile.pipeline(stage=0).names == [name for name in ORDER if name not in sharded]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_order_passes_are_given_in_each_follows_what_it_requires(seed: int) -> None:
    passes = list(zcompile.pipeline(stage=3, prefetch=2).passes)
    random.Random(seed).shuffle(passes)
    ordered = Pipeline(STAGES[3], tuple(passes)).passes
    assert sorted(one.name for one in ordered) == sorted(ORDER)
    ensured: set[Fact] = set()
    for one in ordered:
        assert set(one.requires) <= ensured
        ensured |= set(one.ensures)


def test_passes_that_do_not_depend_on_each_other_keep_the_given_order() -> None:
    assert built(step("b"), step("a"), step("c", ensures=(FIRST,)), step("d", (FIRST,))).names == ["b", "a", "c", "d"]


def test_a_pass_follows_all_that_ensure_what_it_requires() -> None:
    assert built(step("last", (FIRST,)), step("one", (), (FIRST,)), step("two", (), (FIRST,))).names == [
        "one",
        "two",
        "last",
    ]


# -- what cannot be built ---------------------------------------------------------------------------------------------


def test_a_missing_ensurer_is_refused_when_the_pipeline_is_built() -> None:
    with pytest.raises(PipelineError) as caught:
        built(step("needy", (FIRST,)))
    assert caught.value.subject == "pass 'needy'"
    assert "the first" in caught.value.problem


def test_leaving_out_a_pass_that_another_needs_names_both() -> None:
    with pytest.raises(PipelineError, match=r"'assign_units'.*phases split"):
        zcompile.pipeline(stage=3).changed({"split_phases": None})


def test_a_pass_does_not_ensure_its_own_requirement() -> None:
    with pytest.raises(PipelineError, match="requires the first, which no earlier pass ensures"):
        built(step("a", (FIRST,), (FIRST,)))


def test_two_passes_of_one_name_are_refused() -> None:
    with pytest.raises(PipelineError, match="'a': is in the pipeline twice"):
        built(step("a"), step("a"))


def test_a_circle_is_refused_and_shown() -> None:
    with pytest.raises(PipelineError) as caught:
        built(step("a", (SECOND,), (FIRST,)), step("b", (FIRST,), (SECOND,)), step("c", (), (THIRD,)))
    assert "passes wait for each other" in caught.value.problem
    assert {"a", "b"} <= set(caught.value.problem.replace("->", " ").split())
    assert "c" not in caught.value.problem.partition(":")[2].split()


# -- changing it ------------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(PipelineError) as caught:
        zcompile.pipeline(stage=3).changed({"sink_wait": None})
    assert caught.value.subject == "pass 'sink_wait'"
    assert caught.value.fix.startswith("did you mean 'sink_waits'?")


def test_a_pass_that_nobody_needs_is_left_out() -> None:
    assert zcompile.pipeline(stage=3).changed({"sink_waits": None}).names == ORDER[:-1]
    assert "pack_small" not in zcompile.pipeline(stage=3).changed({"pack_small": None}).names


def test_a_change_makes_another_pipeline() -> None:
    pipeline = zcompile.pipeline(stage=3)
    pipeline.changed({"sink_waits": None})
    assert pipeline.names == ORDER


def test_a_pass_of_a_known_name_replaces_that_pass() -> None:
    mine = step("sink_waits", (facts.REDUCED_ONCE,))
    changed = zcompile.pipeline().changed({"sink_waits": mine})
    assert changed.names == ORDER
    assert changed.passes[-1].run is mine.run
    assert changed.passes[-1].traits == Trait.SCHEDULES, "of the pass that it replaces"


def test_a_pass_of_a_new_name_is_added_where_its_facts_put_it() -> None:
    mine = step("mine", (facts.PHASES_SPLIT,), (FIRST,))
    user = step("user", (FIRST,))
    changed = zcompile.pipeline().changed({"user": user, "mine": mine})
    assert changed.names.index("split_phases") < changed.names.index("mine") < changed.names.index("user")


def test_a_pass_under_another_name_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"passes\['mine'\]: the pass is called 'other'"):
        zcompile.pipeline().changed({"mine": step("other")})


@pytest.mark.slow
def test_a_users_pass_runs_in_compile() -> None:
    seen: list[str] = []

    def look(found: Program) -> Program:
        seen.append(found.name)
        return found

    compiled = zcompile.compile(
        make("mlp"), backend="eager", passes={"look": Pass("look", look, (facts.REGIONS_OUTLINED,)), "pack_small": None}
    )
    compiled(*batch("mlp", 0, 0)).backward()
    assert seen == ["step"]
    assert [entry.name for entry in compiled.journals[0].entries if entry.name in ("look", "pack_small")] == ["look"]


# -- running it -------------------------------------------------------------------------------------------------------


def test_the_journal_has_the_program_before_and_after_every_pass() -> None:
    journal, given = Journal(), program()
    result = built(step("a"), step("b")).run(given, journal)
    assert [entry.name for entry in journal.entries] == ["a", "b"]
    assert journal.entries[0].before is given
    assert journal.entries[0].after is journal.entries[1].before
    assert journal.entries[1].after is result


def broken(found: Program) -> Iterator[Violation]:
    yield Violation(found.node("yb"), "it is so")


def test_a_pass_that_does_not_ensure_its_fact_is_named_with_the_line() -> None:
    with pytest.raises(ProgramError) as caught:
        built(step("good"), step("bad", (), (Fact("a fact", broken),))).run(program())
    assert caught.value.subject == "after bad: a fact"
    assert caught.value.problem == "it is so"
    (marked,) = [line for line in str(caught.value).splitlines() if line.startswith("-->")]
    assert "yb = region_0(b, ya)" in marked


def no_b(found: Program) -> Iterator[Violation]:
    if found.node("yb").args[-1] is not found.node("ya"):
        yield Violation(found.node("yb"), "yb reads another value")


READS_YA = Fact("yb reads ya", no_b)


def turned(found: Program) -> Program:
    """Where yb reads x in place of ya, what was computed before: facts alone are looked at here."""
    found = found.copy()
    found.node("yb").args = (*found.node("yb").args[:-1], found.node("x"))
    return found


def advice(*steps: Pass, goals: tuple[Fact, ...] = ()) -> str:
    """What to fix, in the message of a pipeline that fails; values are not compared."""
    pipeline, given = Pipeline(STAGES[3], steps, goals), program()
    started = replace(Verified.traced(given), values=Unchecked())
    journal = Journal()
    try:
        pipeline.check_goals(started.after(pipeline.passes, journal).program, journal)
    except ProgramError as error:
        return error.fix.splitlines()[0]
    raise AssertionError("a fact fails")


@dataclass(frozen=True)
class Unchecked:
    fact: Fact = Fact("values", holds)  # noqa: RUF009

    def modulo(self, rules: Any) -> Unchecked:
        return self


def test_the_pass_that_broke_a_fact_is_to_be_fixed() -> None:
    mine = Pass("mine", turned)
    held = "fix the pass mine: this held before it ran, and does not hold after it"
    assert advice(step("first", (), (READS_YA,)), mine, step("last")) == held
    assert advice(Pass("mine", turned, (), (READS_YA,)), step("last")) == held


def test_a_pass_that_finds_a_fact_broken_is_not_blamed_alone() -> None:
    assert advice(step("first"), Pass("mine", turned), step("other"), step("bounded", (), (READS_YA,))) == (
        "fix the pass bounded, which should ensure this, or mine, after which it no longer held"
    )


def test_the_writer_of_the_line_is_named_where_a_fact_never_held() -> None:
    assert advice(step("first"), Pass("mine", turned), step("bad", (), (Fact("a fact", broken),))) == (
        "fix the pass bad, which should ensure this, or mine, the last pass before it to write or move the line"
    )


def test_the_pass_that_broke_a_goal_is_to_be_fixed_not_the_last() -> None:
    assert advice(step("first"), Pass("mine", turned), step("last"), goals=(READS_YA,)) == (
        "fix the pass mine: this held before it ran, and does not hold after it"
    )


def test_of_a_goal_that_never_held_the_writer_of_the_line_is_named() -> None:
    mine = Pass("mine", turned)
    found = advice(step("first"), mine, step("last"), goals=(Fact("a goal", broken),))
    assert found == "add a pass that ensures this, or fix mine, the last to write or move the line"


def test_a_pass_that_moves_a_line_is_its_writer() -> None:
    def moved(found: Program) -> Program:
        found = found.copy()
        found.node("ya").append(found.node("b"))
        return found

    entry = JournalEntry(Pass("moves", moved), given := program(), moved(given), 0.0, 0.0)
    assert _touches(entry, "b")
    assert not _touches(entry, "yb")
    assert not _touches(entry, "nothing")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"requires": FIRST},
            r"pass 'mine': has one fact as requires, which is a tuple .*\n  Fix: .* comma: requires=\(FACT,\)",
        ),
        ({"ensures": FIRST}, "pass 'mine': has one fact as ensures"),
        ({"ensures": ["first"]}, "pass 'mine': has list as ensures.\n  Fix: give a tuple of zcompile.Fact"),
        ({"requires": ("first",)}, "pass 'mine': has str as requires"),
        ({"rules": zcompile.Rule("r", "aten.neg.default(x)", "x")}, "pass 'mine': has one rule as rules"),
    ],
)
def test_what_are_no_facts_is_refused(given: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Pass("mine", lambda program: program, **given)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(PipelineError, match="pass 'mine': has 3 to run"):
        Pass("mine", 3)  # type: ignore[arg-type]


def test_a_later_pass_that_breaks_an_earlier_fact_is_named() -> None:
    def without_b(found: Program) -> Iterator[Violation]:
        if "yb" not in {node.name for node in found.nodes()}:
            yield Violation(None, "yb is gone")

    def remove_b(found: Program) -> Program:
        found = found.copy()
        found.node("yb").replace_all_uses_with(found.node("ya"))
        found.graph.erase_node(found.node("yb"))
        return found

    fact = Fact("yb is there", without_b)
    steps = built(step("before", (), (fact,)), Pass("remove_b", remove_b, (fact,)), step("after"))
    with pytest.raises(ProgramError, match="after remove_b: yb is there: yb is gone"):
        steps.run(program())


def test_a_pass_that_changes_what_it_is_given_is_refused() -> None:
    def rename(found: Program) -> Program:
        found.node("yb").args = (*found.node("yb").args[:-1], found.node("x"))
        return found

    with pytest.raises(
        PipelineError, match=r"rename: changes the program that it is given.\n  Fix: .*program.copy\(\)"
    ):
        built(Pass("rename", rename)).run(program())


def test_a_pass_that_returns_no_program_is_named() -> None:
    with pytest.raises(PipelineError, match="mine: returned NoneType"):
        built(Pass("mine", lambda _: None)).run(program())  # type: ignore[arg-type,return-value]


def test_a_pass_that_raises_is_named() -> None:
    with pytest.raises(PipelineError, match="mine: raised KeyError: 'no such node'") as caught:
        built(Pass("mine", lambda found: {}["no such node"])).run(program())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("passes", [[], {"sink_waits": print}, "sink_waits"])
def test_what_are_no_passes_is_refused(passes: Any) -> None:
    with pytest.raises(
        OptionError, match=r"passes: (is a (list|str)|has a builtin_function_or_method under 'sink_waits')"
    ):
        zcompile.compile(make("mlp"), passes=passes)


def test_goals_are_checked_at_the_end() -> None:
    steps = Pipeline(STAGES[3], (step("a"),), goals=(Fact("a goal", broken),))
    with pytest.raises(ProgramError, match="at the end of the pipeline: a goal: it is so"):
        steps.run(program())


# -- printing and options ---------------------------------------------------------------------------------------------


def test_the_table_names_every_pass_and_fact() -> None:
    pipeline = zcompile.pipeline(stage=3, prefetch=2)
    table = str(pipeline)
    assert table.startswith("stage 3")
    words = " ".join(table.replace("│", " ").split())
    for one in pipeline.passes:
        assert one.name in words
    rows = [[cell.strip() for cell in line.split("│")] for line in table.splitlines() if line.startswith("│")]
    ensured = " ".join(row[3] for row in rows)
    for one in pipeline.passes:
        for fact in one.ensures:
            assert str(fact) in ensured
    assert "at most 2 + 1 units full at once" in ensured


@pytest.mark.parametrize("stage", [4, -1, True, "3", 3.0, None])
def test_what_is_no_stage_is_refused(stage: Any) -> None:
    with pytest.raises(OptionError) as caught:
        zcompile.pipeline(stage=stage)
    assert (caught.value.subject, caught.value.problem) == ("stage", f"{stage!r} is not a ZeRO stage")


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, "1", None])
def test_what_is_no_prefetch_is_refused(prefetch: Any) -> None:
    with pytest.raises(OptionError) as caught:
        zcompile.pipeline(prefetch=prefetch)
    assert (caught.value.subject, caught.value.problem) == ("prefetch", f"{prefetch!r} is not a number of units")


def test_of_many_choices_a_dozen_is_listed() -> None:
    assert nearest("x", map(str, range(12))).endswith("'9'")
    assert nearest("x", map(str, range(13))).endswith("'8' and 1 more")
