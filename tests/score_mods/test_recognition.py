"""Structure of programs: what is recognised means the same; near misses stay programs."""

import pytest
import torch

from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.recognition import Shape, Structure, recognise
from fastattn.score_mods.tracing import merge, trace_mask_mod, trace_score_mod
from tests.score_mods import gallery
from tests.score_mods.gallery import INDICES, LENGTHS, PADDING, SLOPES, B, H, N

SHAPE = Shape(B, H, N, N)


def found(score=None, mask=None, shape=SHAPE) -> Structure:
    traced = score and trace_score_mod(score), mask and trace_mask_mod(mask)
    one, two, tensors = merge(*traced)
    structure = recognise(one, two, tensors, shape)
    check(structure, one, two, tensors)
    return structure


def check(structure, score, mask, tensors):
    """The structure hides the pairs that the mask hides, and has the scores of the rest."""
    i, j = INDICES["i"], INDICES["j"]
    seen = torch.ones(B, H, N, N, dtype=torch.bool)
    if structure.band is not None:
        left, right = structure.band
        seen &= torch.ones(N, N, dtype=torch.bool) if left is None else j >= i - left
        seen &= torch.ones(N, N, dtype=torch.bool) if right is None else j <= i + right
    if structure.key_lengths is not None:
        seen &= j < structure.key_lengths.view(B, 1, 1, 1)

    if structure.mask is not None:
        seen &= evaluate(structure.mask, tensors, **INDICES)
    if mask is not None:
        assert torch.equal(seen, evaluate(mask, tensors, **INDICES).expand_as(seen))
    if score is None:
        return
    s = torch.randn(B, H, N, N, dtype=torch.float64)
    x = s if structure.score is None else evaluate(structure.score, tensors, score=s, **INDICES)
    if structure.softcap is not None:
        x = structure.softcap * torch.tanh(x / structure.softcap)
    if structure.alibi is not None:
        x = x - structure.alibi.view(1, H, 1, 1) * (i - j).abs()
    expected = evaluate(score, tensors, score=s, **INDICES)
    torch.testing.assert_close(
        torch.where(seen, x, 0.0), torch.where(seen, expected, 0.0), rtol=1e-6, atol=1e-6
    )


BANDS = {
    "i >= j": (lambda b, h, i, j: i >= j, (None, 0)),
    "j <= i": (lambda b, h, i, j: j <= i, (None, 0)),
    "i > j": (lambda b, h, i, j: i > j, (None, -1)),
    "not i < j": (lambda b, h, i, j: ~(i < j), (None, 0)),
    "not i >= j": (lambda b, h, i, j: ~(i >= j), (-1, None)),
    "not i > j": (lambda b, h, i, j: ~(i > j), (0, None)),
    "not i <= j": (lambda b, h, i, j: ~(i <= j), (None, -1)),
    "i - j >= 0": (lambda b, h, i, j: i - j >= 0, (None, 0)),
    "0 > j - i - 1": (lambda b, h, i, j: 0 > j - i - 1, (None, 0)),
    "offset": (lambda b, h, i, j: i + 3 >= j, (None, 3)),
    "after": (lambda b, h, i, j: j >= i, (0, None)),
    "window": (gallery.MASKS["window"], (4, 0)),
    "overlay": (gallery.MASKS["window by overlay"], (4, 0)),
    "both sides": (lambda b, h, i, j: abs(i - j) <= 3, (3, 3)),
    "both sides, moved": (lambda b, h, i, j: 3 > abs(j - i + 1), (3, 1)),
    "two windows": (lambda b, h, i, j: (abs(i - j) <= 3) & (i - j < 2), (1, 3)),
    "empty": (lambda b, h, i, j: (i > j) & (j > i), (-1, -1)),
    "always": (lambda b, h, i, j: (i >= j) & (i >= 0) & (j > -1), (None, 0)),
    "torch's and": (gallery.and_masks(gallery.causal, gallery.noop_mask), (None, 0)),
    "doubled": (lambda b, h, i, j: 2 * i - i >= j * 1, (None, 0)),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands(name):
    mask, band = BANDS[name]
    assert found(mask=mask) == Structure(band=band)


NO_BANDS = {
    "or": lambda b, h, i, j: (i >= j) | (j < 3),
    "stride": lambda b, h, i, j: 2 * i >= j,
    "sum": lambda b, h, i, j: i + j >= 6,
    "of the head": lambda b, h, i, j: i + h >= j,
    "outside": lambda b, h, i, j: abs(i - j) >= 3,
    "abs of the sum": lambda b, h, i, j: abs(i + j) <= 3,
    "equal": lambda b, h, i, j: i - j == 0,
    "floats": lambda b, h, i, j: i * 1.0 >= j,
    "not both": lambda b, h, i, j: ~((i >= j) & (j > 2)),
    "captured": lambda b, h, i, j: i + LENGTHS[b] >= j,
    "row": lambda b, h, i, j: i >= 2,
}


@pytest.mark.parametrize("name", NO_BANDS)
def test_no_bands(name):
    structure = found(mask=NO_BANDS[name], shape=Shape(B, H, N, N + 1))
    assert structure.band is None and structure.key_lengths is None
    assert structure.mask is not None


LENGTH_MASKS = {
    "lengths": lambda b, h, i, j: j < LENGTHS[b],
    "lengths, turned": lambda b, h, i, j: LENGTHS[b] - 1 >= j,
    "padding": lambda b, h, i, j: PADDING[b, j],
    "padding, ints": lambda b, h, i, j: PADDING.int()[b, j] > 0,
    "padding, chained": lambda b, h, i, j: PADDING[b][j] != 0,
}


@pytest.mark.parametrize("name", LENGTH_MASKS)
def test_key_lengths(name):
    structure = found(mask=LENGTH_MASKS[name])
    assert structure.key_lengths.tolist() == [7, 12] and structure.mask is None
    both = gallery.and_masks(LENGTH_MASKS[name], gallery.causal, lambda b, h, i, j: j < 9)
    structure = found(mask=both)
    assert structure.key_lengths.tolist() == [7, 9] and structure.band == (None, 0)


def test_padding_at_the_left_stays():
    table = PADDING.flip(1)
    structure = found(mask=lambda b, h, i, j: table[b, j] & (i >= j))
    assert structure.key_lengths is None and structure.band == (None, 0)
    assert structure.mask is not None


def test_lengths_of_rows_or_heads_stay():
    for mask in (lambda b, h, i, j: i < LENGTHS[b], lambda b, h, i, j: j < LENGTHS[h % 2]):
        assert found(mask=mask).mask is not None


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
        lambda s, b, h, i, j: (s / 20.0).tanh() * 20.0,
        lambda s, b, h, i, j: 4 * torch.tanh(0.25 * s),
    ],
    ids=["20", "turned", "product"],
)
def test_caps(score):
    structure = found(score)
    assert structure.softcap in (20.0, 4.0) and structure.score is None


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, i, j: 20 * torch.tanh(s / 21),
        lambda s, b, h, i, j: -20 * torch.tanh(s / -20),
        lambda s, b, h, i, j: 20 * torch.tanh(20 / s),
        lambda s, b, h, i, j: 20 * torch.tanh(s / 20) + 1,
        lambda s, b, h, i, j: 20 * torch.sigmoid(s / 20),
        lambda s, b, h, i, j: h * torch.tanh(s / h),
    ],
)
def test_no_caps(score):
    one, _, tensors = merge(trace_score_mod(score), None)
    structure = recognise(one, None, tensors, SHAPE)
    assert structure.softcap is None and structure.score == one


