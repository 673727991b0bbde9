"""scaledot.dropin.transformers: models with each kind of attention, random weights, against their eager attention."""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import tolerances
from scaledot.dropin.transformers import attention_forward, register

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

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
T5_SIZES = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # the model's class, its configuration's, the configuration
    "bert": ("BertModel", "BertConfig", SIZES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral, window": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
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
CAUSAL = ["gpt2", "llama", "mistral, window", "gemma2, softcap", "gpt-oss, sinks"]
LENGTH, PADDED = 11, 3


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


def make(name: str, **changes: Any) -> Any:
    model, config, arguments = MODELS[name]
    if name not in ("gpt2", "gpt-oss, sinks", *(n for n in MODELS if n.startswith(("t5", "bart", "whisper")))):
        arguments = {"attention_dropout": 0.0, **arguments}
    torch.manual_seed(0)
    configuration = getattr(transformers, config)(**{**arguments, **changes})
    result = getattr(transformers, model)(configuration).eval()
    if "gpt-oss" in name:
        result.set_experts_implementation("eager")  # the default has no float64, for the oracle
    for parameter in result.parameters():  # enough spread for attention to be far from uniform
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return result


def inputs_of(name: str, padding: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """What the model is called with, and which positions of its output are real (None: all)."""
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
    """Output at the real positions, gradients of all parameters, attention weights."""
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
    """Models take the softmax in float32 whatever their dtype is; the oracle takes it in float64."""

    def function(scores: Tensor, dim: int, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        result: Tensor = softmax(scores, dim=dim, dtype=None if scores.dtype == torch.float64 else dtype)
        return result

    return function


@functools.cache
def solved(name: str, padding: str) -> tuple[Solution, Solution]:
    """Eager in float64, and in float32."""
    model = make(name)
    eager = run(model, "eager", name, padding)
    with mock.patch.object(F, "softmax", wide_softmax(F.softmax)):
        exact = run(model.double(), "eager", name, padding)
    return exact, eager


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_output_gradients_and_weights(name: str, padding: str) -> None:
    exact, eager = solved(name, padding)
    output, gradients, weights = run(make(name), "scaledot", name, padding)
    tolerances.check("output", output, exact[0], tolerances.error(eager[0], exact[0]))
    assert gradients.keys() == eager[1].keys()
    # Where a parameter has next to no effect (a key's bias), its gradient is what is left of terms that cancel.
    whole = max(tolerances.largest(g) for g in exact[1].values())
    for key, gradient in gradients.items():
        error = max(tolerances.error(eager[1][key], exact[1][key]), torch.finfo(torch.float32).eps * whole)
        tolerances.check(key, gradient, exact[1][key], error, gradient=True)
    assert len(weights) == len(exact[2])  # some versions of transformers collect none for T5
    for number, (found, oracle, yardstick) in enumerate(zip(weights, exact[2], eager[2], strict=True)):
        # A padded query that sees nothing has weights 0 here; eager's are uniform, or all on what it must not see.
        live = found.sum(-1, keepdim=True) > 0
        error = tolerances.error(yardstick * live, oracle * live)
        tolerances.check(f"weights {number}", found, oracle * live, error)
        assert padding == "left" or live.all()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_half_precision(name: str) -> None:
    exact, _ = solved(name, "right")
    eager = run(make(name).bfloat16(), "eager", name, "right")
    ours = run(make(name).bfloat16(), "scaledot", name, "right")
    # The model rounds its own weights to bfloat16, so both are equally far from the oracle.
    assert tolerances.error(ours[0], exact[0]) <= 1.5 * tolerances.error(eager[0], exact[0])


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*CAUSAL, "t5, bias"])
def test_generate_with_cache(name: str, padded: bool, cache: str | None) -> None:
    model = make(name)
    inputs, _ = inputs_of("llama", "left")
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    found = {}
    for implementation in ("eager", "scaledot"):
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            **inputs,
            **{"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0},
            **{"return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
            cache_implementation=cache,
        )
    eager, ours = found["eager"], found["scaledot"]
    assert torch.equal(eager.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(eager.scores), rtol=1e-5, atol=2e-5)
    steps = "decoder_attentions" if name.startswith("t5") else "attentions"
    assert [len(layers) for layers in ours[steps]] == [len(layers) for layers in eager[steps]]
    torch.testing.assert_close(ours[steps][-1][-1:], eager[steps][-1][-1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_several_queries_against_a_cache(name: str) -> None:
    model = make(name)
    inputs, _ = inputs_of(name, "none")
    ids = inputs["input_ids"]
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("scaledot")
    start = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=start.past_key_values)
    torch.testing.assert_close(torch.cat([start.logits, rest.logits], 1), expected, rtol=1e-5, atol=2e-5)


def test_packed_sequences() -> None:
    """Two sequences in one row, told apart by their positions, give what each gives alone."""
    model = make("llama")
    model.set_attn_implementation("scaledot")
    ids = inputs_of("llama", "none")[0]["input_ids"]
    first, second = ids[:1, :6], ids[1:, :4]
    positions = torch.cat([torch.arange(6), torch.arange(4)])[None]
    packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :6], model(first).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[:, 6:], model(second).logits, rtol=1e-5, atol=1e-5)


def test_dropout_in_training_only() -> None:
    model = make("llama", attention_dropout=0.4)
    model.set_attn_implementation("scaledot")
    ids = inputs_of("llama", "none")[0]["input_ids"]

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        result: Tensor = model(ids).logits
        return result

    assert torch.equal(logits(1), logits(2))
    model.train()
    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_checkpointing_drops_the_same_weights_again() -> None:
    model = make("llama", attention_dropout=0.4).train()
    model.set_attn_implementation("scaledot")
    ids = inputs_of("llama", "none")[0]["input_ids"]
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, use_cache=False).logits.square().mean().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


