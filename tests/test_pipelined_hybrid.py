from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.cases import quickly
from tests.pipelines import MICROBATCHES, batch_of, loss_of, model_of, trains
from tests.threads import Threads

WAYS = [
    (name, pipeline, replicas, shards, stage, shard)
    for name in ("gpt", "skips", "gpt tied", "skips tied", "norms")
    for pipeline, replicas, shards in ((1, 2, 2), (2, 2, 1), (2, 1, 2))
    for stage in range(4)
    for shard in (None, "hsdp", "hfsdp", "hpz", "flat")
    if not (stage == 0 and shard is not None) and not ("tied" in name and pipeline == 1)
]


@pytest.mark.slow
@quickly(
    "name, pipeline, replicas, shards, stage, shard",
    WAYS,
    [("norms", 2, 2, 1, 0, None)],
    pairs=False,
)
def test_two_levels_of_data_train_as_one_process_bit_for_bit(
    threads: Threads, name: str, pipeline: int, replicas: int, shards: int, stage: int, shard: str | None
) -> None:
    options = {} if shard is None else {"shard": shard}
    found = threads.run(4, trains, name, pipeline, replicas * shards, "1f1b", stage, options, replicas)
    assert found == [[]] * 4


@quickly(
    "schedule, shard, stage",
    list(itertools.product(["1f1b", "zbvzerobubble"], ["hsdp", "hfsdp", "hpz"], [1, 2, 3])),
    [],
    slow=[("1f1b", "hpz", 1), ("zbvzerobubble", "hfsdp", 3)],
)
def test_two_levels_of_data_on_eight_ranks(threads: Threads, schedule: str, shard: str, stage: int) -> None:
    assert threads.run(8, trains, "skips", 2, 4, schedule, stage, {"shard": shard}, 2) == [[]] * 8


def with_wires(rank: int) -> list[float]:
    """Losses of steps whose averages and shards travel as bytes between replicas."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "replicate", "shard"))
    model = model_of("gpt")
    step = zcompile.train_step(
        model,
        loss_of,
        torch.optim.SGD(model.parameters(), lr=0.5),
        mesh=mesh,
        microbatches=MICROBATCHES,
        stage=3,
        shard="hfsdp",
        outer_dtype=torch.int8,
        outer_gather_dtype=torch.int8,
        backend="eager",
    )
    losses = [float(step(*batch_of("gpt", rank % 2, 0))) for _ in range(6)]
    units = len(step.program.layout.units)
    assert str(step.program).count("wire=torch.int8") == 2 * units, "each is gathered, and averaged, once a step"
    return losses


@pytest.mark.slow
def test_averages_between_replicas_travel_as_bytes(threads: Threads) -> None:
    for losses in threads.run(4, with_wires):
        assert losses[-1] < losses[0]


def refused(rank: int, names: tuple[str, ...], sizes: tuple[int, ...], options: dict[str, Any]) -> str:
    mesh, model = init_device_mesh("cpu", sizes, mesh_dim_names=names), model_of("skips")
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zcompile.train_step(model, loss_of, optimizer, mesh=mesh, microbatches=4, backend="eager", **options)
    except (zcompile.OptionError, zcompile.GroupError) as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("names", "sizes", "options", "message"),
    [
        (("pp", "replicate", "shard"), (2, 2, 1), {"shard": "auto"}, "shard: 'auto' is not combined with a pipeline"),
        (("pp", "shard", "replicate"), (2, 2, 1), {"shard": "hpz"}, "mesh: is .* whose outer dimension shards, but"),
        (("pp", "dp"), (2, 2), {"shard": "hfsdp"}, "shard: is 'hfsdp', .* all ranks are along one"),
        (("pp", "dp"), (2, 2), {"outer_dtype": torch.int8}, "outer_dtype: is for the outer dimension"),
        (("pp", "up", "down"), (2, 2, 1), {}, "mesh: .*not combined with 'up', 'down'(?s:.*)'replicate', 'shard'"),
        (("replicate", "pp", "shard"), (2, 2, 1), {}, "mesh: .*or has another order"),
    ],
)
def test_levels_that_cannot_be_meant_are_refused(
    threads: Threads, names: tuple[str, ...], sizes: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    for found in threads.run(4, refused, names, sizes, options):
        assert re.search(message, found), found
