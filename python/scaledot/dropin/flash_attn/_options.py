"""Code shared by flash-attn's functions: their checks, and their options in scaledot's form."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from ..._checks import as_integer, described, flag, number, require_dense

Result = Tensor | tuple[Tensor, Tensor, Tensor]
T = TypeVar("T")
P = ParamSpec("P")

# flash-attn's names for the arguments of scaledot's functions.
NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "is_causal": "causal",
    "scale": "softmax_scale",
    "window": "window_size",
    "cu_seq_q": "cu_seqlens_q",
    "cu_seq_k": "cu_seqlens_k",
    "seqused_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
}


KV_NAMES = {"k": "kv", "v": "kv"}
QKV_NAMES = {"q": "qkv", "k": "qkv", "v": "qkv"}


def renamed(error: Exception, names: Mapping[str, str] = NAMES) -> Exception:
    """Renames the argument in an error to the name that the caller knows."""
    found = re.match(r"\w+(?=: got)", text := str(error))
    if found is None or found[0] not in names:
        return error
    return type(error)(names[found[0]] + text[found.end() :])


def naming(names: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: the errors of the function are `renamed`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def named(*arguments: P.args, **options: P.kwargs) -> T:
            try:
                return function(*arguments, **options)
            except (TypeError, ValueError) as error:
                raise renamed(error, names) from None

        return named

    return decorate


def options(
    q: Tensor,
    k: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The keyword arguments of scaled_dot_product_attention and varlen_attention. Heads are the last dimension but
    one.
    """
    softcap = number("softcap", softcap)
    return {
        "is_causal": flag("causal", causal),
        "scale": number("softmax_scale", softmax_scale, optional=True),
        "enable_gqa": q.size(-2) != k.size(-2),
        "causal_alignment": "lower_right",
        "window": window(window_size),
        "softcap": softcap if softcap > 0 else None,
        "alibi_slopes": alibi_slopes,
    }


def window(window_size: Any) -> tuple[int | None, int | None] | None:
    """`window_size` in scaledot's form: None for a side without a limit, for which flash-attn takes any negative."""
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    sides: list[Any] = [as_integer(side) for side in window_size] if pair else [None]
    if None in sides:
        got = described(window_size)
        raise TypeError(f"window_size: got {got}; needs a pair (left, right) of integers, -1 for no limit")
    left, right = (None if side < 0 else side for side in sides)
    return None if left is None and right is None else (left, right)


def check_qkv(
    dims: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_dims: str | None = None,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> None:
    """Raises an error that names the argument where q, k and v do not fit together.

    Args:
        dims: the dimensions of q, "B, L, H, D" or "total, H, D".
        q, k, v: tensors of that form; v may have another D.
        kv_dims: those of k and v, if they are a cache.
        names: what the caller's arguments are called.
    """
    require_dense(**dict(zip(names, (q, k, v), strict=True)))
    forms = (dims, kv_dims or dims, kv_dims or dims)
    for name, tensor, form in zip(names, (q, k, v), forms, strict=True):
        if tensor.dim() != form.count(",") + 1:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; needs ({form})")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: got {tensor.dtype}; needs {q.dtype}, as {names[0]}")
    if k.size(-1) != q.size(-1):
        raise ValueError(f"{names[1]}: got a head dimension of {k.size(-1)}; needs {q.size(-1)}, as {names[0]}")
    heads, kv_heads = q.size(-2), k.size(-2)
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{names[1]}: got {kv_heads} heads; needs a divisor of {names[0]}'s {heads}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{names[2]}: got shape {tuple(v.shape)}; needs {tuple(k.shape[:-1])} before the head dimension, as "
            f"{names[1]}"
        )


def unpacked(name: str, packed: Tensor, count: int, dims: str) -> tuple[Tensor, ...]:
    """The `count` tensors that `packed` holds in its third dimension from the last, as views."""
    require_dense(**{name: packed})
    if packed.dim() != dims.count(",") + 1 or packed.size(-3) != count:
        raise ValueError(f"{name}: got shape {tuple(packed.shape)}; needs ({dims})")
    return packed.unbind(-3)
