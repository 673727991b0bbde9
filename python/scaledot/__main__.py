"""python -m scaledot compare | info | heatmap"""

from __future__ import annotations

import argparse
import pickle
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import scaledot

from .compare import command as compare
from .compare.machine import describe

_TEXT = "the quick brown fox jumps over the lazy dog and the quicker dog jumps over the slow brown foxes"
_WIDTH = 64  # of the toy model of `heatmap`


# --------------------------------------------------------------------------------------------------------- info
def info(_: argparse.Namespace) -> int:
    """What is installed and what it chooses here."""
    build, machine = scaledot.build_info(), describe(torch.device("cpu"))
    archs = build["cuda_archs"]
    cuda = f"{', '.join(archs)} (CUDA {build['cuda']})" if archs else "none compiled"
    rows = [
        ("scaledot", f"{machine['scaledot']}, {Path(scaledot.__file__).parent}"),
        ("built", f"for torch {build['torch']}, by {build['compiler']}, {build['build_type']}"),
        ("torch", f"{machine['torch']}, {machine['threads']} threads, {machine['torch_capability']}"),
        ("python", f"{machine['python']}, {machine['system']}"),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("capability", f"{machine['capability']}   (SCALEDOT_CPU_CAPABILITY lowers it)"),
        ("CUDA kernels", cuda),
        ("CPU kernels", ", ".join(build["cpu_kernels"]) + "   (fastest first)"),
        ("CMake", f"-DCMAKE_PREFIX_PATH={scaledot.cmake_prefix_path}"),
    ]
    for name, text in rows:
        print(f"{name:<13} {text}")
    print("\nkernels for 8 heads, 1024 positions, width 64, and for one query in their place:")
    print(f"  {'dtype':<10} {'forward':<18} {'backward':<18} one query")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        key = torch.empty(1, 8, 1024, 64, dtype=dtype)
        square, decode = scaledot.explain(key, key, key), scaledot.explain(key[:, :, :1], key, key)
        name = str(dtype).removeprefix("torch.")
        print(f"  {name:<10} {square.forward.kernel:<18} {square.backward.kernel:<18} {decode.forward.kernel}")
    return 0


# ------------------------------------------------------------------------------------------------------ heatmap
def tokens_of(text: str) -> list[str]:
    """Words and punctuation marks; scripts without spaces between words give one token a character."""
    tokens: list[str] = []
    word = ""
    for character in f"{text} ":
        if character.isalnum() and ord(character) < 0x2E80:  # where the scripts of East Asia begin
            word += character
            continue
        tokens += [piece for piece in (word, character.strip()) if piece]
        word = ""
    return tokens


def embed(tokens: Sequence[str]) -> Tensor:
    """(L, 64): tokens that are spelt alike get vectors that point alike.

    Each is the mean of a random vector for every run of its letters, as in fastText (Bojanowski et al., 2017).
    """

    def vector(piece: str) -> Tensor:
        return torch.randn(_WIDTH, generator=torch.Generator().manual_seed(zlib.crc32(piece.encode())))

    rows = []
    for token in tokens:
        spelt = f"<{token.lower()}>"
        pieces = [spelt[i : i + n] for n in (2, 3, 4) for i in range(len(spelt) - n + 1)] + [spelt]
        rows.append(torch.stack([vector(piece) for piece in pieces]).mean(0))
    embedded = torch.stack(rows)
    return embedded / embedded.norm(dim=-1, keepdim=True) * _WIDTH**0.5


def toy_weights(
    tokens: Sequence[str], heads: int, is_causal: bool, window: tuple[int | None, int | None] | None
) -> Tensor:
    """(heads, L, L): weights of an untrained MultiHeadAttention, the same on every run.

    It projects keys as it projects queries, so that tokens attend to those that are spelt alike.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = scaledot.MultiHeadAttention(_WIDTH, heads).eval()
    with torch.no_grad():
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        x = embed(tokens)
        _, weights = attention(x, is_causal=is_causal, window=window, need_weights=True)
    assert weights is not None
    return weights


def load_weights(path: Path) -> Tensor:
    """A tensor from a .pt or .npy file; ValueError if the file holds none."""
    if not path.is_file():
        raise ValueError(f"--weights: there is no file {str(path)!r}")
    if path.suffix == ".npy":
        import numpy

        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        raise ValueError(f"--weights: {str(path)!r} is no file that torch.save wrote, nor a .npy file") from None
    if not isinstance(loaded, Tensor):
        raise ValueError(f"--weights: {str(path)!r} holds a {type(loaded).__name__}; needs one tensor")
    return loaded


def heatmap(arguments: argparse.Namespace) -> int:
    """Draws a heat map into a file."""
    from matplotlib import use

    use("Agg")
    named = arguments.tokens is not None or arguments.text is not None
    tokens = arguments.tokens or tokens_of(_TEXT if arguments.text is None else arguments.text)
    if not tokens:
        raise ValueError(f"--text: got {arguments.text!r}; there is no token in it")
    if arguments.weights is None:
        weights = toy_weights(tokens, arguments.heads or 4, arguments.causal, arguments.window)
    elif arguments.causal or arguments.window or arguments.heads:
        raise ValueError("--causal, --window and --heads are of the toy model; with --weights there is none")
    else:
        weights, tokens = load_weights(arguments.weights), tokens if named else None
    if arguments.head is not None:
        maps = weights.reshape(-1, *weights.shape[-2:])
        if arguments.head >= len(maps):
            raise ValueError(f"--head: got {arguments.head}; there are {len(maps)} heads, 0 to {len(maps) - 1}")
        weights = maps[arguments.head]
    axes = scaledot.plot.attention_heatmap(weights, tokens)
    figure = axes.figure if hasattr(axes, "figure") else axes.flat[0].figure
    figure.savefig(arguments.out, dpi=160)
    print(f"{tuple(weights.shape)} attention weights: {arguments.out}")
    return 0


def _sides(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a number of positions, or none")
    return int(text)


def _heads(text: str) -> int:
    if not text.isdigit() or int(text) == 0 or _WIDTH % int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a divisor of {_WIDTH}")
    return int(text)


def _add_heatmap(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--text", help="a sentence; it is split into words, Chinese into characters")
    what.add_argument("--tokens", nargs="+", metavar="TOKEN", help="the tokens themselves")
    add(
        "--weights",
        type=Path,
        metavar="FILE",
        help=".pt or .npy: (Lq, Lk) or (H, Lq, Lk) weights in place of the toy model's",
    )
    add("--heads", type=_heads, help="of the toy model; a divisor of 64, default 4")
    add("--head", type=_sides, metavar="N", help="draw this head alone")
    add("--causal", action="store_true", help="attend to earlier tokens only")
    add(
        "--window",
        nargs=2,
        type=_sides,
        metavar=("LEFT", "RIGHT"),
        help="attend to so many neighbours, or none for no limit",
    )
    add("--out", type=compare.picture, default=Path("heatmap.png"), metavar="FILE", help="default heatmap.png")
    parser.set_defaults(run=_reporting(heatmap, parser))


def _reporting(
    run: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser
) -> Callable[[argparse.Namespace], int]:
    """What the user can mend is said in one line."""

    def reporting(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except (ValueError, TypeError, OSError, ImportError) as error:
            parser.error(str(error))

    return reporting


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m scaledot", description="Scaled dot-product attention for PyTorch.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")

    compare.add_arguments(command("compare", "correctness and speed against torch on this machine"))
    command("info", "what is installed, and which kernels it chooses here").set_defaults(run=info)
    _add_heatmap(command("heatmap", "draws attention weights, of a sentence or from a file"))
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
