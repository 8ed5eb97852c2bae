"""What the backends share whose kernels read csrc/abi.h: arguments packed, results allocated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, empty, get_num_threads

from . import native
from .backend import broadcast_strides, token_major
from .native import ABSENT, DTYPE, pack_pointer, pack_tensor, scalars
from .spec import ARGUMENTS, AttentionSpec, Tensors


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
        normaliser = t.q.new_empty((2, spec.B, spec.H, spec.M), dtype=spec.wide)
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
        wants: Sequence[str],
    ) -> dict[str, Tensor]:
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        grads = self._gradients(spec, t, wants)
        given = dict(dout=strided(dout), out=strided(out), lse=pair(normaliser))
        if dlse is not None:
            given |= dict(dlse=column(dlse))
        self._launch(native.BACKWARD, spec, t, given | _packed_gradients(grads))
        return _as_inputs(grads, t)

    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        B, H, M, N = spec.B, spec.H, spec.M, spec.N
        shape = (B, M, N) if spec.average_heads else (B, H, M, N)
        weights = empty(shape, dtype=spec.dtype, device=t.q.device)
        given = dict(weights=broadcast(_with_heads(spec, weights)))
        self._launch(native.WEIGHTS, spec, t, given)
        return weights

    def weights_backward(
        self, spec: AttentionSpec, t: Tensors, dweights: Tensor, wants: Sequence[str]
    ) -> dict[str, Tensor]:
        grads = self._gradients(spec, t, wants)
        if dweights.numel() == 0:  # its pointer is null, which would mean that there is none
            for grad in grads.values():
                grad.zero_()
        else:
            given = dict(dweights=broadcast(_with_heads(spec, dweights)))
            self._launch(native.WEIGHTS_BACKWARD, spec, t, given | _packed_gradients(grads))
        return _as_inputs(grads, t)

    def _gradients(
        self, spec: AttentionSpec, t: Tensors, wants: Collection[str]
    ) -> dict[str, Tensor]:
        """Room for the gradients: laid as q is, in the mask's shape, or as wide as kernels sum."""
        grads = {}
        for name, a in ARGUMENTS.items():
            x = getattr(t, name)
            if x is None or not a.gradient:
                continue
            if a.crosses == "strided" and (name in wants or self.makes_all):
                grads[name] = token_major(x, x.shape, x.dtype)
            elif name in wants:
                grads[name] = x.new_empty(x.shape, dtype=_kernel_dtype(a.dtype, x, spec))
        return grads

    def _launch(self, which: int, spec: AttentionSpec, t: Tensors, given: dict[str, bytes]) -> None:
        t = convert(spec, t)
        params = _params(spec, t, given)
        size = self.workspace(which, params, t)
        if size > 0:
            workspace = empty(size + 63, dtype=torch.uint8, device=t.q.device)
            at = -(-workspace.data_ptr() // 64) * 64
            field = native.WORKSPACE
            params = params[:field] + pack_pointer(at) + params[field + 8 :]
        self.run(which, params, spec, t)


# ----------------------------------------------------- tensors as FaTensors (`Argument.crosses`)


def strided(x: Tensor) -> bytes:
    """FaTensor of a 4-D tensor, read where it lies."""
    return pack_tensor(x.data_ptr(), *x.stride(), DTYPE[x.dtype])


def broadcast(x: Tensor) -> bytes:
    """FaTensor of `x` aligned to the right of (B,H,M,N); what it is broadcast over has stride 0."""
    return pack_tensor(x.data_ptr(), *broadcast_strides(x), DTYPE[x.dtype])


def column(x: Tensor) -> bytes:
    """FaTensor of (H,), (B,H) or (B,H,M), which the kernels see with trailing sizes of 1."""
    strides = x.stride() if x.ndim > 1 else (0, *x.stride())
    return pack_tensor(x.data_ptr(), *(*strides, 0, 0)[:4], DTYPE[x.dtype])


def pair(normaliser: Tensor) -> bytes:
    """FaTensor of a normaliser (2,B,H,M), which the kernels see as (B,H,M,2)."""
    two, *rows = normaliser.stride()
    return pack_tensor(normaliser.data_ptr(), *rows, two, DTYPE[normaliser.dtype])


def pointer(x: Tensor) -> bytes:
    return pack_pointer(x.data_ptr())


_CROSSES = {f.__name__: f for f in (strided, broadcast, column, pair, pointer)}
_OPTIONAL = tuple(  # name, function
    (name, _CROSSES[ARGUMENTS[name].crosses]) for name in Tensors._field_defaults
)
_VIEWS = tuple(x for x in _OPTIONAL if x[1] is not pointer)
_POINTERS = tuple(x for x in _OPTIONAL if x[1] is pointer)
_NO_VIEWS = ABSENT * len(_VIEWS)
_NO_POINTERS = bytes(8 * len(native.POINTERS))
_AFTER_POINTERS = bytes(8 * (len(native.POINTERS) - len(_POINTERS)))


def _kernel_dtype(rule: str, x: Tensor, spec: AttentionSpec) -> torch.dtype:
    """What kernels read or write it in."""
    return {"floating": spec.wide, "integer": torch.int64}.get(rule, x.dtype)


def convert(spec: AttentionSpec, t: Tensors) -> Tensors:
    """The optional tensors in the dtypes that csrc/abi.h asks for; whole numbers side by side."""
    if not spec.given:
        return t
    changed = {}
    for name in spec.given:
        a, x = ARGUMENTS[name], getattr(t, name)
        x = x.to(_kernel_dtype(a.dtype, x, spec))
        changed[name] = x.contiguous() if a.crosses == "pointer" else x
    return t._replace(**changed)


def optional_views(spec: AttentionSpec, t: Tensors) -> bytes:
    """FaTensors of what a call need not have, the normaliser among them."""
    if not spec.given:
        return _NO_VIEWS
    found = ((cross, getattr(t, name)) for name, cross in _VIEWS)
    return b"".join(ABSENT if x is None else cross(x) for cross, x in found)


def pointers(spec: AttentionSpec, t: Tensors) -> bytes:
    if not spec.given:
        return _NO_POINTERS
    found = (getattr(t, name) for name, _ in _POINTERS)
    return b"".join(bytes(8) if x is None else pointer(x) for x in found) + _AFTER_POINTERS


def _params(spec: AttentionSpec, t: Tensors, given: dict[str, bytes]) -> bytes:
    """FaParams with the inputs in `t` and the fields in `given`."""
    given = given | dict(q=strided(t.q), k=strided(t.k))
    if t.v is not None:
        given |= dict(v=strided(t.v))
    given |= {
        ARGUMENTS[name].field: cross(x)
        for name, cross in _VIEWS
        if (x := getattr(t, name)) is not None
    }
    fields = (given.get(name, ABSENT) for name in native.TENSORS)
    return b"".join((*fields, pointers(spec, t), scalars(spec, get_num_threads())))


def _packed_gradients(grads: dict[str, Tensor]) -> dict[str, bytes]:
    return {f"d{name}": _CROSSES[ARGUMENTS[name].crosses](x) for name, x in grads.items()}


def _as_inputs(grads: dict[str, Tensor], t: Tensors) -> dict[str, Tensor]:
    return {name: grad.to(getattr(t, name).dtype) for name, grad in grads.items()}


def _with_heads(spec: AttentionSpec, weights: Tensor) -> Tensor:
    return weights[:, None] if spec.average_heads else weights
