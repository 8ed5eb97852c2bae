"""The backends with kernels in csrc/: `cpu` and `cuda`, on a `launcher` that packs arguments."""
