"""Recording and replay: each rank's program again, alone, bit for bit; where NaN comes from; broken recordings."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typer.testing import CliRunner

import zcompile
from tests.cases import quickly
from tests.models import batch, make, update
from tests.ranks import Ranks
from tests.threads import Threads
from zcompile import OptionError, ReplayError
from zcompile.recording.archive import Archive
from zcompile.recording.recording import INDEX, Recording
from zcompile.recording.values import Tensor, digest_of
from zcompile.tools import command_line
from zcompile.tools.replay import Replay, ReplayedLine, Verdict

SOUND = {Verdict.GIVEN, Verdict.EQUAL}


def replayed(folder: Path, rank: int, until: str = "") -> list[ReplayedLine]:
    return list(Replay(Archive(folder, rank)).lines(until))


def verdicts(lines: list[ReplayedLine]) -> Counter[Verdict]:
    return Counter(value.verdict for line in lines for value in line.values)


def assert_equal_bits(folder: Path, rank: int, *runs: str) -> None:
    """Every call of every run is replayed, and all that is computed is equal."""
    archive = Archive(folder, rank)
    assert [run.name for run in archive.runs] == [f"run_{number:03}_{phase}" for number, phase in enumerate(runs)]
    lines = replayed(folder, rank)
    assert len(lines) == sum(len(archive.calls(run)["calls"]) for run in archive.runs)
    found = verdicts(lines)
    assert set(found) == SOUND, found
    assert found[Verdict.EQUAL] > 4


class Dropping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(x))


def model_of(kind: str) -> nn.Module:
    if kind != "dropping":
        return make(kind)
    model = make("gpt")
    for block in model.blocks:
        block.mlp = Dropping(block.mlp)
    return model


def one_step(rank: int, folder: Path, kind: str, options: dict[str, Any]) -> float:
    compiled = zcompile.compile(model_of(kind), record=folder, **{"backend": "eager", **options})
    loss = compiled(*batch("gpt" if kind == "dropping" else kind, rank, 0))
    loss.backward()
    return loss.item()


STEP = ("forward", "backward")


@pytest.mark.slow
@quickly("stage", range(4), [3], slow=[0])
def test_each_rank_of_a_stage_is_replayed_alone(threads: Threads, tmp_path: Path, stage: int) -> None:
    losses = threads.run(2, one_step, tmp_path, "gpt", {"stage": stage})
    for rank, loss in enumerate(losses):
        assert_equal_bits(tmp_path, rank, *STEP)
        (value,) = (value for line in replayed(tmp_path, rank, "loss") for value in line.values if value.name == "loss")
        assert value.tensor.item() == loss


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("dropping", {}),
    "dropout, recomputed, bf16, arenas": (
        "dropping",
        {"checkpoint": "unit", "dtype": torch.bfloat16, "arenas": True},
    ),
    "buffers": ("conv", {"stage": 2}),
    "sizes that nothing divides": ("mlp", {}),
    "mixed precision": ("gpt", {"dtype": torch.bfloat16, "stage": 1}),
    "float16": ("gpt", {"dtype": torch.float16, "reduce_dtype": torch.float16}),
    "recomputed in part": ("dropping", {"checkpoint": 0.85, "stage": 2}),
    "arenas": ("gpt", {"arenas": True, "checkpoint": "unit"}),
    "buckets": ("gpt", {"bucket": 2048}),
    "inductor": ("gpt", {"backend": "inductor"}),
    "inductor, dropout": ("dropping", {"backend": "inductor", "checkpoint": "unit"}),
}


@quickly("way", list(WAYS), ["dropout, recomputed, bf16, arenas"], slow=list(WAYS)[::4])
def test_every_way_to_train_is_replayed(threads: Threads, tmp_path: Path, way: str) -> None:
    kind, options = WAYS[way]
    threads.run(2, one_step, tmp_path, kind, options)
    for rank in range(2):
        assert_equal_bits(tmp_path, rank, *STEP)


@pytest.mark.slow
@quickly("what", ["offload_activations", "offload_parameters"], ["offload_activations"])
def test_what_is_on_a_disk_is_replayed(threads: Threads, tmp_path: Path, what: str) -> None:
    threads.run(2, one_step, tmp_path / "record", "gpt", {what: f"disk:{tmp_path}"})
    for rank in range(2):
        assert_equal_bits(tmp_path / "record", rank, *STEP)


def train_steps(rank: int, folder: Path, stage: int) -> None:
    model = make("gpt")
    step = zcompile.train_step(model, None, torch.optim.AdamW(model.parameters()), stage=stage, backend="eager")
    step(*batch("gpt", rank, 0))
    with step.model.record(folder):
        step(*batch("gpt", rank, 1))
        step(*batch("gpt", rank, 2))
    step(*batch("gpt", rank, 3))


@pytest.mark.slow
@quickly("stage", range(4), [2], slow=())
def test_train_steps_are_replayed_with_what_was_gathered_ahead(threads: Threads, tmp_path: Path, stage: int) -> None:
    threads.run(2, train_steps, tmp_path, stage)
    for rank in range(2):
        assert_equal_bits(tmp_path, rank, *STEP, *STEP)


def micro_batches(rank: int, folder: Path, stage: int) -> None:
    compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager", record=folder)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with torch.no_grad():
        compiled(*batch("gpt", rank, 9))  # no step has begun
    with compiled.no_sync():
        compiled(*batch("gpt", rank, 0)).backward()
    with torch.no_grad():
        compiled(*batch("gpt", rank, 9))
    compiled(*batch("gpt", rank, 1)).backward()
    update(optimizer)
    compiled(*batch("gpt", rank, 2)).backward()  # the step has ended


@pytest.mark.slow
@quickly("stage", range(4), [1], slow=())
def test_a_step_is_its_micro_batches_and_what_is_evaluated_between_them(
    threads: Threads, tmp_path: Path, stage: int
) -> None:
    threads.run(2, micro_batches, tmp_path, stage)
    for rank in range(2):
        assert_equal_bits(tmp_path, rank, *STEP, "forward", *STEP)


def of_sizes(rank: int, folder: Path, backend: str) -> None:
    compiled = zcompile.compile(make("gpt"), backend=backend)
    for size in (2, 3):
        compiled(*(one[:size] for one in batch("gpt", rank, size))).backward()
    with compiled.record(folder):
        for size in (4, 3):
            compiled(*(one[:size] for one in batch("gpt", rank, size))).backward()


@quickly("backend", ["eager", "inductor"], [], slow=["eager"])
def test_sizes_that_vary_are_replayed(threads: Threads, tmp_path: Path, backend: str) -> None:
    threads.run(2, of_sizes, tmp_path, backend)
    for rank in range(2):
        assert_equal_bits(tmp_path, rank, *STEP, *STEP)


def tensor_parallel(rank: int, folder: Path, backend: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
    compiled = zcompile.compile(
        parallelize_module(make("gpt"), mesh["tp"], plan), mesh=mesh["dp"], backend=backend, record=folder
    )
    compiled(*batch("gpt", 0, 0)).backward()


@pytest.mark.slow
@quickly("backend", ["eager", "inductor"], ["eager"])
def test_collectives_within_regions_give_what_they_gave(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    ranks.run(2, tensor_parallel, tmp_path, backend)
    for rank in range(2):
        if backend == "eager":
            assert_equal_bits(tmp_path, rank, *STEP)
        else:  # Inductor compiles no collective without its group
            code, text = command("replay", tmp_path, "--rank", rank)
            assert code in (0, 1)
            assert code == 0 or "ran operation by operation: Inductor needs the groups. This may change" in text
            assert text.count("  given") > 50


# -- what is recorded, and what that changes --------------------------------------------------------------------------


def alone(folder: Path | None, steps: int = 1, **options: Any) -> zcompile.CompiledModule:
    compiled = zcompile.compile(make("gpt"), backend="eager", record=folder, **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        compiled(*batch("gpt", 0, step)).backward()
        optimizer.step()
    return compiled


@pytest.mark.slow
def test_recording_changes_no_bit(tmp_path: Path) -> None:
    recorded, plain = alone(tmp_path, 2, dtype=torch.bfloat16), alone(None, 2, dtype=torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(recorded.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_the_first_step_is_recorded_and_no_more(tmp_path: Path) -> None:
    alone(tmp_path, 3)
    assert_equal_bits(tmp_path, 0, *STEP)


@pytest.mark.slow
def test_nothing_is_wrapped_where_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Path] = []
    monkeypatch.setattr(Recording, "loaded", lambda recording, _: loads.append(recording.home))
    alone(None, 2)
    assert loads == []


@pytest.mark.slow
def test_gradients_in_the_record_are_those_that_are_delivered(tmp_path: Path) -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager", record=tmp_path)
    compiled(*batch("gpt", 0, 0)).backward()
    waits = [line for line in replayed(tmp_path, 0) if line.run.phase == "backward" and line.operation == "wait"]
    received = {value.name: value.tensor for line in waits for value in line.values}
    for name, parameter in compiled.named_parameters():
        assert torch.equal(received[name], parameter.grad.to_local()), name


@pytest.mark.slow
def test_what_is_recorded_can_be_chosen(tmp_path: Path) -> None:
    compiled = alone(None)
    with compiled.record(tmp_path), torch.no_grad():
        compiled(*batch("gpt", 0, 5))
    assert_equal_bits(tmp_path, 0, "forward")
    with compiled.record(tmp_path):
        compiled(*batch("gpt", 0, 6)).backward()
    assert_equal_bits(tmp_path, 0, *STEP)


@pytest.mark.slow
def test_a_backend_records(tmp_path: Path) -> None:
    backend = zcompile.backend(backend="eager", record=tmp_path / "first")
    model = torch.compile(make("mlp"), backend=backend)
    model(*batch("mlp", 0, 0)).backward()
    assert_equal_bits(tmp_path / "first", 0, *STEP)
    with backend.record(tmp_path / "second"):
        model(*batch("mlp", 0, 0)).backward()
    assert_equal_bits(tmp_path / "second", 0, *STEP)


def test_files_that_are_no_recordings_stay(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "thesis.tex").write_text("")
    model = make("mlp")
    before = dict(model.named_parameters())
    with pytest.raises(OptionError, match=r"^record: '.*rank_0' has files that are not of a recording"):
        zcompile.compile(model, backend="eager", record=tmp_path)
    assert all(after is before[name] for name, after in model.named_parameters())
    with pytest.raises(OptionError, match=r"^record: is '/proc/record', which cannot be written"):
        zcompile.compile(model, backend="eager", record="/proc/record")


@pytest.mark.slow
def test_one_recording_is_made_at_a_time(tmp_path: Path) -> None:
    compiled = alone(None)
    with (
        compiled.record(tmp_path / "one"),
        pytest.raises(OptionError, match=r"^record: another recording is active in .*one/rank_0\.\n"),
        compiled.record(tmp_path / "other"),
    ):
        pass


@pytest.mark.slow
def test_training_goes_on_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = alone(None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match=r"the recording in .*rank_0 ends here: .*No space"), compiled.record(tmp_path):
        compiled(*batch("gpt", 0, 1)).backward()
    assert all(param.grad is not None for param in compiled.parameters())


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[0](x) + self.layers[1](index))


@pytest.mark.slow
def test_a_run_that_failed_is_replayed_up_to_there(tmp_path: Path) -> None:
    compiled = zcompile.compile(Failing(), backend="eager", record=tmp_path)
    with pytest.raises(IndexError):
        compiled(torch.ones(3, 4), torch.tensor([0, 1, 9]))
    code, text = command("replay", tmp_path, "--rank", 0)
    assert code == 0
    assert "run_000_forward failed at" in text
    assert "IndexError" in text


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.float64]
)
def test_tensors_come_back_laid_out_as_they_were(dtype: torch.dtype) -> None:
    base = (torch.randn(6, 8, 10) * 10).to(dtype)
    views = [
        base,
        base.permute(2, 0, 1),
        base[1:, ::2, 3:7],
        base[0, 0, :1].expand(5),
        base[:, :1].expand(6, 4, 10),
        base[0, 0, 0],
        base[:0],
        base.view(-1).unfold(0, 16, 5),
        base.view(-1)[3:],
    ]
    for view in views:
        noted, content = Tensor.of(view)
        again = Tensor.read(json.loads(json.dumps(noted.described()))).made(bytes(content), torch.device("cpu"))
        assert torch.equal(again, view)
        assert again.stride() == view.stride()
        assert again.numel() == 0 or again.data_ptr() % 64 == view.data_ptr() % 64


# -- where numbers that are not finite come from ----------------------------------------------------------------------


class Log(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + 1e-3 * torch.log((y * y).sum(-1, keepdim=True) - 60)


def not_finite(rank: int, folder: Path, where: str, backend: str) -> None:
    model = make("gpt")
    with torch.no_grad():
        if where == "parameter":
            model.blocks[1].mlp[0].weight[100, 3] = torch.nan
    if where == "layer":
        model.blocks[1].mlp = Log(model.blocks[1].mlp)
    compiled = zcompile.compile(model, backend=backend, record=folder)
    loss = compiled(*batch("gpt", rank, 0))
    (loss * torch.inf if where == "loss" and rank == 1 else loss).backward()


@pytest.mark.slow
@quickly("backend", ["eager", "inductor"], ["eager"], slow=())
def test_an_operation_that_makes_nan_is_found(threads: Threads, tmp_path: Path, backend: str) -> None:
    threads.run(2, not_finite, tmp_path, "layer", backend)
    code, text = command("replay", tmp_path, "--rank", 0)
    assert code == 0, text
    told = text[text.index("The first NaN") :]
    assert "in blocks_1_out, run_000_forward, line " in told
    assert "aten.log.default(sub)" in told
    assert "blocks.1.mlp" in told
    assert "    sub: [4, 16, 1] norm" in told
    _, text = command("replay", tmp_path)
    assert text.count("first NaN") == 2


@pytest.mark.slow
def test_a_parameter_that_was_nan_is_found_with_the_rank_that_keeps_it(threads: Threads, tmp_path: Path) -> None:
    threads.run(2, not_finite, tmp_path, "parameter", "eager")
    _, text = command("replay", tmp_path, "--rank", 0)
    assert "blocks.1.mlp.0.weight has it in the rows of rank 1: the parameter was not finite before this step." in text
    _, text = command("replay", tmp_path, "--rank", 1)
    assert "It is in this rank's shard of the parameter, which was not finite before this run." in text


@pytest.mark.slow
def test_nan_of_another_rank_is_told_from_ones_own(threads: Threads, tmp_path: Path) -> None:
    threads.run(2, not_finite, tmp_path, "loss", "eager")
    _, text = command("replay", tmp_path, "--rank", 0)
    assert "it is from another rank's gradients" in text
    _, text = command("replay", tmp_path, "--rank", 1)
    assert "The first inf: 1 in loss_grad, run_001_backward" in text
    assert "region_3 made it, from arguments without one" in text


# -- the command, and recordings that are broken ----------------------------------------------------------------------


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.app, [str(word) for word in words])
    if isinstance(result.exception, ReplayError):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record")
    alone(folder, stage=3, prefetch=1)
    torch.compiler.reset()
    return folder


@pytest.fixture
def broken(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "broken"))


@pytest.mark.slow
def test_the_command_stops_behind_a_line_and_saves_its_values(recorded: Path, tmp_path: Path) -> None:
    whole = replayed(recorded, 0)
    line = next(line for line in whole if line.operation == "region_1")
    code, text = command(
        "replay", recorded, "--rank", 0, "--until", f"forward:{line.number}", "--save", tmp_path / "x.pt"
    )
    assert code == 0
    last = [row for row in text.splitlines() if "equal" in row or "given" in row][-2]
    assert last.split()[0] == str(line.number)
    saved = torch.load(tmp_path / "x.pt")
    assert {name: one.shape for name, one in saved.items()} == {one.name: one.tensor.shape for one in line.values}
    name = line.values[0].name
    assert [one.number for one in replayed(recorded, 0, name)] == [
        one.number for one in whole if one.run.phase == "forward" and one.number <= line.number
    ]
    assert replayed(recorded, 0, f"run_001_backward:{whole[-1].number}")[-1].number == whole[-1].number


def edited(home: Path, name: str, edit: Callable[[str], str]) -> None:
    """Edit a text of a recording and its checksum: what somebody does who knows the format."""
    text = edit((home / name).read_text())
    (home / name).write_text(text)
    outer = json.loads((home / INDEX).read_text())
    index = json.loads(outer["index"])
    index["files"][name] = digest_of(text.encode())
    written = json.dumps(index)
    (home / INDEX).write_text(json.dumps({"checksum": digest_of(written.encode()), "index": written}))


@pytest.mark.slow
def test_an_operation_that_was_changed_shows_where_it_computes_something_else(broken: Path) -> None:
    (program,) = (broken / "rank_0").glob("programs/*/program.py")
    edited(
        broken / "rank_0",
        str(program.relative_to(broken / "rank_0")),
        lambda text: text.replace("aten.gelu.default(", "aten.relu.default(", 1),
    )
    code, text = command("replay", broken, "--rank", 0, "--brief")
    assert code == 1
    assert "DIFFERS" in text
    assert "The first difference is in run_000_forward, line " in text


@pytest.mark.slow
def test_a_copy_that_was_not_renewed_shows(broken: Path) -> None:
    home = broken / "rank_0"

    def outdated(text: str) -> str:
        run = json.loads(text)
        (unit,) = (one for one in run["calls"][0]["gives"]["items"] if one.get("unit") == "blocks.1")
        unit["items"][0]["digest"], unit["items"][1]["digest"] = (unit["items"][i]["digest"] for i in (1, 0))
        return json.dumps(run)

    edited(home, "run_000_forward.json", outdated)
    code, text = command("replay", broken, "--rank", 0, "--until", "blocks_1_full")
    assert code == 1
    assert text.count("STALE") == 2
    assert "2 gathered parameters differ from this rank's shards" in text


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def with_about(home: Path, **values: Any) -> None:
    outer = json.loads((home / INDEX).read_text())
    written = json.dumps({**json.loads(outer["index"]), **values})
    (home / INDEX).write_text(json.dumps({"checksum": digest_of(written.encode()), "index": written}))


def first_value(home: Path) -> Path:
    run = json.loads((home / "run_000_forward.json").read_text())
    digest = next(one["items"][0]["digest"] for one in run["calls"][0]["gives"]["items"] if one["kind"] == "unit")
    return home / "values" / f"{digest}.bin"


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "index edited": (
        lambda home: (home / INDEX).write_text((home / INDEX).read_text().replace("eager", "lazy")),
        r"recording.json: was edited: its checksum does not match",
    ),
    "index truncated": (lambda home: truncate(home / INDEX), r"recording.json: is not the index of a recording"),
    "index missing": (lambda home: (home / INDEX).unlink(), r"rank_0/recording.json: does not exist"),
    "run truncated": (
        lambda home: truncate(home / "run_001_backward.json"),
        r"run_001_backward.json: was truncated or edited: the checksum of its \d+ bytes does not match",
    ),
    "run missing": (lambda home: (home / "run_000_forward.json").unlink(), r"run_000_forward.json: cannot be read"),
    "program edited": (
        lambda home: truncate(next(home.glob("programs/*/program.py"))),
        r"program.py: was truncated or edited",
    ),
    "phase missing": (lambda home: next(home.glob("programs/*/backward.py")).unlink(), r"backward.py: cannot be read"),
    "value truncated": (lambda home: truncate(first_value(home)), r"values/\w+.bin: was truncated or edited"),
    "value missing": (lambda home: first_value(home).unlink(), r"values/\w+.bin: cannot be read: No such file"),
    "torch": (lambda home: with_about(home, torch="2.0.0"), r"was recorded with torch 2.0.0, and this is "),
    "format": (lambda home: with_about(home, format=2), r"was recorded with format 2, and this is 1"),
    "no run": (lambda home: with_about(home, runs=[]), r"recording.json: has no runs"),
    "no number": (
        lambda home: edited(home, "run_000_forward.json", lambda text: text.replace('"shape": [', '"shape": ["', 1)),
        r"run_000_forward.json: is not the record of a run",
    ),
    "another call": (
        lambda home: edited(home, "run_000_forward.json", lambda text: text.replace('"region_1"', '"region_0"', 1)),
        r"forward.py, line \d+: calls region_1, but region_0 was recorded",
    ),
    "calls missing": (
        lambda home: edited(home, "run_000_forward.json", without_last),
        r"forward.py, line \d+: is not recorded, although the run finished",
    ),
    "unknown operation": (
        lambda home: edited(
            home,
            str(next(home.glob("programs/*/program.py")).relative_to(home)),
            lambda text: text.replace("aten.gelu.default", "os.system", 1),
        ),
        r"program.py, line \d+: 'os.system' is not defined here",
    ),
    "unknown name": (
        lambda home: edited(
            home,
            str(next(home.glob("programs/*/forward.py")).relative_to(home)),
            lambda text: text.replace("region_1(blocks_0_full", "region_1(__import__('os')", 1),
        ),
        r"forward.py, line \d+: .*is not a valid argument",
    ),
}


def without_last(text: str) -> str:
    run = json.loads(text)
    return json.dumps({**run, "calls": run["calls"][:-1]})


@pytest.mark.parametrize("how", list(BREAKS))
def test_a_broken_recording_is_an_error_that_names_the_file(broken: Path, how: str) -> None:
    breaks, message = BREAKS[how]
    breaks(broken / "rank_0")
    with pytest.raises(ReplayError, match=message):
        command("replay", broken, "--rank", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", 317], r"rank_317/recording.json: does not exist.\n  Fix: there are recordings of ranks 0"),
        (["--rank", 0, "--until", "forward:900"], r"forward.py, line 900: there is no line to stop after"),
        (["--rank", 0, "--until", "sideways:3"], r"sideways:3: there is no run 'sideways'"),
        (["--rank", 0, "--until", "no_such_value"], r"no_such_value: no recorded line makes a value of this name"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(recorded: Path, words: list[object], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        command("replay", recorded, *words)


def test_a_folder_without_recordings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"has no recording of any rank"):
        command("replay", tmp_path)
