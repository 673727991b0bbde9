"""torch's OpInfo of F.scaled_dot_product_attention, whose samples scaledot computes: through `dropin.sdpa`, or by the
function itself where torch's dispatcher bypasses `dropin.sdpa`. The OpInfo is part of an installed torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import gradcheck, gradgradcheck
from torch.testing._utils import wrapper_set_seed

import tolerances
from external.tally import Tally
from scaledot import scaled_dot_product_attention
from scaledot.dropin import sdpa

SUITE = f"torch {torch.__version__}: OpInfo of F.scaled_dot_product_attention"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
Attention = Callable[..., Tensor]
ours: Attention = partial(wrapper_set_seed, scaled_dot_product_attention)  # seeded, as OpInfo calls torch's function


@cache
def op_info(name: str = "nn.functional.scaled_dot_product_attention") -> Any:
    return next(op for op in op_db if op.name == name)


@cache
def samples(dtype: torch.dtype, requires_grad: bool = False, name: str = op_info().name) -> list[Any]:
    torch.manual_seed(0)
    return list(op_info(name).sample_inputs("cpu", dtype, requires_grad=requires_grad))


def tensors(sample: Any) -> list[Tensor]:
    """query, key, value and attn_mask if there is one."""
    return [t for t in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(t, Tensor)]


def options(sample: Any) -> dict[str, Any]:
    return {name: t for name, t in sample.kwargs.items() if not isinstance(t, Tensor)}


def title(sample: Any, *more: object) -> str:
    shapes = " ".join("x".join(map(str, t.shape)) for t in tensors(sample))
    return " ".join([str(sample.input.dtype), shapes, str(options(sample)), *map(str, more)])


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
) -> Tensor:
    """Without dropout. With `enable_gqa` the samples have one KV head for each query head."""
    assert dropout_p == 0
    assert not enable_gqa or query.shape[-3] == key.shape[-3]
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    scores = scores if attn_mask is None else scores + attn_mask
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ value


def solve(attention: Attention, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The output, and the gradients for a fixed cotangent."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    output = attention(*leaves, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent.to(output.dtype))]


def rounding(sample: Any) -> float:
    """The relative change of a weight whose score is off by half an ulp.

    The samples have scores of about 90, and too few elements for eager's largest error to be typical.
    """
    query, key = sample.input.double(), sample.args[0].double()
    score = tolerances.largest(query @ key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    return torch.finfo(torch.promote_types(sample.input.dtype, torch.float32)).eps / 2 * score


def scales(sample: Any) -> list[float]:
    """The magnitude of the terms of the output and of each gradient. Their sum may cancel."""
    query, key, value = map(tolerances.largest, tensors(sample)[:3])
    cotangent = 3.0  # the magnitude of normally distributed elements
    score = cotangent * value * math.sqrt(sample.input.size(-1))
    scale = 1 / math.sqrt(sample.input.size(-1))
    return [value, score * scale * key, score * scale * query, cotangent, score]


def answered(activation: sdpa.Activation, calls: int | None = None) -> None:
    """Asserts that scaledot ran all calls, and that there were `calls` of them."""
    assert not activation.fallthrough, str(activation)
    assert activation.calls == calls if calls else activation.calls > 0


def forward_and_backward(tally: Tally) -> None:
    """The result is torch's to a few ulp and obeys the numerics rule. scaledot runs every call."""
    for dtype, requires_grad in itertools.product(DTYPES, (False, True)):
        for sample in samples(dtype, requires_grad):
            if sample.kwargs["dropout_p"] > 0:
                continue
            with tally.case(title(sample, "requires_grad" if requires_grad else "")):
                query, *rest = tensors(sample)
                torch_output = F.scaled_dot_product_attention(query, *rest, **options(sample))
                exact = solve(plain_attention, [t.double() for t in tensors(sample)], **options(sample))
                eager = solve(plain_attention, tensors(sample), **options(sample))
                with sdpa.activate() as activation:
                    found = solve(F.scaled_dot_product_attention, tensors(sample), **options(sample))
                    output = op_info().op(sample.input, *sample.args, **sample.kwargs)
                answered(activation, 2)
                assert output.requires_grad == requires_grad
                assert torch.equal(output, found[0])
                difference = (output.double() - torch_output.double()).abs().max()
                scale = tolerances.largest(torch_output)
                assert difference <= 4 * (torch.finfo(dtype).eps + rounding(sample)) * scale
                for number, (mine, oracle, yardstick) in enumerate(zip(found, exact, eager, strict=True)):
                    error = max(tolerances.error(yardstick, oracle), rounding(sample) * scales(sample)[number])
                    tolerances.check(f"result {number}", mine, oracle, error, gradient=number > 0)


