"""Proves that a change leaves every bit of every result as it was.

    python tests/bench/fingerprint.py --out before.json
    python tests/bench/fingerprint.py --against before.json

Runs every case of the case library, and some larger and packed ones, through each kernel that takes it: output, lse,
weights and all gradients. Each tensor becomes a SHA-256 of its dtype, shape and bytes; all NaNs are alike. `--against`
compares with an earlier file, lists the differences and exits with 1 if there are any.

The kernels are those of the installed scaledot, up to SCALEDOT_CPU_CAPABILITY. Results may differ between two machines.
"""

# ruff: noqa: C408, E402 - options read better as keywords; the folders of the case library are added first
from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "library")]

import scaledot
import varlen_cases
from case_list import CASES
from cases import Case

Tensors = dict[str, Tensor | None]
Hashes = dict[str, dict[str, str]]  # "case / kernel" -> tensor -> SHA-256
OPS = torch.ops.scaledot
RESULTS = ("output", "lse", "weights")

# Long enough for the parts of the CPU kernels that the library's small cases do not reach: keys in several chunks, and
# partial sums of the gradients.
LARGE: dict[str, dict[str, Any]] = {
    "long": dict(batch=(1,), heads=2, query_length=1100, key_length=1300, head_dim=64),
    "long_causal": dict(batch=(1,), heads=2, query_length=1500, key_length=1500, head_dim=128, causal=True),
    "long_mask": dict(batch=(1,), heads=2, query_length=700, key_length=900, head_dim=64, mask="inf", dropout_p=0.1),
    "many_heads": dict(batch=(8,), heads=12, query_length=70, key_length=130, head_dim=32, return_weights=True),
    "long_keys": dict(batch=(1,), heads=1, query_length=600, key_length=9000, head_dim=64, grads=("output",)),
    "gqa": dict(batch=(1,), heads=8, kv_heads=2, enable_gqa=True, query_length=400, key_length=800, head_dim=96),
    "decode": dict(batch=(2,), heads=8, kv_heads=2, enable_gqa=True, query_length=1, key_length=5000, head_dim=128),
}
VARLEN_LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "": ((37, 5, 70, 1), (53, 90, 70, 33)),
    "decode": ((1, 2, 1, 4), (700, 64, 1500, 90)),
    "empty": ((0, 5, 7, 0, 9), (4, 0, 8, 0, 11)),
}


def sha256(tensor: Tensor) -> str:
    tensor = tensor.detach().contiguous()
    tensor = tensor.masked_fill(tensor.isnan(), float("nan"))  # which bits a NaN has depends on the compiler's choices
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def gradients(results: Tensors, cotangents: Tensors, inputs: Tensors) -> Tensors:
    leaves = {name: t for name, t in inputs.items() if t is not None and t.requires_grad}
    pairs = [(r, cotangents[n]) for n, r in results.items() if r is not None and cotangents.get(n) is not None]
    pairs = [(r, g) for r, g in pairs if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], [*leaves.values()], [g for _, g in pairs], allow_unused=True)
    return {f"grad_{name}": grad for name, grad in zip(leaves, found, strict=True)}


def run_case(case: Case, **options: Any) -> Tensors:
    inputs = case.make().requiring_grad().tensors()
    arguments = {**inputs, **case.options(), "return_weights": case.return_weights, **options}
    results: Tensors = dict(zip(RESULTS, OPS.sdpa(**arguments), strict=True))
    cotangents: Tensors = dict(vars(case.cotangents()))
    if options.get("average_weights") and cotangents["weights"] is not None and case.heads is not None:
        cotangents["weights"] = cotangents["weights"].mean(-3)
    return {**results, **gradients(results, cotangents, inputs)}


def runs_in(case: Case) -> list[str]:
    """The kernels that run a pass of the case when they are forced."""
    arguments = {**case.make().requiring_grad().tensors(), **case.options(), "return_weights": case.return_weights}
    names = []
    for name in scaledot._load.kernel_names():
        scaledot._load.force_kernel(name)
        plan = json.loads(OPS.explain(**arguments))
        if name in (plan["forward"]["kernel"], plan["backward"]["kernel"]):
            names.append(name)
    return names


