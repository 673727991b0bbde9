"""scaledot as an attention implementation of Hugging Face transformers::

    import scaledot.dropin.transformers

    scaledot.dropin.transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="scaledot")
    model.set_attn_implementation("scaledot")       # or for an existing model

It needs transformers `MINIMUM_VERSION` or newer, and works with every model that takes an attention implementation by
name. Compared with "sdpa", it also:

- computes softcap, attention sinks and weights (``output_attentions=True``);
- reads grouped key and value heads in place, even with a mask;
- does not expand a position bias that comes without a mask;
- after `convert_relative_bias`, adds T5's bias from a number for each distance.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import described
from .._keywords import check_keywords
from ..functional import scaled_dot_product_attention
from ..merge import merge_sinks
from ..options import Alignment
from ._causal_mask import CausalMask
from ._continuous_batching import KEYWORDS, paged_attention, serve
from ._own_attention import adds_the_mask, check_model, is_ours, refuse_in_class_tables
from ._relative_bias import convert_relative_bias

__all__ = ["MINIMUM_VERSION", "attention_forward", "convert_relative_bias", "register"]

MINIMUM_VERSION = "5.4"
"""The oldest supported version of transformers, as in pyproject.toml."""

# Models pass the keywords of their own forward to the attention. These do not change what it computes.
_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "deterministic",
        "input_ids",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)

_HIDES = -1e4  # models hide a key by adding the smallest value of a dtype, for float16 -65504


@check_keywords
def register(name: str = "scaledot", *, ignore: Collection[str] = ()) -> None:
    """Registers this module's attention function and mask function with transformers. May be called repeatedly.

    Args:
        name: the name of the implementation, for ``attn_implementation=name``.
        ignore: keywords that models pass to their attention and that do not change what it computes. Any other unknown
            keyword that is not None is an error. One that `attention_forward` knows, such as `indices`, is served
            all the same.

    Raises:
        ImportError: transformers is not installed, or is older than `MINIMUM_VERSION`.
        ValueError: an implementation of transformers itself has the name.
        TypeError: an argument has the wrong type.

    Example:
        >>> scaledot.dropin.transformers.register()
        >>> config = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
        >>> model = transformers.AutoModel.from_config(config, attn_implementation="scaledot")
    """
    if not isinstance(name, str):
        raise TypeError(f"name: got {described(name)}; needs a text")
    if isinstance(ignore, str) or not all(isinstance(keyword, str) for keyword in ignore):
        raise TypeError(f"ignore: got {described(ignore)}; needs a list of keywords")
    try:
        from transformers import AttentionInterface
        from transformers import __version__ as version
        from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
    except ImportError as error:
        raise _too_old(_installed_version()) from error
    if _major_minor(version) < _major_minor(MINIMUM_VERSION):
        raise _too_old(version)
    taken = AttentionInterface().get(name)
    if name == "eager" or (taken is not None and not hasattr(taken, "_scaledot")):
        raise ValueError(f"name: got {name!r}, an attention implementation of transformers; needs another name")
    AttentionInterface.register(name, _forward_ignoring(frozenset(ignore)))
    AttentionMaskInterface.register(name, _mask_of(sdpa_mask, eager_mask))
    _watch_models()


def _watch_models() -> None:
    """Wraps the check of a model's attention implementation, which comes before its layers are made."""
    from transformers import PreTrainedModel

    check = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, "_scaledot"):
        return

    @functools.wraps(check)
    def get_correct_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> str:
        implementation: str = check(self, *args, **kwargs)
        if is_ours(implementation):
            refuse_in_class_tables(type(self), implementation)
            serve(is_ours)
        return implementation

    get_correct_attn_implementation._scaledot = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]


def _mask_of(
    sdpa_mask: Callable[..., Tensor | None], eager_mask: Callable[..., Tensor | None]
) -> Callable[..., Tensor | None]:
    """The mask function: `sdpa_mask`, except that it gives a `CausalMask` where that returns None.

    `sdpa_mask` makes a boolean mask (B, 1, Lq, Lk), True = may attend. It returns None for a causal mask and for one
    that is all True, and leaves it to each attention module which of the two was meant. Here a mask that is all True
    is a `CausalMask` whose first row already sees all keys; in compiled code it is one True, expanded.

    Models in which some class adds the mask to its scores itself get the mask of "eager", a number for each score, or
    None where nothing is hidden.
    """
    signature = inspect.signature(sdpa_mask)

    @functools.wraps(sdpa_mask)
    def scaledot_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        config = kwargs.get("config")
        check_model(config)
        if adds_the_mask(config):
            return eager_mask(*args, **kwargs)
        mask = sdpa_mask(*args, **kwargs)
        if mask is not None:
            return mask
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        rows, keys = call["q_length"], call["kv_length"]
        causal = call["allow_is_causal_skip"] and rows > 1  # the last position attends to all keys
        if causal and call["allow_is_bidirectional_skip"]:
            call["allow_is_bidirectional_skip"] = False
            causal = sdpa_mask(*given.args, **given.kwargs) is None
        if torch.compiler.is_compiling():
            if not causal:
                if rows == 1:  # no module reads None as causal
                    return None
                seen = torch.ones((), dtype=torch.bool, device=call["device"])
                return seen.expand(call["batch_size"], 1, rows, keys)
            call["allow_is_causal_skip"] = False
            return sdpa_mask(*given.args, **given.kwargs)
        return CausalMask.of(call["batch_size"], rows, keys, 0 if causal else keys - 1, device=call["device"])

    return scaledot_mask


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _installed_version() -> str | None:
    module = sys.modules.get("transformers")
    return getattr(module, "__version__", None)


