"""Keys and values of 8 bits with scales: attention over stored * scale, forward only."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

import scaledot
from bad_arguments import refused
from kernels_under_test import BFLOAT16_ONLY, FEW_ROWS, GENERAL, KERNELS, forced
from quantised_cache import CACHES, DTYPES, LENGTHS, SCALES, Cache, attend, check_rule, make, paged, stored
from varlen_cases import cumulative

explain: Any = scaledot.explain_varlen


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_attention_over_the_dequantised_cache(name: str, cache: str, dtype: str, scales: str) -> None:
    made = make(name, cache, dtype, scales)
    if scales == "none":  # moderate scores
        made.query = made.query * (0.01 if cache == "int8" else 0.2)
    check_rule(made, is_causal=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "upper left": dict(is_causal=True, causal_alignment="upper_left"),
    "window": dict(window=(30, 2)),
    "softcap": dict(softcap=0.7),
    "scale": dict(scale=-0.3),
    "alibi": dict(alibi_slopes=torch.linspace(0.01, 0.4, 16).view(4, 4)),
    "relative": dict(relative_bias=torch.linspace(-2, 2, 4 * 41).view(4, 41)),
    "all": dict(
        is_causal=True, window=(200, None), softcap=2.0, alibi_slopes=torch.linspace(0.01, 0.4, 4),
        relative_bias=torch.linspace(-2, 2, 41).view(1, 41), scale=0.2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_every_option(name: str, cache: str, option: str) -> None:
    check_rule(make(name, cache), **OPTIONS[option])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_every_kernel(name: str, cache: str, kernel: str) -> None:
    dtype = "bfloat16" if "bf16" in kernel else "float16" if "avx512" in kernel else "float32"
    with forced(kernel):
        check_rule(make(name, cache, dtype), is_causal=True)


@pytest.mark.parametrize("dims", [(1, 1), (3, 130), (128, 128), (257, 9)])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_widths(name: str, cache: str, dims: tuple[int, int]) -> None:
    check_rule(make(name, cache, dims=dims))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_strides(name: str, cache: str) -> None:
    """Rows that begin at odd addresses, and a last stride of 2."""
    made = make(name, cache)
    wanted = made.run()
    wide = {n: torch.zeros(*getattr(made, n).shape[:2], 53, dtype=CACHES[cache]) for n in ("key", "value")}
    for n, tensor in wide.items():
        own = getattr(made, n)
        tensor[..., 1 : 1 + own.shape[-1]] = own
        wide[n] = tensor[..., 1 : 1 + own.shape[-1]]
    for a, b in zip(made.run(**wide), wanted, strict=True):
        assert torch.equal(a, b)
    strided = {n: getattr(made, n).repeat_interleave(2, -1)[..., ::2] for n in ("key", "value")}
    for a, b in zip(made.run(**strided), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths", [((1,), (7,)), ((30,), (31,))])
def test_all_codes(cache: str, lengths: Any) -> None:
    """Each of the 256 codes as a key and as a value, alone: exact, and NaN and inf as they are."""
    (rows,), (keys,) = lengths
    codes = torch.arange(256, dtype=torch.uint8).view(CACHES[cache])
    query = torch.zeros(256 * rows, 1, 1)
    value = codes.view(256, 1, 1).repeat_interleave(keys, 0)
    key = torch.zeros(256 * keys, 1, 1).to(CACHES[cache])
    made = Cache((rows,) * 256, (keys,) * 256, query, key, value, None, torch.tensor(0.5))
    found = made.run()[0].view(256, rows)
    wanted = (codes.float() * 0.5)[:, None].expand(256, rows)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=2e-7, atol=0)
    one = Cache((rows,) * 256, (1,) * 256, query + 1, codes.view(256, 1, 1), key[:256], torch.tensor(0.25), None)
    lse = one.run(scale=1.0)[1].view(256, rows)
    scores = (codes.float() * 0.25)[:, None].expand(256, rows)
    oracle = one.oracle(scale=1.0)[1].view(256, rows)
    assert torch.equal(lse.isnan(), oracle.isnan())
    finite = scores.isfinite()
    torch.testing.assert_close(lse[finite], scores[finite], rtol=2e-7, atol=0)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-30, -0.2, 1e30, float("nan")])
@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_unusual_scales(name: str, cache: str, which: str, scale: float) -> None:
    """As stored * scale gives them, also where keys are masked and rows have no key."""
    made = make(name, cache)
    setattr(made, which, torch.tensor([scale, 0.1]))
    found, wanted = made.run(is_causal=True), made.oracle(is_causal=True)
    for ours, oracle in zip(found, wanted, strict=True):
        finite = oracle.float().isfinite()
        assert torch.equal(ours.isfinite(), finite)
        assert torch.equal(ours.isnan(), oracle.isnan())
        if which == "v_scale" or abs(scale) < 1e10:  # otherwise one key has all the weight, or nearly
            atol = 1e-5 * float(oracle[finite].abs().max())
            torch.testing.assert_close(ours.double()[finite], oracle[finite], rtol=1e-4, atol=atol)


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("name", LENGTHS)
def test_an_infinite_scale_counts_as_nan(name: str, which: str) -> None:
    made = make(name, "int8", scales="one")
    found = made.run(**{which: torch.tensor(float("inf"))})
    wanted = made.run(**{which: torch.tensor(float("nan"))})
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
    assert found[0].isnan().all()


@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", LENGTHS)
def test_nan_and_inf_in_the_cache(name: str, cache: str) -> None:
    """Live ones are passed on; those that no row may attend to are not read."""
    made = make(name, cache, scales="heads")
    made.key.view(torch.uint8)[5, 0, 3] = 0x7F
    made.value.view(torch.uint8)[310, 1, 2] = 0x7C if cache == "e5m2" else 0xFF
    made.value.view(torch.uint8)[301, 0, :] = 0xFF
    found, wanted = made.run(is_causal=True), made.oracle(is_causal=True)
    for ours, oracle in zip(found, wanted, strict=True):
        assert torch.equal(ours.isnan(), oracle.isnan())
        assert torch.equal(ours.isposinf(), oracle.isposinf())
    assert not found[0].isfinite().all()
    unused = torch.full_like(made.key[:4].view(torch.uint8), 0x7F).view(made.key.dtype)
    clean = make(name, cache, scales="heads")
    used = torch.tensor(clean.keys)
    padded = {
        n: torch.cat(
            [part for rows in getattr(clean, n).split(clean.keys) for part in (rows, unused[..., : rows.shape[-1]])]
        )
        for n in ("key", "value")
    }
    bounds = cumulative(tuple(n + 4 for n in clean.keys))
    for a, b in zip(clean.run(**padded, cu_seq_k=bounds, seqused_k=used), clean.run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [1, 5, 16, 256, 2000])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_pages_have_the_bits_of_packed_keys(name: str, cache: str, size: int) -> None:
    made = make(name, cache, "bfloat16")
    for a, b in zip(made.run(**paged(made, size), is_causal=True), made.run(is_causal=True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", GENERAL + BFLOAT16_ONLY)
@pytest.mark.parametrize("cache", CACHES)
def test_a_prefill_has_the_bits_of_the_stored_numbers(cache: str, kernel: str) -> None:
    """They are exact in the query's dtype. k_scale is a factor of the scale, and v_scale = 1 changes nothing."""
    made = make("prefill", cache, "bfloat16" if "bf16" in kernel else "float32", "heads")
    assert made.k_scale is not None
    made.k_scale, made.v_scale = torch.full_like(made.k_scale, 0.03), None
    wide = Cache(made.rows, made.keys, made.query, made.key.to(made.query.dtype), made.value.to(made.query.dtype))
    with forced(kernel):
        found = made.run(is_causal=True, scale=0.5)
        wanted = wide.run(is_causal=True, scale=0.5 * float(made.k_scale[0]))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", LENGTHS)
