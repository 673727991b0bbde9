"""The throughput of transformers' generate_batch: scaledot against "sdpa", on a small Llama with random weights.

    python tests/bench/continuous_batching.py [--dtype float32] [--new 16] [--step 2048] [--requests 16] [--rounds 2]

The prompts have 512 to 2,048 tokens. The two sides run in turn, on one thread; a time is the median of the rounds. It
also prints how many requests got the same tokens from both. It needs transformers 5.24 or newer.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from typing import Any

import torch
import transformers

from scaledot.dropin import transformers as dropin

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
SIDES = ("scaledot", "sdpa")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new", type=int, default=16, help="tokens to generate for each request")
    parser.add_argument("--step", type=int, default=2048, help="tokens of a step, at most")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    dropin.register()
    config = transformers.LlamaConfig(**SIZES)
    model: Any = transformers.LlamaForCausalLM(config).to(getattr(torch, given.dtype)).eval()
    lengths = torch.linspace(512, 2048, given.requests).int().tolist()
    prompts = [[random.randrange(3, 1000) for _ in range(length)] for length in lengths]
    settings = transformers.ContinuousBatchingConfig(
        page_size=32, max_batch_tokens=given.step, num_blocks=None, max_memory_percent=0.1
    )
    options = transformers.GenerationConfig(
        max_new_tokens=given.new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def tokens_of(side: str) -> list[list[int]]:
        model.set_attn_implementation(side)
        results = model.generate_batch(prompts, options, continuous_batching_config=settings, progress_bar=False)
        return [results[key].generated_tokens for key in sorted(results, key=lambda key: int(key.split("_")[-1]))]

    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(given.rounds):
        for side in SIDES:
            start = time.perf_counter()
            tokens[side] = tokens_of(side)
            seconds[side].append(time.perf_counter() - start)
    ours, theirs = (statistics.median(seconds[side]) for side in SIDES)
    same = sum(a == b for a, b in zip(*tokens.values(), strict=True))
    print(f"{given.dtype}: scaledot {ours:.2f} s, sdpa {theirs:.2f} s, {theirs / ours:.2f} times the throughput")
    print(f"{same} of {given.requests} requests have the same tokens")


if __name__ == "__main__":
    main()
