"""``python -m scaledot compare``: correctness and speed against torch on this machine.

============  =====================================================================================
`command`     the command line: options, progress, exit code
`shapes`      the notation for shapes; the named sets of shapes
`features`    the options of an attention call; cases = features x shapes x dtypes
`work`        one case: its tensors, our call, the peer's call, the oracle (`module_work`: nn.MultiheadAttention)
`sample`      the part of a large case that is checked against the oracle
`check`       the numerics rule
`timing`      two calls timed in turn
`run`         check a case, then time it
`noise`       whether the timings can be trusted
`machine`     the machine and the versions
`output`      the progress bar; the file of ``--json``
`report`      the table, the summary, the JSON file; `figure`: the plot
`models`      whole models (``--models``)
============  =====================================================================================
"""
