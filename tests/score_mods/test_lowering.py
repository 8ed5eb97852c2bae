"""Programs in the form that kernels take: flat captured tensors, checks of indices, and blocks."""

import itertools

import pytest
import torch

import fastattn
from fastattn.backends.native.score_mod_code import encode
from fastattn.score_mods.evaluate import NOWHERE, evaluate
from fastattn.score_mods.lowering import Begin, lower
from fastattn.score_mods.mod_text import ModText
from fastattn.score_mods.recognition import Shape
from fastattn.score_mods.tracing import merge, trace_mask_mod, trace_score_mod
from tests.score_mods import gallery
from tests.score_mods.gallery import INDICES, B, H, N
from tests.support.program_operators import indices

SIZES = Shape(B, H, N, N)
SCORES = torch.randn(SIZES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def lowered(score=None, mask=None, sizes=SIZES, dtype=torch.float64, begin=Begin()):  # noqa: B008
    programs = merge(score and trace_score_mod(score, dtype=dtype), mask and trace_mask_mod(mask))
    return lower(*programs, sizes, dtype, begin)


def flat(found):
    none = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    return [y if x is None else x for x, y in zip((found.floats, found.ints), none)]


@pytest.mark.parametrize("name", gallery.SCORES)
def test_scores_of_the_gallery(name):
    function = gallery.SCORES[name]
    found = lowered(function)
    program = ModText.parse(found.text).score
    got = evaluate(program, flat(found), score=SCORES, **INDICES)
    right = evaluate(*trace_score_mod(function, dtype=torch.float64), score=SCORES, **INDICES)
    torch.testing.assert_close(got.double(), right.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", gallery.MASKS)
def test_masks_of_the_gallery(name):
    function = gallery.MASKS[name]
    found = lowered(mask=function)
    program = ModText.parse(found.text).mask
    got = evaluate(program, flat(found), **INDICES)
    assert torch.equal(
        *torch.broadcast_tensors(got, evaluate(*trace_mask_mod(function), **INDICES))
    )


TABLE = torch.randn(3, 5)
INDEX = {  # an index, and where it is out of range
    "inside": (lambda b, h, i, j: TABLE[i % 3, j % 5], None),
    "from the end": (lambda b, h, i, j: TABLE[-1 - i % 3, -5 + j % 5], None),
    "of both signs": (lambda b, h, i, j: TABLE[i % 5 - 2, j % 8 - 3], None),
    "too large": (lambda b, h, i, j: TABLE[i // 3, j % 5], lambda i, j: i >= 9),
    "too small": (lambda b, h, i, j: TABLE[h - i % 7, 0], lambda i, j: None),
    "either": (
        lambda b, h, i, j: TABLE[i // 4, j] + TABLE[0, i],
        lambda i, j: (j >= 5) | (i >= 5),
    ),
}


@pytest.mark.parametrize("name", INDEX)
def test_indices_out_of_range(name):
    function, outside = INDEX[name]
    found = lowered(lambda s, *given: s + function(*given))
    program = ModText.parse(found.text).outside
    if outside is None:
        assert program is None
        added = ModText.parse(found.text).score
        got = evaluate(added, flat(found), score=SCORES, **INDICES)
        traced = trace_score_mod(lambda s, *given: s + function(*given), dtype=torch.float64)
        assert torch.equal(got, evaluate(*traced, score=SCORES, **INDICES))
        return
    got = evaluate(program, flat(found), **INDICES).expand(SIZES)
    right = outside(INDICES["i"], INDICES["j"])
    if right is None:  # h - i % 7 < -3
        right = INDICES["h"] - INDICES["i"] % 7 < -3
    assert torch.equal(got, right.expand(SIZES))


def test_an_index_of_several_elements_is_checked_once():
    found = lowered(lambda s, b, h, i, j: s + gallery.BIAS[b, h, i + 3].sum())
    values = ModText.parse(found.text).outside.values
    assert [x.op for x in values].count("or") == 1


FEW = torch.tensor([True, False, True])
MASKS = {  # beside a score_mod that loads TABLE[0, i], and where an index is out of range
    "shows all": (lambda b, h, i, j: TABLE[0, j] < 100, lambda i, j: (j >= 5) | (i >= 5)),
    "hides": (lambda b, h, i, j: j > 6, lambda i, j: (j > 6) & (i >= 5)),
    "hides by its index": (lambda b, h, i, j: TABLE[0, j] > 100, lambda i, j: j >= 5),
    "a condition before": (lambda b, h, i, j: (j < i) & FEW[j], lambda i, j: (j < i) & (j >= 3)),
    "a condition after": (lambda b, h, i, j: FEW[j] & (j < i), lambda i, j: j >= 3),
    "one condition twice": (
        lambda b, h, i, j: (j < i) & FEW[j] & (FEW[j] | (i > 3)),
        lambda i, j: (j < i) & (j >= 3),
    ),
    "no condition": (lambda b, h, i, j: (j < i) | FEW[j], lambda i, j: j >= 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_both_functions_are_checked(name):
    """A condition of the mask_mod where those before it show, the score_mod where all of them do.
    For an index out of range a mask_mod gets some element, which decides nothing here."""
    mask, outside = MASKS[name]
    found = lowered(lambda s, b, h, i, j: s + TABLE[0, i], mask)
    program = ModText.parse(found.text).outside
    got = evaluate(program, flat(found), seen=NOWHERE, **INDICES).expand(SIZES)
    i, j = INDICES["i"], INDICES["j"]
    own = outside(i, j)
    shown = evaluate(*trace_mask_mod(mask), seen=NOWHERE, **INDICES)
    assert torch.equal(got, (own | (shown & (i >= 5))).expand(SIZES))


def test_captured_numbers_that_no_program_loads():
    """Of a whole call's captured tensors, some may be of no dimension."""
    number = torch.tensor(3)
    programs = merge(
        trace_score_mod(lambda s, b, h, i, j: s + TABLE[0, i % 5]),
        trace_mask_mod(lambda b, h, i, j: i + number[None][0] >= j),
    )
    found = lower(programs[0], None, programs[2], SIZES, torch.float32, Begin())
    assert found is not None and found.ints is None


def test_an_empty_table_has_no_index():
    empty = torch.zeros(0)
    found = lowered(lambda s, b, h, i, j: s + empty[i])
    assert evaluate(ModText.parse(found.text).outside, flat(found), **INDICES).all()
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(IndexError):
        fastattn.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + empty[i])


def test_captured_tensors_lie_one_after_the_other():
    x, y = torch.randn(2, 3), torch.randn(4, dtype=torch.bfloat16)
    whole, few = torch.arange(5), torch.tensor([True, False])
    found = lowered(
        lambda s, b, h, i, j: s + x[b, h] * y[i % 4] + whole[j % 5] + few[b].to(torch.float64)
    )
    assert torch.equal(found.floats, torch.cat([x.flatten().double(), y.double()]))
    assert torch.equal(found.ints, torch.tensor([0, 1, 2, 3, 4, 1, 0]))
    alone = lowered(lambda s, b, h, i, j: s + TABLE[b, h], dtype=torch.float32)
    assert alone.floats.data_ptr() == TABLE.data_ptr()  # no copy


LARGE = torch.arange(N) << 40
NARROW = {  # a function, and whether its whole numbers fit in 32 bits
    "differences": (lambda s, b, h, i, j: s + (i - j), True),
    "a product that fits": (lambda s, b, h, i, j: s + ((i * (1 << 27)) >> 27), True),
    "a product that does not": (lambda s, b, h, i, j: s + ((i * (1 << 29)) >> 29), False),
    "large captured numbers": (lambda s, b, h, i, j: s + (LARGE[i] >> 40), False),
    "a cast of a score": (lambda s, b, h, i, j: s + s.to(torch.int64) + 5, True),
    "a cast that is doubled": (lambda s, b, h, i, j: s + s.to(torch.int64) * 2, False),
}


@pytest.mark.parametrize("name", NARROW)
def test_whole_numbers_fit_or_are_not_lowered(name):
    function, fits = NARROW[name]
    assert (lowered(function, dtype=torch.float32) is not None) == fits
    assert lowered(function) is not None
    # Both give the same scores: where they do not fit, as a mask.
    if name != "a cast that is doubled":
        q = torch.randn(1, 1, N, 8, dtype=torch.float32)
        out = fastattn.flex_attention(q, q, q, function)
        right = fastattn.flex_attention(*(3 * [q.double()]), function)
        torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)


def test_masks_stay_masks():
    large, trained = torch.zeros(512, 512), torch.zeros(N, N, requires_grad=True)
    of_pairs = torch.zeros(N, N, 2, requires_grad=True)
    assert lowered(lambda s, b, h, i, j: s + of_pairs[i, j].sum()) is None
    assert lowered(lambda s, b, h, i, j: s + trained[i, j]) is None
    assert lowered(lambda s, b, h, i, j: s + trained.detach()[i, j]) is not None
    assert lowered(lambda s, b, h, i, j: s + large[i, j], sizes=Shape(1, 1, 512, 512)) is None
    assert lowered(lambda s, b, h, i, j: s + trained[j, i]) is not None


def documents(b, h, i, j):
    return (i // 150 == j // 150) & (i >= j) & (h >= b)


@pytest.mark.parametrize("begin", [Begin(), Begin(item=1, head=1, row=70, key=130)], ids=str)
def test_blocks(begin):
    """Each block has the class of its pairs, or is called mixed."""
    sizes = Shape(2, 3, 300, 290)
    blocks = lowered(mask=documents, sizes=sizes, begin=begin).blocks
    assert blocks.shape == (2, 3, 10, 5) and blocks.dtype == torch.int8
    seen = evaluate(*trace_mask_mod(documents), **indices(*sizes, first=begin)).expand(sizes)
    for b, h, x, y in itertools.product(*map(range, blocks.shape)):
        part = seen[b, h, x * 32 : x * 32 + 32, y * 64 : y * 64 + 64]
        kind = int(blocks[b, h, x, y])
        assert kind == 1 or bool(part.all() if kind else not part.any())
    assert set(blocks.flatten().tolist()) == {0, 1, 2}
    assert lowered(mask=documents).blocks is None  # small


def test_blocks_of_all_items_and_heads_are_one():
    blocks = lowered(mask=lambda b, h, i, j: i >= j, sizes=Shape(4, 8, 512, 512)).blocks
    assert blocks.shape == (1, 1, 16, 8)


def test_blocks_of_many_items_are_found_in_long_calls():
    """In short ones they would take longer than what they save."""
    lengths = torch.arange(1, 71) * 10

    def shown(b, h, i, j):
        return j < lengths[b]

    assert lowered(mask=shown, sizes=Shape(70, 1, 512, 512)).blocks is None
    blocks = lowered(mask=shown, sizes=Shape(70, 1, 1024, 1024)).blocks
    assert blocks.shape == (70, 1, 32, 16)
    assert blocks[:, 0, 0].sign().sum(1).tolist() == (-(-lengths // 64)).tolist()


def test_the_code_of_equal_programs_is_made_once():
    found = lowered(lambda s, b, h, i, j: s + (i - j))
    operators = "score b h i j constant:f constant:i sub:i to_float:i add:f copy hide check scatter"
    code = encode(found.text, 0, 0, operators)
    assert encode(found.text, 0, 0, operators) is code


def test_values_share_slots():
    """A long chain of values takes a few slots, with its derivatives, too."""
    from fastattn.backends.native import libraries

    if libraries.cpu_unavailable():
        pytest.skip("no library")

    def chain(s, b, h, i, j):
        for _ in range(30):
            s = torch.tanh(s) * 2 + (i - j) * 0.1
        return s

    code = encode(lowered(chain).text, 0, 0, libraries.cpu().score_mod_ops)
    constant, slots = code[:2]
    assert slots - constant <= 8
