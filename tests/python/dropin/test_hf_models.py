"""Models of Hugging Face transformers with scaledot's attention, against their eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

import tolerances
from hf_models import CAUSAL, LENGTH, MODELS, SIZES, T5_SIZES, inputs_of, make, run, solved

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("registered_in_transformers"),
]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_output_gradients_and_weights(name: str, padding: str) -> None:
    exact, eager = solved(name, padding)
    output, gradients, weights = run(make(name), "scaledot", name, padding)
    tolerances.check("output", output, exact[0], tolerances.error(eager[0], exact[0]))
    assert gradients.keys() == eager[1].keys()
    # A parameter with almost no effect, such as a key's bias, has a gradient of cancelling terms: only noise remains.
    whole = max(tolerances.largest(g) for g in exact[1].values())
    for key, gradient in gradients.items():
        error = max(tolerances.error(eager[1][key], exact[1][key]), torch.finfo(torch.float32).eps * whole)
        tolerances.check(key, gradient, exact[1][key], error, gradient=True)
    assert len(weights) == len(exact[2])  # some versions of transformers collect none for T5
    _, real = inputs_of(name, padding)
    for number, (found, oracle, yardstick) in enumerate(zip(weights, exact[2], eager[2], strict=True)):
        # A padded query with nothing to attend to has weights 0 here. Eager's are uniform, or on masked keys. Its
        # hidden state, and its weights in later layers, therefore differ.
        live = torch.ones_like(found[:, :1, :, :1]) if real is None else real[:, None, :, None]
        error = tolerances.error(yardstick * live, oracle * live)
        tolerances.check(f"weights {number}", found * live, oracle * live, error)


@pytest.mark.parametrize("name", ["llama", "afmoe, window and experts", "axk1, value_dim and experts"])
def test_padding_on_the_left_has_zeros_where_eager_has_a_mean(name: str) -> None:
    """Padding's weights are 0 here and uniform in eager. The test above compares all other rows."""
    _, real = inputs_of(name, "left")
    assert real is not None
    first = {kind: run(make(name), kind, name, "left")[2][0].detach() for kind in ("eager", "scaledot")}
    padding = {kind: weights.transpose(1, 2)[~real] for kind, weights in first.items()}
    assert not padding["scaledot"].any()
    assert torch.equal(padding["eager"], torch.full_like(padding["eager"], 1 / LENGTH))


def test_padding_of_a_blip2_decoder() -> None:
    """As above: its decoder_attentions differ from eager's in the rows of padding and in no other."""
    sizes = {**SIZES, "encoder_hidden_size": 32}
    config = transformers.Blip2Config(
        vision_config={**SIZES, "image_size": 28, "patch_size": 14},
        qformer_config=sizes,
        text_config={"model_type": "t5", **T5_SIZES, "decoder_start_token_id": 0},
        num_query_tokens=3,
        image_token_index=98,
    )
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    ids = torch.randint(3, 97, (2, 9))
    ids[:, :3] = 98  # the image's
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    inputs = {"pixel_values": torch.randn(2, 3, 28, 28), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"decoder_input_ids": torch.randint(3, 97, (2, 5)), "decoder_attention_mask": mask}
    first = {}
    for kind in ("eager", "scaledot"):
        model.set_attn_implementation(kind)
        weights = model(**inputs, output_attentions=True).language_model_outputs.decoder_attentions[0]
        first[kind] = weights.detach().transpose(1, 2)
    real = mask.bool()
    torch.testing.assert_close(first["scaledot"][real], first["eager"][real])
    assert not first["scaledot"][~real].any()
    assert torch.equal(first["eager"][~real], torch.full_like(first["eager"][~real], 1 / 5))


def test_sinks_and_relative_positions_get_gradients() -> None:
    for name, parameter in (("gpt-oss, sinks", "self_attn.sinks"), ("t5, bias", "relative_attention_bias.weight")):
        gradients = run(make(name), "scaledot", name, "right")[1]
        found = [gradient for key, gradient in gradients.items() if key.endswith(parameter)]
        assert len(found) == 2  # layers; or encoder and decoder
        assert all(gradient.any() for gradient in found)


