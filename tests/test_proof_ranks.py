"""Ranks' communications that fit together are let pass, others refused with ranks, lines and what each wants."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zcompile
from tests.models import batch, make
from tests.passes.programs import CHAIN, GATHERED, REDUCED, TENSOR_PARALLEL, joined, parsed
from tests.passes.test_partition_activations import SAME
from tests.ranks import on_ranks
from zcompile.cost.forecast import Choice
from zcompile.errors import AgreementError, ProofError
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES as STAGES_OF_ZERO
from zcompile.ir.layout import Hybrid
from zcompile.ir.program import Program
from zcompile.model.units import axes_over, make_layout
from zcompile.passes.partition_activations import partition_activations
from zcompile.proof.rank_events import Act, RankEvent, RankEvents, read_events
from zcompile.proof.ranks import check_folders, check_texts, conflict_along, first_conflict
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.tools.planner import Rewriter
from zcompile.tools.tracing import trace

STAGES = """
axes = {axes}
units = {{
    "a": [
        "a.weight f32[4, 4]",
    ],
}}
packed = {{
}}


def step(box):
    (
        a,   #            1 parameter   unit a
        pp,  #                          group pp
        x,   # f32[8, 4]
    ) = unbox(box)
{lines}
    return [x], []
"""


def text(lines: Sequence[str], stages: int, data: int = 1, axes: str = "") -> str:
    """One rank's step, in a mesh of pipeline stages that data parallelism repeats."""
    usual = f'{{"dp": "shard {data}{f", stride {stages}" * (stages > 1)}", "pp": "pipeline {stages}"}}'
    return STAGES.format(axes=axes or usual, lines="\n".join(f"    {line}" for line in lines))


def one_f_one_b(stage: int, stages: int, batches: int, *, waits: str = "late") -> list[str]:
    """The schedule of one stage: forwards until the last stage has work, then one backward for each forward, the rest.

    `waits`: whether sends are waited for at the end of the step, or each at once.
    """
    lines: list[str] = []
    sent: list[str] = []

    def transfer(kind: str, number: int, there: int, back: int) -> None:
        """One micro-batch comes from stage `there`, is computed, and goes on to `back`."""
        name = f"{kind}{number}"
        if 0 <= there < stages:
            lines.append(f"{name}_recv = recv(pp, 'f32[8, 4]', source={there})  # f32[8, 4]")
            lines.append(f"{name}_in = wait({name}_recv)  # f32[8, 4]")
        lines.append(f"{name} = aten.relu.default(x)  # f32[8, 4]")
        if 0 <= back < stages:
            lines.append(f"{name}_sent = send({name}, pp, to={back})  # f32[8, 4]")
            sent.append(f"wait({name}_sent)")
            lines.extend([sent.pop()] if waits == "at once" else [])

    ahead = min(stages - 1 - stage, batches)
    for number in range(batches + ahead):
        if number < batches:
            transfer("f", number, stage - 1, stage + 1)
        if number >= ahead:
            transfer("b", number - ahead, stage + 1, stage - 1)
    return [*lines, *sent, "a_reduce = reduce_scatter(a, [x])  #", "a_grads = wait(a_reduce)  #"]


def pipeline(stages: int, batches: int = 4, data: int = 1, waits: str = "late") -> dict[int, list[str]]:
    return {rank: one_f_one_b(rank % stages, stages, batches, waits=waits) for rank in range(stages * data)}


def check(lines: Mapping[int, list[str]], stages: int, data: int = 1) -> None:
    check_texts({rank: text(of, stages, data) for rank, of in lines.items()})


# -- two axes of data -------------------------------------------------------------------------------------------------


def divided_twice() -> Program:
    """A step whose backward gathers inside from the secondary shards of the forward."""
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)
    layout = make_layout(model, STAGES_OF_ZERO[3], axes_over(model, 4, 2), hybrid=Hybrid.HPZ)
    return zcompile.pipeline(stage=3, prefetch=0).run(replace(trace(model, (x,)), layout=layout))


def test_secondary_shards_that_outlive_the_forward_are_no_group() -> None:
    program = divided_twice()
    text = program.text(regions=True)
    check_texts(dict.fromkeys(range(4), text))
    events = read_events({"": text}).events
    assert [event.what for event in events if event.act is Act.JOIN] == program.communications()