def dropout(tally: Tally) -> None:
    """The seed determines the dropped weights. Torch drops other weights, so only shapes are compared with it."""
    for dtype in DTYPES:
        for sample in samples(dtype):
            if sample.kwargs["dropout_p"] == 0:
                continue
            with tally.case(title(sample)):
                torch_output = op_info().op(sample.input, *sample.args, **sample.kwargs)
                with sdpa.activate() as activation:
                    first = op_info().op(sample.input, *sample.args, **sample.kwargs)  # seeds torch's generator
                    second = op_info().op(sample.input, *sample.args, **sample.kwargs)
                    third = F.scaled_dot_product_attention(sample.input, *sample.args, **sample.kwargs)
                assert activation.calls == 3
                assert (first.shape, first.dtype) == (torch_output.shape, torch_output.dtype)
                assert torch.equal(first, second)
                assert not torch.equal(first, third)


def dropout_statistics(tally: Tally) -> None:
    """Over many calls, sum_j dropout(w_j) v_j has the variance p / (1 - p) * sum_j w_j^2 v_j^2."""
    count = 1000
    dropping = [s for s in samples(torch.float32) if s.kwargs["dropout_p"] > 0]
    for sample in (dropping[0], dropping[-1]):
        with tally.case(title(sample)):
            query, key, value = tensors(sample)
            p, causal = sample.kwargs["dropout_p"], sample.kwargs["is_causal"]
            mean = plain_attention(query, key, value, is_causal=causal)
            identity = torch.eye(key.size(-2)).expand(*key.shape[:-1], -1)
            weights = plain_attention(query, key, identity, is_causal=causal)
            variance = p / (1 - p) * weights.square() @ value.square()
            with sdpa.activate():
                torch.manual_seed(1)
                outputs = torch.stack(
                    [F.scaled_dot_product_attention(query, key, value, **options(sample)) for _ in range(count)]
                )
            assert ((outputs.mean(0) - mean).abs() <= 6 * (variance / count).sqrt() + 1e-5).all()
            torch.testing.assert_close(outputs.var(0), variance, rtol=0.5, atol=1e-4)


def noncontiguous(tally: Tally) -> None:
    for dtype in DTYPES:
        for sample in samples(dtype, requires_grad=True):
            with tally.case(title(sample)), sdpa.activate():
                strided = sample.noncontiguous()
                assert not any(t.is_contiguous() for t in tensors(strided))
                found, expected = (solve(op_info().op, tensors(s), **options(s)) for s in (strided, sample))
                for mine, wanted, scale in zip(found, expected, scales(sample)[: len(found)], strict=True):
                    # Another kernel may run them, and sum in another order.
                    assert tolerances.error(mine, wanted) <= 4 * (torch.finfo(dtype).eps + rounding(sample)) * scale


def fake_tensors(tally: Tally) -> None:
    for dtype in DTYPES:
        for sample in samples(dtype):
            with tally.case(title(sample)), sdpa.activate() as activation:
                expected = op_info().op(sample.input, *sample.args, **sample.kwargs)
                with FakeTensorMode() as mode:
                    fake = [mode.from_tensor(t) for t in tensors(sample)]
                    found = op_info().op(*fake, **options(sample))
                answered(activation, 2)
                assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


def gradients(
    tally: Tally, check: Callable[..., bool], attention: Attention, *, dropping: bool = True, **wanted: bool
) -> None:
    for sample in samples(torch.float64, requires_grad=True):
        if sample.kwargs["dropout_p"] > 0 and not dropping:
            tally.skip("dropout_p > 0: gradcheck's own vmap lets nothing be drawn at random")
            continue
        with tally.case(title(sample)), sdpa.activate():
            leaves = [t.detach().requires_grad_() for t in tensors(sample)]
            assert check(partial(attention, **options(sample)), leaves, **wanted)


