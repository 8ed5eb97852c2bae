"""The backends. Importing a module registers its backend. No backend imports another one."""

from . import cpu, cuda, reference, triton_tangents

__all__ = ["cpu", "cuda", "reference", "triton_tangents"]
