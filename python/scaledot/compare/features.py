"""Comparisons: the features of an attention call, and the cases made from features, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .shapes import Entry, Shape

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHORT_DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
PASSES = {"forward": "forward", "backward": "backward", "total": "forward + backward"}
SHORT_PASSES = {"forward": "fwd", "backward": "bwd", "total": "fwd+bwd"}


@dataclass(frozen=True)
class Feature:
    """One option of an attention call, or one kind of input."""

    title: str
    about: str
    mask: str = "none"  # none | random | documents | lists | padding | float | grad (float, and requires a gradient)
    is_causal: bool = False
    blocks: bool = False  # the mask is a BlockMask for us
    lists: bool = False  # the mask is key_indices for us
    window: bool = False  # causal, and only the last eighth of the keys
    alibi: bool = False
    relative_reach: int = 0  # relative_bias for distances up to this; it requires a gradient
    softcap: float | None = None
    dropout_p: float = 0.0
    return_weights: bool = False
    layout: str = "bhld"  # blhd: views of (B, L, H, D) memory, as a projection produces
    module: bool = False  # the whole of nn.MultiheadAttention
    score_mod: bool = False  # a score function; what it captures requires a gradient
    cache: torch.dtype | None = None  # of quantised keys and values: packed, and without a gradient
    reshape: Callable[[Shape], Shape] | None = None  # turns a plain shape into this feature's shape
    square: bool = False  # needs Lq == Lk

    def why_not(self, shape: Shape) -> str | None:
        """Why this feature does not apply to this shape, or None if it does."""
        if self.square and shape.query_length != shape.key_length:
            return "needs as many queries as keys"
        if self.module and (shape.kv_heads != shape.heads or shape.value_dim != shape.head_dim):
            return "torch's module needs as many KV heads as query heads, and values as wide as keys"
        if self.reshape and shape == self.reshape(shape) and shape.kv_heads == shape.heads:
            return "needs several heads" if shape.heads == 1 else "the shape has it already"
        return None

    def why_not_in(self, dtype: torch.dtype, device: str) -> str | None:
        """Why this feature does not exist in this dtype on this type of device, or None if it does."""
        if self.score_mod and device != "cpu":
            return "score functions need a CPU"
        if self.lists and device != "cpu":
            return "lists of keys need a CPU"
        return "quantised keys have no float64 queries" if self.cache and dtype == torch.float64 else None


def _group_heads(shape: Shape) -> Shape:
    if shape.kv_heads != shape.heads or shape.heads == 1:
        return shape
    return shape.with_(kv_heads=shape.heads // 4 if shape.heads % 4 == 0 else 1)


def _widen_values(shape: Shape) -> Shape:
    return shape if shape.value_dim != shape.head_dim else shape.with_(value_dim=shape.head_dim * 3 // 2)


FEATURES: dict[str, Feature] = {
    "plain": Feature("plain", "no option"),
    "causal": Feature("causal", "is_causal", is_causal=True, square=True),
    "bool_mask": Feature("bool mask", "(Lq, Lk), 30% masked at random", mask="random"),
    "documents": Feature(
        "documents", "bool (Lq, Lk): four documents packed into one row", mask="documents", square=True
    ),
    "block_mask": Feature(
        "block mask", "documents, as a BlockMask of 128 x 128", mask="documents", blocks=True, square=True
    ),
    "key_indices": Feature(
        "lists of keys", "an eighth of the keys, drawn for each row, as key_indices", mask="lists", lists=True
    ),
    "padding": Feature("padding", "bool (B, 1, 1, Lk): sequences of 40% to 80% of the length", mask="padding"),
    "float_mask": Feature("float mask", "(Lq, Lk), added", mask="float"),
    "mask_grad": Feature("mask with gradient", "(1, H, Lq, Lk), added, and requires a gradient", mask="grad"),
    "dropout": Feature("dropout", "dropout_p = 0.1", dropout_p=0.1),
    "causal_dropout": Feature("causal + dropout", "a GPT in training", is_causal=True, dropout_p=0.1, square=True),
    "weights": Feature("weights", "return_weights", return_weights=True),
    "mha_weights": Feature(
        "nn.MHA, weights", "nn.MultiheadAttention in training, weights averaged over heads", module=True, square=True
    ),
    "gqa": Feature("GQA", "four query heads per KV head", reshape=_group_heads),
    "value_dim": Feature("d_v = 1.5 d_k", "values wider than keys", reshape=_widen_values),
    "blhd": Feature("strided (B, L, H, D)", "views of (B, L, H, D) memory", layout="blhd"),
    "window": Feature("causal window", "the last eighth of the keys", is_causal=True, window=True, square=True),
    "softcap": Feature("softcap", "5 * tanh(score / 5)", softcap=5.0),
    "alibi": Feature("ALiBi", "causal, one slope per head", is_causal=True, alibi=True, square=True),
    "relative_bias": Feature(
        "relative bias", "a learned number a head for each distance up to 128, as in T5", relative_reach=128
    ),
    "score_mod": Feature(
        "score function",
        "a learned gate and slope of each head: s * sigmoid(gate[h]) - slope[h] * |i - j|",
        score_mod=True,
    ),
    "cache_int8": Feature("int8 cache", "packed keys and values of int8, with scales", cache=torch.int8),
    "cache_e5m2": Feature("e5m2 cache", "the same of float8_e5m2", cache=torch.float8_e5m2),
    "cache_e4m3": Feature("e4m3 cache", "the same of float8_e4m3fn", cache=torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class Case:
    feature_name: str
    base: str  # the shape before the feature changed it: its cost is relative to the plain case of the same base
    shape: Shape
    dtype_name: str

    @property
    def feature(self) -> Feature:
        return FEATURES[self.feature_name]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def group(self) -> str:
        """Cases of one group share a line in the summary and a bar in the plot."""
        title, regime = self.feature.title, self.shape.regime
        if title == "plain" and not regime and self.shape.head_dim not in (64, 128):
            title = "other head widths"
        return title if not regime else regime if title == "plain" else f"{regime}, {title}"

    @property
    def attended(self) -> int:
        """The number of scores that is_causal, window and lists of keys leave. Other masks count as dense."""
        shape = self.shape
        if self.feature.lists:
            return shape.batch * shape.heads * shape.query_length * self.listed
        if not self.feature.is_causal:
            return shape.scores
        reach = self.window_left + 1 if self.feature.window else shape.key_length
        rows = (min(i + 1, reach, shape.key_length) for i in range(shape.query_length))
        return shape.batch * shape.heads * sum(rows)

    @property
    def window_left(self) -> int:
        return max(self.shape.key_length // 8, 1)

    @property
    def listed(self) -> int:
        """The number of keys in the list of a row."""
        return max(self.shape.key_length // 8, 1)

    def flops(self, which: str) -> int:
        """Operations of the matrix products: two in the forward, five in the backward, which recomputes the scores."""
        d, dv = self.shape.head_dim, self.shape.value_dim
        forward, backward = 2 * self.attended * (d + dv), 2 * self.attended * (3 * d + 2 * dv)
        return {"forward": forward, "backward": backward, "total": forward + backward}[which]


def cases_of(
    entries: tuple[Entry, ...], features: tuple[str, ...] | None, dtypes: tuple[str, ...], device: str = "cpu"
) -> tuple[list[Case], list[str]]:
    """All cases without duplicates, and notes on features that were named but do not apply.

    Args:
        entries: the shapes, each with its features.
        features: if given, replaces the features of the entries.
        dtypes: names of DTYPES.
        device: its type.
    """
    cases: dict[Case, None] = {}
    notes: dict[str, None] = {}
    for name, text, explicit in _pairs(entries, features):
        feature, base = FEATURES[name], Shape.parse(text)
        reason = feature.why_not(base)
        if reason is None:
            shape = feature.reshape(base) if feature.reshape else base
            for dtype in dtypes:
                missing = feature.why_not_in(DTYPES[dtype], device)
                if missing is None:
                    cases[Case(name, text, shape, dtype)] = None
                elif explicit:
                    notes[f"{name} in {dtype}: not run: {missing}"] = None
        elif explicit:
            notes[f"{name} at {text}: not run: {reason}"] = None
    order = list(FEATURES)
    return sorted(cases, key=lambda c: (c.shape.regime, order.index(c.feature_name))), list(notes)


def _pairs(entries: tuple[Entry, ...], features: tuple[str, ...] | None) -> Iterator[tuple[str, str, bool]]:
    for entry in entries:
        wanted = features or entry.features
        for text in entry.shapes:
            for name in wanted or FEATURES:
                yield name, text, wanted is not None
