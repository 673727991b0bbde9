"""python -m external.gradients inputs|training: how exact the gradients of scaledot, F.sdpa and eager attention are.

`inputs` prints a Markdown table for each dtype: the largest errors of the output and of every gradient against float64,
for inputs that have broken kernels. It takes a quarter of a minute. `training` trains one attention layer with each
implementation, from the same numbers, and prints the losses. It takes three minutes; `--plot FILE` draws them.
docs/gradients.md has both. One thread is used.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import reference
from scaledot import scaled_dot_product_attention
from scaledot.compare.features import DTYPES


def _sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    def attention(*tensors: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors, **options)

    return attention


def eager(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The formula, each step rounded to the dtype of the tensors."""
    scores = query @ key.mT * query.size(-1) ** -0.5
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
    return scores.softmax(-1) @ value


SIDES: dict[str, Callable[..., Tensor]] = {
    "scaledot": scaled_dot_product_attention,
    "F.sdpa fused": _sdpa(SDPBackend.FLASH_ATTENTION),
    "F.sdpa math": _sdpa(SDPBackend.MATH),
    "eager": eager,
}
Inputs = dict[str, Tensor | bool]  # query, key, value and perhaps attn_mask, in float32; is_causal


def inputs(seed: int) -> Iterator[tuple[str, Inputs]]:
    """Inputs by name. Where the name does not say otherwise: 2 heads, 128 queries, 128 keys, head_dim 64."""

    def drawn(queries: int = 128, keys: int = 128, width: int = 64, size: float = 1.0, **means: float) -> Inputs:
        torch.manual_seed(seed)
        lengths = {"query": queries, "key": keys, "value": keys}
        return {name: size * torch.randn(1, 2, n, width) + means.get(name, 0.0) for name, n in lengths.items()}

    def lowered(by: float, queries: int = 128, keys: int = 128) -> Inputs:
        """Every score is near -by, as in https://github.com/huggingface/trl/issues/7181."""
        tensors = drawn(queries, keys, query=0, key=0)
        for name in ("query", "key"):
            tensors[name][..., 0] = 1.0 if name == "query" else -by * 64**0.5
        return tensors

    def with_one(name: str, element: float) -> Inputs:
        tensors = drawn()
        tensors[name][..., 0, 3] = element
        return tensors

    seen = torch.ones(704, 704, dtype=torch.bool).tril()[None, None]
    padded = seen[..., :128, :128] & (torch.arange(128) >= 40)
    torch.manual_seed(seed + 1)
    bias, one = torch.randn(1, 2, 128, 128), torch.randn(3, 1, 2, 1, 64)
    yield "normal numbers", drawn()
    yield "head_dim 8", drawn(width=8)
    yield "head_dim 512", drawn(width=512)
    yield "causal, 256 queries over 128 keys", drawn(queries=256) | {"is_causal": True}
    yield "1 query over 512 keys", drawn(queries=1, keys=512)
    yield "1 query over 192 keys, logsumexp -100", lowered(100, 1, 192)
    yield "logsumexp -88", lowered(88)
    yield "logsumexp -1000", lowered(1000)
    yield "704 keys, causal mask, logsumexp -120", lowered(120, 704, 704) | {"attn_mask": seen}
    yield "values with a mean of 4", drawn(value=4)
    yield "values with a mean of 64", drawn(value=64)
    yield "keys with a mean of 4", drawn(key=4)
    yield "keys with a mean of 64", drawn(key=64)
    yield "queries with a mean of 64", drawn(query=64)
    yield "all with a mean of 4", drawn(query=4, key=4, value=4)
    names = ("query", "key", "value")
    alike = zip(names, drawn(size=0.1).values(), one, strict=True)
    yield "tokens that differ by a tenth", {name: tensor + token for name, tensor, token in alike}
    yield "a key with an element of 1e4", with_one("key", 1e4)
    yield "a value with an element of 1e4", with_one("value", 1e4)
    yield "floating mask", drawn() | {"attn_mask": bias}
    yield "40 empty rows", drawn() | {"attn_mask": padded}
    yield "40 empty rows, floating mask", drawn() | {"attn_mask": bias.masked_fill(~padded, -torch.inf)}
    yield "40 rows of -6e4, floating mask", drawn() | {"attn_mask": bias.masked_fill(~padded, -6e4)}


