"""DistributedDataParallel and FSDP2: two processes over gloo on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

WORKER = Path(__file__).resolve().parents[2] / "library" / "distributed_worker.py"
PROCESSES = 2
SECONDS = 240  # it takes a few on two idle cores


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
def test_ddp_and_fsdp2(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(rank), str(PROCESSES), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
        assert "all is well" in output
