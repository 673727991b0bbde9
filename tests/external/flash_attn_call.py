"""A call of dropin.flash_attn, compared with the plain formula by the rule of flash-attn's tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaledot.dropin.flash_attn import (
    bert_padding,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

Condition = dict[str, Any]


# ------------------------------------------------------------------------------------------------ the plain formula
def distances(length_q: int, length_k: int, used_q: int, used_k: int, first: int = 0) -> Tensor:
    """How far each key is after its row's own place, for used_q rows and used_k keys, of which `first` is the first."""
    return torch.arange(length_k) - first - (torch.arange(length_q)[:, None] + used_k - used_q)


def hidden_keys(distance: Tensor, causal: bool, window: Sequence[int]) -> Tensor:
    left, right = int(window[0]), 0 if causal else int(window[1])
    hidden = distance > right if right >= 0 or left >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    return hidden | (distance < -left) if left >= 0 else hidden


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    wide: bool,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out (L, H, D), weights (H, L, Lk) before dropout) of one sequence, in float32.

    Unless `wide` every step is rounded to q's dtype, and so is every gradient. Tensors of that dtype would give this on
    a GPU, whose products have sums in float32. A CPU takes some 100 times as long for them.
    """
    dtype, groups = q.dtype, q.size(1) // k.size(1)

    def step(x: Tensor) -> Tensor:
        return x if wide else x.to(dtype).float()

    query, key, value = (x.transpose(0, 1).float() for x in (q, *(x.repeat_interleave(groups, 1) for x in (k, v))))
    factor = 1 / math.sqrt(q.size(-1))
    scores = step(step(query * factor) @ key.mT) if wide else step(query @ step(key * factor).mT)
    if softcap:
        scores = step(step(step(scores / softcap).tanh()) * softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    if bias is not None:  # float32, as flash-attn's
        scores = scores + bias
    empty = hidden.all(-1, keepdim=True)
    weights = step(scores.masked_fill(empty, 0.0).softmax(-1)).masked_fill(empty, 0.0)
    kept = weights if keep is None else weights * keep
    out = kept @ step(value / (1 - dropout_p))
    return out.transpose(0, 1).to(dtype), weights


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def within(name: str, ours: Tensor, exact: Tensor, plain: Tensor, factor: float, floor: float = 0.0) -> None:
    error, yardstick = gap(ours, exact), gap(plain, exact)
    limit = factor * yardstick + floor
    assert error <= limit, f"{name}: error {error:.3e}, that of the plain formula {yardstick:.3e}, limit {limit:.3e}"


def random(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=dtype) * scale).requires_grad_()


def drawn_window(local: bool, length: int) -> Any:
    """flash-attn's tests pass a tensor, which dropin.flash_attn refuses: its signature says a tuple."""
    return tuple(torch.randint(0, length, (2,)).tolist()) if local else (-1, -1)


def drawn_lengths(length: int, batch: int) -> Tensor:
    return torch.randint(max(1, length - 20), length + 1, (batch,))


