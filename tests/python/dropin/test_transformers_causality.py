"""dropin.transformers: a model attends to what it attends to with "eager", however it says that it is causal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scaledot.dropin._causal_mask import CausalMask
from scaledot.dropin.transformers import attention_forward

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("registered_in_transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def with_large_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Weights with which a wrong mask shows."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def bigbird_pegasus() -> torch.nn.Module:
    """Its attention modules have is_causal = False, and its masks come from create_causal_mask."""
    config = transformers.BigBirdPegasusConfig(
        vocab_size=99,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    )
    return with_large_weights(transformers.BigBirdPegasusForCausalLM(config))


def splinter() -> torch.nn.Module:
    """An encoder whose attention modules have no is_causal."""
    return with_large_weights(transformers.SplinterModel(transformers.SplinterConfig(**SIZES)))


def first_result(model: torch.nn.Module, ids: Tensor, **options: object) -> Tensor:
    with torch.no_grad():
        return model(ids, **options)[0]


@pytest.mark.parametrize(("make", "is_decoder"), [(bigbird_pegasus, True), (splinter, False)])
def test_causality_is_that_of_eager(make: object, is_decoder: bool) -> None:
    model = make()  # type: ignore[operator]
    ids = torch.randint(3, 99, (2, 12))
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 90 + 3
    model.set_attn_implementation("eager")
    wanted = first_result(model, ids)
    model.set_attn_implementation("scaledot")
    found = first_result(model, ids)
    torch.testing.assert_close(found, wanted)
    moved = (first_result(model, changed) - found)[:, :-1].abs().max()
    assert (moved == 0) == is_decoder


def test_a_model_that_computes_attention_itself_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="scaledot")
    with pytest.raises(ValueError, match="attn_implementation: got 'scaledot' for BloomConfig; needs 'eager'"):
        model(torch.randint(3, 99, (1, 8)))


def test_a_bidirectional_mask_and_a_module_that_says_it_is_causal() -> None:
    """Nothing is hidden, and the keyword for a window that hides nothing makes no difference."""
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    wanted = ((query @ key.mT / 8**0.5).softmax(-1) @ value).transpose(1, 2)
    found, _ = attention_forward(module, query, key, value, CausalMask.of(2, 5, 5, 4), sliding_window=2)
    torch.testing.assert_close(found, wanted)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    wanted, _ = attention_forward(module, query, key, value, causal)
    found, _ = attention_forward(module, query, key, value, CausalMask.of(2, 5, 5), sliding_window=2)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_sliced_queries_keep_their_place(keep: int, cache: str | None) -> None:
    """Gemma 4 drops the query rows whose logits are not wanted, except where the implementation is named "sdpa"."""
    config = transformers.Gemma4TextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        max_position_embeddings=128,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99,
        num_kv_shared_layers=2,
    )
    model = with_large_weights(transformers.Gemma4ForCausalLM(config))
    ids = torch.randint(3, 99, (1, 12))
    found = {}
    for name in ("eager", "scaledot"):
        model.set_attn_implementation(name)
        past = transformers.StaticCache(config=config, max_cache_len=32) if cache else None
        found[name] = first_result(model, ids, logits_to_keep=keep, past_key_values=past, use_cache=cache is not None)
    torch.testing.assert_close(found["scaledot"], found["eager"], atol=1e-4, rtol=1e-4)


def test_the_keys_of_sparse_attention_are_those_listed() -> None:
    config = transformers.DeepseekV32Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
    )
    model = with_large_weights(transformers.DeepseekV32ForCausalLM(config))
    ids = torch.randint(3, 99, (1, 20))
    model.set_attn_implementation("eager")
    wanted = first_result(model, ids, use_cache=False)
    model.set_attn_implementation("scaledot")
    torch.testing.assert_close(first_result(model, ids, use_cache=False), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_listed_keys_and_a_mask(mask: str) -> None:
    """A position listed twice counts once, and a negative one is none."""
    module = torch.nn.Module()
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    indices = torch.tensor([[0, 0, 3], [1, -1, -1], [4, 2, 0], [3, 3, 3], [0, 1, 2]]).expand(2, -1, -1)
    listed = torch.zeros(5, 5, dtype=torch.bool)
    for row, keys in enumerate(indices[0].tolist()):
        listed[row, [k for k in keys if k >= 0]] = True
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(2)[None, None]
    given = {"none": None, "bool": allowed, "float": torch.zeros(1, 1, 5, 5).masked_fill(~allowed, -torch.inf)}[mask]
    found, _ = attention_forward(module, query, key, value, given, indices=indices)
    expected = listed if mask == "none" else listed & allowed[0, 0]
    scores = (query @ key.mT / 8**0.5).masked_fill(~expected, -torch.inf)
    torch.testing.assert_close(found, (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2))


def test_no_message_offers_to_ignore_a_tensor() -> None:
    query = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match="selected: got a value from Module; needs None") as error:
        attention_forward(torch.nn.Module(), query, query, query, None, selected=torch.arange(3))
    assert "ignore" not in str(error.value)


# ---------------------------------------------------------------------------------------------------- CausalMask
def test_a_causal_mask_has_one_byte() -> None:
    mask = CausalMask.of(2, 5, 7)
    assert mask.shape == (2, 1, 5, 7)
    assert mask.dtype == torch.bool
    assert mask.dim() == 4
    assert mask.untyped_storage().nbytes() == 1
    assert torch.equal(mask.materialised()[1, 0], torch.ones(5, 7, dtype=torch.bool).tril())


@pytest.mark.parametrize("rows", [slice(None), slice(-3, None), slice(1, 4), slice(2, 3)])
@pytest.mark.parametrize("keys", [slice(None), slice(None, 6)])
def test_slices_of_a_causal_mask(rows: slice, keys: slice) -> None:
    mask = CausalMask.of(2, 5, 7)
    found = mask[:, :, rows, keys]
    assert isinstance(found, CausalMask)
    assert torch.equal(found.materialised(), mask.materialised()[:, :, rows, keys])
    assert torch.equal(mask[..., rows, keys].materialised(), found.materialised())
    assert torch.equal(found[:, :, -1:].materialised(), found.materialised()[:, :, -1:])


def test_other_operations_get_the_boolean_mask() -> None:
    mask = CausalMask.of(2, 5, 7)
    real = mask.materialised()
    assert torch.equal(~mask, ~real)
    assert torch.equal(mask & real[:1], real)
    assert torch.equal(mask[:, :, :, 2:], real[:, :, :, 2:])
    assert torch.equal(mask[0], real[0])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(real, 0.0, -1.0))
    assert torch.equal(torch.cat([mask, real]), torch.cat([real, real]))
    assert torch.equal(mask.to(torch.float32), real.to(torch.float32))
    assert isinstance(mask.to("cpu"), CausalMask)
    assert not isinstance(mask.clone(), CausalMask)
