"""Every rule on the arguments of a call, and the spec of a call that keeps them.

These rules read metadata alone (shapes, dtypes, devices, scalars), so one verdict holds for every
later call of the same kind, and fake tensors with symbolic sizes can be checked too.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from .spec import UNLIMITED, AttentionSpec, Options, Tensors

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PLACES = ("", "top_left", "bottom_right")


def describe(t: Tensors, o: Options) -> AttentionSpec:
    """The spec of a call with these tensors and options; raises if they break a rule."""
    check(t, o)
    (B, H, M, D), (_, Hk, N, _) = t.q.shape, t.k.shape
    right = UNLIMITED if o.right is None else o.right
    return AttentionSpec(
        B=B,
        H=H,
        Hk=Hk,
        M=M,
        N=N,
        D=D,
        Dv=0 if t.v is None else t.v.shape[3],
        dtype=t.q.dtype,
        device=t.q.device.type,
        scale=float(o.scale) if o.scale is not None else 1 / math.sqrt(D) if D else 1.0,
        left=UNLIMITED if o.left is None else min(o.left, UNLIMITED),
        right=min(right, 0 if o.causal else UNLIMITED),
        bottom_right=o.causal == "bottom_right",
        softcap=0.0 if o.softcap is None else float(o.softcap),
        dropout_p=float(o.dropout_p),
        mask_shape=None if t.mask is None else tuple(t.mask.shape),
        mask_dtype=None if t.mask is None else t.mask.dtype,
        has_lengths=t.lengths is not None,
        has_alibi=t.slopes is not None,
        has_sinks=t.sinks is not None,
        needs_grad=o.grad,
        weights=t.v is None,
        average_heads=o.average_heads,
        constant_lse=o.constant_lse,
    )


def check(t: Tensors, o: Options) -> None:
    """Raise ValueError or TypeError, saying got / expected, for anything that breaks a rule."""
    _types(t)
    _layout(t)
    _mask(t)
    _extras(t, o)
    _scalars(o, t.q.dtype)


def need(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}: got {got}, expected {expected}")


def _shape(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"


def _types(t: Tensors) -> None:
    for name, x in zip(("q", "k", "v")[: 2 if t.v is None else 3], t):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    q = t.q
    for name, x in zip(("q", "k", "v"), t[:3]):
        if x is None:
            continue
        need(
            x.dtype in DTYPES,
            f"{name}.dtype",
            x.dtype,
            "float32, float64, bfloat16 or float16: convert it with .to()",
        )
        need(
            x.dtype == q.dtype,
            f"{name}.dtype",
            x.dtype,
            f"{q.dtype}, as q has: convert them to one dtype",
        )
        need(x.layout == torch.strided, f"{name}.layout", x.layout, "torch.strided: use to_dense()")
    names = ("mask", "key_lengths", "alibi_slopes", "sinks", "seed", "normaliser")
    for name, x in zip(names, t[3:]):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor or None")
    for name, x in zip(("k", "v", *names), t[1:]):
        if x is not None:
            need(x.device == q.device, f"{name}.device", x.device, f"{q.device}, as q has")


def _layout(t: Tensors) -> None:
    q, k, v = t[:3]
    for name, x, axes in zip("qkv", t[:3], ("(B, H, M, D)", "(B, Hk, N, D)", "(B, Hk, N, Dv)")):
        if x is not None:
            need(x.ndim == 4, name, _shape(x), f"4 dimensions {axes}")
    B, H, _, D = q.shape
    _, Hk, N, _ = k.shape
    need(k.shape[0] == B, "k", _shape(k), f"batch size {B}, as q has")
    need(k.shape[3] == D, "k", _shape(k), f"head dim {D}, as q has")
    divides = H % Hk == 0 if Hk else H == 0
    need(divides, "k", f"{Hk} heads", f"a divisor of q's {H} heads")
    if v is not None:
        need(v.shape[0] == B, "v", _shape(v), f"batch size {B}, as q has")
        need(v.shape[1] == Hk, "v", _shape(v), f"{Hk} heads, as k has")
        need(v.shape[2] == N, "v", _shape(v), f"{N} rows, as k has")


def _mask(t: Tensors) -> None:
    mask, q = t.mask, t.q
    if mask is None:
        return
    full = (*q.shape[:3], t.k.shape[2])
    need(
        mask.dtype in (torch.bool, torch.float32, q.dtype),
        "mask.dtype",
        mask.dtype,
        f"torch.bool (True = may attend), torch.float32 or {q.dtype} as q has",
    )
    fits = mask.ndim <= 4 and all(
        m == 1 or m == n for m, n in zip(reversed(mask.shape), reversed(full))
    )
    need(fits, "mask", _shape(mask), f"a shape that broadcasts to (B, H, M, N) = {full}")


def _extras(t: Tensors, o: Options) -> None:
    B, H, M, _ = t.q.shape
    wide = torch.float64 if t.q.dtype == torch.float64 else torch.float32
    floats = f"a floating dtype such as {wide}"
    if (x := t.lengths) is not None:
        need(
            x.dtype in (torch.int32, torch.int64),
            "key_lengths.dtype",
            x.dtype,
            "torch.int32 or torch.int64",
        )
        need(x.ndim == 1 and x.shape[0] == B, "key_lengths", _shape(x), f"(B,) = ({B},)")
    if (x := t.slopes) is not None:
        need(x.is_floating_point(), "alibi_slopes.dtype", x.dtype, floats)
        one = x.ndim == 1 and x.shape[0] == H
        two = x.ndim == 2 and x.shape[0] == B and x.shape[1] == H
        need(one or two, "alibi_slopes", _shape(x), f"(H,) = ({H},) or (B, H) = ({B}, {H})")
    if (x := t.sinks) is not None:
        need(x.is_floating_point(), "sinks.dtype", x.dtype, floats)
        need(x.ndim == 1 and x.shape[0] == H, "sinks", _shape(x), f"(H,) = ({H},)")
    if (x := t.seed) is not None:
        need(x.dtype == torch.int64, "seed.dtype", x.dtype, "torch.int64")
        need(x.numel() == 1, "seed", _shape(x), "one element")
    if (x := t.normaliser) is not None:
        need(x.dtype == wide, "normaliser.dtype", x.dtype, f"{wide}")
        fits = x.ndim == 4 and all(got == want for got, want in zip(x.shape, (2, B, H, M)))
        need(fits, "normaliser", _shape(x), f"(2, B, H, M) = {(2, B, H, M)}")
    need(o.dropout_p == 0 or t.seed is not None, "seed", None, "a tensor, because dropout_p > 0")


def check_lse(q: Tensor, lse: object) -> None:
    """Raise unless `lse` is what attention(q, ..., return_lse=True) gives."""
    if not isinstance(lse, Tensor):
        raise TypeError(f"lse: got {type(lse).__name__}, expected a torch.Tensor or None")
    if not isinstance(q, Tensor) or q.ndim != 4:
        return  # the rules on q say so
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    need(lse.dtype == wide, "lse.dtype", lse.dtype, f"{wide}, as attention(return_lse=True) gives")
    need(lse.device == q.device, "lse.device", lse.device, f"{q.device}, as q has")
    B, H, M, _ = q.shape
    fits = lse.ndim == 3 and lse.shape[0] == B and lse.shape[1] == H and lse.shape[2] == M
    need(fits, "lse", _shape(lse), f"(B, H, M) = {(B, H, M)}")


def _scalars(o: Options, dtype: torch.dtype) -> None:
    need(o.causal in PLACES, "causal", repr(o.causal), 'False, True, "top_left" or "bottom_right"')
    p = o.dropout_p
    need(_real("dropout_p", p) and 0 <= p <= 1, "dropout_p", p, "a number in [0, 1]")
    for name in ("scale", "softcap"):
        if (x := getattr(o, name)) is not None:
            need(_real(name, x) and math.isfinite(x), name, x, "a finite number, or None")
    finfo = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    fits = o.softcap is None or finfo.tiny <= o.softcap <= finfo.max
    need(fits, "softcap", o.softcap, f"a number above 0 that {finfo.dtype} holds, or None")
    for name, x in (("left", o.left), ("right", o.right)):
        whole = x is None or (isinstance(x, numbers.Integral) and not isinstance(x, bool))
        if not whole:
            raise TypeError(f"window {name}: got {x!r}, expected an int, or None for no limit")
        need(x is None or x >= 0, f"window {name}", x, "0 or more, or None for no limit")


def _real(name: str, x: object) -> bool:
    if not isinstance(x, numbers.Real) or isinstance(x, bool):
        raise TypeError(f"{name}: got {x!r} ({type(x).__name__}), expected a number")
    return True
