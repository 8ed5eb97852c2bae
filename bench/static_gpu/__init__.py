"""Machine code of the GPU kernels, compiled and counted without a GPU."""
