"""Peak memory of forward and backward: 16384 positions, 4 heads, width 64, causal, dropout 0.1, float32, no weights.

    python tests/bench/memory.py [--length 16384] [--heads 4] [--dim 64] [--peer]

Each side runs in its own process. It calls the op once on a small input before the baseline is read, so libraries and
thread pools are not counted. Everything above that baseline is counted, with the inputs and the gradients.
The bound: 1.2 x (inputs + outputs + gradients) + 64 MiB. This prints and is not a test. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

DROPOUT_P = 0.1


def attention_of(side: str) -> Callable[..., Tensor]:
    if side == "torch":
        return F.scaled_dot_product_attention
    import scaledot

    return scaledot.scaled_dot_product_attention


def memory(field: str) -> int:
    """Bytes: VmRSS, the resident size now; VmHWM, its maximum so far."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def forward_backward(attention: Callable[..., Tensor], heads: int, length: int, dim: int) -> None:
    query, key, value = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))
    output = attention(query, key, value, dropout_p=DROPOUT_P, is_causal=True)
    output.backward(torch.randn_like(output))


def measure(side: str, heads: int, length: int, dim: int) -> None:
    """Run in the separate process: prints the bytes above the baseline."""
    attention = attention_of(side)
    forward_backward(attention, 1, 256, dim)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident
    baseline = memory("VmRSS")
    forward_backward(attention, heads, length, dim)
    print(memory("VmHWM") - baseline)


def peak(side: str, arguments: argparse.Namespace) -> int:
    sizes = [str(n) for n in (arguments.heads, arguments.length, arguments.dim)]
    command = [
        sys.executable,
        __file__,
        "--measure",
        side,
        "--heads",
        sizes[0],
        "--length",
        sizes[1],
        "--dim",
        sizes[2],
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["killed: not enough memory?"])[-1]
        raise SystemExit(f"{side}: {last}")
    return int(run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--peer", action="store_true", help="F.sdpa too; it needs several matrices of heads x length x length"
    )
    parser.add_argument("--measure", choices=("scaledot", "torch"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    heads, length, dim = arguments.heads, arguments.length, arguments.dim
    if arguments.measure:
        measure(arguments.measure, heads, length, dim)
        return

    mib = 1 << 20
    one = 4 * heads * length * dim  # bytes of query; all eight tensors are of this size
    lse = 4 * heads * length
    # Inputs: query, key, value. Outputs: output, lse. Gradients: of the output and of the three inputs.
    tensors = 8 * one + lse
    bound = 1.2 * tensors + 64 * mib
    print(f"forward + backward, {heads} heads, {length} positions, width {dim}, causal, dropout {DROPOUT_P}, float32")
    print(f"inputs, outputs, gradients   {tensors / mib:9.1f} MiB")
    print(f"bound: 1.2 x + 64 MiB        {bound / mib:9.1f} MiB")
    ours = peak("scaledot", arguments)
    print(f"scaledot, peak               {ours / mib:9.1f} MiB   {'within' if ours <= bound else 'OVER'} the bound")
    scores = 4 * heads * length * length
    if arguments.peer:
        print(f"F.sdpa, peak                 {peak('torch', arguments) / mib:9.1f} MiB")
    else:
        print(f"F.sdpa keeps matrices of     {scores / mib:9.1f} MiB   each (--peer measures it)")


if __name__ == "__main__":
    main()
