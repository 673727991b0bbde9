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

from external.flash_attn_call import Call, Condition, distances, drawn_window, formula, hidden_keys, random, within
from external.tally import Tally
from flash_attn_reference import rotated
from scaledot.dropin.flash_attn import (
    VERSION,
    flash_attn_func,
    flash_attn_varlen_func,
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
    """The first tokens of (B, length, H, D) in pages at random places of pools three times as large, and the table.

    Pages that the table does not name are NaN, which would be noticed in a result.
    """
    each = math.ceil(length / page)
    table = torch.randperm(each * batch * 3)[: each * batch].view(batch, each)
    pools = []
    for tensor in like:
        pool = torch.full((each * batch * 3, page, *tensor.shape[2:]), math.nan, dtype=tensor.dtype)
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
