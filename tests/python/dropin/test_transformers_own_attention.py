"""dropin.transformers: models of which a class computes its attention itself give eager's numbers or are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scaledot.dropin import _own_attention

pytest.importorskip("transformers")
import transformers

from external.transformers_sweep import shrunken

pytestmark = pytest.mark.usefixtures("registered_in_transformers")

IDS = torch.arange(24).remainder(11).view(2, 12) + 3
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, -4:] = 0


def bigbird_pegasus() -> tuple[nn.Module, dict[str, Any]]:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = transformers.BigBirdPegasusConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, attention_type="original_full", **heads
    )
    model = transformers.BigBirdPegasusModel(config)
    return model, {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS}


def git() -> tuple[nn.Module, dict[str, Any]]:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GitConfig(
        vision_config=vision, vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    return transformers.GitModel(config), {"input_ids": IDS, "attention_mask": MASK}


def informer() -> tuple[nn.Module, dict[str, Any]]:
    # Between its two encoder layers the sequence becomes half as long, and no mask would fit both.
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = transformers.InformerConfig(
        prediction_length=6, context_length=12, lags_sequence=[1], num_time_features=1, **sizes
    )
    inputs = {
        "past_values": torch.linspace(-1, 1, 26).view(2, 13).sin(),
        "past_time_features": torch.linspace(-1, 1, 26).view(2, 13, 1),
        "past_observed_mask": torch.ones(2, 13),
        "future_values": torch.linspace(-1, 1, 12).view(2, 6).cos(),
        "future_time_features": torch.linspace(-1, 1, 12).view(2, 6, 1),
    }
    return transformers.InformerModel(config), inputs


def beit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BeitConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        use_relative_position_bias=True,
    )
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, -4:] = 0
    return transformers.BeitModel(config), {"pixel_values": torch.rand(2, 3, 32, 32), "attention_mask": mask}


def blt() -> tuple[nn.Module, dict[str, Any]]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    inputs = {"input_ids": torch.randint(3, 90, (2, 12)), "attention_mask": mask, "use_cache": False}
    return transformers.BltModel(shrunken(transformers.BltConfig)), inputs


@pytest.mark.parametrize("make", [bigbird_pegasus, git, informer, beit, blt])
def test_equal_to_eager_with_padding(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    model, inputs = make()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    results = []
    for name in ("eager", "scaledot"):
        torch.manual_seed(0)  # Informer samples keys
        model.eval().set_attn_implementation(name)
        with torch.no_grad():
            results.append(model(**inputs)[0])
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {
        "scaledot"
    }
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [
        ("BarkSemanticModel", "BarkSemanticConfig"),
        ("Data2VecVisionModel", "Data2VecVisionConfig"),
        ("FalconModel", "FalconConfig"),
        ("GPTNeoModel", "GPTNeoConfig"),
        ("GitModel", "GitConfig"),
        ("SamModel", "SamVisionConfig"),
        ("SamHQModel", "SamHQVisionConfig"),
        ("SuperGlueForKeypointMatching", "SuperGlueConfig"),
    ],
)
def test_a_table_of_attention_classes_refuses_in_words(model_class: str, config_class: str) -> None:
    kind = getattr(transformers, model_class)
    message = f"attn_implementation: got 'scaledot' for {config_class}; needs 'eager'"
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        kind._from_config(kind.config_class(), attn_implementation="scaledot")


def test_registered_twice_the_check_is_wrapped_once() -> None:
    from scaledot.dropin.transformers import register

    before = transformers.PreTrainedModel.get_correct_attn_implementation
    register("scaledot_too")
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before
    config = transformers.GPTNeoConfig()
    with torch.device("meta"), pytest.raises(ValueError, match="got 'scaledot_too' for GPTNeoConfig; needs 'eager'"):
        transformers.GPTNeoModel._from_config(config, attn_implementation="scaledot_too")


# Folders with a sum of a mask and scores outside "eager", and why a boolean mask does no harm.
HARMLESS = {
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "hy_v4", "hy_v4_vl", "mistral_large4"),
        "the indexer of the sparse attention hides by a boolean mask and adds any other",
    ),
    **dict.fromkeys(("clap", "longt5", "pegasus_x", "phi4_multimodal"), "a mask of its own, in numbers"),
    **dict.fromkeys(("conditional_detr", "detr", "maskformer"), "the map of boxes has a mask of its own, in numbers"),
    **dict.fromkeys(("decision_transformer", "gpt2"), "upcast attention runs with 'eager' only"),
    "doge": "a part of flex_attention",
    "moshi": "masks of tokens",
}


def test_every_class_that_adds_the_mask_is_known() -> None:
    """A new version of transformers may have another one. Some append numbers to the mask."""
    found = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        code = file.read_text(encoding="utf-8")
        if "ALL_ATTENTION_FUNCTIONS" not in code or "masking_utils" not in code:
            continue
        code = re.sub(r"^def \w*eager\w*\(.*?(?=^(?:def|class|@)|\Z)", "", code, flags=re.MULTILINE | re.DOTALL)
        kinds = "(attention|attn|prob|causal|extended|hs)"
        if re.search(rf"\+=? (\w+_)?{kinds}_mask\b|{kinds}_mask\S* \+ |cat\(\[{kinds}_mask, \w+\.to\(", code):
            found.add(file.parent.name)
    assert found - set(HARMLESS) <= _own_attention._ADDS_THE_MASK
    assert "bigbird_pegasus" in found
