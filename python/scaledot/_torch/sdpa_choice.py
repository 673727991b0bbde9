"""The backend that torch.nn.functional.scaled_dot_product_attention chooses for a call on a CPU.

The answer is torch's own: torch._fused_sdp_choice, which F.scaled_dot_product_attention itself asks. A reason is found
by asking again with one argument changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

__all__ = ["sdpa_choice"]


def sdpa_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    lacking: Sequence[str],
) -> str | None:
    """In words; None where it is not known. `lacking`: options of this call that torch's function does not have."""
    if not all(_plain(t) for t in (query, key, value, attn_mask) if t is not None):
        return None
    if any(t.dim() > 2 and t.shape[-3] == 0 for t in (query, key)):  # torch divides by the number of heads
        return None
    if lacking:
        return f"cannot: it has no {', '.join(lacking)}"

    call: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout_p}

    def fused(**changes: Any) -> bool:
        choice = torch._fused_sdp_choice(**call | changes, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return int(choice) == SDPBackend.FLASH_ATTENTION.value

    try:
        if fused():
            return "its fused kernel"
        if is_causal and attn_mask is not None:
            return "cannot: its slower path takes either attn_mask or is_causal"
        changes: dict[str, dict[str, Any]] = {}
        if query.dim() == key.dim() == value.dim() == 3:
            changes["it takes 4 dimensions"] = {"query": query[None], "key": key[None], "value": value[None]}
        if dropout_p > 0:
            changes["dropout"] = {"dropout_p": 0.0}
        if attn_mask is not None:
            changes["attn_mask"] = {"attn_mask": None}
        if key.shape[-1] != value.shape[-1]:
            changes["value is not as wide as key"] = {"value": key}
        reason = next((f"; reason: {name}" for name, change in changes.items() if fused(**change)), "")
    except IndexError:
        return "cannot: it refuses an attn_mask of fewer than 2 dimensions"
    except (RuntimeError, AttributeError):  # no such function in this torch, or arguments that it refuses
        return None
    return "its slower path, which stores the weights" + reason


def _plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary CPU tensor: not a subclass, not one that torch.func or torch.compile wraps."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
