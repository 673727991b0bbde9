"""dropin.transformers: generate_batch, transformers' continuous batching, on a CPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from scaledot.dropin import _continuous_batching

transformers = pytest.importorskip("transformers")
api = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")

pytestmark = [
    pytest.mark.usefixtures("registered_in_transformers"),
    pytest.mark.skipif(
        not hasattr(api.ContinuousBatchingManager, "switch_to_cb_friendly_attn"),
        reason="this transformers passes the cache to its own paged functions",
    ),
]

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mistral() -> Any:
    """Windows: their keys have a cache without pages."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8))


def gpt_oss() -> Any:
    """Sinks, and layers with windows and without."""
    config = transformers.GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8
    )
    return transformers.GptOssForCausalLM(config)


def generated(model: Any, name: str, batch_tokens: int) -> list[list[int]]:
    """The tokens for five requests. With few tokens a step, long requests are read in parts."""
    model.set_attn_implementation(name)
    prompts = [[(7 * i + j) % 90 + 3 for j in range(length)] for i, length in enumerate((3, 17, 30, 9, 22))]
    settings = transformers.ContinuousBatchingConfig(
        page_size=16, max_batch_tokens=batch_tokens, num_blocks=None, max_memory_percent=0.05
    )
    options = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch(prompts, options, continuous_batching_config=settings, progress_bar=False)
    return [results[key].generated_tokens for key in sorted(results, key=lambda key: int(key.split("_")[-1]))]


@pytest.mark.parametrize("make", [llama, mistral, gpt_oss])
@pytest.mark.parametrize("batch_tokens", [128, 20])
def test_the_tokens_of_eager(make: Any, batch_tokens: int) -> None:
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    wanted = generated(model, "eager", batch_tokens)
    real, calls = _continuous_batching.varlen_attention, []

    def watched(*args: Any, **options: Any) -> Any:
        calls.append(options.get("block_table") is not None)
        return real(*args, **options)

    with mock.patch.object(_continuous_batching, "varlen_attention", watched):
        found = generated(model, "scaledot", batch_tokens)
    assert [len(tokens) for tokens in found] == [8] * 5
    assert found == wanted
    assert model.config._attn_implementation == "scaledot"
    assert any(calls) == (make is llama)  # pages are read in place
    assert not all(calls)


def test_a_mask_is_refused() -> None:
    query = torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match="attention_mask: got a mask in continuous batching; needs None"):
        _continuous_batching.paged_attention(
            query, query, query, torch.ones(1, 1, 3, 3, dtype=torch.bool), {}, is_causal=True, scale=None, window=None,
            softcap=None, return_lse=False,
        )  # fmt: skip
