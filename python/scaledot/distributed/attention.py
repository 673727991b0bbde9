"""context_parallel_attention: one attention over a sequence whose positions are spread over several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from .._checks import check_types, described, flag, number, one_of, require_tensors
from .._load import OPS
from .._seed import draw_seed
from ..options import SHARED, Options, op_arguments
from . import all_to_all, checks
from .placement import Placement, Run, check_mesh, check_placement, runs_of_ranks
from .ring import Job, RingAttention
from .schedule import UNBOUNDED, Reach, Schedule

__all__ = ["context_parallel_attention"]

_NAME = "context_parallel_attention"
_METHODS = (("ring",), ("all_to_all",), ("ring", "all_to_all"))

Method = Literal["ring", "all_to_all"] | tuple[Literal["ring"], Literal["all_to_all"]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _not_compiled(function: _Function) -> _Function:
    """Decorator: torch.compile leaves the function as it is, and compiles what is around it."""
    return cast(_Function, torch.compiler.disable(function, reason="ranks exchange messages"))


# fmt: off
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    method: Method = "ring", placement: Placement = "zigzag", key_mask: Tensor | None = None,
    return_weights: Literal[False] = False, return_lse: Literal[False] = False, **options: Unpack[Options],
) -> Tensor: ...
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    method: Method = "ring", placement: Placement = "zigzag", key_mask: Tensor | None = None,
    return_weights: Literal[False] = False, return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh, attn_mask: None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    method: Method = "ring", placement: Placement = "zigzag", key_mask: Tensor | None = None,
    return_weights: Literal[False] = False, return_lse: bool = False, **options: Unpack[Options],
) -> Any: ...
# fmt: on
@_not_compiled
@SHARED.sign
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: DeviceMesh,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: Method = "ring",
    placement: Placement = "zigzag",
    key_mask: Tensor | None = None,
    return_weights: Literal[False] = False,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    r""":func:`scaledot.scaled_dot_product_attention` over a sequence that is sharded over the ranks of a mesh.

    Every rank passes its positions of query, key and value (see :func:`shard`) and gets its positions of the output.
    All ranks of the mesh have to make the call, and also its backward. Results and gradients are those of one process,
    up to rounding, and bit for bit the same from run to run.

    - "ring": keys and values travel round the ranks while rows stay (Ring Attention: Liu et al., 2023). The next chunk
      of keys is transferred while this one is computed. A rank does not get a chunk that none of its rows can attend to
      (causal mask, window). Any number of heads.
    - "all_to_all": heads are distributed over the ranks and positions are gathered (DeepSpeed Ulysses: Jacobs et al.,
      2023). The number of query heads has to be a multiple of the number of ranks.
    - ("ring", "all_to_all") on a 2-D mesh: each along its dimension (USP: Fang and Zhao, 2024). The ranks of the last
      dimension should be those with the fastest links between them.

    Args:
        query: (B, H, local Lq, D), the positions that `placement` gives this rank; float32, float64, bfloat16 or
            float16. A plain tensor: of a DTensor pass ``to_local()``.
        key: (B, Hkv, local Lk, D), a plain tensor.
        value: (B, Hkv, local Lk, Dv), a plain tensor.
        mesh: a DeviceMesh of one dimension, or of two for the pair of methods.
        dropout_p: in [0, 1]. The seed is drawn as for one process, and the seed of the mesh's first rank counts. The
            weights that are dropped are those that one process drops with this seed.
        is_causal, scale, enable_gqa: as for one process.
        softcap: this and any further option: as for one process.
        method: "ring", "all_to_all", or ("ring", "all_to_all").
        placement: "zigzag" (balanced under a causal mask) or "contiguous": how :func:`shard` cut the sequence along the
            mesh's first dimension. With "zigzag" the lengths have to be those that :func:`shard` gives. With
            "contiguous", and along the second dimension, ranks may hold any numbers of positions in the order of
            ranks.
        key_mask: (B, local Lk), bool, True = may attend: False for padding.
        causal_alignment, window: as for one process, by the positions in the whole sequence.
        alibi_slopes: (H,) or (B, H), of all heads, on every rank.
        return_lse: also return lse, (B, H, local Lq), differentiable, float32 (float64 for float64).
        relative_bias: refused. Its gradient would be a sum over all ranks.
        attn_mask, return_weights: refused. A mask or weights of shape (Lq, Lk) would need the whole sequence on each
            rank.

    Returns:
        output (B, H, local Lq, Dv), or (output, lse).

    Raises:
        ValueError, TypeError, RuntimeError: on every rank, no matter which rank has the bad argument, and also if
            arguments differ between ranks that have to be the same. RuntimeError: another rank ended, or did not make
            the call within the process group's timeout.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,))                           # on each of four processes
        >>> x = scaledot.distributed.shard(hidden, mesh, dim=1)
        >>> output = scaledot.distributed.context_parallel_attention(*project(x), mesh, is_causal=True)
    """
    try:
        groups = _groups(mesh, method)
    except TypeError:
        op_arguments(_NAME, options, SHARED)  # names an unknown keyword, such as device_mesh
        raise
    # An error on this rank is sent to the others before it is raised.
    refusal: Exception | None = None
    facts: dict[str, object] = {}
    numbers = [0, 0, 0, 0]
    try:
        arguments = op_arguments(_NAME, options, SHARED)
        dropout_p, scale = number("dropout_p", dropout_p), number("scale", scale, optional=True)
        arguments |= {"dropout_p": dropout_p, "scale": scale}
        arguments |= {"is_causal": flag("is_causal", is_causal), "enable_gqa": flag("enable_gqa", enable_gqa)}
        flag("return_lse", return_lse)
        alignment = arguments.pop("causal_alignment", SHARED.defaults["causal_alignment"])
        slopes = arguments.pop("alibi_slopes", None)
        if arguments.get("relative_bias") is not None:
            raise ValueError(
                "relative_bias: got a value; needs None: its gradient is a sum over the parts of all ranks, which "
                "context_parallel_attention does not compute (alibi_slopes and window need no gradient)"
            )
        query, key, value = _cast(query, key, value)
        call = _Call(query, key, value, key_mask, slopes, alignment, placement, arguments)
        call.check(attn_mask, return_weights)
        if groups.alls > 1:
            all_to_all.check_heads(query.shape[1], key.shape[1], groups.alls)
        call.check_op()
        seed = draw_seed().tolist() if dropout_p else [0, 0]
        numbers = [query.shape[2], key.shape[2], *seed]
        facts = {"method": method, **call.facts()}
    except Exception as error:
        refusal = error
    device = query.device if isinstance(query, Tensor) else torch.device(mesh.device_type)
    known = checks.agree(_NAME, facts, refusal, numbers, groups.in_order(), device)
    known = known.reshape(groups.rings, groups.alls, len(numbers))
    output, lse = _attend(call, groups, known, return_lse)
    return (output, lse) if return_lse else output


# ---------------------------------------------------------------------------------------------------- the computation
@dataclass(frozen=True)
class _Groups:
    """The groups of ranks that each method runs over; None: not used."""

    ring: Any
    rings: int  # the number of ranks in it
    ring_rank: int
    all_to_all: Any
    alls: int
    all_rank: int

    def in_order(self) -> list[Any]:
        """For checks.agree: the ring's dimension comes first in what it returns."""
        return [group for group in (self.all_to_all, self.ring) if group is not None]


