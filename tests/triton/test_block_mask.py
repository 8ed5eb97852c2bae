"""The blocks of a dense mask that Triton's passes visit: each block that a tile sees, once, in the
right part; no block that the mask hides; and the longest run of fully visible blocks without
reading the mask."""

import pytest
import torch

from fastattn.backends.triton import tile_configs
from fastattn.backends.triton.job import Job
from fastattn.call import spec, validation
from tests.support.backends import INTERPRETED, looked_at
from tests.support.marks import parametrize

if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]
M, N, BM, BN = 75, 170, 16, 32
HIDDEN = {"bool": None, "-inf": -torch.inf, "finfo.min": torch.finfo(torch.float32).min}
MASKS = {
    "causal": lambda i, j: j <= i + N - M,
    "blocks": lambda i, j: i // 40 == j // 70,
    "gaps": lambda i, j: (j // BN % 2 == 0) & (i // BM != 2),
    "two runs": lambda i, j: (j < 40) | (j >= 64) & (j < 160),
    "rows of none": lambda i, j: (i % 9 != 4) & (j > i),
    "all": lambda i, j: j >= 0,
    "none": lambda i, j: j < 0,
    "one": lambda i, j: (i == 20) & (j == 100),
    "after": lambda i, j: j > i,
}
BANDS = {
    "": {},
    "causal": dict(causal="bottom_right"),
    "window": dict(left=50, right=30),
    "lengths": dict(causal="top_left"),
}


def parts(found, plane, tile, tiles):
    """(whole, edges, read): the blocks of each part."""
    entry = found.ptr.view(-1, tiles, found.size)[plane, tile].tolist()
    lo, hi, full, begin, end, tail, n, at = entry[:8]
    listed = entry[at:]
    run = list(range(lo, hi))
    assert listed[begin:end] == run
    read = listed[full:tail]
    if run:
        del read[begin - full : end - full]
    return run, listed[:full] + listed[tail:n], read


def longest(flags):
    """The length of the longest run of true flags."""
    return max(map(len, "".join("x" if x else " " for x in flags).split()), default=0)


def call(mask, band, lengths):
    q, k = torch.zeros(2, 2, M, 16), torch.zeros(2, 2, N, 16)
    t = spec.Tensors(q, k, k, mask=mask, key_lengths=lengths)
    return Job(validation.describe(t, spec.Options(**BANDS[band])), t)


def tiled(x, side):
    """(planes, M, N) as blocks (planes, tiles, steps, BM, BN). `side` is what a tile owns."""
    x = torch.nn.functional.pad(x, (0, -N % BN, 0, -M % BM))
    x = x.unflatten(2, (-1, BN)).unflatten(1, (-1, BM)).transpose(2, 3)
    return x.transpose(1, 2) if side == "keys" else x


@pytest.mark.parametrize("side", ["rows", "keys"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("form", HIDDEN)
@parametrize("what", MASKS, fast=1)
def test_blocks(what, form, band, side):
    i, j = torch.arange(M)[:, None], torch.arange(N)
    shown = torch.stack([MASKS[x](i, j).expand(M, N) for x in (what, "gaps")])
    mask = shown[:, None]
    if form != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, HIDDEN[form])
    lengths = torch.tensor([100, N]) if band == "lengths" else None
    with looked_at():
        job = call(mask, band, lengths)
    c = tile_configs.Config(BM, BN, 4, 1)
    found = job.block_mask(side, c)
    assert job.block_mask(side, c) is found, "made again"

    # What the band and the lengths show.
    n = torch.tensor([N, N]) if lengths is None else lengths
    s, at = job.spec, i[None] + (n[:, None, None] - M if job.spec.bottom_right else 0)
    there = (j < n[:, None, None]) & (j >= at - s.left) & (j <= at + s.right)
    sees = (shown & there).any(2, keepdim=True)
    hides = ~shown & sees if form == "finfo.min" else ~shown
    exists = torch.ones_like(there)
    needed = tiled(there & ~hides, side).flatten(3).any(3)
    hidden = ~tiled(exists & ~hides, side).flatten(3).any(3)
    inside, whole = (~tiled(exists & ~x, side).flatten(3).any(3) for x in (there, there & shown))
    for plane, tile in torch.cartesian_prod(*map(torch.arange, needed.shape[:2])).tolist():
        about = f"plane {plane}, tile {tile}"
        run, edges, read = parts(found, plane, tile, needed.shape[1])
        visited = sorted(run + edges + read)
        assert len(set(visited)) == len(visited), about
        assert set(needed[plane, tile].nonzero().flatten().tolist()) <= set(visited), about
        assert whole[plane, tile][run].all() and inside[plane, tile][read].all(), about
        if form != "finfo.min" or sees[plane].all():
            assert not hidden[plane, tile][visited].any(), about
        if not band and side == "rows":
            ends = torch.arange(needed.shape[2]) < N // BN
            assert len(run) == longest(whole[plane, tile] & ends), about


@pytest.mark.parametrize("side", ["rows", "keys"])
def test_nan_hides_nothing(side):
    mask = torch.full((M, N), -torch.inf)
    mask[20, 100] = torch.nan
    with looked_at():
        found = call(mask, "", None).block_mask(side, tile_configs.Config(BM, BN, 4, 1))
    tile, tiles, block = (1, -(-M // BM), 3) if side == "rows" else (3, -(-N // BN), 1)
    run, edges, read = parts(found, 0, tile, tiles)
    assert not run and edges + read == [block]
