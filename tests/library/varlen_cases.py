"""Packed problems for varlen_attention: one Case per sequence, and their tensors concatenated."""

# ruff: noqa: C408 - options read better as keywords
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cases import Case, Cotangents, Inputs


def pack(tensors: list[Tensor]) -> Tensor:
    """Concatenates tensors of shape (H, L, D) to (total, H, D)."""
    return torch.cat([t.transpose(0, 1) for t in tensors])


def cumulative(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(dtype)


def dense_mask(mask: Tensor, rows: slice, keys: int) -> Tensor:
    """The mask of one sequence with a column for each of its keys, from that of a packed call."""
    mask = mask[..., rows, :]
    dense = torch.ones(*mask.shape[:-1], keys).to(mask.dtype)
    if mask.is_floating_point():
        dense.zero_()
    columns = min(keys, mask.size(-1))
    dense[..., keys - columns :] = mask[..., mask.size(-1) - columns :]
    return dense


def packed_mask(masks: list[Tensor], columns: int) -> Tensor:
    """The mask of a packed call from those of its sequences. Columns without a key are NaN or random."""
    packed = []
    for mask in masks:
        own = torch.rand(*mask.shape[:-1], columns) < 0.5
        found = own if mask.dtype == torch.bool else torch.where(own, torch.nan, torch.inf).to(mask.dtype)
        count = min(columns, mask.size(-1))
        found[..., columns - count :] = mask[..., mask.size(-1) - count :]
        packed.append(found)
    return torch.cat(packed, -2)


@dataclass(frozen=True)
class Packed:
    """The lengths of the sequences, and the fields of Case that all sequences share."""

    name: str
    query_lengths: tuple[int, ...] = (37, 5, 70, 1)
    key_lengths: tuple[int, ...] = (53, 90, 70, 33)
    common: dict[str, Any] = field(default_factory=dict, hash=False)

    def with_(self, **changes: Any) -> Packed:
        return Packed(self.name, self.query_lengths, self.key_lengths, {**self.common, **changes})

    def cases(self) -> list[Case]:
        fields = {"causal_alignment": "lower_right", **self.common}
        return [
            Case(f"{self.name} {b}", batch=(), query_length=rows, key_length=keys, **fields)
            for b, (rows, keys) in enumerate(zip(self.query_lengths, self.key_lengths, strict=True))
        ]

    def sequences(self) -> list[Inputs]:
        """The inputs of each sequence, with the dropout seeds that the packed call gives them."""
        made = [case.make(b) for b, case in enumerate(self.cases())]
        for b, inputs in enumerate(made):
            if inputs.dropout_seed is not None:
                inputs.dropout_seed = self.seed() + torch.tensor([0, b])
        return made

    def cotangents(self) -> list[Cotangents]:
        return [case.cotangents(b) for b, case in enumerate(self.cases())]

    def seed(self) -> Tensor:
        seed = self.cases()[0].seed_tensor(7)
        assert seed is not None
        return seed

    def options(self) -> dict[str, Any]:
        """The non-tensor arguments of torch.ops.scaledot.varlen except max_q and max_k."""
        options = self.cases()[0].options()
        del options["masked_score"], options["block_shape"]
        return options


@dataclass
class Call:
    """The tensors of one call; splits its results and gradients into sequences."""

    packed: Packed
    inputs: list[Inputs]
    query: Tensor
    key: Tensor
    value: Tensor
    alibi_slopes: Tensor | None
    dropout_seed: Tensor | None
    relative_bias: Tensor | None = None
    attn_mask: Tensor | None = None

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        p = self.packed
        arguments: dict[str, Any] = dict(
            query=self.query,
            key=self.key,
            value=self.value,
            cu_seq_q=cumulative(p.query_lengths),
            cu_seq_k=cumulative(p.key_lengths, torch.int64),
            seqused_k=None,
            block_table=None,
            alibi_slopes=self.alibi_slopes,
            dropout_seed=self.dropout_seed,
            relative_bias=self.relative_bias,
            k_scale=None,
            v_scale=None,
            attn_mask=self.attn_mask,
            max_q=max(p.query_lengths, default=0),
            max_k=max(p.key_lengths, default=0),
            **p.options(),
        )
        output, lse = torch.ops.scaledot.varlen(**arguments | changes)
        return output, lse

    def gradients(self, results: tuple[Tensor, Tensor]) -> list[dict[str, Tensor]]:
        """The gradients of query, key, value, relative_bias and attn_mask of each sequence, for the cotangents of its
        Case. That of attn_mask has a column for each key.
        """
        cotangents = self.packed.cotangents()
        output = pack([c.output for c in cotangents if c.output is not None])
        lse = torch.cat([c.lse for c in cotangents if c.lse is not None], 1)
        inputs = {"query": self.query, "key": self.key, "value": self.value}
        if self.relative_bias is not None:
            inputs["relative_bias"] = self.relative_bias
        if self.attn_mask is not None and self.attn_mask.is_floating_point():
            inputs["attn_mask"] = self.attn_mask
        grads = torch.autograd.grad(results, tuple(inputs.values()), (output, lse))
        split = {"relative_bias": list, "attn_mask": self.mask_rows, "query": self.rows}
        rows = [split.get(name, self.key_rows)(g) for name, g in zip(inputs, grads, strict=True)]
        return [dict(zip(inputs, one, strict=True)) for one in zip(*rows, strict=True)]

    def mask_rows(self, gradient: Tensor) -> list[Tensor]:
        """The gradient of attn_mask of each sequence, with a column for each key. It is 0 in other columns."""
        found = []
        for rows, keys in zip(gradient.split(self.packed.query_lengths, -2), self.packed.key_lengths, strict=True):
            without_key = max(rows.size(-1) - keys, 0)
            assert not rows[..., :without_key].any()
            found.append(torch.nn.functional.pad(rows[..., without_key:], (max(keys - rows.size(-1), 0), 0)))
        return found

    def key_rows(self, tensor: Tensor) -> list[Tensor]:
        return self.rows(tensor, keys=True)

    def rows(self, tensor: Tensor, keys: bool = False) -> list[Tensor]:
        """(H, L, D) for each sequence."""
        lengths = self.packed.key_lengths if keys else self.packed.query_lengths
        return [t.transpose(0, 1) for t in tensor.split(lengths)]

    def results(self, results: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        output, lse = results
        return list(zip(self.rows(output), lse.split(self.packed.query_lengths, 1), strict=True))


def call(packed: Packed, requires_grad: bool = True) -> Call:
    inputs = packed.sequences()
    tensors = [pack([getattr(i, name) for i in inputs]) for name in ("query", "key", "value")]
    slopes = [i.alibi_slopes for i in inputs if i.alibi_slopes is not None]
    seed = packed.seed() if packed.common.get("dropout_p") else None
    biases = [i.relative_bias for i in inputs if i.relative_bias is not None]
    bias = torch.stack(biases) if biases else None
    masks = [i.attn_mask for i in inputs if i.attn_mask is not None]
    mask = packed_mask(masks, packed.common["mask_columns"]) if masks else None
    for tensor in (*tensors, bias, mask):
        if tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_(requires_grad)
    return Call(packed, inputs, *tensors, torch.stack(slopes) if slopes else None, seed, bias, mask)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "causal_upper_left": dict(causal=True, causal_alignment="upper_left"),
    "window": dict(window=(9, 3)),
    "gqa": dict(heads=4, kv_heads=2, enable_gqa=True, head_dim=24, value_dim=40),
    "softcap_scale": dict(softcap=2.0, scale=0.4),
    "alibi": dict(alibi="H", causal=True),
    "relative": dict(relative="H", relative_reach=20),
    "relative_causal": dict(relative="1", relative_reach=200, causal=True, heads=4, kv_heads=2, enable_gqa=True),
    "dropout": dict(dropout_p=0.3),
    "tree": dict(mask="bool", mask_columns=35, mask_shape="QK", heads=4, kv_heads=2, enable_gqa=True),
    "tree_heads": dict(mask="inf", mask_columns=60, empty_rows=True),
    "tree_bias": dict(mask="float", mask_columns=10, mask_shape="1QK", causal=True),
    "everything": dict(
        heads=4,
        kv_heads=1,
        enable_gqa=True,
        causal=True,
        window=(20, None),
        softcap=3.0,
        alibi="H",
        relative="H",
        dropout_p=0.2,
        mask="float",
        mask_columns=45,
    ),
}
