"""Training: numbers are those of plain PyTorch, whatever is called, how often, and on which mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.as_fsdp2.plain import (
    Block,
    Net,
    average,
    beside,
    differing,
    gradients,
    mean_square,
    numbers,
    pair,
    parameters,
    three,
)
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_ranks, on_threads
from tests.threads import Threads

# -- models of which each trains as the plain one ---------------------------------------------------------------------


class Tied(nn.Module):
    """The head is the embedding, and one layer is in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), self.shared) for _ in range(2))
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 10).long() % 11
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.log_softmax(self.head(hidden), -1)


class Again(Net):
    """Every block is called in two places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return super().forward(x)


class Bare(nn.Module):
    """No parameter is the root's, and no block is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


class Tiny(nn.Module):
    """A scalar, and matrices of fewer rows than ranks, some of which have none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.row = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(1, 7))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.layers = nn.ModuleList([nn.Linear(7, 1), nn.Linear(1, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.scale * x + self.row + self.empty.sum(0)))


class Checkpointed(Net):
    """Blocks whose activations torch computes again; by the older way, too, where `reentrant`."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Strided(Net):
    """Weights that do not lie in memory row by row."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight = nn.Parameter(torch.randn(7, 5).t())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "tied": Tied,
    "modules called twice in a forward": Again,
    "a root without parameters": Bare,
    "fewer rows than ranks": Tiny,
    "checkpoints": Checkpointed,
    "reentrant checkpoints": lambda: Checkpointed(reentrant=True),
    "weights that are not contiguous": Strided,
}


CASES = [
    (kind, world, {"stage": stage, "prefetch": prefetch})
    for kind in MODELS
    for world in (2, 3)
    for stage, prefetch in ((3, 2), (3, 0), (2, 1))
]


@quickly("kind, world, options", CASES, CASES[:1], pairs=False)
@on_threads()
def test_gradients_and_parameters_are_those_of_plain_pytorch(
    rank: int, kind: str, world: int, options: dict[str, Any]
) -> list[str]:
    plain, compiled = pair(MODELS[kind], **options)
    return beside(plain, compiled, three(rank))


UNITS: dict[str, Any] = {
    "one": ["blocks"],
    "each block": ["blocks.*"],
    "each layer": lambda path, module: isinstance(module, nn.Linear),
}


@pytest.mark.slow
@quickly(
    "units, checkpoint",
    [(units, checkpoint) for units in UNITS for checkpoint in (None, "unit")][:-1],  # a layer computes nothing again
    [("one", "unit"), ("each layer", None)],
    pairs=False,
)
@on_threads(2)
def test_how_modules_are_grouped_and_what_is_recomputed_changes_no_number(
    rank: int, units: str, checkpoint: str | None
) -> list[str]:
    plain, compiled = pair(Net, units=UNITS[units], checkpoint=checkpoint)
    return beside(plain, compiled, three(rank))


# -- ways to call -----------------------------------------------------------------------------------------------------


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two forwards before the one backward."""
    return model(x).square().mean() + model(x[:2].flip(0)).abs().mean()


