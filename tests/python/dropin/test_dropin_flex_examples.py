"""The examples of the attention-gym repository, through dropin.flex_attention.

They are written anew from https://github.com/meta-pytorch/attention-gym (attn_gym/masks, attn_gym/mods): those that
have only a mask_mod, and those whose score_mod is an option. tests/external/flex_attention.py has the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import create_block_mask

import reference
from attention_gym import LENGTH, MASKS
from scaledot.dropin.flex_attention import flex_attention
from scaledot.score_mods import alibi, softcap

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

HEADS = 4
CAUSAL = [name for name in MASKS if name.startswith(("causal", "sliding window"))]
# The score_mods as the examples write them, and as scaledot makes them. ALiBi's is slope * (j - i), and scaledot's
# -slope * |i - j|: they are the same where later keys are hidden.
SCORE_MODS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "ALiBi": (
        lambda score, b, h, i, j: score + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
        alibi(torch.exp2(-(torch.arange(HEADS, dtype=torch.float64) + 1) * 8.0 / HEADS)),
    ),
    "softcap": (lambda score, b, h, i, j: 2 * torch.tanh(score / 2), softcap(2.0)),
}


EXAMPLES = [(mask, name) for mask in MASKS for name in SCORE_MODS if name != "ALiBi" or mask in CAUSAL]


@pytest.mark.parametrize(("mask", "score_mod"), EXAMPLES)
def test_an_example(mask: str, score_mod: str) -> None:
    """torch's eager flex_attention in float64 gives the same, and the formula the same gradients."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, HEADS, LENGTH, 8, dtype=torch.float64) for _ in range(3)]
    block_mask = create_block_mask(MASKS[mask], None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    of_example, ours = SCORE_MODS[score_mod]
    wanted = theirs.flex_attention(*leaves, of_example, block_mask)

    for leaf in leaves:
        leaf.requires_grad_()
    found = flex_attention(*leaves, ours, block_mask)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)

    dense = theirs.create_mask(MASKS[mask], 1, 1, LENGTH, LENGTH, device="cpu")
    options = {"ALiBi": {"alibi_slopes": torch.exp2(-(torch.arange(HEADS) + 1.0) * 2)}, "softcap": {"softcap": 2.0}}
    exact = reference.attention(*leaves, attn_mask=dense, **options.get(score_mod, {}))[0]
    torch.testing.assert_close(exact, wanted, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(found)
    for mine, right in zip(*(torch.autograd.grad(out, leaves, grad) for out in (found, exact)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)
