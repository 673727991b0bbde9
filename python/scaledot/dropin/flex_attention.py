"""torch.nn.attention.flex_attention.flex_attention, computed by scaledot's kernels without torch.compile.

It takes torch's BlockMask with any mask_mod, and any score_mod. It has gradients on a CPU, which torch's function does
not have there.

Differences from torch's function:

- `kernel_options` tune torch's kernels. They change no result, and scaledot's kernels have nothing to tune.
- Fewer than 4 dimensions, and batch dimensions that broadcast, are taken too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from .._checks import described, flag
from .._keywords import NoOptions, hide_unknown, unknown_keyword
from .._score import ScoreMod
from ..block_mask import BlockMask
from ..functional import scaled_dot_product_attention
from ._strides import strides_like_query

__all__ = ["flex_attention"]


@hide_unknown
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
    **unknown: Unpack[NoOptions],
) -> Tensor | tuple[Tensor, Any]:
    """softmax(score_mod(scale * query key^T), where block_mask allows) value.

    Args:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E).
        value: (B, Hkv, S, Ev).
        score_mod: any function of (score, b, h, q_idx, kv_idx), as :func:`scaledot.scaled_dot_product_attention` takes.
        block_mask: a :class:`scaledot.BlockMask` or torch's, for these lengths. Torch's is converted in the first call
            that gets it.
        scale: default 1 / sqrt(E).
        enable_gqa: Hq may be a multiple of Hkv.
        return_lse: also return lse, (B, Hq, L), float32 (float64 for float64).
        kernel_options: options of torch's own kernels; they change no result.
        return_aux: torch's AuxRequest. ``AuxRequest(lse=True)`` returns (output, AuxOutput) with the lse.

    Returns:
        The output (B, Hq, L, Ev), or (output, lse), or (output, AuxOutput). A row that may attend to nothing has
        output 0 and lse -inf.

    Raises:
        NotImplementedError: a score_mod with an operation that kernels lack, or a request for max_scores.
        TypeError, ValueError: as :func:`scaledot.scaled_dot_product_attention`.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, 512, 512, device="cpu")
        >>> query = torch.randn(1, 8, 512, 64, requires_grad=True)
        >>> score_mod = scaledot.score_mods.softcap(20.0)
        >>> scaledot.dropin.flex_attention.flex_attention(query, query, query, score_mod, mask).sum().backward()
    """
    if unknown:
        raise unknown_keyword(flex_attention, *unknown)
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        raise TypeError(f"kernel_options: got {described(kernel_options)}; needs a dict, or None")
    if return_aux is not None and flag("return_lse", return_lse):
        raise ValueError("return_lse: got True with return_aux; needs one of them")
    if return_aux is not None and not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        needs = "a torch.nn.attention.flex_attention.AuxRequest, or None"
        raise TypeError(f"return_aux: got {described(return_aux)}; needs {needs}")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux: got a request for max_scores; needs AuxRequest(lse=True)")
    output, lse = scaled_dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        enable_gqa=enable_gqa,
        block_mask=block_mask,
        score_mod=score_mod,
        return_lse=True,
        **strides_like_query(query, key, value),
    )
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput  # it takes long to import

        return output, AuxOutput(lse=lse if return_aux.lse else None)
    return (output, lse) if return_lse else output
