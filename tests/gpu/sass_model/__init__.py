"""A model of a Hopper multiprocessor that reads the kernels' machine code. tests/gpu/sass is its program."""
