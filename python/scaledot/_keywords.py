"""Errors for keywords that a function does not have. They name the one that is meant.

``scaled_dot_product_attention() got an unexpected keyword argument 'causal': use is_causal``

Functions that run in every step of a model take ``**options`` or ``**unknown`` and raise `unknown_keyword` themselves:
a right call pays nothing. The others are decorated with `check_keywords`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypedDict, TypeVar

__all__ = [
    "MISSING",
    "NoOptions",
    "check_constructor",
    "check_keywords",
    "hide_unknown",
    "require_arguments",
    "unknown_keyword",
]

P = ParamSpec("P")
T = TypeVar("T")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

# Names for the same argument, here and in other libraries. The one that the called function has is meant.
_SAME = (
    ("attn_mask", "mask", "attention_mask", "attn_bias", "attention_bias", "custom_mask", "tree_mask"),
    ("block_mask", "block_sparse_mask", "mask_mod"),
    ("block_size", "BLOCK_SIZE"),
    ("block_table", "block_tables", "page_table"),
    ("bias", "use_bias", "qkv_bias", "qkv_proj_bias"),
    ("cu_seq_k", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_kv"),
    ("cu_seq_q", "cu_seqlens_q"),
    ("dropout", "dropout_p", "dropout_rate", "attn_dropout", "attention_dropout", "attn_drop", "p"),
    ("embed_dim", "d_model", "hidden_size", "input_dim", "dim", "E"),
    ("enable_gqa", "gqa"),
    ("ids", "document_ids", "document_id"),
    ("is_causal", "causal"),
    ("key", "k", "K", "keys"),
    ("key_mask", "key_padding_mask", "padding_mask", "src_key_padding_mask"),
    ("key_length", "Lk", "S", "kv_len", "KV_LEN", "max_len", "max_length"),
    ("max_k", "max_seqlen_k", "max_seqlen_kv"),
    ("max_q", "max_seqlen_q"),
    ("lengths", "seq_lengths", "seq_lens", "seqlens"),
    ("Lk", "key_length", "S", "kv_len", "KV_LEN"),
    ("Lq", "query_length", "L", "q_len", "Q_LEN"),
    ("num_heads", "nhead", "n_heads", "n_head", "heads", "head_num", "num_attention_heads", "H"),
    ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_kv_groups"),
    ("out_dim", "output_dim"),
    ("out_proj", "output_proj"),
    ("query", "q", "Q", "querys", "queries", "x", "X", "hidden_states", "input"),
    ("query_length", "Lq", "L", "q_len", "Q_LEN", "length", "size", "seq_len"),
    ("relative_bias", "position_bias", "rel_pos_bias", "relative_position_bias", "rel_pos"),
    ("return_lse", "return_softmax_lse", "need_lse", "return_logsumexp"),
    ("return_weights", "need_weights", "return_attn_probs", "return_attn_weights", "output_attentions"),
    ("scale", "softmax_scale", "sm_scale", "scaling", "qk_scale"),
    ("seqused_k", "cache_seqlens", "seqlens_k", "context_lens"),
    ("softcap", "softcapping", "logits_soft_cap", "logit_softcapping", "attn_logit_softcapping"),
    ("alibi_slopes", "slopes", "alibi"),
    ("value", "v", "V", "values"),
    ("window", "window_size", "sliding_window", "local_window_size"),
    ("k_scale", "k_descale", "key_scale"),
    ("v_scale", "v_descale", "value_scale"),
)  # fmt: skip

_IN_PAGES = {"": "keys in pages are for scaledot.varlen_attention"}
_OF_PACKED = {"": "packed sequences are for scaledot.varlen_attention"}
_OF_QUANTISED = {"": "quantised keys and values are for scaledot.varlen_attention"}
_OF_DENSE = {"": "scaled_dot_product_attention has it"}

# Advice for a name where the argument that is meant has another form, by that argument; "" where there is none.
_ADVICE: dict[str, dict[str, str]] = {
    "add_bias_kv": {"": "scaledot.dropin.torch_nn.MultiheadAttention has it"},
    "add_zero_attn": {"": "scaledot.dropin.torch_nn.MultiheadAttention has it"},
    "average_attn_weights": {"": "weights are those of each head; weights.mean(1) is their average"},
    "batch_first": {"": "tensors are batch first, (batch, length, features), so leave it out"},
    "cu_seqlens": {"cu_seq_q": "use cu_seq_q and cu_seq_k", "": "packed sequences are for scaledot.varlen_attention"},
    "deterministic": {"": "torch.use_deterministic_algorithms(True) asks for it"},
    "key_mask": {
        "seqused_k": "packed sequences have no padding: use seqused_k",
        "attn_mask": "use attn_mask=key_mask[:, None, None, :]",
    },
    "key_padding_mask": {
        "key_mask": "use key_mask=~key_padding_mask (True = may attend)",
        "seqused_k": "packed sequences have no padding: use seqused_k",
        "attn_mask": "use attn_mask=~key_padding_mask[:, None, None, :] (True = may attend)",
    },
    "max_seqlen": {"max_q": "use max_q and max_k"},
    "mask_mod": {"block_mask": "use block_mask=scaledot.BlockMask.from_mask_mod(mask_mod, B, H, Lq, Lk)"},
    "sliding_window": {"window": "use window=(sliding_window - 1, 0)"},
    "training": {"dropout_p": "use dropout_p=0.0 for inference", "": "call the module's eval() for inference"},
    "window_size": {"window": "use window=(left, right), where None is no limit"},
    **dict.fromkeys(("block_table", "page_table"), _IN_PAGES),
    **dict.fromkeys(("k_scale", "v_scale"), _OF_QUANTISED),
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "seqused_k"), _OF_PACKED
    ),
    **dict.fromkeys(("block_mask", "key_indices", "masked_score", "return_weights", "score_mod"), _OF_DENSE),
}


class NoOptions(TypedDict):
    """The type of ``**unknown``: type checkers know that no keyword is right there."""


class _Missing:
    """The value of a required argument that is not given; errors print it as "nothing"."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


