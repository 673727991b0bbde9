"""Past one machine: attention whose tensors are sharded over the ranks of a torch.distributed DeviceMesh.

context_parallel_attention      the sequence is sharded: ring, all to all over heads, or both
shard, unshard, positions       a sequence cut for it, and put together again
tensor_parallel                 a MultiHeadAttention whose heads are sharded, by torch's parallelize_module
DTensor                         importing this module teaches DTensor how the ops shard: batch and heads, and packed
                                sequences by heads
measure, cost                   bytes sent and time waited; what a cluster of given links would take

Transport is torch.distributed (gloo, NCCL), launching is torchrun's.
"""

from . import cost, varlen_sharding  # noqa: F401
from .attention import context_parallel_attention
from .placement import Placement, positions, shard, unshard
from .sharding import tensor_parallel
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
