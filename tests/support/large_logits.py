"""Rows with all logits near 2^20, from q.k itself. A float32 LSE near 2^20 has steps of 1/8, so the
part of it that rounding loses affects every weight of the row. Plain kernels get such rows;
tests/support/large_logit_rows.py has rows that a mask moves far from zero.

The logits are whole numbers, exact in every dtype: the float64 oracle has the same.
"""

import torch

import fastattn
from tests.support.cases import Dims, build

SIZE = 2**10  # of q and of k, in a column of their own


def far_logits(dtype, M=37, N=70, H=2, Hk=1):
    """Logits of 2^20 - 1, 2^20 and 2^20 + 1. The other columns of q and k have zero products."""
    problem = build(Dims(1, H, Hk, M, N, 16, 16), (), dtype)
    problem.q[..., 8:], problem.k[..., 2:8] = 0, 0
    problem.q[..., 0], problem.k[..., 0] = SIZE, SIZE
    problem.q[..., 1], problem.k[..., 1] = 1, torch.arange(N) % 3 - 1
    problem.kwargs |= dict(scale=1.0)
    problem.name += ":far_logits"
    return problem


def complaints(problem, backend=None):
    """Complaints about out, dk, dv and the weights. In dq the large column hides the others."""
    tolerance = 1e-4 if problem.q.dtype == torch.float32 else 2e-2
    wide = problem.to(torch.float64)
    exact, found = wide.run(fastattn.reference.attention), problem.run(attention(backend))
    kwargs = dict(scale=1.0)
    exact["weights"] = torch.softmax(wide.q @ wide.k.mT, -1)
    found["weights"] = fastattn.attention_weights(problem.q, problem.k, **kwargs, backend=backend)
    for name in ("out", "dk", "dv", "weights"):
        error = (found[name].double() - exact[name]).abs().max() / exact[name].abs().max()
        if not error <= tolerance:
            yield f"{problem.name} {name}: relative error {error:.3g}, over {tolerance}"


def attention(backend):
    return lambda *tensors, **kwargs: fastattn.attention(*tensors, **kwargs, backend=backend)
