"""Attention and its tangent in one call, for code that propagates tangents itself."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack  # torch depends on it

from .api import Arguments, no_values, prepare, with_arguments
from .call.qv import joined_with_tangents
from .call.scalars import flag
from .call.spec import Tangents, Tensors
from .call.tangents import need_tangent
from .call.validation import check
from .dispatch.dispatcher import call_jvp
from .dispatch.torch_function import handle, is_compiling, is_overridden


@overload
def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
    *,
    mask_t: Tensor | None = None,
    sinks_t: Tensor | None = None,
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
    *,
    mask_t: Tensor | None = None,
    sinks_t: Tensor | None = None,
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
    *,
    mask_t: Tensor | None = None,
    sinks_t: Tensor | None = None,
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: bool,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]: ...
@with_arguments
def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
    *,
    mask_t: Tensor | None = None,
    sinks_t: Tensor | None = None,
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: bool = False,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `attention` and the tangent of its result in one fused pass.

    Memory is linear in the length. The function works in compiled code. In eager mode,
    torch.func.jvp and dual numbers of `attention` give the same.

        out_t = sum_j P Z ((s_t - lse_t) v + v_t),   lse_t = sum_j P s_t

    with the probabilities P, their dropout factors Z, and the tangents s_t of the scores
    (Lu and Song, Simplifying, Stabilizing and Scaling Continuous-Time Consistency Models, 2024).

    All results have gradients by tensors and tangents. None has a third derivative or forward mode.

    Args:
        q: Queries, as in `attention`.
        k: Keys.
        v: Values.
        q_t: The tangent of q. None is a zero tangent, here and below, and costs nothing.
        k_t: The tangent of k.
        v_t: The tangent of v.
        mask_t: The tangent of a float mask.
        sinks_t: The tangent of sinks.
        qv: More queries, of the values, as in `attention`.
        qv_t: The tangent of qv.
        return_lse: If True, also return the LSE and its tangent.
        **arguments: Those of `attention`.

    Shape:
        q: (B, H, M, D).
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        q_t, k_t, v_t: Shape, dtype and device of q, k and v.
        qv: (B, H, M, Dv).
        mask_t, sinks_t, qv_t: Shape, dtype and device of mask, sinks and qv.
        out, out_t: (B, H, M, Dv), q's dtype.
        lse, lse_t: (B, H, M), float32 (float64 for float64).

    Returns:
        (out, out_t), or (out, lse, out_t, lse_t) with return_lse. out and lse are those of
        `attention`. For a row without keys lse_t is 0 (or its sink's tangent).

    Raises:
        ValueError: As `attention`, and for a tangent that does not have the shape, dtype and device
            of its tensor.
        TypeError: As `attention`, and for a tangent that is not a tensor.
        NotImplementedError: As `attention`.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v, q_t = torch.randn(4, 1, 2, 10, 16, dtype=torch.float64)
        >>> out, out_t = fastattn.attention_jvp(q, k, v, q_t, None, None, causal=True)
        >>> h = 1e-6
        >>> ahead = fastattn.attention(q + h * q_t, k, v, causal=True)
        >>> torch.testing.assert_close((ahead - out) / h, out_t, atol=1e-4, rtol=1e-4)
    """
    flag("return_lse", return_lse)
    if v is None:
        raise no_values(k)
    if qv is not None:
        q, k, q_t, k_t = joined_with_tangents(q, k, v, qv, (q_t, k_t, v_t, qv_t))
    elif qv_t is not None:
        raise ValueError("qv_t: got a tensor, expected None, because qv is None")
    if is_overridden(q, k, v) and not is_compiling():
        own = {"mask_t": mask_t, "sinks_t": sinks_t, "return_lse": return_lse}
        return handle(attention_jvp, (q, k, v, q_t, k_t, v_t), **own, **arguments)
    t, o = prepare(q, k, v, arguments, "attention_jvp")
    given = q, k, v, arguments.get("mask"), arguments.get("sinks")
    try:
        tangents = _fitting(t, given, (q_t, k_t, v_t, mask_t, sinks_t))
    except (TypeError, ValueError):
        check(t, o)  # errors of the tensors take precedence
        raise
    out, normaliser, out_t, lse_t = call_jvp(t, o, tangents)
    return (out, normaliser[0], out_t, lse_t) if return_lse else (out, out_t)


def _fitting(t: Tensors, given, tangents) -> Tangents:
    """The tangents, checked and cast to their tensors' dtypes, which autocast may have changed."""
    found = []
    for name, x, x_t in zip(Tangents._fields, given, tangents):
        if x_t is None:
            found.append(None)
            continue
        need_tangent(name, x_t, x)
        found.append(x_t.to(getattr(t, name).dtype))
    return Tangents(*found)
