"""What ExportedProgram.run_decompositions() and torch.onnx.export make of the ops: core ATen operators.

The formulas are those of csrc/core/mask.h, on whole matrices of scores: their memory grows with Lq times Lk. Sums are
float32 for 16-bit dtypes, as in the kernels. The results have the shapes, dtypes and strides that the ops give. A
backward, in a program with a loss, is what torch's autograd makes of the formula. A call with `out` becomes one without
it and a copy.

torch has no registry for this table, so a function of torch that makes it is wrapped. torch.compile starts from the
same table; there the ops stay whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from .._load import OPS
from .._score.aten import Places, number, run_program
from .inputs import DIFFERENTIABLE, VARLEN_DIFFERENTIABLE
from .on_import import on_import
from .schema import arguments, names

__all__ = ["DECOMPOSITIONS"]

_Call = Mapping[str, Any]


_NO_DROPOUT = ("dropout_p: got a number above 0", "0: export the model in eval mode")


def _refuse(call: _Call, **reasons: tuple[str, str]) -> None:
    """Raises an error for an argument of the op that is given. `reasons`: what it got, and what it needs."""
    for name, (got, needs) in reasons.items():
        if call[name] is not None:
            raise NotImplementedError(f"{got}, which has no decomposition to core ATen operators; needs {needs}")


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _repeated(tensor: Tensor, heads: Any, enable_gqa: bool) -> Tensor:
    """(..., heads, L, D) from the KV heads of grouped-query attention; other head counts, and none, broadcast."""
    if not enable_gqa or tensor.dim() == 2 or tensor.size(-3) == heads:
        return tensor
    group = heads // tensor.size(-3)
    return tensor.unsqueeze(-3).expand(*tensor.shape[:-2], group, *tensor.shape[-2:]).flatten(-4, -3)


def _attends(call: _Call, distance: Tensor) -> Tensor | None:
    """Which keys is_causal and the window leave, by the distance of a key from the diagonal; None: all."""
    right = call["window_right"]
    if call["is_causal"]:
        right = 0 if right is None else min(right, 0)
    kept = [] if right is None else [distance <= right]
    if call["window_left"] is not None:
        kept.append(distance >= -call["window_left"])
    return (kept[0] & kept[1] if len(kept) == 2 else kept[0]) if kept else None


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    if softcap is None:
        return scores
    cap = number(softcap, scores)
    return torch.tanh(scores / cap) * cap


def _scale(call: _Call) -> float | Tensor:
    query, scale = call["query"], call["scale"]
    return number(float(1 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale), query)


def _entries(relative: Tensor, distance: Tensor) -> Tensor:
    """Which entry of relative_bias a distance has."""
    reach = relative.size(-1) // 2
    return distance.clamp(-reach, reach) + reach


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and lse. A row whose scores are all -inf has weights of 0 and an lse of -inf, and no gradient."""
    largest = scores.detach().amax(-1, keepdim=True)
    shift = torch.where(largest == -math.inf, 0.0, largest)
    terms = torch.exp(scores - shift)
    total = terms.sum(-1, keepdim=True)
    safe_total = torch.where(total == 0, 1.0, total)
    return terms / safe_total, torch.where(total == 0, -math.inf, torch.log(safe_total) + shift).squeeze(-1)