def _attend(call: _Call, groups: _Groups, known: Tensor, needs_lse: bool) -> tuple[Tensor, Tensor]:
    """(output, lse) of this rank's rows. `known`: (rings, alls, 4), each rank's lengths of query and key, and seed."""
    row_runs, row_order = _runs(known[..., 0], "query", call.placement, groups)
    key_runs, key_order = _runs(known[..., 1], "key", call.placement, groups)
    schedule = Schedule(row_runs, key_runs, call.reach(int(known[..., 0].sum()), int(known[..., 1].sum())))
    query, key, value, key_mask, slopes = call.query, call.key, call.value, call.key_mask, call.alibi_slopes
    heads, kv_heads, first_head = query.shape[1], key.shape[1], 0
    seed = known[0, 0, 2:].clone().to(query.device) if call.arguments["dropout_p"] else None
    if groups.alls > 1:
        rows, keys = (known[groups.ring_rank, :, k].tolist() for k in (0, 1))
        query_deal = all_to_all.deal(groups.all_to_all, rows, heads, kv_heads, keys=False)
        key_deal = all_to_all.deal(groups.all_to_all, keys, heads, kv_heads, keys=True)
        here = query_deal.heads[groups.all_rank]
        first_head = here.start
        query = all_to_all.Exchange.apply(query, query_deal.gather, query_deal.scatter)
        key, value = (all_to_all.Exchange.apply(t, key_deal.gather, key_deal.scatter) for t in (key, value))
        if key_mask is not None:
            one = (range(1),) * groups.alls
            mask_deal = all_to_all.Deal(groups.all_to_all, groups.all_rank, tuple(keys), one, 1)
            key_mask = mask_deal.gather(key_mask[:, None, :, None])[:, 0, :, 0]
        if slopes is not None:
            slopes = slopes[..., here.start : here.stop]
    # This rank now has all positions of its place in the ring, in the order in which the ranks there held them.
    if row_order is not None:
        query = query[:, :, row_order]
    if key_order is not None:
        key, value = key[:, :, key_order], value[:, :, key_order]
        key_mask = None if key_mask is None else key_mask[:, key_order]

    job = Job(schedule, groups.ring, groups.ring_rank, first_head, heads, call.arguments)
    with torch.autocast(query.device.type, enabled=False):
        output, lse, _ = RingAttention.apply(query, key, value, key_mask, slopes, seed, job)
    if row_order is not None:
        output, lse = output[:, :, row_order.argsort()], lse[:, :, row_order.argsort()]
    if groups.alls > 1:
        output = all_to_all.Exchange.apply(output, query_deal.scatter, query_deal.gather)
        if needs_lse:
            lse = all_to_all.Exchange.apply(lse.unsqueeze(-1), query_deal.scatter, query_deal.gather).squeeze(-1)
    return output, lse


