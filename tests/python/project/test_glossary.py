"""docs/glossary.md: its names are in the source, and words that it replaced are gone."""

from __future__ import annotations

import re
from functools import cache

import pytest

from snippets import ROOT

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".cmake", ".md"}
# Former words, and the word of the glossary.
REPLACED = {
    r"few_rows": "decode",
    r"kv_index|batch_kv_head|next_pair": "kv_group",
    r"packed_heads|PackedHeads|PackedPanels": "panels",
    r"simd/pairs\.h|\bPairs\b": "Bf16Pair",
    r"kept_keys|kept_weights|KeepWeights|kept_row|[Kk]ept weights": "saved softmax",
    r"keep_remainder|WeightsAndRemainder|remainder_": "low part of the output",
    r"split_third|third result": "saved",
    r"\bbaseline\b": "default",
    r"\bkv heads?\b": "KV head",
    r"kept_bits": "keep mask",
    r"(?m)^ *// (?:What|Of|Nor|Likewise) .*$": "nothing, but a sentence begins with its subject or a verb",
}


@cache
def texts() -> dict[str, str]:
    paths = [path for folder in ("csrc", "docs") for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    made = {"_build", ".venv"}
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if not made.intersection(path.parts)}


@pytest.mark.parametrize("word", REPLACED)
def test_replaced_word_is_gone(word: str) -> None:
    places = [f"{path}: {found[0]}" for path, text in texts().items() for found in re.finditer(word, text)]
    assert not places, f"the glossary says {REPLACED[word]}"


def test_names_are_in_the_source() -> None:
    source = "\n".join(text for path, text in texts().items() if path.startswith("csrc"))
    names = {name for code in re.findall(r"`([^`]+)`", GLOSSARY) for name in re.findall(r"\w{3,}", code)}
    assert len(names) > 40
    assert not sorted(name for name in names if not re.search(rf"\b{name}\b", source))


def test_a_term_is_explained_once() -> None:
    terms = [term for row in re.findall(r"^\| ([^|]+) \|.*\|$", GLOSSARY, re.MULTILINE) for term in row.split(", ")]
    assert len(terms) > 80
    headings = {"term", "---"}
    assert not {term for term in terms if terms.count(term) > 1} - headings