ALIBI = {
    "minus": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "plus": lambda s, b, h, i, j: s + -SLOPES[h] * (i - j).abs(),
    "turned": lambda s, b, h, i, j: -(abs(j - i) * SLOPES[h]) + s,
    "computed": lambda s, b, h, i, j: s - torch.exp2(-((h + 1) * 8.0 / H)) * (j - i).float().abs(),
}


@pytest.mark.parametrize("name", ALIBI)
def test_slopes(name):
    structure = found(ALIBI[name])
    assert structure.alibi is not None and structure.score is None
    if name != "computed":
        assert torch.equal(structure.alibi, SLOPES)


def test_signed_distances_are_slopes_under_causal_alone():
    score = gallery.SCORES["alibi"]
    assert found(score).alibi is None
    assert torch.equal(found(score, gallery.causal).alibi, SLOPES)
    assert torch.equal(found(score, gallery.MASKS["window"]).alibi, SLOPES)
    assert found(score, lambda b, h, i, j: i + 1 >= j).alibi is None


def test_no_slopes():
    leaf = SLOPES.clone().requires_grad_()
    for score in (
        lambda s, b, h, i, j: s - leaf[h] * (i - j).abs(),
        lambda s, b, h, i, j: s - SLOPES[h] * (i + j).abs(),
        lambda s, b, h, i, j: s - SLOPES[h] * (i - j + 1).abs(),
        lambda s, b, h, i, j: s - SLOPES[h] * (i - 2 * j).abs(),
        lambda s, b, h, i, j: s - SLOPES[i % 3] * (i - j).abs(),
        lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs() * 0.5,
        lambda s, b, h, i, j: SLOPES[h] * (i - j).abs() - s,
        lambda s, b, h, i, j: s - (i - j).abs() * (i - j).abs(),
    ):
        structure = found(score, gallery.causal)
        assert structure.alibi is None and structure.score is not None


def test_all_at_once():
    def score(s, b, h, i, j):
        return 5 * torch.tanh((s + gallery.BIAS[b, h, i, j]) / 5) + SLOPES[h] * (j - i)

    def mask(b, h, i, j):
        return (i >= j) & PADDING[b, j] & ((i + j) % 3 != 0) & (i - j < 6)

    structure = found(score, mask)
    assert structure.softcap == 5 and torch.equal(structure.alibi, SLOPES)
    assert structure.band == (5, 0) and structure.key_lengths.tolist() == [7, 12]
    assert structure.mask is not None and structure.score is not None


@pytest.mark.parametrize("name", gallery.MASKS)
def test_the_gallery_means_the_same(name):
    found(mask=gallery.MASKS[name])


@pytest.mark.parametrize("name", [x for x in gallery.SCORES if x != "hidden"])
def test_the_scores_of_the_gallery_mean_the_same(name):
    found(gallery.SCORES[name], gallery.causal)


def test_values_are_not_read_where_they_may_not_be():
    def of(lengths):
        traced = trace_mask_mod(lambda b, h, i, j: j < lengths[b])
        return recognise(None, traced.program, traced.tensors, SHAPE)

    assert of(LENGTHS).key_lengths is not None
    assert of(LENGTHS.to("meta")).key_lengths is None
    seen = []
    torch.vmap(lambda x: (seen.append(of(x)), x)[1])(torch.stack([LENGTHS, LENGTHS]))
    assert seen[0].key_lengths is None and seen[0].mask is not None


def test_a_slope_with_a_tangent_stays():
    def bias(slopes):
        traced = trace_score_mod(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
        structures.append(recognise(traced.program, None, traced.tensors, SHAPE))
        return slopes

    structures = []
    torch.func.jvp(bias, (SLOPES,), (SLOPES,))
    torch.func.grad(lambda x: bias(x).sum())(SLOPES)
    bias(SLOPES)
    assert [x.alibi is None for x in structures] == [True, True, False]
