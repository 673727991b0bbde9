"""What torch is told of our ops: rules for its transforms and tools; and the kernel that torch itself would choose.

inputs.py          the arguments of the ops by name, once for all rules
schema.py          arguments of a call by name
vmap.py            torch.vmap of scaledot::sdpa; varlen_vmap.py of scaledot::varlen
dtensor/           sharding rules, registered by scaledot.distributed
decompositions.py  run_decompositions and ONNX: core ATen operators
flops.py           torch.utils.flop_counter
on_import.py       registers where torch imports a module late
out.py             where `out` cannot be served
fx.py              torch.fx.symbolic_trace of the modules
saved_seeds.py     compiled backwards take the dropout seed of their forward
sdpa_choice.py     which of torch's kernels F.sdpa would run
"""
