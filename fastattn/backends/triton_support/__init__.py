"""What the Triton backends need at launch: tiles, compiled kernels, autotuning, a C compiler."""
