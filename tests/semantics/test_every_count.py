"""Sequences with every number of keys in one batch: padded, packed, in pages and selected. Outputs,
the LSE and all gradients are within the error budget of the float64 oracle of the padded batch."""

import functools

import pytest
import torch
from torch.nn import functional as F

import fastattn
from tests.support.backends import not_interpreted, passed, variant, variants
from tests.support.cases import DTYPES, Problem
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]
H, Hk, D, Dv = 4, 2, 24, 16
# All up to more than a block of 128 keys; around two blocks, and around chunks of 512 keys.
EVERY, EDGES = range(146), (0, 1, 15, 16, 17, 33, 63, 64, 65, 113, 127, 128, 129, 145)
LONG = 191, 193, 255, 256, 257, 511, 512, 513, 529, 640, 641
PAGE, BLOCK = 16, 4


def apart(x):
    """x with gaps between its elements, which hold other numbers."""
    return torch.stack((x, x + 1), -1).flatten(-2)[..., ::2]


# Arguments, each with all those that the form of a call has.
ARGUMENTS = {
    "plain": (),
    "sinks": ("sinks", "softcap"),
    "all": ("sinks", "softcap", "mask", "alibi_slopes"),
}


@functools.cache
def judged(rows, lengths, dtype, given):
    """The padded batch, with NaN past each length."""
    lengths = torch.tensor(lengths)
    B, N = len(lengths), int(lengths.max())
    draw = torch.Generator().manual_seed(rows)
    wide = torch.promote_types(dtype, torch.float32)

    def randn(*shape, dtype=dtype):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    past = torch.arange(N) >= lengths[:, None]
    k, v = (randn(B, Hk, N, n).masked_fill(past[:, None, :, None], torch.nan) for n in (D, Dv))
    hidden = torch.rand(B, H, rows, N, generator=draw) < 0.2
    hidden[3::7] = hidden[1::5, 1::2, -1:] = True  # rows that see nothing
    # A sink of 200 takes its rows: where it is left out of a maximum, exp is infinite. One of -inf
    # leaves rows without a key an LSE of -inf.
    arguments = dict(
        sinks=apart(torch.tensor([0.5, 200.0, -1.0, -torch.inf], dtype=wide)),
        softcap=4.0,
        mask=randn(B, H, rows, N).masked_fill(hidden, -torch.inf),
        alibi_slopes=apart(torch.rand(B, H, generator=draw).to(wide)),
    )
    kwargs = {name: arguments[name] for name in ARGUMENTS[given]}
    wanted = "q", "k", "v", *(x for x in ("mask", "sinks") if x in kwargs)
    kwargs |= dict(key_lengths=lengths, return_lse=True)
    incoming = randn(B, H, rows, Dv), randn(B, H, rows, dtype=wide)
    return Verdict(Problem(given, randn(B, H, rows, D), k, v, kwargs, *incoming, wanted))


# ------------------------------------------ the forms, each with the results of the padded batch


def tokens(x):
    """(B,H,M,D) as (B M,H,D)."""
    return x.transpose(1, 2).flatten(0, 1)


def of_rows(q):
    """Arguments of a packed call: its queries and their offsets."""
    B, _, M, _ = q.shape
    return dict(q=tokens(q), cu_q=torch.arange(B + 1) * M, max_q=M)


def in_items(results, B):
    return tuple(x.unflatten(0, (B, -1)).transpose(1, 2) for x in results)


def within(lengths, N):
    return torch.arange(N) < lengths[:, None]


def packed(q, k, v, *, key_lengths, **given):
    seen = within(key_lengths, k.shape[2])
    keys = dict(k=k.transpose(1, 2)[seen], v=v.transpose(1, 2)[seen])
    keys |= dict(cu_k=F.pad(key_lengths.cumsum(0), (1, 0)), max_k=k.shape[2])
    return in_items(fastattn.attention_packed(**of_rows(q), **keys, **given), len(q))


def paged(q, k, v, *, key_lengths, **given):
    """Pages in no order. What no sequence has is NaN."""
    seen = within(key_lengths, k.shape[2])
    pages = -(-key_lengths // PAGE)
    table = torch.zeros(len(q), int(pages.max()), dtype=torch.int64)
    draw = torch.Generator().manual_seed(0)
    table[within(pages, table.shape[1])] = torch.randperm(int(pages.sum()), generator=draw)
    b, j = seen.nonzero(as_tuple=True)
    at = table[b, j // PAGE], j % PAGE

    def pool(x):
        empty = torch.full((int(pages.sum()), PAGE, *x.shape[1::2]), torch.nan, dtype=x.dtype)
        return empty.index_put(at, x.transpose(1, 2)[seen])

    keys = dict(k=pool(k), v=pool(v), block_table=table, key_lengths=key_lengths)
    keys |= dict(max_k=k.shape[2]) if "mask" in given else {}
    return in_items(fastattn.attention_packed(**of_rows(q), **keys, **given), len(q))


def selected(groups, times):
    """All blocks, in ascending order, each as many times."""

    def attention(q, k, v, **given):
        blocks = torch.arange(-(-k.shape[2] // BLOCK)).repeat_interleave(times)
        indices = blocks.expand(len(q), groups, q.shape[2], -1)
        return fastattn.attention_selected(q, k, v, indices, block=BLOCK, **given)

    return attention


FORMS = {
    "padded": fastattn.attention,
    "packed": packed,
    "paged": paged,
    "selected": selected(1, 1),
    "selected by key head, twice": selected(Hk, 2),
    "selected by head": selected(H, 1),
}


def cases():
    for form in FORMS:
        for rows in (1, 3, 20):
            of_form = [x for x in ARGUMENTS if x != ("all" if "selected" in form else "sinks")]
            for given in of_form if rows < 8 or "selected" not in form else ():
                yield form, rows, given, "float32"
        for dtype in ("bfloat16", "float16", "float64"):
            yield form, 1, "plain", dtype


@parametrize("form, rows, given, dtype", [*cases()], fast=3)
def test_every_number_of_keys(form, rows, given, dtype):
    for lengths in (EVERY if rows < 8 else EDGES, LONG):
        verdict = judged(rows, lengths, DTYPES[dtype], given)
        for isa in variants("cpu", DTYPES[dtype]):
            with variant(isa):
                passed([f"{isa}: {x}" for x in verdict.complaints(FORMS[form], backend="cpu")])