def _programmed(call: _Call, scores: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The scores after the score function."""
    *batch, heads, _, _ = scores.shape if scores.dim() > 2 else (1, *scores.shape)
    entry = torch.arange(math.prod(batch), device=scores.device).view(*batch, 1, 1, 1)
    head = torch.arange(heads, device=scores.device).view(-1, 1, 1)
    places = Places(entry, head, row.view(-1, 1), column)
    found = run_program(call["score_program"], scores, places, call["score_numbers"], call["score_integers"])
    return found.expand_as(scores) if scores.dim() > 2 else found.reshape(scores.shape)


def _shown_by_blocks(call: _Call, row: Tensor, key: Tensor) -> Tensor:
    """The block mask, looked up for every row and key: see csrc/core/block_mask.h."""
    rows, keys = call["block_shape"][:2]
    block = call["blocks"].long().index_select(-2, row // rows).index_select(-1, key // keys)
    within = key % keys
    words = torch.cat([call["block_bits"], call["block_bits"].new_zeros(1, *call["block_bits"].shape[1:])])
    word = words[block.clamp(min=0), (row % rows)[:, None], within // 64]
    place = within % 64
    low = torch.bitwise_and(word, torch.pow(2, place.clamp(max=62))) != 0
    bit = ((place == 63) & (word < 0)) | ((place < 63) & low)  # the sign is bit 63
    return (block == -1) | ((block >= 0) & bit)  # ONNX Runtime has no where() of booleans


def _listed(call: _Call, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the keys of each row's list, and their positions. A negative entry is no key."""
    lists = call["key_indices"]
    if lists.dim() > 2:
        heads = scores.size(-3)
        lists = _repeated(lists, heads, lists.size(-3) != 1)
    lists = lists.long().expand(*scores.shape[:-1], lists.size(-1))
    places = lists.clamp(min=0)
    return torch.where(lists < 0, -math.inf, scores.gather(-1, places)), places


def _strided_as(wanted: Tensor, found: Tensor) -> Tensor:
    """`found` with the order of dimensions that `wanted` has in memory: programs made of views depend on it."""
    order = sorted(range(wanted.dim()), key=lambda d: (-_hint(wanted.stride(d)), d))
    return found.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


def _hint(size: Any) -> int:
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _whole(op: Any, call: _Call) -> tuple[Tensor, ...]:
    """The op's own fake results: all its checks, and the strides of its output."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return tuple(op(**call))


def _is_plain(call: _Call) -> bool:
    """Whether torch's own operator says all that the call says, as exactly. Rows without a key are not among it."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to load

    query, key = call["query"], call["key"]
    if any(call[name] is not None for name in _REST) or call["return_weights"]:
        return False
    square = query.size(-2) is key.size(-2) or statically_known_true(query.size(-2) == key.size(-2))
    aligned = not call["is_causal"] or call["causal_alignment"] == "upper_left" or square
    return aligned and query.dim() == 4 and query.dtype == torch.float32


_REST = (
    *("attn_mask", "alibi_slopes", "dropout_seed", "relative_bias", "blocks", "score_program", "key_indices"),
    *("window_left", "window_right", "softcap"),
)


def _sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = arguments(OPS.sdpa.default, args, kwargs)
    _refuse(
        call,
        dropout_seed=_NO_DROPOUT,
        part=("part: got a call's part of a larger attention", "a call of its own: export the model of one device"),
    )
    wanted = _whole(OPS.sdpa.default, call)
    query, key, value = call["query"], call["key"], call["value"]
    dtype, headless = _sum_dtype(query.dtype), query.dim() == 2
    heads = 1 if headless else max(query.size(-3), key.size(-3), value.size(-3))
    wide_key, wide_value = (_repeated(t.to(dtype), heads, call["enable_gqa"]) for t in (key, value))
    scores = query.to(dtype) @ wide_key.transpose(-2, -1) * _scale(call)

    row = torch.arange(query.size(-2), device=query.device)
    column = torch.arange(key.size(-2), device=query.device)
    diagonal = key.size(-2) - query.size(-2) if call["causal_alignment"] == "lower_right" else 0
    distance = column - (row + diagonal)[:, None]
    scores = _capped(scores, call["softcap"])
    if call["score_program"] is not None:
        scores = _programmed(call, scores, row, column)
    slopes, relative = call["alibi_slopes"], call["relative_bias"]
    if slopes is not None:
        slopes = slopes.to(dtype)[..., None, None]
        scores = scores - (slopes.squeeze(-3) if headless else slopes) * distance.abs()
    if relative is not None:
        relative = relative.squeeze(-2) if headless else relative
        bias = relative.to(dtype).index_select(-1, _entries(relative, distance).reshape(-1))
        scores = scores + bias.reshape(*relative.shape[:-1], *distance.shape)
    mask = call["attn_mask"]
    if mask is not None and mask.dtype == torch.bool:
        masked_score = -math.inf if call["masked_score"] is None else call["masked_score"]
        scores = torch.where(mask, scores, number(masked_score, scores))
    elif mask is not None:
        scores = scores + mask.to(dtype)
    attends = _attends(call, distance)
    if call["blocks"] is not None:
        shown = _shown_by_blocks(call, row, column)
        shown = shown.reshape(shown.shape[-2:]) if headless else shown
        attends = shown if attends is None else attends & shown
    if attends is not None:
        scores = torch.where(attends, scores, -math.inf)

    lead = wanted[0].shape[:-2]  # of all results, even if only value has a batch dimension
    places = None
    if call["key_indices"] is not None:
        all_keys = scores
        scores, places = _listed(call, scores)
    if scores.size(-1) == 0:
        weights, lse = scores, scores.new_full(scores.shape[:-1], -math.inf)
    else:
        weights, lse = _softmax(scores)
    spread = weights if places is None else torch.zeros_like(all_keys).scatter_add(-1, places, weights)
    output = (spread @ wide_value).to(query.dtype)
    if _is_plain(call) and _torch_stays_whole():
        output = torch.ops.aten.scaled_dot_product_attention.default(
            query, key, value, is_causal=call["is_causal"], scale=call["scale"], enable_gqa=call["enable_gqa"]
        )
    lse = lse.expand(*lead, lse.size(-1)).clone(memory_format=torch.contiguous_format)
    if not call["return_weights"]:
        weights = query.new_empty(wanted[2].shape)
    else:
        weights = weights.expand(*lead, *weights.shape[-2:])
        weights = weights.mean(-3) if call["average_weights"] else weights
        weights = weights.to(query.dtype).clone(memory_format=torch.contiguous_format)
    return _strided_as(wanted[0], output), lse, weights


def _torch_stays_whole() -> bool:
    """Whether torch's own operator stays in this program: it does for ONNX, whose exporter has a rule for it."""
    from torch._export.utils import _special_op_to_preserve_cia

    kernels = torch.ops.aten.scaled_dot_product_attention.default.py_kernels
    return kernels.get(torch._C.DispatchKey.CompositeImplicitAutograd) is _special_op_to_preserve_cia


def _sequences(starts: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
    """The sequence of each token, and the token's place in it. Tokens behind the last one: the number of sequences."""
    token = torch.arange(tokens, device=starts.device)
    sequence = (token[:, None] >= starts[1:]).sum(-1)
    return sequence, token - starts.long().index_select(0, sequence)


def _varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """One matrix of scores for all tokens: those of different sequences do not attend to each other."""
    call = arguments(OPS.varlen.default, args, kwargs)
    _refuse(
        call,
        dropout_seed=_NO_DROPOUT,
        block_table=("block_table: got a tensor", "None: gather the pages in the model"),
        k_scale=("k_scale: got a tensor", "None: widen the cache in the model"),
        v_scale=("v_scale: got a tensor", "None: widen the cache in the model"),
    )
    wanted = _whole(OPS.varlen.default, call)
    query, key, value = call["query"], call["key"], call["value"]
    dtype, heads = _sum_dtype(query.dtype), query.size(1)
    wide = [_repeated(t.to(dtype).transpose(0, 1), heads, call["enable_gqa"]) for t in (key, value)]
    scores = query.to(dtype).transpose(0, 1) @ wide[0].transpose(-2, -1) * _scale(call)

    query_starts, key_starts = call["cu_seq_q"], call["cu_seq_k"]
    sequence, row = _sequences(query_starts, query.size(0))
    key_sequence, column = _sequences(key_starts, key.size(0))
    query_lengths, key_lengths = query_starts.diff(), key_starts.diff()
    exists = (sequence[:, None] == key_sequence) & (key_sequence < key_lengths.size(0))
    if call["seqused_k"] is not None:
        key_lengths = call["seqused_k"]
        exists = exists & (column < key_lengths.index_select(0, key_sequence.clamp(max=key_lengths.size(0) - 1)))
    known = sequence.clamp(max=key_lengths.size(0) - 1)
    if call["causal_alignment"] == "lower_right":
        row = row + (key_lengths - query_lengths).long().index_select(0, known)
    distance = column - row[:, None]
    scores = _capped(scores, call["softcap"])
    slopes, relative = call["alibi_slopes"], call["relative_bias"]
    if slopes is not None:
        slopes = slopes.to(dtype)
        slopes = slopes[:, None, None] if slopes.dim() == 1 else slopes.index_select(0, known).t()[..., None]
        scores = scores - slopes * distance.abs()
    if relative is not None:
        relative = relative.to(dtype)
        of_rows = relative.expand(query.size(0), heads, -1) if relative.dim() == 2 else relative.index_select(0, known)
        entries = _entries(relative, distance)[:, None].expand(-1, heads, -1)
        scores = scores + of_rows.expand(-1, heads, -1).gather(-1, entries).transpose(0, 1)
    mask = call["attn_mask"]
    if mask is not None:
        first = key_lengths.long().index_select(0, known) - mask.size(-1)  # the key of the first column
        place = column - first[:, None]
        elements = mask.gather(-1, place.clamp(0, mask.size(-1) - 1).expand(*mask.shape[:-1], -1))
        if mask.dtype == torch.bool:
            scores = torch.where((place < 0) | elements, scores, -math.inf)
        else:
            scores = scores + torch.where(place < 0, 0.0, elements.to(dtype))
    attends = _attends(call, distance)
    scores = torch.where(exists if attends is None else exists & attends, scores, -math.inf)
    weights, lse = _softmax(scores)
    output = (weights @ wide[1]).to(query.dtype).transpose(0, 1)
    return _strided_as(wanted[0], output), lse.expand(wanted[1].shape).clone(memory_format=torch.contiguous_format)


def _recorded(op: Any, plain: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The forward of a program with a loss. Its backward needs none of what kernels save, which is NaN here: a kernel
    would not read it unnoticed.
    """

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = arguments(op, args, kwargs)
        results = DECOMPOSITIONS[plain](**{name: call[name] for name in names(plain)})
        saved = _whole(op, call)[-1]
        return (*results, torch.full(saved.shape, math.nan, dtype=saved.dtype, device=saved.device))

    return forward


@contextmanager
def _autograd() -> Iterator[None]:
    """Has autograd record what is called, also where the dispatcher has left autograd behind, as in a decomposition."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.enable_grad(),
    ):
        yield


def _backward(op: Any, plain: Any, differentiable: Sequence[str]) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        call = arguments(op, args, kwargs)
        forward = {name: call[name] for name in names(plain) if name in call}
        grads = [call["grad_output"], call["grad_lse"], call.get("grad_weights")]
        if grads[2] is not None:
            average = grads[2].dim() < call["output"].dim()
            forward.update(return_weights=True, average_weights=average)
        wanted = [name for name, asked in zip(differentiable, call["output_mask"], strict=True) if asked]
        leaves = {name: call[name].detach() for name in wanted}
        with _autograd():
            for leaf in leaves.values():
                leaf.requires_grad_()
            results = DECOMPOSITIONS[plain](**{**forward, **leaves})
            pairs = [(r, g) for r, g in zip(results, grads, strict=False) if g is not None and r.requires_grad]
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                list(leaves.values()),
                [grad for _, grad in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        by_name = dict(zip(wanted, found, strict=True))
        shapes = zip(differentiable, _whole(op, call), strict=True)
        return tuple(_strided_as(like, by_name[name]) if name in by_name else None for name, like in shapes)

    return backward


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    OPS.sdpa.default: _sdpa,
    OPS.sdpa_recorded.default: _recorded(OPS.sdpa_recorded.default, OPS.sdpa.default),
    OPS.sdpa_backward.default: _backward(OPS.sdpa_backward.default, OPS.sdpa.default, DIFFERENTIABLE),
    OPS.varlen.default: _varlen,
    OPS.varlen_recorded.default: _recorded(OPS.varlen_recorded.default, OPS.varlen.default),
    OPS.varlen_backward.default: _backward(OPS.varlen_backward.default, OPS.varlen.default, VARLEN_DIFFERENTIABLE),
}


def _into_out(plain: Any) -> Callable[..., Any]:
    """The rule of functionalisation for an op with `out`, which otherwise stays whole: torch asks no table for it."""

    def rule(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracing = get_proxy_mode()
        if tracing is None or plain not in tracing.decomposition_table:
            return mode.__torch_dispatch__(func, types, args, kwargs)
        call = arguments(func, args, kwargs)
        out = call.pop("out")
        with mode:
            output, *others = plain(**call)
            out.copy_(output)
        return others[0] if len(others) == 1 else tuple(others)

    return rule


for _op, _plain in ((OPS.sdpa_out.default, OPS.sdpa.default), (OPS.varlen_out.default, OPS.varlen.default)):
    torch.library.register_torch_dispatch(_op, FunctionalTensorMode, _into_out(_plain))


def _with_ours(make_table: Callable[[], dict[Any, Any]]) -> Callable[[], dict[Any, Any]]:
    def table() -> dict[Any, Any]:
        return {**make_table(), **DECOMPOSITIONS}

    return table


def _keep_whole() -> None:
    for op in DECOMPOSITIONS:
        sys.modules["torch._inductor.decomposition"].decompositions.pop(op, None)


_MAKES_TABLE = "_core_aten_decompositions_post_autograd"  # of default_decompositions(), which calls it each time
if hasattr(torch._decomp, _MAKES_TABLE):
    setattr(torch._decomp, _MAKES_TABLE, _with_ours(getattr(torch._decomp, _MAKES_TABLE)))
on_import("torch._inductor.decomposition", _keep_whole)