def fed_back(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward over what another one gave."""
    return F.pad(model(F.pad(model(x), (0, 4))), (0, 4)).square().mean()


def evaluated_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """An evaluation between a forward and its backward."""
    loss = mean_square(model, x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return loss


def one_block(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A module of the model, and not the root."""
    return model.blocks[1](x).square().mean()


def block_then_all(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(model.blocks[0](x)).square().mean()


CALLS = {call.__name__: call for call in (twice, fed_back, evaluated_between, one_block, block_then_all)}


@pytest.mark.slow
@quickly("way", list(CALLS), ["twice", "block_then_all"])
@on_threads(2)
def test_calls_before_a_backward_may_be_several_and_not_of_the_root(rank: int, way: str) -> list[str]:
    plain, compiled = pair(Net)
    return beside(plain, compiled, three(rank), CALLS[way])


@pytest.mark.slow
@on_threads(3)
def test_batches_of_the_ranks_may_have_other_sizes(rank: int) -> list[str]:
    plain, compiled = pair(Net)
    sizes = [(4, 4, 4), (3, 5, 2), (1, 7, 4)]
    return beside(plain, compiled, [numbers(rank, step, size[rank], 7) for step, size in enumerate(sizes)])


@pytest.mark.slow
@on_threads(2)
def test_backwards_may_come_in_another_order_than_forwards(rank: int) -> list[str]:
    """Backwards in another order than their forwards, as schedules of pipelines have it."""
    plain, compiled = pair(Net)
    for model in (plain, compiled):
        losses = [mean_square(model, numbers(rank, step)) for step in range(3)]
        for index in (1, 0, 2):
            losses[index].backward()
    average(plain)
    return differing(gradients(compiled), gradients(plain), "gradient")


class Named(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.first(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](x))


def by_methods(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.decode(model.encode(x)).square().mean()


@pytest.mark.slow
@on_threads(2)
def test_methods_other_than_forward_need_no_registration(rank: int) -> list[str]:
    plain, compiled = pair(Named)
    return beside(plain, compiled, three(rank), by_methods)


# -- accumulation -----------------------------------------------------------------------------------------------------


def held_back(model: Any, wanted: bool) -> None:
    """What FSDP2 spells `set_requires_gradient_sync(not wanted)`."""
    model.require_backward_grad_sync = not wanted


WAYS = [(stage, way) for stage in (3, 2) for way in ("sharded", "full", "flag")]


@pytest.mark.slow
@quickly("stage, way", WAYS, [(3, "sharded"), (2, "full"), (3, "flag")], slow=())
@on_threads(3)
def test_gradients_accumulate_with_and_without_synchronisation(rank: int, stage: int, way: str) -> list[str]:
    """Micro-batches, all but the last without synchronisation, against DistributedDataParallel."""
    plain, compiled = pair(Net, stage=stage)
    ddp = DistributedDataParallel(copy.deepcopy(plain))
    for micro in range(3):
        x = numbers(rank, micro, 2 + (micro + rank) % 2, 7)
        if micro < 2:
            with ddp.no_sync():
                mean_square(ddp, x).backward()
        else:
            mean_square(ddp, x).backward()
        if way == "flag":
            held_back(compiled, micro < 2)
            mean_square(compiled, x).backward()
        elif micro < 2:
            with compiled.no_sync(full_gradients=way == "full"):
                mean_square(compiled, x).backward()
        else:
            mean_square(compiled, x).backward()
    return differing(gradients(compiled), gradients(ddp.module), "gradient")


@pytest.mark.slow
@on_threads(3)
def test_ranks_may_differ_in_micro_batches_where_these_send_nothing(rank: int) -> list[str]:
    """The first rank has a micro-batch more than the others before the one that synchronises."""
    plain, compiled = pair(Net, stage=0)
    for micro in range(2 if rank == 0 else 1):
        mean_square(plain, numbers(rank, micro)).backward()
        with compiled.no_sync():
            mean_square(compiled, numbers(rank, micro)).backward()
    for model in (plain, compiled):
        mean_square(model, numbers(rank, 5)).backward()
    average(plain)
    return differing(gradients(compiled), gradients(plain), "gradient")


# -- meshes -----------------------------------------------------------------------------------------------------------


HYBRIDS = [(shard, stage) for shard in ("hsdp", "hfsdp", "hpz", "flat") for stage in (3, 2)]


@pytest.mark.slow
@quickly("shard, stage", HYBRIDS, [("hsdp", 3)], pairs=False)
@on_threads(4)
def test_a_mesh_that_replicates_and_shards_averages_over_both(rank: int, shard: str, stage: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, compiled = pair(Net, mesh=mesh, shard=shard, stage=stage)
    return beside(plain, compiled, three(rank))


@pytest.mark.slow
@on_ranks(4)
def test_a_mesh_of_data_and_tensor_parallelism_trains_as_the_plain_model(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    torch.manual_seed(0)
    plain = Net(width=6)
    for block in plain.blocks:
        block.up, block.down = nn.Linear(6, 4), nn.Linear(4, 6)
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
    compiled = zcompile.compile(model, mesh=mesh["dp"], backend="eager")
    group = mesh["dp"].get_group()
    found = []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, compiled)]
    for step in range(3):
        x = numbers(mesh["dp"].get_local_rank(), step, 4, 6)
        for one in (plain, compiled):
            mean_square(one, x).backward()
        average(plain, group)
        found += differing(gradients(compiled), gradients(plain), f"step {step}, gradient")
        update(*optimizers)
    return found + differing(parameters(compiled), parameters(plain), "parameter")


# -- what is sent, and what is there outside of calls -----------------------------------------------------------------


@on_threads(1)
def test_a_world_of_one_sends_nothing(rank: int) -> None:
    plain, compiled = pair(Net)
    assert (beside(plain, compiled, three(rank)), compiled.traffic.payload) == ([], 0)


@on_threads(2)
def test_parameters_are_the_same_shards_outside_of_every_call(rank: int) -> list[str]:
    """Kinds of the parameters after each part of a step."""
    _, compiled = pair(Net)
    before = list(compiled.parameters())
    found = []

    def look(when: str) -> None:
        now = list(compiled.parameters())
        if not all(isinstance(p, DTensor) and p is old for p, old in zip(now, before, strict=True)):
            found.append(when)

    look("compiled")
    loss = mean_square(compiled, numbers(rank, 0))
    look("forward")
    loss.backward()
    look("backward")
    with compiled.unsharded():
        found += [name for name, p in compiled.named_parameters() if isinstance(p, DTensor)]
    look("unsharded")
    return found


@pytest.mark.slow
@on_threads(2)
def test_unsharding_and_sharding_again_changes_nothing(rank: int) -> list[str]:
    """Full parameters for a while: they are the plain model's, nothing is sent inside, and training goes on."""
    plain, compiled = pair(Net)
    found = beside(plain, compiled, three(rank))
    with compiled.unsharded():
        before = compiled.traffic.payload
        found += differing(
            {n: p.detach() for n, p in compiled.named_parameters()}, parameters(plain), "unsharded", 1e-6
        )
        for _ in range(1 + rank):
            compiled(numbers(rank, 7))
        found += [] if compiled.traffic.payload == before else ["sent"]
    return found + beside(plain, compiled, three(rank))


def overlapping(rank: int) -> tuple[list[str], list[str]]:
    """The units of the forward's and the backward's gathers, with two ahead."""
    _, compiled = pair(lambda: Net(blocks=5), prefetch=2)
    mean_square(compiled, numbers(rank, 0)).backward()
    forward, backward = (
        [line.split()[2] for line in program.communications() if "all_gather" in line]
        for program in compiled.programs[:2]
    )
    return forward, backward


@pytest.mark.slow
def test_units_are_gathered_in_the_order_of_their_use_and_backwards_in_reverse(threads: Threads) -> None:
    forward, backward = threads.run(2, overlapping)[0]
    assert forward == ["first", *(f"blocks.{index}" for index in range(5)), "head"]
    assert backward == ["blocks.2", "blocks.1", "blocks.0"]  # the last three units stay full over the turn
