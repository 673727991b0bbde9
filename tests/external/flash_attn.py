"""The conditions of flash-attn 2.8's tests/test_flash_attn.py on its parameter grid, for `dropin.flash_attn` on a CPU.

https://github.com/Dao-AILab/flash-attention. The grid has half a million combinations, so every check takes some that
are spread over it. Batches, heads and lengths are flash-attn's. Its rule compares max errors against float32: ours,
and that of the plain formula in the tensors' own dtype. By hand, variables of the environment ask for more:

    SCALEDOT_FLASH_ATTN_SHARE=10        how many times as many combinations
    SCALEDOT_FLASH_ATTN_SEED=1          other combinations, as well spread; 0 by default
    SCALEDOT_FLASH_ATTN_SCORES=1e9      the most scores (Lq * Lk) of a head; 2^18 by default

Where a test repeats a call to find races, REPEATS replaces its 50 or 250.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from external.tally import Tally
from flash_attn_reference import rotated
from scaledot.dropin.flash_attn import (
    VERSION,
    bert_padding,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

SUITE = f"flash-attn {VERSION}: test_flash_attn.py"
SHARE = float(os.environ.get("SCALEDOT_FLASH_ATTN_SHARE", "1"))
SEED = int(os.environ.get("SCALEDOT_FLASH_ATTN_SEED", "0"))
SCORES = float(os.environ.get("SCALEDOT_FLASH_ATTN_SCORES", 2**18))
REPEATS = 2

HALF = (torch.float16, torch.bfloat16)
BOTH = (False, True)
DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
PAIRS = ((113, 203), (128, 217), (113, 211), (108, 256), (256, 512))
UNEVEN = ((1, 239), (3, 799), (127, 512), (127, 513), *PAIRS, (1023, 1024))
LONG = ((512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048))
HEADS = {"mha": 6, "mqa": 1, "gqa": 2}
Condition = dict[str, Any]
Grid = dict[str, Sequence[Any]]


def spread(grid: Grid, count: int) -> Iterator[Condition]:
    """`count` times SHARE combinations of at most SCORES, spread over the grid; the same ones every time for a SEED."""
    sizes = [len(values) for values in grid.values()]
    total, left = math.prod(sizes), round(count * SHARE)
    step = round(total * (math.sqrt(5) - 1) / 2)  # multiples of the golden ratio are spread evenly
    while math.gcd(step, total) > 1:
        step += 1
    first = Random(SEED).randrange(total) if SEED else 0
    for k in range(first, first + total):
        place, condition = k * step % total, {}
        for (name, values), size in zip(reversed(grid.items()), reversed(sizes), strict=True):
            place, index = divmod(place, size)
            condition[name] = values[index]
        if not left:
            return
        if math.prod(condition.get("lengths") or [condition["length"]] * 2) <= SCORES:
            left -= 1
            yield condition


def title(condition: Condition) -> str:
    return " ".join(f"{name}={value}".replace("torch.", "") for name, value in condition.items())


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


# ------------------------------------------------------------------------------------------------ the tests
def packed(tally: Tally, padded: bool) -> None:
    lengths = (97, 128, 200, 257, 384, 512, 768, 1025, 2048) if padded else (97, 128, 200, 384, 768, 1024, 1025, 2048)
    dims = (32, 59, 64, 80, 96, 128, 160, 192, 224, 256) if padded else DIMS
    grid: Grid = {
        "dtype": HALF, "deterministic": BOTH, "alibi": BOTH, "local": BOTH, "causal": BOTH, "d": dims,
        "length": lengths, "dropout_p": (0.0, 0.17),
    }  # fmt: skip
    batch, heads = (5, 6) if padded else (4, 9)
    for c in spread(grid, 6):
        with tally.case(title(c)):
            torch.manual_seed(0)
            qkv = [random(batch, c["length"], heads, c["d"], dtype=c["dtype"]) for _ in range(3)]
            Call(*qkv, {**c, "packing": "qkv", "same_lengths": True}, padded).check(2, 2)


def output(tally: Tally, padded: bool) -> None:
    dims = tuple(d for d in DIMS if d != (40 if padded else 80))
    grid: Grid = {
        "packing": ("kv", None), "dtype": HALF, "heads": tuple(HEADS), "deterministic": BOTH, "alibi": BOTH,
        "local": BOTH, "causal": BOTH, "d": dims, "lengths": (*([(1, 147)] if padded else []), *PAIRS, *LONG),
        "dropout_p": (0.0, 0.17), "softcap": (0.0, 50.0),
    }  # fmt: skip
    for c in spread(grid, 12):
        if c["softcap"] and c["dropout_p"]:
            tally.skip("softcap and dropout: flash-attn has not both")
            continue
        with tally.case(title(c)):
            torch.manual_seed(0)
            heads = 4 if c["softcap"] else 6
            kv_heads = heads if c["heads"] == "mha" else HEADS[c["heads"]]
            length_q, length_k = c["lengths"]
            q = random(4, length_q, heads, c["d"], dtype=c["dtype"], scale=c["softcap"] or 1.0)
            k, v = (random(4, length_k, kv_heads, c["d"], dtype=c["dtype"]) for _ in range(2))
            Call(q, k, v, c, padded).check(2, 3)


def uneven(c: Condition, batch: int) -> list[Tensor]:
    """q, k and v of 9 heads with c's lengths, the other way round if swapped."""
    torch.manual_seed(0)
    length_q, length_k = reversed(c["lengths"]) if c["swapped"] else c["lengths"]
    return [random(batch, n, 9, c["d"], dtype=c["dtype"]) for n in (length_q, length_k, length_k)]


