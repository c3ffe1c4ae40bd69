"""Models of Transformers from small configs: decoders, encoders, both, images, sound, and several of these at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from benchmarks.families.family import ROWS, Batch, Family, drawn, integers, normal, single

VOCABULARY, WIDTH, LENGTH, SIDE, CLASSES = 61, 32, 12, 32, 7
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
UNDROPPED: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
"""For those that drop by a function, in which `Family.models` finds nothing to switch off."""
IMAGES: dict[str, Any] = {"image_size": SIDE, "patch_size": 8, "num_channels": 3}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def by_trainer(
    name: str, make: Callable[[], nn.Module], batch: Callable[[torch.Generator], Batch], library: str = "transformers"
) -> Family:
    """A family whose model gives its own loss."""
    return dataclasses.replace(single(name, library, make, batch, own_loss), trainer=True)


def of(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """What makes a model of a class from a config, both by name."""
    return lambda: getattr(hf, kind)(getattr(hf, config)(**options))


llama = of("LlamaForCausalLM", "LlamaConfig", **DECODER)


# -- batches --------------------------------------------------------------------------------------------------------

words, pixels, labels = integers(3, VOCABULARY, ROWS, LENGTH), normal(ROWS, 3, SIDE, SIDE), integers(0, CLASSES, ROWS)


def tokens(generator: torch.Generator) -> Batch:
    given = words(generator)
    return {"input_ids": given, "labels": given}


def masked(generator: torch.Generator) -> Batch:
    return {**tokens(generator), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)}


pairs = drawn(input_ids=words, labels=integers(3, VOCABULARY, ROWS, LENGTH - 3))
classified = drawn(input_ids=words, labels=labels)
images = drawn(pixel_values=pixels, labels=labels)
segmented = drawn(pixel_values=pixels, labels=integers(0, CLASSES, ROWS, SIDE, SIDE))
image_texts = drawn(input_ids=words, pixel_values=pixels, return_loss=lambda _: torch.ones((), dtype=torch.bool))
spectrograms = drawn(input_features=normal(ROWS, 8, 32), labels=words)
waves = drawn(input_values=normal(ROWS, 400), labels=integers(1, VOCABULARY, ROWS, 5))


def questions(generator: torch.Generator) -> Batch:
    """Texts that begin with the places of an image's patches."""
    given = torch.randint(3, VOCABULARY - 1, (ROWS, LENGTH + 16), generator=generator)
    given[:, 1:17] = VOCABULARY - 1
    return {
        "input_ids": given,
        "labels": given,
        "pixel_values": torch.randn(ROWS, 3, SIDE, SIDE, generator=generator),
        "attention_mask": torch.ones_like(given),
    }


# -- families -------------------------------------------------------------------------------------------------------

WAVE: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}
SMALL_GPT: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}
T5_SIZES: dict[str, Any] = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
BART: dict[str, Any] = {
    **UNDROPPED,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
}
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}


def clip() -> nn.Module:
    config = hf.CLIPConfig(
        text_config={**SIZES, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**SIZES, **IMAGES},
        projection_dim=16,
    )
    return hf.CLIPModel(config)


def llava() -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**{**SIZES, **IMAGES}),
        text_config=hf.LlamaConfig(**DECODER),
        image_token_id=VOCABULARY - 1,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config)


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": of("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, **SMALL_GPT, bos_token_id=1, eos_token_id=2),
    "llama": llama,
    "mistral": of("MistralForCausalLM", "MistralConfig", **DECODER, sliding_window=8),
    "qwen2": of("Qwen2ForCausalLM", "Qwen2Config", **DECODER),
    "qwen3": of("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=8, tie_word_embeddings=True),
    "gemma2": of("Gemma2ForCausalLM", "Gemma2Config", **DECODER, head_dim=8, sliding_window=8),
    "phi3": of("Phi3ForCausalLM", "Phi3Config", **DECODER),
    "opt": of("OPTForCausalLM", "OPTConfig", **SIZES, **UNDROPPED, ffn_dim=48, word_embed_proj_dim=WIDTH),
    "bloom": of("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4),
    "gpt_neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES),
    "mixtral": of("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4, **EXPERTS),
    "qwen3_moe": of(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **DECODER,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=16,
        **EXPERTS,
    ),
    "deepseek_v3": of("DeepseekV3ForCausalLM", "DeepseekV3Config", **{**DECODER, "num_key_value_heads": 4}, **DEEPSEEK),
    "mamba": of("MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2),
    "rwkv": of(
        "RwkvForCausalLM",
        "RwkvConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        context_length=32,
    ),
}
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "bert": of("BertForMaskedLM", "BertConfig", **SIZES, **QUIET),
    "roberta": of("RobertaForMaskedLM", "RobertaConfig", **SIZES, **QUIET),
    "albert": of("AlbertForMaskedLM", "AlbertConfig", **SIZES, **QUIET, embedding_size=16),
    "deberta_v2": of("DebertaV2ForMaskedLM", "DebertaV2Config", **SIZES, **QUIET, relative_attention=True),
}
CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "distilbert": of(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        **UNDROPPED,
        vocab_size=VOCABULARY,
        dim=WIDTH,
        hidden_dim=48,
        n_layers=2,
        n_heads=4,
        num_labels=CLASSES,
    ),
    "electra": of(
        "ElectraForSequenceClassification", "ElectraConfig", **SIZES, **QUIET, embedding_size=16, num_labels=CLASSES
    ),
}
IMAGE_CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "vit": of("ViTForImageClassification", "ViTConfig", **{**SIZES, **QUIET, **IMAGES}, num_labels=CLASSES),
    "convnext": of(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=(8, 16), depths=(1, 1), num_stages=2,
        num_labels=CLASSES,
    ),
}  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    *(by_trainer(name, make, tokens) for name, make in DECODERS.items()),
    *(by_trainer(name, make, masked) for name, make in ENCODERS.items()),
    *(by_trainer(name, make, classified) for name, make in CLASSIFIERS.items()),
    *(by_trainer(name, make, images) for name, make in IMAGE_CLASSIFIERS.items()),
    by_trainer(
        "t5",
        of("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, **T5_SIZES, decoder_start_token_id=0),
        pairs,
    ),
    by_trainer("bart", of("BartForConditionalGeneration", "BartConfig", **BART), pairs),
    by_trainer(
        "segformer",
        of(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            num_encoder_blocks=2,
            depths=(1, 1),
            sr_ratios=(2, 1),
            hidden_sizes=(8, 16),
            patch_sizes=(3, 3),
            strides=(2, 2),
            num_attention_heads=(1, 2),
            mlp_ratios=(2, 2),
            decoder_hidden_size=16,
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        segmented,
    ),
    by_trainer(
        "whisper",
        of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **BART,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        spectrograms,
    ),
    by_trainer("wav2vec2", of("Wav2Vec2ForCTC", "Wav2Vec2Config", **SIZES, **WAVE), waves),
    by_trainer("clip", clip, image_texts),
    by_trainer("llava", llava, questions),
)
