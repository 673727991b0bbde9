"""Tiny models of Hugging Face transformers with each kind of attention. Weights are random; nothing is downloaded."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
LOCAL_GLOBAL = ["sliding_attention", "full_attention"]
T5_SIZES = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # (model class, configuration class, configuration)
    "bert": ("BertModel", "BertConfig", SIZES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral, window": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "qwen2, window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 6}),
    "gemma3, window": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": LOCAL_GLOBAL, "query_pre_attn_scalar": 8},
    ),
    "gemma3, window both ways": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": LOCAL_GLOBAL, "query_pre_attn_scalar": 8}
        | {"use_bidirectional_attention": True},
    ),
    "gemma2, softcap": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gpt-oss, sinks": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mimo v2, sinks and value_dim": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {**GROUPED, "head_dim": 8, "v_head_dim": 6, "sliding_window": 4, "mlp_layer_types": ["dense", "dense"]},
    ),
    "modernbert, window": (
        "ModernBertModel",
        "ModernBertConfig",
        {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2},
    ),
    "deepseek v3, value_dim": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
    ),
    "afmoe, window and experts": (
        "AfmoeForCausalLM",
        "AfmoeConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "num_experts": 4, "num_experts_per_tok": 2}
        | {"num_shared_experts": 1, "num_dense_layers": 1, "moe_intermediate_size": 16},
    ),
    "axk1, value_dim and experts": (
        "AXK1ForCausalLM",
        "AXK1Config",
        {**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "moe_intermediate_size": 16}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
    "t5 encoder, bias": ("T5EncoderModel", "T5Config", T5_SIZES),
    "t5, bias": ("T5ForConditionalGeneration", "T5Config", {**T5_SIZES, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", ENCODER_DECODER),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 20, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
}
CAUSAL = [name for name, (model, _, _) in MODELS.items() if model.endswith(("ForCausalLM", "LMHeadModel"))]
LENGTH, PADDED = 11, 3


def make(name: str, **changes: Any) -> Any:
    model, config, arguments = MODELS[name]
    if name not in ("gpt2", "gpt-oss, sinks", *(n for n in MODELS if n.startswith(("t5", "bart", "whisper")))):
        arguments = {"attention_dropout": 0.0, **arguments}
    torch.manual_seed(0)
    configuration = getattr(transformers, config)(**{**arguments, **changes})
    result = getattr(transformers, model)(configuration).eval()
    if "gpt-oss" in name or "experts" in name:
        result.set_experts_implementation("eager")  # the default lacks float64, which the oracle needs
    for parameter in result.parameters():  # a spread that keeps the attention far from uniform
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return result


def inputs_of(name: str, padding: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """(the model's inputs, which positions of its output are not padding; None for all)."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, LENGTH), generator=g)
    decoder_ids = torch.randint(3, 99, (2, 5), generator=g)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=g), "decoder_input_ids": decoder_ids}, None
    inputs, real = {"input_ids": ids}, torch.ones_like(ids)
    if padding == "right":
        real[1, -PADDED:] = 0
    elif padding == "left":
        real[1, :PADDED] = 0
    if padding != "none":
        inputs["attention_mask"] = real
    if name in ("t5, bias", "bart"):
        inputs["decoder_input_ids"] = decoder_ids
        return inputs, None
    return inputs, real.bool()


Solution = tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]


def run(model: Any, implementation: str, name: str, padding: str) -> Solution:
    """(output without padding, gradients of all parameters, attention weights)."""
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    inputs, real = inputs_of(name, padding)
    dtype = next(model.parameters()).dtype
    inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}
    results = model(**inputs, output_attentions=True)
    output = results["logits"] if "logits" in results else results["last_hidden_state"]
    output = output if real is None else output[real]
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    output.backward(cotangent)
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    weights = [results[key] for key in results if key.endswith("attentions")]
    return output.detach(), gradients, tuple(w for layers in weights for w in layers)


def wide_softmax(softmax: Any) -> Any:
    """A softmax for the oracle that stays in float64; models compute theirs in float32 whatever their dtype."""

    def function(scores: Tensor, dim: int, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        result: Tensor = softmax(scores, dim=dim, dtype=None if scores.dtype == torch.float64 else dtype)
        return result

    return function


@functools.cache
def solved(name: str, padding: str) -> tuple[Solution, Solution]:
    """(eager attention in float64, in float32)."""
    model = make(name)
    eager = run(model, "eager", name, padding)
    with mock.patch.object(F, "softmax", wide_softmax(F.softmax)):
        exact = run(model.double(), "eager", name, padding)
    return exact, eager
