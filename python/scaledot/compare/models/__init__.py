"""``python -m scaledot compare --models``: whole models, with scaledot, with sdpa and with eager attention.

============  =====================================================================================
`command`     the options that go with ``--models``; progress, exit code
`catalogue`   the models: configurations with random weights, inputs, and how a side is chosen
`subject`     one model on its three sides, which share the parameters
`check`       the numerics rule, applied to results and gradients
`run`         checks a model, then times its passes on the three sides in turn
`report`      the table, the JSON file, the plot
============  =====================================================================================
"""
