"""Fuzzing: `bash tests/fuzz/run`. Each mode is a folder with a script `run`."""
