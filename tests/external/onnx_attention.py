"""ONNX's backend cases of the operator Attention (opset 23 to 25), computed by scaled_dot_product_attention.

https://onnx.ai/onnx/operators/onnx__Attention.html defines the inputs and attributes. The cases come from the onnx
package; none is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx.backend.test.runner import Runner
from onnx.reference.ops.op_attention import _compute_attention
from torch import Tensor

import tolerances
from external.tally import Tally
from scaledot import masks, scaled_dot_product_attention

SUITE = f"onnx {onnx.__version__}: Attention"
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
SCALED, CAPPED, MASKED, WEIGHTS = range(4)  # qk_matmul_output_mode: the scores in the fourth output
EXPANDED = "written in other operators (_expanded): there is no Attention node"

Array = np.ndarray[Any, Any]


@cache
def cases() -> list[Any]:
    """The list of onnx, which draws random inputs when it is made."""
    from onnx.backend.test.case.node import collect_testcases

    np.random.seed(0)
    return [case for case in collect_testcases("Attention") if case.kind == "node"]


def to_torch(array: Array) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: Tensor, like: Array) -> Array:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint16).numpy().view(like.dtype) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """(B, L, H * D) -> (B, H, L, D). Four-dimensional tensors are returned as they are."""
    return x if x.dim() == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def both(attends: Tensor, attn_mask: Tensor | None) -> Tensor:
    """One attn_mask that hides what either hides; `attends` is boolean."""
    if attn_mask is None:
        return attends
    return attends & attn_mask if attn_mask.dtype == torch.bool else torch.where(attends, attn_mask, -math.inf)


def placed(
    inputs: dict[str, Tensor], attributes: dict[str, Any], query_length: int, key_length: int
) -> tuple[Tensor | None, dict[str, Any]]:
    """attn_mask, and is_causal and window if these can express the attributes. Row i is at position i + offset."""
    mask = inputs.get("attn_mask")
    if mask is not None and mask.size(-1) < key_length:  # keys beyond the mask are masked
        missing = 0.0 if mask.dtype == torch.bool else -math.inf
        mask = F.pad(mask, (0, key_length - mask.size(-1)), value=missing)
    offset: Any = inputs["past_key"].size(2) if "past_key" in inputs else 0
    if "nonpad_kv_seqlen" in inputs:
        lengths = inputs["nonpad_kv_seqlen"]
        mask = both(masks.padding_mask(lengths, key_length), mask)
        offset = (lengths - query_length)[:, None, None, None]

    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    window = (None if left < 0 else left, None if right < 0 else right)
    causal = bool(attributes.get("is_causal", 0))
    if not causal and window == (None, None):
        return mask, {}
    for diagonal, alignment in ((0, "upper_left"), (key_length - query_length, "lower_right")):
        if isinstance(offset, int) and offset == diagonal:
            return mask, {"is_causal": causal, "window": window, "causal_alignment": alignment}
    distance = torch.arange(key_length) - torch.arange(query_length)[:, None] - offset
    attends = torch.ones_like(distance, dtype=torch.bool) if window[0] is None else distance >= -window[0]
    attends = attends if window[1] is None else attends & (distance <= window[1])
    return both(attends & (distance <= 0) if causal else attends, mask), {}


def attention(inputs: dict[str, Tensor], attributes: dict[str, Any]) -> dict[str, Tensor]:
    """All outputs of the operator, computed by scaledot."""
    query = split_heads(inputs["Q"], attributes.get("q_num_heads"))
    key = split_heads(inputs["K"], attributes.get("kv_num_heads"))
    value = split_heads(inputs["V"], attributes.get("kv_num_heads"))
    if "past_key" in inputs:
        key, value = torch.cat([inputs["past_key"], key], 2), torch.cat([inputs["past_value"], value], 2)
    mask, positions = placed(inputs, attributes, query.size(2), key.size(2))
    softcap = attributes.get("softcap") or None

    def run(mask: Tensor | None, softcap: float | None, **positions: Any) -> tuple[Tensor, Tensor, Tensor]:
        # scaledot computes the softmax in float32 or wider for any softmax_precision.
        wide = torch.float64 if attributes.get("softmax_precision") == onnx.TensorProto.DOUBLE else query.dtype
        result: tuple[Tensor, Tensor, Tensor] = scaled_dot_product_attention(
            query.to(wide), key.to(wide), value.to(wide), mask, scale=attributes.get("scale"), enable_gqa=True,
            softcap=softcap, return_weights=True, return_lse=True, **positions,
        )  # fmt: skip
        return result

    output, weights, lse = run(mask, softcap, **positions)
    mode = attributes.get("qk_matmul_output_mode", SCALED)
    if mode in (SCALED, CAPPED):
        _, scores, lse = run(None, softcap if mode == CAPPED else None)
    else:
        scores = weights
    if mode != WEIGHTS:
        scores = scores.log() + lse[..., None]  # weight = exp(score - lse)
    output = output if inputs["Q"].dim() == 4 else output.transpose(1, 2).flatten(2)
    return {name: t.to(query.dtype) for name, t in zip(OUTPUTS, (output, key, value, scores), strict=True)}


def by_name(names: tuple[str, ...], given: Any, values: list[Any]) -> dict[str, Any]:
    """A node lists its inputs and outputs in order, with "" for an absent one. `values` has only those present."""
    return dict(zip([name for name, present in zip(names, given, strict=False) if present], values, strict=True))


def attention_cases(tally: Tally | None = None) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(case, inputs, attributes, expected outputs) of each case with an Attention node."""
    for case in cases():
        if [node.op_type for node in case.model.graph.node] != ["Attention"]:
            if tally is not None:
                tally.skip(EXPANDED)
            continue
        (node,) = case.model.graph.node
        ((arrays, outputs),) = case.data_sets
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        yield case, by_name(INPUTS, node.input, arrays), attributes, by_name(OUTPUTS, node.output, outputs)


def onnx_tolerance(tally: Tally) -> None:
    for case, given, attributes, expected in attention_cases(tally):
        with tally.case(case.name):
            found = attention({name: to_torch(array) for name, array in given.items()}, attributes)
            arrays = [to_numpy(found[name], array) for name, array in expected.items()]
            Runner.assert_similar_outputs(list(expected.values()), arrays, case.rtol, case.atol)


def numerics_rule(tally: Tally) -> None:
    """Compares with onnx's reference in float64. The expected output, rounded after each step, replaces eager's."""
    for case, given, attributes, expected in attention_cases():
        with tally.case(case.name):
            found = attention({name: to_torch(array) for name, array in given.items()}, attributes)
            wide = {name: a.astype(np.float64) if a.dtype.kind not in "bi" else a for name, a in given.items()}
            rest = {name: a for name, a in attributes.items() if name != "softmax_precision"}
            results = _compute_attention(**wide, **rest, _validate_attention25=False)
            exact = dict(zip(OUTPUTS, results, strict=True))
            for name, array in expected.items():
                oracle = torch.from_numpy(np.asarray(exact[name], dtype=np.float64))
                tolerances.check(name, found[name], oracle, tolerances.error(to_torch(array), oracle))


CHECKS: dict[str, Callable[[Tally], None]] = {
    "within onnx's tolerance": onnx_tolerance,
    "numerics rule, against float64": numerics_rule,
}