def unknown_keyword(function: Callable[..., Any], *names: str) -> TypeError:
    """The error for a call of `function` with the keyword names[0], which it does not have."""
    name, called = names[0], getattr(function, "__qualname__", "")
    text = f"{called}() got an unexpected keyword argument {name!r}"
    # The code that a drop-in replaces gives masks and lengths another meaning.
    advice = {} if ".dropin." in function.__module__ else _ADVICE.get(name, {})
    meant = _meant(name, _parameters(function), advice)
    if meant:
        return TypeError(f"{text}: {meant}")
    # The other half of a module: is_causal for the constructor, dropout for the call.
    owner, _, method = called.rpartition(".")
    there = getattr(sys.modules.get(function.__module__), owner, None)
    other = {"__init__": "forward", "forward": "__init__"}.get(method)
    if there is not None and other is not None and hasattr(there, other):
        names_there = _parameters(getattr(there, other))
        found = name if name in names_there else _same(name, names_there)
        if found:
            return TypeError(f"{text}: {found} belongs to the {'constructor' if method == 'forward' else 'call'}")
    return TypeError(f"{text}: {advice.get('') or 'it has ' + (', '.join(_parameters(function)) or 'no keywords')}")


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names that a caller may use as keywords."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in by_name and p.name not in ("self", "cls")]


def _meant(name: str, parameters: list[str], advice: Mapping[str, str]) -> str | None:
    """What to use in place of `name`, in words."""
    for parameter, words in advice.items():
        if parameter in parameters:
            return words
    found = _same(name, parameters)
    if found is None and not advice:
        near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.75)
        found = near[0] if near else None
    return f"use {found}" if found else None


def _same(name: str, parameters: list[str]) -> str | None:
    """The parameter that is `name` in another library, or in other letters."""
    for names in _SAME:
        if name in names:
            for other in names:
                if other in parameters:
                    return other
    return next((parameter for parameter in parameters if parameter.lower() == name.lower()), None)


def check_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function that sets something up: unknown keywords are `unknown_keyword`."""
    known = frozenset(_parameters(function))

    @functools.wraps(function)
    def checking(*args: P.args, **options: P.kwargs) -> T:
        if options and not known.issuperset(options):
            raise unknown_keyword(function, *(name for name in options if name not in known))
        return function(*args, **options)

    return checking


def check_constructor(cls: _Class) -> _Class:
    """Decorator of a dataclass: unknown keywords of its constructor are `unknown_keyword`."""
    cls.__init__ = check_keywords(cls.__init__)  # type: ignore[misc]
    return cls


def hide_unknown(function: _Function) -> _Function:
    """Decorator of a function that takes ``**unknown: Unpack[NoOptions]`` and raises `unknown_keyword` for any.

    inspect.signature, help() and Sphinx do not show it. Calls are not wrapped.
    """
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    require_arguments(function)
    return function


def require_arguments(function: Callable[..., Any]) -> None:
    """Leaves it to `function` to miss its arguments, whose default becomes MISSING.

    Python would report `query` missing in a call with ``q=...``, and never say that q is unknown.
    """
    given = function.__defaults__ or ()  # type: ignore[attr-defined]
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]  # type: ignore[attr-defined]
    required = len(positional) - len(given) - (positional[:1] == ("self",))
    function.__defaults__ = (MISSING,) * required + given  # type: ignore[attr-defined]