def test_same_bits_for_any_number_of_threads(name: str, cache: str) -> None:
    made, found = make(name, cache, "float16"), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(made.run())
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


def test_scales_may_have_any_strides() -> None:
    made = make("decode", "int8")
    assert made.k_scale is not None
    strided = made.k_scale.t().contiguous().t()
    expanded = torch.tensor([0.1]).expand(4, 2)
    assert torch.equal(made.run(k_scale=strided)[0], made.run()[0])
    assert torch.equal(made.run(k_scale=expanded)[0], made.run(k_scale=torch.tensor(0.1))[0])


def test_dropout_drops_what_it_drops_of_a_plain_cache() -> None:
    made = make("prefill", "int8", scales="one")
    assert made.k_scale is not None
    assert made.v_scale is not None
    found, wanted = [], []
    for results, changes in (
        (found, {}),
        (wanted, dict(key=made.key * made.k_scale, value=made.value * made.v_scale, k_scale=None, v_scale=None)),
    ):
        torch.manual_seed(3)
        results += made.run(dropout_p=0.4, **changes)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ what is refused

HEADS_BF16 = torch.zeros(16, 2, 40, dtype=torch.bfloat16)
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "value plain": (dict(value=torch.zeros(1382, 2, 24)), ("value", "float32", "int8")),
    "key plain": (dict(key=torch.zeros(1382, 2, 40)), ("value", "int8", "float32")),
    "two dtypes": (dict(value=torch.zeros(1382, 2, 24).to(torch.float8_e5m2)), ("value", "float8_e5m2", "int8")),
    "float64": (dict(query=torch.zeros(4, 4, 40).double()), ("query", "float64", "int8", "bfloat16")),
    "quantised query": (dict(query=torch.zeros(4, 4, 40).to(torch.int8)), ("query", "int8", "float32")),
    "other bytes": (dict(key=torch.zeros(1382, 2, 40).to(torch.uint8)), ("key", "uint8", "float32")),
    "fnuz": (dict(key=torch.zeros(1382, 2, 40).to(torch.float8_e4m3fnuz)), ("key", "float8_e4m3fnuz", "float32")),
    "scale's heads": (dict(k_scale=torch.ones(4)), ("k_scale", "(4,)", "(kv_heads,)", "2 KV heads")),
    "one of two heads": (dict(v_scale=torch.ones(1)), ("v_scale", "(1,)", "2 KV heads")),
    "scale's sequences": (dict(v_scale=torch.ones(3, 2)), ("v_scale", "(3, 2)", "4 sequences")),
    "scale 3-D": (dict(k_scale=torch.ones(4, 2, 1)), ("k_scale", "(4, 2, 1)", "(sequences, kv_heads)")),
    "scale double": (dict(k_scale=torch.ones(2).double()), ("k_scale", "float64", "float32")),
    "scale bfloat16": (dict(v_scale=torch.ones(2).bfloat16()), ("v_scale", "bfloat16", "float32")),
    "scale device": (dict(k_scale=torch.ones(2, device="meta")), ("k_scale", "meta", "cpu")),
    "scale sparse": (dict(v_scale=torch.ones(2).to_sparse()), ("v_scale", "Sparse", "dense")),
    "scale number": (dict(k_scale=0.5), ("k_scale", "0.5", "torch.Tensor")),
    "query grad": (dict(query=torch.zeros(4, 4, 40, requires_grad=True)), ("query", "requires grad", "no_grad")),
    "scale grad": (dict(v_scale=torch.ones(2, requires_grad=True)), ("v_scale", "requires grad", "no_grad")),
    "bias grad": (dict(relative_bias=torch.ones(4, 3, requires_grad=True)), ("relative_bias", "requires grad")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    changes, needed = BAD[name]
    with refused(*needed):
        make("decode", "int8").run(**changes)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_beside_a_plain_cache(name: str) -> None:
    made = make("decode", "int8")
    plain = dict(key=made.key.float(), value=made.value.float(), k_scale=None, v_scale=None)
    with refused(name, "float32", "8 bits"):
        made.run(**plain | {name: torch.ones(2)})


@pytest.mark.parametrize("name", ["key", "value", "k_scale", "v_scale"])
def test_a_shrunk_storage(name: str) -> None:
    made = make("decode", "int8")
    tensor = getattr(made, name).clone()
    tensor.untyped_storage().resize_(4)
    with refused(name, "on a storage of 4 bytes"):
        made.run(**{name: tensor})


def test_a_key_that_requires_grad() -> None:
    made = make("decode", "e4m3")
    with refused("key", "requires grad", "no gradient"):
        made.run(key=made.key.requires_grad_())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_refused(mode: Any) -> None:
    made = make("decode", "int8")
    wanted = made.run()[0]
    with mode():
        found = made.run(query=made.query.requires_grad_(), v_scale=torch.ones(2, requires_grad=True) * made.v_scale)[0]
    assert torch.equal(found, wanted)


def test_forward_mode_is_refused() -> None:
    made = make("decode", "int8")
    with forward_ad.dual_level(), refused("query", "tangent", "no gradient"):
        made.run(query=forward_ad.make_dual(made.query, made.query))


def test_the_backward_op_is_refused() -> None:
    made = make("decode", "int8")
    output, lse = made.run()
    tensors = made.query, made.key, made.value, cumulative(made.rows), cumulative(made.keys)
    options: list[Any] = [None, 2, 1057, 0.0, False, None, True, "lower_right"]
    options += [None, None, None, None]
    with refused("key", "int8", "backward", "no gradient"):
        torch.ops.scaledot.varlen_backward(
            output,
            None,
            *tensors,
            *[None] * 5,
            made.k_scale,
            made.v_scale,
            None,
            output,
            lse,
            *options,
            [True, False, False, False, False],
        )


@pytest.mark.parametrize("cache", CACHES)
def test_dense_attention_takes_no_such_keys(cache: str) -> None:
    query = torch.zeros(1, 2, 3, 4)
    with refused("key", "8" if cache == "int8" else "float8", "float32"):
        scaledot.scaled_dot_product_attention(query, query.to(CACHES[cache]), query)
    with refused("attn_mask", "8", "bool"):
        scaledot.scaled_dot_product_attention(query, query, query, torch.zeros(3, 3).to(CACHES[cache]))


# ------------------------------------------------------------------------------------------------ torch's modes


@pytest.mark.parametrize("cache", CACHES)
def test_autocast_casts_the_query_only(cache: str) -> None:
    made = make("decode", cache)
    with torch.autocast("cpu", torch.bfloat16):
        found = made.run()
        plan = explain(
            made.query, made.key, made.value, cumulative(made.rows), cumulative(made.keys), 2, 1057, enable_gqa=True
        )
    wanted = made.run(query=made.query.bfloat16())
    assert all(map(torch.equal, found, wanted))
    assert found[0].dtype == torch.bfloat16
    assert plan.quantised == str(CACHES[cache]).removeprefix("torch.")


@pytest.mark.parametrize("cache", CACHES)
def test_meta_and_fake_tensors(cache: str) -> None:
    made = make("decode", cache)
    tensors = {n: getattr(made, n).to("meta") for n in ("query", "key", "value", "k_scale", "v_scale")}
    bounds = dict(cu_seq_q=cumulative(made.rows).to("meta"), cu_seq_k=cumulative(made.keys).to("meta"))
    for a, b in zip(made.run(**tensors, **bounds), made.run(), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    with refused("k_scale", "(3,)", "2 KV heads"):
        made.run(**tensors | bounds | {"k_scale": torch.ones(3, device="meta")})


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("scales", SCALES)
def test_opcheck(cache: str, scales: str) -> None:
    made = make("decode", cache, scales=scales)
    bounds = cumulative(made.rows), cumulative(made.keys)
    scale = made.k_scale, made.v_scale
    arguments = (made.query, made.key, made.value, *bounds, *[None] * 5, *scale, None, 2, 1057)
    # torch's comparison of an input before and after multiplies float8 tensors, which it cannot.
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    utils += ["test_schema"] if cache == "int8" else []
    opcheck(torch.ops.scaledot.varlen.default, arguments, dict(enable_gqa=True), test_utils=utils)


def test_compile_in_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()

    def step(
        query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, Tensor], longest: int, scale: Tensor
    ) -> Any:
        return attend(
            query,
            key,
            value,
            *bounds,
            4,
            longest,
            True,
            enable_gqa=True,
            k_scale=scale,
            v_scale=scale * 2,
            return_lse=True,
        )

    with torch._dynamo.config.patch(error_on_recompile=True):
        fast = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        for lengths in ((30, 41, 17), (5, 12), (300, 20, 7, 9)):
            rows = tuple(1 + n % 4 for n in lengths)
            generator = torch.Generator().manual_seed(len(lengths))
            query = torch.randn(sum(rows), 6, 8, generator=generator)
            key, value = (stored((sum(lengths), 2, 8), torch.float8_e4m3fn, generator) for _ in range(2))
            scale = torch.rand(len(lengths), 2, generator=generator)
            arguments = (query, key, value, (cumulative(rows), cumulative(lengths)), max(lengths), scale)
            for a, b in zip(fast(*arguments), step(*arguments), strict=True):
                assert torch.equal(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize("batched", ["qkvab", "q", "kv", "a", "qb"])
@pytest.mark.parametrize("scales", ["one", "heads", "sequences"])
def test_vmap(scales: str, batched: str) -> None:
    """Each sample gets its own result bit for bit. a and b: the scales."""
    made = make("decode", "int8", scales=scales)
    tensors = [made.query, made.key, made.value, made.k_scale, made.v_scale]
    dims = tuple(0 if n in batched else None for n in "qkvab")
    many = [
        t if d is None else torch.stack([t, -t, t.roll(1, 0) if t.dim() else t * 2])
        for t, d in zip(tensors, dims, strict=True)
    ]  # type: ignore[operator, union-attr]

    def run(query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor, v_scale: Tensor) -> Any:
        return made.run(query=query, key=key, value=value, k_scale=k_scale, v_scale=v_scale)

    found = torch.vmap(run, in_dims=dims)(*many)
    for k in range(3):
        alone = run(*[t if d is None else t[k] for t, d in zip(many, dims, strict=True)])
        for a, b in zip(found, alone, strict=True):
            assert torch.equal(a[k], b)


def test_vmap_refuses_what_a_call_refuses() -> None:
    made = make("decode", "int8")
    with refused("k_scale", "(3,)", "2 KV heads"):
        torch.vmap(lambda scale: made.run(k_scale=scale))(torch.ones(2, 3))


@pytest.mark.parametrize("cache", CACHES)
def test_explain_names_the_dtype(cache: str) -> None:
    made = make("decode", cache)
    bounds = cumulative(made.rows), cumulative(made.keys)
    arguments = (made.query, made.key, made.value, *bounds, 2, 1057)
    plan = explain(*arguments, enable_gqa=True, k_scale=made.k_scale)
    name = str(CACHES[cache]).removeprefix("torch.")
    assert plan.quantised == name
    assert plan.backward is None
    assert f"keys and values in {name}" in str(plan).splitlines()[0]
    assert str(plan).splitlines()[-1].endswith(f"none: keys and values in {name} have no gradient")
    assert plan.forward.kernels[0].kernel in FEW_ROWS
    plain = explain(made.query, made.key.float(), made.value.float(), *arguments[3:], enable_gqa=True)
    assert plain.quantised is None
    assert plain.backward is not None
    with refused("k_scale", "(3,)"):
        explain(*arguments, enable_gqa=True, k_scale=torch.ones(3))


def test_a_cache_that_is_written_and_read_step_by_step() -> None:
    """Tokens are quantised as they come, into pages; each step has the bits of the packed call."""
    made = make("decode", "e4m3", scales="heads")
    made.rows, made.keys, made.query = (1,), (0,), made.query[:1]
    pool = [torch.zeros(8, 4, *t.shape[1:], dtype=t.dtype) for t in (made.key, made.value)]
    table = torch.tensor([[6, 1, 3]], dtype=torch.int32)
    for step in range(12):
        page, row = int(table[0, step // 4]), step % 4
        pool[0][page, row], pool[1][page, row] = made.key[step], made.value[step]
        found = made.run(
            key=pool[0], value=pool[1], cu_seq_k=None, seqused_k=torch.tensor([step + 1]), block_table=table, max_k=12
        )
        packed = Cache(
            (1,), (step + 1,), made.query, made.key[: step + 1], made.value[: step + 1], made.k_scale, made.v_scale
        )
        for a, b in zip(found, packed.run(), strict=True):
            assert torch.equal(a, b)
