"""The public calls: resolve what the arguments mean, then hand over to ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from . import ops
from .check import check_lse
from .spec import Options, Tensors

_PLACES = {False: "", True: "top_left", "top_left": "top_left", "bottom_right": "bottom_right"}
_is_compiling = torch.compiler.is_compiling
_any_autocast = torch._C._is_any_autocast_enabled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(score(q k^T)) v, fused: no M x N matrix is ever stored (FlashAttention-2, Dao 2023).

    q is (B,H,M,D), k (B,Hk,N,D), v (B,Hk,N,Dv): float32, float64, bfloat16 or float16, all alike,
    of any strides. Hk divides H; query head h reads key head h // (H / Hk) (GQA). Any size may be
    0. Scores go through, in this order: scale, softcap, ALiBi, mask.

    mask: bool (True = may attend), or added to the scores in q's dtype or float32. Any shape that
        broadcasts to (B,H,M,N); it is read as it lies, and its gradient has its own shape.
    causal: True or "top_left" puts row i at i' = i, "bottom_right" at i' = i + length - M, where
        length is key_lengths[b] or N. Keeps j <= i'.
    window: (left, right) keeps i' - left <= j <= i' + right; None is no limit.
    key_lengths: (B,) int32 or int64. Keys at or past it are never read.
    alibi_slopes: (H,) or (B,H). Subtracts slope |i' - j|; has no gradient.
    softcap: replaces s by softcap tanh(s / softcap).
    sinks: (H,). One more logit in each row's denominator, with no value.
    dropout_p, seed: drops probabilities inside the kernel (Philox-4x32-10). seed is an int or an
        int64 tensor of one element on q's device; None draws one from torch's generator.
    scale: multiplies q k^T; 1 / sqrt(D) by default.
    return_lse: also return the natural log of the softmax denominator, (B,H,M) in float32 (float64
        for float64), sinks included; a loss on it has a gradient too.
    backend: run on this one or raise; None takes the first that can. See `fastattn.explain`.

    Returns (B,H,M,Dv) in q's dtype, stored (B,M,H,Dv). A row with nothing to attend to has output
    0, LSE -inf (or its sink) and zero gradients.

    Raises ValueError or TypeError for arguments that break these rules, NotImplementedError with
    every backend's reasons when none can run the call, for second derivatives and forward-mode AD.
    """
    out, normaliser = attend(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        window=window,
        key_lengths=key_lengths,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        scale=scale,
        backend=backend,
    )
    return (out, normaliser[0]) if return_lse else out


def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """`attention`, and its normaliser (2,B,H,M): the LSE, and what its rounding lost."""
    if v is None:  # below this line, that means the weights are wanted
        raise TypeError("v: got NoneType, expected a torch.Tensor")
    out, normaliser = ops.call(ops.ATTENTION, *prepare(q, k, v, **arguments))
    return out, normaliser


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    lse: Tensor | None = None,
    average_heads: bool = False,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """The probabilities that `attention` with the same arguments multiplies v by, after dropout.

    Returns (B,H,M,N) in q's dtype, or with `average_heads` their mean over heads (B,M,N), in no
    more memory than that. `lse` (B,H,M), as `attention(..., return_lse=True)` gives it, saves the
    pass that finds it and is a constant to autograd; without it, gradients reach q, k, mask and
    sinks through the normaliser too, and it is known to more than float32: leave it out where every
    score of a row is huge (a mask of finfo.min or -1e9). Errors as for `attention`.
    """
    arguments: dict[str, Any] = dict(
        mask=mask,
        causal=causal,
        window=window,
        key_lengths=key_lengths,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        backend=backend,
    )
    constant = lse is not None
    if lse is None:
        with torch.no_grad():  # v has no columns: this pass is for its normaliser
            _, normaliser = attend(q, k, k[..., :0], **arguments)
    else:
        check_lse(q, lse)
        normaliser = torch.stack([lse, torch.zeros_like(lse)])
    return weights_from(
        *(q, k),
        normaliser=normaliser,
        average_heads=average_heads,
        differentiate_lse=not constant,
        dropout_p=dropout_p,
        seed=seed,
        **arguments,
    )


