"""Many short runs in the same processes, each in a process group and a mesh that it creates and destroys."""

from __future__ import annotations

import datetime
import gc
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from faults import stage
from faults.rank import held
from scaledot.distributed import context_parallel_attention, shard

RANKS = 4
PATIENCE = 120.0  # seconds for one run on a busy machine
WARM = 20  # runs before files and threads are counted
PLANS: list[tuple[Any, tuple[int, ...]]] = [
    ("ring", (4,)), ("all_to_all", (4,)), (("ring", "all_to_all"), (2, 2)), (("ring", "all_to_all"), (4, 1)),
]  # fmt: skip


def one(run: int, rank: int, folder: str) -> None:
    draw = random.Random(run)  # the same on every rank
    method, shape = draw.choice(PLANS)
    length, causal, seed = draw.randint(0, 70), draw.random() < 0.5, draw.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(1, 4, length, 8, generator=generator, dtype=torch.float64) for _ in range(4)]
    leaves = [t.requires_grad_() for t in whole[:3]]
    wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    expected = [wanted, *torch.autograd.grad(wanted, leaves, whole[3])]
    dist.init_process_group(
        "gloo", f"file://{folder}/{run}", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=PATIENCE / 2)
    )
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("first", "second")[: len(shape)])

        def cut(tensor: Tensor) -> Tensor:
            return shard(tensor.detach(), mesh, 2)

        local = [cut(t).requires_grad_() for t in leaves]
        output = context_parallel_attention(*local, mesh, is_causal=causal, method=method)
        found = [output, *torch.autograd.grad(output, local, cut(whole[3]))]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.detach(), cut(theirs))
        dist.barrier()  # a rank that ends early would close the connection to one that still waits
    finally:
        dist.destroy_process_group()


def serve(rank: int, runs: int, folder: str, pipe: Connection) -> None:
    """Sends the number of each run when it is done, and what is left behind after all."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    before = None
    for run in range(runs):
        if run == min(WARM, runs // 2):
            gc.collect()
            time.sleep(0.5)
            before = held()
        one(run, rank, folder)
        pipe.send(run)
    gc.collect()
    time.sleep(0.5)
    assert before is not None
    after = held()
    pipe.send(("left", after[0] - before[0], len(after[1]) - len(before[1])))


def run(runs: int) -> tuple[int, list[str]]:
    """(the number of runs that all ranks have done, what went wrong)."""
    done, wrong = [0] * RANKS, []
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            here, there = stage.context().Pipe()
            process = stage.context().Process(target=serve, args=(rank, runs, folder, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        listening = {pipe: rank for rank, pipe in enumerate(pipes)}
        while listening:
            ready = wait(list(listening), PATIENCE)
            if not ready:
                wrong += [f"rank {rank} hung after {done[rank]} runs" for rank in listening.values()]
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = listening[pipe]
                try:
                    said = pipe.recv()
                except (EOFError, ConnectionError):
                    wrong.append(f"rank {rank} ended after {done[rank]} runs")
                    del listening[pipe]
                    continue
                if isinstance(said, int):
                    done[rank] = said + 1
                    continue
                del listening[pipe]
                if any(grown > 0 for grown in said[1:]):
                    wrong.append(f"rank {rank} has {said[1]} more threads and {said[2]} more open files")
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()
    return min(done), wrong