def test_a_rank_that_gathers_inside_from_primary_shards_is_told() -> None:
    right = divided_twice().text(regions=True)
    wrong = re.sub(r"all_gather\(u1, u1_secondary\)", "all_gather(u1)", right, count=1)
    assert wrong != right
    with pytest.raises(ProofError, match=r"rank 0: 'forward: all_gather 1 .* from secondary shards'"):
        check_texts({**dict.fromkeys(range(4), right), 1: wrong})


# -- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_whose_ranks_run_different_programs_is_let_pass(stages: int, data: int) -> None:
    check(pipeline(stages, data=data), stages, data)


def test_stages_that_wait_for_each_send_at_once_wait_in_a_circle() -> None:
    """As blocking sends do: a forward goes one way when a backward goes the other."""
    with pytest.raises(ProofError) as caught:
        check(pipeline(3, waits="at once"), 3)
    message = str(caught.value)
    assert "ranks wait for each other: " in message
    assert re.search(r"rank 1 waits at line \d+ \(`wait\(f1_sent\)`\) for 'step: f32\[8, 4\]', which rank 2", message)
    assert re.search(
        r"rank 2 waits at line \d+ \(`wait\(b0_sent\)`\) .* rank 1 launches at line \d+ \(`b0_recv", message
    )


def test_a_send_that_nobody_receives_is_named_with_its_line() -> None:
    lines = pipeline(2)
    lines[1] = [line for line in lines[1] if not line.startswith(("f3_recv", "f3_in"))]
    with pytest.raises(ProofError, match=r"message 4 from rank 0 to rank 1 over pp differs: rank 0: sends .*f3_sent"):
        check(lines, 2)
    with pytest.raises(ProofError, match="rank 1: nothing more"):
        check(lines, 2)


def test_a_message_of_another_type_is_named_on_both_sides() -> None:
    lines = pipeline(2)
    lines[1] = [line.replace("f32[8, 4]", "f32[8, 5]") if "f2_recv" in line else line for line in lines[1]]
    with pytest.raises(ProofError) as caught:
        check(lines, 2)
    assert "message 3 from rank 0 to rank 1" in str(caught.value)
    assert "rank 0: sends 'step: f32[8, 4]'" in str(caught.value)
    assert "rank 1: receives 'step: f32[8, 5]'" in str(caught.value)


def test_a_rank_that_averages_over_another_group_is_told() -> None:
    texts = {rank: text(lines, 2, 2) for rank, lines in pipeline(2, data=2).items()}
    check_texts(texts)
    texts[3] = texts[3].replace('"shard 2, stride 2"', '"shard 2"').replace('"pipeline 2"', '"pipeline 2, stride 2"')
    with pytest.raises(ProofError, match=r"over different groups: rank 0, 1, 2: dp: shard 2, stride 2, .*; rank 3: dp"):
        check_texts(texts)


def test_a_reduction_that_one_rank_of_a_group_leaves_out_is_named() -> None:
    lines = pipeline(2, data=2)
    lines[3] = lines[3][:-2]
    with pytest.raises(
        ProofError, match=r"message 1 over dp differs: rank 1: 'step: reduce_scatter a .*rank 3: nothing"
    ):
        check(lines, 2, data=2)


def test_messages_swapped_on_one_rank_are_named() -> None:
    """Two groups of the same two ranks: each in the other's place."""
    first, second = "one = all_gather(a)  #", "two = reduce_scatter(a, [x])  #"
    with pytest.raises(
        ProofError, match=r"message 1 over dp differs: rank 0: '.*all_gather a .*rank 1: '.*reduce_scat"
    ):
        check({0: [first, second], 1: [second, first]}, 1, data=2)


def test_a_wait_between_launches_of_two_groups_in_two_orders_is_a_circle() -> None:
    send, receive, gather = (
        "s = send(x, pp, to=1)  # f32[8, 4]",
        "r = recv(pp, 'f32[8, 4]', source=0)  # f32[8, 4]",
        "g = all_gather(a)  #",
    )
    axes = '{"dp": "shard 2", "pp": "pipeline 2"}'  # over the same ranks, so that both can meet
    fine = {0: [send, gather, "wait(s)", "wait(g)"], 1: [gather, receive, "wait(g)", "wait(r)"]}
    stuck = {0: [send, "wait(s)", gather, "wait(g)"], 1: [gather, "wait(g)", receive, "wait(r)"]}
    check_texts({rank: text(lines, 2, axes=axes) for rank, lines in fine.items()})
    with pytest.raises(ProofError, match=r"ranks wait for each other: rank 0 waits at .* which rank 1 launches"):
        check_texts({rank: text(lines, 2, axes=axes) for rank, lines in stuck.items()})


