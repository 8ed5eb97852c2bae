"""What several backends need: devices, errors of CUDA, checks of values, passes by sequences."""
