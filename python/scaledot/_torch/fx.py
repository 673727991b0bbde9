"""torch.fx.symbolic_trace records scaledot's attention modules as calls of one module, as it does torch's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.fx import Proxy

from .._keywords import unknown_keyword

__all__ = ["Proxy", "record_module"]


def record_module(
    module: nn.Module, query: Proxy, *args: object, unknown: Iterable[str] = (), **options: object
) -> Any:
    """Records a call of `module` in the graph that is being traced, and returns the proxy of its result.

    `unknown`: the keywords that its forward does not have.

    torch.fx takes modules for leaves by the package they are in, torch.nn, so it enters the forward of scaledot's.
    """
    tracer: Any = query.tracer
    if module is getattr(tracer, "root", None):
        raise TypeError(
            f"query: got a torch.fx.Proxy; needs a torch.Tensor: torch.fx traces a {type(module).__qualname__} as one "
            "call, so the module that is traced must contain it"
        )
    if unknown:
        raise unknown_keyword(type(module).forward, *unknown)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (query, *args), options)