def test_a_rank_without_a_text_is_named() -> None:
    lines = pipeline(3)
    del lines[1]
    with pytest.raises(ProofError, match=r"rank 0, line \d+: sends .* with rank 1, whose text is missing"):
        check(lines, 3)


@pytest.mark.parametrize("place", [0, 2, 7])
def test_a_place_that_is_none_of_the_others_is_refused(place: int) -> None:
    with pytest.raises(ProofError, match=rf"rank 0, line \d+: sends {place}, and there are 2 places along pp"):
        check({0: [f"s = send(x, pp, to={place})  # f32[8, 4]"], 1: []}, 2)


# -- against all interleavings ----------------------------------------------------------------------------------------

GRID = {"dp": Axis("dp", AxisKind.SHARD, 2, 2), "pp": Axis("pp", AxisKind.PIPELINE, 2)}
LINE = {"pp": Axis("pp", AxisKind.PIPELINE, 3)}
Programs = dict[int, list[RankEvent]]


def event(act: Act, axis: str, what: str, peer: int | None = None, awaits: int | None = None) -> RankEvent:
    return RankEvent(act, axis, what, "line 1", what, peer, awaits)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Mapping[str, Axis], Programs]:
    """Messages of groups and pairs, which each rank launches in an order of its own but for those of one channel.

    Some are waited for at once. Then perhaps mistakes.
    """
    axes = draw(st.sampled_from([GRID, LINE]))
    programs: Programs = {rank: [] for rank in range(4 if axes is GRID else 3)}
    channels: dict[int, dict[object, list[RankEvent]]] = {rank: {} for rank in programs}
    for _ in range(draw(st.integers(1, 5))):
        axis, what = axes[draw(st.sampled_from(sorted(axes)))], draw(st.sampled_from("xy"))
        group = list(axis.ranks(draw(st.sampled_from(sorted(programs)))))
        source, target = draw(st.permutations(group))[:2]
        launches, channel = {rank: event(Act.JOIN, axis.name, what) for rank in group}, [axis.name]
        if draw(st.booleans()):
            channel = [axis.name, str(source), str(target)]
            launches = {
                source: event(Act.SEND, axis.name, what, group.index(target)),
                target: event(Act.RECEIVE, axis.name, what, group.index(source)),
            }
        for rank, launch in launches.items():
            channels[rank].setdefault(tuple(channel), []).append(launch)
    for rank, program in programs.items():
        turns = [channel for channel, launches in channels[rank].items() for _ in launches]
        for channel in draw(st.permutations(turns)):
            program.append(channels[rank][channel].pop(0))
            if draw(st.booleans()):
                program.append(event(Act.WAIT, program[-1].axis, program[-1].what, awaits=len(program) - 1))
    for _ in range(draw(st.integers(0, 2))):
        of = programs[draw(st.sampled_from(sorted(programs)))]
        if len(of) > 1:
            make_mistake(of, draw(st.sampled_from(["swap", "what", "drop"])), draw(st.integers(0, len(of) - 2)))
    return axes, programs


def make_mistake(events: list[RankEvent], kind: str, at: int) -> None:
    """Swap two neighbours, change a message, or leave one out: waits go on to wait for what they did."""
    launches = {id(e): events[e.awaits] for e in events if e.awaits is not None}
    if kind == "swap" and events[at + 1].awaits != at:
        events[at], events[at + 1] = events[at + 1], events[at]
    elif kind == "what" and events[at].act is not Act.WAIT:
        changed = replace(events[at], what="z")
        launches = {key: changed if of is events[at] else of for key, of in launches.items()}
        events[at] = changed
    elif kind == "drop":
        gone = events[at]
        events[:] = [e for e in events if e is not gone and launches.get(id(e)) is not gone]
    places = {id(e): place for place, e in enumerate(events)}
    events[:] = [replace(e, awaits=places[id(launches[id(e)])]) if id(e) in launches else e for e in events]


