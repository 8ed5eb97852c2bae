"""A row and a key that alone see each other, or alone do not, at the edges of the kernels' blocks:
by a mask, and by a mask_mod. Forward and backward, against closed formulas."""

import itertools

import pytest
import torch

import fastattn
from tests.support.backends import not_interpreted, on_variants
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]
D, SCALE = 8, 0.5
# Vectors of 4 to 16 rows, stripes of 32 rows of a mask_mod, tiles of 64 and 128; groups of 4 keys,
# blocks of 64 of a mask_mod, of 128 keys.
ROWS = 0, 3, 4, 15, 16, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 132
KEYS = 0, 3, 4, 63, 64, 65, 127, 128, 191, 192, 255, 256, 300, 319, 329
# Rows and keys of a call, and the rows of pairs. Few rows have kernels of their own. A mask_mod has
# classes of blocks from some number of pairs on, and up to 64 items.
SIZES = {"many rows": (133, 330, ROWS), "few rows": (5, 6600, (0, 4))}
ITEMS = 64

FORMS = {
    "mask": lambda row, key, shown, mask: dict(mask=mask),
    "float mask": lambda row, key, shown, mask: dict(
        mask=torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    ),
    "mask_mod": lambda row, key, shown, mask: dict(
        mask_mod=lambda b, h, i, j: ((i == row[b]) & (j == key[b])) == shown
    ),
    "mask_mod of differences": lambda row, key, shown, mask: dict(
        mask_mod=(lambda b, h, i, j: (i <= row[b]) & (i >= row[b]) & (j - key[b] == 0))
        if shown
        else (lambda b, h, i, j: (i < row[b]) | (i > row[b]) | (j - key[b] != 0))
    ),
}


def expected(q, k, v, seen, dout, dlse):
    """{"out", "lse", "dq", "dk", "dv"} of one row (B,D) that sees the keys `seen` (B,N)."""
    q, k, v, dout, dlse = (x.double() for x in (q, k, v, dout, dlse))
    s = torch.einsum("bd,bnd->bn", q, k).mul(SCALE).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse[:, None])
    out, dp = torch.einsum("bn,bnd->bd", p, v), torch.einsum("bnd,bd->bn", v, dout)
    ds = SCALE * p * (dp - (p * dp).sum(-1, keepdim=True) + dlse[:, None])
    dq, dk = torch.einsum("bn,bnd->bd", ds, k), torch.einsum("bn,bd->bnd", ds, q)
    return dict(out=out, lse=lse, dq=dq, dk=dk, dv=torch.einsum("bn,bd->bnd", p, dout))


@parametrize("size", SIZES, fast=1)
@parametrize("shown", (True, False), ids=("shown", "hidden"), fast=1)
@parametrize("form", FORMS, fast=1)
def test_one_pair(form, shown, size):
    M, N, rows = SIZES[size]
    pairs = [*itertools.product(rows, KEYS)]
    for at in range(0, len(pairs), ITEMS):
        row, key = map(torch.tensor, zip(*pairs[at : at + ITEMS], strict=True))
        check(FORMS[form], shown, M, N, row, key)


def check(form, shown, M, N, row, key):
    """Each item of the batch has another pair, with so high a score that it takes its row if it is
    seen. Incoming gradients are 0 but for this row, so no other adds to the gradients of keys."""
    B, own = len(row), (torch.arange(len(row)), 0, row)
    draw = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, B, 1, M, D, generator=draw)
    k, v = torch.randn(2, B, 1, N, D, generator=draw)
    dlse = torch.randn(B, 1, M, generator=draw)
    k[own[0], 0, key] = q[own] * 40 / (SCALE * q[own].square().sum(-1, keepdim=True))
    others = (torch.arange(M) != row[:, None])[:, None]
    dout[others], dlse[others] = 0, 0
    mask = torch.full((B, 1, M, N), not shown)
    mask[(*own, key)] = shown
    right = expected(q[own], k[:, 0], v[:, 0], mask[own], dout[own], dlse[own])
    given = form(row, key, shown, mask)
    for isa in on_variants("cpu"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = fastattn.attention(*leaves, scale=SCALE, return_lse=True, backend="cpu", **given)
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        assert not dq[others].any()
        if shown:  # the others see nothing
            assert not out[others].any() and (lse[others] == -torch.inf).all()
        found = dict(out=out[own], lse=lse[own], dq=dq[own], dk=dk[:, 0], dv=dv[:, 0])
        for name, x in right.items():
            close = dict(rtol=2e-5, atol=2e-5, msg=f"{isa}: {name}")
            torch.testing.assert_close(found[name].detach().double(), x, **close)
