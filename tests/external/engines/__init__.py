"""Other engines' attention on a CPU, timed in turn with scaledot's: `python -m external.engines`.

`workloads` has the shapes as data, and their tensors; `ours` and `peers` have the calls; `comparison` checks and times.
No test runs an engine: tests/python/project/test_engines.py has stand-ins.
"""
