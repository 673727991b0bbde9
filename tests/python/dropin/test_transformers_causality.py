"""dropin.transformers: a model attends to what it attends to with "eager", however it says that it is causal."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
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


def test_a_mask_that_hides_nothing_may_be_longer_than_the_keys() -> None:
    """BERT as an encoder, given the mask of a whole text with its last tokens, has no cache and runs with "eager"."""
    query, key, value = torch.randn(3, 2, 4, 3, 8).unbind()
    wanted, _ = attention_forward(torch.nn.Module(), query, key, value, None)
    found, _ = attention_forward(torch.nn.Module(), query, key, value, CausalMask.of(2, 3, 11, 10))
    assert torch.equal(found, wanted)


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


# By folder: the class, and what its config needs besides the sizes below.
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "axk2": ("AXK2ForCausalLM", {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {}),
    "dots3_note": ("Dots3NoteForCausalLM", {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {"indexer_types": ["full", "shared"]}),
    "hy_v4": ("HYV4ForCausalLM", {"indexer_types": ["full", "shared"]}),
    "hy_v4_vl": (
        "HYV4VLTextModel",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    ),
    "mistral_large4": ("MistralLarge4TextModel", {"indexer_types": ["full", "shared"]}),
}


def test_every_class_with_listed_keys_is_known() -> None:
    """A new version of transformers may have another one."""
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    assert {f.parent.name for f in files if "indices=sparse_indices" in f.read_text(encoding="utf-8")} <= SPARSE.keys()


@pytest.mark.parametrize("folder", SPARSE)
def test_the_keys_of_sparse_attention_are_those_listed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of many keys become key_indices: in a whole prompt, with rows of padding, and with a cache."""
    name, more = SPARSE[folder]
    kind = getattr(pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}"), name)
    config = kind.config_class(
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
        pad_token_id=0,
        **more,
    )
    eager = with_large_weights(kind._from_config(config, attn_implementation="eager"))
    model = copy.deepcopy(eager)
    model.set_attn_implementation("scaledot")
    lists = []

    def attention(*args: Any, key_indices: Tensor | None = None, **options: Any) -> Any:
        lists.append(key_indices is not None)
        return scaledot.scaled_dot_product_attention(*args, key_indices=key_indices, **options)

    monkeypatch.setattr("scaledot.dropin.transformers.scaled_dot_product_attention", attention)
    ids = torch.randint(3, 90, (2, 40))
    real = torch.ones_like(ids)
    real[1, -5:] = 0
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    found: dict[str, list[Tensor]] = {}
    for kind, one in {"eager": eager, "scaledot": model}.items():
        with torch.no_grad():
            whole = one(ids, use_cache=False)[0]
            padded = one(ids, attention_mask=real, use_cache=False)[0][real.bool()]
            found[kind], past = [whole, padded], {}
            for start, stop in ((0, 36), (36, 39), (39, 40)):
                outputs = one(ids[:, start:stop], attention_mask=torch.ones(2, stop), use_cache=True, **past)
                past = {cache: outputs.past_key_values}
                found[kind].append(outputs[0])
    assert any(lists)
    for ours, wanted in zip(found["scaledot"], found["eager"], strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_few_listed_keys_need_no_mask(rows: int) -> None:
    """They are key_indices where no gradient is recorded, with repeated and hidden entries; otherwise a mask."""
    module = torch.nn.Module()
    query, (key, value) = torch.randn(2, 4, rows, 8), torch.randn(2, 2, 4, 60, 8)
    indices = torch.randint(-1, 60, (2, rows, 6), dtype=torch.int32)
    indices[..., 1] = indices[..., 0]
    hidden = torch.rand(2, 1, rows, 60) < 0.3
    listed = torch.zeros(2, rows, 61, dtype=torch.bool).scatter(-1, indices.long() % 61, True)[..., :60]
    scores = (query @ key.mT / 8**0.5).masked_fill(hidden | ~listed[:, None], -torch.inf)
    wanted = (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)
    for given in (~hidden, *(torch.zeros(hidden.shape).masked_fill(hidden, x) for x in (-torch.inf, -3.4e38))):
        for records in (False, True):
            found, _ = attention_forward(module, query.requires_grad_(records), key, value, given, indices=indices)
            torch.testing.assert_close(found.detach(), wanted)


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


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_blocks_of_minimax(padding: str, use_cache: bool) -> None:
    """Its indexer lists blocks of keys for each KV head, -1 where there are fewer.

    The indexer reads padding on the left, whose hidden states are not eager's after a layer: that case has one layer.
    """
    layers = 1 if padding == "left" else 2
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        dense_intermediate_size=48,
        shared_intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rotary_dim=4,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=2,
        layer_types=["minimax_m3_sparse"] * layers,
    )
    model = with_large_weights(transformers.MiniMaxM3VLForCausalLM(config))
    assert all(layer.self_attn.indexer is not None for layer in model.model.layers)
    ids = torch.randint(3, 99, (2, 19))  # the last block is not whole
    real = torch.ones(2, 19, dtype=torch.bool)
    if padding != "none":
        real[1, slice(0, 5) if padding == "left" else slice(-5, None)] = False
    found = {}
    for name in ("eager", "scaledot"):
        model.set_attn_implementation(name)
        past, rows = None, []
        for start, stop in ((0, 14), (14, 18), (18, 19)) if use_cache else ((0, 19),):
            mask = None if padding == "none" else real[:, :stop].long()
            options = {"attention_mask": mask, "past_key_values": past, "use_cache": use_cache}
            with torch.no_grad():
                outputs = model(ids[:, start:stop], **options)
            past = outputs.past_key_values
            rows.append(outputs.logits)
        found[name] = torch.cat(rows, 1)
    torch.testing.assert_close(found["scaledot"][real], found["eager"][real], atol=1e-4, rtol=1e-4)


def test_a_compiled_bidirectional_mask_says_so() -> None:
    """In compiled code the mask of an encoder is never None, which a module that says it is causal would misread."""
    mask_of = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["scaledot"]
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]

    @torch.compile(backend="eager", fullgraph=True)
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = mask_of(
            batch_size=2,
            q_length=5,
            kv_length=5,
            device="cpu",
            mask_function=transformers.masking_utils.bidirectional_mask_function,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=True,
        )
        return attention_forward(module, query, key, value, mask)[0]

    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    wanted = ((query @ key.mT / 8**0.5).softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(attend(query, key, value), wanted)


def test_logits_to_keep_reaches_attention() -> None:
    """GOT-OCR 2 passes it on; it does not change what attention computes."""
    query = torch.randn(1, 2, 5, 8)
    wanted, _ = attention_forward(torch.nn.Module(), query, query, query, None)
    found, _ = attention_forward(torch.nn.Module(), query, query, query, None, logits_to_keep=1)
    assert torch.equal(found, wanted)


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
