"""Preferences with trl's DPOTrainer: train, evaluate, save and resume, on every rank of torchrun."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig
from trl import DPOTrainer

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
resume = options.pop("resume", False)

words = ["<pad>", "<eos>", *(f"w{number}" for number in range(59))]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=64, pad_token_id=0, **sizes))


def text(numbers: list[int]) -> str:
    return " ".join(f"w{number}" for number in numbers)


picked = torch.randint(0, 59, (52, 18), generator=torch.Generator().manual_seed(1)).tolist()
pairs = Dataset.from_list(
    [
        {
            "prompt": text(row[:4]),
            "chosen": " " + text(row[4 : 7 + i % 4]),
            "rejected": " " + text(row[11 : 13 + i % 5]),
        }
        for i, row in enumerate(picked)
    ]
)
arguments = DPOConfig(
    **{"output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1, "save_steps": 3}
    | {"learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "report_to": "none", "seed": 5, "bf16": False}
    | options
)
trainer = DPOTrainer(
    llama(), llama(), args=arguments, train_dataset=pairs.select(range(44)), eval_dataset=pairs.select(range(44, 52)),
    processing_class=tokenizer,
)  # fmt: skip
trainer.train(resume_from_checkpoint=resume)
evaluated = trainer.evaluate()["eval_loss"]
trainer.save_model(str(folder / "last"))
history = [[log["step"], log["loss"], float(log["grad_norm"])] for log in trainer.state.log_history if "loss" in log]
if trainer.is_world_process_zero():
    (folder / "result.json").write_text(json.dumps({"history": history, "evaluated": evaluated}))
