"""Whole programs on several processes: a GPT that trains on a sharded sequence, and the compare command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import scaledot
import sharded_gpt
from context_parallel import ALL, RING, mesh_of
from ranks import Ranks


def run_training(method: Any, placement: str, dropout: float, steps: int) -> tuple[list[float], list[float]]:
    sharded = sharded_gpt.train(steps, mesh_of("2"), torch.float64, dropout, method=method, placement=placement)
    return sharded, sharded_gpt.train(steps, None, torch.float64, dropout)


@pytest.mark.parametrize(
    ("method", "placement", "dropout"), [(RING, "zigzag", 0.0), (RING, "contiguous", 0.2), (ALL, "zigzag", 0.2)]
)
def test_a_sharded_sequence_trains_as_a_whole_one(four: Ranks, method: Any, placement: str, dropout: float) -> None:
    answers = four.run(run_training, method, placement, dropout, 12)
    for sharded, alone in answers:
        assert sharded == answers[0][0]
        assert sharded == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < alone[0]


def test_the_example_learns() -> None:
    torch.set_num_threads(1)
    losses = sharded_gpt.train(130)
    assert losses[0] > 2.5
    assert losses[-1] < 0.5


def torchrun(ranks: int, *arguments: str) -> str:
    """Runs a program by torchrun; --standalone gives each its own port. Returns its output."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_as_a_program() -> None:
    said = torchrun(2, sharded_gpt.__file__, "--steps", "3")
    assert "  one process " in said
    assert "  2 processes " in said
    assert float(said.split("largest difference: ")[1]) < 1e-4


def test_compare(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readings, plot = tmp_path / "readings.json", tmp_path / "plot.png"
    options = ["--quick", "--dtype", "float32", "--length", "96", "--tflops", "400"]
    said = torchrun(
        2, "-m", "scaledot", "compare", "--distributed", *options, "--json", str(readings), "--plot", str(plot)
    )
    assert "WRONG" not in said
    assert "\n  1024 " in said
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(readings.read_text())
    assert [method["method"] for method in found["methods"]] == ["ring", "all_to_all"]
    ring, all_to_all = found["methods"]
    # Chunks have 24 positions of two KV heads of 64 + 64 elements. Both of rank 1 go to rank 0, the first of rank 0 to
    # rank 1.
    chunk = 24 * 2 * 128 * 4
    assert ring["sent"]["keys_values"] == 2 * chunk  # of the first rank, forward and backward
    assert all_to_all["sent"]["exchange"] == 2 * 48 * (4 * 64 + 1 * 128 + 4 * 64) * 4
    assert all(method[name] > 0 for method in found["methods"] for name in ("forward", "step", "model"))
    assert 0 <= ring["overlap"] <= 1
    assert set(found["scaling"]["1024"]) >= {"ring"}
    assert len(found["scaling"]) == 11


def test_compare_on_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    from scaledot.__main__ import main

    assert main(["compare", "--distributed", "--quick", "--dtype", "float32", "--length", "64"]) == 0
    assert "ranks: 1" in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        main(["compare", "--distributed", "--heads", "11"])
    assert raised.value.code == 2


def test_importing_scaledot_does_not_load_torch_distributed_tensor() -> None:
    check = "import scaledot, sys; assert 'scaledot.distributed' not in sys.modules; scaledot.distributed.shard"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=300)
    assert not hasattr(scaledot, "nothing")
