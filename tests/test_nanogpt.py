"""The example in the shape of nanoGPT's script: three lines make it a sharded one, and its numbers stay."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DDP = "DistributedDataParallel"
PLAIN = [
    (f"import zcompile  # was: from torch.nn.parallel import {DDP}\n", f"from torch.nn.parallel import {DDP}\n"),
    (
        f"zcompile.compile(model, optimizer=optimizer, backend=options.backend)  # was: {DDP}(model)\n",
        f"{DDP}(model) if distributed else model\n",
    ),
    (
        '"model": model.full_state_dict(), "optimizer": model.full_optimizer_state_dict(optimizer)',
        '"model": raw.state_dict(), "optimizer": optimizer.state_dict()',
    ),
]
"""What stands in the example, and what stood there."""


def sources() -> tuple[str, str]:
    """The example, and the script that it was."""
    ours = plain = (EXAMPLES / "nanogpt.py").read_text()
    for new, old in PLAIN:
        assert plain.count(new) == 1, new
        plain = plain.replace(new, old)
    return ours, plain


def run(script: Path, out: Path, world: int, *options: str) -> list[list[float]]:
    """Steps and losses of an evaluation each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += [str(script), "--out", str(out), "--steps", "6", "--evaluate-every", "3", "--batch", "2", "--quiet"]
    if "zcompile" in script.name:
        command += ["--backend", "eager"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return [[float(number) for number in line.split()] for line in (out / "losses.txt").read_text().splitlines()]


def test_three_lines_differ() -> None:
    ours, plain = (source.splitlines() for source in sources())
    changes = [line for line in difflib.ndiff(plain, ours) if line.startswith(("- ", "+ "))]
    assert len(changes) == 6, "\n".join(changes)


@pytest.mark.nightly
def test_it_trains_as_ddp_and_each_resumes_what_the_other_saved(tmp_path: Path) -> None:
    scripts = tmp_path / "zcompile.py.txt", tmp_path / "plain.py.txt"
    for script, source in zip(scripts, sources(), strict=True):
        script.write_text(source)
    ours, plain = (run(script, tmp_path / script.stem, 2) for script in scripts)
    for one, other in zip(ours, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-5), "but for how norms of shards are summed"
    assert (tmp_path / "zcompile.py" / "sample.txt").read_text() == (tmp_path / "plain.py" / "sample.txt").read_text()
    for script, other in zip(scripts, reversed(scripts), strict=True):
        losses = run(script, tmp_path / other.stem, 1, "--resume", "--steps", "9")
        assert [step for step, *_ in losses] == [0, 3, 6, 6, 9]
        assert losses[2] == pytest.approx(losses[3], rel=1e-5), "what was saved is what goes on"
