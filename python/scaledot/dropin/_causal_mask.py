"""The causal mask of transformers' models, without a (B, 1, Lq, Lk) tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["CausalMask"]

_METADATA = frozenset(
    getter
    for owner in (Tensor, torch)
    for name in (
        "device", "dtype", "grad", "grad_fn", "is_cuda", "is_meta", "is_sparse", "layout", "ndim", "requires_grad",
        "shape", "is_leaf", "is_nested", "is_quantized", "names", "untyped_storage",
        "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "ndimension", "nelement",
        "numel", "size", "stride", "storage_offset",
    )
    for attribute in [getattr(owner, name, None)]
    for getter in [getattr(attribute, "__get__", None), attribute]
    if getter is not None
)  # fmt: skip


class CausalMask(Tensor):
    """Row i of the call attends to the keys up to i + `first_row`. One byte of memory stands for all.

    It stands for the boolean mask (B, 1, Lq, Lk). Models read its shape and slice its rows, and get a CausalMask. Any
    other operation gets that boolean mask.
    """

    first_row: int

    @staticmethod
    def of(batch: int, rows: int, keys: int, first_row: int = 0, device: Any = None) -> CausalMask:
        one = torch.zeros((), dtype=torch.bool, device=device)
        mask: CausalMask = one.expand(batch, 1, rows, keys).as_subclass(CausalMask)  # type: ignore[assignment]
        mask.first_row = first_row
        return mask

    def materialised(self) -> Tensor:
        """The boolean mask, True = may attend."""
        with torch._C.DisableTorchFunctionSubclass():
            batch, _, rows, keys = self.shape
            whole = torch.ones(rows, keys, dtype=torch.bool, device=self.device)
            return whole.tril(self.first_row).expand(batch, 1, rows, keys)

    def _sliced(self, index: Any) -> CausalMask | None:
        """The mask of some rows and the first keys; None for any other index."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in [i for i in index if i is Ellipsis]:
            at = next(k for k, i in enumerate(index) if i is Ellipsis)
            index = (*index[:at], *[slice(None)] * (5 - len(index)), *index[at + 1 :])
        if len(index) > 4 or not all(isinstance(i, slice) and i.step in (None, 1) for i in index):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            sizes = tuple(self.shape)
            ranges = [range(n)[i] for n, i in zip(sizes, (*index, *[slice(None)] * 4), strict=False)]
            if ranges[1] != range(sizes[1]) or ranges[3].start != 0:
                return None
            return CausalMask.of(
                len(ranges[0]), len(ranges[2]), len(ranges[3]), self.first_row + ranges[2].start, self.device
            )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], CausalMask):
            sliced = args[0]._sliced(args[1])
            if sliced is not None:
                return sliced
        if func is Tensor.to and isinstance(args[0], CausalMask):
            mask = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                moved = func(torch.empty((), dtype=torch.bool, device=mask.device), *args[1:], **(kwargs or {}))
                if moved.dtype == torch.bool:
                    return CausalMask.of(mask.shape[0], mask.shape[2], mask.shape[3], mask.first_row, moved.device)

        def plain(value: Any) -> Any:
            if isinstance(value, CausalMask):
                return value.materialised()
            if isinstance(value, (list, tuple)):
                return type(value)(plain(v) for v in value)
            return value

        return func(*(plain(a) for a in args), **{name: plain(a) for name, a in (kwargs or {}).items()})
