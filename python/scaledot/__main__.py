"""The command line: ``scaledot`` or ``python -m scaledot``, with the commands compare, info and heatmap."""

from __future__ import annotations

import argparse
import json
import pickle
import shlex
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import scaledot

from .compare import command as compare
from .compare.columns import terminal_width, wrapped
from .compare.machine import describe
from .compare.parser import Parser, closed_pipe_ends

_TEXT = "the quick brown fox jumps over the lazy dog and the quicker dog jumps over the slow brown foxes"
_WIDTH = 64  # of the toy model of `heatmap`
_HEATMAP = "heatmap.png"


# --------------------------------------------------------------------------------------------------------- info
def installation() -> dict[str, Any]:
    """Versions that are installed, and the kernels chosen on this machine.

    Returns:
        ``scaledot``, its folder; ``build``, as :func:`scaledot.build_info`; ``machine``; ``cmake_prefix_path``; and
        ``kernels``: for each dtype, the kernels of ``forward`` and ``backward`` at shape (1, 8, 1024, 64), and of
        ``decode``, one query with the same keys.
    """
    kernels = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        key = torch.empty(1, 8, 1024, 64, dtype=dtype)
        square, decode = scaledot.explain(key, key, key), scaledot.explain(key[:, :, :1], key, key)
        kernels[str(dtype).removeprefix("torch.")] = {
            "forward": square.forward.kernel,
            "backward": square.backward.kernel,
            "decode": decode.forward.kernel,
        }
    return {
        "scaledot": str(Path(scaledot.__file__).parent),
        "build": scaledot.build_info(),
        "machine": describe(torch.device("cpu")),
        "cmake_prefix_path": scaledot.cmake_prefix_path,
        "kernels": kernels,
    }


