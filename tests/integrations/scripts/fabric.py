"""Train, save, resume and generate with Lightning's Fabric, on every rank of torchrun."""

import json
import os
import sys
from pathlib import Path

import torch
from lightning import Fabric
from transformers import LlamaConfig, LlamaForCausalLM
from lightning.fabric.strategies import DDPStrategy

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
resume, accumulated, world = options.get("resume", False), options.get("accumulate", 1), int(os.environ["WORLD_SIZE"])

fabric = Fabric(accelerator="cpu", devices=world, strategy=DDPStrategy())
fabric.launch()
torch.manual_seed(0)
sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=32, eos_token_id=None, **sizes))
tokens = torch.randint(0, 61, (48, 12), generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(tokens, batch_size=2))

history, state = [], {"model": model, "optimizer": optimizer, "done": 0}
if resume:
    fabric.load(folder / "half.ckpt", state)
for number, batch in enumerate(loader):
    if number < state["done"]:
        continue
    with fabric.no_backward_sync(model, enabled=(number + 1) % accumulated != 0):
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
    if (number + 1) % accumulated == 0:
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    history.append(fabric.all_reduce(loss.detach()).item())
    if number == 3 and not resume:
        fabric.save(folder / "half.ckpt", {**state, "done": 4})

texts = model.module.generate(tokens[:2, :4], max_new_tokens=5, do_sample=False).tolist()
if fabric.is_global_zero:
    (folder / "result.json").write_text(json.dumps({"history": history, "texts": texts}))