def every_element(tally: Tally, check: Callable[..., bool], *, all_kinds: bool) -> None:
    """Varies each element, where the checks of `gradients` take random directions.

    The samples are cut to two heads and two sequences. There is one sample of each kind (torch lists each kind twice),
    or only the first and the last kind with and without dropout.
    """
    every = {(s.input.shape, str(options(s)), len(tensors(s))): s for s in samples(torch.float64, requires_grad=True)}
    kinds = list(every.values())
    if not all_kinds:
        with_p = [[sample for sample in kinds if sample.kwargs["dropout_p"] == p] for p in (0.0, 0.5)]
        kinds = [sample for same_p in with_p for sample in (same_p[0], same_p[-1])]
    for sample in kinds:
        with tally.case(title(sample)), sdpa.activate() as activation:
            few = [t if t.dim() < 3 else t[:2] if t.dim() == 3 else t[:2, :2] for t in tensors(sample)]
            few = [t.detach().requires_grad_() for t in few]
            assert check(partial(op_info().op, **options(sample)), few)
            answered(activation)


def batches(sample: Any) -> Iterator[tuple[str, list[Tensor], list[int | None]]]:
    """(name, arguments, in_dims) for every choice of arguments that get a batch dimension of two, first or last."""
    inputs = tensors(sample)
    for chosen in itertools.product((False, True), repeat=len(inputs)):
        for place in (0, -1) if any(chosen) else ():
            dims = [place if batched else None for batched in chosen]
            twice = [t if d is None else torch.stack([t, t.roll(1, -2)], d) for t, d in zip(inputs, dims, strict=True)]
            yield f"in_dims {dims}", twice, dims


def vmapped(tally: Tally, attention: Attention, transform: Callable[[Attention], Attention], *, dropping: bool) -> None:
    """The result for a batch is that for its members one by one."""
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # looping over the batch is fine
    for sample in samples(torch.float64):
        if sample.kwargs["dropout_p"] > 0 and not dropping:
            tally.skip("dropout_p > 0: torch answers F under vmap, and drops other weights than scaledot does")
            continue
        function = transform(partial(attention, **options(sample)))
        for name, inputs, dims in batches(sample):
            with tally.case(title(sample, name)), sdpa.activate():
                found = torch.func.vmap(function, in_dims=tuple(dims), randomness="same")(*inputs)
                members = [
                    function(*(t if d is None else t.select(d, i) for t, d in zip(inputs, dims, strict=True)))
                    for i in range(2)
                ]
                torch.testing.assert_close(found, torch.stack(members), rtol=1e-10, atol=1e-10)


def query_gradient(attention: Attention) -> Attention:
    result: Attention = torch.func.grad(lambda *inputs: attention(*inputs).square().sum())
    return result


def in_multi_head_attention(tally: Tally) -> None:
    """The other OpInfo that calls F.scaled_dot_product_attention, if weights are not requested."""
    info = op_info("nn.functional.multi_head_attention_forward")
    for dtype in (torch.float32, torch.float64):
        for sample in samples(dtype, name=info.name):
            if sample.kwargs["training"]:
                tally.skip("dropout in training: torch drops other weights than scaledot does")
                continue
            with tally.case(title(sample)):
                arguments = {**sample.kwargs, "need_weights": False}
                expected, _ = info.op(sample.input, *sample.args, **arguments)
                with sdpa.activate() as activation:
                    found, _ = info.op(sample.input, *sample.args, **arguments)
                answered(activation, 1)
                torch.testing.assert_close(found, expected)


CHECKS: dict[str, Callable[[Tally], None]] = {
    "forward and backward": forward_and_backward,
    "dropout": dropout,
    "dropout, statistics": dropout_statistics,
    "noncontiguous": noncontiguous,
    "fake tensors": fake_tensors,
    "gradcheck": lambda tally: gradients(tally, gradcheck, op_info().op, check_batched_grad=True),
    "gradcheck, every element": lambda tally: every_element(tally, torch.autograd.gradcheck, all_kinds=True),
    "gradgradcheck": lambda tally: gradients(tally, gradgradcheck, op_info().op, check_batched_grad=True),
    "gradgradcheck, every element": lambda tally: every_element(tally, torch.autograd.gradgradcheck, all_kinds=False),
    "gradcheck, forward mode, the function itself": lambda tally: gradients(
        tally, gradcheck, ours, check_forward_ad=True, check_batched_grad=False
    ),
    "gradcheck, forward mode in a batch, the function itself": lambda tally: gradients(
        tally, gradcheck, ours, dropping=False, check_forward_ad=True, check_batched_forward_grad=True
    ),
    "vmap": lambda tally: vmapped(tally, op_info().op, lambda attention: attention, dropping=False),
    "vmap, the function itself": lambda tally: vmapped(tally, ours, lambda attention: attention, dropping=True),
    "vmap of grad, the function itself": lambda tally: vmapped(tally, ours, query_gradient, dropping=True),
    "in F.multi_head_attention_forward": in_multi_head_attention,
}
