"""A file for each backend; importing it registers the backend. They do not know each other."""

from . import cpu, cuda, reference, triton_tangents

__all__ = ["cpu", "cuda", "reference", "triton_tangents"]
