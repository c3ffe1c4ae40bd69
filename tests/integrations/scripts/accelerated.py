"""Train, evaluate, save, resume and generate with Accelerate, on every rank of `accelerate launch`."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
accumulated, resume = options.get("accumulate", 1), options.get("resume", False)
precision, checked = options.get("precision", "no"), options.get("clip", 1.0)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, mixed_precision=precision)
torch.manual_seed(0)
sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=32, eos_token_id=None, **sizes))
tokens = torch.randint(0, 61, (48, 12), generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
loader = torch.utils.data.DataLoader(tokens, batch_size=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

history, done = [], 0
if resume:
    accelerator.load_state(str(folder / "half"))
    done = 4 // accelerator.num_processes * 2
for number, batch in enumerate(accelerator.skip_first_batches(loader, done)):
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), checked) if accelerator.sync_gradients else 0.0
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    history.append([accelerator.reduce(loss.detach(), "mean").item(), float(norm), schedule.get_last_lr()[0]])
    if number + 1 == 4 // accelerator.num_processes * 2 and not resume:
        accelerator.save_state(str(folder / "half"))

model.eval()
with torch.no_grad():
    evaluated = [accelerator.gather_for_metrics(model(input_ids=batch).logits).sum().item() for batch in loader][:2]
texts = accelerator.unwrap_model(model).generate(tokens[:2, :4], max_new_tokens=5, do_sample=False).tolist()
whole = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    folder / "last", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=whole
)
accelerator.save_model(model, str(folder / "weights"))
if accelerator.is_main_process:
    result = {"history": history, "evaluated": evaluated, "texts": texts}
    (folder / "result.json").write_text(json.dumps(result))
accelerator.end_training()