# -------------------------------------------------------------------------------------------------------- arguments
@dataclass(frozen=True)
class _Call:
    """The arguments of one call on this rank."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    alibi_slopes: Tensor | None
    causal_alignment: str
    placement: str
    arguments: dict[str, Any]  # the op's other arguments, by name

    def reach(self, rows: int, keys: int) -> Reach:
        """The keys that rows may attend to by position, in a whole sequence of `rows` rows and `keys` keys."""
        left, right = self.arguments.get("window_left"), self.arguments.get("window_right")
        if self.arguments["is_causal"]:
            right = 0
        return Reach(
            keys - rows if self.causal_alignment == "lower_right" else 0,
            UNBOUNDED if left is None else left,
            UNBOUNDED if right is None else right,
        )

    def facts(self) -> dict[str, object]:
        """Facts that have to be the same on all ranks, by the names of the arguments."""
        options = {**SHARED.defaults, **self.arguments, "causal_alignment": self.causal_alignment}
        options["window"] = (options.pop("window_left", None), options.pop("window_right", None))
        options["alibi_slopes"] = None if self.alibi_slopes is None else self.alibi_slopes.tolist()
        needs_grad = torch.is_grad_enabled()
        return {
            "placement": self.placement,
            "query": _without_length(self.query),
            "key": _without_length(self.key),
            "value": _without_length(self.value),
            "key_mask": self.key_mask is not None,
            **options,
            "requires_grad": [needs_grad and t.requires_grad for t in (self.query, self.key, self.value)],
        }

    def check(self, attn_mask: object, return_weights: object) -> None:
        """Raises an error for what the op does not check itself."""
        query, key, key_mask, alibi_slopes = self.query, self.key, self.key_mask, self.alibi_slopes
        for name, tensor in (("query", query), ("key", key), ("value", self.value)):
            require_tensors(**{name: tensor})
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise TypeError(
                    f"{name}: got a {type(tensor).__name__}; needs the plain tensor of this rank "
                    "(of a DTensor, to_local())"
                )
            if tensor.dim() != 4:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; needs (B, heads, local length, head_dim)")
            if tensor.shape[0] != query.shape[0]:
                raise ValueError(f"{name}: got a batch of {tensor.shape[0]}; needs query's, {query.shape[0]}")
        if key.shape[1] != self.value.shape[1]:
            raise ValueError(f"value: got {self.value.shape[1]} heads; needs key's, {key.shape[1]}")
        if attn_mask is not None:
            raise ValueError(
                "attn_mask: cannot be sharded: each rank would need its columns for keys that it never holds; use "
                "key_mask, is_causal, window or alibi_slopes"
            )
        if return_weights:
            raise ValueError("return_weights: cannot be sharded: weights have a column for every key; use return_lse")
        check_placement(self.placement)
        one_of("causal_alignment", self.causal_alignment, "upper_left", "lower_right")
        if key_mask is not None:
            require_tensors(key_mask=key_mask)
            if key_mask.dtype != torch.bool:
                raise TypeError(f"key_mask: got dtype {key_mask.dtype}; needs torch.bool, True = may attend")
            if tuple(key_mask.shape) != (key.shape[0], key.shape[2]):
                raise ValueError(
                    f"key_mask: got shape {tuple(key_mask.shape)}; needs {(key.shape[0], key.shape[2])}, (B, local Lk)"
                )
        if alibi_slopes is not None:
            require_tensors(alibi_slopes=alibi_slopes)
        if alibi_slopes is not None and alibi_slopes.shape[-1:] != (query.shape[1],):
            heads = query.shape[1]
            raise ValueError(f"alibi_slopes: got shape {tuple(alibi_slopes.shape)}; needs (H,) or (B, H), all {heads}")
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            raise ValueError("alibi_slopes: got a tensor that requires grad; needs one that does not")

    def check_op(self) -> None:
        """Raises the op's own errors, by a call on tensors without data."""
        scale = self.arguments["scale"]
        query, key, value = (t.detach().to("meta") for t in (self.query, self.key, self.value))
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.detach().to("meta")
        seed = torch.zeros(2, dtype=torch.int64)  # any will do
        try:
            OPS.sdpa(query, key, value, alibi_slopes=slopes, dropout_seed=seed, **self.arguments)
        except RuntimeError as error:
            check_types(error, self.arguments)
            raise
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"scale: got {scale}; needs a finite number")


