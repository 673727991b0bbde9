"""A slice of the sweep over transformers' models; `python -m external.transformers_sweep` runs all of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers")
from external import transformers_sweep

pytestmark = pytest.mark.usefixtures("registered_in_transformers")

# The least number of conditions that eager runs too, and that are therefore compared.
SLICE = {
    "LlamaForCausalLM": 6,
    "GPT2LMHeadModel": 6,
    "Gemma2ForCausalLM": 6,
    "BartForConditionalGeneration": 3,
    "T5ForConditionalGeneration": 3,
    "BertForMaskedLM": 3,
    "SplinterModel": 3,
    "ViTModel": 1,
    "DeepseekV4ForCausalLM": 5,
    "Glm5NextTextModel": 5,
}


@pytest.mark.parametrize("name", SLICE)
def test_equal_to_eager(name: str) -> None:
    found = transformers_sweep.check_quietly(name)
    assert found["status"] == "passed", found["reason"]
    assert found["conditions"] >= SLICE[name]


def test_a_model_that_computes_attention_itself_is_refused() -> None:
    assert transformers_sweep.check_quietly("BloomForCausalLM")["status"] == "refused"


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep sees a causal mask that is ignored."""
    from scaledot.dropin import transformers as dropin

    real = dropin.scaled_dot_product_attention

    def without_mask(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        return real(query, key, value, scale=rest[3], enable_gqa=rest[4], **options)

    monkeypatch.setattr(dropin, "scaled_dot_product_attention", without_mask)
    found = transformers_sweep.check_quietly("LlamaForCausalLM")
    assert found["status"] == "failed"
    assert "causality: eager, config, set_attn_implementation see ahead: [False, True, True]" in found["reason"]
