"""The error for a result tensor with other sizes than the call that writes it.

csrc/common/extents.h compares the sizes before the library writes; this file makes the message.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...call.spec import ARGUMENTS, DIFFERENTIABLE, RESULTS, AttentionSpec
from . import libraries

_LETTERS = {  # dimensions of what passes write, except gradients
    "out": RESULTS["out"],
    "lse": RESULTS["normaliser"],
    "weights": RESULTS["weights"],
    "out_t": RESULTS["out"],
    "lse_t": RESULTS["lse"],
}


def refused(status: int, spec: AttentionSpec, after: Mapping[str, Tensor | None]) -> RuntimeError:
    """The error for this status. after: the pass's tensors beside those of the call, by field."""
    name = libraries.WRITTEN[status - libraries.BAD_EXTENT]
    x = after[name]
    got = None if x is None else tuple(x.shape)
    return RuntimeError(
        f"{name}: got shape {got}, expected {expected(spec, name)}; nothing was written. "
        "fastattn made this tensor itself: please report the call"
    )


def expected(spec: AttentionSpec, name: str) -> str:
    """The shape that a written tensor must have, in letters and numbers."""
    B, M, N = spec.memory_sizes
    sizes = {x: getattr(spec, x) for x in ("H", "Hk", "D", "Dv")} | {"2": 2, "B": B, "M": M, "N": N}
    of = name[1:] if name[1:] in DIFFERENTIABLE else ""
    a = ARGUMENTS.get(of)
    letters = (a.shapes[0] if a else _LETTERS[name]).split()
    if name == "weights" and spec.average_heads:
        sizes["H"] = 1
    if of in spec.given:  # gradients of mask and sinks
        sizes |= {"B": spec.B, "M": spec.M, "N": spec.N}
        letters = ["B", *(x for x in letters if x != "B")] if spec.packed else letters
    text = f"({', '.join(letters)}) = {tuple(sizes[x] for x in letters)}"
    if a is None or not a.broadcast:
        return text
    return f"{text}, or 1 for {'H, M and N' if spec.packed else 'any of them'}"
