"""Training over two axes of data parallelism, and what it has to equal: one process that does what all ranks do."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from tests.compare import differing, full, parameters
from tests.models import batch, make, update
from tests.ranks import Ranks

STEPS = 3
KINDS = ("gpt", "mlp", "conv", "tied")
Values = dict[str, torch.Tensor]
Shape = tuple[int, int]
Rows = list[list[torch.Tensor]]
"""Of each replica, what each rank that shards has."""
Makes = Callable[[nn.Module], list[torch.optim.Optimizer]]


def mesh_of(shape: Shape) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def only_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [adamw(model)]


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Summed in their order, then divided."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


def inside_first(rows: Rows) -> torch.Tensor:
    """Averaged over the ranks that shard in their order, then over the replicas."""
    return mean([mean(row) for row in rows])


def at_once(rows: Rows) -> torch.Tensor:
    return mean([*itertools.chain.from_iterable(rows)])


def one_process(
    kind: str,
    shape: Shape,
    *,
    batches: int = 1,
    clip: float | None = None,
    by: Makes = only_adamw,
    average: Callable[[Rows], torch.Tensor] = inside_first,
    arriving: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> Values:
    """Parameters after steps on the batches of all ranks.

    Args:
        kind: The model.
        shape: How many replicas there are, and how many ranks shard each.
        batches: Of how many micro-batches a step is, whose gradients are added on each rank.
        clip: The largest norm of gradients.
        by: What makes the optimizers.
        average: How the gradients of all ranks become one.
        arriving: At which value of a parameter gradients are computed.
    """
    model, kept = make(kind), make(kind)
    optimizers, own, inside = by(kept), dict(kept.named_parameters()), shape[1]
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(shape[0] * inside)]
    for step in range(STEPS):
        grads = list[Values]()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(arriving(own[name]))
        for rank, of_rank in enumerate(buffers):
            for name, buffer in model.named_buffers():
                buffer.copy_(of_rank[name])
            for micro in range(batches):
                model(*batch(kind, rank, batches * step + micro)).backward()
            grads.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
            of_rank.update({name: b.clone() for name, b in model.named_buffers()})
            model.zero_grad()
        for name in grads[0]:
            every = [one[name] for one in grads]
            own[name].grad = average([every[at : at + inside] for at in range(0, len(every), inside)])
        if clip is not None:
            nn.utils.clip_grad_norm_(kept.parameters(), clip)
        update(*optimizers)
    return {name: param.detach() for name, param in own.items()}


def trained(
    rank: int,
    kind: str,
    shape: Shape | None,
    *,
    steps: int = STEPS,
    synchronised: Sequence[bool] = (True,),
    clip: float | None = None,
    by: Makes = only_adamw,
    **options: Any,
) -> tuple[zcompile.CompiledModule, list[torch.optim.Optimizer]]:
    """A compiled model after steps by the loop, and its optimizers; of a step which micro-batches are synchronised."""
    mesh = None if shape is None else mesh_of(shape)
    # Other values on other ranks: rank 0's must win.
    compiled = zcompile.compile(make(kind, seed=rank), mesh=mesh, backend="eager", **options)
    optimizers, count = by(compiled), len(synchronised)
    for step in range(steps):
        for micro, averages in enumerate(synchronised):
            with contextlib.nullcontext() if averages else compiled.no_sync():
                compiled(*batch(kind, rank, count * step + micro)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(compiled.parameters(), clip)
        update(*optimizers)
    return compiled, optimizers


def train(rank: int, kind: str, shape: Shape | None, *, by_step: bool = False, **options: Any) -> Values:
    """By the loop, or by `zcompile.train_step`."""
    if not by_step:
        return parameters(trained(rank, kind, shape, **options)[0])
    compiled, (optimizer,) = trained(rank, kind, shape, steps=0, **options)
    step = zcompile.train_step(compiled, None, optimizer)
    for number in range(STEPS):
        step(*batch(kind, rank, number))
    return parameters(compiled)


def sweep(rank: int, kind: str, shape: Shape, choices: list[dict[str, Any]]) -> list[str]:
    """What differs from the sum inside, in the order of ranks, and then outside, or at once where all are one axis."""
    want, flat = one_process(kind, shape), one_process(kind, shape, average=at_once)
    found = []
    for choice in choices:
        is_flat = choice["stage"] == 0 or choice.get("shard") == "flat"
        found += [f"{choice}: {n}" for n in differing(train(rank, kind, shape, **choice), flat if is_flat else want)]
    return found


def accumulated(rank: int, stage: int, shape: Shape, synchronised: list[bool], shard: str | None = None) -> list[str]:
    """Several micro-batches a step, of which some are held back where the stage keeps full gradients."""
    got = train(rank, "mlp", shape, synchronised=synchronised, stage=stage, shard=shard)
    want = one_process("mlp", shape, batches=len(synchronised))
    return [name for name in want if not torch.allclose(got[name], want[name], atol=1e-6)]


def compare_steps(rank: int, stage: int, prefetch: int, shard: str | None = None) -> list[str]:
    options: dict[str, Any] = {"stage": stage, "prefetch": prefetch, "shard": shard}
    return differing(train(rank, "mlp", (2, 2), by_step=True, **options), train(rank, "mlp", (2, 2), **options))


OPTIONS: dict[str, dict[str, object]] = {
    "bf16": {"dtype": torch.bfloat16},
    "bf16 reduced": {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "arenas": {"arenas": True},
    "checkpoints": {"checkpoint": "unit"},
    "a limit": {"memory_limit": "2 MiB"},
    "a bucket": {"bucket": 4096},
    "prefetch by the cost model": {"prefetch": "auto"},
}


def beside(rank: int, name: str, shard: str | None = None) -> list[str]:
    """What differs from stage 1 in the same precision, whose shards repeat: it shares no gather with stage 3."""
    options = OPTIONS[name]
    want = train(rank, "gpt", (2, 2), stage=1, **{k: v for k, v in options.items() if k in ("dtype", "reduce_dtype")})
    return differing(train(rank, "gpt", (2, 2), stage=3, shard=shard, **options), want)


def on_a_disk(rank: int, folder: str, shard: str | None = None) -> list[str]:
    place = f"disk:{folder}"
    got = train(rank, "mlp", (2, 2), offload_parameters=place, offload_activations=place, shard=shard)
    return differing(got, one_process("mlp", (2, 2)))


class Breaking(nn.Module):
    """Its code breaks the graph; a scalar and rows that ranks divide, which plain Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 1)
        self.scale, self.gain = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.linspace(0.1, 0.9, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.gain
        torch.compiler.disable(print)(end="")
        return ((self.last(x) * self.scale - y) ** 2).mean()


def broken(rank: int, shard: str | None = None) -> list[str]:
    torch.manual_seed(0)
    model = Breaking()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    compiled = zcompile.compile(model, mesh=mesh_of((2, 2)), backend="eager", shard=shard)
    compiled(*batch("mlp", rank, 0)).backward()
    torch.manual_seed(0)
    alone = Breaking()
    assert all(torch.equal(p, plain[n]) for n, p in alone.named_parameters())
    rows = []
    for other in range(4):
        alone(*batch("mlp", other, 0)).backward()
        rows.append({n: p.grad for n, p in alone.named_parameters()})
        alone.zero_grad()
    want = {n: inside_first([[rows[0][n], rows[1][n]], [rows[2][n], rows[3][n]]]) for n in rows[0]}
    grads = {n: p.grad for n, p in compiled.named_parameters() if p.grad is not None}
    return [name for name in want if not torch.equal(full(grads[name]), want[name])]


def through_torch_compile(rank: int, kind: str, want: Values, **options: Any) -> list[str]:
    """Parameters for which training by the backend of torch.compile has left no shards."""
    model, backend = make(kind), zcompile.backend(mesh=mesh_of((2, 2)), backend="eager", **options)
    optimizer, compiled = adamw(model), torch.compile(model, backend=backend)
    for step in range(STEPS):
        compiled(*batch(kind, rank, step)).backward()
        update(optimizer)
    shards = [full(shard) for shard in backend.shards().values()]
    return [n for n in want if not any(one.shape == want[n].shape and torch.equal(one, want[n]) for one in shards)]


def saved(rank: int, folder: str, shard: str | None = None, kind: str = "mlp", **options: Any) -> Values:
    compiled, (optimizer,) = trained(rank, kind, (2, 2), shard=shard, **options)
    compiled.save_checkpoint(folder, optimizer)
    compiled.save_full_state_dict(f"{folder}.pt")
    return parameters(compiled)


def loaded(rank: int, folder: str, shape: Shape | None, shard: str | None = None) -> tuple[Values, Values]:
    """What a checkpoint gives in another layout, and the parameters after one more step on the same batch."""
    mesh, stage = None if shape is None else mesh_of(shape), 2 if shape is None else 3
    compiled = zcompile.compile(make("mlp", seed=5), mesh=mesh, backend="eager", stage=stage, shard=shard)
    optimizer = adamw(compiled)
    compiled.load_checkpoint(folder, optimizer)
    found = parameters(compiled)
    compiled(*batch("mlp", 0, STEPS)).backward()
    optimizer.step()
    return found, parameters(compiled)


def assert_loads_elsewhere(
    ranks: Ranks, folder: str, ways: Sequence[tuple[int, Shape | None, str | None]], shard: str | None = None
) -> None:
    """What 2x2 ranks save is loaded by worlds of other sizes, shapes and ways to shard, which all train on alike."""
    values = ranks.run(4, saved, folder, shard)[0]
    assert not differing(torch.load(f"{folder}.pt"), values)
    after: list[Values] = []
    for world, shape, other in ways:
        for found, stepped in ranks.run(world, loaded, folder, shape, other):
            assert not differing(found, values)
            after.append(stepped)
    for one in after:
        assert all(torch.allclose(one[name], after[0][name], atol=1e-6) for name in one)


def recorded(rank: int, folder: str, kind: str = "mlp", shape: Shape | None = (2, 2), **options: Any) -> None:
    """A step and half of the next, whose gradients are added, and a dump of their programs."""
    compiled, optimizers = trained(rank, kind, shape, steps=0, record=folder, **options)
    compiled(*batch(kind, rank, 0)).backward()
    for optimizer in optimizers:
        optimizer.step()
    compiled(*batch(kind, rank, 1)).backward()
    compiled.dump(f"{folder}/dump", all_ranks=True)


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def divided(rank: int, shape: tuple[int, int, int], stage: int, shard: str | None = None) -> list[str]:
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def given_to(index: int, step: int) -> torch.Tensor:
        return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + index))

    model = parallelize_module(small(), mesh[names[2]], PLAN)
    compiled = zcompile.compile(model, mesh=mesh[names[:2]], backend="eager", stage=stage, shard=shard)
    plain = small()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (compiled, plain)]
    data = shape[0] * shape[1]
    for step in range(STEPS):
        compiled(given_to(rank // shape[2], step)).square().mean().backward()
        for index in range(data):
            (plain(given_to(index, step)).square().mean() / data).backward()
        update(*optimizers)
    got = compiled.full_state_dict(rank0_only=False)
    return [name for name, want in plain.state_dict().items() if not torch.allclose(got[name], want, atol=1e-6)]
