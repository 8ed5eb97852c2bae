"""Launcher of the C++ kernels in csrc/cpu: the tiny calls' short way, and what the status says."""

from __future__ import annotations

import functools
import struct

from torch import Tensor, empty_strided, get_num_threads

from .. import native
from ..backend import Support, register
from ..check import DTYPES
from ..launcher import Launcher, convert, optional_views, pointers
from ..native import ABSENT, DTYPE, scalars
from ..spec import AttentionSpec, Feature, Tensors

_INPUTS = struct.Struct("=" + 3 * "Q4qq")  # q, k, v
_OUTPUTS = struct.Struct("=" + 2 * "Q4qq")  # lse, out
_AFTER_OUT = ABSENT * (len(native.TENSORS) - native.TENSORS.index("out") - 1)


@functools.lru_cache(maxsize=4096)
def _outputs(spec: AttentionSpec) -> tuple:
    """Shapes, strides and FaDtypes of out (stored token-major) and the normaliser."""
    B, H, M, Dv = spec.B, spec.H, spec.M, spec.Dv
    out = (B, H, M, Dv), (M * H * Dv, Dv, H * Dv, 1)
    return *out, (2, B, H, M), (B * H * M, H * M, M, 1), DTYPE[spec.dtype], DTYPE[spec.wide]


class Cpu(Launcher):
    name = "cpu"
    makes_all = True
    support = Support(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        max_head_dim=native.CPU_MAX_HEAD_DIM,
        features=(
            Feature.BAND
            | Feature.LENGTHS
            | Feature.MASK
            | Feature.ALIBI
            | Feature.SOFTCAP
            | Feature.SINKS
            | Feature.DROPOUT
            | Feature.GQA
            | Feature.WEIGHTS
            | Feature.GRAD
        ),
    )

    def unavailable(self) -> str | None:
        return native.cpu_unavailable()

    def forward(self, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
        # Written out and packed at once: this is the pass that tiny calls wait for.
        dtype, wide = spec.dtype, spec.wide
        shape, strides, rows, row_strides, code, wide_code = _outputs(spec)
        out = empty_strided(shape, strides, dtype=dtype)
        normaliser = empty_strided(rows, row_strides, dtype=wide)
        t = convert(spec, t)
        q, k, v = t.q, t.k, t.given("v")
        inputs = _INPUTS.pack(
            *(q.data_ptr(), *q.stride(), code),
            *(k.data_ptr(), *k.stride(), code),
            *(v.data_ptr(), *v.stride(), code),
        )
        outputs = _OUTPUTS.pack(
            *(normaliser.data_ptr(), *row_strides[1:], row_strides[0], wide_code),
            *(out.data_ptr(), *strides, code),
        )
        views = optional_views(spec, t)[: -len(ABSENT)]  # the last is the normaliser, an output
        end = pointers(spec, t) + scalars(spec, get_num_threads())
        self.run(native.FORWARD, inputs + views + outputs + _AFTER_OUT + end, spec, t)
        return out, normaliser  # no workspace: the library finds the little that decoding needs

    def workspace(self, which: int, params: bytes, t: Tensors) -> int:
        return native.cpu().workspace(params, which)

    def run(self, which: int, params: bytes, spec: AttentionSpec, t: Tensors) -> None:
        status = native.cpu().run(params, which)
        if status == native.OK:
            return
        if status == native.BAD_LENGTH:
            N = spec.N
            bad = next(x for x in t.given("lengths").tolist() if not 0 <= x <= N)
            raise ValueError(f"key_lengths: got {bad}, expected values in [0, N] = [0, {N}]")
        if status == native.NO_MEMORY:
            raise MemoryError("the CPU kernels could not allocate their scratch memory")
        raise RuntimeError(f"the CPU kernels returned the unknown status {status}")


register(Cpu())
