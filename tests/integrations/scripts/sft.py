"""Fine-tune with trl's SFTTrainer: train, evaluate, save and resume, on every rank of torchrun."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig
from trl import SFTTrainer

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
resume = options.pop("resume", False)

words = ["<pad>", "<eos>", *(f"w{number}" for number in range(59))]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=64, pad_token_id=0, **sizes))
picked = torch.randint(0, 59, (52, 12), generator=torch.Generator().manual_seed(1)).tolist()
texts = Dataset.from_list([{"text": " ".join(f"w{n}" for n in row[: 5 + i % 8])} for i, row in enumerate(picked)])
arguments = SFTConfig(
    **{"output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1, "save_steps": 3}
    | {"learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "report_to": "none", "seed": 5, "bf16": False}
    | options
)
trainer = SFTTrainer(
    model, arguments, train_dataset=texts.select(range(44)), eval_dataset=texts.select(range(44, 52)),
    processing_class=tokenizer,
)  # fmt: skip
trainer.train(resume_from_checkpoint=resume)
evaluated = trainer.evaluate()["eval_loss"]
trainer.save_model(str(folder / "last"))
history = [[log["step"], log["loss"], float(log["grad_norm"])] for log in trainer.state.log_history if "loss" in log]
if trainer.is_world_process_zero():
    (folder / "result.json").write_text(json.dumps({"history": history, "evaluated": evaluated}))
