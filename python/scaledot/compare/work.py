"""The work of one case: its tensors, our call, the peer's call, and the oracle's results for the sample."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import scaledot
from scaledot import BlockMask
from scaledot._load import OPS
from scaledot._seed import draw_seed

from .eager import eager_attention
from .features import Case
from .sample import Sample

Tensors = dict[str, Tensor]
Call = Callable[[], Any]

_DROPOUT_SEED = 20  # for torch.manual_seed in the correctness check
_BACKENDS = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cuDNN",
}


class Work(Protocol):
    """A case with its tensors. Its calls return the output, or a tuple that begins with the output."""

    case: Case
    inputs: Tensors  # the tensors that get gradients; empty if the feature has no backward
    sample: Sample
    peer_label: str
    trains: bool  # whether the forward is timed with gradients recorded, because the feature needs them

    def ours(self, leaves: Tensors) -> Call: ...

    def peer(self, leaves: Tensors) -> Call: ...

    def checked_calls(self, leaves: Tensors) -> tuple[Call, Call]:
        """Our call and the peer's; with dropout, both drop the same weights."""

    def peer_bytes(self) -> int:
        """Roughly how many bytes the peer needs for matrices of the scores' shape."""

    def kernels(self) -> dict[str, str]:
        """The name of our kernel, by pass."""

    def cotangent(self) -> Tensor:
        """A gradient of the output that is 0 outside the sample."""

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """The sampled part of a result or gradient, `name`."""

    def solve(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        """(results, gradients) of the sample by eager operations in `dtype`."""


def generator_of(case: Case) -> torch.Generator:
    """A generator seeded by the feature and shape, so that every dtype gets the same numbers."""
    return torch.Generator().manual_seed(zlib.crc32(f"{case.feature_name} {case.shape}".encode()))


def _folded_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """F.sdpa with the query heads of a KV head as rows of one head."""
    batch, heads, rows, width = query.shape
    folded = query.reshape(batch, key.size(1), heads // key.size(1) * rows, width)
    return F.scaled_dot_product_attention(folded, key, value).view(batch, heads, rows, value.size(-1))


def leaves_of(inputs: Tensors, grad: bool) -> Tensors:
    return {name: tensor.detach().requires_grad_(grad) for name, tensor in inputs.items()}


class AttentionWork:
    """A case that runs scaled_dot_product_attention."""

    def __init__(self, case: Case, device: torch.device, peer: str = "sdpa") -> None:
        self.case, self.device = case, device
        self._random = generator_of(case)
        shape, feature = case.shape, case.feature
        self.inputs: Tensors = {
            "query": self._normal(shape.heads, shape.query_length, shape.head_dim),
            "key": self._normal(shape.kv_heads, shape.key_length, shape.head_dim),
            "value": self._normal(shape.kv_heads, shape.key_length, shape.value_dim),
        }
        self.mask = self._mask()
        self.block_mask = BlockMask.from_dense(self.mask) if feature.blocks and self.mask is not None else None
        self.key_indices = None
        if feature.lists and self.mask is not None:
            self.key_indices = self.mask.nonzero()[:, -1].view(*self.mask.shape[:-1], case.listed)
        self.trains = feature.mask == "grad" or feature.relative_reach > 0
        if self.trains and self.mask is not None:
            self.inputs["attn_mask"] = self.mask
        if feature.relative_reach:
            entries = torch.randn(shape.heads, 2 * feature.relative_reach + 1, generator=self._random)
            self.inputs["relative_bias"] = entries.to(device, case.dtype)
        self.slopes = None
        if feature.alibi:  # a geometric sequence that ends at 2^-8 (Press et al., 2022)
            self.slopes = 2.0 ** (torch.arange(1, shape.heads + 1, device=device) * (-8 / shape.heads))
        self.sample = Sample.of(shape)
        # Torch's best way with few rows: query heads that share a KV head become rows of one head.
        self.folds_heads = case.feature_name == "gqa" and shape.heads // shape.kv_heads * shape.query_length <= 128
        self.eager_peer = peer == "eager" or feature.return_weights or feature.softcap is not None
        self.peer_label = "eager" if self.eager_peer else self._sdpa_label()

    def _normal(self, heads: int, length: int, dim: int) -> Tensor:
        batch = self.case.shape.batch
        if self.case.feature.layout == "blhd":
            values = torch.randn(batch, length, heads, dim, generator=self._random).transpose(1, 2)
        else:
            values = torch.randn(batch, heads, length, dim, generator=self._random)
        return values.to(self.device, self.case.dtype)

    def _mask(self) -> Tensor | None:
        """The mask, always 4-D: a 3-D mask would make F.sdpa leave its fused path."""
        shape, kind = self.case.shape, self.case.feature.mask
        rows, keys = shape.query_length, shape.key_length
        if kind == "none":
            return None
        if kind == "random":
            mask = torch.rand(1, 1, rows, keys, generator=self._random) < 0.7
            mask[..., 0] = True  # no fully masked rows: torch returns NaN for them
        elif kind == "lists":
            drawn = torch.rand(1, 1, rows, keys, generator=self._random).topk(self.case.listed).indices
            mask = torch.zeros(1, 1, rows, keys, dtype=torch.bool).scatter_(-1, drawn, True)
        elif kind == "documents":
            document = torch.arange(keys) * 4 // keys
            mask = (document[:, None] == document)[None, None]
        elif kind == "padding":
            share = torch.linspace(0.8, 0.4, shape.batch) if shape.batch > 1 else torch.tensor([0.6])
            mask = scaledot.masks.padding_mask((share * keys).ceil().long(), keys)
        else:
            heads = shape.heads if kind == "grad" else 1
            mask = torch.randn(1, heads, rows, keys, generator=self._random).to(self.case.dtype)
        return mask.to(self.device)

    # ---------------------------------------------------------------------------------------------- the calls
    def _options(self, leaves: Tensors) -> dict[str, Any]:
        """The arguments besides query, key and value that F.sdpa has too."""
        shape, feature = self.case.shape, self.case.feature
        options: dict[str, Any] = {}
        if self.mask is not None:
            options["attn_mask"] = leaves.get("attn_mask", self.mask)
        if feature.dropout_p:
            options["dropout_p"] = feature.dropout_p
        if feature.is_causal:
            options["is_causal"] = True
        if shape.kv_heads != shape.heads:
            options["enable_gqa"] = True
        return options

    def _our_options(self, leaves: Tensors) -> dict[str, Any]:
        feature, options = self.case.feature, self._options(leaves)
        if feature.window:
            options["window"] = (self.case.window_left, 0)
        if feature.softcap is not None:
            options["softcap"] = feature.softcap
        if self.slopes is not None:
            options["alibi_slopes"] = self.slopes
        if feature.relative_reach:
            options["relative_bias"] = leaves["relative_bias"]
        if self.block_mask is not None:
            del options["attn_mask"]
            options["block_mask"] = self.block_mask
        if self.key_indices is not None:
            del options["attn_mask"]
            options["key_indices"] = self.key_indices
        if feature.return_weights:
            options["return_weights"] = True
        return options

    def _sdpa_options(self, leaves: Tensors) -> dict[str, Any]:
        """The arguments of F.sdpa. It needs a mask for window and ALiBi, which is built here, outside the timing."""
        options = self._options(leaves)
        if self.case.feature.relative_reach:
            options["attn_mask"] = self._relative_scores(leaves["relative_bias"])
        masked, bias = self._position_terms()
        if bias is not None and masked is not None:
            options["attn_mask"] = bias.masked_fill(masked, -torch.inf)
            del options["is_causal"]
        elif self.case.feature.window and masked is not None:
            options["attn_mask"] = ~masked
            del options["is_causal"]
        return options

    def ours(self, leaves: Tensors) -> Call:
        return _call(scaledot.scaled_dot_product_attention, leaves, self._our_options(leaves))

    def peer(self, leaves: Tensors) -> Call:
        if self.eager_peer:
            return _call(eager_attention, leaves, self._eager_options(leaves))
        if self.folds_heads:
            return lambda: _folded_sdpa(**leaves)
        if self.case.feature.relative_reach:  # the matrix is part of what is timed, because it has a gradient
            return lambda: _call(F.scaled_dot_product_attention, leaves, self._sdpa_options(leaves))()
        return _call(F.scaled_dot_product_attention, leaves, self._sdpa_options(leaves))

    def _eager_options(self, leaves: Tensors) -> dict[str, Any]:
        feature = self.case.feature
        masked, bias = self._position_terms()
        mask = leaves.get("attn_mask", self.mask)
        if self.case.feature.relative_reach:
            bias = self._relative_scores(leaves["relative_bias"])
        if mask is not None and mask.dtype == torch.bool:
            masked = ~mask
        elif mask is not None:
            bias = mask
        return {
            "masked": masked,
            "bias": bias,
            "softcap": feature.softcap,
            "dropout_p": feature.dropout_p,
            "return_weights": feature.return_weights,
        }

    def _sdpa_label(self) -> str:
        leaves = leaves_of(self.inputs, True)
        options = self._sdpa_options(leaves)
        choice = torch._fused_sdp_choice(leaves["query"], leaves["key"], leaves["value"], **options)
        made = " + mask" if "attn_mask" in options and self.mask is None else ""
        folded = ", heads folded" if self.folds_heads else ""
        return f"F.sdpa {_BACKENDS.get(choice, 'other')}{made}{folded}"

    def peer_bytes(self) -> int:
        if not self.eager_peer and "math" not in self.peer_label:
            return 0
        # Scores, masked scores, weights, dropped weights and gradients, each in 4 bytes: half precision is widened.
        return 6 * 4 * self.case.shape.scores

    def kernels(self) -> dict[str, str]:
        leaves = leaves_of(self.inputs, True)
        plan = scaledot.explain(leaves["query"], leaves["key"], leaves["value"], **self._our_options(leaves))
        return {"forward": plan.forward.kernel, "backward": plan.backward.kernel}

    # ------------------------------------------------------------------------------------------------ the check
    @functools.cached_property
    def _keep(self) -> Tensor | None:
        """The weights that our call's dropout keeps after torch.manual_seed(_DROPOUT_SEED)."""
        shape, dropout_p = self.case.shape, self.case.feature.dropout_p
        if not dropout_p:
            return None
        torch.manual_seed(_DROPOUT_SEED)
        sizes = (shape.batch, shape.heads, shape.query_length, shape.key_length)
        keep: Tensor = OPS.dropout_mask(draw_seed(), *sizes, dropout_p)
        return keep.to(self.device)

    def checked_calls(self, leaves: Tensors) -> tuple[Call, Call]:
        ours, peer, keep = self.ours(leaves), self.peer(leaves), self._keep
        if keep is None:
            return ours, peer

        def seeded() -> Any:
            torch.manual_seed(_DROPOUT_SEED)
            return ours()

        if self.eager_peer:
            return seeded, _call(eager_attention, leaves, {**self._eager_options(leaves), "keep": keep})
        # F.sdpa hides the dropout mask that it draws, but its math implementation takes one as an argument.
        options = {"dropout_mask": keep, **self._sdpa_options(leaves)}
        math = _call(torch._scaled_dot_product_attention_math, leaves, options)
        return seeded, lambda: math()[0]

    def cotangent(self) -> Tensor:
        shape = self.case.shape
        sizes = (shape.batch, shape.heads, shape.query_length, shape.value_dim)
        values = torch.randn(sizes, generator=generator_of(self.case)).to(self.device, self.case.dtype)
        return self.sample.inside(values)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        if name == "relative_bias":
            return tensor
        if name in ("key", "value"):
            return self.sample.keys(tensor)
        return self.sample.pick_rows(tensor) if name == "attn_mask" else self.sample.queries(tensor)

    def solve(self, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        feature, sample = self.case.feature, self.sample
        leaves = leaves_of({n: self.take(n, t).to(dtype) for n, t in self.inputs.items()}, True)
        masked, bias = self._position_terms(sample.rows, torch.promote_types(dtype, torch.float32))
        masked, bias = (None if t is None else sample.pick_heads(t) for t in (masked, bias))
        if "relative_bias" in leaves:
            bias = sample.pick_heads(self._relative_scores(leaves["relative_bias"], sample.rows))
        if "attn_mask" in leaves:
            bias = sample.pick_heads(leaves["attn_mask"])
        elif self.mask is not None and self.mask.dtype == torch.bool:
            masked = ~sample.queries(self.mask)
        elif self.mask is not None:
            bias = sample.queries(self.mask).to(dtype)
        keep = None if self._keep is None else sample.queries(self._keep)
        tensors = leaves["query"], leaves["key"], leaves["value"]
        options: dict[str, Any] = {"softcap": feature.softcap, "dropout_p": feature.dropout_p, "keep": keep}
        output, weights = eager_attention(*tensors, masked, bias, return_weights=True, **options)
        grads = torch.autograd.grad(output, list(leaves.values()), sample.queries(self.cotangent()).to(dtype))
        results = {"output": output.detach()}
        if feature.return_weights:
            results["weights"] = weights.detach()
        return results, dict(zip(leaves, grads, strict=True))

    def _relative_scores(self, entries: Tensor, rows: Tensor | None = None) -> Tensor:
        """(1, H, R, Lk): relative_bias of these rows (default all), differentiable."""
        shape, reach = self.case.shape, self.case.feature.relative_reach
        if rows is None:
            rows = torch.arange(shape.query_length)
        distance = torch.arange(shape.key_length) - rows[:, None]
        index = (distance.clamp(-reach, reach) + reach).to(entries.device)
        return entries.index_select(1, index.flatten()).view(1, -1, *index.shape)

    def _position_terms(
        self, rows: Tensor | None = None, bias_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor | None, Tensor | None]:
        """(masked, bias) of is_causal, window and ALiBi for these rows (default all); (1, 1 or H, R, Lk) or None."""
        shape, feature = self.case.shape, self.case.feature
        if not feature.is_causal:
            return None, None
        if rows is None:
            rows = torch.arange(shape.query_length)
        distance = (torch.arange(shape.key_length) - rows[:, None]).to(self.device)
        masked = distance > 0
        if feature.window:
            masked |= distance < -self.case.window_left
        bias = None
        if self.slopes is not None:
            # At least float32: in half precision the bias far from the diagonal would be off by whole units.
            slopes = self.slopes.to(bias_dtype)
            bias = (-slopes[:, None, None] * distance.abs())[None]
        return masked[None, None], bias


def _call(function: Callable[..., Any], leaves: Tensors, options: dict[str, Any]) -> Call:
    return functools.partial(function, leaves["query"], leaves["key"], leaves["value"], **options)
