from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from zcompile import OptionError
from zcompile.ir.actions import Action, ActionKind, ActionTable
from zcompile.pipelining.action_tables import SCHEDULES, action_table
from zcompile.torch_internals.distributed import pipeline_order

TORCH = {"gpipe": ("GPipe", 1), "1f1b": ("1F1B", 1), "interleaved1f1b": ("Interleaved1F1B", 2)}
TORCH |= {"interleavedzerobubble": ("InterleavedZeroBubble", 1), "zbvzerobubble": ("ZBVZeroBubble", 2)}
TORCH |= {"dualpipev": ("DualPipeV", 2)}
SIZES = [(ranks, microbatches) for ranks in range(2, 9) for microbatches in range(4, 17)]


def rows(table: ActionTable) -> list[list[str]]:
    return [[str(action) for action in row] for row in table.rows]


def joined(row: list[str]) -> list[str]:
    """What torch lists, with one backward where both halves of it follow each other."""
    text = re.sub(r"(\d+)I(\d+) \1W\2\b", r"\1B\2", " ".join(cell for cell in row if "REDUCE" not in cell))
    return text.split()


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_are_torchs(name: str) -> None:
    for ranks, microbatches in SIZES:
        check_against_torch(name, ranks, microbatches)


def check_against_torch(name: str, ranks: int, microbatches: int) -> None:
    torch_name, stages = TORCH[name]
    if name == "1f1b" and microbatches < ranks:  # torch refuses this, though nothing is wrong with it
        table = action_table(name, ranks, microbatches)
        assert runs([list(row) for row in table.rows], ranks, microbatches)
        return
    try:
        if name in ("gpipe", "1f1b"):  # torch runs these by loops, and lists their actions for those who ask
            stage = SimpleNamespace(num_stages=ranks, group_size=ranks, group_rank=0)
            listed = get_schedule_class(torch_name)(stage, microbatches)._get_pipeline_order()
            wanted = [joined([str(cell) for cell in row if cell is not None]) for row in listed.values()]
        else:
            wanted = [joined(row) for row in pipeline_order(torch_name, ranks, stages, microbatches)]
    except ValueError:
        with pytest.raises(OptionError, match="microbatches: is"):
            action_table(name, ranks, microbatches)
        return
    found = rows(action_table(name, ranks, microbatches))
    last = -1 if name == "1f1b" else None  # what torch lists for the last rank of 1F1B begins at micro-batch 1
    assert found[:last] == wanted[:last]
    if name == "1f1b":
        assert found[-1] == [f"{ranks - 1}{kind}{number}" for number in range(microbatches) for kind in "FB"]


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "microbatches", "digest"),
    [
        ("interleavedzerobubble", 2, 2, 8, "3095842852a333b1"),
        ("dualpipev", 4, 2, 10, "f11d2f88de975734"),
    ],
)
def test_tables_are_those_of_torchs_golden_files(
    name: str, ranks: int, stages: int, microbatches: int, digest: str
) -> None:
    """By the digests of `test/distributed/pipelining/artifacts` in pytorch, with one spelling of backwards."""
    text = "\n".join(" ".join(row) for row in rows(action_table(name, ranks, microbatches, stages)))
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)


def test_a_table_is_read_as_it_is_printed(tmp_path: Path) -> None:
    table = action_table("zbvzerobubble", 4, 8)
    assert ActionTable.parse(str(table)) == table
    (tmp_path / "mine.csv").write_text("0F0, , 0B0\n,1F0,1B0\n")
    mine = action_table(tmp_path / "mine.csv", 2, 1)
    assert str(mine) == "0F0, 0B0\n1F0, 1B0"
    assert (mine.stages, mine.microbatches, mine.stages_of(1), mine.rank_of(1)) == (2, 1, [1], 1)


# -- wrong tables -----------------------------------------------------------------------------------------------------


def swapped(cells: list[list[Action]], source: random.Random) -> None:
    row = source.choice(cells)
    one, other = source.sample(range(len(row)), 2)
    row[one], row[other] = row[other], row[one]


def dropped(cells: list[list[Action]], source: random.Random) -> None:
    row = source.choice(cells)
    row.pop(source.randrange(len(row)))


def doubled(cells: list[list[Action]], source: random.Random) -> None:
    row = source.choice(cells)
    row.insert(source.randrange(len(row) + 1), source.choice(row))


