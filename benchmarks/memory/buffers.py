"""What reductions take beside gradients and shards, as the model grows: `python -m benchmarks.memory.buffers`.

Two ranks reduce one gradient, in bfloat16 and averaged in float32, whose rows no world of two divides: all of it must
be copied to be sent. Counted at the allocator: the peak, less the gradient and this rank's shard of the average.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common.configurations import MIB
from benchmarks.common.live_bytes import LiveBytes
from benchmarks.common.ranks import call
from zcompile.ir.layout import Param, Unit
from zcompile.runtime.executor import BoundUnit, reduce_scatter
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards

COLUMNS = 1024
MILLIONS = (10, 100, 1000)
BUCKETS = (None, 2**20, 25 * 2**20)


def measure() -> list[tuple[int, int | None, int]]:
    """On one rank of two: elements of a parameter, the bucket, and the bytes that its reduction takes."""
    communicator, counter = Communicator(init_device_mesh("cpu", (2,)), torch.device("cpu")), LiveBytes()
    found = []
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
            found.append((param.numel, bucket, counter.peak() - before - 4 * param.shard_numel))
            del done
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    for numel, bucket, taken in call(measure, counted=True)[0]:
        kind = f"bucket of {bucket / MIB:.0f} MiB" if bucket else "as a whole"
        print(f"{numel / 1e6:7.0f} million parameters, {kind:18} {taken / MIB:8.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
