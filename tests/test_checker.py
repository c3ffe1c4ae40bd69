"""The checker of dumps: what is right is proven, what computes something else is refused, with its line."""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import shutil
import sys
import tokenize
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcompile
from tests import models, zoo
from tests.cases import quickly
from zcompile import OptionError, ProofError
from zcompile.cost.hardware import load_profile
from zcompile.ir.axis import axes_of
from zcompile.ir.layout import STAGES
from zcompile.ir.operation import Phase
from zcompile.ir.printer import region_text
from zcompile.ir.program import Program
from zcompile.model.units import make_layout
from zcompile.proof.checker import prove
from zcompile.proof.checker_evaluation import RANDOM, VIEWS
from zcompile.proof.checker_texts import BACKWARD, CAPTURE, FORWARD
from zcompile.proof.dumps import MANIFEST, prove_dump, write_manifest
from zcompile.proof.terms import Rule
from zcompile.report.dumps import write_dump
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal
from zcompile.tools import tracing

Texts = dict[str, str]
ROOT = Path(__file__).parent.parent
MIXED = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Dropped(nn.Module):
    """Blocks that drop out, so that computing them again has to draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(F.dropout(x, 0.1)), 0.3)
        return (x * torch.rand_like(x)).sum()


class Loss(nn.Module):
    """A model of the zoo with its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model, self.kind = zoo.make(kind), kind

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        return zoo.loss(self.kind, self.model, given)


@functools.cache
def traced(
    kind: str, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> tuple[nn.Module, Program]:
    given: tuple[Any, ...] = ()
    named: Mapping[str, Any] = {}
    if kind == "dropped":
        model, given = Dropped(), (torch.ones(4, 8),)
    elif kind in models.MODELS:
        model, given = models.make(kind), models.batch(kind, 0, 0)
    else:
        model, named = Loss(kind), zoo.batch(kind, 0, 0)
    return model, tracing.trace(model, given, named, dtype=dtype, reduce_dtype=reduce_dtype)


def texts_of(before: Program, after: Program) -> Texts:
    """What a dump has of a program."""
    texts = {CAPTURE: before.text(regions=True)}
    for phase in Phase if after.has_backward else (Phase.FORWARD,):
        texts[f"{phase}.py"] = str(after.phase(phase))
    return texts | {f"regions/{name}.py": region_text(region) for name, region in after.regions.items()}


def journal_of(
    kind: str, *, world: int = 2, replicas: int = 1, stage: int = 3, updates: bool = False, **given: Any
) -> Journal:
    options, journal = Options(stage=stage, **given), Journal()
    model, program = traced(kind, options.dtype, options.reduce_dtype)
    axes = axes_of(world, replicas=replicas)
    layout = make_layout(model, STAGES[stage], axes, precision=options.precision, hybrid=options.hybrid)
    options.pipeline(updates=updates).run(replace(program, layout=layout), journal)
    return journal


def rewritten(kind: str, **given: Any) -> Texts:
    journal = journal_of(kind, **given)
    return texts_of(journal.entries[0].before, journal.entries[-1].after)


CHOICES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1, prefetch 0": {"stage": 1, "prefetch": 0},
    "stage 2, prefetch 1": {"stage": 2, "prefetch": 1},
    "stage 3, prefetch 3, 3 ranks": {"prefetch": 3, "world": 3},
    "alone": {"world": 1},
    "eager": {"backend": "eager"},
    "mixed": MIXED,
    "mixed, stage 0": {**MIXED, "stage": 0},
    "updates and arenas": {"updates": True, "arenas": True},
    "updates, stage 0": {"updates": True, "stage": 0},
    "updates, kept copies": {"updates": True, "stage": 2},
    "units again": {"checkpoint": "unit"},
    "a budget, offloaded": {"checkpoint": 0.8, "offload_activations": "cpu"},
    "stored": {"checkpoint": "unit", "arenas": True},
    "small buckets": {"bucket": "1 KB"},
    "CUDA graphs": {"cuda_graphs": True},
    "CUDA graphs, stage 0": {"cuda_graphs": True, "stage": 0, "updates": True},
}


@quickly("choice", list(CHOICES), list(CHOICES)[::6])
@pytest.mark.parametrize("kind", ["gpt"])
def test_a_program_is_proven(kind: str, choice: str) -> None:
    proof = prove(rewritten(kind, **CHOICES[choice]))
    assert proof.parameters == 41
    assert proof.terms > 400