def weights_from(
    q: Tensor,
    k: Tensor,
    *,
    normaliser: Tensor,
    average_heads: bool = False,
    differentiate_lse: bool = True,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """`attention_weights` from a normaliser that `attend` found by the same arguments.

    With `differentiate_lse` gradients take it for the function of q, k, mask and sinks that
    it is, although the tensor itself is a constant here: the values of a forward pass are reused
    and the derivative is that of the whole softmax.
    """
    t, o = prepare(
        q,
        k,
        None,
        mask,
        causal,
        window,
        key_lengths,
        alibi_slopes,
        softcap,
        sinks,
        dropout_p,
        seed,
        scale,
        backend,
        normaliser.detach(),
        average_heads,
        not differentiate_lse,
    )
    return ops.call(ops.WEIGHTS, t, o)[0]


def draw_seed(device: torch.device | str) -> Tensor:
    """A seed for dropout from torch's generator: `torch.manual_seed` repeats it."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=device)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
    normaliser: Tensor | None = None,
    average_heads: bool = False,
    constant_lse: bool = False,
) -> tuple[Tensors, Options]:
    """The arguments in the one form that everything below reads."""
    try:
        place = _PLACES[causal]
    except (KeyError, TypeError):
        expected = 'False, True, "top_left" or "bottom_right"'
        raise ValueError(f"causal: got {causal!r}, expected {expected}") from None
    left, right = (None, None) if window is None else _pair(window)
    if (_is_compiling() or _any_autocast()) and isinstance(q, Tensor):
        q, k, v, mask = _autocast(q, k, v, mask)
    if seed is not None or dropout_p:
        seed = _seed(seed, dropout_p, q)
    t = Tensors(q, k, v, mask, key_lengths, alibi_slopes, sinks, seed, normaliser)
    grad = is_grad_enabled() and _requires_grad(t)
    options = Options(
        *(scale, place, left, right, softcap, dropout_p, backend or "", grad),
        *(average_heads, constant_lse),
    )
    return t, options


def _requires_grad(t: Tensors) -> bool:
    try:
        if t.slopes is not None and t.slopes.requires_grad:
            raise ValueError(
                "alibi_slopes: got a tensor that requires grad, expected a constant: there is no "
                "gradient for slopes; pass alibi_slopes.detach()"
            )
        return (
            t.q.requires_grad
            or t.k.requires_grad
            or (t.v is not None and t.v.requires_grad)
            or (t.mask is not None and t.mask.requires_grad)
            or (t.sinks is not None and t.sinks.requires_grad)
        )
    except AttributeError:
        return False  # no tensor: the checks say which


def _pair(window) -> tuple:
    try:
        left, right = window
    except (TypeError, ValueError):
        expected = "a pair (left, right) of ints or None"
        raise ValueError(f"window: got {window!r}, expected {expected}") from None
    return left, right


def _autocast(q, k, v, mask):
    """As torch's SDPA: q, k, v and a float mask in the autocast dtype; float64 stays."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(device)

    def cast(x):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
            return x
        return x.to(dtype)

    return cast(q), cast(k), cast(v), cast(mask)


def _seed(seed, dropout_p: float, q: Tensor) -> Tensor | None:
    """The seed as a tensor; None when nothing is dropped."""
    if isinstance(seed, Tensor):
        return seed
    whole = seed is None or (isinstance(seed, int) and not isinstance(seed, bool))
    if not whole or not (seed is None or -(1 << 63) <= seed < 1 << 64):
        raise ValueError(
            f"seed: got {seed!r}, expected an int of 64 bits, an int64 tensor of one element on "
            "q's device, or None to draw one"
        )
    if not dropout_p:
        return None
    if seed is None:
        return draw_seed(q.device)
    return torch.full((1,), seed if seed < 1 << 63 else seed - (1 << 64), device=q.device)
