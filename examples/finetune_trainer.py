"""Fine-tune a Hugging Face causal LM with the Trainer of Transformers, its state sharded by zcompile.

    torchrun --standalone --nproc-per-node 2 examples/finetune_trainer.py

Everything is the Trainer's: arguments, logs, evaluation, checkpoints, which also resume on another number of
processes with `--resume`. Needs `pip install 'zcompile[transformers]'`.
"""

import torch
from finetune_hf import load_model, load_tokens, parser
from transformers import TrainingArguments

from zcompile.integrations.transformers import Trainer


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", default="finetuned", help="where checkpoints go")
    options.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    options = options.parse_args()
    torch.manual_seed(0)
    model = load_model(options.model)
    tokens = load_tokens(options.model, options.data, options.context)
    windows = tokens[: len(tokens) // options.context * options.context].view(-1, options.context)
    examples = [{"input_ids": window, "labels": window} for window in windows]
    arguments = TrainingArguments(
        output_dir=options.folder,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        max_steps=options.steps,
        learning_rate=options.lr,
        logging_steps=10,
        logging_first_step=True,
        save_steps=max(options.steps // 2, 1),
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    split = len(examples) - 8 * options.batch
    trainer = Trainer(
        model,
        arguments,
        train_dataset=examples[:split],
        eval_dataset=examples[split:],
        zcompile={"stage": options.stage, "backend": options.backend},
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.evaluate()
    if options.save:
        trainer.save_model(str(options.save))


if __name__ == "__main__":
    main()
