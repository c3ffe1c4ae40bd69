"""What reductions take beside gradients and shards, as the model grows: `python -m benchmarks.buffers`.

Two ranks reduce one gradient, in bfloat16 and averaged in float32, whose rows no world of two divides: all of it must
be copied to be sent. Counted at the allocator: the peak, less the gradient and this rank's shard of the average.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.live_bytes import LiveBytes, build
from benchmarks.memory import MIB
from benchmarks.team import ROOT
from zcompile.ir.layout import Param, Unit
from zcompile.runtime.executor import BoundUnit, reduce_scatter
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards

COLUMNS = 1024
MILLIONS = (10, 100, 1000)
BUCKETS = (None, 2**20, 25 * 2**20)


def measure() -> None:
    """On one rank of two: a line for each size and bucket."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicator, counter = Communicator(init_device_mesh("cpu", (2,)), torch.device("cpu")), LiveBytes()
    for millions in MILLIONS:
        rows = millions * 10**6 // COLUMNS | 1
        param = Param("p", (rows, COLUMNS), torch.float32, True, 2, torch.bfloat16, torch.float32)
        unit = Unit("u", (param,))
        grad = torch.ones(rows, COLUMNS, dtype=torch.bfloat16)
        # The shards of a train step would be beside it; a parameter without memory stands for them here.
        shards = UnitShards(Unit("u", ()), communicator)
        shards.parameters["p"] = torch.nn.Parameter(torch.empty(0))
        for bucket in BUCKETS:
            before, _ = counter.live(), counter.peak()
            done = reduce_scatter(BoundUnit(shards, unit), [grad], dtype=torch.float32, bucket=bucket).wait()
            taken = counter.peak() - before - 4 * param.shard_numel
            del done
            if communicator.rank == 0:
                kind = f"bucket of {bucket / MIB:.0f} MiB" if bucket else "as a whole"
                print(f"{param.numel / 1e6:7.0f} million parameters, {kind:18} {taken / MIB:8.1f} MiB", flush=True)
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args(arguments).measure:
        measure()
        return 0
    with tempfile.TemporaryDirectory(prefix="buffers") as folder:
        environment = {**os.environ, "LD_PRELOAD": str(build(Path(folder))), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run(
            [*command, "-m", "benchmarks.buffers", "--measure"], env=environment, cwd=ROOT, check=False
        )
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
