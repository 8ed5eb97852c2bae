"""What the Triton backends need at launch: arguments, tiles, compiled kernels, autotuning, a C
compiler."""
