"""A program with one thing wrong is refused, with the fact that fails and a mark at the line."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import fx

import zcompile
from tests.cases import quickly
from tests.models import batch, make
from tests.passes.programs import CHAIN, OUTLINED, TRACED, at_stage, joined
from zcompile import Fact, Pass, Pipeline, Program, ProgramError, facts
from zcompile.ir.layout import STAGES
from zcompile.ir.operation import Phase, data, op_of, set_data
from zcompile.ir.ops import AllGather, Call, GatherAhead, Item, Reduce, Release, WaitGather, WaitReduce
from zcompile.ir.program_graph import set_results
from zcompile.passes.gather_ahead import gather_ahead
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.insert_updates import insert_updates
from zcompile.passes.keep_full import keep_full
from zcompile.passes.pack_small import pack_small
from zcompile.passes.schedule_prefetch import schedule_prefetch
from zcompile.passes.sink_waits import sink_waits
from zcompile.proof.values import TracedValues
from zcompile.runtime.agreement import first_difference

PREFETCH = 1
ALL = (
    facts.PHASES_SPLIT,
    facts.UNITS_ASSIGNED,
    facts.REGIONS_OUTLINED,
    facts.GATHERED_BEFORE_USE,
    facts.RELEASED_ONCE,
    facts.OWNED,
    facts.REDUCED_ONCE,
    facts.WAITS_SUNK,
    facts.MESSAGES_PACKED,
    facts.VOLUME_RIGHT,
    facts.units_bounded(PREFETCH),
)
VALUES = {stage: TracedValues.of(zcompile.parse(joined(at_stage(CHAIN, stage), TRACED))).fact for stage in (1, 2, 3)}
"""What programs of a stage compute, that of CHAIN."""


def right(head: str = CHAIN, phases: str = OUTLINED) -> Program:
    """A correct program; its lines are those of `tests/passes/programs.py`."""
    program = insert_gathers(pack_small(zcompile.parse(joined(head, phases))))
    if program.layout.stage.parameters_sharded:
        program = keep_full(program, prefetch=0)
    return sink_waits(schedule_prefetch(insert_reductions(program), prefetch=PREFETCH), depth=1)


def every_fact(program: Program) -> list[Fact]:
    return [facts.WELL_FORMED, *ALL, VALUES[program.layout.stage.number]]


def refusal(program: Program) -> tuple[str, str]:
    """What `verify` says of `program`: the fact with its message, and the code of the marked line."""
    with pytest.raises(ProgramError) as caught:
        zcompile.verify(program, every_fact(program), "after it")
    marked = [line for line in str(caught.value).splitlines() if line.startswith("-->")]
    line = marked[0].removeprefix("-->").split("#")[0].strip().partition(" ")[2].strip() if marked else ""
    return f"{caught.value.subject}: {caught.value.problem}", line


def release_of(program: Program, full: str) -> fx.Node:
    (release,) = [user for user in program.node(full).users if isinstance(data(user).op, Release)]
    return release


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_right_program_is_accepted(stage: int) -> None:
    program = right(at_stage(CHAIN, stage))
    zcompile.verify(program, every_fact(program), "after all")


# -- whatever is broken -----------------------------------------------------------------------------------------------


def moved(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    other.append(line) if rng.random() < 0.5 else other.prepend(line)


def deleted(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    line.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    if not line.users:
        program.graph.erase_node(line)


def doubled(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    with program.graph.inserting_after(other):
        program.graph.node_copy(line)


def swapped(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    if line.all_input_nodes and other.all_input_nodes:
        one, two = rng.choice(line.all_input_nodes), rng.choice(other.all_input_nodes)
        line.replace_input_with(one, two)
        other.replace_input_with(two, one)


def given_another(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    if line.all_input_nodes:
        line.replace_input_with(rng.choice(line.all_input_nodes), other)


def given_more(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    line.args = (*line.args, other)


def given_less(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    line.args = line.args[:-1]


def released(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    with program.graph.inserting_after(other):
        program.add((line,), replace(data(other), op=Release("a"), type=None), "another")


def misnamed(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    op = data(line).op
    if isinstance(op, (AllGather, WaitGather, Release, Reduce, WaitReduce)):
        set_data(line, replace(data(line), op=replace(op, unit=rng.choice(["a", "b", "c", "nowhere"]))))
    if isinstance(op, Call):
        set_data(line, replace(data(line), op=replace(op, region=f"region_{rng.randrange(4)}")))


def kept(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    op = data(line).op
    if isinstance(op, AllGather):
        set_data(line, replace(data(line), op=replace(op, keep=not op.keep)))
        line.kwargs = {**line.kwargs, "keep": not op.keep}


def returned(program: Program, line: fx.Node, other: fx.Node, rng: random.Random) -> None:
    end = program.graph.output_node()
    end.replace_input_with(rng.choice(end.all_input_nodes), line)


MISTAKES = (
    moved, deleted, doubled, swapped, given_another, given_more, given_less, released, misnamed, kept, returned,
)  # fmt: skip


def error_of(program: Program, rng: random.Random) -> ProgramError | None:
    """What the verifier says of `program`, if anything; any other exception comes through."""
    try:
        zcompile.verify(program, (facts.WELL_FORMED, *rng.sample(found := every_fact(program), len(found))), "after it")
    except ProgramError as error:
        return error
    return None


@quickly("mistake", MISTAKES, MISTAKES[::4])
def test_a_program_is_printed_and_judged_however_broken_it_is(mistake: Callable[..., None]) -> None:
    rng = random.Random(0)
    correct, judged = [right(at_stage(CHAIN, stage)) for stage in (1, 3)], 0
    for _ in range(60):
        program = rng.choice(correct).copy()
        for _ in range(rng.choice([1, 1, 2])):
            lines = [node for node in program.graph.nodes if node.op == "call_function"]
            mistake(program, *rng.sample([line for line in lines if not isinstance(data(line).op, Item)], 2), rng)
        assert program.text(regions=True)
        if (error := error_of(program, rng)) is not None:
            judged += 1
            assert "so broken" not in error.problem, error.problem
            assert "-->" in error.fix, error
    assert judged > 5


def test_a_reduction_behind_its_wait_is_told_in_few_lines() -> None:
    def late(program: Program) -> Program:
        program = program.copy()
        reduce = program.nodes(Reduce)[0]
        next(iter(reduce.users)).append(reduce)
        return program

    passes = zcompile.pipeline(prefetch=1).changed({"late": Pass("late", late, (facts.WAITS_SUNK,))})
    model = make("mlp")
    with pytest.raises(ProgramError, match=r"after late(.|\n)*before it is there(.|\n)*-->") as caught:
        zcompile.compile(model, backend="eager", passes=passes)(*batch("mlp", 0, 0))
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 40


@pytest.mark.parametrize("released", [True, False])
def test_nothing_is_kept_beyond_the_step_in_stage_three(released: bool) -> None:
    program = right().copy()
    gather = program.node("a_gather")
    kept(program, gather, gather, random.Random(0))
    if not released:
        program.graph.erase_node(release_of(program, "a_full"))
    assert refusal(program) == (
        "after it: gathers released exactly once: a_gather keeps a full beyond the step; stage 3 gathers it anew",
        "a_gather = all_gather(a, keep=True)",
    )


# -- gathers ----------------------------------------------------------------------------------------------------------


def test_a_removed_release() -> None:
    program = right().copy()
    program.graph.erase_node(release_of(program, "a_full"))
    assert refusal(program) == (
        "after it: gathers released exactly once: 0 releases of a_full; want one, after its last use",
        "a_gather = all_gather(a)",
    )


def test_a_doubled_release() -> None:
    program = right().copy()
    release = release_of(program, "b_full")
    with program.graph.inserting_after(release):
        program.add(release.args, data(release), "again")
    assert refusal(program) == (
        "after it: gathers released exactly once: 2 releases of b_full; want one, after its last use",
        "b_gather = all_gather(b)",
    )


def test_a_release_before_the_last_use() -> None:
    program = right().copy()
    call = next(user for user in program.node("c_full").users if user.name != "yc")
    call.prepend(release_of(program, "c_full"))
    assert refusal(program) == (
        "after it: memory used only while it holds what it did: region_1 of c uses c_full after its memory has gone: "
        "c_full is released",
        "db, gc = region_1(c_full, dy, yb)",
    )


def test_a_release_of_a_kept_copy() -> None:
    program = right(at_stage(CHAIN, 2)).copy()
    call = program.node("yc")
    with program.graph.inserting_after(call):
        program.add((program.node("a_full"),), replace(data(call), op=Release("a"), type=None), "early")
    set_data(program.node("early"), replace(data(call), op=Release("a"), type=None))
    assert refusal(program) == (
        "after it: gathers released exactly once: 1 releases of a_full; want none, it is kept",
        "a_gather = all_gather(a, keep=True)",
    )


def test_a_release_of_what_is_no_full_parameter() -> None:
    program = right().copy()
    release = release_of(program, "a_full")
    with program.graph.inserting_after(release):
        program.add((program.node("ya"),), data(release), "wrong")
    assert refusal(program) == (
        "after it: values defined before use, operations written as meant: "
        "wrong is given [ya], which a Release does not take",
        "release(ya)",
    )


GIVEN_ANOTHER = {
    "a region reads a gather without waiting": (
        ("ya", "a_full", "a_gather"),
        "full parameters gathered and waited for before use: region_0 of a reads a without waiting for a_gather",
        "ya = region_0(a_gather, x)",
    ),
    "a region reads shards": (
        ("ya", "a_full", "a"),
        "full parameters gathered and waited for before use: region_0 of a reads a before it is gathered",
        "ya = region_0(a, x)",
    ),
    "a gather is of another unit's shards": (
        ("a_gather", "a", "b"),
        "values as they were traced: result yc is not what was traced: region_0 of a computes "
        "mm(x, b.weight), with b.weight in place of a.weight (traced in a)",
        "ya = region_0(a_full, x)",
    ),
    "a region is given another unit's full parameters": (
        ("yb", "b_full", "c_full"),
        "values defined before use, operations written as meant: region_0 of b uses c_full before it is there",
        "yb = region_0(c_full, ya)",
    ),
}
"""A line, its argument, and what is in place of that."""


@pytest.mark.parametrize("mistake", GIVEN_ANOTHER)
def test_a_line_that_is_given_another_value(mistake: str) -> None:
    (line, argument, other), problem, marked = GIVEN_ANOTHER[mistake]
    program = right().copy()
    program.node(line).replace_input_with(program.node(argument), program.node(other))
    assert refusal(program) == (f"after it: {problem}", marked)


def test_a_gather_of_another_unit_altogether() -> None:
    program = right().copy()
    gather = program.node("a_gather")
    gather.replace_input_with(program.node("a"), program.node("b"))
    set_data(gather, replace(data(gather), op=AllGather("b")))
    set_data(program.node("a_full"), replace(data(program.node("a_full")), op=WaitGather("b")))
    with pytest.raises(
        ProgramError, match=r"region_0 of a computes mm\(x, b\.weight\), with b\.weight in place of a\.weight"
    ):
        zcompile.verify(program, [VALUES[3]], "after it")


def test_more_units_full_than_the_prefetch_allows() -> None:
    program = schedule_prefetch(insert_gathers(zcompile.parse(joined(CHAIN, OUTLINED))), prefetch=2)
    with pytest.raises(ProgramError) as caught:
        zcompile.verify(program, [facts.units_bounded(1)], "after it")
    assert caught.value.problem == (
        "while ya computes, 2 other units are full: b_gather, c_gather; prefetch=1 allows 1"
    )
    assert any(line.startswith("-->") and "ya = region_0(a_full, x)" in line for line in str(caught.value).splitlines())


def test_a_unit_gathered_again_for_every_call() -> None:
    """Right numbers, too many bytes: only the volume tells."""
    program = right().copy()
    call = program.node("yb")
    with program.graph.inserting_before(call):
        again = program.add((program.node("b"),), data(program.node("b_gather")), "b_gather_again")
        full = program.add((again,), data(program.node("b_full")), "b_full_again")
    with program.graph.inserting_after(call):
        program.add((full,), data(release_of(program, "b_full")), "b_release_again")
    with pytest.raises(ProgramError, match="b is gathered 2 times; want 1"):
        zcompile.verify(program, [facts.VOLUME_RIGHT], "after it")


# -- reductions -------------------------------------------------------------------------------------------------------


def without(program: Program, reduction: str) -> None:
    """Remove a reduction and its wait, and the wait from the results."""
    results = program.results
    (wait,) = [user for user in program.node(reduction).users if isinstance(data(user).op, WaitReduce)]
    left = [node for node in results.reduced if node is not wait]
    set_results(program.graph, outputs=results.outputs, input_gradients=results.input_gradients, reduced=left)
    program.graph.erase_node(wait)
    program.graph.erase_node(program.node(reduction))


def test_a_removed_reduction() -> None:
    program = right().copy()
    without(program, "b_reduce")
    found, _ = refusal(program)
    assert found == (
        "after it: values as they were traced: the gradient of b.weight is missing; "
        "want mm(t(mm(x, a.weight)), mm(dy, t(c.weight))) (traced in b)"
    )


def test_a_doubled_reduction() -> None:
    program = right().copy()
    reduce, wait = program.node("b_reduce"), program.node("b_grads")
    with program.graph.inserting_after(reduce):
        again = program.add(reduce.args, data(reduce), "b_reduce_again")
    with program.graph.inserting_after(again):
        program.add((again,), data(wait), "b_grads_again")
    assert refusal(program) == (
        "after it: memory used only while it holds what it did: b_reduce_again uses gb after its memory has gone: b_reduce works in it",
        "b_reduce_again = reduce_scatter(b, [gb])",
    )


def test_a_reduced_gradient_that_is_not_returned() -> None:
    program = right().copy()
    results = program.results
    set_results(
        program.graph,
        outputs=results.outputs,
        input_gradients=results.input_gradients,
        reduced=[node for node in results.reduced if node.name != "b_grads"],
    )
    found, line = refusal(program)
    assert found.endswith("b_grads is returned, or used, 0 times; want once")
    assert line == "b_grads = wait(b_reduce)"


def test_a_gradient_returned_unreduced() -> None:
    program = zcompile.parse(joined(CHAIN, OUTLINED))
    with pytest.raises(ProgramError, match=r"the gradient of a\.weight is returned unreduced"):
        zcompile.verify(program, [facts.REDUCED_ONCE], "after it")


def test_a_frozen_parameter_that_is_reduced() -> None:
    program = right()
    frozen = {"a.weight": True, "b.weight": False, "c.weight": True}
    found, _ = refusal(replace(program, layout=program.layout.with_trainable(frozen)))
    assert found.endswith("the parameters of b are not those that b was traced with")


def test_an_unused_parameter_that_is_reduced() -> None:
    found, _ = refusal(replace(right(), unused=frozenset({"b.weight"})))
    assert found.endswith("b.weight is said to be unused; it is not")


def test_a_reduction_given_another_units_shards() -> None:
    program = right().copy()
    program.node("b_reduce").replace_input_with(program.node("b"), program.node("a"))
    found, line = refusal(program)
    assert found.endswith("the gradient of a.weight is handed back 2 times, by b_reduce and a_reduce; want once")
    assert line == "b_reduce = reduce_scatter(a, [gb])"


def test_a_reduction_without_the_gradient_it_names() -> None:
    program = right().copy()
    reduce = program.node("b_reduce")
    reduce.args = (reduce.args[0], [None])
    found, line = refusal(program)
    assert "the gradient of b.weight is missing" in found
    assert line == "da, gb = region_1(b_full_1, db, ya)"


def test_a_reduction_to_all_where_shards_are_wanted() -> None:
    program = right().copy()
    reduce = program.node("b_reduce")
    program.respell(reduce, replace(op_of(reduce, Reduce), scatter=False))
    assert "b_reduce computes mean(dp, whole, torch.float32" in refusal(program)[0]


def test_a_reduction_to_all_by_pieces() -> None:
    program = reducing_to_all().copy()
    reduce = program.nodes(Reduce)[0]
    program.respell(reduce, replace(op_of(reduce, Reduce), bucket=64))
    with pytest.raises(ProgramError, match="sends to all as a whole; it takes no bucket and no place"):
        zcompile.verify(program, [facts.REDUCED_ONCE], "after it")


def reducing_to_all() -> Program:
    return insert_reductions(insert_gathers(zcompile.parse(joined(at_stage(CHAIN, 0), OUTLINED))))


def test_a_reduction_waited_for_twice() -> None:
    program = right().copy()
    wait = program.node("b_grads")
    with program.graph.inserting_after(wait):
        program.add(wait.args, data(wait), "b_grads_again")
    found, line = refusal(program)
    assert found.endswith("b_reduce is waited for 2 times; want once")
    assert line == "b_reduce = reduce_scatter(b, [gb])"


def test_a_wait_that_compute_could_hide() -> None:
    program = right().copy()
    program.node("c_reduce").append(program.node("c_grads"))
    call = next(user for user in program.node("b_full_1").users if isinstance(data(user).op, Call))
    call.prepend(program.node("c_reduce"))
    call.prepend(program.node("c_grads"))
    assert refusal(program)[0].endswith("c_grads waits at once, though compute follows that could hide it")


# -- messages ---------------------------------------------------------------------------------------------------------

PAIR = CHAIN.replace(
    '"a.weight f32[4, 4]",', '"a.weight f32[4, 4]",\n        "a.bias bf16[4]",\n        "a.norm f32[4]",'
)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (((0,), (2,)), "the messages of a are ((0,), (2,)); want every parameter once"),
        (((0,), (1,), (2,), (0,)), "the messages of a are ((0,), (1,), (2,), (0,)); want every parameter once"),
        (((0, 1), (2,)), "a message of a mixes dtypes, owners, or whole and sharded: ['a.weight', 'a.bias']"),
        (((0, 2), (1,)), "a message of a is not one run of its shards' memory: (0, 2)"),
    ],
)
def test_messages_that_miss_repeat_mix_or_jump(messages: tuple[tuple[int, ...], ...], found: str) -> None:
    program = zcompile.parse(joined(PAIR, OUTLINED))
    units = tuple(replace(unit, messages=messages) if unit.name == "a" else unit for unit in program.layout.units)
    with pytest.raises(ProgramError) as caught:
        zcompile.verify(replace(program, layout=program.layout.with_units(units)), [facts.MESSAGES_PACKED], "after it")
    assert caught.value.problem == found


# -- regions ----------------------------------------------------------------------------------------------------------


def test_a_call_of_a_region_that_is_not_there() -> None:
    program = right()
    regions = {name: region for name, region in program.regions.items() if name != "region_2"}
    with pytest.raises(ProgramError, match="ga calls region_2, which is not there"):
        zcompile.verify(replace(program, regions=regions), [facts.REGIONS_OUTLINED], "after it")


LOOSE = """
def forward(box):
    (
        x,  # f32[8, 4]
    ) = unbox(box)
    y = aten.sin.default(x)  # f32[8, 4]
    return [y], []
