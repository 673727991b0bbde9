"""tests/gpu/sass on short texts of machine code, without nvcc and NVIDIA's tools."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.sass_model import clock, loops, pipes, registers, table
from gpu.sass_model.disassembly import Instruction, kernel_name, parse
from gpu.sass_model.table import Figures, Stored

PROGRAM = Path(__file__).resolve().parents[2] / "gpu" / "sass"
SYMBOL = "_ZN8scaledot12_GLOBAL__N_119sm90_forward_kernelINS_17Sm90ForwardConfigINS_8BFloat16ELi64ELi64ELb0EEEEEvv"

# Two control words of `cuobjdump -sass`: the second one's upper bits hold the stall and the counters.
LISTING = f"""
\t\tFunction : {SYMBOL}
        /*0000*/                   MUFU.EX2 R4, R4 ;            /* 0x0000000400047308 */
                                                                /* 0x000e620000000800 */
        /*0010*/              @!P0 FADD R5, R5, R4 ;            /* 0x0000000405058221 */
                                                                /* 0x002fc80000000000 */
\t\tFunction : another
        /*0000*/                   EXIT ;                       /* 0x000000000000794d */
                                                                /* 0x000fea0003800000 */
"""


def code_of(*texts: str) -> list[Instruction]:
    return [Instruction(16 * k, text) for k, text in enumerate(texts)]


# A kernel: the producer gives registers back, and the consumers run a loop from 0x40 with a rare way through it.
KERNEL = code_of(
    "@P0 BRA 0x130",  # 00
    "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8",
    "HGMMA.64x128x16.F32.BF16 R88, gdesc[UR4], !UPT, gsb0",  # the first tile, before the loop
    "MOV R7, 0x3",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24",  # 40: the loop
    "HGMMA.64x64x16.F32.BF16 R24, R152, gdesc[UR4], R24, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "@!P1 BRA 0xb0",  # 70: over the masked scores
    "FSEL R24, R24, -INF , P2",
    "FSEL R25, R25, -INF , P2",
    "FSEL R26, R26, -INF , P2",
    "FMNMX R1, R24, R25, !PT",  # b0
    "MUFU.EX2 R24, R24",
    "IMAD R3, R3, R4, R5",
    "R2UR UR4, R3",
    "@P3 BRA 0x40",  # f0
    "STS [R4], R24",
    "EXIT",
    "NOP",
    "USETMAXREG.DEALLOC.CTAPOOL 0x28",  # 130
    "MOV R39, RZ",
    "EXIT",
)


def test_instructions_and_their_control_fields() -> None:
    functions = parse(LISTING)
    assert list(functions) == [SYMBOL, "another"]
    exp2, add = functions[SYMBOL]
    assert (exp2.address, exp2.text, exp2.opcode, exp2.name) == (0, "MUFU.EX2 R4, R4", "MUFU.EX2", "MUFU")
    assert (exp2.stall, exp2.writes, exp2.reads, exp2.waits) == (1, 1, 7, 0)
    assert (add.name, add.guarded, add.stall, add.waits) == ("FADD", True, 4, 2)


def test_kernel_names() -> None:
    assert kernel_name(SYMBOL) == "forward_bfloat16_64_plain"
    assert kernel_name(SYMBOL.replace("ELi64ELi64E", "ELi192ELi128E")) == "forward_bfloat16_192x128_plain"
    assert kernel_name(SYMBOL.replace("ELb0E", "ELb0ELb1E")) == "forward_bfloat16_64_plain_packed"
    assert kernel_name(SYMBOL.replace("ELb0E", "ELb0ELb1ELb1E")) == "forward_bfloat16_64_plain_quantised"
    backward = "_ZN1a20sm90_backward_kernelINS_18Sm90BackwardConfigINS_7Float16ELi256ELi256ELb1EEEEEvv"
    assert kernel_name(backward) == "backward_float16_256_general"
    assert kernel_name(backward.replace("20sm90_backward", "17sm90_delta")) == "delta_float16_256_general"
    assert kernel_name("_ZN8scaledot18sm90_finish_kernelINS_8BFloat16ELb0EEEvv") is None


def test_the_steady_path_takes_all_products_and_no_rare_branch() -> None:
    path = loops.steady_path(KERNEL)
    assert [instruction.address for instruction in path] == [*range(0x40, 0x80, 16), *range(0xB0, 0x100, 16)]


def test_an_outer_loop_is_not_the_steady_one() -> None:
    code = code_of(
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",
        "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",  # 20
        "@P0 BRA 0x20",
        "@P1 BRA 0x0",
        "EXIT",
    )
    assert [instruction.address for instruction in loops.steady_path(code)] == [0x20, 0x30]


def test_of_two_loops_the_shorter_one_is_steady() -> None:
    code = code_of(
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
        "FSEL R1, R1, R2, P1",  # masks
        "@P0 BRA 0x0",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",  # 30
        "@P0 BRA 0x30",
        "EXIT",
    )
    assert [instruction.address for instruction in loops.steady_path(code)] == [0x30, 0x40]


def test_outside_the_loop_is_the_rest_of_the_loop_around_it() -> None:
    code = code_of(
        "MOV R1, RZ",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",  # 10: a query tile's first scores
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",  # 20
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
        "@P0 BRA 0x20",
        "@!P2 BRA 0x80",
        "STG.E.128 desc[UR6][R2.64], R24",  # the low part of the output, if it is wanted
        "NOP",
        "STSM.16.MT88.4 [R2], R24",  # 80
        "@P1 BRA 0x10",
        "EXIT",
    )
    assert [x.address for x in loops.outside_path(code, False)] == [0x10, 0x50, 0x80, 0x90]
    assert [x.address for x in loops.outside_path(code, True)] == [0x10, 0x50, 0x60, 0x70, 0x80, 0x90]


def test_outside_the_loop_is_the_rest_of_a_kernel_without_one_around_it() -> None:
    # From the jump to the loop and through it; the producer's code is on another way.
    assert [x.address for x in loops.outside_path(KERNEL, False)] == [0, 0x10, 0x20, 0x30, 0x100, 0x110]
    found = table.outside_of(KERNEL)
    assert (found.instructions, found.stored_instructions) == (6, 6)
    assert found.cycles > 0


def test_bsync_goes_where_bssy_said() -> None:
    code = code_of(
        "BSSY B0, 0x50",
        "@P0 BRA 0x40",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
        "BSYNC B0",  # 30: to 50
        "EXIT",
        "@P1 BRA 0x0",  # 50
        "EXIT",
    )
    assert [instruction.address for instruction in loops.steady_path(code)] == [0, 0x10, 0x20, 0x30, 0x50]


def test_code_without_products_has_no_steady_loop() -> None:
    with pytest.raises(loops.NoLoopError, match="no loop has an HGMMA"):
        loops.steady_path(code_of("FADD R1, R1, R2", "@P0 BRA 0x0", "EXIT"))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("MUFU.EX2 R4, R4", "mufu"),
        ("@P1 FSETP.GT.AND P0, PT, R1, R2, PT", "alu"),
        ("FMNMX R1, R1, R2, !PT", "alu"),
        ("FFMA.FTZ R1, R1, R2, R3", "fma"),
        ("IMAD.MOV.U32 R1, RZ, RZ, R2", "imad"),
        ("UIADD3 UR4, UR4, 0x2, URZ", "uniform"),
        ("UTMALDG.4D [UR8], [UR4]", "other"),
        ("SHFL.BFLY PT, R1, R2, 0x1, 0x1f", "shared"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3", "other"),
    ],
)
def test_units(text: str, kind: str) -> None:
    assert pipes.kind_of(Instruction(0, text)) == kind


def test_products() -> None:
    first, second = (pipes.Product.of(KERNEL[k]) for k in (4, 5))
    assert (first.columns, first.from_registers, first.ends_group, first.cycles) == (128, False, False, 64)
    assert (second.columns, second.from_registers, second.ends_group, second.cycles) == (64, True, True, 32)
    narrow = pipes.Product.of(Instruction(0, "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"))
    assert (narrow.tensor_cycles, narrow.cycles) == (16, 24)  # its operands take longer to arrive


def test_time_of_a_loop_that_one_unit_limits() -> None:
    # MUFU is busy for 8 cycles, of each of the warps.
    path = [Instruction(16 * k, "MUFU.EX2 R4, R4") for k in range(10)]
    assert clock.period(path, 1) == 80
    assert clock.period(path, 3) == 240
    # Stall counts delay one warp; two warps fill each other's gaps.
    slow = [Instruction(16 * k, "FADD R4, R4, R5", stall=4) for k in range(10)]
    assert clock.period(slow, 1) == clock.period(slow, 2) == 40


def test_time_of_products_that_are_waited_for() -> None:
    path = code_of("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert clock.period(path, 1) > 64 + clock.PRODUCT_LATENCY
    assert clock.period(path, 3) == pytest.approx(3 * 64, abs=2)  # the queue is never empty


def test_barriers_as_turns_and_as_meetings() -> None:
    work = ["MUFU.EX2 R4, R4"] * 4
    turns = code_of("BAR.SYNC.DEFER_BLOCKING R1, 0x100", *work, "BAR.ARV R2, 0x100")
    assert clock.period(turns, 2) >= 2 * (32 + clock.TURN_LATENCY) - 16
    meeting = code_of(*work, "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100")
    assert clock.period(meeting, 2) >= 7 * 8 + clock.MEETING_LATENCY


def test_registers_that_warps_have_and_name() -> None:
    assert registers.producer(KERNEL) == registers.Role(limit=40, named=40)
    assert registers.consumer(KERNEL) == registers.Role(limit=232, named=153)
    assert registers.consumers(KERNEL) == 2
    assert table.register_problems("it", KERNEL) == []
    wrong = [dataclasses.replace(x, text="MOV R40, RZ") if "R39" in x.text else x for x in KERNEL]
    assert table.register_problems("it", wrong) == ["it: the producer name register R40; they have 40"]


def test_figures() -> None:
    found = table.figures_of(KERNEL)
    assert (found.instructions, found.consumers, found.local) == (9, 2, 0)
    assert (found.tensor, found.mufu, found.alu, found.issue) == (192, 16, 8, 18)
    assert 0 < found.overlapped <= 100


def figures(instructions: int, local: int = 0) -> Figures:
    return Figures(instructions, 2, 1024, 512, 300, 2 * instructions, 80, local)


def test_what_the_stored_table_allows() -> None:
    stored = {"a": figures(1000)}
    assert table.problems({"a": figures(1030)}, stored) == []
    assert table.problems({"a": figures(1031)}, stored) == [
        "a: got 1031 instructions a tile; needs at most 3% more than 1000"
    ]
    assert "local memory" in table.problems({"a": figures(1000, 1)}, stored)[0]
    assert table.problems({}, stored) == ["a: the library lacks it; needs the kernel, or --write"]
    assert table.problems({"b": figures(1)}, {}) == ["b: the stored table lacks it; needs --write"]


def test_the_stored_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    stored = Stored.read()
    stored.write(file)
    assert file.read_text() == table.STORED.read_text()
    # Two dtypes; four widths; plain, general and packed; forward quantised, and in clusters with three of the widths.
    assert len(stored.kernels) == 2 * (4 * 3 + 4 * 4 + 3)
    assert set(stored.flash_attention_3) <= set(stored.kernels)
    # All kernels but the general ones, and the first ones of the backward.
    loops_outside = {name for name in stored.outside if name.startswith(("forward", "backward"))}
    assert loops_outside == {name for name in stored.kernels if "general" not in name}
    assert len(stored.outside) == len(loops_outside) + 2 * 4 * 2
    rows = table.rows_of({"forward_bfloat16_128_plain": figures(500)}, stored)
    assert "500" in table.text_of(rows)


def test_bad_arguments(tmp_path: Path) -> None:
    def said(*words: str) -> str:
        done = subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        return done.stderr

    assert "--write: got no --nvcc; needs the version" in said("--write")
    assert "which is no file" in said("--cache", str(tmp_path), str(tmp_path / "none.so"))
