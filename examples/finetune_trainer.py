"""Fine-tune a Hugging Face causal LM with the Trainer of Transformers, its state sharded by zcompile.

    torchrun --standalone --nproc-per-node 2 examples/finetune_trainer.py

The Trainer runs its `model_wrapped`, and leaves the wrapping to Accelerate only while that is its `model`. The two
share their parameters, so the Trainer's own optimizer holds the shards. Its checkpoints would hold those of one rank:
`save_strategy="no"`, and `compiled.save_checkpoint` where they are wanted.
Needs `pip install transformers accelerate`.
"""

from typing import Any

import torch
from finetune_hf import load_model, load_tokens, parser
from transformers import Trainer, TrainingArguments

import zcompile


class ShardedTrainer(Trainer):
    """A Trainer that evaluates and saves with the compiled model too."""

    model_wrapped: zcompile.CompiledModule

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(self.model_wrapped, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` reads."""
        whole = self.model_wrapped.full_state_dict()  # collective: on every rank
        if self.is_world_process_zero():
            self.model.save_pretrained(output_dir or self.args.output_dir, state_dict=whole)


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.manual_seed(0)
    model = load_model(options.model)
    tokens = load_tokens(options.model, options.data, options.context)
    windows = tokens[: len(tokens) // options.context * options.context].view(-1, options.context)
    examples = [{"input_ids": window, "labels": window} for window in windows]
    arguments = TrainingArguments(
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        max_steps=options.steps,
        learning_rate=options.lr,
        logging_steps=10,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    split = len(examples) - 8 * options.batch
    trainer = ShardedTrainer(model, arguments, train_dataset=examples[:split], eval_dataset=examples[split:])
    trainer.model_wrapped = zcompile.compile(model, stage=options.stage, backend=options.backend)
    trainer.train()
    trainer.evaluate()
    if options.save:
        trainer.save_model(str(options.save))


if __name__ == "__main__":
    main()