def test_compile() -> None:
    model = make("llama")
    model.set_attn_implementation("scaledot")
    inputs, _ = inputs_of("llama", "right")
    expected = model(**inputs, use_cache=False).logits
    torch._dynamo.reset()
    try:
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(**inputs, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    finally:
        torch._dynamo.reset()


def test_every_way_to_choose_it() -> None:
    config = transformers.BertConfig(**SIZES)
    model = transformers.AutoModel.from_config(config, attn_implementation="scaledot")
    assert model.config._attn_implementation == "scaledot"
    ids = inputs_of("bert", "none")[0]["input_ids"]
    with mock.patch("scaledot.dropin.transformers.scaled_dot_product_attention", side_effect=KeyError):
        with pytest.raises(KeyError):
            model(ids)
        model.set_attn_implementation("eager")
        model(ids)


# ---------------------------------------------------------------------------------------------- the function by itself
class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None,
    scaling: float | None = None, sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The formula: output (B, Lq, H, Dv), weights (B, H, Lq, Lk). mask: True = may attend; sink (B, H, Lq, 1)."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scaling is None else scaling)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1) if sink is None else torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), weights


def qkv(query_length: int = 6, key_length: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, 4, query_length, 8, dtype=torch.float64)
    key = torch.randn(2, 2, key_length, 8, dtype=torch.float64)
    return query, key, torch.randn(2, 2, key_length, 5, dtype=torch.float64)


def attends(query_length: int, key_length: int, left: int | None, right: int | None, offset: int = 0) -> Tensor:
    distance = torch.arange(key_length) - (torch.arange(query_length)[:, None] + offset)
    low = -left if left is not None else -math.inf
    return (distance >= low) & (distance <= (right if right is not None else math.inf))


@pytest.mark.parametrize(
    ("lengths", "module_causal", "keywords", "expected"),
    [
        ((6, 6), True, {}, attends(6, 6, None, 0)),
        ((6, 6), False, {}, None),
        ((6, 6), True, {"is_causal": False}, None),
        ((6, 6), False, {"is_causal": True}, attends(6, 6, None, 0)),
        ((6, 9), True, {}, attends(6, 9, None, 0)),  # a static cache that has room for three more
        ((1, 9), True, {}, None),  # decoding
        ((6, 6), True, {"sliding_window": 3}, attends(6, 6, 2, 0)),
        ((6, 6), False, {"sliding_window": 3}, attends(6, 6, 2, 2)),
        ((6, 6), True, {"sliding_window": 6}, attends(6, 6, None, 0)),
        ((1, 9), True, {"sliding_window": 3}, attends(1, 9, 2, 0, offset=8)),
        ((6, 6), None, {}, attends(6, 6, None, 0)),  # a module that does not say: as "sdpa" takes it
        ((6, 6), True, {"scaling": 0.5}, attends(6, 6, None, 0)),
    ],
)
def test_without_a_mask(
    lengths: tuple[int, int], module_causal: bool | None, keywords: dict[str, Any], expected: Tensor | None
) -> None:
    module = nn.Module().eval() if module_causal is None else Attention(module_causal)
    inputs = qkv(*lengths)
    output, weights = attention_forward(module, *inputs, None, output_attentions=True, **keywords)
    exact = plain(*inputs, expected, scaling=keywords.get("scaling"))
    torch.testing.assert_close((output, weights), exact)
    assert output.is_contiguous()


def test_a_mask_is_all_that_is_masked() -> None:
    """With a mask neither is_causal nor sliding_window add to it: transformers put them into it."""
    inputs, mask = qkv(), torch.rand(2, 1, 6, 6) < 0.8
    mask[..., 0] = True
    output, weights = attention_forward(Attention(True), *inputs, mask, sliding_window=2)
    assert weights is None
    torch.testing.assert_close(output, plain(*inputs, mask)[0])


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_position_bias(mask: str | None) -> None:
    inputs = [t.requires_grad_() for t in qkv()]
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    allowed = (torch.rand(2, 1, 6, 6) < 0.7) | torch.eye(6, dtype=torch.bool)
    if mask is None:
        allowed = attends(6, 6, None, 0)
    masks = {None: None, "bool": allowed, "float": torch.zeros(2, 1, 6, 6).double().masked_fill(~allowed, -math.inf)}
    output, _ = attention_forward(Attention(True), *inputs, masks[mask], position_bias=bias)
    exact, _ = plain(*inputs, allowed, bias)
    torch.testing.assert_close(output, exact)
    cotangent = torch.randn_like(exact)
    found = torch.autograd.grad(output, [*inputs, bias], cotangent)
    torch.testing.assert_close(found, torch.autograd.grad(exact, [*inputs, bias], cotangent))


@pytest.mark.parametrize("by_query", [False, True])
def test_sinks(by_query: bool) -> None:
    inputs = [t.requires_grad_() for t in qkv()]
    shape = (2, 4, 6, 1) if by_query else (4,)
    sink = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    keywords = {"sinks" if by_query else "s_aux": sink}
    found = attention_forward(Attention(True), *inputs, None, output_attentions=True, **keywords)
    column = sink if by_query else sink[None, :, None, None].expand(2, 4, 6, 1)
    exact = plain(*inputs, attends(6, 6, None, 0), sink=column)
    torch.testing.assert_close(found, exact)
    cotangents = [torch.randn_like(t) for t in exact]
    gradients = torch.autograd.grad(found, [*inputs, sink], cotangents)
    torch.testing.assert_close(gradients, torch.autograd.grad(exact, [*inputs, sink], cotangents))


def test_sinks_and_nothing_to_attend_to() -> None:
    inputs = [t.requires_grad_() for t in qkv()]
    sink = torch.tensor([-math.inf, 0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, 2] = False
    output, _ = attention_forward(Attention(True), *inputs, mask, s_aux=sink)
    assert not output[0, 2].any()
    torch.testing.assert_close(output[1, :, 0], plain(*inputs, mask)[0][1, :, 0])  # a sink of -inf is none
    for gradient in torch.autograd.grad(output.sum(), [*inputs, sink]):
        assert gradient.isfinite().all()


def test_sinks_with_dropout() -> None:
    """The sink's share is not dropped: on average the output is what it is without dropout."""
    module, inputs, sink = Attention(True).train(), qkv(), torch.randn(4, dtype=torch.float64)
    outputs = [attention_forward(module, *inputs, None, dropout=0.3, s_aux=sink)[0] for _ in range(2000)]
    exact, _ = plain(*inputs, attends(6, 6, None, 0), sink=sink[None, :, None, None].expand(2, 4, 6, 1))
    mean, deviation = torch.stack(outputs).mean(0), torch.stack(outputs).std(0) / math.sqrt(2000)
    assert ((mean - exact).abs() <= 6 * deviation + 1e-12).all()


def test_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match=r"block_indices: Attention passes.*register\(ignore=\['block_indices'\]\)"):
        attention_forward(Attention(True), *qkv(), None, block_indices=torch.zeros(1))
    attention_forward(Attention(True), *qkv(), None, block_indices=None, position_ids=torch.zeros(1), use_cache=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q: got 2 packed sequences without an attention_mask"):
        attention_forward(Attention(True), *qkv(), None, cu_seq_lens_q=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match=r"s_aux: got shape \(3,\); needs \(4,\)"):
        attention_forward(Attention(True), *qkv(), None, s_aux=torch.zeros(3))
    with pytest.raises(ValueError, match=r"sinks: got shape \(4,\); needs \(B, H, Lq, 1\)"):
        attention_forward(Attention(True), *qkv(), None, sinks=torch.zeros(4))


def test_ignore() -> None:
    register("scaledot_ignoring", ignore=["block_indices"])
    function = transformers.AttentionInterface()["scaledot_ignoring"]
    output, _ = function(Attention(True), *qkv(), None, block_indices=torch.zeros(1))
    assert output.shape == (2, 6, 4, 5)
    with pytest.raises(TypeError, match="other: Attention passes"):
        function(Attention(True), *qkv(), None, block_indices=torch.zeros(1), other=1)


# ---------------------------------------------------------------------------------------------------------- register
def test_register_again_and_by_other_names() -> None:
    register()
    register("ours")
    for name in ("scaledot", "ours"):
        assert name in transformers.AttentionInterface()
        assert name in transformers.masking_utils.AttentionMaskInterface()


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
def test_register_takes_no_name_of_theirs(name: str) -> None:
    with pytest.raises(ValueError, match=f"name: transformers has an attention implementation called '{name}'"):
        register(name)


def test_register_without_transformers() -> None:
    needs = r"version 5.*pip install 'transformers>=5.0'"
    with mock.patch.dict(sys.modules, {"transformers": None}), pytest.raises(ImportError, match=needs):
        register()
    older = types.ModuleType("transformers")
    older.__version__ = "4.40.0"  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"transformers": older}), pytest.raises(ImportError, match=needs):
        register()
