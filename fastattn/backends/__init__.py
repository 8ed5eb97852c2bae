"""A file for each backend; importing it registers the backend. They do not know each other."""

from . import cpu, cuda, reference, triton

__all__ = ["cpu", "cuda", "reference", "triton"]
