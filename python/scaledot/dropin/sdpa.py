"""F.scaled_dot_product_attention of unmodified code, run by scaledot::

    from scaledot.dropin import sdpa

    sdpa.activate()                       # from here on, everywhere, until sdpa.deactivate()

    with sdpa.activate() as activation:   # or for a while
        model(input)
    print(activation)                     # how many calls ran in scaledot, and which were left to torch, and why

`activate` gives torch's dispatcher a kernel for aten::scaled_dot_product_attention on the CPU, below the Python
function. So it reaches every caller: F.scaled_dot_product_attention, names that were imported before, TorchScript, C++,
autocast, torch.compile and torch.func.grad. Other devices, nested tensors and torch.vmap have dispatch keys of their
own and never come here; nor does the fast path of nn.MultiheadAttention in eval mode, which does not call attention at
all (`dropin.torch_nn` is for that).

What arrives and is not scaledot's is left to torch, with torch's result or torch's error: see `Activation.fallthrough`.
torch.nn.attention.sdpa_kernel chooses among torch's own backends, thus only for what is left to torch.

The activation is the process's: it holds in all threads. Do not (de)activate while another thread computes attention:
torch's dispatcher does not lock its tables against calls. A function that torch.compile compiled keeps what was active
then; checkpointed code must find in its backward what was active in its forward.
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

from scaledot.functional import scaled_dot_product_attention

__all__ = ["Activation", "activate", "deactivate"]

_NAME = "scaled_dot_product_attention"
# AutogradCPU serves every call but those of inference mode and from below autograd, which CPU serves.
_KEYS = ("CPU", "AutogradCPU")
_torch_own = torch.ops.aten.scaled_dot_product_attention.default.decompose
_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
# torch.compile traces with these two. Any other class that implements __torch_dispatch__ (DTensor, for one) has rules
# for torch's operators and none for ours.
_TRACED = (FakeTensor, FunctionalTensor)

_lock = threading.Lock()
_active: tuple[Activation, ...] = ()
_library: torch.library.Library | None = None


class Activation:
    """What `activate` returns: ends with its `with` block or by `deactivate()`, and counts until then.

    Attributes:
        calls: how many calls scaledot ran.
        fallthrough: how many were left to torch, by the reason.

    Under torch.compile the count is of the calls that were traced.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.fallthrough: Counter[str] = Counter()

    @property
    def active(self) -> bool:
        return any(one is self for one in _active)

    def deactivate(self) -> None:
        """Ends this activation; others that are in force stay. Nothing happens if it has ended already."""
        global _active, _library
        with _lock:
            _active = tuple(one for one in _active if one is not self)
            if not _active and _library is not None:
                _library._destroy()
                _library = None
                _forget_dispatch()

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
    """Lets scaledot run F.scaled_dot_product_attention on the CPU, in all code and threads of this process.

    Returns:
        A handle that ends this activation, as a context manager or by its `deactivate()`, and that counts calls.
        Activations nest: torch's own function is back when the last has ended.
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


def _forget_dispatch() -> None:
    """torch.compile and torch.export remember which kernel a call of the operator goes to, and torch does not make them
    forget it when a kernel is registered."""
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


def deactivate() -> None:
    """Ends the latest `activate` that is still in force; nothing happens if there is none."""
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
    """The kernel: aten::scaled_dot_product_attention's schema."""
    reason = _not_ours(query, key, value, attn_mask, dropout_p, is_causal)
    if reason is None:
        try:
            output = scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        except (TypeError, ValueError) as error:  # arguments that scaledot refuses: torch takes them or says why not
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


def _not_ours(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> str | None:
    """Why torch has to answer this call, or None.

    What scaledot would compute and torch refuses, and what reaches scaledot's op only to fail there. Anything else that
    is not scaledot's it refuses with an error that names the argument, and `_run` goes on to torch.
    """
    dtype = query.dtype
    if dtype not in _DTYPES:
        return f"the dtype is {dtype}"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask and is_causal together are an error in torch"
        if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
            return f"an attn_mask of dtype {attn_mask.dtype} with a query of dtype {dtype} is an error in torch"
    if dropout_p == 1.0:
        return "dropout_p is 1"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    for tensor in (query, key, value, attn_mask):
        if tensor is None or type(tensor) is Tensor or isinstance(tensor, _TRACED):
            continue
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"a tensor is a {type(tensor).__name__}"
    return None
