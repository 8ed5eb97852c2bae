"""profile says what a mask shows, and which arguments would give the same."""

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

import fastattn
from fastattn.inspection import profiling
from fastattn.inspection.mask_structure import structure
from tests.inspection.test_profile import PADDING, X, encoder

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


# -------------------------------------------------------------------------------- what a mask shows

N = 12
I, J = torch.arange(N)[:, None], torch.arange(N)
CAUSAL = J <= I
LENGTHS = torch.tensor([[12], [7]])
RIGHT, LEFT = (J < LENGTHS)[:, None, None], (J >= N - LENGTHS)[:, None, None]
SAME = (torch.arange(N) < 5)[:, None] == (torch.arange(N) < 5)
PADDED = CAUSAL & LEFT


def added(keep, value=-torch.inf):
    return torch.zeros(keep.shape).masked_fill(~keep, value)


SHOWN = {
    "all": (torch.ones(N, N, dtype=torch.bool), "shows everything"),
    "zeros": (torch.zeros(1, 1, N, N), "shows everything"),
    "causal": (CAUSAL[None, None], "causal"),
    "causal, added": (added(CAUSAL), "causal"),
    "causal, finfo.min": (added(CAUSAL, torch.finfo(torch.float32).min), "causal"),
    "every head": (CAUSAL.expand(2, 3, N, N), "causal"),
    "last rows": (CAUSAL[-4:], "causal from the bottom right"),
    "right padding": (RIGHT.expand(2, 1, N, N), "right padding"),
    "small already": (RIGHT, "right padding"),
    "left padding": (LEFT, "left padding"),
    "hidden keys": ((J % 5 > 0).expand(N, N), "hidden keys"),
    "causal right": (CAUSAL & RIGHT, "causal + right padding"),
    "causal left": (PADDED, "causal + left padding"),
    "causal left, as transformers": (
        PADDED | ~PADDED.any(-1, keepdim=True),
        "causal + left padding",
    ),
    "window": (CAUSAL & (J > I - 4), "causal + a window of (3, 0)"),
    "window left": (CAUSAL & (J > I - 4) & LEFT, "causal + a window of (3, 0) + left padding"),
    "both sides": ((I - J).abs() < 3, "a window of (2, 2)"),
    "documents": (SAME, "documents, up to 2 in a row"),
    "causal documents": (SAME & CAUSAL, "causal documents, up to 2 in a row"),
    "prefix": (CAUSAL | (J < 4), "causal after a prefix of up to 4 keys"),
    "bias": (torch.linspace(0, 1, N * N).view(N, N), "added to the scores: a bias"),
    "-1e4 hides nothing": (added(CAUSAL, -1e4), "added to the scores: a bias"),
    "heads": (torch.stack([CAUSAL, ~CAUSAL])[None], "other keys for each head"),
    "no structure": ((I + J) % 3 > 0, "no structure that is known, 67% shown"),
    "padded rows": (CAUSAL & RIGHT & RIGHT.mT, "causal + right padding"),
    "padded documents": (SAME & CAUSAL & RIGHT & RIGHT.mT, "causal documents, up to 2 in a row"),
}


def as_advised(found, mask, B, heads, M, N):
    """The output by the arguments that are advised, and by the mask."""
    q, k = torch.randn(B, heads, M, 8), torch.randn(B, heads, N, 8)
    given = dict(found.arguments)
    if "key_lengths" in given:
        given["key_lengths"] = given["key_lengths"].expand(B).contiguous()
    return fastattn.attention(q, k, k, **given), fastattn.attention(q, k, k, mask=mask)


@pytest.mark.parametrize("name", SHOWN)
def test_structure_names_masks_and_equivalent_arguments(name):
    """A mask is named, and the arguments advised in its place give the same output."""
    mask, what = SHOWN[name]
    M = mask.shape[-2] if mask.shape[-2] > 1 else N
    found = structure(mask, M, N)
    assert found.what == what
    if found.arguments is None:
        return
    assert found.instead and set(found.arguments) <= {"causal", "window", "key_lengths", "mask"}
    out, wanted = as_advised(found, mask, 2, 3, M, N)
    seen = (out * wanted).abs().sum(-1, keepdim=True) > 0  # rows of padding are 0 in one of the two
    assert seen.sum() > M
    torch.testing.assert_close(out * seen, wanted * seen)


