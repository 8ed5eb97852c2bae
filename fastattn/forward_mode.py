"""Attention and its tangent in one call, for code that propagates tangents itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, overload

from torch import Tensor
from typing_extensions import Unpack  # torch depends on it

from .api import no_values, prepare
from .call.need import flag
from .call.qv import joined_with_tangents
from .call.signatures import tangents_among, with_arguments
from .call.spec import TangentArguments, Tangents, Tensors
from .call.validation import check, need_tangent
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
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: Literal[False] = False,
    **arguments: Unpack[TangentArguments],
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
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: Literal[True],
    **arguments: Unpack[TangentArguments],
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
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: bool,
    **arguments: Unpack[TangentArguments],
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]: ...
@functools.partial(with_arguments, kind=TangentArguments)
def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
    *,
    qv: Tensor | None = None,
    qv_t: Tensor | None = None,
    return_lse: bool = False,
    **arguments: Unpack[TangentArguments],
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
        qv: More queries, of the values, as in `attention`.
        qv_t: The tangent of qv.
        return_lse: If True, also return the LSE and its tangent.
        **arguments: Those of `attention`; and the tangents of the optional tensors that have a
            gradient, such as mask_t and sinks_t, each in its tensor's shape, dtype and device.

    Shape:
        q: (B, H, M, D).
        k: (B, Hk, N, D).
        v: (B, Hk, N, Dv).
        q_t, k_t, v_t: Shape, dtype and device of q, k and v.
        qv: (B, H, M, Dv).
        qv_t: Shape, dtype and device of qv.
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
        given = q, k, v, q_t, k_t, v_t
        return handle(attention_jvp, given, return_lse=return_lse, **arguments)
    moves = dict(q=q_t, k=k_t, v=v_t) | tangents_among(arguments)
    t, o = prepare(q, k, v, arguments, "attention_jvp")
    given = dict(q=q, k=k, v=v) | arguments
    try:
        tangents = _fitting(t, given, moves)
    except (TypeError, ValueError):
        check(t, o)  # errors of the tensors take precedence
        raise
    out, normaliser, out_t, lse_t = call_jvp(t, o, tangents)
    return (out, normaliser[0], out_t, lse_t) if return_lse else (out, out_t)


def _fitting(t: Tensors, given: Mapping[str, Any], moves: Mapping[str, Any]) -> Tangents:
    """The tangents, checked and cast to their tensors' dtypes, which autocast may have changed."""
    tangents = {}
    for name, x_t in moves.items():
        if x_t is not None:
            need_tangent(name, x_t, given.get(name))
            tangents[name] = x_t.to(t.given(name).dtype)
    return Tangents(**tangents)
