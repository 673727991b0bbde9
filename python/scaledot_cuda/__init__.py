"""The CUDA kernels of scaledot: lib/libscaledot_cuda.so. Importing scaledot loads it."""
