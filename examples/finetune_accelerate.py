"""Fine-tune a Hugging Face causal LM with Accelerate's loop, its state sharded by zcompile.

    torchrun --standalone --nproc-per-node 2 examples/finetune_accelerate.py

`accelerate launch` starts it as well. Needs `pip install 'zcompile[transformers]'`.
"""

import torch
from finetune_hf import load_model, load_tokens, parser
from torch.utils.data import DataLoader

from zcompile.integrations.accelerate import Accelerator


def main() -> None:
    options = parser(__doc__).parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else it takes ranks without a GPU for programs of their own
        step_scheduler_with_optimizer=False,
        zcompile={"stage": options.stage, "backend": options.backend},
    )
    torch.manual_seed(0)
    model = load_model(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)
    tokens = load_tokens(options.model, options.data, options.context)
    windows = tokens[: len(tokens) // options.context * options.context].view(-1, options.context)
    loader = DataLoader(windows, batch_size=options.batch, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for step, batch in zip(range(1, options.steps + 1), loader, strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        if step % 10 == 0 or step == 1:
            accelerator.print(f"step {step:4}  loss {mean:.3f}", flush=True)
    if options.save:
        accelerator.save_model(model, options.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
