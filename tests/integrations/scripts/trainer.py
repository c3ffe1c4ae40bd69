"""Train, evaluate, save, resume and generate with the Trainer of Transformers, on every rank of torchrun."""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
resume, lora = options.pop("resume", False), options.pop("lora", False)

torch.manual_seed(0)
sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=32, eos_token_id=None, **sizes))
if lora:
    from peft import LoraConfig, get_peft_model

    targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", **targets))
tokens = torch.randint(0, 61, (52, 12), generator=torch.Generator().manual_seed(1))
examples = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    **{"output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1, "save_steps": 3}
    | {"learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "report_to": "none", "seed": 5}
    | options
)
trainer = Trainer(model, arguments, train_dataset=examples[:44], eval_dataset=examples[44:])
trainer.train(resume_from_checkpoint=resume)
evaluated = trainer.evaluate()["eval_loss"]
trainer.save_model(str(folder / "last"))
texts = trainer.model.generate(tokens[:2, :4], max_new_tokens=5, do_sample=False).tolist()

history = [[log["step"], log["loss"], float(log["grad_norm"])] for log in trainer.state.log_history if "loss" in log]
if trainer.is_world_process_zero():
    result = {"history": history, "evaluated": evaluated, "texts": texts, "steps": trainer.state.global_step}
    (folder / "result.json").write_text(json.dumps(result))