def outcomes(axes: Mapping[str, Axis], programs: Programs) -> set[str]:
    """How runs of all ranks can end, over every interleaving: well, in two messages that differ, or stuck."""

    def channel(rank: int, of: RankEvent) -> tuple[object, ...]:
        group = tuple(axes[of.axis].ranks(rank))
        if of.act is Act.JOIN:
            return (of.axis, group)
        assert of.peer is not None
        pair = (rank, group[of.peer])
        return (of.axis, *(pair if of.act is Act.SEND else pair[::-1]), "->")

    def members(key: tuple[object, ...]) -> tuple[int, ...]:
        return key[1] if len(key) == 2 else key[1:3]  # type: ignore[return-value]

    def queues(state: tuple[int, ...]) -> dict[tuple[object, ...], dict[int, list[str]]]:
        result: dict[tuple[object, ...], dict[int, list[str]]] = {}
        for rank, position in enumerate(state):
            for of in programs[rank][:position]:
                if of.act is not Act.WAIT:
                    key = channel(rank, of)
                    result.setdefault(key, {member: [] for member in members(key)})[rank].append(of.what)
        return result

    def following(state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        launched = queues(state)
        for rank, position in enumerate(state):
            if position == len(programs[rank]):
                continue
            of = programs[rank][position]
            if of.awaits is not None:
                launch = programs[rank][of.awaits]
                key = channel(rank, launch)
                before = sum(e.act is not Act.WAIT and channel(rank, e) == key for e in programs[rank][: of.awaits])
                if any(len(queue) <= before for queue in launched[key].values()):
                    continue
            yield (*state[:rank], position + 1, *state[rank + 1 :])

    found, seen, left = set(), set(), [(0,) * len(programs)]
    while left:
        state = left.pop()
        if state in seen:
            continue
        seen.add(state)
        launched = queues(state).values()
        if any(len(set(row) - {None}) > 1 for of in launched for row in itertools.zip_longest(*of.values())):
            found.add("differ")
            continue
        onward = list(following(state))
        if not onward:
            complete = all(position == len(programs[rank]) for rank, position in enumerate(state))
            equal = all(len({len(queue) for queue in of.values()}) == 1 for of in launched)
            found.add("well" if complete and equal else "stuck" if equal or not complete else "differ")
        left += onward
    return found


def agrees_with_all_interleavings(case: tuple[Mapping[str, Axis], Programs]) -> None:
    axes, programs = case
    said = first_conflict({rank: RankEvents(axes, tuple(events)) for rank, events in programs.items()})
    ends = outcomes(axes, programs)
    assert bool(said) == (ends != {"well"})
    if "ranks wait for each other" in said:
        assert ends == {"stuck"}


@given(schedules())
@settings(max_examples=300)
def test_what_is_let_pass_ends_well_in_every_interleaving_and_nothing_else_is(
    case: tuple[Mapping[str, Axis], Programs],
) -> None:
    agrees_with_all_interleavings(case)


@pytest.mark.nightly
@given(schedules())
@settings(max_examples=5000)
def test_the_same_of_many(case: tuple[Mapping[str, Axis], Programs]) -> None:
    agrees_with_all_interleavings(case)


# -- real programs ----------------------------------------------------------------------------------------------------


def programs() -> Iterator[Program]:
    """Of two ranks: what mixed precision, packing, keeping and stages make of a model."""
    for kind in ("gpt", "mlp"):
        model = make(kind)
        rewriter = Rewriter(model, trace(model, batch(kind, 0, 0)), None)
        for stage, dtype in itertools.product(range(4), (None, torch.bfloat16)):
            yield rewriter.program(Choice(stage=stage, prefetch=1, checkpoint=None, dtype=dtype), 2)


@pytest.mark.slow
def test_what_is_read_of_a_text_is_what_the_program_communicates() -> None:
    found = list(programs())
    assert len(found) == 16
    for program in found:
        read = read_events({"": program.text(regions=True)})
        assert [event.what for event in read.events if event.act is Act.JOIN] == program.communications()
        started = [event.awaits for event in read.events if event.awaits is not None]
        assert len(set(started)) == len(started) == len(program.communications())
        check_texts({0: program.text(regions=True), 1: program.text(regions=True)})


def test_collectives_in_regions_and_of_activation_shards_are_read_in_order() -> None:
    program = partition_activations(parsed(TENSOR_PARALLEL, SAME), least=1)
    reduced = "    s = ops._c10d_functional.all_reduce.default(t, 'sum', '3')  # f32[8, 4]  +64 B  a\n"
    waited = "    w = ops._c10d_functional.wait_tensor.default(s)  # f32[8, 4]  +64 B  a\n"
    first, mark, rest = program.text(regions=True).partition("    return [")
    mine = first + reduced + waited + mark + rest
    every = read_events({"": mine}).events
    assert all(event.awaits == number - 1 for number, event in enumerate(every) if event.act is Act.WAIT), "one by one"
    read = [event for event in every if event.axis == "tp"]
    assert [event.what for event in read] == [
        *["forward: all_reduce 'sum' '3' f32[8, 4]"] * 6,
        *["backward: fetch f32[8, 4]"] * 2,
    ]
    assert re.fullmatch(r"line \d+, run at line \d+", read[0].where)
    assert conflict_along([mine, mine, mine], "tp") == ""
    assert "message 4 over tp differs: rank 0, 1: 'backward: fetch f32[8, 4]'" in conflict_along(
        [mine, mine, mine.replace("f32[8, 4]             +128 B       a", "f32[8, 5]  +128 B  a")], "tp"
    )
    assert "message 1 over tp differs: rank 0, 1" in conflict_along([mine, mine, mine.replace("'3'", "'4'")], "tp")
    looped = mine.replace("def region_0(", "@chunked(rows=8, size=4, takes=[None, 0], gives=[0])\ndef region_0(")
    assert conflict_along([looped] * 3, "tp") == ""
    other = looped.replace("size=4", "size=2")
    assert "f32[8, 4] for 2 of 8 rows" in conflict_along([looped, looped, other], "tp")


def dumped(folder: Path) -> Path:
    compiled = zcompile.compile(make("mlp"), backend="eager", dump=folder)
    compiled(*batch("mlp", 0, 0)).backward()
    for file in (*folder.glob("program_0/*.py"), *folder.glob("program_0/regions/*.py")):
        file.write_text(file.read_text().replace('{"dp": "shard 1"}', '{"dp": "shard 2"}'))
    return folder


@pytest.mark.slow
def test_dumps_are_compared_and_the_file_is_named(tmp_path: Path) -> None:
    folders = {rank: dumped(tmp_path / str(rank)) for rank in range(2)}
    check_folders(folders)
    check_folders({rank: folder / "program_0" for rank, folder in folders.items()})
    forward = folders[1] / "program_0" / "forward.py"
    lines = forward.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if "all_gather(" in line)
    second = next(number for number in range(first + 1, len(lines)) if "all_gather(" in lines[number])
    lines[first], lines[second] = lines[second], lines[first]
    forward.write_text("\n".join(lines))
    with pytest.raises(ProofError) as caught:
        check_folders(folders)
    assert re.search(rf"rank 1: 'forward: all_gather .*' \(forward.py line {first + 1}: `", str(caught.value))
    assert str(caught.value).startswith("program 0: the ranks' communications: message 1 over dp differs")
    forward.write_bytes(b"\xff")
    with pytest.raises(ProofError, match=r"rank 1: .*forward\.py: cannot be read"):
        check_folders(folders)


