"""Whether a call did what it has to do: right numbers, or an error that names an argument."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import scaledot
from agreement import check_agreement
from bad_arguments import FORM, LONGEST
from fuzz.api import oracle
from fuzz.api.oracle import Values
from strategies import MODULE, VARLEN, Call
from tolerances import largest

REFUSALS = (ValueError, TypeError, RuntimeError)
NAMESPACE = {"math": math, "numpy": numpy, "torch": torch, "scaledot": scaledot}
LARGEST = 50.0  # beyond it, float16 may overflow where the oracle does not
RANGE = (1e-4, 1e4)  # of the numbers for which the results are compared; also 0, and -1e9 for masked_score


def judge(call: Call) -> str:
    """ "refused", "right", "not compared" or "no call". Raises an AssertionError if the call did something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(call.seed)
        try:
            values = {name: eval(source, dict(NAMESPACE)) for name, source in call.arguments}
        except Exception:  # such as the first row of a tensor without rows
            return "no call"
        try:
            function = eval(call.function, dict(NAMESPACE))
            names = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
            result = function(**values)
        except REFUSALS as error:
            constructor = re.findall(r"(\w+)=", call.function)
            check_refusal(error, [*values, *constructor, *names] if "names" in locals() else constructor)
            return "refused"
        check_form(values, result)
        if not comparable(values):
            return "not compared"
        compare(call, function, values)
        return "right"


def check_refusal(error: BaseException, names: list[str]) -> None:
    line = str(error).partition("\n")[0]
    found = FORM.fullmatch(line)
    assert found, f"{type(error).__name__}, not of the form 'argument: got X; needs Y': {str(error)[:500]}"
    assert len(line) <= LONGEST, f"longer than {LONGEST} characters: {line}"
    assert found["name"] in names, f"names {found['name']}, which is no argument: {line}"


def check_form(values: Values, result: Any) -> None:
    """The shapes and dtypes of what an accepted call returned."""
    query = values["query"]
    first, *others = result if isinstance(result, tuple) else (result,)
    assert first.dtype == query.dtype
    assert first.device == query.device
    assert first.dim() >= query.dim()
    for other in others:
        assert other is None or other.dtype in (query.dtype, torch.float32, torch.float64)


def comparable(values: Values) -> bool:
    """Whether float64 says what the numbers have to be: nothing is so large or small that it leaves the dtype."""

    def moderate(number: Any) -> bool:
        number = oracle.plain(number)
        if not isinstance(number, float):
            return True
        return number in (0.0, -1e9, -math.inf) or RANGE[0] <= abs(number) <= RANGE[1]

    tensors = [value for value in values.values() if isinstance(value, Tensor) and value.dim() > 0]
    if any(t.is_meta or t.dim() > 6 or (t.is_floating_point() and largest(t) > LARGEST) for t in tensors):
        return False
    numbers = [value for name, value in values.items() if name not in ("window", "window_size", "return_aux")]
    options = [number for number in numbers if not (isinstance(number, Tensor) and number.dim() > 0)]
    return all(map(moderate, options)) and values["query"].dim() > 1


def compare(call: Call, function: Any, values: Values) -> None:
    """Results and gradients, and those of the gradients, by the numerics rule."""
    kind = call.function.partition("(")[0]
    if kind == VARLEN and values["cu_seq_q"].numel() < 2:
        return
    make: Any = oracle.module if kind == MODULE else oracle.varlen if kind == VARLEN else oracle.sdpa
    ours, theirs, leaves = make(function, values)
    dtype = values["query"].dtype
    terms = terms_of(leaves, values)
    agree(ours, theirs, leaves, dtype, lambda: {"terms": terms, "cancels": live_keys(theirs, leaves) < 2})
    forward_only = kind == VARLEN and oracle.is_forward_only(values)
    if not call.second or dtype not in (torch.float32, torch.float64) or forward_only or kind == MODULE:
        return
    if live_keys(theirs, leaves) > 1:
        gradients = oracle.first_gradients(ours), oracle.first_gradients(theirs)
        agree(*gradients, leaves, dtype, lambda: {"terms": terms, "of_gradients": True})


def agree(ours: Any, theirs: Any, leaves: Values, dtype: torch.dtype, rule: Callable[[], dict[str, Any]]) -> None:
    """check_agreement. One draw makes the rule strictest, so a call that passes with one needs no more."""
    try:
        check_agreement(ours, theirs, leaves, dtype, draws=1)
    except AssertionError:
        check_agreement(ours, theirs, leaves, dtype, **rule())


def terms_of(leaves: Values, values: Values) -> float:
    """A bound of the terms of a gradient, which may cancel: of dS = P * (dP - rowsum(P * dP)), times query or key."""
    sizes = {name: largest(t) for name, t in leaves.items()}
    width = values["query" if values.get("value") is None else "value"].shape[-1]
    slope = 8 + 8 * sizes.get("value", 1.0) * width
    dropped = float(oracle.plain(values.get("dropout_p", 0.0)))
    scale = oracle.plain(values.get("scale"))
    return slope * max(1.0, abs(scale or 1.0)) * max(1.0, *sizes.values()) / (1.0 if dropped == 1 else 1 - dropped)


def live_keys(theirs: Any, leaves: Values) -> int:
    """The most keys that any row attends to."""
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
    return most
