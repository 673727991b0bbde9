"""Drop-ins: the interfaces of attention code that exists already, computed by this package's kernels.

Each module has the names, constructors, parameter names, arguments, return types and numbers of the code that it
stands in for:

==================  ===================================================================================================
`config_mha`        `MultiHeadAttention(config)` that returns an `AttentionOutput`
`self_attention`    `SelfAttention`, `SelfAttentionV2`, `MultiHeadAttention(d_model, head_num, dropout_rate)`
`steps`             `scaled_dot_product_attention(query, key, value, mask)` and the steps it is taught by
`split_heads`       `SplitHeadAttention(input_dim, output_dim, num_heads)`
`torch_nn`          `MultiheadAttention` (= `torch.nn.MultiheadAttention`) and `convert(model)`
`transformers`      `register()`: attention and mask interface of Hugging Face transformers
`sdpa`              `activate()`: `torch.nn.functional.scaled_dot_product_attention` in unmodified code
==================  ===================================================================================================

Two things differ on purpose. A row with nothing to attend to gives zeros where other code gives NaN. And returned
weights are a second result of the kernel, not a step on the way to the output: gradients flow through them as they
should, but `weights.retain_grad()` then shows only the gradient that reaches the returned tensor itself, not the
output's share.

A module is imported when it is first used, so that what only one of them needs (transformers, matplotlib) is
optional.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import config_mha, sdpa, self_attention, split_heads, steps, torch_nn, transformers

__all__ = ["config_mha", "sdpa", "self_attention", "split_heads", "steps", "torch_nn", "transformers"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