BROKEN = ("gpt2", "mixtral_loop")
"""Models whose code breaks the graph: they have several programs."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
def test_every_part_of_a_model_is_proven(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        compiled = zcompile.compile(zoo.make(kind), backend="eager")
        zoo.loss(kind, compiled, zoo.batch(kind, 0, 0)).backward()
    compiled.dump(tmp_path)
    verdicts = list(prove_dump(tmp_path))
    assert [verdict.error for verdict in verdicts] == [None] * len(verdicts)
    assert len(verdicts) > 1


@quickly(
    "kind",
    ["mlp", "conv", "dropped", *(kind for kind in zoo.MODELS if kind not in BROKEN)],
    [],
    slow=["mlp", "dropped"],
)
def test_every_model_is_proven_under_every_choice(kind: str) -> None:
    proven = 0
    for choice in CHOICES.values():
        try:
            texts = rewritten(kind, **choice)
        except OptionError:
            continue  # one unit, say, of which nothing can be computed again
        proven += bool(prove(texts))
    assert proven > 10


@pytest.mark.parametrize("kind", ["mlp", "conv", "dropped"])
def test_odd_sizes_buffers_that_are_written_and_random_numbers(kind: str) -> None:
    assert prove(rewritten(kind)).terms > 30
    if kind == "dropped":
        again = rewritten(kind, checkpoint="unit", updates=True)
        assert "run_with_rng_state" in "".join(again.values())
        prove(again)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of sizes that vary, in training and without gradients."""
    folder = tmp_path_factory.mktemp("dumped")
    called = torch.compile(models.make("mlp"), backend=zcompile.backend(backend="eager", dump=folder))
    for size in (2, 3):
        called(*models.batch("mlp", 0, 0, size)).backward()
    with torch.no_grad():
        called(*models.batch("mlp", 0, 0, 5))
    return folder


@pytest.mark.slow
def test_inference_and_varying_sizes_are_proven_as_dumped(dumped: Path) -> None:
    verdicts = list(prove_dump(dumped))
    assert [verdict.error for verdict in verdicts] == [None] * 3
    assert any(re.search(r"[\[ ]s\d+=", path.read_text()) for path in dumped.glob(f"*/{CAPTURE}"))
    assert not (dumped / "program_2" / BACKWARD).exists()


# -- dumps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dump(dumped: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(dumped, tmp_path / "dump"))


def errors(folder: Path) -> list[str]:
    return [str(verdict.error) for verdict in prove_dump(folder) if verdict.error]


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.slow
def test_an_edited_line_is_named_whatever_it_means(dump: Path) -> None:
    edit(dump / "program_0" / FORWARD, "    release(", "    release (")
    (said,) = errors(dump)
    assert re.search(r"^program_0/forward.py line \d+: was changed since the dump was written", said)
    edit(dump / "program_0" / "regions" / "region_0.py", "aten.tanh", "aten.sin")
    (said,) = errors(dump)
    assert re.search(r"Changed since the dump was written: .*region_0.py line \d+", said)
    assert "sin(" in said
    assert "tanh(" in said


