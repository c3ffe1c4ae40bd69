"""Models of Transformers as they are, in chunks: the same training as without, in every stage."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zcompile
from tests.compare import full, gradients
from tests.threads import Threads

pytest.importorskip("transformers", reason="needs transformers: make test-integrations")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

from benchmarks.families.transformers_models import DECODER, EXPERTS, SIZES, SMALL_GPT, UNDROPPED, WIDTH, of  # noqa: E402

WORDS, LENGTH, BATCH, ROWS = 256, 12, 4, 16
Batch = dict[str, Tensor]
WIDE: dict[str, Any] = {**DECODER, "vocab_size": WORDS}
UNDROPPED_GPT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 3.0}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BERT: dict[str, Any] = {**SIZES, "vocab_size": WORDS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    options: dict[str, Any] = {**SMALL_GPT, "bos_token_id": 1, "eos_token_id": 2, **UNDROPPED_GPT}
    model = of("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, **options)()
    model.loss_type = "ForCausalLM"  # else Transformers warns that it takes this, which breaks the graph
    return model


class Distilled(nn.Module):
    """A decoder that learns what a frozen one says of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (of("LlamaForCausalLM", "LlamaConfig", **WIDE)() for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        student, teacher = (model(input_ids=input_ids).logits for model in (self.student, self.teacher))
        return F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean")


class Preferred(nn.Module):
    """DPO: log-probabilities of chosen and rejected answers, against those of a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = (of("Qwen3ForCausalLM", "Qwen3Config", **WIDE, head_dim=8)() for _ in range(2))
        self.reference.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        wanted = F.pad(labels[:, 1:], (0, 1), value=-100)  # logits that are cut would leave out rows

        def of_answers(model: nn.Module) -> Tensor:
            each = F.log_softmax(model(input_ids=input_ids).logits, -1).gather(-1, wanted.clamp(min=0).unsqueeze(-1))
            return (each.squeeze(-1) * (wanted >= 0)).sum(-1)

        chosen, rejected = (of_answers(self.policy) - of_answers(self.reference)).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": of("LlamaForCausalLM", "LlamaConfig", **WIDE),
    "mistral": of("MistralForCausalLM", "MistralConfig", **WIDE, sliding_window=8),
    "qwen3, tied": of("Qwen3ForCausalLM", "Qwen3Config", **WIDE, head_dim=8, tie_word_embeddings=True),
    "gemma2": of("Gemma2ForCausalLM", "Gemma2Config", **WIDE, **GEMMA),
    "phi3": of("Phi3ForCausalLM", "Phi3Config", **WIDE),
    "opt": of("OPTForCausalLM", "OPTConfig", **{**SIZES, "vocab_size": WORDS}, **UNDROPPED, ffn_dim=48),
    "gpt_neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", **{**SIZES, "vocab_size": WORDS}),
    "mixtral": of("MixtralForCausalLM", "MixtralConfig", **WIDE, num_local_experts=4, **EXPERTS),
    "t5": of(
        "T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, pad_token_id=0, **T5, decoder_start_token_id=0
    ),
    "bert": of("BertForMaskedLM", "BertConfig", **BERT),
    "distillation": Distilled,
    "dpo": Preferred,
}


def batch(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
    labels = words.clone()
    labels[0, :3] = -100  # as of padding
    return {"input_ids": words, "labels": labels}


def loss_of(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    result = model(input_ids=input_ids, labels=labels)
    return result if isinstance(result, Tensor) else result.loss


def trained(model: nn.Module, rank: int, stage: int, chunk: int | None) -> tuple[list[float], dict[str, Tensor], int]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    step = zcompile.train_step(model, loss_of, optimizer, stage=stage, backend="eager", chunk=chunk)
    losses = [float(step(**batch(rank, number))) for number in range(3)]
    (program,) = (step.program for step in step._engine.runtime.steps)
    loops = sum(region.rows is not None for region in program.regions.values())
    return losses, {name: full(param.detach()).clone() for name, param in model.named_parameters()}, loops


def against_whole(rank: int, name: str, stage: int) -> str:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = MODELS[name]().train()
    plain = copy.deepcopy(model)
    losses, parameters, loops = trained(model, rank, stage, ROWS)
    wanted, expected, none = trained(plain, rank, stage, None)
    if none or not loops:
        return f"{loops} loops in chunks, {none} without"
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-6)
    return ""


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_in_chunks_as_without(threads: Threads, name: str, stage: int) -> None:
    assert threads.run(2, against_whole, name, stage) == ["", ""]


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bert"])
def test_a_loop_reads_the_loss_of_a_model_that_returns_logits(without_group: None, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    plain = copy.deepcopy(model)
    compiled = zcompile.compile(model, backend="eager", chunk=ROWS)
    result, expected = compiled(**batch(0, 0)), plain(**batch(0, 0))
    for found in (result, expected):
        found.loss.backward()
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-4, atol=1e-6)
    assert "is computed for" in compiled.explain()
    with pytest.raises(zcompile.ResultError, match="was not kept"):
        result.logits.argmax(-1)