HALF = ["bert", "llama", "gemma2, softcap", "mimo v2, sinks and value_dim", "t5 encoder, bias"]


@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str) -> None:
    exact, _ = solved(name, "right")
    eager = run(make(name).bfloat16(), "eager", name, "right")
    ours = run(make(name).bfloat16(), "scaledot", name, "right")
    # The model's own weights are rounded to bfloat16, so both sides are equally far from the oracle.
    assert tolerances.error(ours[0], exact[0]) <= 1.5 * tolerances.error(eager[0], exact[0])


GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
KEPT: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True}


def generate_both(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Any, Any]:
    """Generates with eager attention and with scaledot. Asserts equal tokens and close scores."""
    found = []
    for implementation in ("eager", "scaledot"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**inputs, **GREEDY, **KEPT, **options))
    eager, ours = found
    assert torch.equal(eager.sequences, ours.sequences)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(eager.scores), rtol=1e-5, atol=2e-5)
    return eager, ours


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*CAUSAL, "t5, bias", "bart"])
def test_generate_with_cache(name: str, padded: bool, cache: str | None) -> None:
    inputs, _ = inputs_of("llama", "left")
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    eager, ours = generate_both(make(name), inputs, cache_implementation=cache)
    steps = "attentions" if name in CAUSAL else "decoder_attentions"
    assert [len(layers) for layers in ours[steps]] == [len(layers) for layers in eager[steps]]
    torch.testing.assert_close(ours[steps][-1][-1:], eager[steps][-1][-1:], rtol=1e-5, atol=1e-6)


def test_generate_from_audio() -> None:
    inputs, _ = inputs_of("whisper", "none")
    _, ours = generate_both(make("whisper"), {"input_features": inputs["input_features"]})
    assert ours.cross_attentions[-1][-1].shape == (2, 4, 1, 20)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generate_with_chunked_prefill(name: str, padding: str) -> None:
    """Several queries with a cache that is not empty."""
    inputs, _ = inputs_of(name, padding)
    model = make(name)
    _, chunks = generate_both(model, inputs, prefill_chunk_size=3)
    whole = model.generate(**inputs, **GREEDY)
    assert torch.equal(chunks.sequences, whole)


@pytest.mark.parametrize("name", ["gemma3, window", "gpt-oss, sinks"])
def test_generate_with_beams(name: str) -> None:
    generate_both(make(name), inputs_of(name, "left")[0], num_beams=3)


@pytest.mark.parametrize("name", CAUSAL)
def test_several_queries_with_a_cache(name: str) -> None:
    model = make(name)
    inputs, _ = inputs_of(name, "none")
    ids = inputs["input_ids"]
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("scaledot")
    start = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=start.past_key_values)
    torch.testing.assert_close(torch.cat([start.logits, rest.logits], 1), expected, rtol=1e-5, atol=2e-5)


