"""The suites of tests/external: no failure, only the listed skips, and no missing case."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from external import cutlass, gradients
from external.__main__ import main
from external.tally import Tally, table

pytestmark = pytest.mark.filterwarnings("ignore")  # the test code of torch and onnx warns
# The least number of cases. Other versions of torch and onnx may have more.
LEAST = {
    "op_info": {
        "forward and backward": 100,
        "dropout": 48,
        "dropout, statistics": 2,
        "noncontiguous": 100,
        "fake tensors": 100,
        "gradcheck": 25,
        "gradcheck, every element": 9,
        "gradgradcheck": 25,
        "gradgradcheck, every element": 4,
        "gradcheck, forward mode, the function itself": 25,
        "gradcheck, forward mode in a batch, the function itself": 13,
        "vmap": 170,
        "vmap, the function itself": 350,
        "vmap of grad, the function itself": 350,
        "in F.multi_head_attention_forward": 150,
    },
    "module_info": {
        "forward": 256,
        "numerics rule, against float64": 64,
        "results and gradients are torch's": 128,
        "gradcheck": 64,
        "gradgradcheck": 64,
        "noncontiguous": 128,
        "state_dict, pickle, deepcopy, repr": 256,
        "device and dtype": 256,
        "train and eval": 128,
        "other checks": 0,
        "converted Transformer modules": 400,
    },
    "onnx_attention": {"within onnx's tolerance": 93, "numerics rule, against float64": 93},
    "flash_attn": {
        "qkvpacked": 6,
        "varlen_qkvpacked": 6,
        "output": 6,
        "varlen_output": 6,
        "causal": 8,
        "varlen_causal": 8,
        "splitkv": 16,
        "kvcache": 20,
        "race_condition": 3,
        "bwd_overflow": 30,
        "bwd_transpose": 32,
        "bwd_varlen_overflow": 6,
        "deterministic": 8,
        "varlen_deterministic": 8,
    },
    "flex_attention": {"of attention-gym": 208, "of torch's tests": 216},
    "cutlass": {"operands": 11},
}
SKIPS = {
    "dropout_p > 0: gradcheck's own vmap lets nothing be drawn at random",
    "dropout_p > 0: torch answers F under vmap, and drops other weights than scaledot does",
    "dropout in training: torch drops other weights than scaledot does",
    "test_memory_format: torch skips it, nn.MultiheadAttention has no channels_last",
    "test_errors: its ModuleInfo has no error inputs",
    "test_check_inplace: it has no argument `inplace`",
    "test_cpu_gpu_parity, test_multiple_device_transfer: no CUDA device",
    "written in other operators (_expanded): there is no Attention node",
    "softcap and dropout: flash-attn has not both",
    "rotary without new keys: flash-attn skips it",
    "pages with left padding: flash-attn skips it",
    cutlass.NO_CUDA,
}


@pytest.mark.parametrize(("suite", "check"), [(suite, check) for suite, checks in LEAST.items() for check in checks])
def test_suite_has_no_failure(suite: str, check: str) -> None:
    torch.set_num_threads(1)
    module = importlib.import_module(f"external.{suite}")
    assert list(module.CHECKS) == list(LEAST[suite])
    tally = Tally(module.SUITE, check)
    module.CHECKS[check](tally)
    print(table([tally]))
    assert not tally.failed, "\n".join(tally.failed[:10])
    assert tally.passed >= LEAST[suite][check] or cutlass.NO_CUDA in tally.skipped
    assert set(tally.skipped) <= SKIPS


def test_flash_attns_rule_notices_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from external import flash_attn, flash_attn_call

    right, tally = flash_attn_call.flash_attn_func, Tally("suite", "causal")

    def without_left_side(*tensors: torch.Tensor, **options: Any) -> Any:
        return right(*tensors, **options | {"window_size": (-1, -1)})

    monkeypatch.setattr(flash_attn_call, "flash_attn_func", without_left_side)
    flash_attn.CHECKS["causal"](tally)
    assert len(tally.failed) >= 2
    assert all("error" in failure for failure in tally.failed)


def test_a_failure_is_counted_and_named() -> None:
    tally = Tally("suite", "check")
    for number in range(3):
        with tally.case(f"case {number}"):
            if number == 1:
                raise ValueError("one is wrong")
    tally.skip("for a reason", 4)
    assert (tally.passed, tally.failed) == (2, ["case 1: ValueError: one is wrong"])
    lines = table([tally]).splitlines()
    assert lines[1].split() == lines[2].replace("all", "suite check").split() == ["suite", "check", "2", "4", "1"]
    assert lines[3:] == [
        "skipped, suite, check: 4: for a reason",
        "FAILED, suite, check: case 1: ValueError: one is wrong",
    ]


def test_the_command_prints_counts_and_fails_without_a_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statistics"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "2", "0", "0"]
    assert main(["no such check"]) == 1


def test_gradients_of_hard_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/gradients.md: all of scaledot's numbers are finite, and its errors in float16 are small but for dQ, dK."""
    gradients.main(["inputs", "--dtype", "float16", "--seeds", "1"])
    rows = [line.strip("|").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == sum(1 for _ in gradients.inputs(0))
    for name, ours, *_ in rows:
        errors = [float(error) for error in ours.split()]
        assert max(errors) < 100, name
        assert max(errors[0], *errors[3:]) < 2, name


@pytest.mark.parametrize(("option", "least"), [("--seeds", 1), ("--steps", 20)])
def test_gradients_of_too_few(option: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gradients.main(["training", option, str(least - 1)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"external.gradients: error: {option}: got {least - 1}; needs at least {least}"


def test_training_of_the_page_on_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gradients.main(["training", "--seeds", "1", "--steps", "21", "--plot", str(tmp_path / "losses.png")])
    assert capsys.readouterr().out.count("never") == len(gradients.BIASES) * len(gradients.RUNS)
    assert (tmp_path / "losses.png").stat().st_size > 10_000