def causal(tally: Tally, padded: bool) -> None:
    grid: Grid = {"dtype": HALF, "local": BOTH, "d": DIMS, "swapped": BOTH, "lengths": UNEVEN}
    if padded:
        grid["page"] = (None, 256, 512)
    for c in spread(grid, 8):
        with tally.case(title(c)):
            call = Call(*uneven(c, 8), {**c, "causal": True}, padded)
            if c.get("page"):
                check_pages(call, c["page"])
            else:
                call.check(2, 2, 1e-5, 1e-5)


def in_pages(length: int, page: int, batch: int, *like: Tensor) -> tuple[list[Tensor], Tensor]:
    """The first tokens of (B, length, H, D) in pages at random places of pools three times as large, and the table."""
    each = math.ceil(length / page)
    table = torch.randperm(each * batch * 3)[: each * batch].view(batch, each)
    pools = []
    for tensor in like:
        pool = torch.randn(each * batch * 3, page, *tensor.shape[2:]).to(tensor.dtype)
        whole = torch.nn.functional.pad(tensor.detach(), (0, 0, 0, 0, 0, each * page - length))
        pool[table.flatten()] = whole.unflatten(1, (each, page)).flatten(0, 1)
        pools.append(pool)
    return pools, table.int()


def check_pages(call: Call, page: int) -> None:
    """flash_attn_varlen_func with keys in pages; it has no backward."""
    tensors, lengths = call.unpadded()
    (k, v), table = in_pages(call.length_k, page, 8, *call.leaves[1:])
    with torch.no_grad():
        out: Any = flash_attn_varlen_func(
            tensors[0], k, v, *lengths, 0.0, causal=True, window_size=call.window, block_table=table
        )
        exact, plain = (torch.stack([call.expected(wide, b, None)[0] for b in range(8)]) for wide in (True, False))
    within("out", call.padded_again(out), exact, plain, 2, 1e-5)


def splitkv(tally: Tally) -> None:
    lengths = ((3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000), (128, 128), (256, 256))
    grid: Grid = {
        "dtype": HALF, "deterministic": BOTH, "alibi": BOTH, "local": BOTH, "causal": BOTH, "d": DIMS,
        "swapped": BOTH, "lengths": lengths,
    }  # fmt: skip
    for c in spread(grid, 16):
        with tally.case(title(c)):
            torch.manual_seed(0)
            length_q, length_k = reversed(c["lengths"]) if c["swapped"] else c["lengths"]
            leaves = [random(1, n, 12, c["d"], dtype=c["dtype"]) for n in (length_q, length_k, length_k)]
            Call(*leaves, c, False).check(2, 8 if c["alibi"] else 2, 1e-5, 2e-4)