def _too_old(version: str | None) -> ImportError:
    return ImportError(
        f"transformers: got {'none' if version is None else version}; needs at least {MINIMUM_VERSION} for "
        f"scaledot.dropin.transformers: run `pip install 'transformers>={MINIMUM_VERSION}'`"
    )


def _forward_ignoring(ignore: frozenset[str]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    ignore -= KEYWORDS | frozenset(inspect.signature(attention_forward).parameters)

    def scaledot_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        kept = {key: value for key, value in kwargs.items() if key not in ignore} if ignore else kwargs
        return attention_forward(*args, **kept)

    scaledot_attention._scaledot = True  # type: ignore[attr-defined]
    return scaledot_attention


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers' models call.

    Args:
        module: the model's attention module. Its `training` enables dropout, its `is_causal` means a decoder.
        query: (B, H, Lq, D).
        key: (B, Hkv, Lk, D), where Hkv divides H.
        value: (B, Hkv, Lk, Dv).
        attention_mask: broadcastable to (B, H, Lq, Lk). Boolean (True = may attend), or floating and added to the
            scores. It includes causality and the sliding window. The registered mask function passes a `CausalMask`
            where causality says it all. For None, see `is_causal`.
        scaling: the factor of the scores; default 1 / sqrt(D).
        dropout: probability of dropping a weight in training.
        is_causal: whether several queries without a mask attend causally. Query i then attends to keys 0 to i; a static
            cache that is not full has more keys than queries. Default: ``module.is_causal``, or False if the module
            has no such attribute. A single query without a mask attends to all keys.
        sliding_window: without a mask, the number of keys up to and including the query's own that it attends to, and
            as far ahead if not causal.
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2.
        s_aux: (H,), the score of one more key per head, with a value of zero: the attention sink of gpt-oss.
        sinks: (B, H, Lq, 1), the same with one score per query.
        position_bias: broadcastable to (B, H, Lq, Lk), added to the scores (T5); differentiable. With three
            dimensions, (1, H, 2 M + 1), it is a `relative_bias`; see `convert_relative_bias`.
        indices: (B, Lq, K), the positions of the keys that each query attends to, besides what the mask says (the
            sparse attention of DeepSeek and GLM). A negative one is none. Where that is faster they become
            `key_indices`, otherwise a mask; the results are the same.
        block_indices: (B, G, Lq, K), where G divides H: the same for blocks of ``module.indexer.block_size`` keys, for
            each H / G heads (MiniMax M3).
        cu_seq_lens_q: the starts of packed sequences. Needs a mask that separates the sequences, except in continuous
            batching (`generate_batch`), where each attends to its own keys.
        position_ids: (B, Lq). Causal attention refuses positions that restart, as in packed sequences, unless the mask
            separates the sequences. This is not checked with a non-empty cache, on a GPU (it would synchronise), or
            while torch.compile or torch.export traces.
        output_attentions: whether to return the weights. They are also returned while transformers collects them.
        **kwargs: other keywords of the model. One that is unknown and not None is an error.

    Returns:
        (output (B, Lq, H, Dv), weights (B, H, Lq, Lk) or None).

    Raises:
        TypeError: an unknown keyword.
        ValueError: packed sequences without a mask that separates them, or an error of `scaled_dot_product_attention`.
    """
    block_size: Any = getattr(getattr(module, "indexer", None), "block_size", None)
    if block_size is None:  # only MiniMax says how many keys a block has
        kwargs["block_indices"] = block_indices
    paged = kwargs.get("write_index") is not None
    if paged:  # the rest selects keys or adds to scores by positions of a batch
        kwargs |= {"indices": indices, "position_bias": position_bias}
        kwargs |= {"output_attentions": output_attentions or None, "block_indices": block_indices}
    for name, argument in kwargs.items():
        if argument is not None and name not in _HARMLESS and not (paged and name in KEYWORDS):
            advice = f"If it does not change what attention computes, call register(ignore=[{name!r}]). Otherwise use"
            if isinstance(argument, Tensor):  # it may say what is attended to
                advice = "Use"
            raise TypeError(
                f"{name}: got a value from {type(module).__name__}; needs None, because scaledot does not know this "
                f"keyword. {advice} another attn_implementation for this model"
            )
    query_length, key_length = query.size(-2), key.size(-2)
    if paged:
        sink = _sink(s_aux, sinks, query.size(1))
        output, lse = paged_attention(
            query,
            key,
            value,
            attention_mask,
            {**kwargs, "cu_seq_lens_q": cu_seq_lens_q},
            is_causal=bool(getattr(module, "is_causal", False) if is_causal is None else is_causal),
            scale=scaling,
            window=sliding_window,
            softcap=softcap,
            return_lse=sink is not None,
        )
        if sink is not None and lse is not None:
            output, _ = merge_sinks(output, lse, sink)
        return output.transpose(1, 2).contiguous(), None
    alignment: Alignment = "upper_left"
    window = None
    causal = query_length > 1 and bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if causal and attention_mask is None and is_causal is None and adds_the_mask(getattr(module, "config", None)):
        causal = False  # the mask of "eager", which says causality itself
    if isinstance(attention_mask, CausalMask):
        first_row = attention_mask.first_row
        sliding_window = None  # the mask function makes a real mask where a window hides something
        whole = attention_mask.shape[-2:] == (query_length, key_length)
        if first_row >= attention_mask.size(-1) - 1:  # hides nothing, even if the model made it for more keys
            causal, attention_mask = False, None
        elif whole and first_row in (0, key_length - query_length):
            causal, attention_mask = True, None
            alignment = "upper_left" if first_row == 0 else "lower_right"
        else:
            attention_mask = attention_mask.materialised()
    if causal and position_ids is not None and not position_ids.is_cuda:  # reading values would synchronise a GPU
        _check_kept_apart(position_ids, attention_mask, query_length, key_length)
    if attention_mask is None:
        if cu_seq_lens_q is not None and cu_seq_lens_q.numel() > 2:
            raise ValueError(
                f"cu_seq_lens_q: got {cu_seq_lens_q.numel() - 1} packed sequences without an attention_mask; needs a "
                "mask that separates them. transformers makes one from position_ids that restart with each sequence"
            )
        if sliding_window is not None and key_length > sliding_window:
            # A single query is the last position of a sequence with cached keys, and its window is before it.
            alignment = "lower_right" if query_length == 1 else alignment
            window = (sliding_window - 1, sliding_window - 1)

    causal = causal and attention_mask is None
    return_weights = bool(output_attentions) or _collected()
    key_indices = None
    plain = position_bias is None and block_indices is None and not return_weights
    if indices is not None and plain and _lists_are_faster(indices, query, key, value):
        key_indices = _key_lists(indices, attention_mask)
    if key_indices is not None:
        attention_mask = None
    elif indices is not None:
        attention_mask = _among(_listed(indices, key_length).unsqueeze(1), attention_mask)
    if block_indices is not None:
        size = int(block_size)
        blocks = _listed(block_indices, -(-key_length // size))
        blocks = blocks.repeat_interleave(query.size(1) // blocks.size(1), dim=1)
        attention_mask = _among(blocks.repeat_interleave(size, dim=-1)[..., :key_length], attention_mask)

    relative_bias = None
    if position_bias is not None and position_bias.dim() == 3:
        position_bias, relative_bias = None, position_bias
    sink = _sink(s_aux, sinks, query.size(1))
    results = scaled_dot_product_attention(
        query,
        key,
        value,
        _with_bias(attention_mask, position_bias),
        float(dropout) if module.training else 0.0,
        causal,
        scaling,
        key.size(1) != query.size(1),
        causal_alignment=alignment,
        window=window,
        softcap=softcap,
        relative_bias=relative_bias,
        key_indices=key_indices,
        return_weights=return_weights,
        return_lse=sink is not None,
    )
    output, *further = results if isinstance(results, tuple) else (results,)
    weights = further[0] if return_weights else None
    if sink is not None:
        output, _, *further = merge_sinks(output, further[-1], sink, weights)
        weights = further[0] if further else None
    return output.transpose(1, 2).contiguous(), weights


def _check_kept_apart(position_ids: Tensor, attention_mask: Tensor | None, query_length: int, key_length: int) -> None:
    """Refuses positions that restart within a row, unless the mask hides the previous key at the restart.

    Most models make that mask if there is neither an attention_mask nor a cache. Without it, "eager" and "sdpa" let
    packed sequences attend to each other. A query that may not attend to its own key is padding, and its position is
    ignored.
    """
    if position_ids.dim() != 2 or position_ids.size(1) != query_length or torch.compiler.is_compiling():
        return
    mixed = position_ids[:, 1:] < position_ids[:, :-1]
    if attention_mask is not None:
        if query_length != key_length or attention_mask.dim() != 4:
            return
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask > _HIDES
        seen = seen[:, 0].expand(-1, query_length, key_length)
        own, before = seen.diagonal(dim1=-2, dim2=-1)[:, 1:], seen.diagonal(-1, dim1=-2, dim2=-1)
        mixed = mixed & own & before
    if bool(mixed.any()):
        row, column = mixed.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids: got positions that restart in row {row} at {column + 1}, as in packed sequences, without "
            "an attention_mask that separates them; needs a mask (B, 1, Lq, Lk), or a call of the model with "
            "use_cache=False and no attention_mask, for which most models make the mask from the positions"
        )


def _collected() -> bool:
    """Whether transformers collects the weights that attention modules return.

    GPT-2 and some other models do not pass `output_attentions` on, and rely on this.
    """
    if torch.compiler.is_compiling():
        return False
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # a private name, which some versions lack
        return False
    wanted = _active_collector.get()
    return wanted is not None and any("attentions" in name for name in wanted)


def _sink(s_aux: Tensor | None, sinks: Tensor | None, heads: int) -> Tensor | None:
    """The score of the sink, broadcastable to (B, H, Lq), or None."""
    if s_aux is not None and s_aux.shape != (heads,):
        raise ValueError(f"s_aux: got shape {tuple(s_aux.shape)}; needs ({heads},), one score per head")
    if sinks is not None and (sinks.dim() != 4 or sinks.size(-1) != 1):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}; needs (B, H, Lq, 1)")
    if s_aux is not None:
        return s_aux[:, None]
    return None if sinks is None else sinks.squeeze(-1)


def _listed(indices: Tensor, count: int) -> Tensor:
    """(..., count): whether a number from 0 to count - 1 is in `indices` (..., K)."""
    positions = indices.long()
    listed = torch.zeros(*positions.shape[:-1], count + 1, dtype=torch.bool, device=indices.device)
    return listed.scatter(-1, positions.where(positions >= 0, count), True)[..., :count]


def _lists_are_faster(indices: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `key_indices` serves these `indices` (B, Lq, K) better than a mask.

    Its kernels are for CPUs and have no second derivative, so a call that records a gradient keeps the mask. On one
    thread, with 4,096 keys, one row was 1.6 to 1.9 times as fast at a quarter of the keys, and more rows 1.7 to 2 times
    at an eighth. With many rows in 16 bits the mask was up to twice as fast.
    """
    tensors = (query, key, value)
    if not query.is_cpu or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    rows, listed, keys = query.size(-2), indices.size(-1), key.size(-2)
    return (4 if rows == 1 else 8) * listed <= keys and (rows <= 4 or query.dtype.itemsize >= 4)


def _key_lists(indices: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """The lists (B, 1, Lq, K) of `indices` without keys that the mask hides; None if the mask does more than hide.

    A mask takes a key once that is listed twice, `key_indices` twice. So repeated entries become -1, which is none. A
    row of which a floating mask hides all keys is uniform with that mask, and would be zeros with an empty list.
    """
    lists = indices.sort(-1).values.unsqueeze(1)
    repeated = lists[..., 1:] == lists[..., :-1]
    lists = torch.cat([lists[..., :1], lists[..., 1:].masked_fill(repeated, -1)], -1)
    if attention_mask is None:
        return lists
    if attention_mask.dim() != 4 or attention_mask.size(1) != 1:
        return None
    given = attention_mask.expand(lists.size(0), 1, lists.size(2), -1).gather(-1, lists.clamp(min=0).long())
    if given.dtype == torch.bool:
        return lists.masked_fill(~given, -1)
    if torch.compiler.is_compiling():  # what follows depends on values
        return None
    seen = (given == 0) & (lists >= 0)
    only_hides = seen | (given <= torch.finfo(given.dtype).min) | (lists < 0)
    return lists.masked_fill(~seen, -1) if bool((seen.any(-1) & only_hides.all(-1)).all()) else None


def _among(listed: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mask, restricted to the keys that are listed, (B, H or 1, Lq, Lk)."""
    if attention_mask is None:
        return listed
    if attention_mask.dtype == torch.bool:
        return attention_mask & listed
    return attention_mask.masked_fill(~listed, -torch.inf)


def _with_bias(attention_mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """Merges the mask and the bias into one mask."""
    if position_bias is None or attention_mask is None:
        return attention_mask if position_bias is None else position_bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, -torch.inf)
    return position_bias + attention_mask