@pytest.mark.parametrize("file", [CAPTURE, FORWARD, BACKWARD, "regions/region_0.py"])
def test_a_file_that_is_missing_truncated_or_no_text_is_named(dump: Path, file: str) -> None:
    path = dump / "program_0" / file
    whole = path.read_bytes()
    for left in (b"", whole[: len(whole) // 2], b"\xff" + whole, b"\0" + whole):
        path.write_bytes(left)
        (said,) = errors(dump)
        assert said.startswith(f"program_0/{file}") or f"Changed since the dump was written: {file}" in said, said
    path.unlink()
    (said,) = errors(dump)
    assert said.startswith(f"program_0/{file}: is missing")


def test_other_versions_and_what_is_no_manifest_are_refused(dump: Path) -> None:
    whole = json.loads((dump / MANIFEST).read_text())
    damaged: list[tuple[str, str]] = [
        (json.dumps({**whole, "format": 1}), "is of format 1"),
        (json.dumps({**whole, "zcompile": "0.0.9"}), "zcompile '0.0.9'"),
        (json.dumps({**whole, "programs": {}}), "names no program"),
        (json.dumps({**whole, "programs": []}), "cannot be read"),
        (json.dumps({**whole, "programs": {"../elsewhere": whole["programs"]["program_0"]}}), "in the dump"),
        (json.dumps({**whole, "programs": {"program_0": {"files": {FORWARD: 5}, "rules": []}}}), "not numbers"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ]
    for text, problem in damaged:
        (dump / MANIFEST).write_text(text)
        with pytest.raises(ProofError, match=problem):
            list(prove_dump(dump))
    (dump / MANIFEST).unlink()
    with pytest.raises(ProofError, match="is not there"):
        list(prove_dump(dump))


def test_a_device_is_no_text_and_ends_of_lines_count(dump: Path) -> None:
    path = dump / "program_0" / FORWARD
    text = path.read_bytes()
    path.write_bytes(text.replace(b"\n", b"\r\n"))
    (said,) = errors(dump)
    assert f"{FORWARD} line 1" in said
    path.unlink()
    path.symlink_to("/dev/zero")
    (said,) = errors(dump)
    assert said.startswith(f"program_0/{FORWARD}: is missing or cannot be read: it is not a file")


def test_files_of_an_earlier_dump_are_no_part_of_a_later_one(dump: Path) -> None:
    stale = dump / "program_0" / "regions" / "region_99.py"
    stale.write_text("nonsense(")
    compiled = zcompile.compile(models.make("mlp"), backend="eager")
    with torch.no_grad():
        compiled(*models.batch("mlp", 0, 0))
    compiled.dump(dump)
    assert [verdict.program for verdict in prove_dump(dump)] == ["program_0"]
    assert errors(dump) == []
    assert not stale.exists()
    assert not (dump / "program_0" / BACKWARD).exists()


def test_a_rule_says_what_counts_as_equal(dump: Path) -> None:
    texts = rewritten("mlp", stage=0)
    mutant = {**texts, "regions/region_0.py": texts["regions/region_0.py"].replace("aten.tanh.", "aten.sin.")}
    rule = {"name": "sine for tangent", "pattern": "aten.tanh.default(x)", "replacement": "aten.sin.default(x)"}
    with pytest.raises(ProofError):
        prove(mutant)
    assert prove(mutant, [rule]).modulo == ["sine for tangent: aten.tanh.default(x) counts as aten.sin.default(x)"]
    assert prove(texts, [{**rule, "pattern": "aten.asinh.default(x)"}]).modulo == []
    for wrong in ({**rule, "pattern": "x"}, {**rule, "pattern": "f("}, {**rule, "replacement": "y"}, {"name": "n"}):
        with pytest.raises(ProofError):
            prove(texts, [wrong])
    longer = {**rule, "replacement": "aten.tanh.default(aten.sin.default(x))"}
    with pytest.raises(ProofError, match="no longer than what replaces it"):
        prove(texts, [longer])


def test_a_dump_has_the_rules_of_its_passes(tmp_path: Path) -> None:
    rule = Rule("sine for tangent", "aten.tanh.default(x)", "aten.sin.default(x)")
    journal = journal_of("mlp", stage=0)
    journal.entries = [replace(entry, step=replace(entry.step, rules=(rule,))) for entry in journal.entries[-1:]]
    journal.entries[0] = replace(journal.entries[0], before=journal_of("mlp", stage=0).entries[0].before)
    write_dump(tmp_path, [journal], "", load_profile("h100"))
    region = tmp_path / "program_0" / "regions" / "region_0.py"
    edit(region, "aten.tanh.default", "aten.sin.default")
    files = [str(path.relative_to(tmp_path / "program_0")) for path in (region, *(tmp_path / "program_0").glob("*.py"))]
    kept = [file for file in files if file in (CAPTURE, FORWARD, BACKWARD) or file.startswith("regions/")]
    others = [f"regions/{path.name}" for path in region.parent.glob("*.py") if path != region]
    rules = json.loads((tmp_path / MANIFEST).read_text())["programs"]["program_0"]["rules"]
    write_manifest(tmp_path, {"program_0": [*kept, *others]}, torch.__version__, {"program_0": rules})
    (verdict,) = prove_dump(tmp_path)
    assert verdict.proof is not None
    assert str(verdict).startswith("program_0: proven modulo sine for tangent: ")


# -- what the checker knows -------------------------------------------------------------------------------------------


def test_it_knows_every_view_and_every_draw_of_aten() -> None:
    views, draws = set(), set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            operation = getattr(packet, overload)
            shown = [result.alias_info for result in operation._schema.returns]
            views |= {name} if any(info is not None and not info.is_write for info in shown) else set()
            draws |= {name} if torch.Tag.nondeterministic_seeded in operation.tags else set()
    rare = ("_test", "_nested", "_autocast", "_fw_primal", "_make_dual", "_sparse", "_unpack_dual", "slice_inverse")
    assert {name for name in views if not name.startswith(rare)} <= VIEWS
    other = ("_cudnn", "_nested", "miopen", "_lstm", "_fill", "_fused_sdp", "_flash_attention_forward_no")
    unknown = {name for name in draws if name.removesuffix("_") not in RANDOM and "attention" not in name}
    assert {name for name in unknown if not name.startswith(other)} == set()


def test_it_shares_no_code_and_is_small() -> None:
    files = sorted((ROOT / "zcompile" / "proof").glob("checker*.py"))
    trees = [ast.parse(path.read_text()) for path in files]
    imported = {name for tree in trees for node in ast.walk(tree) for name in names_imported(node)}
    ours = {f"zcompile.proof.{path.stem}" for path in files} | {"zcompile.errors"}
    assert {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names} <= ours
    assert len((ROOT / "zcompile" / "proof" / "checker.py").read_text().splitlines()) <= 500
    lines = {path.stem: len(code_lines(path)) for path in files}
    assert lines.pop("checker_rows") <= 380
    assert lines.pop("checker_divided") <= 190
    assert sum(lines.values()) <= 1195


def names_imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [str(node.module)] if isinstance(node, ast.ImportFrom) else []


def code_lines(path: Path) -> set[int]:
    """Lines with code: no blank ones, no comments, no docstrings."""
    text = path.read_text()
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type in kinds]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    said = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [node for node in said if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    return lines - {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
