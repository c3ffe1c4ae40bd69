"""What an Accelerator that shards refuses, on every rank of torchrun."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from zcompile import OptionError
from zcompile.integrations.accelerate import Accelerator, compile_options

folder = Path(sys.argv[1])
with pytest.raises(OptionError, match="stag: is not an option"):
    Accelerator(cpu=True, zcompile={"stag": 3})
with pytest.raises(OptionError, match="mixed_precision: is 'bf16', and dtype= of zcompile"):
    compile_options({"dtype": torch.float16}, "bf16")
accelerator = Accelerator(cpu=True, zcompile={"backend": "eager"})


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters())


model, optimizer = pair()
model = accelerator.prepare(model)
with pytest.raises(OptionError, match="whose model was prepared in an earlier call"):
    accelerator.prepare(optimizer)
one, other = nn.Linear(4, 4), nn.Linear(4, 1)
joint = torch.optim.AdamW([*one.parameters(), *other.parameters()])
one, other, joint = accelerator.prepare(one, other, joint)
other(one(torch.ones(2, 4))).sum().backward()
joint.step()
with pytest.raises(OptionError, match="finds a shared optimizer"):
    accelerator.save_state(str(folder / "joint"))
assert not (folder / "joint").exists(), "nothing is written"
accelerator.free_memory()
model, optimizer = accelerator.prepare(*pair())
handle = accelerator.register_save_state_pre_hook(lambda models, weights, place: None)
with pytest.raises(OptionError, match="finds hooks that save or load models"):
    accelerator.save_state(str(folder / "hooked"))
handle.remove()
accelerator.save_state(str(folder / "plain"))
accelerator.load_state(str(folder / "plain"))
(folder / "result.json").write_text(json.dumps({"done": True}))
