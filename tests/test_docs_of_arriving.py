"""The pages for who comes from elsewhere, or meets an error: their code runs, and messages are those of the sources."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from zcompile import errors
from zcompile.schedule.options import names_of
from zcompile.tools.migration import migrated

ROOT = Path(__file__).parent.parent
ERRORS = (ROOT / "docs" / "errors.md").read_text()
MIGRATION = (ROOT / "docs" / "migration.md").read_text()
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.ZcompileError) and value is not errors.ZcompileError
}
SECTIONS = {
    text.partition("\n")[0]: re.split(r"^## ", text, flags=re.MULTILINE)[0]
    for text in re.split(r"^### ", ERRORS, flags=re.MULTILINE)[1:]
}


def texts() -> str:
    """Every text in the sources, formatted ones with their gaps as they are in the page."""
    found = []
    for room in ("zcompile", "passes", "runtime"):
        for path in sorted((ROOT / room).glob("**/*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


TEXTS = texts()


def test_every_class_of_errors_has_a_section() -> None:
    assert SECTIONS.keys() == CLASSES.keys()
    assert {name for name in zcompile.__all__ if name.endswith("Error")} == {*CLASSES, "ZcompileError"}


@pytest.mark.parametrize("name", CLASSES)
def test_what_else_a_class_is_is_said(name: str) -> None:
    others = {base.__name__ for base in CLASSES[name].__mro__} & {"ValueError", "ImportError"}
    assert set(re.findall(r"An? `(ValueError|ImportError)`\.", SECTIONS[name])) == others


@pytest.mark.parametrize("name", SECTIONS)
def test_messages_are_those_of_the_sources(name: str) -> None:
    rows = re.findall(r"^\| `(.*?)` \|", SECTIONS[name], re.MULTILINE)
    for message in rows:
        for part in filter(str.strip, message.split("…")):
            assert part.strip(" :,") in TEXTS, part


def test_the_error_that_is_shown_is_raised() -> None:
    (shown,) = re.findall(r"^    OptionError: (.*\n)      (.*)$", ERRORS, re.MULTILINE)
    with pytest.raises(zcompile.OptionError) as caught:
        zcompile.compile(nn.Linear(2, 2), stage=4)
    assert str(caught.value).splitlines() == [shown[0].rstrip(), f"  {shown[1]}"]


# -- arriving ---------------------------------------------------------------------------------------------------------


def codes(heading: str) -> list[str]:
    """The code before and after, of a library."""
    section = MIGRATION.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n# (?:before|after)\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize("heading", ["From DistributedDataParallel", "From FSDP2"])
def test_the_code_that_comes_after_trains(heading: str) -> None:
    """That of Accelerate is `tests/integrations`'."""
    before, after = codes(heading)
    compile(before, "before", "exec")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {
        "torch": torch,
        "zcompile": SimpleNamespace(
            compile=lambda *given, **options: zcompile.compile(*given, **options, backend="eager")
        ),
        "model": model,
        "mesh": None,
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "batches": [torch.randn(3, 4) for _ in range(2)],
        "optimizer": optimizer,
    }
    exec(after, names)
    model, optimizer = names["model"], names["optimizer"]
    assert isinstance(model, zcompile.CompiledModule)
    model(torch.ones(3, 4)).sum().backward()
    first = model.full_state_dict()["0.weight"]
    optimizer.step()
    assert not torch.equal(first, model.full_state_dict()["0.weight"])


def test_the_converted_config_is_as_it_is_printed(tmp_path: Path) -> None:
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.00015, "betas": [0.9, 0.95]}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "tensorboard": {"enabled": True, "output_path": "runs"},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (shown,) = re.findall(r"```console\n\$ zcompile migrate ds_config.json\n(.*?)```", MIGRATION, re.DOTALL)
    assert migrated(tmp_path / "ds_config.json").text == shown


def test_options_and_methods_that_are_named_exist() -> None:
    parameters = names_of(zcompile.compile, zcompile.CompileOptions) | names_of(
        zcompile.train_step, zcompile.CompileOptions
    )
    code = " ".join(re.findall(r"`([^`]*)`", MIGRATION))
    after = re.findall(r"^\| .*? \| (.*) \|$", MIGRATION, re.MULTILINE)
    named = {
        name for cell in after for text in re.findall(r"`([^`]*)`", cell) for name in re.findall(r"\b(\w+)=", text)
    }
    parameters |= zcompile.CompiledModule.no_sync.__kwdefaults__.keys()
    assert named <= {*parameters, "mesh"}
    methods = set(re.findall(r"\b(?:compiled|model)\.(\w+)\(", " ".join(after)))
    assert methods
    assert all(hasattr(zcompile.CompiledModule, name) for name in methods), code


# -- links ------------------------------------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What GitHub and MyST call the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_are_there(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w/.]*\.md)?(?:#([\w-]+))?\)", page.read_text()):
        other = page.parent / target if target else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"