def kvcache(tally: Tally) -> None:
    lengths = (
        (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (1, 128 * 1024),
        (16, 128 * 1024), (128, 128),
    )  # fmt: skip
    grid: Grid = {
        "num_splits": (1, 0), "heads": ("mha", "mqa", "gqa"), "new": BOTH, "alibi": BOTH, "local": BOTH,
        "causal": BOTH, "new_as_q": BOTH, "interleaved": BOTH, "rotary": (0.0, 0.5, 1.0), "page": (None, 256),
        "leftpad": BOTH, "d": (32, 59, 64, 80, 128, 256), "lengths": lengths,
    }  # fmt: skip
    for c in spread(grid, 60):
        if not c["new"] and c["rotary"]:
            tally.skip("rotary without new keys: flash-attn skips it")
        elif c["leftpad"] and c["page"]:
            tally.skip("pages with left padding: flash-attn skips it")
        else:
            with tally.case(title(c)), torch.no_grad():
                check_cache(c)


def check_cache(c: Condition) -> None:
    torch.manual_seed(0)
    batch, heads, d = 2, 6, c["d"]
    kv_heads = {"mha": 6, "mqa": 1, "gqa": 3}[c["heads"]]
    length_q, length_k = c["lengths"]
    turned = int(c["rotary"] * d) // 16 * 16
    window = drawn_window(c["local"], length_k)
    q = random(batch, length_q, heads, d).detach()
    count = length_q if c["new_as_q"] else int(torch.randint(1, length_q + 1, ()))
    k, v = (random(batch, count, kv_heads, d).detach() if c["new"] else None for _ in range(2))
    caches = [random(batch, length_k, kv_heads, d).detach() for _ in range(2)]
    along = c["causal"] or c["local"]
    room = length_q if along and turned > 1 else count
    used = torch.randint(0, length_k - room + 1, (batch,)) if c["new"] else torch.randint(1, length_k + 1, (batch,))
    pad = torch.stack([torch.randint(0, max(int(n), 1), ()) for n in used]) if c["leftpad"] else None
    cos = sin = None
    q_turned, k_turned = q, k
    if turned:
        assert k is not None
        angles = torch.rand(length_k if c["page"] is None else math.ceil(length_k / c["page"]) * c["page"], turned // 2)
        cos, sin = (f(angles * 2 * math.pi).half() for f in (torch.cos, torch.sin))
        steps = torch.arange(length_q) * int(along)
        q_turned = rotated(q, cos, sin, used[:, None] + steps, c["interleaved"])
        k_turned = rotated(k, cos, sin, used[:, None] + torch.arange(count), c["interleaved"])
    wanted = [cache.clone() for cache in caches]
    total = used
    if c["new"]:
        places = torch.arange(batch)[:, None], used[:, None] + torch.arange(count)
        wanted[0][places], wanted[1][places] = k_turned, v
        total = used + count
    slopes = torch.rand(batch, heads) * 0.3 if c["alibi"] else None
    table = None
    stored = caches
    if c["page"]:
        stored, table = in_pages(length_k, c["page"], batch, *caches)
    out = flash_attn_with_kvcache(
        q, *stored, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=used.int(),
        cache_leftpad=None if pad is None else pad.int(), block_table=table, causal=c["causal"], window_size=window,
        rotary_interleaved=c["interleaved"], alibi_slopes=slopes, num_splits=c["num_splits"],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    if c["new"]:
        found = stored if table is None else [x[table.long()].flatten(1, 2)[:, :length_k] for x in stored]
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-3)
        assert torch.equal(found[1], wanted[1])
    first = torch.zeros_like(used) if pad is None else pad
    places = torch.arange(length_k)
    results: list[list[Tensor]] = [[], []]
    for b in range(batch):
        live = (places >= first[b]) & (places < total[b])
        distance = distances(length_q, length_k, length_q, int(total[b] - first[b]), int(first[b]))
        hidden = hidden_keys(distance, c["causal"], window) | ~live
        bias = None if slopes is None else -slopes[b][:, None, None] * distance.abs()
        for result, wide in zip(results, (True, False), strict=True):
            result.append(formula(q_turned[b], wanted[0][b], wanted[1][b], hidden, wide, bias)[0])
    exact, plain = map(torch.stack, results)
    within("out", out, exact, plain, 5 if c["alibi"] else 3, 1e-5)


def same_bits(run: Callable[[], Sequence[Tensor]]) -> None:
    first = run()
    for _ in range(REPEATS):
        for again, before in zip(run(), first, strict=True):
            assert torch.equal(again, before)


def race_condition(tally: Tally) -> None:
    lengths = [(1, 239), (239, 1), (3, 799), (799, 3), (1024, 128)]
    lengths += [(n, n) for n in (97, 128, 200, 256, 257, 384, 512, 768, 1024)]
    grid: Grid = {"causal": BOTH, "d": DIMS, "lengths": lengths, "dropout_p": (0.0, 0.17)}
    for c in spread(grid, 3):
        with tally.case(title(c)):
            length_q, length_k = c["lengths"]
            torch.manual_seed(0)
            leaves = [random(60, n, 4, c["d"]) for n in (length_q, length_k, length_k)]
            grad = torch.randn(60, length_q, 4, c["d"]).half()

            def run(leaves: list[Tensor] = leaves, grad: Tensor = grad, c: Condition = c) -> Sequence[Tensor]:
                torch.manual_seed(42)
                out, lse, _ = flash_attn_func(*leaves, c["dropout_p"], causal=c["causal"], return_attn_probs=True)
                return out, lse, *torch.autograd.grad(out, leaves, grad)

            same_bits(run)


def deterministic(tally: Tally, padded: bool) -> None:
    grid: Grid = {"dtype": HALF, "local": BOTH, "causal": BOTH, "d": DIMS, "swapped": BOTH, "lengths": UNEVEN}
    for c in spread(grid, 8):
        with tally.case(title(c)):
            call = Call(*uneven(c, 2 if padded else 4), {**c, "deterministic": True}, padded)
            out, _ = call.ours()
            grad = torch.randn_like(out)
            same_bits(lambda out=out, call=call, grad=grad: torch.autograd.grad(  # type: ignore[misc]
                out, call.leaves, grad, retain_graph=True))  # fmt: skip


def backward_overflow(tally: Tally) -> None:
    for causal_, d, length in itertools.product(BOTH, (16, 32, 64), (1, 2, 5, 17, 128)):
        with tally.case(f"causal={causal_} d={d} length={length}"):
            torch.manual_seed(0)
            leaves = [random(2, length, 5, d, scale=scale) for scale in (5.0, 3.0, 3.0)]
            Call(*leaves, {"causal": causal_}, False).check(2, 5, 0.0, 1e-3)


def backward_transpose(tally: Tally) -> None:
    for dtype, causal_, d, length in itertools.product(HALF, BOTH, (64, 128), (97, 128, 200, 256)):
        with tally.case(f"{dtype} causal={causal_} d={d} length={length}"):
            torch.manual_seed(0)
            leaves = [random(5, length, 2, d, dtype=dtype) for _ in range(3)]
            call = Call(*leaves, {"causal": causal_}, False)
            grad = torch.randn(length, 10, 2, d, dtype=dtype)[:, ::2]  # not contiguous
            out = call.ours()[0]
            call.compare(out, out, grad.transpose(0, 1), 2, 2)


def backward_varlen_overflow(tally: Tally) -> None:
    ends_q, ends_k = torch.tensor([0, 76, 110, 256]).int(), torch.tensor([0, 1, 2, 3]).int()
    for causal_, d in itertools.product(BOTH, (16, 32, 64)):
        with tally.case(f"causal={causal_} d={d}"):
            torch.manual_seed(0)
            leaves = [random(n, 5, d, scale=3.0) for n in (256, 3, 3)]
            out = flash_attn_varlen_func(*leaves, ends_q, ends_k, 256, 3, causal=causal_)
            assert isinstance(out, Tensor)
            for gradient in torch.autograd.grad(out, leaves, torch.randn_like(out)):
                assert not gradient.isnan().any()


CHECKS: dict[str, Callable[[Tally], None]] = {
    "qkvpacked": lambda tally: packed(tally, False),
    "varlen_qkvpacked": lambda tally: packed(tally, True),
    "output": lambda tally: output(tally, False),
    "varlen_output": lambda tally: output(tally, True),
    "causal": lambda tally: causal(tally, False),
    "varlen_causal": lambda tally: causal(tally, True),
    "splitkv": splitkv,
    "kvcache": kvcache,
    "race_condition": race_condition,
    "bwd_overflow": backward_overflow,
    "bwd_transpose": backward_transpose,
    "bwd_varlen_overflow": backward_varlen_overflow,
    "deterministic": lambda tally: deterministic(tally, False),
    "varlen_deterministic": lambda tally: deterministic(tally, True),
}
