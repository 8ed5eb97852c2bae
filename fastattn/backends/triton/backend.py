"""The backend of the Triton kernels in kernels/: what it supports, and its passes. It allocates
their results; job.py launches the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...call.spec import AttentionSpec, Feature, Tangents, Tensors
from ..base import BAD_INDEX, COMMON_FEATURES, Chips, Grads, Outs, Support, register
from ..native.launcher import in_grad_order, prepared
from ..shared import gpu
from ..shared.gathered_pages import Rows, backward_of_pages
from ..shared.gpu import on
from ..shared.per_sequence import backward_in_turn
from ..shared.value_checks import checks_values
from . import tile_configs
from .arguments import blocks
from .job import Job
from .launch_cache import interpreted
from .runtime import kernels, unavailable
from .tangents import TangentJob, rows_in_line

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
CHIPS = (
    Chips(
        75,
        DTYPES,
        "by multiply-adds: Triton has no products on the tensor cores of sm_75",
        ((torch.float32, 128),),  # wider ones need 96 KB of shared memory
    ),
    Chips(80, DTYPES),
)


class Triton:
    name = "triton"
    support: Support = Support(
        devices=frozenset({"cpu" if interpreted() else "cuda"}),
        dtypes=DTYPES,
        chips=CHIPS,
        max_head_dim=tile_configs.MOST,
        forward_head_dims=tile_configs.MOST_FORWARD,
        max_length=gpu.MAX_LENGTH,
        features=COMMON_FEATURES
        | Feature.INVARIANT
        | Feature.QUANTISED
        | Feature.UNROUNDED
        | Feature.PAGED_GRAD
        | Feature.SCORE_MOD
        | Feature.TANGENTS,
    )

    def unavailable(self) -> str | None:
        return unavailable()

    def forward(self, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
        like = prepared(spec)
        out = t.q.new_empty_strided(*like.out, **like.stored)
        normaliser = t.q.new_empty_strided(*like.normaliser, dtype=spec.acc_dtype)
        if normaliser.numel():
            with on(t.q.device):
                job = Job(spec, t)
                check_indices(job)
                job.attend(out, normaliser)
        return out, normaliser

    def backward(
        self, spec: AttentionSpec, t: Tensors, outs: Outs, grads: Grads, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        dout, dlse = grads
        dout = torch.zeros_like(outs[0], dtype=spec.dtype) if dout is None else rows_in_line(dout)
        if spec.paged:
            if spec.given & {"mask"} or spec.score_mod:
                made = backward_in_turn(self, spec, t, outs, (dout, dlse), needs_grad)
            else:
                made = backward_of_pages(self, spec, t, Rows(t.q, *outs, dout, dlse), needs_grad)
            return in_grad_order(spec, made, t)
        with on(t.q.device):
            job = Job(spec, t, dout)
            job.find_delta(*outs, dlse)
            return job.gradients(needs_grad)

    def jvp(
        self, spec: AttentionSpec, t: Tensors, tangents: Tangents, outs: Outs | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, normaliser = self.forward(spec, t) if outs is None else outs
        out_t = t.q.new_empty_strided(*prepared(spec).out)
        lse_t = t.q.new_empty(normaliser.shape[1:], dtype=spec.acc_dtype)
        if lse_t.numel():
            with on(t.q.device):
                TangentJob(spec, t, tangents).jvp(out, normaliser, out_t, lse_t)
        return out, normaliser, out_t, lse_t

    def second(
        self,
        spec: AttentionSpec,
        t: Tensors,
        tangents: Tangents,
        outs: Outs,
        grads: Grads,
        needs_grad: Sequence[str],
    ) -> dict[str, Tensor]:
        out, normaliser, out_t, lse_t = outs
        dout, dlse, dout_t, dlse_t = grads
        dout = torch.zeros_like(out) if dout is None else rows_in_line(dout)
        with on(t.q.device):
            job = TangentJob(spec, t, tangents, dout, dout_t)
            job.find_delta(out, normaliser, dlse)
            job.find_rates(out, out_t, lse_t, dlse_t)
            return job.gradients(needs_grad)

    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        B, H, M, N = spec.B, spec.H, spec.M, spec.N
        shape = (B, M, N) if spec.average_heads else (B, H, M, N)
        weights = t.q.new_empty(shape)
        if not H:
            return weights.fill_(torch.nan)  # the mean of nothing
        if weights.numel():
            with on(t.q.device):
                job = Job(spec, t)
                check_indices(job)
                job.weights(weights[:, None] if spec.average_heads else weights)
        return weights

    def weights_backward(
        self, spec: AttentionSpec, t: Tensors, dweights: Tensor, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        if spec.average_heads:
            dweights = dweights[:, None].expand(spec.B, spec.H, spec.M, spec.N)
        with on(t.q.device):
            job = Job(spec, t, dweights)
            job.find_delta(None, t.given("normaliser"), None)
            return job.gradients(needs_grad)


def check_indices(job: Job) -> None:
    """Raise IndexError if a program indexes a captured tensor out of range at a pair that only
    functions may hide: `outside` knows where they do.

    On a GPU this runs only if FASTATTN_CHECK=1, as `check_values` does; otherwise such an index is
    clamped.
    """
    if job.flags.outside is None or not checks_values(job.device):
        return
    c = job.config("index_check")
    programs = blocks(job.M, c.BM) * job.spec.B * job.spec.H
    errors = job.t.q.new_empty(programs, dtype=torch.int32)
    job.launch(
        kernels().index_check.index_check_kernel,
        "index_check",
        lambda c: programs,
        (),
        (errors,),
        config=c,  # the grid is that of this tile
        F=job.flags._replace(block_mask=False, tma=False, mask_mod=None),
    )
    if errors.any():
        raise IndexError(BAD_INDEX)


register(Triton())
