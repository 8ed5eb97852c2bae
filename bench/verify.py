"""Judge a peer's output and gradients against the oracle in float64, before any timing.

The oracle runs on blocks of query rows, so that it never holds an N x N matrix in float64, and on
as many heads as a fixed amount of work allows; the verdict says which heads those were. Rows and
keys are never sampled: dk and dv of a head sum over all of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import fastattn

from .cases import TRAINING, Case
from .peers import Peer

# dtype -> (whole tensor, worst row): bounds on |x - oracle| / |oracle| in the 2-norm. A row is
# judged against the larger of its own norm and the tensor's mean row norm, because the gradients
# of early causal rows cancel to nearly nothing. torch's own kernels measure about
# (6e-7, 2e-6) and (4e-3, 1e-2): a kernel 1% off fails, and rounding does not.
BOUNDS = {"float32": (5e-6, 2e-5), "bfloat16": (7e-3, 4e-2)}
ORACLE_FLOPS = {"cpu": 6e9, "cuda": 4e12}
BLOCK_ELEMENTS = 1 << 21  # of the score matrix, over all the heads judged


@dataclass
class Verdict:
    """reason is "" when everything asked for passed; errors are whole-tensor relative errors."""

    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)


class Oracle:
    """The float64 answer for some heads of one case."""

    def __init__(self, case: Case, passes: tuple[str, ...]):
        self.case = case
        self.inputs = case.tensors()
        self.heads = judged_heads(case)
        self.expected = self._compute(gradients=TRAINING in passes)

    def scope(self, what: str) -> str:
        """What a pass is judged on, in words."""
        total = self.case.B * self.case.H
        some = ", ".join(map(str, self.heads[:8])) + ("…" if len(self.heads) > 8 else "")
        heads = f"all {total} heads" if len(self.heads) == total else f"head {some} of {total}"
        return f"{'out, dq, dk, dv' if what == TRAINING else 'out'}: every row of {heads}"

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """The judged heads of a (B, H, N, D) tensor in float64, as (heads, N, D)."""
        return x.detach().flatten(0, 1)[self.heads].double()

    def _compute(self, gradients: bool) -> dict[str, torch.Tensor]:
        q, k, v, dout = (self.select(x).unsqueeze(0) for x in self.inputs)
        leaves = [x.requires_grad_(gradients) for x in (q, k, v)]
        causal = self.case.mask == "causal"
        n = self.case.N
        step = max(1, BLOCK_ELEMENTS // (n * len(self.heads)))
        expected = {"out": torch.empty_like(q)}
        if gradients:
            expected |= {name: torch.zeros_like(x) for name, x in zip(("dq", "dk", "dv"), leaves)}
        for start in range(0, n, step):
            stop = min(start + step, n)
            # Rows start:stop of a causal square are the last rows of a shorter one.
            keys = stop if causal else n
            block = fastattn.reference.attention(
                q[:, :, start:stop],
                k[:, :, :keys],
                v[:, :, :keys],
                causal="bottom_right" if causal else False,
            )
            expected["out"][:, :, start:stop] = block.detach()
            if gradients:
                parts = torch.autograd.grad(block, leaves, dout[:, :, start:stop])
                for name, part in zip(("dq", "dk", "dv"), parts):
                    expected[name] += part
        return {name: x[0] for name, x in expected.items()}

    def judge(self, peer: Peer, what: str) -> Verdict:
        """Run one pass of the case exactly as it will be timed, and compare."""
        try:
            actual = compute(peer, self.case, self.inputs, what)
        except Exception as error:  # whatever a peer raises, it must show in the table
            return Verdict(f"raised {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        errors = {}
        for name, x in actual.items():
            if not torch.isfinite(x).all():
                return Verdict(f"{name} is not finite", errors)
            errors[name], worst = relative_errors(self.select(x), self.expected[name])
            whole_bound, row_bound = BOUNDS[self.case.dtype]
            if not (errors[name] <= whole_bound and worst <= row_bound):
                return Verdict(
                    f"{name} is off by {errors[name]:.1e} (at most {whole_bound:.0e}),"
                    f" its worst row by {worst:.1e} (at most {row_bound:.0e})",
                    errors,
                )
        return Verdict("", errors)


def compute(peer: Peer, case: Case, inputs: tuple, what: str) -> dict[str, torch.Tensor]:
    q, k, v, dout = inputs
    if what != TRAINING:
        with torch.no_grad():
            return {"out": peer.attention(q, k, v, case)}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = peer.attention(*leaves, case)
    gradients = torch.autograd.grad(out, leaves, dout)
    return {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def relative_errors(x: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(whole tensor, worst row)."""
    error, norm = (x - expected).norm(dim=-1), expected.norm(dim=-1)
    mean_norm = norm.square().mean().sqrt()
    return (
        float(error.norm() / norm.norm()),
        float((error / torch.maximum(norm, mean_norm)).max()),
    )


def judged_heads(case: Case) -> list[int]:
    """Evenly spread head indices, the last one included."""
    total = case.B * case.H
    per_head = 14.0 * case.N * case.N * case.D
    count = int(min(total, max(1, ORACLE_FLOPS[case.device] // per_head)))
    return [(i + 1) * total // count - 1 for i in range(count)]
