"""The options of the attention functions: declared once, the same in signatures, ops, oracle and case library."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
import scaledot
from cases import Case
from scaledot import explain, explain_varlen, options, scaled_dot_product_attention, varlen_attention

PACKAGE = Path(scaledot.__file__).parent
OPS = torch.ops.scaledot
SDPA = [
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "causal_alignment", "window",
    "softcap", "alibi_slopes", "relative_bias", "masked_score", "block_mask", "score_mod", "key_indices", "out",
    "return_weights", "return_lse",
]  # fmt: skip


def defaults(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


def schema(op: Any) -> dict[str, Any]:
    return {a.name: a.default_value if a.has_default_value() else inspect.Parameter.empty for a in op._schema.arguments}


def as_op_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """A function's arguments by the names that its op gives them."""
    found = dict(arguments)
    found["window_left"] = found["window_right"] = found.pop("window")
    if found.get("masked_score") == -math.inf:
        found["masked_score"] = None
    if "block_mask" in found:
        found["blocks"] = found["block_bits"] = found["block_shape"] = found.pop("block_mask")
    if "score_mod" in found:
        found["score_program"] = found["score_numbers"] = found["score_integers"] = found.pop("score_mod")
    # For the Python side alone, or for ops of their own.
    for name in ("return_lse", "return_aux", "window_size", "out"):
        found.pop(name, None)
    return found


def functions() -> dict[str, Any]:
    from scaledot.distributed import context_parallel_attention

    every = [scaled_dot_product_attention, explain, varlen_attention, explain_varlen, context_parallel_attention]
    return {function.__name__: function for function in every}


def test_signature() -> None:
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    assert list(parameters) == SDPA
    positional = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == SDPA[:8]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in SDPA[8:])
    assert parameters["softcap"].annotation == float | None
    assert parameters["masked_score"].default == -math.inf
    assert inspect.signature(explain).parameters == parameters
    assert inspect.signature(explain_varlen).parameters == inspect.signature(varlen_attention).parameters


@pytest.mark.parametrize("name", functions())
def test_every_signature_lists_every_option(name: str) -> None:
    function = functions()[name]
    parameters = inspect.signature(function).parameters
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    declared = {"context_parallel_attention": options.SHARED, "varlen_attention": options.VARLEN}
    for option, default in declared.get(
        name.replace("explain_varlen", "varlen_attention"), options.SDPA
    ).defaults.items():
        assert parameters[option].default == default
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY


def documented(function: Any) -> set[str]:
    """The arguments with a line in the docstring."""
    text = (inspect.getdoc(function) or "").split("Args:")[1].split("Returns:")[0]
    return {name.strip() for line in text.splitlines() if ":" in line for name in line.split(":")[0].split(",")}


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "varlen_attention", "context_parallel_attention"])
def test_every_argument_is_documented(name: str) -> None:
    function = functions()[name]
    known = documented(function)
    if name != "scaled_dot_product_attention":
        assert "any further option" in (function.__doc__ or "")  # as there
        known |= documented(scaled_dot_product_attention) & options.SHARED.defaults.keys()
    assert set(inspect.signature(function).parameters) <= known


def test_the_op_takes_the_options_with_the_same_defaults() -> None:
    ours, op = as_op_arguments(defaults(scaled_dot_product_attention)), schema(OPS.sdpa.default)
    internal = {"part"}
    assert op.keys() - ours.keys() == {"dropout_seed", "average_weights", "output_strides", *internal}
    assert {name: op[name] for name in ours} == ours
    assert schema(OPS.explain.default) == op | {"out": None}
    own = op.keys() - {"average_weights", "output_strides"}
    assert schema(OPS.sdpa_out.default) == {"out": inspect.Parameter.empty} | {name: op[name] for name in own}
    ours, op = as_op_arguments(defaults(varlen_attention)), schema(OPS.varlen.default)
    assert op.keys() - ours.keys() == {"dropout_seed"}
    assert {name: op[name] for name in ours if op[name] is not inspect.Parameter.empty} == {
        name: default for name, default in ours.items() if op[name] is not inspect.Parameter.empty
    }
    assert schema(OPS.explain_varlen.default) == op | {"out": None}
    assert schema(OPS.varlen_out.default) == {"out": inspect.Parameter.empty} | op


