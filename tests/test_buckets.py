"""Reductions in pieces: the bits of whole ones, and memory that does not grow with the parameter."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.cases import quickly
from tests.models import batch, fit, make
from tests.ranks import Ranks, on_ranks
from tests.threads import Threads
from zcompile import OptionError
from zcompile.ir.layout import Param, Unit
from zcompile.runtime import executor
from zcompile.runtime.executor import BoundUnit, reduce_scatter
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards

SHAPES = [(301, 33), (12, 8), (1, 50), (200, 7, 3), (5,)]
MORE = [(1001, 33), *SHAPES]


def bound(shape: tuple[int, ...], world: int, *, casts: bool) -> BoundUnit:
    """A unit of one parameter, computed in bfloat16 and reduced in float32 if it `casts`."""
    device = torch.device("cpu")
    communicator = Communicator(init_device_mesh("cpu", (world,)), device)
    low, full = (torch.bfloat16, torch.float32) if casts else (None, None)
    unit = Unit("u", (Param("p", shape, torch.float32, True, world, low, full),))
    shards = UnitShards(unit, communicator)
    shards.parameters["p"] = nn.Parameter(torch.zeros(1))
    return BoundUnit(shards, unit)


@pytest.mark.slow
@quickly("world, shapes", [(2, MORE), (3, SHAPES)], [(3, SHAPES)], pairs=False)
@on_ranks()
def test_pieces_give_the_bits_of_the_whole(rank: int, world: int, shapes: list[tuple[int, ...]]) -> list[str]:
    """Shapes and buckets with which pieces do not give the bits of the whole."""
    found = []
    for shape in shapes:
        for casts in (False, True):
            unit = bound(shape, world, casts=casts)
            dtype = torch.float32 if casts else None
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(
                torch.bfloat16 if casts else torch.float32
            )
            strided = grad.transpose(0, -1).contiguous().transpose(0, -1)
            for given in (grad, strided):
                want = reduce_scatter(unit, [given], dtype=dtype).wait().tensors["p"]  # type: ignore[union-attr]
                for bucket in (1, 100, 4000, 10**6):
                    got = reduce_scatter(unit, [given], dtype=dtype, bucket=bucket).wait().tensors["p"]  # type: ignore[union-attr]
                    same = got.dtype is want.dtype and got.shape == want.shape and torch.equal(got, want)
                    found += [] if same else [f"{shape} {casts} {bucket}"]
    return found


def largest(rank: int, rows: int) -> tuple[int, int]:
    """The most bytes of pieces that are alive at once while gradients are reduced, and those of one whole gradient."""
    one, grad = bound((rows, 64), 2, casts=True), torch.ones(rows, 64, dtype=torch.bfloat16)
    params = tuple(replace(one.unit.params[0], name=name) for name in "pqr")
    unit = BoundUnit(UnitShards(Unit("u", params), one.shards.communicator), Unit("u", params))
    unit.shards.parameters.update({name: nn.Parameter(torch.zeros(1)) for name in "pqr"})
    make_piece, alive, most = executor.piece_inside, [0], [0]

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        made = make_piece(*args, **options)
        storage = made.untyped_storage()
        alive[0] += storage.nbytes()
        most[0] = max(most[0], alive[0])
        weakref.finalize(storage, lambda nbytes: alive.__setitem__(0, alive[0] - nbytes), storage.nbytes())
        return made

    executor.piece_inside = counted
    try:
        reductions = [reduce_scatter(unit, [grad] * 3, dtype=torch.float32, bucket=2**16) for _ in range(2)]
        for reduction in reductions:
            reduction.wait()
    finally:
        executor.piece_inside = make_piece
    return most[0], 2 * grad.nbytes


@pytest.mark.slow
def test_what_is_copied_does_not_grow_with_the_parameter(ranks: Ranks) -> None:
    for rows in (1001, 100_001):
        for most, whole in ranks.run(2, largest, rows):
            assert most <= 2 * 2**16 < whole


def trained(rank: int, stage: int, options: dict[str, Any]) -> list[torch.Tensor]:
    compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager", **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    fit(compiled, optimizer, (batch("gpt", rank, step) for step in range(2)))
    assert ("bucket=" in str(compiled.programs[1])) is ("bucket" in options and stage > 0)
    return list(compiled.full_state_dict(rank0_only=False).values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_trains_to_the_same_bits_with_any_bucket(threads: Threads, stage: int) -> None:
    mixed = {"dtype": torch.bfloat16}
    want = threads.run(3, trained, stage, mixed)
    got = threads.run(3, trained, stage, {**mixed, "bucket": 5000})
    assert all(torch.equal(one, other) for one, other in zip(want[0], got[0], strict=True))


@pytest.mark.parametrize("bucket", [0, -1, "many", 1.5, "25 XB", True])
def test_a_bucket_that_is_no_size_is_refused(bucket: Any) -> None:
    with pytest.raises(OptionError, match=r"bucket: .* is not a size"):
        zcompile.compile(make("mlp"), bucket=bucket)


def test_a_bucket_beside_a_whole_pipeline_is_refused() -> None:
    with pytest.raises(OptionError, match="bucket: has no effect on a pipeline given as a whole"):
        zcompile.compile(make("mlp"), bucket="25 MiB", passes=zcompile.pipeline())