@pytest.mark.slow
def test_a_dump_without_all_of_its_files_is_refused(tmp_path: Path) -> None:
    folders = {rank: dumped(tmp_path / str(rank)) for rank in range(2)}
    home = folders[1] / "program_0"
    for file in (home / "forward.py", home / "backward.py", home / "regions" / "region_0.py"):
        kept = file.rename(tmp_path / "kept")
        with pytest.raises(
            ProofError, match=r"rank 1.* (is not a dump|cannot be read: No such file|region_0 is not known)"
        ):
            check_folders(folders)
        kept.rename(file)
    backward = (home / "backward.py").read_text()
    for cut in ("", backward[: backward.index("    return")], backward[: len(backward) // 2]):
        (home / "backward.py").write_text(cut)
        (folders[0] / "program_0" / "backward.py").write_text(cut)
        refusal = r"rank 0.*backward\.py.*: (backward ends without|is not valid Python|has no)"
        with pytest.raises(ProofError, match=refusal):
            check_folders(folders)


@pytest.mark.slow
def test_a_rank_with_fewer_programs_is_named(tmp_path: Path) -> None:
    folders = {rank: dumped(tmp_path / str(rank)) for rank in range(2)}
    (folders[1] / "program_1").mkdir()
    with pytest.raises(ProofError, match="rank 1 has program 1, rank 0 not"):
        check_folders(folders)
    with pytest.raises(ProofError, match="is not a dump"):
        check_folders({0: tmp_path / "nowhere"})


CHAINED = joined(CHAIN, GATHERED)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("c_gather = all_gather(c)", "c_gather = gossip(c)", r"line \d+: gossip is not known: it may communicate"),
        ("c_full = wait(c_gather)", "c_full = wait(d_gather)", "line \\d+: 'd_gather' is not defined here"),
        ("all_gather(b)", "all_gather(x)", r"`b_gather = all_gather\(x\)` gives all_gather arguments it does not take"),
        ("yb = region_0(b_full, ya)", "for y in x: pass", "is not a statement of a program"),
        ("release(a_full)", "release(a_full", "is not valid Python"),
        ('axes = {"dp": "shard 2"}', 'axes = {"dp": "shared 2"}', "'shared 2' is not an axis"),
        ('axes = {"dp": "shard 2"}', "", "says nothing of the axes"),
        ('axes = {"dp": "shard 2"}', "axes = 3", "the head of the text: says no layout"),
        ('axes = {"dp": "shard 2"}', 'axes = {"dp": "shard 2"}\nstage = 7', "the head of the text: says no layout"),
        ('axes = {"dp": "shard 2"}', 'axes = {"dp": two}', "line 1: axes is not a constant"),
        ("def forward(box)", "def sideways(box)", "has none of the functions forward"),
        (
            "b_full = wait(b_gather)",
            "b_full = ops.c10d.allreduce_.default(b)",
            "communicates otherwise than functional",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_line(old: str, new: str, message: str) -> None:
    assert old in CHAINED
    with pytest.raises(ProofError, match=message):
        read_events({"": CHAINED.replace(old, new, 1)})


def test_a_gather_or_reduction_that_one_rank_does_not_cast_is_named() -> None:
    head = CHAIN.replace("a.weight f32[4, 4]", "a.weight f32[4, 4] computed in bf16 reduced in f32")
    for phases, old, new in (
        (GATHERED, "all_gather(a)", "all_gather(a, dtype=torch.bfloat16)"),
        (REDUCED, "reduce_scatter(a, [ga])", "reduce_scatter(a, [ga], dtype=torch.float32)"),
    ):
        plain = joined(head, phases)
        cast = plain.replace(old, new)
        assert zcompile.parse(plain).digest() != zcompile.parse(cast).digest()
        for one in (plain, cast):
            found = [e.what for e in read_events({"": one}).events if e.act is Act.JOIN]
            assert found == zcompile.parse(one).communications()
        with pytest.raises(ProofError, match=r"a.weight (f32|bf16)\[4, 4\]\).*a.weight (f32|bf16)\[4, 4\]\)"):
            check_texts({0: plain, 1: cast})


@pytest.mark.parametrize("name", ["unit", "group", "parameter", "stack", "away"])
def test_a_module_may_be_called_like_what_a_program_is_given(name: str) -> None:
    program = zcompile.parse(re.sub(r" b$", f" {name}", CHAINED, flags=re.MULTILINE).replace(f"unit {name}", "unit b"))
    text = program.text(regions=True)
    assert re.search(rf" {name}$", text, re.MULTILINE)
    assert [e.what for e in read_events({"": text}).events if e.act is Act.JOIN] == program.communications()


def test_gradients_are_counted() -> None:
    given = joined(CHAIN, REDUCED)
    assert "reduce_scatter c (c.weight f32[4, 4])" in {
        e.what.removeprefix("backward: ") for e in read_events({"": given}).events
    }
    none = read_events({"": given.replace("reduce_scatter(c, [gc])", "reduce_scatter(c, [None])")})
    assert "backward: reduce_scatter c ()" in {e.what for e in none.events}
    with pytest.raises(ProofError, match=r"\[gc, gc\]\)` gives reduce_scatter arguments it does not take"):
        read_events({"": given.replace("reduce_scatter(c, [gc])", "reduce_scatter(c, [gc, gc])")})


# -- in a job ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_lines_that_differ_and_fit_together_are_agreed_on(rank: int) -> None:
    """What comes of lines that differ, where they fit together and where not; the group is of use afterwards."""
    agreement = Agreement(
        Communicator(torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), torch.device("cpu"))
    )
    asked, found = [], []

    def conflict(problem: str) -> str:
        asked.append(agreement.share("what each has", str(rank)))
        return problem

    for lines, problem in ((["same"], "never asked"), ([f"{rank}"], ""), ([f"{rank}"], "they clash"), (["end"], "")):
        try:
            agreement.reach("lines", lines, conflict=partial(conflict, problem))
            found.append("reached")
        except AgreementError as error:
            found.append(error.problem)
    assert asked == [["0", "1"]] * 2, "ranks with equal lines exchange nothing more"
    assert found == ["reached", "reached", "they clash", "reached"]
