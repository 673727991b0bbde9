"""The calls of the smoke test, and what they should give.

A probe calls the public API on a device, and compares all results and gradients with tests/library/reference.py, in
float64 on the same device. The limits are wide: they find a wrong kernel, not a wrong rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import reference
import scaledot
from gpu.pattern import compared
from gpu.probes import Probe
from scaledot._seed import draw_seed

Facts = dict[str, Any]
Tell = Callable[..., None]
Tensors = dict[str, Tensor]

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-11}
BATCH, HEADS, KV_HEADS = 2, 4, 2
LENGTHS = ((70, 0, 1, 133, 64), (210, 40, 64, 300, 1))  # rows and keys of packed sequences
DECODE = ((1, 0, 4, 2, 1), (1500, 40, 64, 1030, 1))  # and of those that decode
PAGE = 16  # rows
CACHES = {"float8_e4m3fn": 2.0, "int8": 40.0}  # and the standard deviation of the stored numbers
SEED = 5

# A test replaces these by functions that are wrong.
dense_attention: Callable[..., Any] = scaledot.scaled_dot_product_attention
packed_attention: Callable[..., Any] = scaledot.varlen_attention


@dataclass
class Call:
    """A call and its reference. All tensors of `leaves` have gradients if the probe has a backward."""

    leaves: Tensors
    ours: Callable[[], tuple[Tensor, ...]]  # output, lse or output, weights, lse
    explain: Callable[[], Any]
    reference: Callable[[Tensors], tuple[Tensor, ...]]  # of the leaves in float64
    first_rows: dict[str, Tensor] = field(default_factory=dict)  # of query, key: see pattern.compared


class Draws:
    """Normally distributed tensors of a probe, always the same."""

    def __init__(self, probe: Probe, device: str) -> None:
        self.probe, self.device = probe, device
        self.generator = torch.Generator(device).manual_seed(SEED)

    def __call__(self, *shape: int) -> Tensor:
        """An unaligned one has rows that are an odd number of elements apart."""
        odd = 0 if self.probe.aligned else 1 + shape[-1] % 2
        made = torch.randn((*shape[:-1], shape[-1] + odd), generator=self.generator, device=self.device)
        return made.to(self.probe.dtype)[..., : shape[-1]].detach()

    def stored(self, *shape: int) -> Tensor:
        """Of the numbers of a cache."""
        dtype = getattr(torch, self.probe.cache)
        numbers = torch.randn(shape, generator=self.generator, device=self.device)
        if dtype == self.probe.dtype:
            return numbers.to(dtype)
        numbers = numbers * CACHES[self.probe.cache]
        return (numbers if dtype.is_floating_point else numbers.round().clamp(-128, 127)).to(dtype)


def dense(probe: Probe, device: str) -> Call:
    randn, options = Draws(probe, device), dict(probe.options)
    leaves = {
        "query": randn(BATCH, HEADS, probe.rows, probe.dims[0]),
        "key": randn(BATCH, KV_HEADS, probe.keys, probe.dims[0]),
        "value": randn(BATCH, KV_HEADS, probe.keys, probe.dims[1]),
    }
    exact: Facts = {}
    fixed: Facts = {}  # tensors without a gradient
    if probe.mask == "float":
        leaves["attn_mask"] = randn(BATCH, HEADS, probe.rows, probe.keys)
    if probe.mask == "nan":
        fixed["attn_mask"] = torch.arange(probe.keys, device=device) % 5 != 2  # which keys are shown
    if options.pop("relative_bias", False):
        leaves["relative_bias"] = randn(HEADS, 2 * 20 + 1)
    if probe.blocks:
        shown = torch.rand(probe.rows, probe.keys, generator=randn.generator, device=device) < 0.7
        shown[:64, 64:192] = False
        shown[64:128, :64] = True
        fixed["block_mask"] = scaledot.BlockMask.from_dense(shown, 64)
    if probe.options.get("dropout_p"):
        torch.manual_seed(SEED)
        seed = draw_seed(leaves["query"]).cpu()  # of the call too: the generator's state is set again before it
        keep = reference.philox_keep_mask(seed, BATCH, HEADS, probe.rows, probe.keys, options["dropout_p"])
        exact["dropout_mask"] = keep.to(device)
    wants_weights = bool(options.get("return_weights"))

    def ours() -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        given = {**leaves, **fixed, **options}
        if probe.mask == "nan":
            hidden = ~fixed["attn_mask"][:, None]
            given |= {name: torch.where(hidden, torch.nan, leaves[name]) for name in ("key", "value")}
        results: tuple[Tensor, ...] = dense_attention(**given, enable_gqa=True, return_lse=True)
        return results

    def in_float64(tensors: Tensors) -> tuple[Tensor, ...]:
        asked = {name: value for name, value in options.items() if name != "return_weights"}
        output, lse, weights = reference.attention(**tensors, **fixed, **asked, **exact, enable_gqa=True)
        return (output, weights, lse) if wants_weights else (output, lse)

    def explain() -> Any:
        return scaledot.explain(**leaves, **fixed, **options, enable_gqa=True)

    return Call(leaves, ours, explain, in_float64)


def packed(probe: Probe, device: str) -> Call:
    rows, all_keys = DECODE if probe.decodes else LENGTHS
    randn, batch = Draws(probe, device), len(rows)
    lengths = {"query": rows, "key": all_keys}
    starts = {name: torch.tensor([0, *each]).cumsum(0).int().to(device) for name, each in lengths.items()}
    leaves = {"query": randn(sum(rows), HEADS, probe.dims[0])}
    arguments: Facts = {
        "cu_seq_q": starts["query"],
        "cu_seq_k": starts["key"],
        "max_q": max(rows),
        "max_k": max(all_keys),
    }
    scales: Tensors = {}
    keys: list[Tensors] = []  # of each sequence, if they have no gradient
    if probe.cache:
        counts = [-(-n // PAGE) for n in all_keys]
        table = torch.zeros(batch, max(counts), dtype=torch.int32)
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(SEED))
        for b, count in enumerate(counts):
            table[b, :count] = order[sum(counts[:b]) : sum(counts[: b + 1])]
        key, value = (randn.stored(sum(counts), PAGE, KV_HEADS, dim) for dim in probe.dims)
        pools = {"key": key, "value": value}
        if probe.cache in CACHES:
            scales = {name: torch.rand(batch, KV_HEADS, device=device) / CACHES[probe.cache] for name in pools}
        used = torch.tensor(all_keys, dtype=torch.int32, device=device)
        arguments |= pools | {"cu_seq_k": None, "seqused_k": used, "block_table": table.to(device)}
        arguments |= {f"{name[0]}_scale": scale for name, scale in scales.items()}
        for b, (n, count) in enumerate(zip(all_keys, counts, strict=True)):
            pages = table[b, :count].to(device).long()
            for pool in pools.values():  # rows after the last key are not to be read as numbers
                pool.view(torch.uint8)[pages[-1], (n - 1) % PAGE + 1 :] = 255
            own = {name: pool.view(torch.uint8)[pages].view(pool.dtype) for name, pool in pools.items()}
            keys.append({name: tensor.flatten(0, 1)[:n] for name, tensor in own.items()})
    else:
        leaves["key"], leaves["value"] = (randn(sum(all_keys), KV_HEADS, dim) for dim in probe.dims)

    def ours() -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = packed_attention(
            **leaves, **arguments, **probe.options, enable_gqa=True, return_lse=True
        )
        return results

    def in_float64(tensors: Tensors) -> tuple[Tensor, ...]:
        outputs, lses = [], []
        query = tensors["query"].split(rows)
        for b in range(batch):
            own = keys[b] if keys else {name: tensors[name].split(all_keys)[b] for name in ("key", "value")}
            heads = {name: tensor.transpose(0, 1) for name, tensor in {"query": query[b], **own}.items()}
            scale = {f"{name[0]}_scale": scale[b] for name, scale in scales.items()}
            output, lse, _ = reference.attention(
                **heads, **scale, **probe.options, enable_gqa=True, causal_alignment="lower_right"
            )
            outputs.append(output.transpose(0, 1))
            lses.append(lse)
        return torch.cat(outputs), torch.cat(lses, 1)

    def explain() -> Any:
        return scaledot.explain_varlen(**leaves, **arguments, **probe.options, enable_gqa=True)

    first_rows = {name: own[:-1].long().repeat_interleave(own.diff().long()) for name, own in starts.items()}
    return Call(leaves, ours, explain, in_float64, first_rows)


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """What a call allocates is full of NaN, so that an element that no kernel writes shows. As
    torch.use_deterministic_algorithms, which would import inductor."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


