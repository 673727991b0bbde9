"""Drop-ins: existing attention interfaces, computed by scaledot's kernels.

Each module has the same names, constructors, parameters, arguments, return types and results as the code it replaces.

For frameworks:

==================  ===================================================================================================
`torch_nn`          `MultiheadAttention`, which replaces `torch.nn.MultiheadAttention`, and `convert(model)`
`transformers`      `register()`, an attention implementation for Hugging Face transformers
`flash_attn`        flash-attn's functions on every device, and `install()`, for code that imports flash_attn
`flex_attention`    torch's `flex_attention`, with its BlockMask and the score_mods of `scaledot.score_mods`
`sdpa`              `activate()`, which replaces `torch.nn.functional.scaled_dot_product_attention` in unmodified code
==================  ===================================================================================================

For attention code as it is taught:

==================  ===================================================================================================
`config_mha`        `MultiHeadAttention(config)`, which returns an `AttentionOutput`
`self_attention`    `SelfAttention`, `SelfAttentionV2`, `MultiHeadAttention(d_model, head_num, dropout_rate)`
`steps`             `scaled_dot_product_attention(query, key, value, mask)` and its single steps
`split_heads`       `SplitHeadAttention(input_dim, output_dim, num_heads)`
==================  ===================================================================================================

There are two deliberate differences:

- A row with nothing to attend to gives zeros where other code gives NaN.
- The returned weights are a second result of the kernel, not an intermediate of the output. Gradients flow through them
  correctly, but ``weights.retain_grad()`` only shows the gradient of the returned tensor, without the output's share.

A module is imported on first use, so that its own requirements (transformers, matplotlib) stay optional.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        config_mha,
        flash_attn,
        flex_attention,
        sdpa,
        self_attention,
        split_heads,
        steps,
        torch_nn,
        transformers,
    )

__all__ = [
    "config_mha",
    "flash_attn",
    "flex_attention",
    "sdpa",
    "self_attention",
    "split_heads",
    "steps",
    "torch_nn",
    "transformers",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without what this file imports."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
