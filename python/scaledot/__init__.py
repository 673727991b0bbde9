"""scaledot: scaled dot-product attention for PyTorch, forward and backward, with every option fused.

scaledot.scaled_dot_product_attention   torch's function, and weights, lse, window, softcap, ALiBi, ...
scaledot.MultiHeadAttention             the module
scaledot.dropin                         the same kernels behind interfaces that models already use
scaledot.varlen_attention               the same over packed sequences, without padding
scaledot.explain, explain_varlen        which kernel a call takes, and why
scaledot.save_for_backward              whether calls save more than their results for the backward
scaledot.row_invariant                  a row gets the same bits in every call that has it
scaledot.masks, scaledot.plot           boolean masks, heat maps
scaledot.BlockMask                      masks by blocks: what they hide costs nothing
scaledot.distributed                    sharded and context-parallel attention on torch.distributed
python -m scaledot compare              how it compares with torch on this machine
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

# First: it checks torch and loads the ops.
from ._load import build_info, cmake_prefix_path, cpu_capability  # isort: skip

from . import dropin, masks, plot, score_mods
from ._torch import decompositions, flops, saved_seeds, varlen_vmap, vmap  # noqa: F401  they register rules with torch
from .block_mask import BlockMask
from .explanation import Explanation, VarlenExplanation, explain, explain_varlen
from .functional import scaled_dot_product_attention
from .merge import merge_sinks, merge_states
from .modules import MultiHeadAttention
from .settings import keep_weights, row_invariant, save_for_backward
from .varlen import varlen_attention

__version__: str = build_info()["version"]

__all__ = [
    "BlockMask",
    "Explanation",
    "MultiHeadAttention",
    "VarlenExplanation",
    "__version__",
    "build_info",
    "cmake_prefix_path",
    "cpu_capability",
    "dropin",
    "explain",
    "explain_varlen",
    "keep_weights",
    "masks",
    "merge_sinks",
    "merge_states",
    "plot",
    "row_invariant",
    "save_for_backward",
    "scaled_dot_product_attention",
    "score_mods",
    "varlen_attention",
]

if TYPE_CHECKING:
    from . import distributed as distributed
else:

    def __getattr__(name: str) -> ModuleType:
        """Imports scaledot.distributed when it is first used: torch.distributed.tensor takes a second to load."""
        if name == "distributed":
            return importlib.import_module(".distributed", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the modules that define them."""
    return sorted({*__all__, "distributed", *(name for name in globals() if name.startswith("__"))})
