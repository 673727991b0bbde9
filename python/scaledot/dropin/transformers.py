"""scaledot as an attention implementation of Hugging Face transformers::

    import scaledot.dropin.transformers

    scaledot.dropin.transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="scaledot")
    model.set_attn_implementation("scaledot")       # or a model that is there already

Works with transformers 5.4 and newer, and every model there that takes an attention implementation by name. Beside what
"sdpa" does, this one computes softcap, attention sinks and weights (`output_attentions=True`), reads grouped key and
value heads where they lie also when there is a mask, and does not expand a position bias that comes without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from scaledot.functional import scaled_dot_product_attention
from scaledot.merge import merge_sinks
from scaledot.options import Alignment

__all__ = ["attention_forward", "register"]

# Models hand their own forward's keywords down to the attention. These say nothing about what it computes.
_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "deterministic",
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

_HIDES = -1e4  # models hide a key by adding the least number of a dtype, for float16 -65504


def register(name: str = "scaledot", *, ignore: Collection[str] = ()) -> None:
    """Registers the attention and the mask function of this module with transformers. May be called again.

    Args:
        name: what models are told: `attn_implementation=name`.
        ignore: names of further keywords that models pass to their attention and that do not change what it computes.
            Any keyword that is not None and that this module does not know is an error.

    Raises:
        ImportError: transformers is not installed, or older than 5.0.
        ValueError: the name is taken by an implementation of transformers itself, which it would replace.
    """
    try:
        from transformers import AttentionInterface
        from transformers import __version__ as version
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise ImportError(
            "scaledot.dropin.transformers needs Hugging Face transformers, version 5: pip install 'transformers>=5.0'"
        ) from error
    if int(version.split(".")[0]) < 5:
        raise ImportError(
            f"scaledot.dropin.transformers needs Hugging Face transformers, version 5, and found {version}: "
            "pip install 'transformers>=5.0'"
        )
    taken = AttentionInterface().get(name)
    if name == "eager" or (taken is not None and not hasattr(taken, "_scaledot")):
        raise ValueError(f"name: transformers has an attention implementation called {name!r}; needs another name")
    AttentionInterface.register(name, _forward_ignoring(frozenset(ignore)))
    # The mask comes as a boolean (B, 1, Lq, Lk), True = may attend, or as None where causality or nothing at all is all
    # there is to it.
    AttentionMaskInterface.register(name, sdpa_mask)


def _forward_ignoring(ignore: frozenset[str]) -> Callable[..., tuple[Tensor, Tensor | None]]:
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
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers' models call.

    Args:
        module: the model's attention module; says whether it is training (dropout) and, in `is_causal`, a decoder.
        query: (B, H, Lq, D).
        key: (B, Hkv, Lk, D), where Hkv divides H.
        value: (B, Hkv, Lk, Dv).
        attention_mask: anything that broadcasts to (B, H, Lq, Lk): boolean, True = may attend, or added to the scores.
            It holds all that is masked, causality and the sliding window included. None: see `is_causal`.
        scaling: default 1 / sqrt(D).
        dropout: probability, in training.
        is_causal: whether several queries without a mask attend causally, counted from the first key (there may be more
            keys than queries: those of a static cache that is not full yet); default: what the module says. A single
            query without a mask attends to all keys.
        sliding_window: without a mask, how far back a query sees, itself included (and as far ahead, if not causal).
        softcap: as in Gemma 2.
        s_aux: (H,): one more key a head, of this score and with a zero value ("attention sink", gpt-oss).
        sinks: the same by query: (B, H, Lq, 1).
        position_bias: added to the scores (T5); anything that broadcasts to (B, H, Lq, Lk); differentiable.
        cu_seq_lens_q: where packed sequences begin: allowed only with a mask that separates them.
        position_ids: (B, Lq): causal attention refuses positions that start again, as packed sequences' do, unless
            the mask keeps them apart. Not looked at with a cache that is not empty, on a GPU, where it would wait for
            the device, nor while torch.compile or torch.export traces, where values are not known.
        output_attentions: also return the weights. They are returned as well while transformers collects them.
        **kwargs: what models hand down beside these; anything that is unknown and not None is an error.

    Returns:
        (output (B, Lq, H, Dv), weights (B, H, Lq, Lk) or None).

    Raises:
        TypeError: a keyword that scaledot does not know.
        ValueError: packed sequences that no mask keeps apart; and what `scaled_dot_product_attention` raises.
    """
    for name, argument in kwargs.items():
        if argument is not None and name not in _HARMLESS:
            raise TypeError(
                f"{name}: {type(module).__name__} passes this to its attention, and scaledot does not know it. If it "
                f"does not change what attention computes, say register(ignore=[{name!r}]); otherwise this model needs "
                "another attn_implementation"
            )
    query_length, key_length = query.size(-2), key.size(-2)
    alignment: Alignment = "upper_left"
    window = None
    causal = query_length > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and position_ids is not None and not position_ids.is_cuda:  # a look at values would wait for the GPU
        _check_kept_apart(position_ids, attention_mask, query_length, key_length)
    if attention_mask is None:
        if cu_seq_lens_q is not None and cu_seq_lens_q.numel() > 2:
            raise ValueError(
                f"cu_seq_lens_q: got {cu_seq_lens_q.numel() - 1} packed sequences without an attention_mask that keeps "
                "them apart; needs position_ids that start again with each sequence, from which transformers makes one"
            )
        if sliding_window is not None and key_length > sliding_window:
            # A single query is the last one of a sequence whose other keys are cached; the window lies behind it.
            alignment = "lower_right" if query_length == 1 else "upper_left"
            window = (sliding_window - 1, sliding_window - 1)

    sink = _sink(s_aux, sinks, query.size(1))
    return_weights = bool(output_attentions) or _collected()
    results = scaled_dot_product_attention(
        query,
        key,
        value,
        _with_bias(attention_mask, position_bias),
        float(dropout) if module.training else 0.0,
        causal and attention_mask is None,
        scaling,
        key.size(1) != query.size(1),
        causal_alignment=alignment,
        window=window,
        softcap=softcap,
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
    """Refuses positions that start again inside a row, unless the mask hides the key before from the query that does.

    transformers makes that mask in most models, where there is neither an attention_mask nor a cache. Where it does
    not, "eager" and "sdpa" let packed sequences see each other. A query that may not see its own key is padding, whose
    position means nothing.
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
            f"position_ids: got positions that start again in row {row} at {column + 1}, as those of packed sequences "
            "do, without an attention_mask that keeps them apart; needs one of shape (B, 1, Lq, Lk), or use_cache=False"
            " without any attention_mask in the model's call, where most models make one of the positions"
        )


def _collected() -> bool:
    """Whether the model's caller wants the weights. GPT-2 and some others drop `output_attentions` on its way to here,
    and transformers then takes them from what attention modules return."""
    if torch.compiler.is_compiling():
        return False
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before transformers 5.2
        return False
    wanted = _active_collector.get()
    return wanted is not None and any("attentions" in name for name in wanted)


def _sink(s_aux: Tensor | None, sinks: Tensor | None, heads: int) -> Tensor | None:
    """The sink's score, of a shape that broadcasts to (B, H, Lq)."""
    if s_aux is not None and s_aux.shape != (heads,):
        raise ValueError(f"s_aux: got shape {tuple(s_aux.shape)}; needs ({heads},), one score a head")
    if sinks is not None and (sinks.dim() != 4 or sinks.size(-1) != 1):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}; needs (B, H, Lq, 1)")
    if s_aux is not None:
        return s_aux[:, None]
    return None if sinks is None else sinks.squeeze(-1)


def _with_bias(attention_mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """The one mask that adds the bias and masks what the mask masks."""
    if position_bias is None or attention_mask is None:
        return attention_mask if position_bias is None else position_bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, -torch.inf)
    return position_bias + attention_mask
