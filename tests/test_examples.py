"""The notebook runs as it is shown, and the files for clusters start what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console
import torch
import yaml  # of Transformers

import zcompile

ROOT = Path(__file__).parent.parent
CELLS = json.loads((ROOT / "examples" / "walkthrough.ipynb").read_text())["cells"]
CLUSTER = ROOT / "examples" / "cluster"
RANK = """
import torch, zcompile
torch.distributed.init_process_group("gloo")
compiled = zcompile.compile(torch.nn.Linear(4, 4), backend="eager")
compiled(torch.ones(2, 4)).sum().backward()
print(f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} has trained", flush=True)
torch.distributed.destroy_process_group()
"""
CELL = "-- the next cell"
TIMES = re.compile(r"[\d.]+ s of processor time")


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    cells = [cell for cell in CELLS if cell["cell_type"] == "code"]
    sources = ("".join(cell["source"]) for cell in cells)
    (tmp_path / "cells.py").write_text(f"\nprint({CELL!r})\n".join(sources))
    command = [sys.executable, "cells.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for cell, printed in zip(cells, TIMES.sub("", ended.stdout).split(f"{CELL}\n"), strict=True):
        assert printed == TIMES.sub("", "".join(line for output in cell["outputs"] for line in output["text"]))


def test_texts_are_plain_in_notebooks_and_where_colors_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    compiled = zcompile.compile(torch.nn.Linear(4, 4), backend="eager")
    with torch.no_grad():
        compiled(torch.ones(2, 4))
    for text in (str(zcompile.pipeline(stage=3)), compiled.explain(), str(compiled.timeline)):
        assert len(text) > 100
        assert "\x1b" not in text


@pytest.mark.nightly
def test_slurms_script_starts_the_ranks_of_both_nodes(tmp_path: Path) -> None:
    """Slurm's commands are stood in for: both nodes are this machine, with one rank each in place of eight."""
    (tmp_path / "train.py").write_text(RANK)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    starts = 'shift\nset -- $(echo "$@" | sed "s/per-node 8/per-node 1/")\n"$@" & "$@" & wait\n'
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{starts}")
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", CLUSTER / "slurm.sh"]
    environment = {**os.environ, **slurm, "PATH": path, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sorted(re.findall(r"rank . of 2 has trained", ended.stdout)) == [
        f"rank {r} of 2 has trained" for r in range(2)
    ]


def test_the_job_of_kubernetes_is_one_that_torchrun_starts() -> None:
    from torch.distributed.run import get_args_parser

    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, *arguments = container["command"]
    assert name == "torchrun"
    given = get_args_parser().parse_args(arguments)
    assert int(given.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(given.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert given.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
