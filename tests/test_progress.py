"""What is said on stderr while a model is compiled."""

from __future__ import annotations

import sys
import time

import pytest
from torch import fx

import zcompile
from tests.models import batch, make
from zcompile.engine import progress
from zcompile.engine.progress import CompileProgress
from zcompile.engine.region_cache import RegionCache
from zcompile.ir.region import Region


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.05)
    monkeypatch.setattr(progress, "EVERY", 0.05)


def two_phases(told: CompileProgress) -> None:
    with told.doing("tracing"):
        time.sleep(0.12)
        with told.doing("a part"):
            time.sleep(0.12)
        told.at("compiling region 2 of 3")
        time.sleep(0.12)
    told.at("nothing")


def test_a_log_has_a_line_now_and_then_and_one_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    two_phases(CompileProgress("GPT", speaks=True))
    lines = capsys.readouterr().err.splitlines()
    phases = list(dict.fromkeys(line.rpartition(": ")[2] for line in lines[:-1]))
    assert phases == ["tracing", "a part", "compiling region 2 of 3"]
    assert lines[0].startswith("zcompile: compiling GPT for 0 s: ")
    assert lines[-1] == "zcompile: compiled GPT in 0 s"


def test_a_terminal_has_one_line_that_goes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    two_phases(CompileProgress("GPT", speaks=True))
    said = capsys.readouterr().err
    assert "\n" not in said
    assert said.startswith("\r\x1b[2Kzcompile: compiling GPT")
    assert said.endswith("\r\x1b[2K")


def test_nothing_is_said_of_what_is_quick_or_by_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompileProgress("GPT", speaks=True).doing("tracing"):
        pass
    two_phases(CompileProgress("GPT", speaks=False))
    monkeypatch.setenv("ZCOMPILE_PROGRESS", "0")
    two_phases(CompileProgress("GPT", speaks=True))
    assert capsys.readouterr().err == ""


def test_an_error_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    told = CompileProgress("GPT", speaks=True)

    def fail() -> None:
        time.sleep(0.12)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), told.doing("tracing"):
        fail()
    two_phases(told)
    assert capsys.readouterr().err.count("compiled GPT") == 1


@pytest.mark.slow
def test_a_model_says_what_it_is_at_at_its_first_call(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    compiled(*batch("gpt", 0, 0)).backward()
    said = capsys.readouterr().err
    assert "zcompile: compiling GPT for " in said
    assert "tracing its forward" in said
    compiled(*batch("gpt", 0, 1)).backward()
    assert "compiling" not in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_regions_are_compiled_where_something_compiles_them(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    cache = RegionCache(backend, note=told.append)
    monkeypatch.setattr(cache, "_run", lambda region: region)
    (graph := fx.Graph()).output(())
    cache.get_all(dict.fromkeys(("region_0", "region_1"), Region("", graph, ())))
    assert told == ([] if backend == "eager" else ["compiling region 1 of 2", "compiling region 2 of 2"])
