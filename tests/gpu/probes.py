"""The list of the smoke test: each kernel once, on the smallest problem that shows something new."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpu.families import Family, dense_kind, of_direction, width


@dataclass(frozen=True)
class Probe:
    kind: str  # one_tile, plain, ...
    dtype: torch.dtype
    dims: tuple[int, int]
    rows: int = 0  # 0: packed sequences
    keys: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of the call
    mask: str = ""  # bool, float; nan: bool, with a NaN in each masked key and value
    cache: str = ""  # keys and values in pages, of this dtype
    blocks: bool = False  # a block mask
    aligned: bool = True  # rows that the copy engine can address
    backward: bool = True
    decodes: bool = False  # few rows over many keys, which are split among blocks: by a generic kernel on every GPU

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        dims = str(self.dims[0]) if self.dims[0] == self.dims[1] else f"{self.dims[0]}/{self.dims[1]}"
        return f"{self.kind} d{dims} {self.dtype_name}{'' if self.aligned else ' unaligned'}"

    def family(self, kernel: str, direction: str) -> Family:
        if self.rows:
            positions = bool(self.options.get("is_causal") or self.options.get("window"))
            general = bool(self.mask or self.options.keys() & {"softcap", "dropout_p", "alibi_slopes"})
            kind = dense_kind(self.rows, self.keys, self.dims, masks_positions=positions, general=general)
        else:
            kind = "packed" if not self.cache else "pages" if self.cache == self.dtype_name else "quantised"
        return Family(kernel, direction, self.dtype_name, width(*self.dims), of_direction(kind, direction))


# ---------------------------------------------------------------------------------------------------- the list
def dense(kind: str, dtype: torch.dtype, dims: tuple[int, int], size: tuple[int, int], **more: Any) -> Probe:
    fields = {name: more.pop(name) for name in ("mask", "blocks", "aligned", "backward", "decodes") if name in more}
    return Probe(kind, dtype, dims, *size, options=more, **fields)


def of_16_bits(dtype: torch.dtype, dims: tuple[int, int]) -> list[Probe]:
    """Of the kernels for Hopper; a GPU without them runs the generic ones."""
    found = [
        dense("one_tile", dtype, dims, (64, 64)),  # no loop over keys, and no second query tile
        dense("plain", dtype, dims, (128 * 5, 700)),  # an odd number of query tiles
        dense("causal", dtype, dims, (700, 700), is_causal=True),
        dense("softcap", dtype, dims, (300, 410), softcap=5.0),
        Probe("packed", dtype, dims, options={"is_causal": True}),
        Probe("pages", dtype, dims, options={"is_causal": True}, cache=str(dtype).removeprefix("torch.")),
        Probe("quantised", dtype, dims, options={"is_causal": True}, cache="float8_e4m3fn"),
    ]
    if max(dims) > 64:
        found.insert(2, dense("cluster", dtype, dims, (128 * 6, 700)))
    return found


def of_decode(dtype: torch.dtype, dims: tuple[int, int]) -> list[Probe]:
    """Of the generic kernels for few rows of a KV group. It has two heads."""
    sizes = {"dtype": dtype, "dims": dims, "decodes": True}
    return [
        dense("decode", size=(1, 1500), **sizes),
        dense("decode_mask", size=(4, 1500), mask="float", **sizes),
        dense("decode_nan", size=(4, 1500), mask="nan", **sizes),
        dense("decode_two_tiles", size=(16, 1500), is_causal=True, causal_alignment="lower_right", **sizes),
        Probe("decode_packed", **sizes),
        Probe("decode_pages", cache=str(dtype).removeprefix("torch."), **sizes),
        Probe("decode_float8", cache="float8_e4m3fn", **sizes),
        Probe("decode_int8", cache="int8", **sizes),
    ]


def for_all_gpus(dtype: torch.dtype, dims: tuple[int, int]) -> list[Probe]:
    """Of the generic kernels, for rows that the copy engine cannot address."""
    sizes = {"dtype": dtype, "dims": dims, "aligned": False}
    return [
        dense("one_tile", size=(16, 16), **sizes),
        dense("plain", size=(150, 330), **sizes),
        dense("mask", size=(150, 330), mask="float", **sizes),
        dense("dropout", size=(150, 330), dropout_p=0.2, is_causal=True, **sizes),
        dense("decode", size=(3, 1500), **sizes),
        dense("split", size=(20, 1500), **sizes),
        dense("weights", size=(150, 330), return_weights=True, **sizes),
        dense("blocks", size=(150, 330), blocks=True, **sizes),
        dense("distances", size=(150, 330), relative_bias=True, **sizes),
        Probe("packed", options={"is_causal": True}, **sizes),
        Probe("pages", options={"is_causal": True}, cache=str(dtype).removeprefix("torch."), **sizes),
        Probe("quantised", options={"is_causal": True}, cache="int8", **sizes),
    ]


def probes() -> list[Probe]:
    """All of them, the smallest first: the first that fails is the one to look at."""
    bfloat16, float16 = torch.bfloat16, torch.float16
    widths = ((64, 64), (128, 128), (192, 128), (256, 256))
    found = [probe for dims in widths for probe in of_16_bits(bfloat16, dims)]
    for dims in ((64, 64), (128, 128)):
        found += [
            dense("nan", bfloat16, dims, (300, 410), mask="nan"),
            dense("mask", bfloat16, dims, (300, 410), mask="float"),
            dense("dropout", bfloat16, dims, (300, 410), dropout_p=0.2),
            dense("weights", bfloat16, dims, (300, 410), return_weights=True),
            dense("window", bfloat16, dims, (700, 700), window=(100, 20)),
            Probe("whole", bfloat16, dims),
        ]
    found += [probe for dims in ((64, 64), (128, 128), (256, 256)) for probe in of_16_bits(float16, dims)]
    found += of_decode(bfloat16, (64, 64)) + of_decode(bfloat16, (128, 128)) + of_decode(float16, (128, 128))
    found += for_all_gpus(bfloat16, (64, 64)) + for_all_gpus(torch.float32, (64, 64))
    for dims in ((128, 128), (300, 300), (576, 512)):  # the last are those of MLA
        found += [
            probe for probe in for_all_gpus(bfloat16, dims) if probe.kind in ("plain", "packed", "decode", "split")
        ]
    found += [probe for probe in for_all_gpus(torch.float32, (128, 128)) if probe.kind in ("plain", "mask", "packed")]
    found += [probe for probe in for_all_gpus(float16, (64, 64)) if probe.kind in ("plain", "packed", "quantised")]
    for probe in for_all_gpus(torch.float64, (64, 64)):
        if probe.kind in ("plain", "mask", "packed"):
            found.append(replace(probe, aligned=True))
    order = ("one_tile", "plain", "cluster", "causal", "packed", "whole", "softcap", "window")
    return sorted(found, key=lambda p: order.index(p.kind) if p.kind in order else len(order))
