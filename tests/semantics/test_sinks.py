"""Sinks beside rows that see no key, one key and all keys, in every form of a call. A sink of -inf
is no sink: results and derivatives are those of the oracle, and its gradient is 0."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.func import jvp

import fastattn
from fastattn.backends.base import get
from fastattn.call.spec import Feature, acc_dtype
from fastattn.distributed.ring import PartialResult
from fastattn.flash_attn import flash_attn_varlen_func
from tests.support.backends import (
    DECLARED,
    FUSED,
    INTERPRETED,
    declares,
    every_call,
    small,
    variant,
    variants,
)
from tests.support.cases import DTYPES
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")
H, HK, D, DV, PAGE = 4, 2, 16, 24, 16
N = small(80, 32)
LENGTHS = torch.tensor([0, 1, N])  # the keys that the rows of each item see
B = len(LENGTHS)
SEEN = torch.arange(N) < LENGTHS[:, None]
NONE = -torch.inf
SINKS = {
    "-inf": [NONE] * H,
    "0": [0.0] * H,
    "200": [200.0] * H,
    "one of each": [NONE, 0.0, 200.0, NONE],
}
ROWS = small((1, 20), (1, 3))
BOUND = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 4e-2, "float16": 6e-3}


# -- forms of a call: functions of q (B,H,M,D), k, v (B,Hk,N,..) and sinks, which return out and LSE


def lengths(q, k, v, **more):
    return fastattn.attention(q, k, v, key_lengths=LENGTHS, **more)


def bool_mask(q, k, v, **more):
    return fastattn.attention(q, k, v, mask=SEEN[:, None, None], **more)


def float_mask(q, k, v, **more):
    mask = torch.zeros(SEEN.shape, dtype=q.dtype).masked_fill(~SEEN, NONE)
    return fastattn.attention(q, k, v, mask=mask[:, None, None], **more)


def mask_mod(q, k, v, **more):
    return fastattn.attention(q, k, v, mask_mod=lambda b, h, i, j: j < LENGTHS[b], **more)


def weights(q, k, v, *, return_lse, **more):
    p = fastattn.attention_weights(q, k, key_lengths=LENGTHS, **more)
    return p @ v.repeat_interleave(H // HK, 1), lengths(q, k, v, return_lse=True, **more)[1]


def tokens(x):
    return x.transpose(1, 2).flatten(0, 1)


def of_tokens(found, M):
    return tuple(x.unflatten(0, (B, M)).transpose(1, 2) for x in found)


def offsets(q):
    return torch.arange(B + 1) * q.shape[2]


def without_padding(x):
    return torch.cat([y[:, :n] for y, n in zip(x, LENGTHS)], 1).transpose(0, 1)


CU_K = torch.tensor([0, 0, 1, N + 1])


def packed(q, k, v, **more):
    k, v = map(without_padding, (k, v))
    found = fastattn.attention_packed(tokens(q), k, v, offsets(q), CU_K, **more)
    return of_tokens(found, q.shape[2])


def flash_attn(q, k, v, *, sinks, **more):
    k, v, M = *map(without_padding, (k, v)), q.shape[2]
    about = offsets(q).int(), CU_K.int(), M, N
    given = dict(return_attn_probs=True, s_aux=sinks)
    out, lse, _ = flash_attn_varlen_func(tokens(q), k, v, *about, **given)
    return of_tokens((out, lse.T), M)


def paged(q, k, v, **more):
    k, v = (x.unflatten(2, (-1, PAGE)).permute(0, 2, 3, 1, 4).flatten(0, 1) for x in (k, v))
    table, M = torch.arange(B * N // PAGE).view(B, -1), q.shape[2]
    about = dict(block_table=table, key_lengths=LENGTHS, max_q=M, max_k=N)
    found = fastattn.attention_packed(tokens(q), k, v, offsets(q), **about, **more)
    return of_tokens(found, M)


def selected(q, k, v, G, **more):
    chosen = torch.arange(N).masked_fill(~SEEN, -1)[:, None, None].expand(B, G, q.shape[2], N)
    return fastattn.attention_selected(q, k, v, chosen, **more)


def one_list(*given, **more):
    return selected(*given, 1, **more)


def by_key_head(*given, **more):
    return selected(*given, HK, **more)


def by_head(*given, **more):
    return selected(*given, H, **more)


def in_parts(q, k, v, *, sinks, **more):
    """Parts of the keys. Some see none; one has the sinks."""
    found = []
    for first, end in ((0, 1), (1, N - 1), (N - 1, N)):
        own = dict(sinks=sinks if first == 1 else None)
        own |= dict(key_lengths=(LENGTHS - first).clamp(0, end - first))
        cut = (x[:, :, first:end] for x in (k, v))
        found.append(fastattn.attention(q, *cut, **own, **more))
    return found


def merged(*given, **more):
    return fastattn.merge(in_parts(*given, **more))


def ring(*given, **more):
    """What each rank of a ring does with the results for the keys of the others."""
    parts = [
        PartialResult(x, torch.stack([y, torch.zeros_like(y)])) for x, y in in_parts(*given, **more)
    ]
    out, normaliser = parts[0].merged(parts[1]).merged(parts[2])
    return out, normaliser.sum(0)


def cache(q, k, v, **more):
    kept = fastattn.KVCache(B, HK, D, value_dim=DV, dtype=q.dtype, capacity=N, page_size=PAGE)
    kept.append(k, v)
    return kept.attention(q, False, mask=SEEN[:, None, None], **more)


def exactly(q, k, v, *, sinks):
    return fastattn.reference.attention(q, k, v, sinks=sinks, key_lengths=LENGTHS, return_lse=True)


# -- passes


def randn_like(tensors, seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in tensors]


def forward(call, given):
    return call(*given)


def first(call, given):
    """Results and gradients. The LSE of an empty row gets a gradient, too."""
    given = [x.detach().requires_grad_() for x in given]
    found = call(*given)
    return *(x.detach() for x in found), *torch.autograd.grad(found, given, randn_like(found, 1))


def second(call, given):
    """The tangents of results and of gradients."""
    moves = randn_like(given, 2)
    along = jvp(call, tuple(given), tuple(moves))[1]
    given = [x.detach().requires_grad_() for x in given]
    weights = randn_like(along, 3)
    grads = torch.autograd.grad(call(*given), given, weights, create_graph=True)
    moved = sum((x * y).sum() for x, y in zip(grads, moves))
    return *along, *torch.autograd.grad(moved, given)


DENSE = lengths, bool_mask, float_mask, mask_mod
OTHERS = weights, packed, paged, flash_attn, merged, one_list, by_key_head, by_head
CASES = [(x, first) for x in DENSE + OTHERS] + [(x, second) for x in DENSE]
CASES += [(x, forward) for x in (ring, cache)]
IN_PAGES = paged, one_list, by_key_head, by_head, cache


@pytest.mark.parametrize("name", FUSED + ["reference"] * (not INTERPRETED))
@parametrize("dtype", small(DECLARED, ["float32"]), fast=2)
@parametrize("sinks", small(list(SINKS), ["one of each"]), fast=2)
@parametrize("form, passes", CASES, ids=lambda x: x.__name__, fast=2)
def test_sinks(name, form, passes, sinks, dtype):
    features = Feature.PAGED if form in IN_PAGES else Feature.NONE
    declares(name, DTYPES[dtype], features | (Feature.TANGENTS if passes is second else features))
    own = torch.tensor(SINKS[sinks], dtype=acc_dtype(DTYPES[dtype]))
    if form is flash_attn:  # it takes no backend
        call, at = form, partial(every_call, get(name))
    else:
        call, at = partial(form, backend=name), nullcontext
    for M in ROWS:
        shapes = (B, H, M, D), (B, HK, N, D), (B, HK, N, DV)
        given = [x.to(DTYPES[dtype]) for x in randn_like(map(torch.empty, shapes), 0)] + [own]
        expected = passes(lambda *x: exactly(*x[:3], sinks=x[3]), [x.double() for x in given])
        for isa in variants(name, DTYPES[dtype]):
            with variant(isa), at():
                found = passes(lambda *x: call(*x[:3], sinks=x[3], return_lse=True), given)
            for x, y in zip(found, expected, strict=True):
                bound = BOUND[dtype] * (1 + float(y[y.isfinite()].abs().max()))
                why = f"{M} rows on {isa}: {{}}".format
                torch.testing.assert_close(x.double(), y, rtol=0, atol=bound, msg=why)
            assert passes is not first or not found[-1][own == NONE].any()
