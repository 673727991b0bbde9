"""Experimental: attention on several processes, with tensors that are sharded over the ranks of a DeviceMesh.

It is tested on CPUs with gloo, not on GPUs with NCCL. Its interface may change.

context_parallel_attention      the sequence is sharded: ring, all to all over heads, or both
shard, unshard, positions       cut a sequence for it, put one together again, and say which positions are here
tensor_parallel                 a MultiHeadAttention whose heads are sharded, by torch's parallelize_module
DTensor                         importing this package teaches DTensor how to shard the ops: by batch entry and head,
                                and packed sequences by head
measure, cost                   bytes sent and time waited; an estimate for a cluster with given links

torch.distributed (gloo, NCCL) transports the data. Start the processes with torchrun.
"""

from .._torch.dtensor import sdpa as _sdpa_rules  # noqa: F401  registers them
from .._torch.dtensor import varlen as _varlen_rules  # noqa: F401
from . import cost
from .attention import context_parallel_attention
from .modules import tensor_parallel
from .placement import Placement, positions, shard, unshard
from .transport import Traffic, measure

__all__ = [
    "Placement",
    "Traffic",
    "context_parallel_attention",
    "cost",
    "measure",
    "positions",
    "shard",
    "tensor_parallel",
    "unshard",
]