"""


def test_compute_outside_a_region() -> None:
    program = zcompile.parse(joined(CHAIN, LOOSE))
    found, line = refusal(program)
    assert found.endswith("compute outlined into regions: y is outside a region")
    assert line == "y = aten.sin.default(x)"


# -- train steps ------------------------------------------------------------------------------------------------------


def train_step() -> Program:
    return gather_ahead(insert_updates(right()))


def update_refusal(program: Program) -> str:
    with pytest.raises(ProgramError) as caught:
        zcompile.verify(program, (facts.REDUCED_ONCE, facts.UPDATED_ONCE, facts.GATHERED_AHEAD), "after it")
    return caught.value.problem


def test_a_gradient_that_is_not_used() -> None:
    program = train_step().copy()
    program.graph.erase_node(program.node("b_update"))
    assert update_refusal(program) == "b_grads is returned, or used, 0 times; want once"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("b_update", "b_update updates b, but is given a and b_grads"),
        ("b_ahead", "b_ahead gathers b, but is given a"),
    ],
)
def test_an_update_or_a_gather_ahead_of_another_units_shards(line: str, problem: str) -> None:
    program = train_step().copy()
    program.node(line).update_arg(0, program.node("a"))
    assert update_refusal(program) == problem


def test_an_update_before_a_read() -> None:
    program = train_step().copy()
    gather = program.node("a_gather")
    with program.graph.inserting_after(program.node("a_update")):
        program.add(gather.args, replace(data(gather), phase=Phase.BACKWARD), "a_again")  # type: ignore[arg-type]
    assert update_refusal(program) == "a_again reads a after its update"


def test_a_unit_that_is_gathered_ahead_twice() -> None:
    program = train_step().copy()
    ahead = program.node("b_ahead")
    with program.graph.inserting_after(ahead):
        program.add(ahead.args, data(ahead), "b_ahead_again")
    assert update_refusal(program) == "b is gathered ahead 2 times; want once"


def test_a_gather_ahead_of_its_update() -> None:
    program = train_step().copy()
    program.node("b_update").prepend(program.node("b_ahead"))
    assert update_refusal(program) == "b_ahead gathers b before its update"


def test_a_gather_ahead_that_no_forward_takes() -> None:
    program = train_step().copy()
    ahead = program.node("b_ahead")
    set_data(ahead, replace(data(ahead), op=GatherAhead("b", keep=True)))
    assert update_refusal(program) == "b_ahead gathers b as no forward does"


def test_the_runner_names_the_pass_that_broke_an_earlier_fact() -> None:
    def forgetful(program: Program) -> Program:
        program = program.copy()
        program.graph.erase_node(program.nodes(Release)[0])
        return program

    gathered = (facts.GATHERED_BEFORE_USE, facts.RELEASED_ONCE)
    steps = Pipeline(
        STAGES[3],
        (Pass("insert_gathers", insert_gathers, ensures=gathered), Pass("forgetful", forgetful, requires=gathered)),
    )
    with pytest.raises(ProgramError, match=r"after forgetful: gathers released exactly once: 0 releases of a_full"):
        steps.run(zcompile.parse(joined(CHAIN, OUTLINED)))


# -- digests ----------------------------------------------------------------------------------------------------------


def swapped(program: Program) -> Program:
    program = program.copy()
    program.node("b_gather").append(program.node("a_gather"))
    return program


def test_two_swapped_collectives_change_the_digest_and_the_line_is_named() -> None:
    program, other = right(), swapped(right())
    assert program.digest() != other.digest()
    texts = {0: program.communications(), 1: other.communications(), 2: program.communications()}
    assert first_difference(texts) == (
        "line 1 differs: rank 0, 2: 'forward: all_gather a (a.weight f32[4, 4])'; "
        "rank 1: 'forward: all_gather b (b.weight f32[4, 4])'"
    )


def test_a_missing_collective_is_named_too() -> None:
    program = right()
    texts = {0: program.communications(), 1: program.communications()[:-1]}
    assert "line 7 differs" in first_difference(texts)
    assert "rank 1: '(nothing)'" in first_difference(texts)


def test_equal_communications_differ_nowhere() -> None:
    assert first_difference({0: right().communications(), 1: right().communications()}) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.replace("a.weight f32[4, 4]", "a.weight f32[5, 4]"),
        lambda head: head.replace("a.weight f32[4, 4]", "a.weight bf16[4, 4]"),
        lambda head: at_stage(head, 2),
    ],
    ids=["shape", "dtype", "stage"],
)
def test_the_digest_depends_on_what_is_sent(change: Callable[[str], str]) -> None:
    assert right(change(CHAIN)).digest() != right().digest()


def test_the_digest_does_not_depend_on_activation_shapes() -> None:
    assert right(CHAIN.replace("[8, 4]", "[9, 4]"), OUTLINED.replace("[8, 4]", "[9, 4]")).digest() == right().digest()
