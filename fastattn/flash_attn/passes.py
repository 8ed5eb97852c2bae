"""flash-attn 2.8's single passes without autograd, which ring and context parallelism call.

They are private in flash-attn, but other libraries import them from `flash_attn_interface`. Names,
argument order and defaults are those of 2.8. A forward pass returns (out, softmax_lse, S_dmask,
rng_state). A backward pass writes dq, dk and dv, where they are not None, and returns the row sums
of dout * out. Its `out` and `softmax_lse` may be those of all keys while k and v are only a part of
the keys.

rng_state (2,) int64 is the dropout seed, then 0. S_dmask has no elements unless requested;
otherwise it is that of `flash_attn_func`. S_dmask and the row sums have their exact sizes, while
flash-attn rounds them up to blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..api import draw_seed, prepare, prepare_packed
from ..call.spec import Options, Tensors
from ..dispatch import run_pass
from ..dispatch.operation import ATTENTION, BACKWARD
from .checks import in_their_names
from .translation import Arguments, arguments_of, dense, packed

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """q (B,M,H,D), k (B,N,Hk,D), v (B,N,Hk,Dv): out (B,M,H,Dv), LSE (B,H,M), S_dmask, rng_state."""
    window = window_size_left, window_size_right
    scores = softmax_scale, causal, window, softcap, alibi_slopes
    arguments = arguments_of(*scores, dropout_p=dropout_p)
    arguments, rng_state = _drawn(arguments, q)
    with in_their_names():
        return _forward(q, *dense(q, k, v, arguments, return_softmax), rng_state)


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Forward:
    """q (T,H,D), k (S,Hk,D), v (S,Hk,Dv), as in `flash_attn_varlen_func`: out (T,H,Dv), LSE (H,T),
    S_dmask, rng_state. seqused_k (B,) is how many keys of each sequence are used."""
    if leftpad_k is not None:
        raise NotImplementedError(
            "leftpad_k: got a tensor, expected None: flash_attn_with_kvcache has cache_leftpad"
        )
    if seqused_k is not None and return_softmax and dropout_p:
        raise NotImplementedError(
            "return_softmax: got True beside seqused_k and dropout_p, expected False; or give the "
            "lengths by cu_seqlens_k and omit seqused_k"
        )
    window = window_size_left, window_size_right
    scores = softmax_scale, causal, window, softcap, alibi_slopes
    arguments = arguments_of(*scores, dropout_p=dropout_p)
    arguments, rng_state = _drawn(arguments, q)
    where = cu_seqlens_k
    if block_table is not None:
        where = block_table, cu_seqlens_k.diff() if seqused_k is None else seqused_k
    elif seqused_k is not None:
        arguments |= dict(key_lengths=seqused_k)
    sizes = max_seqlen_q, max_seqlen_k
    with in_their_names(key_lengths="seqused_k"):
        outputs = packed(q, k, v, cu_seqlens_q, where, *sizes, arguments, return_softmax)
        return _forward(q, *outputs, rng_state)


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq (B,M,H,D), dk (B,N,Hk,D), dv (B,N,Hk,Dv); return the row sums (B,H,M)."""
    window = window_size_left, window_size_right
    scores = softmax_scale, causal, window, softcap, alibi_slopes
    arguments = arguments_of(*scores, dropout_p=dropout_p, deterministic=deterministic)
    arguments = _drawn_before(arguments, rng_state)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    with in_their_names():
        t, o = prepare(*heads_first, arguments=arguments)
    outs = out.transpose(1, 2), softmax_lse
    gradients = _gradients(t, o, outs, dout.transpose(1, 2))
    _write((dq, dk, dv), [x.transpose(1, 2) for x in gradients])
    return _row_sums(dout, out).transpose(1, 2).contiguous()


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq (T,H,D), dk (S,Hk,D), dv (S,Hk,Dv); return the row sums (H,T)."""
    window = window_size_left, window_size_right
    scores = softmax_scale, causal, window, softcap, alibi_slopes
    arguments = arguments_of(*scores, dropout_p=dropout_p, deterministic=deterministic)
    arguments = _drawn_before(arguments, rng_state)
    where = cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k, None, None
    with in_their_names():
        t, o = prepare_packed(q, k, v, *where, arguments)
    outs = out.transpose(0, 1)[None], softmax_lse[None]
    gradients = _gradients(t, o, outs, dout.transpose(0, 1)[None])
    _write((dq, dk, dv), [x[0].transpose(0, 1) for x in gradients])
    return _row_sums(dout, out).transpose(0, 1).contiguous()


# In flash-attn these are torch.library operators if torch supports them; here, the same functions.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _drawn(arguments: Arguments, q: Tensor) -> tuple[Arguments, Tensor]:
    """The arguments with a new seed, if there is dropout, and the rng_state that holds it."""
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if not arguments["dropout_p"]:
        return arguments, rng_state
    rng_state[:1] = draw_seed(q.device)
    return _drawn_before(arguments, rng_state), rng_state


def _drawn_before(arguments: Arguments, rng_state: Tensor | None) -> Arguments:
    if not arguments["dropout_p"]:
        return arguments
    if rng_state is None:
        raise ValueError("rng_state: got None beside dropout_p, expected that of the forward pass")
    return arguments | dict(seed=rng_state[:1])


def _forward(
    q: Tensor, out: Tensor, lse: Tensor, S_dmask: Tensor | None, rng_state: Tensor
) -> Forward:
    return out, lse, q.new_empty(0) if S_dmask is None else S_dmask, rng_state


def _gradients(
    t: Tensors, o: Options, outs: tuple[Tensor, Tensor], dout: Tensor
) -> Sequence[Tensor]:
    """Gradients of q, k and v, as (B,H,·,·). outs: out and LSE, of these keys or of more."""
    out, lse = outs
    known = out, torch.stack([lse, torch.zeros_like(lse)])
    groups = (dout, None), known
    return run_pass.run(BACKWARD, ATTENTION, t, o._replace(grad=True), groups, ("q", "k", "v"))


def _write(rooms: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> None:
    for room, x in zip(rooms, gradients):
        if room is not None:
            room.copy_(x)


def _row_sums(dout: Tensor, out: Tensor) -> Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(wide) * out.to(wide)).sum(-1)
