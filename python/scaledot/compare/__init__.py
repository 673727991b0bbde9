"""``python -m scaledot compare``: correctness and speed against torch on this machine.

============  =====================================================================================
`command`     the options, and the way from them to the exit code
`shapes`      how shapes are written; the named sets
`features`    what an attention call can be asked for; cases = features x shapes x dtypes
`work`        one case: its tensors, our call, the peer's call, the oracle's part (`module_work`: nn.MultiheadAttention)
`check`       the numerics rule
`timing`      two calls timed in turn
`run`         check, then time
`report`      the table, the summary, the JSON file; `figure`: the plot
============  =====================================================================================
"""