def moved(cells: list[list[Action]], source: random.Random) -> None:
    one, other = source.sample(cells, 2)
    other.insert(source.randrange(len(other) + 1), one.pop(source.randrange(len(one))))


def runs(cells: list[list[Action]], stages: int, microbatches: int) -> bool:
    """Whether a table trains each micro-batch once, in order, run by brute force: one step of time after the other."""
    flat = [action for row in cells for action in row]
    for stage in range(stages):
        for kinds in ("F", "BI", "BW"):
            found = [
                (row, a.microbatch)
                for row, some in enumerate(cells)
                for a in some
                if a.stage == stage and a.kind in kinds
            ]
            if [number for _, number in found] != list(range(microbatches)) or len({row for row, _ in found}) > 1:
                return False
        if len({row for row, some in enumerate(cells) if any(a.stage == stage for a in some)}) > 1:
            return False
    done: set[str] = set()
    left = [list(row) for row in cells]
    while any(left):
        ready = [row for row in left if row and may_run(row[0], stages, done)]
        if not ready:
            return False
        for row in ready:
            done.add(str(row.pop(0)))
    return len(done) == len(flat)


def may_run(action: Action, stages: int, done: set[str]) -> bool:
    stage, kind, number = action.stage, action.kind, action.microbatch

    def over(*texts: str) -> bool:
        return any(text in done for text in texts)

    if kind is ActionKind.FORWARD:
        return stage == 0 or over(f"{stage - 1}F{number}")
    if kind is ActionKind.BACKWARD_WEIGHT:
        return over(f"{stage}I{number}")
    after = stage == stages - 1 or over(f"{stage + 1}B{number}", f"{stage + 1}I{number}")
    return after and over(f"{stage}F{number}")


@pytest.mark.parametrize("change", [swapped, dropped, doubled, moved])
def test_wrong_tables_are_refused_with_rank_and_place(
    change: Callable[[list[list[Action]], random.Random], None],
) -> None:
    refused = 0
    for seed in range(80):
        source = random.Random(seed)
        name = source.choice(list(SCHEDULES))
        ranks, microbatches = source.choice([(2, 4), (3, 6), (4, 8)])
        right = action_table(name, ranks, microbatches)
        cells = [list(row) for row in right.rows]
        change(cells, source)
        text = "\n".join(", ".join(map(str, row)) for row in cells)
        if runs(cells, right.stages, right.microbatches):
            ActionTable.parse(text)  # two actions that do not depend on each other have changed places
            continue
        refused += 1
        with pytest.raises(OptionError, match=r"schedule: .*\brank \d") as error:
            action_table(ActionTable.parse(text), ranks, microbatches)
        assert re.search(r"place \d|lacks|no actions|has stage", str(error.value))
    assert refused >= (30 if change is swapped else 80)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: action_table("2f2b", 2, 4), "'2f2b' is unknown(?s:.*)did you mean '1f1b'"),
        (lambda: action_table("1f1b", 2, 0), "microbatches: is 0"),
        (lambda: action_table("1f1b", 2, 4, 2), "stages_per_rank: is 2, and 1f1b has 1"),
        (lambda: action_table("zbvzerobubble", 2, 4, 3), "stages_per_rank: is 3, and zbvzerobubble has 2"),
        (lambda: action_table("dualpipev", 4, 4), "microbatches: is 4: .*at least as many"),
        (lambda: action_table("interleaved1f1b", 4, 9), "microbatches: is 9: .*multiple of the number of rounds"),
        (lambda: action_table(ActionTable.parse("0F0,0B0"), 2, 1), "mesh: requires 2 ranks .*has 1"),
        (lambda: action_table(ActionTable.parse("0F0,0B0"), 1, 2), "microbatches: requires 2 .*has 1"),
        (lambda: action_table(Path("/nowhere/mine.csv"), 1, 2), "/nowhere/mine.csv cannot be read: No such file"),
        (lambda: ActionTable.parse("0F0, 0X0"), "rank 0 has '0X0', which is not an action"),
        (lambda: ActionTable.parse(""), "has no actions"),
    ],
)
def test_what_is_no_schedule_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_backwards_that_follow_their_forward_at_once() -> None:
    table = action_table("1f1b", 3, 4)
    assert table.at_once == {2}
    assert action_table("gpipe", 3, 4).at_once == frozenset()
    assert ActionTable.parse("0F0, 0I0, 0F1, 0I1, 0W0, 0W1").at_once == {0}
    assert 0 not in ActionTable.parse("0F0, 1F0, 1B0, 0B0").at_once
