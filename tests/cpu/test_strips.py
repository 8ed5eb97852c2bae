"""Forward skips what a band hides from some rows of a tile (`Strips` in visible_keys.h), and no bit
changes: a call with a band gives the bits of the same call with the band as a mask."""

import random

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from tests.support.backends import INTERPRETED, variant
from tests.support.cases import DTYPES
from tests.support.marks import parametrize

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no test of Triton"),
]
# On tiles a row's pivot moves by chunks of the keys that are read, so there the bits differ.
ISAS = [x for x in libraries.cpu_isas() if not x.startswith("amx")]
EDGES = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 130)


def lengths(draw):
    """Rows and keys: at the edges of vectors, tiles and blocks, and anything between."""
    rows, keys = (draw.choice((draw.choice(EDGES), draw.randint(1, 130))) for _ in range(2))
    return max(rows, 17), keys  # more rows than the kernels of few rows take


def bands(draw, m, n):
    """Arguments of a band, and as a mask."""
    causal = draw.choice((True, "bottom_right", "bottom_right", False))
    left = draw.choice((None, draw.randint(0, 70)))
    right = draw.choice((None, draw.randint(0, 40)))
    given = dict(causal=causal, window=(left, right))
    at = torch.arange(m)[:, None] + (n - m if causal == "bottom_right" else 0)
    keys = torch.arange(n)
    shown = torch.ones(m, n, dtype=torch.bool)
    if causal:
        shown &= keys <= at
    if left is not None:
        shown &= keys >= at - left
    if right is not None:
        shown &= keys <= at + right
    return given, shown


def features(draw, b, h, given):
    if draw.random() < 0.2:
        given["softcap"] = 3.0
    if draw.random() < 0.2:
        given["sinks"] = torch.randn(h)
    if draw.random() < 0.2:
        given |= dict(dropout_p=0.3, seed=7)
    if draw.random() < 0.2 and given["causal"] != "bottom_right":
        given["alibi_slopes"] = torch.rand(h)
    if draw.random() < 0.2 and given["causal"] != "bottom_right":  # it moves the diagonal
        given["key_lengths"] = torch.tensor([draw.randint(0, 130) for _ in range(b)])
    return given


def calls(seed, dtype):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        b, hk, group = draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((1, 1, 3))
        (m, n), d, dv = lengths(draw), draw.choice((8, 33, 64)), draw.choice((5, 16, 33, 64, 80))
        q, k, v = (
            torch.randn(b, h, rows, columns).to(dtype)
            for h, rows, columns in ((hk * group, m, d), (hk, n, d), (hk, n, dv))
        )
        given, shown = bands(draw, m, n)
        given = features(draw, b, hk * group, given)
        if "key_lengths" in given:
            given["key_lengths"].clamp_(max=n)
        yield (q, k, v), given, shown


@parametrize("dtype", DTYPES, fast=2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(4))
def test_a_band_gives_the_bits_of_its_mask(seed, isa, dtype):
    with variant(isa), torch.no_grad():
        for tensors, given, shown in calls(seed, DTYPES[dtype]):
            band = fastattn.attention(*tensors, **given, return_lse=True, backend="cpu")
            given |= dict(causal=False, window=None, mask=shown)
            mask = fastattn.attention(*tensors, **given, return_lse=True, backend="cpu")
            for x, y in zip(band, mask, strict=True):
                assert torch.equal(x, y), ([tuple(t.shape) for t in tensors], given)
