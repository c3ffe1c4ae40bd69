"""Trainers of others with zcompile in the place of DistributedDataParallel: the same script, the same numbers.

Each script of `scripts/` is run as it is, and with the two or three lines changed that its users change.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

SCRIPTS = Path(__file__).parent / "scripts"
OPTIONS = 'stage=3, backend="eager"'
AS_DICT = '{"stage": 3, "backend": "eager"}'
Result = dict[str, Any]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Script:
    """A script, what it needs, and what of it is exchanged: old text, new text."""

    name: str
    needs: tuple[str, ...]
    exchanged: dict[str, str]
    launch: tuple[str, ...] = ("torch.distributed.run", "--standalone", "--nproc-per-node")
    compared: tuple[str, ...] = field(default=("history", "evaluated"))

    def text(self, *, sharded: bool) -> str:
        text = (SCRIPTS / f"{self.name}.py").read_text()
        for old, new in self.exchanged.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new) if sharded else text
        return text

    def run(self, folder: Path, *, sharded: bool, world: int = 2, **options: Any) -> Result:
        for library in self.needs:
            if importlib.util.find_spec(library) is None:
                pytest.skip(f"needs {library}: make test-integrations")
        folder.mkdir(exist_ok=True)
        script = folder / "script.py"
        script.write_text(self.text(sharded=sharded))
        launch = ["-m", *self.launch, str(world)] if self.launch else []
        command = [sys.executable, *launch, str(script), str(folder), json.dumps(options)]
        quiet = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads((folder / "result.json").read_text())


LAUNCH = ("accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no")
TRAINER = Script(
    "trainer",
    ("transformers", "accelerate"),
    {
        "from transformers import Trainer\n": "from zcompile.integrations.transformers import Trainer\n",
        "eval_dataset=examples[44:])": f"eval_dataset=examples[44:], zcompile={AS_DICT})",
    },
)
ACCELERATED = Script(
    "accelerated",
    ("transformers", "accelerate"),
    {
        "from accelerate import Accelerator\n": "from zcompile.integrations.accelerate import Accelerator\n",
        "mixed_precision=precision)": f"mixed_precision=precision, zcompile={AS_DICT})",
    },
    (*LAUNCH, "--dynamo_backend", "no", "--num_processes"),
)
LIGHTNING = Script(
    "lightning_trainer",
    ("lightning",),
    {
        "from lightning.pytorch.strategies import DDPStrategy\n": "from zcompile.integrations.lightning import"
        " ShardedStrategy\n",
        "DDPStrategy()\n": f"ShardedStrategy({OPTIONS})\n",
    },
)
FABRIC = Script(
    "fabric",
    ("lightning", "transformers"),
    {
        "from lightning.fabric.strategies import DDPStrategy\n": "from zcompile.integrations.lightning import"
        " ShardedFabricStrategy\n",
        "DDPStrategy())": f"ShardedFabricStrategy({OPTIONS}))",
    },
    compared=("history",),
)
SFT = Script(
    "sft",
    ("trl", "transformers", "datasets"),
    {
        "from trl import SFTTrainer\n": "from zcompile.integrations.trl import SFTTrainer\n",
        "    processing_class=tokenizer,\n": f"    processing_class=tokenizer, zcompile={AS_DICT},\n",
    },
)
DPO = Script(
    "dpo",
    ("trl", "transformers", "datasets"),
    {
        "from trl import DPOTrainer\n": "from zcompile.integrations.trl import DPOTrainer\n",
        "    processing_class=tokenizer,\n": f"    processing_class=tokenizer, zcompile={AS_DICT},\n",
    },
)
RAY = Script(
    "rayed",
    ("ray",),
    {
        "import torch\nfrom ray": "import torch\nimport zcompile\nfrom ray",
        "ray.train.torch.prepare_model(model)": 'zcompile.compile(model, optimizer=optimizer, backend="eager")',
    },
    (),
    compared=("history",),
)
SEQ2SEQ = Script(
    "seq2seq",
    ("transformers", "accelerate"),
    {
        "from transformers import Seq2SeqTrainer\n": "from zcompile.integrations.transformers import Seq2SeqTrainer\n",
        "arguments, **data)": f"arguments, **data, zcompile={AS_DICT})",
    },
)
ALL = [TRAINER, ACCELERATED, LIGHTNING, FABRIC, SFT]


def named(scripts: list[Script]) -> Any:
    return pytest.mark.parametrize("script", scripts, ids=lambda script: script.name)


@named([*ALL, DPO, SEQ2SEQ, RAY])
def test_two_lines_change(script: Script) -> None:
    before, after = (script.text(sharded=sharded).splitlines() for sharded in (False, True))
    assert sum(line.startswith("+ ") for line in difflib.ndiff(before, after)) == 2


@named([DPO, SEQ2SEQ, RAY])
def test_training_is_that_of_ddp(script: Script, tmp_path: Path) -> None:
    want, got = (script.run(tmp_path / str(sharded), sharded=sharded) for sharded in (False, True))
    assert same(script, got, want)
    assert got.get("texts") == want.get("texts"), "what is generated"


def same(script: Script, got: Result, want: Result, last: int | None = None) -> bool:
    """The numbers that were compared, up to how norms and evaluations are summed; of the history the `last` ones."""
    for name in script.compared:
        one, other = (found[name][-last:] if last and name == "history" else found[name] for found in (got, want))
        if flat(one) != pytest.approx(flat(other), rel=2e-5, abs=1e-6):
            return False
    return True


def flat(value: Any) -> list[float]:
    return [number for one in value for number in flat(one)] if isinstance(value, list) else [value]


def forget(folder: Path, script: Script) -> Path:
    """The folder of a run, as if it had been killed in the middle."""
    shutil.rmtree(folder / "checkpoint-6", ignore_errors=True)
    (folder / "result.json").unlink()
    return folder


@named(ALL)
def test_training_is_that_of_ddp_and_resumes(script: Script, tmp_path: Path) -> None:
    want = script.run(tmp_path / "plain", sharded=False)
    got = script.run(tmp_path / "sharded", sharded=True)
    assert same(script, got, want)
    assert got.get("texts") == want.get("texts"), "what is generated"
    for one in ("sharded", "plain"):
        shutil.copytree(tmp_path / one, tmp_path / f"{one} elsewhere")
    again = script.run(forget(tmp_path / "sharded", script), sharded=True, resume=True)
    assert same(script, again, want, last=len(want["history"]) // 2)
    got, want = (
        script.run(forget(tmp_path / f"{one} elsewhere", script), sharded=one == "sharded", world=3, resume=True)
        for one in ("sharded", "plain")
    )
    assert same(script, got, want), "on three ranks, where plain training goes on from its own checkpoint"


@named([TRAINER, LIGHTNING, FABRIC])
def test_checkpoints_of_plain_training_are_resumed(script: Script, tmp_path: Path) -> None:
    want = script.run(tmp_path / "plain", sharded=False)
    got = script.run(forget(tmp_path / "plain", script), sharded=True, resume=True)
    assert same(script, got, want, last=len(want["history"]) // 2)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_steps": 4},
        {"bf16": True},
        {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True},
        {"activation_checkpointing": True},
        {"max_grad_norm": 0.0, "optim": "rmsprop", "eval_on_start": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    want = TRAINER.run(tmp_path / "plain", sharded=False, **options)
    got = TRAINER.run(tmp_path / "sharded", sharded=True, **options)
    loose = 2e-2 if "bf16" in options else 2e-5
    assert flat(got["history"]) == pytest.approx(flat(want["history"]), rel=loose)
    assert got["evaluated"] == pytest.approx(want["evaluated"], rel=loose)
    if "bf16" not in options:
        ours, theirs = (load_file(tmp_path / one / "last" / "model.safetensors") for one in ("sharded", "plain"))
        assert {name: value.shape for name, value in ours.items()} == {n: v.shape for n, v in theirs.items()}
        assert all(value.sub(theirs[name]).abs().max() < 1e-5 for name, value in ours.items())


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "bf16"}], ids=["accumulate", "bf16"])
def test_options_of_accelerate(tmp_path: Path, options: dict[str, Any]) -> None:
    want = ACCELERATED.run(tmp_path / "plain", sharded=False, **options)
    got = ACCELERATED.run(tmp_path / "sharded", sharded=True, **options)
    assert flat(got["history"]) == pytest.approx(flat(want["history"]), rel=2e-2 if "precision" in options else 2e-5)
    for kept in ("last", "weights"):
        ours, theirs = (load_file(tmp_path / one / kept / "model.safetensors") for one in ("sharded", "plain"))
        assert sorted(ours) == sorted(theirs)
        if "precision" not in options:
            assert all(value.sub(theirs[name]).abs().max() < 1e-5 for name, value in ours.items())


def test_adapters_of_peft_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    want = TRAINER.run(tmp_path / "plain", sharded=False, lora=True, **best)
    got = TRAINER.run(tmp_path / "sharded", sharded=True, lora=True, **best)
    assert same(TRAINER, got, want)
    ours, theirs = (load_file(tmp_path / one / "last" / "adapter_model.safetensors") for one in ("sharded", "plain"))
    assert sorted(ours) == sorted(theirs)
    assert all(value.sub(theirs[name]).abs().max() < 1e-5 for name, value in ours.items())
    again = TRAINER.run(forget(tmp_path / "sharded", TRAINER), sharded=True, lora=True, resume=True, **best)
    assert same(TRAINER, again, want, last=3)


def test_gradients_of_fabric_accumulate(tmp_path: Path) -> None:
    want = FABRIC.run(tmp_path / "plain", sharded=False, accumulate=2)
    assert same(FABRIC, FABRIC.run(tmp_path / "sharded", sharded=True, accumulate=2), want)


def test_gradients_of_lightning_accumulate(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    want = LIGHTNING.run(tmp_path / "plain", sharded=False, **options)
    got = LIGHTNING.run(tmp_path / "sharded", sharded=True, **options)
    assert flat(got["history"]) == pytest.approx(flat(want["history"]), rel=2e-2)


@pytest.mark.parametrize("name", ["refusals_accelerate", "refusals_lightning", "refusals_transformers"])
def test_what_cannot_be_meant_is_refused_and_what_is_sharded_is_taken_up(tmp_path: Path, name: str) -> None:
    library = name.partition("_")[2]
    script = Script(name, (library,) if library != "transformers" else ("transformers", "accelerate"), {})
    assert script.run(tmp_path, sharded=False) == {"done": True}
