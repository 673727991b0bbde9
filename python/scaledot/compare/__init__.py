"""``python -m scaledot compare``: correctness and speed against torch on this machine.

============  =====================================================================================
`command`     the command line: options, progress, exit code; `parser`: its errors and a closed pipe
`shapes`      the notation for shapes; the named sets of shapes
`features`    the options of an attention call; cases = features x shapes x dtypes
`work`        one case: its tensors, our call, the peer's call, the oracle (`module_work`: nn.MultiheadAttention)
`sample`      the part of a large case that is checked against the oracle
`numerics`    the numerics rule
`check`       the rule, applied to a case
`timing`      two calls timed in turn
`run`         check a case, then time it
`noise`       whether the timings can be trusted
`machine`     the machine and the versions
`session`     the lines around the table, the progress bar, the files, the exit code
`report`      the table, the summary; `columns`: those that fit the terminal; `figure`: the plot
`models`      whole models (``--models``)
============  =====================================================================================
"""
