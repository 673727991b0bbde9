"""varlen_attention: torch.nn.attention.varlen.varlen_attn on every device, with the options that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic
from typing_extensions import Unpack

from ._checks import as_integer, check_types, described, flag, integer, require_tensors
from ._load import OPS
from ._seed import draw_seed
from ._torch.dtensor import any_dtensor
from ._torch.inputs import VARLEN_INPUTS
from ._torch.out import check_plain_out
from .options import VARLEN, VarlenOptions, op_arguments

__all__ = ["varlen_attention"]

_varlen, _varlen_out = OPS.varlen.default, OPS.varlen_out.default
_override: Callable[..., Any] = handle_torch_function  # its own type does not match overloads
# Tensors that a call may lack, from seqused_k on. The op's schema gives them no default.
_ABSENT = dict.fromkeys(VARLEN_INPUTS[5:])


def varlen_arguments(function: str, options: Mapping[str, object]) -> dict[str, Any]:
    """The op's keyword arguments for the ``**options`` of `function`. The dropout seed is None."""
    arguments = op_arguments(function, options, VARLEN)
    if "window_size" in arguments:
        size = arguments.pop("window_size")
        if not isinstance(size, (tuple, list)) or len(size) != 2 or size[0] is None or size[1] is None:
            got = described(size)
            raise TypeError(f"window_size: got {got}; needs a pair (left, right) of integers, -1 for no limit")
        left, right = _window_side("left", size[0]), _window_side("right", size[1])
        if (left, right) != (-1, -1):
            if "window_left" in arguments:
                raise ValueError(f"window: got {options['window']!r} with window_size={size!r}; needs one of the two")
            arguments["window_left"] = None if left == -1 else left
            arguments["window_right"] = None if right == -1 else right
    return {**_ABSENT, **arguments}


def _window_side(name: str, side: object) -> Any:
    """A side of `window_size`. `name`: left or right."""
    found = as_integer(side)
    if found is None:
        raise TypeError(f"window_size: got a {name} side of {described(side)}; needs an integer, -1 for no limit")
    if found < -1:
        raise ValueError(f"window_size: got a {name} side of {found}; needs at least 0, or -1 for no limit")
    return found


def wants_lse(return_lse: Any, return_aux: Any) -> bool:
    """Whether the two arguments ask for lse."""
    flag("return_lse", return_lse)
    wanted = False if return_aux is None else getattr(return_aux, "lse", None)
    if isinstance(wanted, bool):
        return bool(return_lse or wanted)
    got = described(return_aux)
    raise TypeError(f"return_aux: got {got}; needs a torch.nn.attention.varlen.AuxRequest, or None")