def oracle(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return reference.attention(query, key, value, attn_mask, is_causal=is_causal)[0]


def results(side: Callable[..., Tensor], given: Inputs, grad: Tensor) -> dict[str, Tensor] | None:
    """The output and the gradients, by name; None where there is no kernel."""
    leaves = {name: t.requires_grad_() for name, t in given.items() if torch.is_tensor(t) and t.is_floating_point()}
    try:
        output = side(**given)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            return None
        raise
    return {
        "output": output.detach(),
        **dict(zip(leaves, torch.autograd.grad(output, [*leaves.values()], grad), strict=True)),
    }


def errors(given: Inputs, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """For each implementation that has a kernel: the largest errors, in unit roundoffs of the largest exact element."""

    def cast(to: torch.dtype) -> Inputs:
        floating = {
            name: t.to(dtype).to(to) for name, t in given.items() if torch.is_tensor(t) and t.is_floating_point()
        }
        return {**given, **floating}

    query, value = given["query"], given["value"]
    torch.manual_seed(0)
    grad = torch.randn(*query.shape[:-1], value.size(-1)).to(dtype)
    exact = results(oracle, cast(torch.float64), grad.double())
    found = {}
    for name, side in SIDES.items():
        ours = results(side, cast(dtype), grad)
        if ours is not None:
            scales = {
                tensor: float(wanted.abs().max()) * torch.finfo(dtype).eps / 2 for tensor, wanted in exact.items()
            }
            found[name] = {t: float((ours[t].double() - exact[t]).abs().max()) / scales[t] for t in exact}
    return found


def table(dtype: torch.dtype, seeds: int) -> str:
    """Markdown: a row for each input. A cell has the errors of the output and of the gradients, over all draws."""
    cells: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        for name, given in inputs(seed):
            for side, found in errors(given, dtype).items():
                before = cells.setdefault(name, {}).setdefault(side, [0.0] * len(found))
                cells[name][side] = torch.tensor([before, [*found.values()]]).amax(0).tolist()  # keeps a NaN
    lines = [f"| {str(dtype).removeprefix('torch.')} | {' | '.join(SIDES)} |", "|---" * (len(SIDES) + 1) + "|"]
    for name, row in cells.items():
        shown = [" ".join(map(_short, row[side])) if side in row else "no kernel" for side in SIDES]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 10 or number != number else f"{number:.0f}"


def losses(side: str, bias: float, seed: int, steps: int) -> list[float]:
    """The losses of one attention layer that learns to find a token by its tag and to say its class.

    Projections have biases of standard deviation `bias` for keys and values, so all keys share a large part, and all
    values do. Weights are float32; queries, keys and values bfloat16, except for "float32", which is eager attention.
    """
    length, width, heads, batch, classes = 32, 64, 2, 32, 16
    dtype = torch.float32 if side == "float32" else torch.bfloat16
    attention = SIDES["eager" if side == "float32" else side]
    torch.manual_seed(seed)
    tags, tokens = torch.randn(length, width), torch.randn(classes, width)
    weights = [nn.Parameter(torch.randn(n, width) / width**0.5) for n in (width, width, width, classes)]
    biases = [nn.Parameter(torch.randn(width) * bias) for _ in range(2)]
    last = nn.Parameter(-F.linear(biases[1].detach(), weights[3].detach()))
    optimizer = torch.optim.Adam([*weights, *biases, last], lr=1e-3, betas=(0.9, 0.99))
    history = []
    for _ in range(steps):
        labels, wanted = torch.randint(classes, (batch, length)), torch.randint(length, (batch, length))
        seen = tags + tokens[labels]
        query, key, value = (
            F.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
            .view(batch, length, heads, -1)
            .transpose(1, 2)
            for x, w, b in zip((tags[wanted], seen, seen), weights, (None, *biases), strict=False)
        )
        output = attention(query, key, value).transpose(1, 2).flatten(2)
        scores = F.linear(output.float(), weights[3], last)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.gather(1, wanted).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


BIASES = (64, 300)
MEAN = 20  # steps of a mean loss
RUNS = {
    "float32": "#22303c",
    "scaledot": "#27548a",
    "F.sdpa math": "#5f9e78",
    "F.sdpa fused": "#e08e45",
    "eager": "#c0392b",
}
Curves = dict[tuple[int, str], list[list[float]]]  # by bias and implementation, one for each seed


def training(seeds: int, steps: int) -> Curves:
    """Trains and prints the mean loss of the last 20 steps, and the first step from which on 20 steps are below 0.1."""
    curves: Curves = {}
    print("| biases | attention | loss at the end | steps to a loss of 0.1 |\n|---|---|---|---|")
    for bias in BIASES:
        for side in RUNS:
            curves[bias, side] = [losses(side, bias, seed, steps) for seed in range(seeds)]
            smooth = [torch.tensor(history).unfold(0, MEAN, 1).mean(-1) for history in curves[bias, side]]
            reached = [int((mean < 0.1).int().argmax()) if bool((mean < 0.1).any()) else "never" for mean in smooth]
            ends = ", ".join(f"{float(mean[-1]):.3f}" for mean in smooth)
            print(f"| {bias} | {side} | {ends} | {', '.join(map(str, reached))} |", flush=True)
    return curves


def plot(curves: Curves, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for panel, bias in zip(figure.subplots(1, len(BIASES), sharey=True), BIASES, strict=True):
        for side, colour in RUNS.items():
            for number, history in enumerate(curves[bias, side]):
                mean = torch.tensor(history).unfold(0, 10, 1).mean(-1).tolist()
                label = side if side == "float32" else f"{side}, bfloat16"
                panel.plot(mean, color=colour, linewidth=1.1, alpha=0.85, label=None if number else label)
        panel.set_yscale("log")
        panel.set_title(f"biases of keys and values: {bias}", loc="left", size=10.5, color="#22303c", weight="bold")
        panel.set_xlabel("step", size=9, color="#6b7883")
        panel.grid(color="#e3e7ea", linewidth=0.8)
        panel.tick_params(which="both", colors="#6b7883", labelsize=9, length=0)
        for spine in panel.spines.values():
            spine.set_visible(False)
    figure.axes[0].set_ylabel("loss", size=9, color="#6b7883")
    figure.axes[0].legend(frameon=False, fontsize=9, labelcolor="#22303c")
    figure.savefig(path)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="external.gradients", description=__doc__, allow_abbrev=False)
    parser.add_argument("part", choices=("inputs", "training"))
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="those of `inputs`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="of `training`")
    parser.add_argument("--plot", type=Path, help="a file for the picture of `training`")
    options = parser.parse_args(arguments)
    for name, least in (("seeds", 1), ("steps", MEAN)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}; needs at least {least}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Flash attention kernel not used")  # the table says "no kernel"
    if options.part == "inputs":
        print("\n\n".join(table(DTYPES[name], options.seeds) for name in options.dtype))
        return
    curves = training(options.seeds, options.steps)
    if options.plot is not None:
        plot(curves, options.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
