"""Meshes of two levels beside FSDP2: `python -m benchmarks.hybrid` prints a table for each link, in twenty minutes.

Two nodes of two ranks each are two network namespaces, joined by a cable of a given rate; within one, messages take the
loopback. All ways to train are in the same four processes and take turns, so their ratios are of one run. Bytes are
those that the cable's ends count, and stand beside what the program says that it sends over the axis of nodes; times
beside those that the simulator foretells, from the rates and links that these processes measure before they train.

It needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.links import LINKS, End, opened
from benchmarks.nodes import BASE, NODES, RANKS, WORLD, Begin, Foretell, NodesResult, Round, Trained
from benchmarks.protocol import Sizes
from benchmarks.team import Team, on_two_ends
from benchmarks.worker import run as serve_pipe

SIZES = Sizes(blocks=6, width=256, heads=4, vocabulary=4096, sequence=128, batch=2)
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


def build(way: str) -> Way:
    """A step of a way to train, and the compiled model, if it is ours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import zcompile
    from benchmarks.workload import ADAMW, make_model

    model = make_model(SIZES, 0)
    two_levels = init_device_mesh("cpu", (NODES, RANKS), mesh_dim_names=MESH)
    if way not in OURS:
        mesh = two_levels if way == BASE else init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _loop(model, torch.optim.AdamW(model.parameters(), **ADAMW)), None
    compiled = zcompile.compile(model, mesh=two_levels, **OURS[way])
    return _loop(compiled, torch.optim.AdamW(compiled.parameters(), **ADAMW)), compiled


def _loop(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], torch.Tensor]:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def serve(connection: Connection) -> None:
    """One rank: builds all ways, and trains in the one that it is told."""
    from benchmarks.workload import batch

    begin: Begin = connection.recv()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{begin.store}", rank=begin.rank, world_size=WORLD)
    ways = {way: build(way) for way in begin.ways}
    counts = dict.fromkeys(ways, 0)

    def train(way: str, steps: int) -> Trained:
        step, compiled = ways[way]
        dist.barrier()
        wire, outside, seconds, loss = _wire(), _outside(compiled), [], torch.zeros(())
        for _ in range(steps):
            given = batch(SIZES, 0, begin.rank, counts[way])
            counts[way] += 1
            before = time.perf_counter()
            loss = step(*given)
            seconds.append(time.perf_counter() - before)
        dist.barrier()
        sent = _outside(compiled)
        return Trained(seconds, _wire() - wire, None if sent is None else sent - (outside or 0), float(loss))

    connection.send([train(way, begin.warmup) for way in ways])
    while True:
        message: Round | Foretell = connection.recv()
        if isinstance(message, Foretell):
            connection.send(foretold({way: compiled for way, (_, compiled) in ways.items() if compiled is not None}))
        else:
            connection.send(train(message.way, message.steps))


def foretold(compiled: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step, as they are simulated. Collective."""
    from dataclasses import replace

    from torch.distributed.device_mesh import init_device_mesh

    from zcompile.cost.simulator import simulate
    from zcompile.engine.calibration import measure, survey
    from zcompile.runtime.groups import Communicator

    mesh = init_device_mesh("cpu", (NODES, RANKS), mesh_dim_names=MESH)
    host = torch.device("cpu")
    # What sending a byte costs the processor shows where messages take little time, inside a node.
    rates, links = survey(Communicator(mesh["shard"], host), "a node"), measure(Communicator(mesh, host)).links
    hardware = replace(rates, links=links)
    steps = {way: [program for program in one.programs if program.has_backward] for way, one in compiled.items()}
    return {way: simulate(programs[0], hardware, steps=True).seconds for way, programs in steps.items()}


def _wire() -> int:
    """Bytes that have left by the cable."""
    import os

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
    result = NodesResult(steps=steps, rounds={way: [] for way in ways})
    with tempfile.TemporaryDirectory() as folder, opened(LINKS[link]) as nodes:
        ends: list[End] = [nodes[rank // RANKS] for rank in range(WORLD)]
        with Team("benchmarks.hybrid", ends, Path(folder) / "log", 1200, environment=_environment) as team:
            team.tell(*(Begin(rank, f"{folder}/store", ways, warmup) for rank in range(WORLD)))
            team.hear()
            team.tell(*([Foretell()] * WORLD))
            result.foretold = team.hear()[0]
            for number in range(rounds):
                for way in ways if number % 2 == 0 else reversed(ways):
                    team.tell(*([Round(way, steps)] * WORLD))
                    result.rounds[way].append(team.hear())
    return result


def _environment(given: Any, rank: int, end: End) -> dict[str, str]:
    return {**on_two_ends(given, rank, end), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}


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
    import sys

    if len(sys.argv) == 2 and sys.argv[1].isdecimal():
        serve_pipe(serve)
    else:
        main()