def test_padded_queries_are_not_reported_as_padded_keys():
    """Padded queries are not reported as padded keys if the item's other queries see all keys."""
    rows = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
    assert structure(rows[:, None, :, None].expand(2, 1, 6, 10), 6, 10).what == "shows everything"


@pytest.mark.parametrize("shape", [(1, 1, 1, 3, 4), (0, 1, 3, 4), (2, 1, 0, 0)])
def test_a_mask_without_readable_values_has_no_structure(shape):
    assert structure(torch.ones(shape).bool(), *shape[-2:]).arguments is None


# ---------------------------------------------------------------------- advice that can be followed


def drawn_mask(seed):
    """A random mask: causal at a corner, window, padding on a side, holes, rows without keys."""
    draw = torch.Generator().manual_seed(seed)

    def often(percent):
        return torch.randint(100, (), generator=draw) < percent

    def upto(n):
        return int(torch.randint(n + 1, (), generator=draw))

    B, M = 1 + upto(2), 1 + upto(7)
    N = M if often(40) else 1 + upto(9)
    ahead = torch.arange(N) - torch.arange(M)[:, None] - (N - M) * bool(often(50))
    keep = torch.ones(B, M, N, dtype=torch.bool)
    if often(60):
        keep &= ahead <= 0
    if often(40):
        keep &= ahead >= -upto(4)
    if often(20):
        keep &= ahead <= upto(6) - 3
    lengths = torch.randint(N + 1, (B, 1, 1), generator=draw)
    padding = upto(3)
    keep &= {0: torch.arange(N) < lengths, 1: torch.arange(N) >= N - lengths}.get(padding, True)
    if often(10):
        keep &= torch.rand(B, 1, N, generator=draw) > 0.3
    if often(20):
        keep &= torch.rand(B, M, 1, generator=draw) > 0.3
    if often(20):
        keep |= ~keep.any(-1, keepdim=True)
    return keep


@pytest.mark.slow
def test_advice_gives_what_the_mask_gives():
    """Also if bands hide all keys from some rows. Rows that see everything may be padding."""
    followed = 0
    for seed in range(1500):
        keep = drawn_mask(seed)
        B, M, N = keep.shape
        mask = keep[:, None] if seed % 3 else added(keep[:, None])
        found = structure(mask, M, N)
        if found.arguments is None:
            continue
        out, wanted = as_advised(found, mask, B, 1, M, N)
        emptied = (out == 0).all(-1)[:, 0]
        assert found.taken or not (emptied & keep.any(-1)).any(), seed
        rows = keep.any(-1) & ~(keep.all(-1) & emptied)
        assert torch.allclose(out[:, 0][rows], wanted[:, 0][rows], atol=1e-5), (seed, found)
        followed += 1
    assert followed > 1000


def test_a_second_chunk_that_is_padded():
    """With padding longer than the chunk, the mask cannot be causal from the top left."""
    keep = (torch.arange(20) <= torch.arange(4)[:, None] + 16) & (torch.arange(20) >= 7)
    assert structure(keep, 4, 20).what == "causal from the bottom right + left padding"


@pytest.mark.slow
def test_bands_that_no_argument_makes():
    q = torch.randn(1, 1, N, 8)
    report = fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, CAUSAL.tril(-2)))
    assert "window=" not in str(report) and not report.calls[0].trouble


@pytest.mark.slow
def test_advice_that_raised_is_none(monkeypatch):
    q = torch.randn(1, 1, N, 8)
    monkeypatch.setattr(
        profiling, "_structured", lambda call: lambda: fastattn.attention(q, q, q[0])
    )
    text = str(fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, CAUSAL)))
    assert "dense: causal\n" in text


@pytest.mark.slow
def test_advice_is_a_whole_call():
    q = torch.randn(1, 1, N, 8)
    text = str(fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, CAUSAL, scale=2.0)))
    assert "but causal: fastattn.attention(q, k, v, causal=True, scale=scale)\n" in text
    text = str(fastattn.profile(lambda: F.scaled_dot_product_attention(q, q, q, SAME & CAUSAL)))
    assert "fastattn.attention_packed(q, k, v, cu_q, causal=True)" in text
    assert "to fastattn.attention, in a module" in str(
        fastattn.profile(encoder(), X, src_key_padding_mask=PADDING)
    )
