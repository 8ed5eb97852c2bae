"""Launcher of the C++ kernels in csrc/cpu: packs FaParams, allocates results, reads the status."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor, empty, empty_strided, get_num_threads

from .. import native
from ..backend import Support, register, token_major
from ..check import DTYPES
from ..native import ABSENT, DTYPE, broadcast, column, pack_pointers, pack_tensor, scalars
from ..spec import AttentionSpec, Feature, Maybe, Tensors

_HEAD = struct.Struct("=" + 5 * "Q4qq")  # q, k, v, out, lse
_NO_POINTERS = pack_pointers(0, 0, 0, 0, 0)
_NO_FEATURES = ABSENT * 3
_AFTER_SINKS = ABSENT * 9


@functools.lru_cache(maxsize=4096)
def _outputs(spec: AttentionSpec) -> tuple:
    """Shapes, strides and FaDtypes of out (stored token-major) and lse."""
    B, H, M, Dv = spec.B, spec.H, spec.M, spec.Dv
    out = (B, H, M, Dv), (M * H * Dv, Dv, H * Dv, 1)
    return *out, (B, H, M), (H * M, M, 1), DTYPE[spec.dtype], DTYPE[spec.lse_dtype]


class Cpu:
    name = "cpu"
    support = Support(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        max_head_dim=512,
        features=~Feature.PACKED,
    )

    def unavailable(self) -> str | None:
        return native.cpu_unavailable()

    def forward(self, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
        # Written out and packed at once: this is the pass that tiny calls wait for.
        dtype, wide = spec.dtype, spec.lse_dtype
        shape, strides, rows, row_strides, code, wide_code = _outputs(spec)
        out = empty_strided(shape, strides, dtype=dtype)
        lse = empty_strided(rows, row_strides, dtype=wide)
        t = _convert(spec, t)
        q, k, v = t.q, t.k, t.v
        head = _HEAD.pack(
            *(q.data_ptr(), *q.stride(), code),
            *(k.data_ptr(), *k.stride(), code),
            *(v.data_ptr(), *v.stride(), code),
            *(out.data_ptr(), *strides, code),
            *(lse.data_ptr(), *row_strides, 0, wide_code),
        )
        tail = _pointers(t) + scalars(spec, get_num_threads())
        _run(native.FORWARD, head + _features(t) + _AFTER_SINKS + tail, spec, t)
        return out, lse  # no workspace: the library finds the little that decoding needs

    def backward(
        self,
        spec: AttentionSpec,
        t: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor | None,
        dlse: Tensor | None,
        wants: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        if dout is None:
            dout = torch.zeros((), dtype=spec.dtype).expand(out.shape)
        dq, dk, dv = (token_major(x, x.shape, x.dtype) for x in t[:3])
        dmask, dsinks = _optional_gradients(spec, t, wants[3], wants[4])
        given = dict(dout=strided(dout), dlse=column(dlse), out=strided(out), lse=column(lse))
        given |= dict(dq=strided(dq), dk=strided(dk), dv=strided(dv))
        _run_backward(native.BACKWARD, spec, t, given, dmask, dsinks)
        return dq, dk, dv, dmask, _like_input(dsinks, t.sinks)

    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        B, H, M, N = spec.B, spec.H, spec.M, spec.N
        shape = (B, M, N) if spec.average_heads else (B, H, M, N)
        t = _convert(spec, t)
        weights = empty(shape, dtype=spec.dtype)
        with_heads = weights[:, None] if spec.average_heads else weights
        given = dict(lse=column(t.lse), weights=broadcast(with_heads))
        params = _params(spec, t, given)
        _run(native.WEIGHTS, params, spec, t)
        return weights

    def weights_backward(
        self, spec: AttentionSpec, t: Tensors, dweights: Tensor, wants: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        dq, dk = (token_major(x, x.shape, x.dtype) for x in t[:2])
        dmask, dsinks = _optional_gradients(spec, t, wants[2], wants[3])
        if dweights.numel() == 0:  # its pointer is null, which would mean that there is none
            for grad in (dq, dk, dmask, dsinks):
                if grad is not None:
                    grad.zero_()
        else:
            dweights = dweights[:, None] if spec.average_heads else dweights
            given = dict(dweights=broadcast(dweights), lse=column(t.lse))
            given |= dict(dq=strided(dq), dk=strided(dk))
            _run_backward(native.WEIGHTS_BACKWARD, spec, t, given, dmask, dsinks)
        return dq, dk, dmask, _like_input(dsinks, t.sinks)


def strided(x: Tensor) -> bytes:
    """FaTensor of a 4-D tensor, read where it lies."""
    return pack_tensor(x.data_ptr(), *x.stride(), DTYPE[x.dtype])


def _convert(spec: AttentionSpec, t: Tensors) -> Tensors:
    """Lengths, slopes and sinks in the dtypes that csrc/abi.h asks for."""
    if t.lengths is t.slopes is t.sinks is None:
        return t
    return t._replace(
        lengths=None if t.lengths is None else t.lengths.to(torch.int64).contiguous(),
        slopes=None if t.slopes is None else t.slopes.to(spec.lse_dtype),
        sinks=None if t.sinks is None else t.sinks.to(spec.lse_dtype),
    )


def _features(t: Tensors) -> bytes:
    """FaTensors of mask, slopes and sinks."""
    if t.mask is t.slopes is t.sinks is None:
        return _NO_FEATURES
    return broadcast(t.mask) + column(t.slopes) + column(t.sinks)


def _pointers(t: Tensors) -> bytes:
    if t.lengths is t.seed is None:
        return _NO_POINTERS
    lengths = 0 if t.lengths is None else t.lengths.data_ptr()
    return pack_pointers(lengths, 0 if t.seed is None else t.seed.data_ptr(), 0, 0, 0)


def _params(spec: AttentionSpec, t: Tensors, given: dict[str, bytes]) -> bytes:
    """FaParams with the inputs in `t` and the fields in `given`."""
    given = given | dict(q=strided(t.q), k=strided(t.k))
    if t.v is not None:
        given["v"] = strided(t.v)
    names = native.TENSORS
    before, after = names[: names.index("mask")], names[names.index("dout") :]
    parts = [
        *(given.get(name, ABSENT) for name in before),
        _features(t),
        *(given.get(name, ABSENT) for name in after),
        _pointers(t),
        scalars(spec, get_num_threads()),
    ]
    return b"".join(parts)


def _optional_gradients(spec: AttentionSpec, t: Tensors, want_mask: bool, want_sinks: bool):
    """Room for dmask, shaped as the mask is, and for dsinks; None where not wanted."""
    dmask = empty(t.mask.shape, dtype=t.mask.dtype) if want_mask else None
    dsinks = empty(t.sinks.shape, dtype=spec.lse_dtype) if want_sinks else None
    return dmask, dsinks


def _like_input(grad: Tensor | None, x: Maybe) -> Tensor | None:
    return None if grad is None else grad.to(x.dtype)


def _run_backward(which: int, spec: AttentionSpec, t: Tensors, given, dmask, dsinks) -> None:
    t = _convert(spec, t)
    given = given | dict(dmask=broadcast(dmask), dsinks=column(dsinks))
    params = _params(spec, t, given)
    size = native.cpu().workspace(params, which)
    if size > 0:
        workspace = empty(size + 63, dtype=torch.uint8)
        at = -(-workspace.data_ptr() // 64) * 64
        field = native.WORKSPACE
        params = params[:field] + at.to_bytes(8, "little") + params[field + 8 :]
    _run(which, params, spec, t)


def _run(which: int, params: bytes, spec: AttentionSpec, t: Tensors) -> None:
    """Run a kernel. The caller keeps every tensor that `params` points into."""
    status = native.cpu().run(params, which)
    if status == native.OK:
        return
    if status == native.BAD_LENGTH:
        N = spec.N
        bad = next(x for x in t.lengths.tolist() if not 0 <= x <= N)
        raise ValueError(f"key_lengths: got {bad}, expected values in [0, N] = [0, {N}]")
    if status == native.NO_MEMORY:
        raise MemoryError("the CPU kernels could not allocate their scratch memory")
    raise RuntimeError(f"the CPU kernels returned the unknown status {status}")


register(Cpu())
