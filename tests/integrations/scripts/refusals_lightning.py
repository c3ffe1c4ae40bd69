"""What strategies refuse, and modules that another Trainer has sharded, on every rank of torchrun."""

import json
import sys
from pathlib import Path

import lightning
import pytest
import torch
from torch import nn

from zcompile import OptionError
from zcompile.integrations.lightning import ShardedFabricStrategy, ShardedStrategy

folder = Path(sys.argv[1])
for strategy, wrong in ((ShardedStrategy, "precision"), (ShardedFabricStrategy, "find_unused_parameters")):
    with pytest.raises(OptionError, match=f"{wrong}: is not an option of zcompile.compile"):
        strategy(**{wrong: True})


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("evaluated", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer() -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "enable_checkpointing": False}
    return lightning.Trainer(**options, **quiet, strategy=ShardedStrategy(backend="eager"))


torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
net = Net()
trainer().fit(net, data)
before = net.net[0].weight.full_tensor().clone()
again = trainer()
again.validate(net, data, verbose=False)
again.fit(net, data)
assert not torch.equal(before, net.net[0].weight.full_tensor()), "another Trainer trains the same shards"
(folder / "result.json").write_text(json.dumps({"done": True}))
