"""The lines of tests/data/cases.txt, which the C++ and the Python tests read: names, and fields of Case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "data" / "cases.txt"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _window(text: str) -> tuple[int | None, ...]:
    return tuple(int(part) if part else None for part in text.split(","))


def _reach(text: str) -> int:
    low, high = _integers(text)
    if low != -high:
        raise ValueError(f"relative_range: got {text}; needs a symmetric range")
    return high


READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("batch", "query_batch", "key_batch", "value_batch", "block_size"), _integers),
    **dict.fromkeys(("query_length", "key_length", "head_dim", "value_dim"), int),
    **dict.fromkeys(("kv_heads", "query_heads", "value_heads"), int),
    **dict.fromkeys(("mask", "mask_shape", "mask_dtype", "alibi", "relative", "blocks", "dtype"), str),
    **dict.fromkeys(("layout", "grad_layout"), str),
    **dict.fromkeys(("scale", "softcap", "dropout_p", "masked_score", "mask_offset", "spread"), float),
    **dict.fromkeys(("causal", "empty_rows", "return_weights", "negative", "enable_gqa"), lambda text: text != "no"),
    "heads": lambda text: None if text == "none" else int(text),
    "window": _window,
    "grads": lambda text: tuple(text.split(",")),
}


def _options(words: list[str]) -> dict[str, Any]:
    """The fields of Case that the words of a line set."""
    options: dict[str, Any] = {}
    for word in words:
        option, _, text = word.partition("=")
        if option == "lower_right":
            options["causal_alignment"] = "lower_right"
        elif option == "relative_range":
            options["relative_reach"] = _reach(text)
        elif option == "expanded_keys":
            options["key_layout"] = options["value_layout"] = f"expanded_{text}"
        else:
            options[option] = READERS[option](text)
    if "kv_heads" in options:
        options.setdefault("enable_gqa", options["kv_heads"] != options["heads"])
    return options


def lines_of(section: str) -> dict[str, dict[str, Any] | None]:
    """name -> fields of Case, for the lines of a section. None: only C++ reads the line."""
    text = PATH.read_text(encoding="utf-8").partition(f"\n[{section}]\n")[2].partition("\n[")[0]
    lines: list[list[str]] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if line.startswith(" "):
            lines[-1] += words
        elif words:
            lines.append(words)
    return {
        name: None if "@c++" in words else _options([word for word in words if word != "@python"])
        for name, *words in lines
    }