def kernel_names(plan: Any) -> dict[str, str]:
    """By direction, the kernel that explain() or explain_varlen() names."""
    found = {}
    for direction in ("forward", "backward"):
        choice = getattr(plan, direction)
        if choice is not None:
            found[direction] = str((choice.kernels[0] if hasattr(choice, "kernels") else choice).kernel)
    return found


def run(probe: Probe, device: str, tell: Tell) -> Facts:
    """Runs the probe, and says where it is and what it found: "stage", "family", a fact for each result. Its result is
    "right" or "wrong"."""
    call = packed(probe, device) if not probe.rows else dense(probe, device)
    is_packed, backward = not probe.rows, probe.backward and not probe.cache

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    exact = {name: tensor.double().requires_grad_(backward) for name, tensor in call.leaves.items()}
    wanted = call.reference(exact)
    generator = torch.Generator(device).manual_seed(SEED + 1)
    grads = [torch.randn(t.shape, generator=generator, device=device).to(probe.dtype) for t in wanted[:-1]]
    wanted_grads: Tensors = {}
    if backward:
        of = torch.autograd.grad(wanted[:-1], list(exact.values()), [grad.double() for grad in grads])
        wanted_grads = dict(zip(exact, of, strict=True))
        for leaf in call.leaves.values():
            leaf.requires_grad_()
    wait()  # what fails from here on is ours

    kernels = kernel_names(call.explain())
    tell(stage="forward", kernels=kernels, family=str(probe.family(kernels["forward"], "forward")))
    is_right = True

    def check(name: str, found: Tensor, exact: Tensor, **more: Any) -> None:
        nonlocal is_right
        facts = compared(found, exact, LIMITS[probe.dtype], **more)
        is_right &= not facts["wrong"]
        tell(**{name: facts})

    with new_memory_is_nan():
        results = call.ours()
        wait()
    for name, found, right in zip(("output", *["weights"] * (len(wanted) - 2), "lse"), results, wanted, strict=True):
        of_heads = is_packed and name == "output"  # (rows, heads, columns)
        first_rows = call.first_rows.get("query")
        if of_heads:
            found, right = found.transpose(0, 1), right.transpose(0, 1)
        check(name, found, right, columns=name != "lse", first_rows=first_rows)
    if backward:
        tell(stage="backward", family=str(probe.family(kernels["backward"], "backward")))
        with new_memory_is_nan():
            found_grads = torch.autograd.grad(results[:-1], list(call.leaves.values()), grads)
            wait()
        for (name, right), found in zip(wanted_grads.items(), found_grads, strict=True):
            if is_packed:
                found, right = found.transpose(0, 1), right.transpose(0, 1)
            first_rows = call.first_rows.get("query" if name == "query" else "key")
            check(f"gradient of {name}", found, right, first_rows=first_rows)
    tell(stage="end")
    return {"result": "right" if is_right else "wrong"}
