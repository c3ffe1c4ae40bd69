"""Fine-tune a Hugging Face causal LM on a text, its state sharded over ranks by zcompile.

    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py                      a small Llama, from its config
    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py --model NAME         a pretrained model

Needs `pip install transformers`. Without --model nothing is downloaded: the model reads bytes. The text is Python's own
library, or that of --data.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from ranks import Ranks, joined
from text import load_corpus
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import zcompile

WITHOUT_CACHE = {"use_cache": False}  # of keys and values, which generation reads


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", metavar="NAME", help="a pretrained causal LM: a folder or a name on the hub")
    made.add_argument("--data", type=Path, metavar="PATH", help="a text file or a folder of them")
    made.add_argument("--steps", type=int, default=30)
    made.add_argument("--batch", type=int, default=4, help="sequences in a step on each rank (4)")
    made.add_argument("--context", type=int, default=128, help="tokens in a sequence (128)")
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--save", type=Path, metavar="DIR", help="where to write the model")
    made.add_argument("--stage", type=int, choices=range(4), default=3)
    made.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    return made


def load_model(name: str | None) -> nn.Module:
    """The pretrained model of that name, or a small Llama over bytes with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **WITHOUT_CACHE)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        **WITHOUT_CACHE,
    )
    return LlamaForCausalLM(config)


def load_tokens(name: str | None, data: Path | None, context: int) -> Tensor:
    """The text as the model reads it: tokens of a pretrained model's tokenizer, or bytes."""
    text = load_corpus(data, context).train
    if name is None:
        return text.long()
    decoded = bytes(text.tolist()).decode("utf-8", errors="replace")
    return torch.tensor(AutoTokenizer.from_pretrained(name)(decoded)["input_ids"])


def batches(tokens: Tensor, size: int, context: int, seed: int) -> Iterator[Tensor]:
    """Endless windows from random places of the text, (size, context)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - context, (size, 1), generator=generator)
        yield tokens[starts + torch.arange(context)]


def train(options: argparse.Namespace, ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = load_model(options.model).to(ranks.device)
    compiled = zcompile.compile(model, stage=options.stage, backend=options.backend)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)
    tokens = load_tokens(options.model, options.data, options.context)
    stream = batches(tokens, options.batch, options.context, seed=ranks.rank)
    for step, batch in zip(range(1, options.steps + 1), stream, strict=False):
        batch = batch.to(ranks.device)
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = ranks.mean(loss)
        if ranks.first and (step % 10 == 0 or step == 1):
            print(f"step {step:4}  loss {mean:.3f}", flush=True)
    if options.save:
        save(compiled, options.save, ranks)


def save(compiled: zcompile.CompiledModule, folder: Path, ranks: Ranks) -> None:
    """Write what `from_pretrained` reads: the parameters, gathered one at a time, and the config."""
    whole = {}
    for name, value in compiled.state_dict().items():
        gathered = value.full_tensor() if isinstance(value, DTensor) else value  # collective: on every rank
        if ranks.first:
            whole[name] = gathered.cpu()
    if ranks.first:
        compiled.save_pretrained(folder, state_dict=whole)


if __name__ == "__main__":
    with joined(None) as found:
        train(parser(__doc__).parse_args(), found)
