"""The result that a call has to give: the same call in plain torch, from its arguments as they were passed.

Each kind of call is made a Problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import reference
from scaledot import BlockMask
from scaledot._seed import draw_seed
from score_functions import captured, with_captured
from varlen_cases import dense_mask

Values = dict[str, Any]
Results = tuple[Tensor, ...]
Attention = Callable[..., Results]
SEED = 7  # of the dropout


class Problem(NamedTuple):
    """Two functions of the tensors that can have a gradient, by name, and whether these have a second one."""

    ours: Any
    theirs: Any
    leaves: Values
    twice: bool = True


def attention(dropout_seed: Tensor | None, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Results:
    """(output, lse, weights) of reference.py, in query's dtype."""
    kept = ("attn_mask", "alibi_slopes", "relative_bias", "block_mask", "score_mod", "k_scale", "v_scale")
    options = {name: value if name in kept else plain(value) for name, value in options.items()}
    dropped = options.pop("dropout_p", 0.0)
    arguments = {"dtype": query.dtype, "pairwise": False, **options}
    if not dropped:
        return reference.attention(query, key, value, **arguments)
    assert dropout_seed is not None
    shape = reference.attention(query, key, value, **arguments)[2].shape
    batch, heads = math.prod(shape[:-3]), shape[-3] if len(shape) > 2 else 1
    kept = reference.philox_keep_mask(dropout_seed, batch, heads, *shape[-2:], dropped)
    return reference.attention(query, key, value, dropout_p=dropped, dropout_mask=kept.reshape(shape), **arguments)


def plain(value: Any) -> Any:
    """A Python number for NumPy's and a tensor without dimensions; other values as they are."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype != torch.bool:
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(plain(side) for side in value)
    return value if isinstance(value, (bool, str, Tensor, BlockMask)) or value is None else float(value)


def seed(number: int) -> None:
    """torch.manual_seed for a CPU. torch's own also seeds devices that are not there, which takes a millisecond."""
    torch.default_generator.manual_seed(number)


def dropout_seed() -> Tensor:
    """The seed that a call draws after manual_seed(SEED)."""
    seed(SEED)
    return draw_seed()


def asked_for(results: Results, values: Values) -> Results:
    """The results of scaled_dot_product_attention, lse in query's dtype."""
    output, lse, weights = results
    found = [output]
    if values.get("return_weights"):
        found.append(weights)
    if values.get("return_lse"):
        found.append(as_dtype(lse, output.dtype))
    return tuple(found)


