"""From a checked call to a kernel: PyTorch's subsystems on the way, and derivatives of passes."""
