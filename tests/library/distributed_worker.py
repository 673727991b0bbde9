"""One of several processes that train a layer together: python distributed_worker.py RANK PROCESSES FILE

The processes meet at FILE. Each wrapper (DDP, FSDP2) has to give the gradients and the step of one process that has all
samples, bitwise the same on all ranks.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import scaledot
from scaledot.dropin import torch_nn

SAMPLES = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = scaledot.MultiHeadAttention(16, 4, num_kv_heads=2)
        self.second = torch_nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, is_causal=True)[0]
        result: Tensor = self.second(x, x, x)[0]
        return result


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The gradients, then one step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return gradients


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(name: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    found = {key.removeprefix("module."): tensor for key, tensor in found.items()}
    assert found.keys() == wanted.keys(), name
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[key], msg=lambda m, key=key: f"{name}, {key}: {m}")
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        assert all(torch.equal(other, tensor) for other in others), f"{name}, {key}: ranks differ"


def main(rank: int, processes: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=processes)
    torch.manual_seed(0)
    plain = Model()
    x = torch.randn(SAMPLES, 7, 16)
    mine = x.chunk(processes)[rank]
    distributed = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (processes,))
    for layer in (sharded.first, sharded.second, sharded):
        fully_shard(layer, mesh=mesh)

    wanted = step(plain, x)
    state = plain.state_dict()
    check("DDP gradients", step(distributed, mine), wanted)
    check("DDP step", distributed.state_dict(), state)
    check("FSDP2 gradients", step(sharded, mine), wanted)
    check("FSDP2 step", {name: whole(p) for name, p in sharded.state_dict().items()}, state)
    dist.destroy_process_group()
    print("all is well", flush=True)
    # DTensor's caches keep the group alive. Its threads can abort the process while Python ends (pytorch#190489).
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