def _groups(mesh: DeviceMesh, method: object) -> _Groups:
    """The groups of the mesh. An error here is raised on this rank alone: without a mesh it cannot reach the others."""
    check_mesh(mesh)
    methods = tuple(method) if isinstance(method, (tuple, list)) else (method,)
    if not all(isinstance(one, str) for one in methods) or methods not in _METHODS:
        kind = ValueError if all(isinstance(one, str) for one in methods) else TypeError
        raise kind(
            f'method: got {described(method)}; needs "ring", "all_to_all", or on a 2-D mesh ("ring", "all_to_all")'
        )
    if mesh.ndim != len(methods):
        raise ValueError(f"mesh: got {mesh.ndim} dimensions; method {method!r} needs {len(methods)}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("mesh: this rank is not in it")
    found = {one: (mesh.get_group(k), mesh.size(k), coordinate[k]) for k, one in enumerate(methods)}
    unused = None, 1, 0
    return _Groups(*found.get("ring", unused), *found.get("all_to_all", unused))


def _cast(query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    """The tensors in the dtype that torch.autocast would give them."""
    tensors = (query, key, value)
    if not all(isinstance(t, Tensor) for t in tensors) or not torch.is_autocast_enabled(query.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(query.device.type)
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _without_length(tensor: Tensor) -> tuple[object, ...]:
    batch, heads, _, features = tensor.shape
    return (batch, heads, "length", features), tensor.dtype, tensor.device.type


def _runs(lengths: Tensor, name: str, placement: str, groups: _Groups) -> tuple[list[list[Run]], Tensor | None]:
    """The runs that each rank of the ring holds, together with the other ranks of its all_to_all, and their order.

    `lengths`: (ring ranks, all_to_all ranks). The order sorts the positions of a rank after all_to_all; None: they are
    already in order.
    """
    # `placement` cut the sequence along the mesh's first dimension, which may be a ring of one rank.
    total, whole = int(lengths.sum()), groups.ring is None
    held = (lengths[0] if whole else lengths.sum(1)).tolist()
    if placement == "contiguous":
        ends = [sum(held[: k + 1]) for k in range(len(held))]
        runs = [[Run(end - length, end)] for end, length in zip(ends, held, strict=True)]
    else:
        runs = runs_of_ranks(total, len(held), placement)
    for rank, (wanted, found) in enumerate(zip(runs, held, strict=True)):
        size = sum(run.length for run in wanted)
        if size != found:
            raise ValueError(
                f"{name}: rank {rank} of the mesh's first dimension holds {found} of {total} positions; placement "
                f"'zigzag' over {len(held)} ranks gives it {size} (scaledot.distributed.shard cuts that way)"
            )
    if not whole:
        return runs, None
    order = None
    if placement != "contiguous" and len(held) > 1:
        order = torch.cat([torch.arange(run.begin, run.end) for here in runs for run in here]).argsort()
    return [[Run(0, total)]], order
