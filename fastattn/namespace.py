"""The name of this package, and those of its operators, which begin with it.

An installed package is `fastattn`. Hugging Face's `kernels` imports each copy under a name of its
own, and two versions may be in one process: the operators of each have the name of its package.
"""

from __future__ import annotations

from typing import Any

import torch

PACKAGE = __name__.partition(".")[0]


def add_op_namespace_prefix(name: str) -> str:
    """The qualified name of an operator. kernel-builder looks for this function in the decorators
    of torch.library, and refuses others."""
    return f"{PACKAGE}::{name}"


def operator(name: str) -> Any:
    """The registered operator."""
    return getattr(getattr(torch.ops, PACKAGE), name)
