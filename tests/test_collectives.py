"""The two implementations of collectives: exchanges on gloo, and the backend's own, give the same."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_ranks
from zcompile.runtime import gloo_collectives
from zcompile.runtime.async_work import TrafficMeter
from zcompile.runtime.backend_collectives import BackendCollectives
from zcompile.runtime.collectives import Collectives, Member
from zcompile.runtime.gloo_collectives import GlooCollectives
from zcompile.runtime.waits import Waits
from zcompile.torch_internals.distributed import gloo_of

HOST = torch.device("cpu")


def both(name: str) -> tuple[GlooCollectives, Collectives, Member]:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
    group = mesh.get_group()
    member = Member(group, HOST, mesh.get_local_rank(), world, TrafficMeter(), Waits(group))
    return GlooCollectives(member, gloo_of(group)), BackendCollectives(member, averages=False), member


def results(collectives: Collectives, member: Member) -> dict[str, torch.Tensor]:
    """Of each collective, of tensors that no other rank has; whole numbers, so that no order of sums matters."""
    numbers = torch.arange(24 * member.size, dtype=torch.float32) * (member.rank + 1)
    gathered, shard, pieces = torch.empty(6 * member.size), torch.empty(24), torch.empty(24)
    collectives.all_gather(gathered, numbers[:6].contiguous()).wait()
    collectives.reduce_scatter(shard, numbers.clone()).wait()
    rows = numbers.view(member.size, -1)
    collectives.reduce_scatter_by_pieces(pieces, lambda start, stop: rows[:, start:stop].contiguous(), 7).wait()
    whole, small = numbers.clone(), numbers[:1].clone() + member.rank
    collectives.all_reduce(whole).wait()
    collectives.all_reduce(small).wait()
    return {"gathered": gathered, "shard": shard, "pieces": pieces, "whole": whole, "small": small}


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_exchanges_give_what_the_backend_gives(rank: int, world: int) -> list[str]:
    exchanged, native, member = both(f"both{world}")
    one, other = results(exchanged, member), results(native, member)
    return [name for name in one if not torch.equal(one[name], other[name])]


@on_ranks(3)
def test_collectives_give_what_arithmetic_gives(rank: int) -> None:
    exchanged, _, member = both("arithmetic")
    found, numbers = results(exchanged, member), torch.arange(72, dtype=torch.float32)
    assert torch.equal(found["gathered"], torch.cat([numbers[:6] * (other + 1) for other in range(3)]))
    assert torch.equal(found["shard"], numbers[24 * rank : 24 * (rank + 1)] * 2)
    assert torch.equal(found["pieces"], found["shard"])
    assert torch.equal(found["whole"], numbers * 2)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_many_sums_may_be_on_their_way_at_once(rank: int, world: int) -> list[int]:
    """Which of several sums are wrong, of tensors of one element up to three pieces, waited for from the last on."""
    exchanged, _, _ = both(f"many{world}")
    piece = gloo_collectives._PIECE_BYTES // 4
    sizes = [1, 5, piece - 1, piece, piece + 1, 2 * piece, 3 * piece - 7]
    tensors = [torch.arange(size, dtype=torch.float32) % 97 * (rank + 1) + number for number, size in enumerate(sizes)]
    wanted = [torch.arange(size, dtype=torch.float32) % 97 * (world + 1) / 2 + i for i, size in enumerate(sizes)]
    works = [exchanged.all_reduce(tensor) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    pairs = enumerate(zip(tensors, wanted, strict=True))
    return [number for number, (found, want) in pairs if not torch.allclose(found, want, rtol=1e-6)]


@on_ranks(3)
def test_hosts_tell_each_other_numbers(rank: int) -> None:
    exchanged, _, _ = both("told")
    flags = torch.tensor([rank, -rank])
    exchanged.stamp(3)
    exchanged.largest(flags)
    assert flags.tolist() == [2, 0]
    assert exchanged.share(torch.tensor([rank, 7])).read().tolist() == [[0, 7], [1, 7], [2, 7]]
