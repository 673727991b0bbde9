"""Decoding with a paged key-value cache: varlen_attention(block_table=...) reads keys and values in their pages.

    python examples/paged_decode.py

Three sequences of different lengths share one pool of pages. A sequence takes a page only when its last one is full.
One sequence ends early, and a new one takes its slot and its pages. Every result is compared with that of the plain
function over contiguous keys and values of the same sequence. Random tensors stand in for a model.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import scaledot

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 16
PROMPTS = (50, 7, 120)  # tokens that each sequence starts with
NEXT_PROMPT = 30  # of the sequence that takes the slot of the one that ends


class PagedCache:
    """Keys and values of several sequences in one pool of pages.

    Token t of sequence b is row t % PAGE_SIZE of page block_table[b, t // PAGE_SIZE].
    """

    def __init__(self, sequences: int, pages: int) -> None:
        self.key, self.value = torch.empty(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.block_table = torch.full((sequences, pages), -1, dtype=torch.int32)  # -1: no page yet
        self.used = torch.zeros(sequences, dtype=torch.int32)  # tokens of each sequence
        self.free = list(reversed(range(pages)))  # the next page to take is the last

    def append(self, b: int, key: Tensor, value: Tensor) -> None:
        """Adds key and value (tokens, KV_HEADS, HEAD_DIM) to sequence b."""
        for k, v in zip(key, value, strict=True):
            index, row = divmod(int(self.used[b]), PAGE_SIZE)
            if row == 0:  # the last page is full
                if not self.free:
                    raise RuntimeError(f"sequence {b} needs a page; all {len(self.key)} are taken")
                self.block_table[b, index] = self.free.pop()
            page = int(self.block_table[b, index])
            self.key[page, row], self.value[page, row] = k, v
            self.used[b] += 1

    def release(self, b: int) -> None:
        """Ends sequence b: its pages are free again."""
        self.free += [page for page in self.block_table[b].tolist() if page >= 0]
        self.block_table[b], self.used[b] = -1, 0

    def attend(self, queries: list[Tensor]) -> list[Tensor]:
        """Attention of the newest tokens of every sequence: queries[b] (tokens, HEADS, HEAD_DIM), causal."""
        counts = [len(query) for query in queries]
        cu_seq_q = torch.tensor([0, *counts]).cumsum(0)  # where each sequence's queries end
        output = scaledot.varlen_attention(
            torch.cat(queries),
            self.key,
            self.value,
            cu_seq_q,
            None,
            max(counts),
            int(self.used.max()),
            is_causal=True,
            enable_gqa=True,
            seqused_k=self.used,
            block_table=self.block_table,
        )
        return list(output.split(counts))


class Reference:
    """Decodes with the plain function: contiguous keys and values, one call for each sequence."""

    def __init__(self, sequences: int) -> None:
        self.key = [torch.empty(0, KV_HEADS, HEAD_DIM) for _ in range(sequences)]
        self.value = [torch.empty(0, KV_HEADS, HEAD_DIM) for _ in range(sequences)]

    def append(self, b: int, key: Tensor, value: Tensor) -> None:
        self.key[b], self.value[b] = torch.cat([self.key[b], key]), torch.cat([self.value[b], value])

    def release(self, b: int) -> None:
        self.key[b], self.value[b] = self.key[b][:0], self.value[b][:0]

    def attend(self, queries: list[Tensor]) -> list[Tensor]:
        def heads_first(tensor: Tensor) -> Tensor:
            return tensor.transpose(0, 1)

        return [
            heads_first(
                scaledot.scaled_dot_product_attention(
                    *(heads_first(tensor) for tensor in (query, key, value)),
                    is_causal=True,
                    causal_alignment="lower_right",  # the last query is aligned with the last key
                    enable_gqa=True,
                )
            )
            for query, key, value in zip(queries, self.key, self.value, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding with a paged cache", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode; default %(default)s")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    cache, reference = PagedCache(len(PROMPTS), pages=32), Reference(len(PROMPTS))
    difference = 0.0

    def step(counts: list[int]) -> None:
        """Appends counts[b] new tokens to every sequence b, then attends from them to all tokens so far."""
        nonlocal difference
        queries = []
        for b, count in enumerate(counts):
            key, value = torch.randn(2, count, KV_HEADS, HEAD_DIM)
            cache.append(b, key, value)
            reference.append(b, key, value)
            queries.append(torch.randn(count, HEADS, HEAD_DIM))
        for found, expected in zip(cache.attend(queries), reference.attend(queries), strict=True):
            difference = max(difference, (found - expected).abs().max().item())

    def report(what: str) -> None:
        print(f"{what:28} lengths {cache.used.tolist()}, {len(cache.key) - len(cache.free)} of {len(cache.key)} pages")

    step(list(PROMPTS))
    report("after the prompts:")
    for k in range(arguments.steps):
        if k == arguments.steps // 2:
            cache.release(1)
            reference.release(1)
            step([1, NEXT_PROMPT, 1])  # a prompt and single tokens go in one call
            report("a new sequence in slot 1:")
        else:
            step([1, 1, 1])
    report(f"after {arguments.steps} steps:")
    print("block table:", [[page for page in row if page >= 0] for row in cache.block_table.tolist()])
    print(f"largest difference from the plain function: {difference:g}")


if __name__ == "__main__":
    main()