NO_MASK_OF_POSITIONS = ["gpt-oss, sinks", "afmoe, window and experts"]  # in transformers 5.23


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "gpt2"])  # gpt2 passes no positions on
def test_packed_sequences(name: str) -> None:
    """Two sequences in one row, told apart by their positions, give what each gives alone, or an error."""
    model = make(name)
    model.set_attn_implementation("scaledot")
    ids = inputs_of(name, "none")[0]["input_ids"]
    first, second = ids[:1, :6], ids[1:, :4]
    both = {"input_ids": torch.cat([first, second], 1)}
    both["position_ids"] = torch.cat([torch.arange(6), torch.arange(4)])[None]
    mixed = [{"use_cache": True}, {"attention_mask": torch.ones(1, 10), "use_cache": False}]
    if name in NO_MASK_OF_POSITIONS:
        mixed.append({"use_cache": False})
    else:
        packed = model(**both, use_cache=False).logits
        torch.testing.assert_close(packed[:, :6], model(first).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed[:, 6:], model(second).logits, rtol=1e-5, atol=1e-5)
    for options in mixed:  # transformers' own functions let the sequences attend to each other
        with pytest.raises(ValueError, match="position_ids: got positions that restart in row 0 at 6"):
            model(**both, **options)
    later = model(first, position_ids=torch.arange(100, 106)[None]).logits  # other positions, but one sequence
    torch.testing.assert_close(later, model(first).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("floating", [False, True])
def test_packed_sequences_with_a_user_mask(floating: bool) -> None:
    model = make("llama")
    model.set_attn_implementation("scaledot")
    ids = inputs_of("llama", "none")[0]["input_ids"][:1, :10]
    first = torch.arange(10) < 6
    mask = ((first[:, None] == first) & torch.ones(10, 10).bool().tril())[None, None]
    mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if floating else mask
    positions = torch.cat([torch.arange(6), torch.arange(4)])[None]
    packed = model(ids, position_ids=positions, attention_mask=mask).logits
    torch.testing.assert_close(packed[:, 6:], model(ids[:, 6:]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_positions_of_padding_are_ignored(padding: str) -> None:
    model = make("llama")
    model.set_attn_implementation("scaledot")
    inputs, _ = inputs_of("llama", padding)
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    logits = model(**inputs, position_ids=positions).logits[1][mask[1].bool()]
    torch.testing.assert_close(logits, model(inputs["input_ids"][1:, mask[1].bool()]).logits[0], rtol=1e-5, atol=1e-5)


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


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile() -> None:
    """One graph, and bitwise the same result."""
    model = make("gpt-oss, sinks")
    model.set_experts_implementation("batched_mm")  # the default loops over the experts in use
    model.set_attn_implementation("scaledot")
    inputs, _ = inputs_of("gpt-oss, sinks", "right")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits)


def graphs_of_lengths(name: str, implementation: str, **options: Any) -> list[int]:
    """The number of graphs after each call, for lengths above, at and below the sliding window of 4."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make(name)
    if "gpt-oss" in name:
        model.set_experts_implementation("batched_mm")
    model.set_attn_implementation(implementation)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    counts = []
    for length in (9, 14, 21, 4, 3, 2):
        ids, mask = torch.randint(3, 99, (2, length)), torch.ones(2, length, dtype=torch.int64)
        mask[1, -1:] = 0
        compiled(input_ids=ids, attention_mask=mask, **options)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["llama", "mistral, window", "gemma2, softcap", "gpt-oss, sinks"])
def test_compile_has_one_graph_for_all_lengths(name: str) -> None:
    assert graphs_of_lengths(name, "scaledot", use_cache=False) == [1] * 6


OTHERS = {"mistral, window": ["eager", "sdpa"], "gemma2, softcap": ["eager"], "gpt-oss, sinks": ["eager"]}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", OTHERS)
def test_compile_with_a_cache_has_as_many_graphs_as_other_attention(name: str) -> None:
    """A sliding window's cache keeps the last 3 keys, so shorter prompts need another graph with any attention."""
    counts = [graphs_of_lengths(name, implementation) for implementation in ("scaledot", *OTHERS[name])]
    assert counts == [counts[0]] * len(counts)
    assert counts[0][:4] == [1] * 4
    assert counts[0][-1] <= 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["bert", "t5 encoder, bias", "gemma2, softcap"])
def test_export(name: str) -> None:
    model = make(name).requires_grad_(False)
    model.set_attn_implementation("scaledot")
    inputs = inputs_of(name, "right")[0] | ({"use_cache": False} if name in CAUSAL else {})
    program = torch.export.export(model, (), inputs, strict=False)
    assert sum("scaledot.sdpa" in str(node.target) for node in program.graph.nodes) == 2  # one per layer
    assert torch.equal(program.module()(**inputs)[0], model(**inputs)[0])


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
