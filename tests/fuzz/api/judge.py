"""Whether a call did what it has to do: right numbers, or an error that names an argument."""

from __future__ import annotations

import functools
import inspect
import math
import re
import warnings
from types import CodeType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import scaledot
from agreement import check_agreement
from bad_arguments import FORM, LONGEST
from call_sources import Call
from fuzz.api import oracle, oracle_flash_attn, oracle_jagged
from fuzz.api.oracle import Values, query_of, seed
from score_functions import captured
from strategies import MODULE, SDPA, VARLEN
from tolerances import largest

REFUSALS = (ValueError, TypeError, RuntimeError)
NAMESPACE = {"math": math, "numpy": numpy, "torch": torch, "scaledot": scaledot}
ORACLES = {SDPA: oracle.sdpa, VARLEN: oracle.varlen, MODULE: oracle.module} | oracle_flash_attn.ORACLES
LARGEST = 50.0  # beyond it, float16 may overflow where the oracle does not
RANGE = (1e-4, 1e4)  # of the numbers for which the results are compared; also 0, and -1e9 for masked_score


@functools.lru_cache(10_000)
def compiled(source: str) -> CodeType:
    return compile(source, "<argument>", "eval")


def judge(call: Call) -> str:
    """ "refused", "right", "not compared" or "no call". Raises an AssertionError if the call did something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed(call.seed)
        try:
            values = {name: eval(compiled(source), dict(NAMESPACE)) for name, source in call.arguments}
        except Exception:  # such as the first row of a tensor without rows
            return "no call"
        try:
            function = eval(compiled(call.function), dict(NAMESPACE))
            names = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
            result = function(**values)
        except (*REFUSALS, IndexError) as error:
            if isinstance(error, IndexError) and not str(error).startswith("score_mod:"):
                raise
            constructor = re.findall(r"(\w+)=", call.function)
            check_refusal(error, [*values, *constructor, *names] if "names" in locals() else constructor)
            return "refused"
        check_form(values, result)
        if not comparable(values):
            return "not compared"
        try:
            compare(call, function, values)
        except RuntimeError as error:
            if "ZeroDivisionError" not in str(error):  # torch's, of integers in a score function
                raise
            return "not compared"
        return "right"


def check_refusal(error: BaseException, names: list[str]) -> None:
    line = str(error).partition("\n")[0]
    found = FORM.fullmatch(line)
    assert found, f"{type(error).__name__}, not of the form 'argument: got X; needs Y': {str(error)[:500]}"
    assert len(line) <= LONGEST, f"longer than {LONGEST} characters: {line}"
    assert found["name"] in names, f"names {found['name']}, which is no argument: {line}"


def check_form(values: Values, result: Any) -> None:
    """The shapes and dtypes of what an accepted call returned."""
    query = query_of(values)
    first, *others = result if isinstance(result, tuple) else (result,)
    assert first.dtype == query.dtype
    assert first.device == query.device
    assert first.dim() >= query.dim() - ("qkv" in values)
    for other in others:
        assert other is None or other.dtype in (query.dtype, torch.float32, torch.float64)


def comparable(values: Values) -> bool:
    """Whether float64 says what the numbers have to be: nothing is so large or small that it leaves the dtype."""

    def moderate(number: Any) -> bool:
        number = oracle.plain(number)
        if not isinstance(number, float):
            return True
        return number in (0.0, -1e9, -math.inf) or RANGE[0] <= abs(number) <= RANGE[1]

    given = [*values.values(), *captured(values.get("score_mod"), query_of(values).dtype).values()]
    tensors = [value for value in given if isinstance(value, Tensor) and value.dim() > 0]
    tensors = [t.values() if t.is_nested else t for t in tensors]
    if any(t.is_meta or t.dim() > 6 or (t.is_floating_point() and largest(t) > LARGEST) for t in tensors):
        return False
    numbers = [v for name, v in values.items() if name not in ("window", "window_size", "return_aux", "score_mod")]
    options = [number for number in numbers if not (isinstance(number, Tensor) and number.dim() > 0)]
    return all(map(moderate, options)) and query_of(values).dim() > 1


def compare(call: Call, function: Any, values: Values) -> None:
    """Results and gradients, and those of the gradients, by the numerics rule."""
    if len(values.get("cu_seq_q", values.get("cu_seqlens_q", values.get("cu_seqlens", (0, 0))))) < 2:
        return  # no sequence
    nested = query_of(values).is_nested
    if nested and not query_of(values).size(0):
        return
    make = oracle_jagged.jagged if nested else ORACLES[call.name]
    ours, theirs, leaves, twice = make(function, values)
    dtype = query_of(values).dtype
    terms = terms_of(leaves, values)
    cancels = functools.partial(has_one_key, theirs, leaves)
    check_agreement(ours, theirs, leaves, dtype, terms=terms, cancels=cancels)
    if call.second and twice and dtype in (torch.float32, torch.float64) and not cancels():
        gradients = oracle.first_gradients(ours), oracle.first_gradients(theirs)
        check_agreement(*gradients, leaves, dtype, terms=terms, of_gradients=True)


def terms_of(leaves: Values, values: Values) -> float:
    """A bound of the terms of a gradient, which may cancel: of dS = P * (dP - rowsum(P * dP)), times query or key."""
    sizes = {name: largest(t) for name, t in leaves.items()}
    of_values = next((t for t in map(leaves.get, ("value", "v", "kv", "qkv", "v_cache")) if t is not None), None)
    most, width = (1.0, query_of(values).shape[-1]) if of_values is None else (largest(of_values), of_values.shape[-1])
    slope = 8 + 8 * most * width
    dropped = float(oracle.plain(values.get("dropout_p", 0.0)))
    scale = oracle.plain(values.get("scale", values.get("softmax_scale")))
    return slope * max(1.0, abs(scale or 1.0)) * max(1.0, *sizes.values()) / (1.0 if dropped == 1 else 1 - dropped)


def has_one_key(theirs: Any, leaves: Values) -> bool:
    """Whether no row attends to more than one key."""
    most = 0
    real = oracle.reference.attention

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal most
        options = {name: value for name, value in options.items() if name not in ("dropout_p", "dropout_mask")}
        results = real(*arguments, **options)
        counts = (results[2] != 0).sum(-1)
        most = max(most, int(counts.max()) if counts.numel() else 0)
        return results

    oracle.reference.attention = counting
    try:
        with torch.no_grad():
            theirs(**leaves)
    finally:
        oracle.reference.attention = real
    return most < 2
