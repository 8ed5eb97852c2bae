"""Attention and its tangent in one call, for code that propagates tangents itself."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack  # torch depends on it

from .api import Arguments, no_values, prepare, with_arguments
from .call.spec import Tangents, Tensors
from .call.validation import check, need, need_dense, need_like
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
    return_lse: bool = False,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention` and the tangent of its result, in one fused pass with memory linear in the
    length. It works in compiled code; in eager mode, torch.func.jvp and dual numbers of `attention`
    give the same.

        out_t = sum_j P Z ((s_t - lse_t) v + v_t),   lse_t = sum_j P s_t

    with the probabilities P, their dropout factors Z, and the tangents s_t of the scores
    (Lu and Song, Simplifying, Stabilizing and Scaling Continuous-Time Consistency Models, 2024).

    q_t, k_t, v_t, mask_t, sinks_t: the tangents of q, k, v, of a float mask and of sinks, each with
        its tensor's shape, dtype and device. None is a zero tangent, and costs nothing.
    arguments: those of `attention`.

    Returns (out, out_t), or with return_lse (out, lse, out_t, lse_t): out and lse as `attention`
    gives them, out_t like out, and lse_t (B,H,M) like lse, 0 (or its sink's tangent) for a row
    without keys. All have gradients by tensors and tangents; none has a third derivative or forward
    mode.

    Raises as `attention`, and ValueError or TypeError for tangents that do not fit.
    """
    if is_overridden(q, k, v) and not is_compiling():
        own = {"mask_t": mask_t, "sinks_t": sinks_t, "return_lse": return_lse}
        return handle(attention_jvp, (q, k, v, q_t, k_t, v_t), **own, **arguments)
    if v is None:
        raise no_values()
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
        if not isinstance(x_t, Tensor):
            kind = type(x_t).__name__
            raise TypeError(f"{name}_t: got {kind}, expected a torch.Tensor or None")
        need_dense(f"{name}_t", x_t)
        moves = isinstance(x, Tensor) and x.is_floating_point()
        why = f"{name} is {'None' if x is None else 'no floating tensor'}"
        need(moves, f"{name}_t", "a tensor", f"None, because {why}")
        need_like(name, x_t, x, "shape", "dtype", "device")
        found.append(x_t.to(getattr(t, name).dtype))
    return Tangents(*found)
