"""A model of a whole call of the kernels for Hopper, on paper: its launches, the blocks of each, waves and tails, the
bytes of the kernels that are bound by memory, and the cycles of main loops and of what is outside them.

    python -m gpu.call_model [--heads 16] [--kernels]

Grids follow the plans in csrc/cuda/sm90; cycles are those of sass_table.json. The numbers in capitals are assumptions,
or fitted to docs/benchmarks/h200.md, as they say. By default all heads together have 2,048 columns, as in
FlashAttention-3's figures and on that page. The last two columns are of the kernels that the page measured: what the
model says of them, and by how much that is off. docs/gpu_kernels.md says what the model leaves out.
"""

from __future__ import annotations

import argparse
import heapq
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpu.sass_model.table import Stored, text_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "h200.md"
TOKENS, WIDTH, LENGTHS = 16384, 2048, (1024, 4096, 16384)
MULTIPROCESSORS = 132
PEAK = 989.5e12  # operations a second with 4,096 a cycle of each multiprocessor: at 1.83 GHz
PRODUCT = 785e12  # that a product of square matrices reached on the H200, whose power limits the clock
CLOCK = 1.83e3 * PRODUCT / PEAK  # cycles a microsecond
COPY = 4.26e6  # bytes a microsecond, read and written, of a copy on the H200
OF_COPY = 1 / 1.15  # what delta's kernel reached of that
GAP = 3.0  # microseconds from one kernel to the next: fitted to a backward of 752, with 724 in its 8 kernels
EMPTY = 2.0  # of a kernel with nothing to do
HOST = 2.5  # of the CPU for a launch: assumed
DRAW, DRAIN, ARRIVAL = 1.0, 1.0, 1.0  # an atomic operation; the output's way to memory; a copy's way from it: assumed
BLOCK = 4.5  # from the end of a block of the backward to the next one's first products, with its draw: fitted
# How much slower a loop is than sass_table.json says. Fitted to the longest calls without a mask; clusters, which only
# those have above 64 columns, are not told apart.
FORWARD_SLOWER = {64: 1.28, 128: 1.22, 256: 1.06}
BACKWARD_SLOWER = 1.2
ADDING = 2.4  # from the sums of a part of dQ in shared memory to the next part's: fitted, the same for all widths
TWO_BYTES = 2.6  # times that of its bytes took dQ's last kernel when it stored 2 bytes at a time

FORWARD_TILE = {64: (192, 128), 128: (128, 128), 256: (128, 80)}  # rows and keys, as in tile_sizes.h
BACKWARD_TILE = {64: (128, 128), 128: (64, 128), 256: (64, 64)}
PARTS = {64: 1, 128: 1, 256: 2}  # in which dQ leaves, 32 KiB each
CACHED_BYTES = 24 << 20  # as in forward_tiles.h
MEMORY_BLOCKS = 4096  # kMaxMemoryBlocks

# Shah et al., "FlashAttention-3", 2024: TFLOP/s in 16 bits on an H100 SXM5, for 1k, 2k, 4k, 8k and 16k. The forward's
# were read in the figure, the backward's in transcriptions of the figure, which has no mask and no 256 columns. Its dQ
# has no fixed order of sums.
FLASH_ATTENTION_3 = {
    ("forward", 64, False): (392, 460, 476, 496, 497),
    ("forward", 64, True): (265, 371, 420, 460, 473),
    ("forward", 128, False): (565, 625, 638, 646, 648),
    ("forward", 128, True): (423, 521, 579, 602, 616),
    ("forward", 256, False): (None, 707, 736, 746, 756),  # 1k: the number is hidden in the figure
    ("forward", 256, True): (427, 537, 612, 628, 642),
    ("backward", 64, False): (363, 422, 453, 472, 474),
    ("backward", 128, False): (424, 501, 542, 559, 561),
}


@dataclass(frozen=True)
class Work:
    """A call. `measured`: with the kernels of commit f037b44, which the H200 ran: one stage of queries, a draw at the
    start of a tile, dQ cleared before and stored 2 bytes at a time after, and eight launches of a causal backward."""

    direction: str  # forward, training (a forward that stores the low part of its output), backward
    causal: bool
    batch: int
    heads: int
    length: int
    dim: int
    measured: bool = False

    @property
    def operations(self) -> float:
        products = 10 if self.direction == "backward" else 4
        return products * self.dim * self.batch * self.heads * self.length**2 * (0.5 if self.causal else 1)

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.length

    @property
    def name(self) -> str:
        kind = "causal" if self.causal else "plain"
        return f"{self.direction} {kind} d{self.dim} {self.batch} x {self.length}, {self.heads} heads"


@dataclass(frozen=True)
class Kernel:
    name: str
    blocks: int
    us: float
    waves: float = 0  # tiles for each block that runs at the same time
    busy: float = 1  # share of the time in which these have work
    moved: float = 0  # bytes, read and written


@cache
def stored() -> Stored:
    return Stored.read()


def loop_us(name: str) -> float:
    figures = stored().kernels[name]
    return figures.tensor * 100 / figures.overlapped / CLOCK


