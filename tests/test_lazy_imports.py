"""What is imported when: help without torch, and public names of zcompile at their first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zcompile
from tests.cases import quickly
from zcompile.pipelining.action_tables import SCHEDULES
from zcompile.schedule import option_checks
from zcompile.tools import choices
from zcompile.tools.command_line import app

ROOT = Path(__file__).parent.parent
LOADED = """
import sys
from zcompile.tools.command_line import main
sys.argv = ["zcompile", *{arguments}]
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules, sorted(sys.modules)
"""
COMMANDS = [str(command.name) for command in app.registered_commands]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


WRONG = [[], ["--help"], ["plam"], ["plan", "gpt:124m", "--wrold", "2"]]


@quickly("arguments", [*WRONG, ["--version"], *([one, "-h"] for one in COMMANDS)], [*WRONG, ["plan", "-h"]])
def test_help_and_wrong_commands_do_not_wait_for_torch(arguments: list[str]) -> None:
    found = run(LOADED.format(arguments=arguments))
    assert found.returncode == 0, found.stderr
    assert "Usage" in found.stdout + found.stderr or found.stdout.startswith(f"zcompile {zcompile.__version__}")


def test_names_of_choices_are_those_of_options() -> None:
    assert tuple(SCHEDULES) == choices.SCHEDULES
    assert tuple(map(str, option_checks.SHARDS)) == choices.SHARDS
    assert choices.FLAT == option_checks.FLAT
    for stage in choices.STAGES:
        option_checks.check_stage(stage)


def test_public_names_are_imported_where_type_checkers_read_them() -> None:
    tree = ast.parse((ROOT / "zcompile" / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    read = {alias.name: node.module for node in imports for alias in node.names}
    assert read == zcompile._HOME_OF
    assert sorted(read) == zcompile.__all__


@pytest.mark.slow
def test_a_public_name_is_there_whatever_was_imported_before() -> None:
    """Where a module has the name of a function, importing the module would put it in the function's place."""
    names = "\n".join(f"assert zcompile.{name} is not None" for name in zcompile.__all__)
    found = run(
        "import sys, zcompile\nassert 'torch' not in sys.modules\n"
        f"import zcompile.training_step, zcompile.tools.planner\n{names}\n"
        "assert callable(zcompile.train_step) and callable(zcompile.plan)\n"
        "assert {*zcompile.__all__, '__version__'} <= {*dir(zcompile)}\n"
        "from zcompile import *\nassert compile is zcompile.compile"
    )
    assert found.returncode == 0, found.stderr


def test_no_module_has_the_name_of_something_public() -> None:
    found = {path.stem for path in (ROOT / "zcompile").iterdir()} & {*zcompile.__all__}
    assert found == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zcompile' has no attribute 'compil'"):
        zcompile.compil  # noqa: B018
