"""The models of ``compare --models``. The weights are random, so nothing is downloaded.

The models have few layers. All layers of a model are alike, so the ratio of the whole model is that of a layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Results = dict[str, Tensor]
Call = Callable[[], Results]

SIDES = ("scaledot", "sdpa", "eager")
PEERS = SIDES[1:]
INSTALL = {"transformers": "pip install 'scaledot[transformers]'", "diffusers": "pip install diffusers"}
_VOCABULARY = 5120  # a sixth of the usual size, as two layers are a sixth of twelve
_DROPOUT = 0.1
_SEED = 0


def _results(module: nn.Module, inputs: Inputs) -> Call:
    """A call of the module with the inputs as keywords."""

    def call() -> Results:
        found = module(**inputs)
        names = ("loss", "logits", "last_hidden_state")
        return {name: found[name] for name in names if found.get(name) is not None}

    return call


def _choose_transformers(module: nn.Module, side: str) -> None:
    module.set_attn_implementation(side)  # type: ignore[operator]


def _no_context(side: str) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class Built:
    """A model with random float32 weights, and its inputs."""

    module: nn.Module
    inputs: Callable[[int], Inputs]  # by the batch; the first sample is the same for every batch
    batch: int
    shape: str
    amount: int  # tokens or samples in a call with `batch`
    start: Callable[[nn.Module, Inputs], Call] = _results
    choose: Callable[[nn.Module, str], None] = _choose_transformers  # gives a module a side's attention
    context: Callable[[str], AbstractContextManager[Any]] = _no_context  # in which a side's calls run


@dataclass(frozen=True)
class Model:
    title: str
    about: str
    make: Callable[[bool], Built]  # by whether the model is to be small
    work: str = "forward"  # the name of the one pass of a model that is not trained
    unit: str = "tokens"
    trains: bool = False
    package: str = "transformers"
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def passes(self) -> tuple[str, ...]:
        return (*TRAINING, STEP) if self.trains else (self.work,)

    @property
    def whole(self) -> str:
        """The pass that the plot shows."""
        return STEP if self.trains else self.work

    def missing(self) -> str | None:
        """Why the model cannot run here, and what to install; or None."""
        if importlib.util.find_spec(self.package) is not None:
            return None
        return f"needs {self.package}: run `{INSTALL[self.package]}`"


TRAINING = ("forward", "backward", "optimizer")
STEP = "step"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _ids(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=_generator())


def _prompt(length: int) -> Callable[[int], Inputs]:
    """Inputs of nothing but tokens."""
    return lambda batch: {"input_ids": _ids(batch, length, _VOCABULARY)}


# ------------------------------------------------------------------------------------------------- transformers
def _bert(quick: bool) -> Built:
    from transformers import BertConfig, BertForSequenceClassification

    heads, layers, batch, length = (4, 2, 2, 64) if quick else (12, 2, 8, 512)
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64 * heads,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=256 * heads,
        hidden_dropout_prob=_DROPOUT,
        attention_probs_dropout_prob=_DROPOUT,
    )

    def inputs(batch: int) -> Inputs:
        ids = _ids(batch, length, config.vocab_size)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(batch) % 2}

    shape = f"{batch} x {length}, {heads} heads of 64, {layers} layers"
    return Built(BertForSequenceClassification(config), inputs, batch, shape, batch)


def _t5(quick: bool) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    heads, layers, batch, length, target = (4, 2, 2, 64, 16) if quick else (12, 2, 4, 512, 128)
    start_token: dict[str, Any] = {"decoder_start_token_id": 0}  # a field that T5Config does not declare
    config = T5Config(
        vocab_size=_VOCABULARY,
        d_model=64 * heads,
        d_kv=64,
        d_ff=512 * heads // 3,
        feed_forward_proj="gated-gelu",  # as T5 1.1. Near 0, float32 may take the other side of a ReLU than float64.
        num_layers=layers,
        num_heads=heads,
        dropout_rate=_DROPOUT,
        use_cache=False,
        **start_token,
    )

    def inputs(batch: int) -> Inputs:
        ids = _ids(batch, length, config.vocab_size)
        return {"input_ids": ids, "labels": ids[:, :target].contiguous()}

    def choose(module: nn.Module, side: str) -> None:
        _choose_transformers(module, side)
        if side == "scaledot":
            from ...dropin.transformers import convert_relative_bias

            convert_relative_bias(module)

    shape = f"{batch} x {length} to {target}, {heads} heads of 64, {layers} layers"
    return Built(T5ForConditionalGeneration(config), inputs, batch, shape, batch, choose=choose)


def _gpt2(quick: bool) -> Built:
    from transformers import GPT2Config, GPT2Model

    heads, layers, batch, length = (4, 2, 1, 64) if quick else (12, 2, 2, 1024)
    config = GPT2Config(vocab_size=_VOCABULARY, n_embd=64 * heads, n_head=heads, n_layer=layers, n_positions=length)
    shape = f"{batch} x {length}, {heads} heads of 64, {layers} layers"
    return Built(GPT2Model(config), _prompt(length), batch, shape, batch * length)


def _grouped(heads: int, kv_heads: int, dim: int, positions: int) -> dict[str, Any]:
    """Settings that the configurations of models with grouped heads share. There is one layer."""
    return {
        "vocab_size": _VOCABULARY,
        "hidden_size": heads * dim,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": positions,
    }


def _mistral(quick: bool) -> Built:
    from transformers import MistralConfig, MistralModel

    heads, kv_heads, dim, length, window = (4, 2, 16, 96, 24) if quick else (16, 4, 128, 4096, 1024)
    config = MistralConfig(
        **_grouped(heads, kv_heads, dim, length), intermediate_size=11 * heads * dim // 4, sliding_window=window
    )
    shape = f"1 x {length}, window {window}, {heads}:{kv_heads} heads of {dim}, 1 layer"
    return Built(MistralModel(config), _prompt(length), 1, shape, length)


def _llama(quick: bool, *, static: bool = False) -> Built:
    from transformers import LlamaConfig, LlamaModel

    heads, kv_heads, dim, context = (4, 2, 16, 128) if quick else (32, 8, 128, 8192)
    config = LlamaConfig(**_grouped(heads, kv_heads, dim, context), intermediate_size=7 * heads * dim // 2)

    def inputs(batch: int) -> Inputs:
        past = torch.randn(2, batch, kv_heads, context - 1, dim, generator=_generator())
        return {"input_ids": _ids(batch, 1, config.vocab_size), "key": past[0], "value": past[1]}

    def start(module: nn.Module, inputs: Inputs) -> Call:
        return _decode_static(module, inputs, context) if static else _decode_dynamic(module, inputs)

    shape = f"1 token after {context - 1}, {heads}:{kv_heads} heads of {dim}, 1 layer"
    return Built(LlamaModel(config), inputs, 1, shape, 1, start=start)


def _llama_static(quick: bool) -> Built:
    return _llama(quick, static=True)


def _decode_dynamic(module: Any, inputs: Inputs) -> Call:
    """One token after those of a DynamicCache. The token is taken out of the cache again."""
    from transformers import DynamicCache

    cache = DynamicCache(config=module.config)
    cache.update(inputs["key"], inputs["value"], 0)

    def call() -> Results:
        found = module(input_ids=inputs["input_ids"], past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return {"last_hidden_state": found.last_hidden_state}

    return call


def _decode_static(module: Any, inputs: Inputs, context: int) -> Call:
    """Decodes one token as `_decode_dynamic` does, with a StaticCache that the token fills."""
    from transformers import StaticCache

    cache = StaticCache(config=module.config, max_cache_len=context)
    cache.update(inputs["key"], inputs["value"], 0)
    layer: Any = cache.layers[0]

    def call() -> Results:
        found = module(input_ids=inputs["input_ids"], past_key_values=cache, use_cache=True)
        layer.cumulative_length.fill_(context - 1)
        return {"last_hidden_state": found.last_hidden_state}

    return call


def _vit(quick: bool) -> Built:
    from transformers import ViTConfig, ViTModel

    heads, layers, batch, image = (4, 2, 2, 64) if quick else (12, 2, 8, 224)
    config = ViTConfig(
        hidden_size=64 * heads,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=256 * heads,
        image_size=image,
        patch_size=16,
    )

    def inputs(batch: int) -> Inputs:
        return {"pixel_values": torch.randn(batch, 3, image, image, generator=_generator())}

    shape = f"{batch} x {(image // 16) ** 2 + 1}, {heads} heads of 64, {layers} layers"
    return Built(ViTModel(config, add_pooling_layer=False), inputs, batch, shape, batch)


# --------------------------------------------------------------------------------------------------- diffusers
def _diffusion(quick: bool) -> Built:
    from diffusers.models.attention import BasicTransformerBlock

    heads, length, text, batch = (2, 64, 7, 1) if quick else (10, 4096, 77, 1)
    width, text_width = 64 * heads, 128 if quick else 2048
    module = BasicTransformerBlock(width, heads, 64, cross_attention_dim=text_width)

    def inputs(batch: int) -> Inputs:
        random = _generator()
        states = torch.randn(batch, length, width, generator=random)
        return {
            "hidden_states": states,
            "encoder_hidden_states": torch.randn(batch, text, text_width, generator=random),
        }

    def start(module: nn.Module, inputs: Inputs) -> Call:
        return lambda: {"output": module(**inputs)}

    shape = f"{batch} x {length} with {text} of text, {heads} heads of 64, 1 block"
    return Built(module, inputs, batch, shape, batch, start, _choose_diffusers, _context_diffusers)


def _choose_diffusers(module: nn.Module, side: str) -> None:
    from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

    processor: Any = AttnProcessor if side == "eager" else AttnProcessor2_0
    for part in module.modules():
        if isinstance(part, Attention):
            part.set_processor(processor())


@contextmanager
def _context_diffusers(side: str) -> Iterator[None]:
    """diffusers has no names for attention, so scaledot takes F.scaled_dot_product_attention's place."""
    from ...dropin import sdpa

    with sdpa.activate() if side == "scaledot" else nullcontext():
        yield


MODELS: Mapping[str, Model] = {
    "bert": Model(
        "BERT, training", "a training step with dropout 0.1, for classification", _bert, unit="samples", trains=True
    ),
    "t5": Model(
        "T5, training", "a training step with dropout 0.1 and the relative bias", _t5, unit="samples", trains=True
    ),
    "gpt2": Model("GPT-2, prefill", "the prompt, with a cache", _gpt2, work="prefill"),
    "llama": Model(
        "Llama, decoding", "one token, DynamicCache", _llama, work="decode", dtypes=("float32", "bfloat16")
    ),
    "llama_static": Model(
        "Llama, static cache", "one token, StaticCache", _llama_static, work="decode", dtypes=("float32", "bfloat16")
    ),
    "mistral": Model("Mistral, prefill", "the prompt, with a sliding window", _mistral, work="prefill"),
    "vit": Model("ViT", "the forward", _vit, unit="samples"),
    "diffusion": Model(
        "diffusion block", "a block of SDXL, by dropin.sdpa", _diffusion, unit="samples", package="diffusers"
    ),
}
