"""Keywords that a function does not have: the error names them, and the one that is meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scaledot
from scaledot import MultiHeadAttention, masks, scaled_dot_product_attention, varlen_attention
from scaledot.dropin import config_mha, flash_attn, split_heads, torch_nn
from snippets import public_modules

Q = torch.ones(1, 2, 4, 8)
X = torch.ones(1, 4, 8)


# Methods that torch or scaledot itself calls, and no user.
INNER = {"extra_repr", "count"}


def methods(cls: type) -> Iterator[str]:
    """Of a public class: the constructor, `forward`, and its own methods without an underscore."""
    for name, member in vars(cls).items():
        public = name == "__init__" or (not name.startswith("_") and name not in INNER)
        if public and (inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod))):
            yield name


def takes_any(function: Any) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def functions() -> dict[str, Callable[..., Any]]:
    """What every public name and its methods call, but for functions whose signature takes any keyword."""
    found = {}
    for module in public_modules():
        for name in module.__all__:
            one, path = getattr(module, name), f"{module.__name__}.{name}"
            if inspect.isfunction(one):
                found[path] = one
            elif inspect.isclass(one):
                found |= {f"{path}.{method}": getattr(one, method) for method in methods(one)}
    return {path: function for path, function in found.items() if not takes_any(function)}


FUNCTIONS = functions()


def test_the_functions_are_found() -> None:
    assert len(FUNCTIONS) >= 100
    assert {"scaledot.MultiHeadAttention.forward", "scaledot.dropin.torch_nn.convert"} <= FUNCTIONS.keys()
    assert {"scaledot.build_info", "scaledot.BlockMask.__init__", "scaledot.BlockMask.to_dense"} <= FUNCTIONS.keys()
    assert {"scaledot.dropin.sdpa.activate", "scaledot.distributed.cost.ring"} <= FUNCTIONS.keys()


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_function_names_the_keyword(path: str) -> None:
    """Though all its arguments are missing."""
    function = FUNCTIONS[path]
    self = [None] if next(iter(inspect.signature(function).parameters), None) == "self" else []
    with pytest.raises(TypeError) as raised:
        function(*self, no_such_name=1)
    message = str(raised.value)
    assert message.startswith(f"{function.__qualname__}() got an unexpected keyword argument 'no_such_name': it has ")
    shown = inspect.signature(function).parameters
    names = [name for name, p in shown.items() if name != "self" and p.kind is not inspect.Parameter.VAR_POSITIONAL]
    assert message.partition(": it has ")[2] == (", ".join(names) or "no keywords")


@pytest.mark.parametrize("path", FUNCTIONS)
def test_signatures_do_not_show_how(path: str) -> None:
    parameters = inspect.signature(FUNCTIONS[path]).parameters.values()
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters)
    assert all(repr(p.default) != "nothing" for p in parameters)


# Calls as users of other libraries write them, and what the error says to write.
MEANT: dict[str, tuple[Callable[..., Any], str]] = {
    "causal": (lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong), "use is_causal"),
    "mask": (lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong), "use attn_mask"),
    "attn_bias": (lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong), "use attn_mask"),
    "softmax_scale": (lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong), "use scale"),
    "dropout": (lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong), "use dropout_p"),
    "window_size": (
        lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong),
        "use window=(left, right), where None is no limit",
    ),
    "key_padding_mask": (
        lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong),
        "use attn_mask=~key_padding_mask[:, None, None, :] (True = may attend)",
    ),
    "key_mask": (
        lambda **wrong: varlen_attention(Q[0], Q[0], Q[0], **wrong),
        "packed sequences have no padding: use seqused_k",
    ),
    "custom_mask": (lambda **wrong: varlen_attention(Q[0], Q[0], Q[0], **wrong), "use attn_mask"),
    "need_weights": (lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong), "use return_weights"),
    "batch_first": (
        lambda **wrong: MultiHeadAttention(8, 2, **wrong),
        "tensors are batch first, (batch, length, features), so leave it out",
    ),
    "masked_score": (
        lambda **wrong: varlen_attention(Q[0], Q[0], Q[0], **wrong),
        "scaled_dot_product_attention has it",
    ),
    "key_indices": (lambda **wrong: MultiHeadAttention(8, 2)(X, **wrong), "scaled_dot_product_attention has it"),
    "k_scale": (
        lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong),
        "quantised keys and values are for scaledot.varlen_attention",
    ),
    "page_table": (
        lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong),
        "keys in pages are for scaledot.varlen_attention",
    ),
    "seqused_k": (
        lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong),
        "packed sequences are for scaledot.varlen_attention",
    ),
    "block_table": (
        lambda **wrong: MultiHeadAttention(8, 2)(X, **wrong),
        "keys in pages are for scaledot.varlen_attention",
    ),
    "cu_seqlens_q": (lambda **wrong: varlen_attention(Q[0], Q[0], Q[0], **wrong), "use cu_seq_q"),
    "q": (lambda **wrong: scaled_dot_product_attention(**wrong), "use query"),
    "softcup": (lambda **wrong: scaledot.explain(Q, Q, Q, **wrong), "use softcap"),
    "block": (lambda **wrong: scaledot.BlockMask(Q, Q, (1, 1), (1, 1), **wrong), "use blocks"),
    "max_seqlen_k": (
        lambda **wrong: scaledot.explain_varlen(Q[0], Q[0], Q[0], torch.zeros(1), torch.zeros(1), 1, **wrong),
        "use max_k",
    ),
    "d_model": (lambda **wrong: MultiHeadAttention(num_heads=8, **wrong), "use embed_dim"),
    "is_causal": (lambda **wrong: MultiHeadAttention(8, 2, **wrong), "is_causal belongs to the call"),
    "dropout_p": (lambda **wrong: MultiHeadAttention(8, 2)(X, **wrong), "dropout belongs to the constructor"),
    "padding_mask": (lambda **wrong: MultiHeadAttention(8, 2)(X, **wrong), "use key_mask"),
    "return_weights": (lambda **wrong: torch_nn.MultiheadAttention(8, 2)(X, X, X, **wrong), "use need_weights"),
    "length": (lambda **wrong: masks.causal_mask(**wrong), "use query_length"),
    "mask_mod": (
        lambda **wrong: scaled_dot_product_attention(Q, Q, Q, **wrong),
        "use block_mask=scaledot.BlockMask.from_mask_mod(mask_mod, B, H, Lq, Lk)",
    ),
    "scale": (lambda **wrong: flash_attn.flash_attn_func(Q, Q, Q, **wrong), "use softmax_scale"),
    "x": (lambda **wrong: split_heads.SplitHeadAttention(8, 8, 2)(**wrong), "use X"),
    "src_key_padding_mask": (
        lambda **wrong: config_mha.MultiHeadAttention({"d_model": 8, "num_heads": 2})(X, X, X, **wrong),
        "it has querys, keys, values, attn_mask",
    ),
}


@pytest.mark.parametrize("name", MEANT)
def test_the_keyword_that_is_meant(name: str) -> None:
    call, meant = MEANT[name]
    with pytest.raises(TypeError) as raised:
        call(**{name: 1})
    assert str(raised.value).partition("() got ")[2] == f"an unexpected keyword argument {name!r}: {meant}"


COMPILED = {
    "function": (lambda x: scaled_dot_product_attention(x, x, x, causal=True), "use is_causal"),
    "packed": (lambda x: varlen_attention(x, x, x, cu_seqlens_q=x), "use cu_seq_q"),
    "masks": (lambda x: x + masks.causal_mask(3, length=4), "use query_length"),
    "module": (lambda x, module=MultiHeadAttention(8, 2): module(x, causal=True), "use is_causal"),
    "drop-in": (lambda x: flash_attn.flash_attn_func(x[None], x[None], x[None], scale=1.0), "use softmax_scale"),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_calls_name_it_too(name: str, fullgraph: bool) -> None:
    call, meant = COMPILED[name]
    torch.compiler.reset()
    error = torch._dynamo.exc.Unsupported if fullgraph else TypeError
    with pytest.raises(error, match=rf"got an unexpected keyword argument '\w+': {meant}"):
        torch.compile(call, backend="eager", fullgraph=fullgraph)(X)


def test_torch_fx_names_it_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(8, 2)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, causal=True)

    with pytest.raises(TypeError, match=r"MultiHeadAttention\.forward\(\) got .* 'causal': use is_causal"):
        torch.fx.symbolic_trace(Block())


MISSING: dict[str, Callable[[], Any]] = {
    "value: got nothing; needs a torch.Tensor": lambda: scaled_dot_product_attention(Q, Q),
    "query: got nothing; needs a torch.Tensor": lambda: MultiHeadAttention(8, 2)(),
    "cu_seq_q: got nothing; needs a torch.Tensor": lambda: varlen_attention(Q[0], Q[0], Q[0]),
    "cu_seq_k: got nothing; needs a torch.Tensor": lambda: varlen_attention(Q[0], Q[0], Q[0], torch.zeros(1)),
    "max_k: got nothing; needs an integer": lambda: varlen_attention(
        Q[0], Q[0], Q[0], torch.zeros(1), torch.zeros(1), 1
    ),
    "lse_b: got nothing; needs a torch.Tensor": lambda: scaledot.merge_states(Q, Q[..., 0], Q),
    "v: got nothing; needs a torch.Tensor": lambda: flash_attn.flash_attn_func(Q, Q),
}


@pytest.mark.parametrize("message", MISSING)
def test_missing_arguments(message: str) -> None:
    with pytest.raises(TypeError) as raised:
        MISSING[message]()
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "function",
    [
        scaled_dot_product_attention, varlen_attention, scaledot.explain, scaledot.merge_states,
        flash_attn.flash_attn_func, MultiHeadAttention.forward, torch_nn.MultiheadAttention.forward,
    ],
)  # fmt: skip
def test_calls_of_a_model_are_not_wrapped(function: Any) -> None:
    assert not hasattr(function, "__wrapped__")
    assert function.__code__.co_name == function.__name__


def test_a_function_for_a_block_mask() -> None:
    with pytest.raises(TypeError, match=r"block_mask: got a function; needs .*BlockMask\.from_mask_mod\(mask_mod, B"):
        scaled_dot_product_attention(Q, Q, Q, block_mask=lambda b, h, i, j: i >= j)
