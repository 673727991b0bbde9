"""Score functions of the user, from Python to the arguments of the ops.

- ``trace``: a function to a graph of operations, by torch.fx; ``operations``: those of torch that it may use
- ``recorder``: a trace under torch.compile
- ``graph``: the operations; ``derivative``: their derivatives; ``program``: the program that kernels run
- ``options``: functions that options of the ops compute
- ``aten``: the program as ATen operators, for exported models
- ``arguments``: a call's program and captured tensors
"""

from .arguments import score_arguments
from .options import known, known_options
from .program import has_mask
from .trace import ScoreMod

__all__ = ["ScoreMod", "has_mask", "known", "known_options", "score_arguments"]
