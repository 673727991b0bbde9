"""torch.func over the ops: grad, per-sample gradients, forward mode, Hessians. test_functorch.py has more of vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import scaledot
from cases import Case, Inputs
from eager import attention

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
SIZES: dict[str, Any] = {"query_length": 3, "key_length": 4, "head_dim": 3, "dtype": "float64"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "causal_alignment": "lower_right"},
    "softcap_window": {"softcap": 1.5, "window": (2, 1)},
    "bias": {"mask": "float", "mask_shape": "1HQK"},
    "alibi": {"alibi": "H", "scale": 0.4},
}


def ours(case: Case, query: Tensor, rest: Inputs) -> Tensor:
    arguments = case.functional_arguments() | {"alibi_slopes": rest.alibi_slopes}
    result: Tensor = scaledot.scaled_dot_product_attention(query, rest.key, rest.value, rest.attn_mask, **arguments)
    return result


def plain(case: Case, query: Tensor, rest: Inputs) -> Tensor:
    return attention(case, Inputs(query, rest.key, rest.value, rest.attn_mask, rest.alibi_slopes), None)[0]


def both(name: str, transform: Any) -> tuple[Any, Any]:
    """The transform of a loss that depends on query, through the op and through plain torch."""
    case = Case(f"transform {name}", **SIZES, **OPTIONS[name])
    inputs = case.make()
    found = []
    for attend in (ours, plain):

        def loss(query: Tensor, attend: Any = attend) -> Tensor:
            result: Tensor = attend(case, query, inputs).square().sum()
            return result

        found.append(transform(loss, inputs.query.clone()))
    return found[0], found[1]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("transform", ["grad", "hessian", "jacrev", "jacfwd", "jvp"])
def test_derivatives_are_those_of_plain_torch(transform: str, name: str) -> None:
    def apply(loss: Any, query: Tensor) -> Any:
        if transform == "jvp":
            return torch.func.jvp(loss, (query,), (query.cos(),))
        return getattr(torch.func, transform)(loss)(query)

    found, wanted = both(name, apply)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "causal", "softcap_window"])
def test_vmap_over_samples(name: str) -> None:
    case = Case(f"vmap {name}", batch=(), **SIZES, **OPTIONS[name])
    one = case.make()
    queries = torch.randn(4, *case.query_shape, dtype=torch.float64)
    found = torch.vmap(lambda query: ours(case, query, one))(queries)
    torch.testing.assert_close(found, torch.stack([plain(case, query, one) for query in queries]))


def test_per_sample_gradients() -> None:
    case = Case("per sample", batch=(), **SIZES)
    one = case.make()
    queries = torch.randn(4, *case.query_shape, dtype=torch.float64)
    found = torch.vmap(torch.func.grad(lambda query: ours(case, query, one).square().sum()))(queries)
    wanted = [torch.func.grad(lambda query: plain(case, query, one).square().sum())(query) for query in queries]
    torch.testing.assert_close(found, torch.stack(wanted))
