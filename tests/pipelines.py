"""Models, batches and a reference that shares no code with pipelines, for tests of pipelines."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import zcompile
from tests.models import GPT
from zcompile.pipelining.step import PipelinedStep

MICROBATCHES = 4
SCALE = 1.0


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3), nn.Linear(3, width)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Skips(nn.Module):
    """Odd sizes, scalars, a mask, values that cross several cuts, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.down = nn.ModuleList(Residual(7) for _ in range(3))
        self.up = nn.ModuleList(Residual(7) for _ in range(3))
        self.up[1].gain.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = 1.0
        self.factors = [1.0, 1.0]
        self.last = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(x.shape[1])[:, None] > 1).float()
        h, kept = self.first(x), []
        for block in self.down:
            h = block(h) * mask
            kept.append(h)
        for block in self.up:
            h = block(h + kept.pop().transpose(1, 2).transpose(1, 2)) * mask
        result: torch.Tensor = self.last(h) * self.scale * torch.tensor(self.factors)
        return result


class Tied(Skips):
    """Two layers far apart have one matrix, and a third one its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.up[2].up.weight = self.down[0].up.weight
        self.up[2].down = Transposed(self.down[0].up.weight)


class Normed(nn.Module):
    """Batch normalization, whose statistics each stage keeps, a counter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv1d(i, o, 1), nn.BatchNorm1d(o)) for i, o in ((4, 6), (6, 6)))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6)) for _ in range(3))
        self.last = nn.Conv1d(6, 4, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("weights", torch.rand(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        self.calls.add_(1)
        for block in self.blocks:
            x = x + torch.relu(block(x)) * self.weights
        result: torch.Tensor = self.last(x)[..., :2]
        return result


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "norms":
        return Normed()
    if "gpt" not in name:
        return Tied() if "tied" in name else Skips()
    model = GPT(layers=3, width=16, heads=2)
    if "tied" in name:
        model.head.weight = model.tokens.weight
    return model


UNITS: dict[str, Any] = {"norms": {"units": ["layers.*", "blocks.*", "last"]}}
"""Small layers next to each other are else one unit."""
APART = {"gpt tied": {"head": "tokens.weight"}, "skips tied": {"up.2": "down.0.up.weight"}}
"""What of a model is in another stage than the one that keeps a parameter that it reads, too."""


def untied(name: str, model: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy whose later stages have parameters of their own for those that they share, by the names of these."""
    copied, twins = copy.deepcopy(model) if name in APART else model, dict[str, nn.Parameter]()
    for path, shared in APART.get(name, {}).items():
        of, twin = copied.get_parameter(shared), nn.Parameter(copied.get_parameter(shared).detach().clone())
        twins[shared] = twin
        for module in copied.get_submodule(path).modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if parameter is of:
                    setattr(module, key, twin)
    return copied, twins


def batch_of(name: str, rank: int, step: int, rows: int = 2 * MICROBATCHES) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * rank + step)
    if "gpt" in name:
        tokens = torch.randint(0, 64, (rows, 16), generator=source)
        return tokens, tokens.roll(1, 1)
    return torch.randn(rows, 4, 5, generator=source), torch.randn(rows, 4, 2, generator=source)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(model, GPT):
        loss: torch.Tensor = model(x, y)
        return loss
    return ((model(x) - y) ** 2).mean() * SCALE


def mesh_of(pipeline: int, data: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pipeline, data), mesh_dim_names=("pp", "dp"))


class Reference:
    """Plain PyTorch on one device: the micro-batches of all data-parallel ranks, summed in the documented order."""

    def __init__(self, name: str, stage: int, data: int, replicas: int = 1) -> None:
        self.name, self.stage, self.data, self.model, self.replicas = name, stage, data, model_of(name), replicas
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def gradients(self, rank: int, step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], torch.Tensor]:
        """Of each micro-batch; of what other stages read of parameters, too; and the mean loss."""
        found, others, total = [], [], torch.zeros(())
        model, twins = untied(self.name, self.model)
        parts = [one.chunk(MICROBATCHES) for one in batch_of(self.name, rank, step)]
        for x, y in zip(*parts, strict=True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=next(model.parameters()).dtype is torch.bfloat16):
                loss = loss_of(model, x, y)
            (loss / MICROBATCHES).backward()
            named = {name: model.get_parameter(name) for name, _ in self.model.named_parameters()}
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in named.items()})
            others.append({name: p.grad.clone() for name, p in twins.items() if p.grad is not None})
            total = total + loss.detach()
        return found, others, total / MICROBATCHES

    def train(self, step: int) -> list[torch.Tensor]:
        """Take a step; gives the losses of all data-parallel ranks."""
        ranks = [self.gradients(rank, step) for rank in range(self.data)]
        for name, parameter in self.model.named_parameters():
            # What other stages compute is added up there, and comes behind all micro-batches.
            rows = [[one[name] for one in found] for found, _, _ in ranks]
            if name in ranks[0][1][0]:
                for row, (_, others, _) in zip(rows, ranks, strict=True):
                    row.append(in_order([one[name] for one in others]))
            if rows[0][0] is None:
                parameter.grad = None
            else:
                size = len(rows) // self.replicas
                parameter.grad = mean([self.inside(rows[at : at + size]) for at in range(0, len(rows), size)])
        self.optimizer.step()
        return [loss for *_, loss in ranks]

    def inside(self, rows: list[list[Any]]) -> Any:
        """Of the ranks of a replica: sums over micro-batches, averaged, or averages, summed over micro-batches."""
        if self.stage < 2:
            return mean([in_order(row) for row in rows])
        return in_order([mean(list(column)) for column in zip(*rows, strict=True)])


def in_order(tensors: list[Any]) -> Any:
    total = tensors[0]
    for one in tensors[1:]:
        total = total + one
    return total


def mean(tensors: list[Any]) -> Any:
    return in_order(tensors) / len(tensors)


def trains(
    rank: int,
    name: str,
    pipeline: int,
    data: int,
    schedule: str,
    stage: int,
    options: dict[str, Any],
    replicas: int | None = None,
) -> list[str]:
    """What is not as in the reference after three steps."""
    if replicas is None:
        mesh = mesh_of(pipeline, data)
    else:
        sizes, names = (pipeline, replicas, data // replicas), ("pp", "dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    one_level = stage == 0 or options.get("shard") == "flat"
    reference, model = Reference(name, stage, data, 1 if one_level else replicas or 1), model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = {**UNITS.get(name, {}), **options}
    step = zcompile.train_step(
        model,
        loss_of,
        optimizer,
        mesh=mesh,
        schedule=schedule,
        microbatches=MICROBATCHES,
        stage=stage,
        backend="eager",
        **options,
    )
    assert isinstance(step, PipelinedStep)
    wrong, own = [], rank % data
    for number in range(3):
        loss, losses = step(*batch_of(name, own, number)), reference.train(number)
        if not torch.equal(loss, losses[own]):
            wrong.append(f"the loss of step {number}: {loss} and {losses[own]}")
    wanted = dict(reference.model.state_dict())
    kept = {n: p for n, p in model.named_parameters() if not p.is_meta}
    # Data-parallel ranks have statistics of their own batches; the reference those of all, one after the other.
    buffers = {n: b for n, b in model.named_buffers() if not b.is_meta and n in wanted and data == 1}
    wrong += [f"{n}: {b} and {wanted[n]}" for n, b in buffers.items() if not torch.equal(b, wanted[n])]
    for parameter_name, parameter in kept.items():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(full, wanted[parameter_name]):
            wrong.append(f"{parameter_name}: {(full - wanted[parameter_name]).abs().max()}")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(p) for p in held} != {id(p) for p in kept.values()}:
        wrong.append("the optimizer holds other parameters than this rank's")
    return [*wrong, *(["no parameters"] if not kept else [])]
