"""Train, validate, save, resume and predict with Lightning's Trainer, on every rank of torchrun."""

import json
import os
import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from lightning.pytorch.strategies import DDPStrategy

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
resume, world = options.pop("resume", False), int(os.environ["WORLD_SIZE"])


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 10))
        self.scale = nn.Parameter(torch.ones(10))
        self.history: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x)) * self.scale

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        (x,) = batch
        code = self.encoder(x)
        loss = F.mse_loss(self.decoder(code) * self.scale, x) + 0.01 * code.square().mean()
        self.log("loss", loss, sync_dist=True)
        self.history.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("evaluated", F.mse_loss(self(batch[0]), batch[0]), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def loader() -> torch.utils.data.DataLoader:
    rows = torch.randn(24, 10, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)


torch.manual_seed(0)
model = Autoencoder()
strategy = DDPStrategy()
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
saved = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
trainer = lightning.Trainer(
    **{"accelerator": "cpu", "devices": world, "strategy": strategy, "max_epochs": 2, "callbacks": [saved]}
    | {"gradient_clip_val": 0.5, "use_distributed_sampler": True}
    | quiet
    | options
)
trainer.fit(model, loader(), loader(), ckpt_path=str(folder / "epoch=0.ckpt") if resume else None)
evaluated = trainer.callback_metrics["evaluated"].item()
predicted = torch.stack(trainer.predict(model, loader())).sum().item()
trainer.save_checkpoint(folder / "last.ckpt")
if trainer.is_global_zero:
    result = {"history": model.history, "evaluated": evaluated, "predicted": predicted}
    (folder / "result.json").write_text(json.dumps(result))
