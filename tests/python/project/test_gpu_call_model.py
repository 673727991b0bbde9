"""The model of a whole call on a GPU (tests/gpu/call_model.py): its arithmetic, against numbers made by hand, and its
sizes, against the sources and the machine code that they are copied from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpu import call_model
from gpu.call_model import Kernel, Work

CUDA = Path(__file__).resolve().parents[3] / "csrc" / "cuda"
FORWARD = Work("forward", causal=True, batch=4, heads=16, length=4096, dim=128)
BACKWARD = replace(FORWARD, direction="backward")


def sources() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(CUDA.rglob("*")) if path.is_file())


def names(work: Work) -> list[str]:
    return [kernel.name for kernel in call_model.kernels_of(work)]


def kernel(work: Work, name: str) -> Kernel:
    return next(found for found in call_model.kernels_of(work) if found.name == name)


def test_operations() -> None:
    assert FORWARD.operations == 4 * 128 * 64 * 4096**2 / 2
    assert BACKWARD.operations == 2.5 * FORWARD.operations


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_are_those_of_the_machine_code(dim: int) -> None:
    # A multiprocessor has 4,096 operations a cycle; a forward multiplies two matrices, a backward five.
    for direction, (rows, keys), products in (
        ("forward", call_model.FORWARD_TILE[dim], 2),
        ("backward", call_model.BACKWARD_TILE[dim], 5),
    ):
        figures = call_model.stored().kernels[f"{direction}_bfloat16_{dim}_plain"]
        assert figures.tensor == 2 * products * rows * keys * dim / 4096


def test_constants_are_those_of_the_source() -> None:
    text = sources()

    def constant(name: str) -> str:
        found = re.search(rf"constexpr \w+ {name} = ([^;]+);", text)
        assert found, name
        return found.group(1)

    assert constant("kCachedBytes") == f"int64_t({call_model.CACHED_BYTES >> 20}) << 20"
    assert constant("kMaxMemoryBlocks") == str(call_model.MEMORY_BLOCKS)
    assert constant("kClusterSize") == str(call_model.clusters(replace(FORWARD, causal=False))) == "2"
    assert ".grad_query_parts = value_dim > 128 ? 2 : 1" in text


def test_query_tiles_are_drawn_longest_first_in_sections() -> None:
    # 4096 keys and values of 128 columns are 2 MiB: 12 heads share 24 MiB. 32 query tiles have 1 to 32 key tiles.
    order = call_model.forward_order(FORWARD)
    assert len(order) == 64 * 32
    assert sum(order) == 64 * 32 * 33 // 2
    assert order[:13] == [32] * 12 + [31]
    assert order[-5:] == [2] + [1] * 4  # the last section has 64 % 12 heads
    # 192 rows: 6 tiles of 1024 rows, of which the last one has 64. Key tiles of 128: for 1024, 960, 768, ... rows.
    narrow = replace(FORWARD, batch=1, heads=1, length=1024, dim=64)
    assert call_model.forward_order(narrow) == [8, 8, 6, 5, 3, 2]


def test_clusters_halve_the_draws() -> None:
    plain = replace(FORWARD, causal=False)
    assert call_model.forward_order(plain) == [32] * (64 * 16)
    main = kernel(plain, "sm90_forward")
    assert (main.blocks, main.waves) == (132, 1024 / 66)
    assert call_model.clusters(replace(plain, length=1152)) == 1  # an odd number of tiles
    assert call_model.clusters(replace(plain, dim=64)) == 1


def test_whoever_is_free_takes_the_next_tile() -> None:
    assert call_model.schedule([3, 1, 1, 1], 2) == (3, 1)
    assert call_model.schedule([1, 1, 1, 3], 2) == (4, 0.75)  # the longest one last: a tail
    assert call_model.schedule([2, 2], 4) == (2, 0.5)
    # 132 blocks and 133 equal tiles: two waves, of which the second has one tile.
    end, busy = call_model.schedule([1.0] * 133, 132)
    assert (end, busy) == (2, 133 / 264)


def test_rows_that_attend_to_a_tile_of_keys() -> None:
    # 64 rows and 128 keys: the last keys come first, and have the last two row tiles.
    short = replace(BACKWARD, length=256)
    assert call_model.backward_steps(short) == [range(2, 4), range(4)]
    assert call_model.backward_steps(replace(short, causal=False)) == [range(4), range(4)]


def turns(steps: Sequence[range], step: float, adding: float) -> float:
    return call_model.add_in_turn(1, steps, (0, step, adding, 0))[0]


def test_blocks_add_to_dq_in_turn() -> None:
    assert turns([range(3)], 10, 1) == 31  # sums after 10, 20 and 30
    assert turns([range(3)], 1, 10) == 31  # one warp adds: from 1 to 31
    assert turns([range(2), range(2)], 10, 1) == 22  # the second block's first sums wait from 10 to 11
    assert turns([range(2), range(2)], 10, 10) == 40  # from 20 to 30 and from 30 to 40
    assert turns([range(1, 2), range(2)], 10, 10) == 30  # causal: the first block has left row tile 1 at 20
    end, busy = call_model.add_in_turn(1, [range(2)], (3, 10, 1, 4))
    assert (end, busy) == (27, 27 / (132 * 27))


def test_bytes_of_the_small_kernels() -> None:
    # A row of 128 columns: the output, its low part and its gradient, lse; delta and two numbers for lse are stored,
    # and delta and one number in tiles.
    rows, then = 4 * 16 * 4096, replace(BACKWARD, measured=True)
    assert kernel(BACKWARD, "sm90_delta").moved == rows * (784 + 8)
    assert kernel(BACKWARD, "sm90_finish").moved == rows * (4 + 2) * 128
    delta = kernel(then, "delta")
    assert delta.moved / rows * 64 == 49 * 1024  # a tile of 64 rows
    assert delta.us == pytest.approx(delta.moved / 4.26e6 * 1.15)
    assert 54 < delta.us < 56  # as the H200 measured
    assert kernel(then, "pack").moved == rows * 20
    assert kernel(then, "clear").moved == rows * 4 * 128


def test_launches() -> None:
    plain = replace(FORWARD, causal=False)
    assert names(plain) == ["sm90_forward"]
    assert names(replace(plain, dim=64)) == ["clear", "sm90_forward"]
    assert names(FORWARD) == ["clear", "sm90_forward", "sm90_forward repairs"]
    assert names(BACKWARD) == names(replace(BACKWARD, causal=False))
    assert names(BACKWARD) == ["sm90_delta", "sm90_lse", "sm90_backward", "sm90_finish"]
    assert len(names(replace(BACKWARD, measured=True))) == 8
    text = sources()
    for name in {*names(FORWARD), *names(BACKWARD)} - {"clear"}:
        assert f"{name.split()[0]}_kernel(SCALEDOT_PARAM" in text


def test_a_call_is_its_kernels_and_gaps_or_the_time_of_its_launches() -> None:
    assert call_model.us_of([Kernel("a", 1, 10), Kernel("b", 1, 20)]) == 30 + 2 * call_model.GAP
    short = replace(FORWARD, batch=1, heads=1, length=64)
    assert call_model.tflops(short) < 1


def test_a_recorded_forward_takes_longer_and_an_earlier_kernel_too() -> None:
    now = call_model.tflops(FORWARD)
    assert call_model.tflops(replace(FORWARD, direction="training")) < now
    assert call_model.tflops(replace(FORWARD, measured=True)) < now


def test_the_page_of_the_h200_and_how_far_off_the_model_is() -> None:
    found = call_model.measured()
    same = replace(FORWARD, measured=True)
    assert found[same] == 492.8
    assert call_model.nearest(FORWARD) == same
    assert call_model.nearest(replace(FORWARD, dim=256)) is None  # not measured
    # docs/gpu_kernels.md says so.
    errors = [abs(call_model.tflops(work) / figure - 1) for work, figure in found.items()]
    assert len(errors) == 23
    assert max(errors) < 0.11
    assert sum(errors) / len(errors) < 0.035


def test_the_printed_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_model, "LENGTHS", (1024,))
    assert call_model.main(["--heads", "16", "--kernels"]) == 0
    said = capsys.readouterr().out
    assert "forward causal d128 16 x 1024, 16 heads" in said
    assert "sm90_finish" in said
    assert "23 workloads of the H200: off by" in said
