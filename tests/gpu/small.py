"""Every kernel on a few small ragged problems, for compute-sanitizer, which would take an hour for large ones."""

from __future__ import annotations

import os

import torch

import scaledot


def main(device: str = "cuda") -> None:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    shapes = (
        (4, 2, 70, 133, 40, 24),  # several tiles, grouped heads
        (2, 2, 37, 65, 136, 136),  # several panels
        (2, 1, 1, 1300, 64, 64),  # split keys
        (2, 2, 130, 200, 64, 64),  # aligned, as the Hopper kernels need it
        (2, 1, 70, 140, 128, 128),
        (2, 1, 70, 140, 192, 128),
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for heads, kv_heads, rows, keys, dim, value_dim in shapes:
            query, key = randn(2, heads, rows, dim, dtype=dtype), randn(2, kv_heads, keys, dim, dtype=dtype)
            value = randn(2, kv_heads, keys, value_dim, dtype=dtype)
            output = scaledot.scaled_dot_product_attention(query, key, value, enable_gqa=True, is_causal=rows > 100)
            torch.autograd.grad(output, [query, key, value], output)
            print(dtype, heads, kv_heads, rows, keys, dim, value_dim, flush=True)  # how far it came, if it is stopped
            for mask in (None, torch.rand(keys, generator=generator).to(device) > 0.3, randn(rows, keys), randn(keys)):
                output, weights, lse = scaledot.scaled_dot_product_attention(
                    query, key, value, mask, dropout_p=0.1, is_causal=True, causal_alignment="lower_right",
                    enable_gqa=True, softcap=5.0, return_weights=True, return_lse=True,
                )  # fmt: skip
                wanted = [query, key, value] + ([mask] if mask is not None and mask.requires_grad else [])
                torch.autograd.grad([output, weights, lse], wanted, [output, weights, lse])
    for dim, value_dim in ((128, 128), (192, 128), (256, 256)):  # the Hopper forward runs these in clusters
        shapes = ((256, dim), (200, dim), (200, value_dim))
        query, key, value = (randn(2, 2, *shape, dtype=torch.bfloat16) for shape in shapes)
        scaledot.scaled_dot_product_attention(query, key, value)
        print("clusters", dim, value_dim, flush=True)
    lengths = torch.tensor([0, 70, 71, 71, 130], dtype=torch.int32, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        for dim, value_dim in ((64, 64), (128, 128), (192, 128), (256, 256)):
            query, key, value = (randn(130, 2, width, dtype=dtype) for width in (dim, dim, value_dim))
            output = scaledot.varlen_attention(query, key, value, lengths, lengths, 70, 70, is_causal=True)
            torch.autograd.grad(output, [query, key, value], output)
            print(dtype, "packed", dim, value_dim, flush=True)
        key, value = (randn(6, 32, 2, 64, dtype=dtype).detach() for _ in range(2))
        table = torch.tensor([[3, 1, 5], [0, 0, 0], [2, 4, 0], [1, 2, 3]], dtype=torch.int32, device=device)
        used = torch.tensor([70, 1, 40, 96], dtype=torch.int32, device=device)
        query = randn(130, 4, 64, dtype=dtype).detach()
        options = {"is_causal": True, "enable_gqa": True, "seqused_k": used, "block_table": table}
        scaledot.varlen_attention(query, key, value, lengths, None, 70, 96, **options)
        key, value = ((10 * t).to(torch.int8) for t in (key, value))
        scaledot.varlen_attention(query, key, value, lengths, None, 70, 96, **options)
        print(dtype, "pages", flush=True)
    print("ran on", device)


if __name__ == "__main__":
    # torch then gets the memory of each tensor from CUDA, so that memcheck sees where a tensor ends.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    main()