# fmt: off
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, *,
    return_aux: None = None, return_lse: Literal[False] = False, **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, *,
    return_aux: Any = None, return_lse: Literal[True], **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    is_causal: bool = False, *,
    return_aux: Any = None, return_lse: bool = False, **options: Unpack[VarlenOptions],
) -> Any: ...
# fmt: on
@VARLEN.sign
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    *,
    return_aux: Any = None,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention over N sequences of different lengths, packed one after the other without padding.

    The arguments of :func:`torch.nn.attention.varlen.varlen_attn` (torch 2.11 to 2.15) are all here, with the same
    order and meaning; `is_causal` stands where torch 2.10 had it. Sequence b has the query rows cu_seq_q[b]:cu_seq_q[b
    + 1] and the key rows cu_seq_k[b]:cu_seq_k[b + 1]. It gets what :func:`scaledot.scaled_dot_product_attention` gives
    for these rows alone; on a CPU bit for bit, whatever the other sequences and the number of threads. Nothing is
    padded, and nothing of size Lq * Lk is stored.

    Args:
        query: (Tq, H, D): float32, float64, bfloat16 or float16, with any strides.
        key: (Tk, Hkv, D), or with `block_table` a pool of pages (pages, page_size, Hkv, D). In query's dtype, or
            quantised: float8_e4m3fn, float8_e5m2 or int8, with a query of float32, bfloat16 or float16.
        value: (Tk, Hkv, Dv), or (pages, page_size, Hkv, Dv), in key's dtype; Dv may differ from D.
        cu_seq_q: (N + 1,), int32 or int64, on query's device: 0, then the end of each sequence. The last is Tq.
        cu_seq_k: the same for keys, the last is Tk; None with `block_table`.
        max_q: at least the number of queries of the longest sequence. It sizes the launch on a GPU and is checked on a
            CPU.
        max_k: at least the largest number of keys that a sequence attends to.
        is_causal: row i of a sequence attends to its keys up to the one that `causal_alignment` aligns it with.
        scale: a finite number; default 1 / sqrt(D).
        window_size: (left, right) in torch's form: -1 = no limit; (-1, 0) is causal.
        enable_gqa: H may be a multiple of Hkv; query head h then attends to key and value head h // (H // Hkv).
        seqused_k: (N,), int32 or int64: how many of its keys each sequence uses. The others are not read, and their
            gradient is 0.
        block_table: (N, pages of a sequence), int32 or int64. Key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. Needs `seqused_k`; has no gradient. A CPU reads keys and values in their
            pages, of any size and in any order, and never gathers them in other memory.
        num_splits: the most parts into which a GPU may cut the keys of a sequence. With 1 results do not depend on the
            other sequences; None: it depends on max_k. Results on a CPU never depend on the other sequences.
        dropout_p: in [0, 1], as in scaled_dot_product_attention. The seed is drawn from torch's generator. With the
            seed (s, t), sequence b drops what scaled_dot_product_attention drops for the seed (s, t + b).
        causal_alignment: the diagonal of each sequence from which `is_causal`, windows and ALiBi count: "lower_right"
            (as in torch: the last query row is aligned with the last key) or "upper_left". The default of
            scaled_dot_product_attention is the other one, because torch's is.
        window: (left, right), at least 0, None = no limit: `window_size` in scaled_dot_product_attention's form.
        alibi_slopes: (H,) or (N, H): adds -slope * |distance|.
        relative_bias: broadcastable to (N, H, 2 M + 1): adds entry M + clamp(distance, -M, M). It gets a gradient of
            its shape.
        k_scale: float32 (), (Hkv,) or (N, Hkv), for quantised keys only: a key is what is stored times this. None: 1.
            An infinite scale counts as NaN.
        v_scale: the same for values.
        attn_mask: (Tq, W), or (H, Tq, W) or (1, Tq, W): boolean (True = may attend), or floating in any dtype that
            query may have (added to the scores). Row r is of query row r, and the columns are of the last W keys of its
            sequence: column W - 1 of the last one. Keys before them are not affected, so the tree of a speculative
            decoder needs no more columns than it has tokens. Columns without a key are ignored. A floating mask gets a
            gradient of its shape, 0 in these columns.
        out: memory for the output, as in scaled_dot_product_attention. Where keys are in pages or quantised too. On a
            GPU, rows that belong to no sequence keep what they had.
        softcap: this and any further option: as in scaled_dot_product_attention.
        return_aux: a torch.nn.attention.varlen.AuxRequest (or anything with a bool `lse`), as torch takes it;
            AuxRequest(lse=True) means return_lse=True.
        return_lse: also return lse, which is differentiable.

    Returns:
        output (Tq, H, Dv) in query's dtype, or (output, lse). lse is (H, Tq), float32 (float64 for float64): the log of
        the sum of exp(score). A row without keys has output 0 and lse -inf.

    Raises:
        ValueError, TypeError, NotImplementedError: as for scaled_dot_product_attention, naming the argument. A CPU
            checks cu_seq_q, cu_seq_k, seqused_k, block_table, max_q and max_k against each other. A GPU does not,
            because it would have to synchronise: wrong numbers give wrong results there, but no access outside of the
            tensors, and rows that belong to no sequence are not written.

    Quantised keys and values are for inference. The result is that of the keys and values stored * scale,
    which are never made. Nothing has a gradient then: if query, a scale or another tensor requires grad, the call
    raises NotImplementedError, except under torch.no_grad() or torch.inference_mode(). Scales for keys of query's
    dtype are refused, because they would change what the same cache means. torch.autocast casts query only.

    Gradients reach query, key, value, `relative_bias` and a floating `attn_mask`. The double backward and forward mode
    make one call for each sequence, and synchronise to learn the lengths. torch.vmap over any of the tensors turns its
    samples into further sequences of one call; on a CPU each sample gets bit for bit what it gets alone, dropout
    included. Tensors that vmap does not batch are repeated in memory for it, except pages of keys and values.

    Example:
        >>> import torch, scaledot
        >>> query, key, value = torch.randn(3, 7, 8, 64).unbind()   # 7 tokens: sequences of 3 and 4
        >>> cu_seq = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> scaledot.varlen_attention(query, key, value, cu_seq, cu_seq, 4, 4, window_size=(-1, 0)).shape
        torch.Size([7, 8, 64])
    """
    arguments = varlen_arguments("varlen_attention", options)
    tensors = (query, key, value, cu_seq_q, cu_seq_k, *options.values())  # only tensors among them have an override
    if has_torch_function_variadic(*tensors):
        return _override(
            varlen_attention,
            tensors,
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            is_causal,
            return_aux=return_aux,
            return_lse=return_lse,
            **options,
        )
    require_tensors(query=query, key=key, value=value, cu_seq_q=cu_seq_q)
    if cu_seq_k is not None:
        require_tensors(cu_seq_k=cu_seq_k)
    needs_lse = wants_lse(return_lse, return_aux)
    arguments.update(cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, is_causal=flag("is_causal", is_causal))
    arguments.update(max_q=integer("max_q", max_q), max_k=integer("max_k", max_k))
    if arguments.get("dropout_p"):
        arguments["dropout_seed"] = draw_seed(query)
    if "out" in arguments:
        check_plain_out(arguments["out"], query, key, value)
    if type(query) is not Tensor and any_dtensor(query, key, value):
        from ._torch.dtensor.varlen import place

        query, key, value, arguments = place(query, key, value, arguments)
    try:
        if "out" in arguments:
            output = arguments["out"]
            others = {name: argument for name, argument in arguments.items() if name != "out"}
            lse = _varlen_out(output, query, key, value, **others)  # by its place, as in scaled_dot_product_attention
        else:
            output, lse = _varlen(query, key, value, **arguments)
    except RuntimeError as error:
        check_types(error, arguments)
        raise
    return (output, lse) if needs_lse else output