def test_the_backward_takes_the_options_of_the_forward() -> None:
    results = {"output", "lse", "weights", "saved", "saved_keys"}
    for forward, backward in ((OPS.sdpa, OPS.sdpa_backward), (OPS.varlen, OPS.varlen_backward)):
        own = schema(backward.default).keys() - results - {f"grad_{name}" for name in results} - {"output_mask"}
        assert own == schema(forward.default).keys() - {"return_weights", "average_weights", "output_strides"}


def test_the_oracle_and_the_case_library_take_them_all() -> None:
    ours = defaults(scaled_dot_product_attention)
    # test_score_mod and test_key_indices have formulas of their own; test_out compares bits
    del ours["score_mod"], ours["key_indices"], ours["out"]
    oracle = defaults(reference.attention)
    assert {name: oracle.get(name, "missing") for name in ours if not name.startswith("return_")} == {
        name: default for name, default in ours.items() if not name.startswith("return_")
    }
    tensors = {"query", "key", "value", "attn_mask", "alibi_slopes", "relative_bias", "block_mask"}
    assert Case("options").functional_arguments().keys() | tensors == ours.keys() - {"return_lse"}


@pytest.mark.parametrize("name", functions())
def test_an_unknown_keyword(name: str) -> None:
    with pytest.raises(TypeError) as raised:
        functions()[name](softcup=2.0)
    assert str(raised.value) == f"{name}() got an unexpected keyword argument 'softcup': use softcap"


def test_options_at_their_default_are_not_passed_on() -> None:
    given = options.op_arguments("f", {**options.SDPA.defaults, "softcap": 2.0, "window": (1, None)}, options.SDPA)
    assert given == {"softcap": 2.0, "window_left": 1, "window_right": None}
    assert options.op_arguments("f", {"masked_score": float("-inf"), "window": None}, options.SDPA) == {}
    lower = {"causal_alignment": "lower_right"}
    assert options.op_arguments("f", lower, options.SDPA) == lower
    assert options.op_arguments("f", lower, options.VARLEN) == {}


# ------------------------------------------------------------------------------------------------ modules
def imports_of(path: Path) -> Iterator[str]:
    """The modules of this package that a module imports, also inside its functions, as 'distributed.ring'."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names = [name for name in (node.module or "").split(".") if name]
            if node.level == 0:
                if names[:1] != ["scaledot"]:
                    continue
                names = names[1:]
            start = ".".join((*base, *names))
            for alias in node.names:  # a module, or a name of one
                inner = ".".join(filter(None, (start, alias.name)))
                yield inner if module(inner) else start


def module(name: str) -> Path | None:
    path = PACKAGE.joinpath(*name.split("."))
    found = [p for p in (path.with_suffix(".py"), path / "__init__.py") if name and p.is_file()]
    return found[0] if found else None


def test_no_module_imports_one_that_imports_it_back() -> None:
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if name:  # the package itself imports all
            above = {".".join(name.split(".")[:k]) for k in range(len(name.split(".")) + 1)}
            graph[name] = set(imports_of(path)) - above
    assert "options" in graph["functional"]
    assert "_seed" in graph["distributed.attention"]
    for start in graph:
        seen, ahead = set(), [start]
        while ahead:
            for following in graph.get(ahead.pop(), ()):
                assert following != start, f"{start} imports a module that imports it back"
                if following not in seen:
                    seen.add(following)
                    # A module's package is imported with it.
                    ahead += [following, *(p for p in [following.rpartition(".")[0]] if p and not start.startswith(p))]


def test_the_package_shows_its_public_names() -> None:
    shown = {name for name in dir(scaledot) if not name.startswith("_")}
    assert shown == {*scaledot.__all__, "distributed"} - {"__version__"}
