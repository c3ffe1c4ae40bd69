"""Train with Ray Train on two workers, and give losses, resumed from a checkpoint of all of them."""

import json
import sys
from pathlib import Path

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from torch import nn

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])


def train_loop(config: dict) -> None:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model = ray.train.torch.prepare_model(model)
    losses = []
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        ray.train.report({"loss": losses[-1]})
    if rank == 0:
        (Path(config["folder"]) / "result.json").write_text(json.dumps({"history": losses}))


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
trainer = ray.train.torch.TorchTrainer(
    train_loop,
    train_loop_config={"folder": str(folder.absolute())},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(storage_path=str(folder.absolute() / "ray")),
)
trainer.fit()