def info(arguments: argparse.Namespace) -> int:
    """Prints `installation` as a table or as JSON."""
    found = installation()
    if arguments.json:
        print(json.dumps(found, indent=1, allow_nan=False))
        return 0
    build, machine = found["build"], found["machine"]
    archs = build["cuda_archs"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    cuda = f"{', '.join(archs)} (CUDA {build['cuda']})" if archs else "none compiled"
    rows = [
        ("scaledot", f"{machine['scaledot']}, {found['scaledot']}"),
        ("built", f"by {build['compiler']}, {build['build_type']}"),
        ("ops", f"for torch {build['torch']}; there are ops for {', '.join(build['torch_minors'])}"),
        ("torch", f"{machine['torch']}, {threads}, {machine['torch_capability']}"),
        ("python", f"{machine['python']}, {machine['system']}"),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("capability", f"{machine['capability']}   (SCALEDOT_CPU_CAPABILITY lowers it)"),
        ("CUDA kernels", cuda),
        ("CPU kernels", ", ".join(build["cpu_kernels"]) + "   (fastest first)"),
        ("CMake", f"-DCMAKE_PREFIX_PATH={shlex.quote(found['cmake_prefix_path'])}"),
    ]
    width = terminal_width()
    for name, text in rows:
        print(wrapped(f"{name:<13} {text}", width))
    print()
    print(wrapped("kernels for 8 heads, 1024 positions, width 64; decode: for one query and 1024 keys", width))
    print(f"  {'dtype':<9} {'forward':<15} {'backward':<15} decode")
    for name, kernels in found["kernels"].items():
        print(f"  {name:<9} {kernels['forward']:<15} {kernels['backward']:<15} {kernels['decode']}")
    return 0


# ------------------------------------------------------------------------------------------------------ heatmap
def tokens_of(text: str) -> list[str]:
    """Splits a text into words and punctuation marks; Chinese and Japanese into characters."""
    tokens: list[str] = []
    word = ""
    for character in f"{text} ":
        if character.isalnum() and ord(character) < 0x2E80:  # the scripts of East Asia begin here
            word += character
            continue
        tokens += [piece for piece in (word, character.strip()) if piece]
        word = ""
    return tokens


def embed(tokens: Sequence[str]) -> Tensor:
    """Vectors (L, 64) for L tokens; tokens of similar spelling get similar vectors.

    Each vector is the mean of random vectors, one for every character n-gram, as in fastText (Bojanowski et al.,
    "Enriching Word Vectors with Subword Information", 2017).
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
    """Attention weights (heads, L, L) of an untrained MultiHeadAttention, the same on every run.

    Keys and queries have the same projection, so tokens attend to tokens of similar spelling.
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
    """The tensor in a .pt or .npy file; ValueError if the file contains none."""
    if not path.is_file():
        raise ValueError(f"--weights: got {str(path)!r}; needs a file that exists")
    if path.suffix == ".npy":
        import numpy

        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        raise ValueError(f"--weights: got {str(path)!r}; needs a file written by torch.save, or a .npy file") from None
    if not isinstance(loaded, Tensor):
        raise ValueError(f"--weights: got a {type(loaded).__name__} in {str(path)!r}; needs one tensor")
    return loaded


def heatmap(arguments: argparse.Namespace) -> int:
    """Draws a heat map of attention weights into a file."""
    try:
        out = arguments.out or compare.picture(_HEATMAP)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--out: {error}") from None
    named = arguments.tokens is not None or arguments.text is not None
    tokens = arguments.tokens or tokens_of(_TEXT if arguments.text is None else arguments.text)
    if not tokens:
        raise ValueError(f"--text: got {arguments.text!r}; needs at least one token")
    if arguments.weights is None:
        weights = toy_weights(tokens, arguments.heads or 4, arguments.causal, arguments.window)
    elif arguments.causal or arguments.window or arguments.heads:
        raise ValueError("--weights: got --causal, --window or --heads too; needs none, as they are of the toy model")
    else:
        weights, tokens = load_weights(arguments.weights), tokens if named else None
    if arguments.head is not None:
        maps = weights.reshape(-1, *weights.shape[-2:])
        if arguments.head >= len(maps):
            raise ValueError(f"--head: got {arguments.head}; needs 0 to {len(maps) - 1}")
        weights = maps[arguments.head]
    from matplotlib import use  # imported here: matplotlib is optional, and --out has said so if it is missing

    use("Agg")
    axes = scaledot.plot.attention_heatmap(weights, tokens)
    figure = axes.figure if hasattr(axes, "figure") else axes.flat[0].figure
    if arguments.out is None and out.exists():  # the last check: it hides none that another name does not mend
        raise ValueError(f"--out: got none, but {out} exists; needs a name (that one replaces the file)")
    figure.savefig(out, dpi=160)
    print(f"{tuple(weights.shape)} attention weights: {out}")
    return 0


def _integer(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}; needs an integer, at least 0")
    return int(text)


def _side(text: str) -> int | None:
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
    what.add_argument("--text", help="a sentence to split into words (Chinese: into characters)")
    what.add_argument("--tokens", nargs="+", metavar="TOKEN", help="a list of tokens")
    add(
        "--weights",
        type=Path,
        metavar="FILE",
        help="(Lq, Lk) or (H, Lq, Lk) weights from a .pt or .npy file, instead of the toy model's",
    )
    add("--heads", type=_heads, help="heads of the toy model; a divisor of 64, default 4")
    add("--head", type=_integer, metavar="N", help="draw only this head; heads are numbered from 0")
    add("--causal", action="store_true", help="attend to earlier tokens only")
    add(
        "--window",
        nargs=2,
        type=_side,
        metavar=("LEFT", "RIGHT"),
        help="attend to at most this many neighbours on each side; none: no limit",
    )
    add("--out", type=compare.picture, metavar="FILE", help=f"default: {_HEATMAP}, unless it exists")
    parser.set_defaults(run=_reporting(heatmap, parser))


def _reporting(
    run: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser
) -> Callable[[argparse.Namespace], int]:
    """Wraps `run` so that a user's error is reported in one line, without a traceback."""

    def reporting(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except BrokenPipeError:
            raise
        except (ValueError, TypeError, OSError, ImportError) as error:
            parser.error(str(error))

    return reporting


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; default ``sys.argv[1:]``.

    Returns:
        The exit code. `info` and `heatmap` return 0; `compare` documents its own.
    """
    return closed_pipe_ends(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    script = Path(sys.argv[0]).name == "scaledot"  # the console script, and not python -m scaledot
    parser = Parser(
        prog="scaledot" if script else "python -m scaledot", description="Scaled dot-product attention for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"scaledot {scaledot.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")

    compare.add_arguments(command("compare", "correctness and speed against torch on this machine"))
    about_info = command("info", "what is installed, and which kernels it chooses on this machine")
    about_info.add_argument("--json", action="store_true", help="print JSON")
    about_info.set_defaults(run=info)
    _add_heatmap(command("heatmap", "draws the attention weights of a sentence or of a file"))
    names = list(commands.choices)
    parser.set_defaults(run=lambda _: parser.fail_without_command(names))
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
