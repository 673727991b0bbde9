"""Runs scaledot_bench on tiny shapes and checks its output, but no times. ctest runs this.

python tests/bench/check_program.py build/dev/tests/bench/scaledot_bench
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = sys.argv[1]
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def bench(*options: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([PROGRAM, *options], capture_output=True, text=True, timeout=300)
    assert ran.returncode == exit_code, f"{options}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran


def report(*options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        bench(*options, "--seconds", "0", "--json", str(file))
        return json.loads(file.read_text())


def check_numbers() -> None:
    found = report(
        *("--shape", "1x2x24x16,1x4:2x1:200x16:24", "--dtype", ",".join(DTYPES), "--pass", "forward,backward")
    )
    assert len(found["cases"]) == 2 * len(DTYPES) * 2
    assert found["threads"] == 1
    # Two products in the forward, five in the backward, two operations a multiply-add.
    flops = {
        ("1x2x24x16", "forward"): 2 * 2 * 24 * 24 * (16 + 16),
        ("1x2x24x16", "backward"): 2 * 2 * 24 * 24 * 5 * 16,
        ("1x4:2x1:200x16:24", "forward"): 2 * 4 * 200 * (16 + 24),
        ("1x4:2x1:200x16:24", "backward"): 2 * 4 * 200 * (3 * 16 + 2 * 24),
    }
    for case in found["cases"]:
        assert case["flops"] == flops[case["shape"], case["pass"]], case
        assert len(case["readings"]) >= 5
        assert abs(case["seconds"] / statistics.median(case["readings"]) - 1) < 1e-6
        assert abs(case["flops_per_second"] * case["seconds"] / case["flops"] - 1) < 1e-6
        assert ("peak" in case) == case["kernel"].startswith(("avx", "amx")), case
        if "peak" in case:
            assert abs(case["share_of_peak"] * case["peak_flops_per_second"] / case["flops_per_second"] - 1) < 1e-6
        if case["shape"] == "1x4:2x1:200x16:24" and case["pass"] == "forward" and found["capability"] != "default":
            assert case["bytes"] == 2 * 200 * (16 + 24) * DTYPES[case["dtype"]]
        else:
            assert "bytes" not in case


def check_options() -> None:
    both = ("--shape", "2x2x24x16", "--pass", "forward,backward", "--threads", "2")
    masks = [("--mask", name) for name in ("bool", "padding", "float", "grad")]
    for options in (("--causal",), ("--dropout", "0.1"), ("--softcap", "2"), ("--weights",), *masks):
        cases = report(*both, *options)["cases"]
        assert [case["pass"] for case in cases] == ["forward", "backward"]
        assert all(case["plain_seconds"] > 0 and case["options"] for case in cases), options
    assert report(*both, "--causal")["cases"][0]["flops"] == 2 * 2 * 2 * (24 * 25 // 2) * (16 + 16)
    assert "plain_seconds" not in report(*both, "--blhd")["cases"][0]
    named = report("--shape", "1x1x8x8", "--kernel", "default,reference")["cases"]
    assert [case["kernel"] for case in named] == ["default", "reference"]


def check_schedule() -> None:
    text = bench("--schedule", "8", "--shape", "1x2x300x16", "--pass", "forward,backward").stdout
    assert text.count("on one core") == 2
    assert text.count("  8 cores: phase    tasks") == 2
    cores = re.findall(r"^ +(\d+) +[\d.]+ [mu]?s +[\d.]+x +[\d.]+% +[\d.]+%$", text, re.MULTILINE)
    assert cores == ["1", "2", "4", "8", "16", "32", "64"] * 2, text


def check_refusals() -> None:
    for options, what in (
        ((), "nothing to do"),
        (("--shape", "1x2"), "'1x2' is no shape"),
        (("--shape", "1x1x5x5", "--kernel", "fastest"), "no kernel is called 'fastest'"),
        (("--shape", "1x1x5x5", "--dtype", "int8"), "'int8' is no dtype"),
        (("--shape", "1x1x5x5", "--dropout", "1"), "--dropout: got '1'"),
        (("--shape", "1x1x5x5", "--threads", "1.5"), "--threads: got '1.5'; needs an integer"),
        (("--shape", "1x1x5x5", "--json", "/no/such/folder/x.json"), "cannot write '/no/such/folder/x.json'"),
        (("--shape", "1x1x5:6x5", "--causal"), "as many queries as keys"),
        (("--set", "tiny", "--weights"), "the sets have their own options"),
        (("--shape", "1x1x5x5", "--schedule", "4", "--threads", "2"), "--schedule records on one thread"),
        (("--sideways",), "'--sideways' is no option"),
        (("5",), "'5' belongs to no option"),
    ):
        error = bench(*options, exit_code=2).stderr
        assert what in error, error
    assert "--schedule N" in bench("--help").stdout


for check in (check_numbers, check_options, check_schedule, check_refusals):
    check()
    print(f"{check.__name__}: ok")
