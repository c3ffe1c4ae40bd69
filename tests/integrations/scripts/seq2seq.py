"""Train a tiny T5 with Seq2SeqTrainer, which generates while it evaluates, on every rank of torchrun."""

import json
import sys
from pathlib import Path

import torch
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration
from transformers import Seq2SeqTrainer

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])

torch.manual_seed(0)
sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
model = T5ForConditionalGeneration(T5Config(vocab_size=31, decoder_start_token_id=0, **sizes))
tokens = torch.randint(2, 31, (28, 9), generator=torch.Generator().manual_seed(1))
examples = [{"input_ids": row, "labels": row[: 3 + i % 5].tolist() + [1] * (6 - i % 5)} for i, row in enumerate(tokens)]
arguments = Seq2SeqTrainingArguments(
    **{"output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1}
    | {"learning_rate": 0.1, "use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    | {"predict_with_generate": True, "generation_max_length": 12, "per_device_eval_batch_size": 1}
    | options
)
data = {"train_dataset": examples[:20], "eval_dataset": examples[20:]}
trainer = Seq2SeqTrainer(model, arguments, **data)
trainer.train()
predicted = trainer.predict(examples[20:])
history = [[log["step"], log["loss"], float(log["grad_norm"])] for log in trainer.state.log_history if "loss" in log]
if trainer.is_world_process_zero():
    result = {"history": history, "evaluated": predicted.metrics["test_loss"], "texts": predicted.predictions.tolist()}
    (folder / "result.json").write_text(json.dumps(result))
