"""The releases of torch that are supported: refused outside, and named alike wherever they are named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from zcompile.errors import VersionError
from zcompile.torch_range import FIRST, LAST, REQUIREMENT, TESTED, check_torch, is_tested

ROOT = Path(__file__).parent.parent
OTHER = """
import torch, torch._functorch.partitioners
torch.__version__ = "2.16.0"
del torch._functorch.partitioners.default_partition
import zcompile
"""
FAMILIES = [f"{FIRST[0]}.{minor}" for minor in range(FIRST[1], LAST[1] + 1)]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.15.0a0+git0123456", "2.15.9"])
def test_a_torch_of_the_range_is_taken(version: str) -> None:
    check_torch(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0+cu128", "2.2.0", "2.16.0", "3.0.0", "unknown"])
def test_another_torch_is_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(VersionError) as caught:
        check_torch(version)
    assert str(caught.value) == (
        f"torch {version}: is not supported: zcompile runs on torch 2.11 to 2.15.\n"
        "  Fix: pip install 'torch>=2.11,<2.16'."
    )


@pytest.mark.slow
def test_the_import_refuses_a_torch_before_it_asks_for_names_that_this_one_lacks() -> None:
    found = subprocess.run([sys.executable, "-c", OTHER], cwd=ROOT, capture_output=True, text=True)
    assert "VersionError: torch 2.16.0: is not supported" in found.stderr
    assert "cannot import name" not in found.stderr


def test_every_release_family_is_tested() -> None:
    assert [release.rpartition(".")[0] for release in TESTED] == FAMILIES
    assert is_tested("2.13.0+cpu")
    assert not is_tested("2.13.1")


def test_the_range_is_the_same_everywhere() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert REQUIREMENT in dependencies
    assert f"RELEASES := {' '.join(FAMILIES)}\n" in (ROOT / "Makefile").read_text()
    table = (ROOT / "docs" / "torch_releases.md").read_text()
    assert tuple(re.findall(r"^\| (\d\S+) \|", table, re.MULTILINE)) == TESTED
    (main,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert main in TESTED


def test_make_refuses_a_torch_outside_of_the_range_before_it_sets_up_anything() -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    found = subprocess.run(["make", "test", "TORCH=2.16.0"], cwd=ROOT, env=outside, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert "zcompile runs on torch 2.11 to 2.15, and TORCH=2.16.0 is none of these" in found.stderr
    assert not (ROOT / ".venv-torch-2.16.0").exists()
