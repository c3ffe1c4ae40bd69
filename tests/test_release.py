"""What users install: a source distribution, and the wheel made of it in an environment without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = {"zcompile": "zcompile", "passes": "zcompile/passes", "runtime": "zcompile/runtime"}
BUILD = "import os, sys; from setuptools.build_meta import build_{0}; print(build_{0}(sys.argv[1]))"
TRAIN = """
import torch, zcompile
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
compiled = zcompile.compile(model, stage=3, backend="eager")
compiled(torch.ones(2, 4)).sum().backward()
print(zcompile.__file__, zcompile.__version__, "all_gather" in str(compiled.programs[0]))
"""


def said(*command: str | Path, folder: Path) -> str:
    """The output of a command, which must succeed."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def built(kind: str, source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    return target / said(sys.executable, "-c", BUILD.format(kind), target, folder=source).splitlines()[-1]


@pytest.mark.slow
def test_a_release_is_built_installed_and_used_without_the_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    archive = built("sdist", tree, tmp_path / "dist")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    wheel = built("wheel", tmp_path / "unpacked" / archive.name.removesuffix(".tar.gz"), tmp_path / "dist")
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        f"{inside}/{path.relative_to(ROOT / folder)}"
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    assert installed == wanted

    bare = tmp_path / "bare"
    said(sys.executable, "-m", "venv", "--without-pip", bare, folder=tmp_path)
    (packages,) = bare.glob("lib/*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parent.parent))  # behind the release's own
    pip = [sys.executable, "-m", "pip", "--python", bare / "bin" / "python", "install", "--no-deps", "--no-index"]
    said(*pip, wheel, folder=tmp_path)
    where, version, gathers = said(bare / "bin" / "python", "-c", TRAIN, folder=tmp_path).split()
    assert where.startswith(str(bare))
    assert (version, gathers) == (PROJECT["version"], "True")
    assert "torch" in said(bare / "bin" / "zcompile", "doctor", folder=tmp_path)


def test_the_version_is_the_same_everywhere() -> None:
    changes, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    assert re.findall(r"^## ([\d.]+)", changes, re.MULTILINE)[0] == PROJECT["version"]
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [PROJECT["version"]]