# ------------------------------------------------------------------------------------------------------- forward
def clusters(work: Work) -> int:
    """The blocks of a cluster (with_sm90_forward_config)."""
    tiles = math.ceil(work.length / FORWARD_TILE[work.dim][0])
    return 2 if work.dim > 64 and not work.causal and tiles % 2 == 0 else 1


def forward_order(work: Work) -> list[int]:
    """The key tiles of each query tile, or group of a cluster, in the order in which they are drawn (Sm90TileOrder)."""
    rows, keys = FORWARD_TILE[work.dim]
    tiles = math.ceil(work.length / rows)
    lasts = [min((tile + 1) * rows, work.length) if work.causal else work.length for tile in range(tiles)]
    counts = [math.ceil(last / keys) for last in lasts][:: -clusters(work)]
    pairs, order = work.batch * work.heads, []
    section = min(max(CACHED_BYTES // (4 * work.dim * work.length), 1), pairs)
    for first in range(0, pairs, section):
        order += [count for count in counts for _ in range(min(section, pairs - first))]
    return order


def schedule(costs: Sequence[float], slots: int) -> tuple[float, float]:
    """When the last of these ends, if whoever is free takes the next one; and the share of the time that is busy."""
    free = [0.0] * min(slots, len(costs))
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    end = max(free)
    return end, sum(costs) / (slots * end)


def forward_tile_us(work: Work) -> tuple[float, float]:
    """Of one round of the loop, and of what is outside it, where a tile's first scores and last products are."""
    blocks = clusters(work)
    name = f"forward_bfloat16_{work.dim}_plain{'_cluster' if blocks > 1 else ''}"
    outside = stored().outside[name]
    cycles = outside.stored_cycles if work.direction == "training" else outside.cycles
    waits = DRAIN + ARRIVAL + DRAW if work.measured else 0  # now all three beside the next tile's products
    slower = FORWARD_SLOWER[work.dim]
    return loop_us(name) * slower, cycles / CLOCK * slower + waits


def forward_kernels(work: Work) -> list[Kernel]:
    order, slots = forward_order(work), MULTIPROCESSORS // clusters(work)
    loop, outside = forward_tile_us(work)
    end, busy = schedule([outside + (keys - 1) * loop for keys in order], slots)
    blocks = clusters(work) * min(len(order), slots)
    kernels = [Kernel("sm90_forward", blocks, end, len(order) / slots, busy)]
    if work.measured or clusters(work) == 1:
        kernels.insert(0, Kernel("clear", 0, EMPTY))  # counters and marks
    if work.causal:
        kernels.append(Kernel("sm90_forward repairs", blocks, EMPTY))
    return kernels


# ------------------------------------------------------------------------------------------------------- backward
def backward_steps(work: Work) -> list[range]:
    """The row tiles of each key tile of a head, in the order in which blocks draw them: the last keys first."""
    rows, keys = BACKWARD_TILE[work.dim]
    row_tiles, key_tiles = math.ceil(work.length / rows), math.ceil(work.length / keys)
    return [range(tile * keys // rows if work.causal else 0, row_tiles) for tile in reversed(range(key_tiles))]


def add_in_turn(heads: int, steps: Sequence[range], times: tuple[float, float, float, float]) -> tuple[float, float]:
    """When the last block ends, and the share of the time that is not waiting. `times`: until a block's first step, of
    a step, of adding its sums to dQ, and after the last step. One warp of a block adds, for each row tile after the
    blocks with later keys. The others are at most one step ahead of it."""
    before, step, adding, after = times
    free = [0.0] * min(MULTIPROCESSORS, heads * len(steps))
    for _ in range(heads):
        turn = [0.0] * steps[0].stop  # when the next block may add to a row tile
        for row_tiles in steps:
            now, begun, added = free[0] + before, 0.0, 0.0
            for row_tile in row_tiles:
                now = max(now + step, begun)
                begun = max(now, added, turn[row_tile])
                added = turn[row_tile] = begun + adding
            heapq.heapreplace(free, max(now + after, added))
    work = heads * sum(before + after + step * len(tiles) for tiles in steps)
    return max(free), work / (MULTIPROCESSORS * max(free))


def backward_times(work: Work) -> tuple[float, float, float, float]:
    name = f"backward_bfloat16_{work.dim}_plain"
    after = stored().outside[name].stored_cycles / CLOCK
    return BLOCK, loop_us(name) * BACKWARD_SLOWER, ADDING * PARTS[work.dim], after


def memory(name: str, blocks: int, bytes_moved: float, times: float = 1) -> Kernel:
    return Kernel(name, blocks, max(times * bytes_moved / (COPY * OF_COPY), EMPTY), moved=bytes_moved)


def backward_kernels(work: Work) -> list[Kernel]:
    rows, keys = BACKWARD_TILE[work.dim]
    row_tiles = work.batch * work.heads * math.ceil(work.length / rows)
    key_tiles = work.batch * work.heads * math.ceil(work.length / keys)
    blocks, small = min(row_tiles, MEMORY_BLOCKS), 2 * MULTIPROCESSORS
    main, busy = add_in_turn(work.batch * work.heads, backward_steps(work), backward_times(work))
    generic_tiles = work.batch * work.heads * math.ceil(work.length / 64)
    sums = work.rows * 4 * work.dim
    delta = work.rows * (3 * 2 * work.dim + 4 + 12)  # O, its low part, dO; lse; both results
    packed = work.rows * 8  # both once more, in tiles
    backward = Kernel("sm90_backward", key_tiles, main, key_tiles / MULTIPROCESSORS, busy)
    if not work.measured:
        return [
            memory("sm90_delta", blocks, delta + packed),
            Kernel("sm90_lse", min(generic_tiles, small), EMPTY),  # only where lse is not precise
            backward,
            memory("sm90_finish", min(max(row_tiles, generic_tiles), MULTIPROCESSORS), 1.5 * sums),
        ]
    kernels = [
        memory("clear", 0, sums),
        memory("delta", blocks, delta),
        Kernel("prepare", min(generic_tiles, small), EMPTY),
        memory("pack", blocks, work.rows * 12 + packed),
        backward,
        memory("store dQ", blocks, 1.5 * sums, TWO_BYTES),
    ]
    return kernels + [Kernel("again", small, EMPTY)] * (2 if work.causal else 0)


# ------------------------------------------------------------------------------------------------------- a call
def kernels_of(work: Work) -> list[Kernel]:
    return backward_kernels(work) if work.direction == "backward" else forward_kernels(work)


def us_of(kernels: Sequence[Kernel]) -> float:
    """One kernel after the other, unless the CPU takes longer to launch them."""
    return max(sum(kernel.us + GAP for kernel in kernels), HOST * len(kernels))


def tflops(work: Work) -> float:
    return work.operations / us_of(kernels_of(work)) / 1e6


def works(heads: int | None = None) -> list[Work]:
    return [
        Work(direction, causal, TOKENS // length, heads or WIDTH // dim, length, dim)
        for direction in ("forward", "backward")
        for dim in (64, 128, 256)
        for causal in (False, True)
        for length in LENGTHS
    ]


def flash_attention_3(work: Work) -> int | None:
    figures = FLASH_ATTENTION_3.get((work.direction, work.dim, work.causal))
    return figures[(1024, 2048, 4096, 8192, 16384).index(work.length)] if figures else None


@cache
def measured() -> dict[Work, float]:
    """TFLOP/s of the H200's page, of the workloads that the model knows."""
    row = re.compile(r"^\| (forward|training|backward) (plain|causal) d(64|128|256) (\d+)x\4 \| ([\d.]+) \|", re.M)
    found: dict[Work, float] = {}
    for direction, kind, dim, length, figure in row.findall(PAGE.read_text(encoding="utf-8")):
        if TOKENS // int(length) <= 16:
            sizes = (TOKENS // int(length), WIDTH // int(dim), int(length), int(dim))
            found.setdefault(Work(direction, kind == "causal", *sizes, measured=True), float(figure))
    return found


def nearest(work: Work) -> Work | None:
    """The workload of the page that differs least in its length."""
    alike = (work.direction, work.causal, work.dim)
    found = [other for other in measured() if (other.direction, other.causal, other.dim) == alike]
    return min(found, key=lambda other: abs(math.log2(other.length / work.length)), default=None)


def row_of(work: Work) -> tuple[str, ...]:
    kernels = kernels_of(work)
    main = max(kernels, key=lambda kernel: kernel.us)
    peer, like = flash_attention_3(work), nearest(work)
    us = us_of(kernels)
    row = [work.name, str(len(kernels)), f"{main.waves:.1f}", f"{main.busy:.0%}", f"{main.us:.0f}"]
    row += [f"{us - main.us:.0f}", f"{us / 1000:.3f}", f"{work.operations / us / 1e6:.0f}", str(peer or "-")]
    if not like:
        return (*row, "-", "-", "-")
    seen = f"{measured()[like]:.0f}" + ("" if like.length == work.length else f" (L {like.length})")
    return (*row, seen, f"{tflops(like):.0f}", f"{tflops(like) / measured()[like] - 1:+.0%}")


HEADER = (
    *("workload", "launches", "waves", "busy", "main us", "rest us", "ms", "TFLOP/s", "FA3 H100"),
    *("H200 then", "model then", "off"),
)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m gpu.call_model", description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("--heads", type=int, help="for every head dimension; default: 2,048 columns in all")
    parser.add_argument("--kernels", action="store_true", help="print each launch")
    arguments = parser.parse_args(words)
    print(text_of([HEADER, *map(row_of, works(arguments.heads))]), end="")
    for work in works(arguments.heads) if arguments.kernels else []:
        rows = [(k.name, str(k.blocks), f"{k.moved / 1e6:.1f}", f"{k.us:.1f}") for k in kernels_of(work)]
        print(f"\n{text_of([(work.name, 'blocks', 'MB', 'us'), *rows])}", end="")
    errors = [tflops(work) / figure - 1 for work, figure in measured().items()]
    worst = max(errors, key=abs)
    mean = sum(map(abs, errors)) / len(errors)
    print(f"\n{len(errors)} workloads of the H200: off by {mean:.1%} in the mean, at most by {worst:+.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