def library_results() -> Iterator[tuple[str, Tensors]]:
    for case in CASES:
        for kernel in runs_in(case):
            scaledot._load.force_kernel(kernel)
            yield f"{case.name} / {kernel}", run_case(case)
            if case.return_weights and case.heads is not None:
                yield f"{case.name}, averaged weights / {kernel}", run_case(case, average_weights=True)


def large_results() -> Iterator[tuple[str, Tensors]]:
    for name, fields in LARGE.items():
        for dtype in ("float32", "bfloat16", "float16"):
            case = Case(f"large {name}", dtype=dtype, **fields)
            for kernel in runs_in(case):
                scaledot._load.force_kernel(kernel)
                yield f"{case.name} {dtype} / {kernel}", run_case(case)


def run_packed(name: str, common: dict[str, Any], lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensors:
    problem = varlen_cases.Packed(name, *lengths, common)
    call = varlen_cases.call(problem)
    results = call.run()
    found: Tensors = {"output": results[0], "lse": results[1]}
    for b, grads in enumerate(call.gradients(results)):
        found.update({f"grad_{of} of sequence {b}": grad for of, grad in grads.items()})
    return found


def packed_results() -> Iterator[tuple[str, Tensors]]:
    for feature, fields in varlen_cases.FEATURES.items():
        for which, lengths in VARLEN_LENGTHS.items():
            for dtype in ("float32", "bfloat16", "float16", "float64"):
                name = f"varlen {feature} {which} {dtype}"
                for kernel in scaledot._load.kernel_names():
                    scaledot._load.force_kernel(kernel)
                    yield f"{name} / {kernel}", run_packed(name, {**fields, "dtype": dtype}, lengths)


def mask_results() -> Iterator[tuple[str, Tensors]]:
    """What no kernel of the table computes: the masks by position, and those of dropout."""
    scaledot._load.force_kernel(None)
    for case in CASES:
        inputs = case.make()
        heads = 1 if case.heads is None else case.heads
        attends, bias = OPS.sdpa_mask(
            query=inputs.query, key=inputs.key, alibi_slopes=inputs.alibi_slopes, **case.position_options()
        )
        found: Tensors = {"attends": attends, "bias": bias}
        if inputs.dropout_seed is not None:
            found["keep"] = OPS.dropout_mask(
                seed=inputs.dropout_seed,
                batch=2,
                heads=heads,
                query_length=case.query_length,
                key_length=case.key_length,
                dropout_p=case.dropout_p,
            )
        yield f"{case.name} / masks", found


def fingerprint() -> Hashes:
    hashes: Hashes = {}
    shown = time.monotonic()
    for source in (library_results, large_results, packed_results, mask_results):
        for name, tensors in source():
            hashes[name] = {what: sha256(t) for what, t in tensors.items() if t is not None}
            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                print(f"{len(hashes)} done, now {name}", file=sys.stderr, flush=True)
    scaledot._load.force_kernel(None)
    return hashes


def differences(before: Hashes, now: Hashes) -> list[str]:
    """One line for each case and kernel that differs."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            lines.append(f"{name}: was in the earlier file only")
        elif name not in before:
            lines.append(f"{name}: was not in the earlier file")
        elif changed := sorted(
            what for what in before[name].keys() | now[name].keys() if before[name].get(what) != now[name].get(what)
        ):
            lines.append(f"{name}: {', '.join(changed)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="write the hashes to this file")
    parser.add_argument("--against", type=Path, help="compare with the hashes of this file")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.against is None:
        parser.error("give --out, --against or both")

    start = time.monotonic()
    hashes = fingerprint()
    kernels = scaledot._load.kernel_names()
    print(f"{len(hashes)} runs of {', '.join(kernels)} in {time.monotonic() - start:.0f} s")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"kernels": kernels, "hashes": hashes}, indent=0) + "\n")
    if arguments.against is None:
        return 0
    lines = differences(json.loads(arguments.against.read_text())["hashes"], hashes)
    print("\n".join(lines) if lines else "no bit differs")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
