"""What a Trainer that shards refuses, and a model that was evaluated before, on every rank of torchrun."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from zcompile import OptionError
from zcompile.integrations.transformers import Trainer

folder = Path(sys.argv[1])
sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
rows = torch.randint(0, 61, (24, 12), generator=torch.Generator().manual_seed(1))
examples = [{"input_ids": row, "labels": row} for row in rows]


def trainer(model: LlamaForCausalLM | None = None, **options: object) -> Trainer:
    torch.manual_seed(0)
    model = model or LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=32, **sizes))
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "max_steps": 2}
    arguments = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=2, **quiet)
    return Trainer(model, arguments, train_dataset=examples, eval_dataset=examples[:8], zcompile=options)


with pytest.raises(OptionError, match="stagee: is not an option"):
    trainer(stagee=3)
first, second = trainer(backend="eager"), trainer(backend="eager")
first.evaluate()
first.train()
second.train()
ours, theirs = (one.model.lm_head.weight.full_tensor() for one in (first, second))
assert torch.equal(ours, theirs), "a model that was evaluated before is trained as one that was not"
with pytest.raises(OptionError, match="is compiled already, with"):
    trainer(first.model, stage=1, backend="eager").train()
third = trainer(first.model, backend="eager")
third.train()
assert not torch.equal(ours, first.model.lm_head.weight.full_tensor()), "another Trainer trains the same shards"
(folder / "result.json").write_text(json.dumps({"done": True}))
