"""What the backends share whose kernels read csrc/abi.h: arguments packed, results allocated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, empty, get_num_threads

from . import native
from .backend import token_major
from .native import ABSENT, DTYPE, broadcast, column, pack_pointers, pack_tensor, scalars
from .spec import AttentionSpec, Maybe, Tensors

_NO_POINTERS = pack_pointers(0, 0, 0, 0, 0)
_NO_FEATURES = ABSENT * 3


class Launcher:
    """The passes of `Backend`, each by one call into a native library.

    A backend says how many bytes of workspace that call wants, and makes it.
    """

    makes_all = False  # gradients of q, k and v that nobody wants, too?

    def workspace(self, which: int, params: bytes, t: Tensors) -> int:
        raise NotImplementedError

    def run(self, which: int, params: bytes, spec: AttentionSpec, t: Tensors) -> None:
        """Run a pass. The caller keeps every tensor that `params` points into."""
        raise NotImplementedError

    def forward(self, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
        out = token_major(t.q, (spec.B, spec.H, spec.M, spec.Dv), spec.dtype)
        normaliser = t.q.new_zeros((2, spec.B, spec.H, spec.M), dtype=spec.lse_dtype)
        given = dict(out=strided(out), lse=pair(normaliser))
        self._launch(native.FORWARD, spec, t, given)
        return out, normaliser

    def backward(
        self,
        spec: AttentionSpec,
        t: Tensors,
        out: Tensor,
        normaliser: Tensor,
        dout: Tensor | None,
        dlse: Tensor | None,
        wants: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        dq, dk, dv = (self._like(x, wanted) for x, wanted in zip(t[:3], wants))
        dmask, dsinks = _optional_gradients(spec, t, wants[3], wants[4])
        given = dict(dout=strided(dout), dlse=column(dlse), out=strided(out))
        given |= dict(lse=pair(normaliser))
        given |= dict(dq=strided(dq), dk=strided(dk), dv=strided(dv))
        given |= dict(dmask=broadcast(dmask), dsinks=column(dsinks))
        self._launch(native.BACKWARD, spec, t, given)
        return dq, dk, dv, dmask, _like_input(dsinks, t.sinks)

    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        B, H, M, N = spec.B, spec.H, spec.M, spec.N
        shape = (B, M, N) if spec.average_heads else (B, H, M, N)
        weights = empty(shape, dtype=spec.dtype, device=t.q.device)
        with_heads = weights[:, None] if spec.average_heads else weights
        given = dict(lse=pair(t.normaliser), weights=broadcast(with_heads))
        self._launch(native.WEIGHTS, spec, t, given)
        return weights

    def weights_backward(
        self, spec: AttentionSpec, t: Tensors, dweights: Tensor, wants: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        dq, dk = (self._like(x, wanted) for x, wanted in zip(t[:2], wants))
        dmask, dsinks = _optional_gradients(spec, t, wants[2], wants[3])
        if dweights.numel() == 0:  # its pointer is null, which would mean that there is none
            for grad in (dq, dk, dmask, dsinks):
                if grad is not None:
                    grad.zero_()
        else:
            dweights = dweights[:, None] if spec.average_heads else dweights
            given = dict(dweights=broadcast(dweights), lse=pair(t.normaliser))
            given |= dict(dq=strided(dq), dk=strided(dk))
            given |= dict(dmask=broadcast(dmask), dsinks=column(dsinks))
            self._launch(native.WEIGHTS_BACKWARD, spec, t, given)
        return dq, dk, dmask, _like_input(dsinks, t.sinks)

    def _like(self, x: Tensor, wanted: bool) -> Tensor | None:
        return token_major(x, x.shape, x.dtype) if wanted or self.makes_all else None

    def _launch(self, which: int, spec: AttentionSpec, t: Tensors, given: dict[str, bytes]) -> None:
        t = convert(spec, t)
        params = _params(spec, t, given)
        size = self.workspace(which, params, t)
        if size > 0:
            workspace = empty(size + 63, dtype=torch.uint8, device=t.q.device)
            at = -(-workspace.data_ptr() // 64) * 64
            field = native.WORKSPACE
            params = params[:field] + at.to_bytes(8, "little") + params[field + 8 :]
        self.run(which, params, spec, t)


def strided(x: Maybe) -> bytes:
    """FaTensor of a 4-D tensor, read where it lies."""
    return ABSENT if x is None else pack_tensor(x.data_ptr(), *x.stride(), DTYPE[x.dtype])


def pair(normaliser: Tensor) -> bytes:
    """FaTensor of a normaliser (2,B,H,M), which the kernels see as (B,H,M,2)."""
    two, *rows = normaliser.stride()
    return pack_tensor(normaliser.data_ptr(), *rows, two, DTYPE[normaliser.dtype])


def convert(spec: AttentionSpec, t: Tensors) -> Tensors:
    """Lengths, slopes and sinks in the dtypes that csrc/abi.h asks for."""
    if t.lengths is t.slopes is t.sinks is None:
        return t
    return t._replace(
        lengths=None if t.lengths is None else t.lengths.to(torch.int64).contiguous(),
        slopes=None if t.slopes is None else t.slopes.to(spec.lse_dtype),
        sinks=None if t.sinks is None else t.sinks.to(spec.lse_dtype),
    )


def features(t: Tensors) -> bytes:
    """FaTensors of mask, slopes and sinks."""
    if t.mask is t.slopes is t.sinks is None:
        return _NO_FEATURES
    return broadcast(t.mask) + column(t.slopes) + column(t.sinks)


def pointers(t: Tensors) -> bytes:
    if t.lengths is t.seed is None:
        return _NO_POINTERS
    lengths = 0 if t.lengths is None else t.lengths.data_ptr()
    return pack_pointers(lengths, 0 if t.seed is None else t.seed.data_ptr(), 0, 0, 0)


def _params(spec: AttentionSpec, t: Tensors, given: dict[str, bytes]) -> bytes:
    """FaParams with the inputs in `t` and the fields in `given`."""
    given = given | dict(q=strided(t.q), k=strided(t.k), v=strided(t.v))
    names = native.TENSORS
    before, after = names[: names.index("mask")], names[names.index("dout") :]
    parts = [
        *(given.get(name, ABSENT) for name in before),
        features(t),
        *(given.get(name, ABSENT) for name in after),
        pointers(t),
        scalars(spec, get_num_threads()),
    ]
    return b"".join(parts)


def _optional_gradients(spec: AttentionSpec, t: Tensors, want_mask: bool, want_sinks: bool):
    """Room for dmask, shaped as the mask is, and for dsinks; None where not wanted."""
    dmask = t.mask.new_empty(t.mask.shape) if want_mask else None
    dsinks = t.sinks.new_empty(t.sinks.shape, dtype=spec.lse_dtype) if want_sinks else None
    return dmask, dsinks


def _like_input(grad: Tensor | None, x: Maybe) -> Tensor | None:
    return None if grad is None else grad.to(x.dtype)
