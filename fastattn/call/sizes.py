"""Comparisons of sizes, of which data may decide some: those of x[keep] and of nonzero.

For a compiler such a size is a symbol without a value. It cannot decide a comparison of that
before the program runs, and raises if Python asks for a bool. Here an undecided comparison counts
as true, and the program checks it when it runs; or, in `known`, as false. Claims of sizes are
combined by & and |: `and`, `or`, `not` and chains of comparisons ask for a bool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import SymBool

_is_traced = torch.compiler.is_dynamo_compiling


def holds(claim: Any) -> bool:
    """False if the claim is false. If it is undecided, the program checks it when it runs."""
    if not _is_traced() and not isinstance(claim, SymBool):
        return bool(claim)
    # The compiler has imported this module already.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    answer = guard_or_true(claim)
    if answer:
        torch._check(claim)
    return answer


def known(claim: Any) -> bool:
    """True if the claim is true; False if it is undecided."""
    if not _is_traced() and not isinstance(claim, SymBool):
        return bool(claim)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(claim)


def is_decided(size: Any) -> bool:
    """False for a size that data decides."""
    return known(size > 1) or known(size <= 1)


def agree(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """True if two shapes are equal."""
    if not _is_traced():
        try:
            return a == b  # the fastest
        except RuntimeError:  # undecided
            pass
    return len(a) == len(b) and all(holds(m == n) for m, n in zip(a, b))


def divides(m: Any, n: Any) -> bool:
    """True if n is a multiple of m; 0 is one of 0."""
    return holds(n == 0 if known(m == 0) else n % m == 0)


def broadcasts(m: Any, n: Any) -> bool:
    """True if a dimension of size m broadcasts to one of size n."""
    return known(m == 1) or holds((m == n) | (m == 1))
