"""The tensor arguments of scaledot::sdpa, for the rules of torch.vmap and DTensor."""

from __future__ import annotations

from .._load import OPS
from .schema import names, tensors_first

__all__ = ["DIFFERENTIABLE", "DIMS_LESS", "INPUTS"]

INPUTS = names(OPS.sdpa.default)[: tensors_first(OPS.sdpa.default)]  # in the order of the schema
# In the order of sdpa_backward's results, which are "grad_query" and so on.
DIFFERENTIABLE = tuple(result.name.removeprefix("grad_") for result in OPS.sdpa_backward.default._schema.returns)
# Dimensions of query that these lack: (..., heads) and (..., heads, distances) in place of (..., heads, rows, columns).
DIMS_LESS = {"alibi_slopes": 2, "relative_bias": 1}
