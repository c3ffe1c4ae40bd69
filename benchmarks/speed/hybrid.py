"""Meshes of two levels beside FSDP2: `python -m benchmarks.speed.hybrid` prints a table for each link, in 20 minutes.

Two nodes of two ranks each are two network namespaces, joined by a cable of a given rate; within one, messages take the
loopback. All ways to train are in the same four processes and take turns, so their ratios are of one run. Bytes are
those that the cable's ends count, and stand beside what the program says that it sends over the axis of nodes; times
beside those that the simulator foretells, from the rates and links that these processes measure before they train.

It needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import zcompile
from benchmarks.common import turns
from benchmarks.common.configurations import SMALL
from benchmarks.common.links import LINKS, opened
from benchmarks.common.models import ADAMW, batch, make_model
from benchmarks.common.ranks import started
from benchmarks.speed.nodes import BASE, NODES, RANKS, WORLD, NodesResult, Trained

MESH = ("replicate", "shard")
OURS: dict[str, dict[str, Any]] = {
    "zcompile flat": {"shard": "flat"},
    "zcompile hsdp": {"shard": "hsdp"},
    "zcompile hfsdp": {"shard": "hfsdp"},
    "zcompile hpz": {"shard": "hpz"},
    "zcompile flat, stage 2": {"shard": "flat", "stage": 2},
    "zcompile hsdp, stage 2": {"shard": "hsdp", "stage": 2},
    "zcompile hfsdp, stage 2": {"shard": "hfsdp", "stage": 2},
    "zcompile hsdp, bf16 across": {"shard": "hsdp", "outer_dtype": torch.bfloat16},
    "zcompile hsdp, int8 across": {"shard": "hsdp", "outer_dtype": torch.int8},
    "zcompile hpz, bf16 across": {"shard": "hpz", "outer_dtype": torch.bfloat16, "outer_gather_dtype": torch.bfloat16},
    "zcompile hpz, int8 across": {"shard": "hpz", "outer_dtype": torch.int8, "outer_gather_dtype": torch.int8},
}
WAYS = ("fsdp2 flat", "fsdp2 hsdp", *OURS)
Way = tuple[Callable[[Any, Any], torch.Tensor], Any]
"""A step, and the compiled model, if it is ours."""


class Ways(turns.Ways[Way]):
    """One rank of four."""

    def build(self, way: str) -> Way:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = make_model(SMALL, 0)
        two_levels = init_device_mesh("cpu", (NODES, RANKS), mesh_dim_names=MESH)
        if way not in OURS:
            mesh = two_levels if way == BASE else init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return _loop(model), None
        compiled = zcompile.compile(model, mesh=two_levels, **OURS[way])
        return _loop(compiled), compiled

    def train(self, way: str, steps: int) -> Trained:
        step, compiled = self.ways[way]
        dist.barrier()
        wire, outside, seconds, loss = _wire(), _outside(compiled), [], torch.zeros(())
        for _ in range(steps):
            given = batch(SMALL, 0, dist.get_rank(), self.next_step(way))
            before = time.perf_counter()
            loss = step(*given)
            seconds.append(time.perf_counter() - before)
        dist.barrier()
        sent = _outside(compiled)
        return Trained(seconds, _wire() - wire, None if sent is None else sent - (outside or 0), float(loss))

    def foretold(self) -> dict[str, float]:
        """Measure the machine and its links; seconds of a step of every way that is ours, as they are simulated."""
        from dataclasses import replace

        from torch.distributed.device_mesh import init_device_mesh

        from zcompile.cost.simulator import simulate
        from zcompile.engine.calibration import measure, survey
        from zcompile.runtime.groups import Communicator

        mesh = init_device_mesh("cpu", (NODES, RANKS), mesh_dim_names=MESH)
        host = torch.device("cpu")
        # What sending a byte costs the processor shows where messages take little time, inside a node.
        rates, links = survey(Communicator(mesh["shard"], host), "a node"), measure(Communicator(mesh, host)).links
        hardware, found = replace(rates, links=links), {}
        for way, (_, compiled) in self.ways.items():
            if compiled is not None:
                program = next(program for program in compiled.programs if program.has_backward)
                found[way] = simulate(program, hardware, steps=True).seconds
        return found


def _loop(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _wire() -> int:
    """Bytes that have left by the cable."""
    path = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() and path.parent.parent.name != "lo" else 0


def _outside(compiled: Any) -> int | None:
    found = {} if compiled is None else compiled.traffic.axes
    return found["replicate"].bytes if "replicate" in found else None


def measure(link: str, ways: Sequence[str], rounds: int, steps: int, warmup: int) -> NodesResult:
    """Train in all of these ways in turns.

    Raises:
        LinkError: this machine cannot limit a network.
        TeamError: a rank failed, died or did not answer in time.
    """
    with opened(LINKS[link]) as nodes:
        ends = [nodes[rank // RANKS] for rank in range(WORLD)]
        with started(Ways, ways, warmup, ends=ends) as team:
            team.hear()
            foretold = team.ask("foretold")[0]
            return NodesResult(None, steps, turns.turns(team, ways, rounds, steps), foretold)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on each link, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", nargs="+", default=["1gbit", "250mbit"], choices=list(LINKS))
    parser.add_argument("--way", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args(arguments)
    for link in options.link:
        found = measure(link, options.way, options.rounds, options.steps, options.warmup)
        Console(width=120).print(found.table(link))


if __name__ == "__main__":
    main()