# ------------------------------------------------------------------------------------------------ one comparison
class Call:
    """A call of one of the functions in a batch with or without padding, compared with the formula."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, condition: Condition, padded: bool) -> None:
        self.leaves, self.padded, self.condition = [q, k, v], padded, condition
        batch, self.length_q, heads, _ = q.shape
        self.length_k = k.size(1)
        self.window = drawn_window(condition.get("local", False), self.length_k)
        self.used = [drawn_lengths(n, batch) if padded else None for n in (self.length_q, self.length_k)]
        if condition.get("same_lengths"):
            self.used[0] = self.used[1]
        self.slopes = torch.rand(batch, heads) * 0.3 if condition.get("alibi") else None
        self.options: dict[str, Any] = {
            "causal": condition.get("causal", False),
            "window_size": self.window,
            "alibi_slopes": self.slopes,
            "deterministic": condition.get("deterministic", False),
        }
        if condition.get("softcap"):
            self.options["softcap"] = condition["softcap"]

    def live(self, side: int) -> Tensor:
        """(B, L), the tokens of query (0) or key (1)."""
        used, length = self.used[side], (self.length_q, self.length_k)[side]
        every = torch.arange(length).expand(self.leaves[0].size(0), length)
        return every >= 0 if used is None else every < used[:, None]

    def unpadded(self) -> tuple[list[Tensor], list[Any]]:
        """q, k and v without padding, and cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
        found = [bert_padding.unpad_input(x, self.live(min(n, 1))) for n, x in enumerate(self.leaves)]
        return [one[0] for one in found], [found[0][2], found[1][2], found[0][3], found[1][3]]

    def padded_again(self, out: Tensor) -> Tensor:
        indices = self.live(0).flatten().nonzero().flatten()
        return bert_padding.pad_input(out, indices, self.leaves[0].size(0), self.length_q)

    def ours(self) -> tuple[Tensor, Tensor]:
        """(out (B, Lq, H, D), S_dmask)."""
        dropout_p, packing = self.condition.get("dropout_p", 0.0), self.condition.get("packing")
        more = {**self.options, "return_attn_probs": True}
        tensors, lengths = self.unpadded() if self.padded else (self.leaves, [])
        q, k, v = tensors
        if packing == "qkv":
            stacked = torch.stack(tensors, -3)
            results = (
                flash_attn_varlen_qkvpacked_func(stacked, lengths[0], lengths[2], dropout_p, **more)
                if self.padded
                else flash_attn_qkvpacked_func(stacked, dropout_p, **more)
            )
        elif packing == "kv":
            call = flash_attn_varlen_kvpacked_func if self.padded else flash_attn_kvpacked_func
            results = call(q, torch.stack([k, v], -3), *lengths, dropout_p, **more)
        else:
            plain: Any = flash_attn_varlen_func if self.padded else flash_attn_func
            results = plain(q, k, v, *lengths, dropout_p, **more)
        out, _, probabilities = results
        return self.padded_again(out) if self.padded else out, probabilities

    def expected(self, wide: bool, b: int, keep: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(out, weights, leaves) of sequence b alone."""
        used_q, used_k = (int(self.live(side)[b].sum()) for side in (0, 1))
        distance = distances(self.length_q, self.length_k, used_q, used_k)
        hidden = hidden_keys(distance, self.options["causal"], self.window)
        hidden = hidden | ~(self.live(1)[b][None, :] & self.live(0)[b][:, None])
        bias = None if self.slopes is None else -self.slopes[b][:, None, None] * distance.abs()
        leaves = [x[b].detach().requires_grad_() for x in self.leaves]
        softcap, dropout_p = self.condition.get("softcap") or 0.0, self.condition.get("dropout_p", 0.0)
        return *formula(*leaves, hidden, wide, bias, softcap, keep, dropout_p), leaves

    def check(self, out_factor: float, factor: float, out_floor: float = 0.0, floor: float = 0.0) -> None:
        """Output and gradients; with dropout the weights and the fraction that is dropped."""
        out, probabilities = self.ours()
        grad = torch.randn_like(out)
        self.compare(out, probabilities, grad, out_factor, factor, out_floor, floor)

    def compare(
        self,
        out: Tensor,
        probabilities: Tensor,
        grad: Tensor,
        out_factor: float,
        factor: float,
        out_floor: float = 0.0,
        floor: float = 0.0,
    ) -> None:
        found = [out.detach(), *torch.autograd.grad(out, self.leaves, grad)]
        gaps = [[0.0, 0.0] for _ in range(5)]  # ours and the plain formula's, of out, dq, dk, dv and the weights
        dropped = possible = 0
        dropout_p = self.condition.get("dropout_p", 0.0)
        for b in range(out.size(0)):
            keep = self.kept(probabilities[b]) if dropout_p else None
            results = []
            for wide in (True, False):
                one, weights, leaves = self.expected(wide, b, keep)
                results.append([one.detach(), *torch.autograd.grad(one, leaves, grad[b]), weights.detach()])
            ours = [x[b] for x in found]
            if keep is not None:
                missing = (0, keep.size(-1) - probabilities.size(-1), 0, keep.size(-2) - probabilities.size(-2))
                ours.append(torch.nn.functional.pad(probabilities[b].detach(), missing) * (1 - dropout_p))
                for result in results:
                    result[-1] = result[-1] * keep
                every = self.shown(b)
                dropped, possible = dropped + int((every & ~keep).sum()), possible + int(every.sum()) * keep.size(0)
            for entry, mine, exact, plain in zip(gaps, ours, *results, strict=False):
                entry[0], entry[1] = max(entry[0], gap(mine, exact)), max(entry[1], gap(plain, exact))
        rules = [(out_factor, out_floor), *[(factor, floor)] * 3, (2, 0.0)]
        for name, (error, yardstick), (times, more) in zip(
            ("out", "dq", "dk", "dv", "weights"), gaps, rules, strict=True
        ):
            limit = times * yardstick + more
            assert error <= limit, (
                f"{name}: error {error:.3e}, that of the plain formula {yardstick:.3e}, limit {limit:.3e}"
            )
        if dropout_p and self.slopes is None:  # with ALiBi, many weights are 0 without being dropped
            local = self.condition.get("local", False)
            limit = 0.01 if not local else 0.04 if self.padded else 0.025
            fraction = dropped / possible
            assert abs(fraction - dropout_p) <= limit, f"dropped: got {fraction:.3f}; needs {dropout_p} +- {limit}"

    def kept(self, probabilities: Tensor) -> Tensor:
        """(H, Lq, Lk), which weights of a sequence were not dropped."""
        missing = (0, self.length_k - probabilities.size(-1), 0, self.length_q - probabilities.size(-2))
        return torch.nn.functional.pad(probabilities != 0, missing)

    def shown(self, b: int) -> Tensor:
        """(1, Lq, Lk), which keys the rows of sequence b attend to."""
        used_q, used_k = (int(self.live(side)[b].sum()) for side in (0, 1))
        hidden = hidden_keys(
            distances(self.length_q, self.length_k, used_q, used_k), self.options["causal"], self.window
        )
        return (~hidden & self.live(1)[b][None, :] & self.live(0)[b][:, None])[None]
