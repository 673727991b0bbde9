"""Runs F.scaled_dot_product_attention of unmodified code in scaledot::

    from scaledot.dropin import sdpa

    sdpa.activate()                       # for the whole process, until sdpa.deactivate()

    with sdpa.activate() as activation:   # or for one block
        model(input)
    print(activation)                     # how many calls ran in scaledot, and why others were left to torch

`activate` registers a CPU kernel for aten::scaled_dot_product_attention with torch's dispatcher, below the Python
function. The kernel is in C++ (csrc/ops/dropin/sdpa.cpp) and costs a small call no more than torch's own does. It
reaches every caller: F.scaled_dot_product_attention, names imported earlier, TorchScript, C++, autocast, torch.compile,
torch.func.grad and torch.func.jvp.

torch's own registry does the same: importing this module registers "scaledot", which
torch.nn.attention.activate_flash_attention_impl("scaledot") activates until restore_flash_attention_impl().

It does not reach other devices, nested tensors and torch.vmap, which have their own dispatch keys. It does not reach
the fast path of nn.MultiheadAttention in eval mode either, which does not call attention; use `dropin.torch_nn` there.

The output has the strides that torch's own would have, so that programs which were exported or traced with torch's
kernels run with scaledot's, and the other way round.

Calls that scaledot does not support fall through to torch, with torch's result or error. `Activation.fallthrough`
counts them. torch.nn.attention.sdpa_kernel selects among torch's backends, so of other calls it affects the strides
only.

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
from torch.nn.attention import register_flash_attention_impl

from .._keywords import check_keywords
from .._load import OPS
from .._namespace import NAMESPACE

__all__ = ["Activation", "activate", "deactivate"]

# torch.compile traces with these two. Other classes that implement __torch_dispatch__, such as DTensor, have rules for
# torch's operators but none for scaledot's.
_TRACED = (FakeTensor, FunctionalTensor)

_lock = threading.Lock()
_active: tuple[Activation, ...] = ()


class Activation:
    """The handle that `activate` returns. It counts calls until its `with` block or its `deactivate()` ends it.

    Under torch.compile it counts the traced calls.
    """

    @check_keywords
    def __init__(self) -> None:
        self._start = _counters()
        self._end: tuple[int, Counter[str]] | None = None

    @property
    def calls(self) -> int:
        """The number of calls that scaledot ran."""
        return (self._end or _counters())[0] - self._start[0]

    @property
    def fallthrough(self) -> Counter[str]:
        """For each reason, the number of calls left to torch."""
        return (self._end or _counters())[1] - self._start[1]

    @property
    def active(self) -> bool:
        """Whether this activation is in force."""
        return any(one is self for one in _active)

    @check_keywords
    def deactivate(self) -> None:
        """Ends this activation and no other. Does nothing if it has already ended."""
        global _active
        with _lock:
            if self._end is not None:
                return
            self._end = _counters()
            _active = tuple(one for one in _active if one is not self)
            if not _active:
                _register(False)

    remove = deactivate  # the name by which torch.nn.attention.restore_flash_attention_impl calls it

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deactivate()

    def __repr__(self) -> str:
        """The line that a notebook shows for ``activate()``."""
        return f"<Activation, {'in force' if self.active else 'ended'}: {self._summary()}>"

    def __str__(self) -> str:
        reasons = self.fallthrough.most_common()
        return "\n".join([self._summary(), *(f"  left to torch, {count} times: {reason}" for reason, count in reasons)])

    def _summary(self) -> str:
        calls, others = self.calls, self.fallthrough.total()
        return f"scaledot ran {calls} of {calls + others} calls of F.scaled_dot_product_attention"


@check_keywords
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
    global _active
    with _lock:
        if not _active:
            _register(True)
        activation = Activation()
        _active = (*_active, activation)
    return activation


# Only offers it: torch.nn.attention.activate_flash_attention_impl("scaledot") calls `activate`.
register_flash_attention_impl("scaledot", register_fn=activate)


@check_keywords
def deactivate() -> None:
    """Ends the latest activation that is in force. Does nothing if there is none."""
    if _active:
        _active[-1].deactivate()


def _register(active: bool) -> None:
    """Registers the kernel, with counters at 0, or removes it.

    torch.compile and torch.export cache which kernel runs the operator, and torch does not clear the cache when a
    kernel is registered.
    """
    OPS.dropin_sdpa_activate(active)
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


def _counters() -> tuple[int, Counter[str]]:
    """Counts of all activations since the kernel was registered: calls scaledot ran, and calls left to torch."""
    calls, reasons, counts = OPS.dropin_sdpa_counters()
    return calls, Counter(dict(zip(reasons, counts, strict=True)))


def _class_with_rules(tensor: list[Tensor]) -> str:
    """The name of the class of the one tensor if it has its own rules for torch's operators, otherwise ""."""
    kind = type(tensor[0])
    if issubclass(kind, _TRACED) or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return ""
    return kind.__name__


_library = torch.library.Library(NAMESPACE, "IMPL")
_library.impl("dropin_sdpa_class", _class_with_rules, "CPU")
