"""flash-attn 2.8 by its documentation, in float64, one sequence at a time.

It shares no code with fastattn's kernels and oracle: the last row is aligned with the last key, as
the docstrings of flash_attn_interface.py say, a cache is read key by key, and rotations are complex
numbers.
"""

from itertools import pairwise

import torch

from fastattn import Place
from tests.support.naive import baseline


def one(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    s_aux=None,
    dropout_p=0.0,
    kept=None,
):
    """q (M,H,D), k (N,Hk,D), v (N,Hk,Dv), slopes (H,): out (M,H,Dv), lse (H,M)."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    given = dict(
        scale=softmax_scale,
        causal=causal,
        window=[None if n < 0 else n for n in window_size],
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        place=Place(bottom_right=True),
    )
    out, lse = baseline(q, k, v, **given, return_lse=True)
    if kept is not None:
        p = baseline(q, k, v, **given, return_weights=True) * kept / (1 - dropout_p)
        out = p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return out[0].transpose(0, 1), lse[0]


def of_item(b, arguments, kept=None):
    """The arguments of one item of a batch."""
    slopes = arguments.get("alibi_slopes")
    own = {"alibi_slopes": slopes[b] if slopes is not None and slopes.ndim == 2 else slopes}
    return arguments | own | {"kept": None if kept is None else kept[b]}


def dense(q, k, v, kept=None, **arguments):
    """`flash_attn_func`: out (B,M,H,Dv), lse (B,H,M)."""
    items = [one(*x, **of_item(b, arguments, kept)) for b, x in enumerate(zip(q, k, v))]
    return [torch.stack(x) for x in zip(*items)]


def varlen(q, k, v, cu_q, cu_k, kept=None, **arguments):
    """`flash_attn_varlen_func`: out (T,H,Dv), lse (H,T)."""
    outs, lses = [], []
    for b, ((i, m), (j, n)) in enumerate(zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()))):
        own = of_item(b, arguments, kept)
        if kept is not None:
            own["kept"] = own["kept"][:, : m - i, : n - j]
        out, lse = one(q[i:m], k[j:n], v[j:n], **own)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def turned(x, cos, sin, positions, interleaved):
    """x (n,H,D) with its first 2 R columns rotated by angles with the given cos and sin (·,R)."""
    R = cos.shape[1]
    first = x[..., : 2 * R].double()
    a, b = (first[..., 0::2], first[..., 1::2]) if interleaved else first.split(R, -1)
    z = torch.complex(a, b) * torch.complex(cos.double(), sin.double())[positions][:, None]
    y = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else None
    return torch.cat([torch.cat((z.real, z.imag), -1) if y is None else y, x[..., 2 * R :]], -1)


def with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    rotary_interleaved=True,
    **arguments,
):
    """`flash_attn_with_kvcache`: out, lse, and the caches after the call."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    local = tuple(arguments.get("window_size", (-1, -1))) != (-1, -1)
    outs, lses = [], []

    def place(b, position):
        if block_table is None:
            return (b if cache_batch_idx is None else int(cache_batch_idx[b])), position
        page, row = k_cache.shape[1], b if cache_batch_idx is None else int(cache_batch_idx[b])
        return int(block_table[row, position // page]), position % page

    for b, rows in enumerate(q):
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        n = capacity if cache_seqlens is None else cache_seqlens
        n = int(n[b]) if isinstance(n, torch.Tensor) else n
        if rotary_cos is not None:
            steps = range(len(rows)) if local or arguments.get("causal") else [0] * len(rows)
            turn = rotary_cos, rotary_sin, torch.tensor([n + i for i in steps], dtype=torch.long)
            rows = turned(rows, *turn, rotary_interleaved)
        for i in range(0 if k is None else k.shape[1]):
            new = k[b, i : i + 1]
            if rotary_cos is not None:
                new = turned(new, rotary_cos, rotary_sin, torch.tensor([n]), rotary_interleaved)
            k_cache[place(b, n)], v_cache[place(b, n)] = new[0].to(k_cache), v[b, i]
            n += 1
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        keys, values = (
            torch.stack([x[place(b, j)] for j in range(first, n)])
            if n > first
            else x.new_empty(0, *x.shape[2:])
            for x in (k_cache, v_cache)
        )
        out, lse = one(rows, keys, values, **of_item(b, arguments))
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses), k_cache, v_cache


def sequence(
    q,
    k,
    v,
    qv=None,
    *,
    scale=None,
    causal=False,
    window=(None, None),
    chunk=0,
    softcap=0.0,
    sinks=None,
    score_mod=None,
    shown=None,
):
    """One sequence of FlashAttention-3 or -4: q (M,H,D), k (N,Hk,D), v (N,Hk,Dv), qv (M,H,Dv): out
    (M,H,Dv), lse (H,M). window: (left, right), None for no limit, below 0 too. score_mod: of scores
    (H,M,N). shown: (M,N) or (H,M,N), what else may be seen."""
    (M, H, D), N = q.shape, len(k)
    group = H // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k)
    if qv is not None:
        D += v.shape[-1]
        s = s + torch.einsum("ihd,jhd->hij", qv.double(), v)
    s = s * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if score_mod is not None:
        s = score_mod(s)
    at, j = torch.arange(M)[:, None] + N - M, torch.arange(N)[None]
    seen = torch.ones(M, N, dtype=torch.bool)
    left, right = window[0], 0 if causal else window[1]
    if left is not None:
        seen &= j >= at - left
    if right is not None:
        seen &= j <= at + right
    if chunk:
        first = at - at % chunk
        seen &= (j >= first) & (j < first + chunk)
    if shown is not None:
        seen = seen & shown
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.double()[:, None, None].expand(-1, M, 1)), -1)
    lse = s.logsumexp(-1) if s.shape[-1] else torch.full((H, M), -torch.inf, dtype=torch.float64)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0, lse)[..., None])[..., :N]
    return torch.einsum("hij,jhd->ihd", p, v), lse
