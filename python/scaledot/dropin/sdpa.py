"""Runs F.scaled_dot_product_attention of unmodified code in scaledot::

    from scaledot.dropin import sdpa

    sdpa.activate()                       # for the whole process, until sdpa.deactivate()

    with sdpa.activate() as activation:   # or for one block
        model(input)
    print(activation)                     # how many calls ran in scaledot, and why others were left to torch

`activate` registers a CPU kernel for aten::scaled_dot_product_attention with torch's dispatcher, below the Python
function. It therefore reaches every caller: F.scaled_dot_product_attention, names imported earlier, TorchScript, C++,
autocast, torch.compile and torch.func.grad.

torch's own registry does the same: importing this module registers "scaledot", which
torch.nn.attention.activate_flash_attention_impl("scaledot") activates until restore_flash_attention_impl().

It does not reach other devices, nested tensors and torch.vmap, which have their own dispatch keys. Nor does it reach
the fast path of nn.MultiheadAttention in eval mode, which does not call attention; use `dropin.torch_nn` there.

Calls that scaledot does not support fall through to torch, with torch's result or error. `Activation.fallthrough`
counts them. torch.nn.attention.sdpa_kernel selects among torch's backends, so it only affects those calls.

An activation holds for all threads of the process. Do not activate or deactivate while another thread computes
attention, because torch's dispatcher does not lock its tables against calls. A function compiled by torch.compile keeps
the state at its compilation. Checkpointed code needs the same state in its backward as in its forward.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.attention import register_flash_attention_impl

from ..functional import scaled_dot_product_attention

__all__ = ["Activation", "activate", "deactivate"]

_NAME = "scaled_dot_product_attention"
# CPU serves calls in inference mode and from below autograd; AutogradCPU serves all others.
_KEYS = ("CPU", "AutogradCPU")
_torch_own = torch.ops.aten.scaled_dot_product_attention.default.decompose
_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
# torch.compile traces with these two. Other classes that implement __torch_dispatch__, such as DTensor, have rules for
# torch's operators but none for scaledot's.
_TRACED = (FakeTensor, FunctionalTensor)

_lock = threading.Lock()
_active: tuple[Activation, ...] = ()
_library: torch.library.Library | None = None


class Activation:
    """The handle that `activate` returns. It counts calls until its `with` block or its `deactivate()` ends it.

    Under torch.compile it counts the traced calls.

    Attributes:
        calls: the number of calls that scaledot ran.
        fallthrough: for each reason, the number of calls left to torch.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.fallthrough: Counter[str] = Counter()

    @property
    def active(self) -> bool:
        """Whether this activation is in force."""
        return any(one is self for one in _active)

    def deactivate(self) -> None:
        """Ends this activation and no other. Does nothing if it has already ended."""
        global _active, _library
        with _lock:
            _active = tuple(one for one in _active if one is not self)
            if not _active and _library is not None:
                _library._destroy()
                _library = None
                _forget_dispatch()

    remove = deactivate  # the name by which torch.nn.attention.restore_flash_attention_impl calls it

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deactivate()

    def __str__(self) -> str:
        left = sum(self.fallthrough.values())
        lines = [f"scaledot ran {self.calls} of {self.calls + left} calls of F.{_NAME}"]
        lines += [f"  left to torch, {count} times: {reason}" for reason, count in self.fallthrough.most_common()]
        return "\n".join(lines)


def activate() -> Activation:
    """Makes scaledot run F.scaled_dot_product_attention on the CPU, in all code and threads of this process.

    Returns:
        An :class:`Activation`, which counts the calls and ends as a context manager or by its `deactivate()`.
        Activations nest: torch's function is back when the last one ends.

    Example:
        >>> x = torch.randn(1, 2, 3, 4)
        >>> with scaledot.dropin.sdpa.activate() as activation:
        ...     output = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> print(activation)
        scaledot ran 1 of 1 calls of F.scaled_dot_product_attention
    """
    global _active, _library
    activation = Activation()
    with _lock:
        if _library is None:
            _library = torch.library.Library("aten", "IMPL")
            for key in _KEYS:
                _library.impl(_NAME, _run, key)
            _forget_dispatch()
        _active = (*_active, activation)
    return activation


# Only offers it: torch.nn.attention.activate_flash_attention_impl("scaledot") calls `activate`.
register_flash_attention_impl("scaledot", register_fn=activate)


def _forget_dispatch() -> None:
    """Clears the operator's dispatch cache.

    torch.compile and torch.export cache which kernel serves the operator, and torch does not clear the cache when a
    kernel is registered.
    """
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


def deactivate() -> None:
    """Ends the latest activation that is in force. Does nothing if there is none."""
    if _active:
        _active[-1].deactivate()


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel, with the schema of aten::scaled_dot_product_attention."""
    reason = _not_ours(query, key, value, attn_mask, is_causal)
    if reason is None:
        try:
            output = scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except (TypeError, ValueError) as error:  # scaledot refuses the arguments; torch may accept them
            reason = str(error)
        else:
            _count(None)
            return output
    _count(reason)
    result: Tensor = _torch_own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return result


def _count(reason: str | None) -> None:
    with _lock:
        for activation in _active:
            if reason is None:
                activation.calls += 1
            else:
                activation.fallthrough[reason] += 1


def _not_ours(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> str | None:
    """Why torch must run this call, or None.

    This covers calls that torch refuses but scaledot would compute, and calls that would fail inside scaledot's op. For
    all other unsupported arguments scaledot raises an error that names the argument, and `_run` falls back to torch.
    """
    dtype = query.dtype
    if dtype not in _DTYPES:
        return f"the dtype is {dtype}"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask and is_causal together are an error in torch's slower path"
        if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
            return f"an attn_mask of dtype {attn_mask.dtype} with a query of dtype {dtype} is an error in torch"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    for tensor in (query, key, value, attn_mask):
        if tensor is None or type(tensor) is Tensor or isinstance(tensor, _TRACED):
            continue
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"a tensor is a {type(tensor).__name__}"
    return None
