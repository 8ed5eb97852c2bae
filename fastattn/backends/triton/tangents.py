"""The passes over one call that take tangents: kernels jvp.py and backward_jvp.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call.spec import AttentionSpec, Tangents, Tensors
from . import tile_configs
from .arguments import blocks, broadcast, operand
from .job import Job, Programs
from .runtime import kernels


class TangentJob(Job):
    """One call on tensors with tangents. Its gradients are the tangents of gradients."""

    moving: Any
    sinks_t: Tensor | None
    pointers: Any
    rates: Tensor

    of_mask = "dmask_t"

    def __init__(
        self,
        spec: AttentionSpec,
        t: Tensors,
        u: Tangents,
        dout: Tensor | None = None,
        dout_t: Tensor | None = None,
    ):
        super().__init__(spec, t, dout)
        self.moving = kernels().tangent.Moving(
            q=operand(u.q),
            k=operand(u.k),
            v=operand(u.v),
            mask=None if u.mask is None else broadcast(u.mask),
            sinks=None if u.sinks is None else u.sinks.to(torch.float32).contiguous(),
            dout=None if dout_t is None else operand(rows_in_line(dout_t)),
        )
        self.sinks_t = u.sinks
        # These passes load twice the tiles of others. None goes through a descriptor, because all
        # would then need pipeline stages. Masks are always read, whatever their structure.
        self.pointers = self.flags._replace(tma=False, block_mask=False)

    def jvp(self, out: Tensor, normaliser: Tensor, out_t: Tensor, lse_t: Tensor) -> None:
        spec = self.spec
        self.launch(
            kernels().jvp.jvp_kernel,
            "jvp",
            lambda c: blocks(self.M, c.BM) * spec.B * spec.H,
            self.inputs[:3],
            (self.moving, operand(out), normaliser.contiguous(), operand(out_t), lse_t),
            F=self.pointers,
        )

    def find_rates(self, out: Tensor, out_t: Tensor, lse_t: Tensor, dlse_t: Tensor | None) -> None:
        """Compute self.rates: lse_t and delta_t of each row, which `walk_keys` and others read."""
        self.lse_t = lse_t
        self.rates = self.of_rows.new_empty((2, *self.of_rows.shape[1:]))
        items, pitch = self.rates.shape[1], self.rates.shape[3]
        if not self.rates.numel():
            return
        given = (operand(x) for x in (lse_t, dlse_t))
        self.launch(
            kernels().backward_jvp.rates_kernel,
            "rates",
            lambda c: blocks(pitch, c.BM) * items * self.spec.H,
            (),
            (operand(out), operand(out_t), self.inputs[3], self.moving.dout, *given, self.rates),
            F=kernels().score.Flags(scaled=self.flags.scaled, packed=self.flags.packed),
        )

    def walk_keys(self, dq: Tensor | None, sums: bool = False) -> None:
        spec = self.spec
        self.launch(
            kernels().backward_jvp.dq_t_kernel,
            "dq_t",
            lambda c: blocks(self.M, c.BM) * spec.B * spec.H,
            self.inputs,
            (self.moving, self.of_rows, self.rates, operand(dq)),
            F=self.pointers,
        )

    def walk_rows(self, dk: Tensor | None, dv: Tensor | None) -> None:
        spec, both = self.spec, dk is not None and dv is not None
        if both and tile_configs.apart(*self.tiled, which="dk_t"):
            self.walk_rows(dk, None)
            self.walk_rows(None, dv)
            return
        self.launch(
            kernels().backward_jvp.dkv_t_kernel,
            "dkv_t" if both else "dv_t" if dk is None else "dk_t",
            lambda c: blocks(self.N, c.BN) * spec.B * spec.Hk,
            self.inputs,
            (self.moving, self.of_rows, self.rates, operand(dk), operand(dv)),
            F=self.pointers,
        )

    def walk_mask(self, partial: Tensor, programs: Programs, summed: tuple[bool, ...]) -> None:
        self.launch(
            kernels().backward_jvp.dmask_t_kernel,
            self.of_mask,
            programs,
            self.inputs,
            (self.moving, self.of_rows, self.rates, partial),
            F=self.pointers,
            SUMMED=summed,
        )

    def sink_gradient(self, sinks: Tensor) -> Tensor:
        """-sum (p_sink_t delta + p_sink delta_t), with p_sink_t = p_sink (sink_t - lse_t)."""
        p, delta = self.sink_shares(sinks)
        delta_t = self.rates[1, ..., : self.spec.memory_sizes[1]]
        sinks_t = 0 if self.sinks_t is None else self.sinks_t.to(torch.float32)[:, None]
        p_t = torch.where(p > 0, p * (sinks_t - self.lse_t), 0.0)
        return -(p_t * delta + p * delta_t).sum((0, 2)).to(sinks.dtype)


def rows_in_line(x: Tensor) -> Tensor:
    """x with contiguous rows, which kernels read in wide loads. An expanded number has none."""
    return x if x.stride(-1) == 1 else x.contiguous()
