"""Calls of the Python functions with arguments drawn by hypothesis: `bash tests/fuzz/run api`.

Each call has to give the numbers of the float64 oracle, or an error whose first line names an argument.
"""