def as_dtype(result: Tensor, dtype: torch.dtype) -> Tensor:
    """The result, with finite numbers limited to what float16 can hold: an lse is float32."""
    return torch.where(result.isinf(), result, result.clamp(-6e4, 6e4)).to(dtype)


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides of `like`. Where that repeats a row, the first one counts."""
    if tensor.stride() == like.stride() or not like.numel():
        return tensor
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, like.stride(), strict=True))
    view = tensor.new_zeros(extent).as_strided(tensor.shape, like.stride())
    view.copy_(tensor)
    return view.expand(like.shape)


def query_of(values: Values) -> Any:
    """The queries of a call, or the tensor that also holds its keys and values."""
    return next(values[name] for name in ("query", "q", "qkv") if name in values)


def split(values: Values, names: str) -> tuple[Values, Values]:
    """(the floating tensors of query's dtype among `names`, all other values)."""
    dtype = query_of(values).dtype
    wanted = names.split()
    leaves = {name: t for name, t in values.items() if name in wanted and t is not None and t.dtype == dtype}
    return leaves, {name: value for name, value in values.items() if name not in leaves}


def seeded(function: Callable[..., Any], given: Values, like: Values) -> Attention:
    """The call itself, with its dropout seed; its lse in query's dtype."""

    def call(**leaves: Tensor) -> Results:
        seed(SEED)
        found = function(**with_captured(given, {name: laid_out(t, like[name]) for name, t in leaves.items()}))
        results = found if isinstance(found, tuple) else (found,)
        return tuple(as_dtype(result, query_of(leaves).dtype) for result in results if result is not None)

    return call


def sdpa(function: Callable[..., Any], values: Values) -> Problem:
    leaves, given = split(values, "query key value attn_mask relative_bias")
    drawn = dropout_seed()
    options = {name: value for name, value in given.items() if not name.startswith("return_")}
    leaves |= captured(values.get("score_mod"), query_of(values).dtype)

    def theirs(**x: Tensor) -> Results:
        x = {name: laid_out(t, leaves[name]) for name, t in x.items()}
        return asked_for(attention(drawn, **with_captured(options, x)), values)

    problem = Problem(seeded(function, given, leaves), theirs, leaves)
    return problem if values.get("score_mod") is None else reached(problem)


def reached(problem: Problem) -> Problem:
    """The problem of a call that some tensors have no influence on, and that has no second derivative."""

    def ours(**x: Tensor) -> Results:
        return tuple(result + zero(x).to(result.dtype) for result in problem.ours(**x))

    def theirs(**x: Tensor) -> Results:
        return tuple(result + zero(x).to(result.dtype) for result in problem.theirs(**x))

    return Problem(ours, theirs, problem.leaves, twice=False)


def varlen(function: Callable[..., Any], values: Values) -> Problem:
    leaves, given = split(values, "query key value relative_bias attn_mask")
    drawn = dropout_seed()
    wants_lse = given.get("return_lse") or getattr(given.get("return_aux"), "lse", False)

    def theirs(**x: Tensor) -> Results:
        x = {name: laid_out(t, leaves[name]) for name, t in x.items()}
        output, lse = by_sequence(given | x, drawn)
        return (output, as_dtype(lse, output.dtype)) if wants_lse else (output,)

    problem = Problem(seeded(function, given, leaves), theirs, leaves)
    forward_only = given.get("block_table") is not None or values["key"].dtype != values["query"].dtype  # or quantised
    return without_gradient(problem) if forward_only else problem


def without_gradient(problem: Problem) -> Problem:
    """The problem of a call that has no gradient: each result has one of 0."""

    def ours(**x: Tensor) -> Results:
        return tuple(result + zero(x) for result in problem.ours(**{name: t.detach() for name, t in x.items()}))

    def theirs(**x: Tensor) -> Results:
        return tuple(result.detach() + zero(x) for result in problem.theirs(**x))

    return Problem(ours, theirs, problem.leaves, twice=False)


def by_sequence(given: Values, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """(output (total, H, Dv), lse (H, total)) of a packed call."""
    parts = [sequence(b, given, drawn + torch.tensor([0, b])) for b in range(given["cu_seq_q"].numel() - 1)]
    return torch.cat([part[0].transpose(0, 1) for part in parts]), torch.cat([part[1] for part in parts], -1)


def sequence(b: int, given: Values, drawn: Tensor) -> Results:
    """(output, lse, weights) of sequence b of a packed call, heads first."""
    rows = slice(*given["cu_seq_q"][b : b + 2].tolist())
    used, table = given.get("seqused_k"), given.get("block_table")
    if table is not None:
        count, size = int(used[b]), given["key"].shape[1]
        pages = table[b, : -(-count // size)].long()
        key, value = (given[name][pages].flatten(0, 1)[:count] for name in ("key", "value"))
    else:
        begin, end = given["cu_seq_k"][b : b + 2].tolist()
        keys = slice(begin, end if used is None else begin + int(used[b]))
        key, value = given["key"][keys], given["value"][keys]
    names = ("is_causal", "scale", "enable_gqa", "softcap", "dropout_p", "window")
    options = {name: given[name] for name in names if given.get(name) is not None}
    options["causal_alignment"] = given.get("causal_alignment", "lower_right")
    size = plain(given.get("window_size", (-1, -1)))
    if size != (-1, -1):
        options["window"] = tuple(None if side == -1 else side for side in size)
    for name, dims in (("alibi_slopes", 1), ("relative_bias", 2), ("k_scale", 1), ("v_scale", 1)):  # of one sequence
        bias = given.get(name)
        if bias is not None:
            options[name] = bias[b if bias.size(0) > 1 else 0] if bias.dim() > dims else bias
    if given.get("attn_mask") is not None:
        options["attn_mask"] = dense_mask(given["attn_mask"], rows, key.size(0))
    return attention(drawn, *(t.transpose(0, 1) for t in (given["query"][rows], key, value)), **options)


class Seeded(nn.Module):
    """A module's call, with its dropout seed."""

    def __init__(self, inner: nn.Module, given: Values) -> None:
        super().__init__()
        self.inner, self.given = inner, given

    def forward(self, **x: Tensor) -> Results:
        seed(SEED)
        return tuple(result for result in self.inner(**x, **self.given) if result is not None)


class Plain(Seeded):
    """The same from the projections and plain attention."""

    def forward(self, **x: Tensor) -> Results:
        inner: Any = self.inner
        given = {"attn_mask": None, "key_mask": None, **self.given, **x}
        query = x["query"]
        key = query if given.get("key") is None else given["key"]
        value = key if given.get("value") is None else given["value"]
        batched = query.dim() == 3
        heads = (inner.num_heads, inner.num_kv_heads, inner.num_kv_heads)
        projected = [
            projection(t if batched else t[None]).unflatten(-1, (number, -1)).transpose(1, 2)
            for projection, t, number in zip(
                (inner.q_proj, inner.k_proj, inner.v_proj), (query, key, value), heads, strict=True
            )
        ]
        mask, key_mask = given["attn_mask"], given["key_mask"]
        if key_mask is not None:
            hidden = torch.zeros(key_mask.shape, dtype=query.dtype).masked_fill(~key_mask, -math.inf)[
                ..., None, None, :
            ]
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -math.inf)
            mask = hidden if mask is None else mask + hidden
        options = {name: self.given[name] for name in ("is_causal", "window", "relative_bias") if name in self.given}
        options |= {"dropout_p": inner.dropout if inner.training else 0.0, "enable_gqa": True, "attn_mask": mask}
        output, _, weights = attention(dropout_seed(), *projected, **options)
        output = output.transpose(1, 2).flatten(2)
        output = output if inner.out_proj is None else inner.out_proj(output)
        results = (output, weights) if self.given.get("need_weights") else (output,)
        return results if batched else tuple(result.squeeze(0) for result in results)


def module(function: Any, values: Values) -> Problem:
    leaves, given = split(values, "query key value attn_mask")
    return Problem(Seeded(function, given), Plain(function, given), leaves, twice=False)


def zero(leaves: Values) -> Tensor:
    """0, which depends on every leaf: a result that some input does not reach then has a gradient all the same."""
    return sum((t.flatten()[:0].sum() for t in leaves.values()), torch.zeros(()))


def first_gradients(function: Attention) -> Attention:
    """The gradients of a sum of its results, as a function: its gradients are the double backward."""

    def gradients(**leaves: Tensor) -> Results:
        generator = torch.Generator().manual_seed(SEED)
        results = function(**leaves)
        weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
        found = torch.autograd.grad(results, list(leaves.values()), weights, create_graph=True, allow_unused=True)
        wanted = zip(leaves.values(), found, strict=True)
        none = zero(leaves)
        return tuple((torch.zeros_like(t) if g is None else g) + none.to(t.dtype) for t, g in wanted)

    return gradients
