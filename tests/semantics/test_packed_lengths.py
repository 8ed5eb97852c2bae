"""`attention_packed`: sequences that use fewer rows than are stored, and of which some are causal.
`tests/features` has the values of row_lengths with every other argument."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fastattn
from fastattn import Place
from fastattn.api import prepare_packed
from tests.support.backends import every_backend

STORED, USED, KEYS = (5, 0, 9, 17), (3, 0, 9, 0), (20, 4, 0, 6)
H, D = 2, 8


def offsets(sizes):
    return torch.nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0))


def batch():
    g = torch.Generator().manual_seed(0)
    sizes = sum(STORED), sum(KEYS), sum(KEYS)
    q, k, v = (torch.randn(n, H, D, generator=g, dtype=torch.float64) for n in sizes)
    return dict(q=q, k=k, v=v, cu_q=offsets(STORED), cu_k=offsets(KEYS))


def one(given, b, rows):
    """Sequence b as a batch of its own."""
    i, j = (int(given[name][b]) for name in ("cu_q", "cu_k"))
    q, k, v = given["q"][i : i + rows], *(given[name][j : j + KEYS[b]] for name in "kv")
    return [x.transpose(0, 1)[None] for x in (q, k, v)]


@every_backend
def test_dropout_draws_as_for_items_of_even_numbers(name):
    given, used = batch(), torch.tensor(USED)
    look = dict(dropout_p=0.4, seed=7, causal="bottom_right", backend=name)
    out = fastattn.attention_packed(**given, **look, row_lengths=used, place=Place(item=3))
    for b, rows in enumerate(USED):
        i = int(given["cu_q"][b])
        place = Place(item=2 * (3 + b))
        expected = fastattn.attention(*one(given, b, rows), **look, place=place)
        torch.testing.assert_close(out[i : i + rows], expected[0].transpose(0, 1))
        assert (out[i + rows : int(given["cu_q"][b + 1])] == 0).all()


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("more", ["no", "mask_mod", "window", "lengths"])
def test_some_sequences_are_causal(aligned, more):
    given, causal = batch(), torch.tensor([True, True, False, False])
    causal = causal.flip(0) if more == "window" else causal
    functions = (
        dict(mask_mod=lambda b, h, i, j: (i + j + b + h) % 3 > 0) if more == "mask_mod" else {}
    )
    shared = dict(window=(6, 4)) if more == "window" else {}
    lengths = torch.tensor([max(0, n - 2) for n in KEYS]) if more == "lengths" else None
    place = Place(item=1, bottom_right=aligned)
    out = fastattn.attention_packed(
        **given, causal=causal, place=place, key_lengths=lengths, **functions, **shared
    )
    for b, rows in enumerate(STORED):
        own = dict(shared)
        if functions:
            i, j = torch.arange(rows)[:, None], torch.arange(KEYS[b])
            h = torch.arange(H)[:, None, None]
            own["mask"] = (i + j + b + 1 + h) % 3 > 0
        if lengths is not None:
            own["key_lengths"] = lengths[b : b + 1]
        at = Place(bottom_right=aligned and not causal[b])
        aligned_as = "bottom_right" if aligned else True
        own |= dict(causal=aligned_as if causal[b] else False, place=at)
        expected = fastattn.attention(*one(given, b, rows), **own)[0].transpose(0, 1)
        torch.testing.assert_close(out[given["cu_q"][b] : given["cu_q"][b + 1]], expected)


def test_functions_see_the_sequences_of_the_caller():
    given, used = batch(), torch.tensor(USED)
    of_each = torch.arange(1.0, 9.0)
    look = dict(score_mod=lambda s, b, h, i, j: s * of_each[b] + i, place=Place(item=2))
    out = fastattn.attention_packed(**given, row_lengths=used, **look)
    for b, rows in enumerate(USED):
        own = fastattn.attention(*one(given, b, rows), scale=float(of_each[b + 2]) * D**-0.5)
        i = int(given["cu_q"][b])
        torch.testing.assert_close(out[i : i + rows], own[0].transpose(0, 1))


@pytest.mark.parametrize("name", ["alibi_slopes", "mask", "causal"])
def test_one_sequence(name):
    """Its arguments have one item, too."""
    q, k, v = torch.randn(3, 7, H, D, dtype=torch.float64)
    x = dict(alibi_slopes=torch.rand(1, H), mask=torch.rand(1, H, 7, 7) > 0.3)
    x["causal"] = torch.tensor([True])
    given = dict(cu_q=offsets([7]), cu_k=offsets([7]), **{name: x[name]})
    out = fastattn.attention_packed(q, k, v, **given, row_lengths=torch.tensor([5]))
    alone = dict(x, mask=x["mask"][:, :, :5], causal=True)[name]
    rows = [y.transpose(0, 1)[None] for y in (q[:5], k, v)]
    expected = fastattn.attention(*rows, **{name: alone})[0].transpose(0, 1)
    torch.testing.assert_close(out[:5], expected)


def test_both_together_have_gradients():
    given, used = batch(), torch.tensor(USED, dtype=torch.int32)
    leaves = [given[name].requires_grad_() for name in "qkv"]
    causal = torch.tensor([True, False, True, False])
    out, lse = fastattn.attention_packed(**given, causal=causal, row_lengths=used, return_lse=True)
    parts = []
    for b, rows in enumerate(USED):
        own = fastattn.attention(*one(given, b, rows), causal=bool(causal[b]), return_lse=True)
        parts.append((own[0][0].transpose(0, 1), own[1][0].transpose(0, 1)))
        i, j = int(given["cu_q"][b]), int(given["cu_q"][b + 1])
        torch.testing.assert_close(out[i : i + rows], parts[b][0])
        torch.testing.assert_close(lse[i : i + rows], parts[b][1])
        assert (out[i + rows : j] == 0).all() and (lse[i + rows : j] == -torch.inf).all()
    whole = sum(x.sin().sum() for x, _ in parts)
    for x, y in zip(
        torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(whole, leaves)
    ):
        torch.testing.assert_close(x, y)


def test_the_backend_of_such_a_call_is_explained():
    given = batch()
    assert fastattn.explain(**given, row_lengths=torch.tensor(USED)).backend == "cpu"


SIZE = len(STORED)
WRONG = {
    r"row_lengths\[0\]: got 6, expected 0 to 5": dict(row_lengths=torch.tensor([6, 0, 0, 0])),
    r"row_lengths\[2\]: got -1": dict(row_lengths=torch.tensor([0, 0, -1, 0])),
    "row_lengths.dtype: got torch.float32": dict(row_lengths=torch.zeros(SIZE)),
    r"row_lengths: got shape \(3,\), expected \(B,\) = \(4,\)": dict(
        row_lengths=torch.zeros(3, dtype=torch.int64)
    ),
    "row_lengths: got list, expected a torch.Tensor": dict(row_lengths=[1, 0, 0, 0]),
    "causal.dtype: got torch.int64": dict(causal=torch.ones(SIZE, dtype=torch.int64)),
    r"causal: got shape \(3,\), expected \(B,\) = \(4,\)": dict(causal=torch.tensor([True] * 3)),
    r"k_scale: got shape \(3,\), expected \(S, Hk\) = \(30, 2\), \(Hk,\) or \(\)": dict(
        k_scale=torch.ones(3)
    ),
}


USED_FEWER = dict(row_lengths=torch.tensor(USED))
WRONG |= {  # in the numbers of the caller's sequences
    r"key_lengths: got shape \(1, 4\), expected \(B,\) = \(4,\)": USED_FEWER
    | dict(key_lengths=torch.tensor([KEYS])),
    "key_lengths: got 7 of sequence 3, expected a value in .0, 6.": USED_FEWER
    | dict(key_lengths=torch.tensor([20, 4, 0, 7])),
    r"cu_k: got shape \(1, 5\)": USED_FEWER | dict(cu_k=offsets(KEYS)[None]),
    "cu_q: got 5 after 6, expected offsets that never fall": USED_FEWER
    | dict(cu_q=torch.tensor([0, 6, 5, 14, 31])),
    "cu_q: got 9 rows in sequence 2, expected at most max_q = 8": USED_FEWER | dict(max_q=8),
    "place.item: got -1": USED_FEWER | dict(place=Place(item=-1)),
    r"a score_mod takes \(score, b, h, i, j\), got a function of \(s, i, j\)": USED_FEWER
    | dict(score_mod=lambda s, i, j: s),
    r"a mask_mod takes \(b, h, i, j\), got a function of \(i, j\)": dict(
        causal=torch.tensor([True] * 4), mask_mod=lambda i, j: i >= j
    ),
    "cu_q: got list": dict(
        causal=torch.tensor([True] * 4), cu_q=[0, 1], place=Place(bottom_right=True)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_raise(message):
    with pytest.raises((TypeError, ValueError), match=message):
        fastattn.attention_packed(**batch() | WRONG[message])


def test_a_mask_that_is_expanded_is_not_copied():
    given, mask = batch(), torch.randn(4, 1, 1, max(KEYS), dtype=torch.float64)
    wide = mask.expand(-1, H, max(STORED), -1)
    used = torch.tensor(USED)
    sizes = dict(max_q=max(STORED), max_k=max(KEYS))
    where = given["cu_q"], given["cu_k"], None, *sizes.values(), None, None
    t, _ = prepare_packed(*(given[x] for x in "qkv"), *where, dict(mask=wide), row_lengths=used)
    assert t.mask.shape == (8, H, max(STORED), max(KEYS)) and t.mask.stride()[1:3] == (0, 0)
    got, expected = (fastattn.attention_packed(**given, mask=x, **sizes) for x in (wide, mask))
    torch.testing.assert_close(got, expected)


def test_lengths_without_values():
    """In a compiler, and under vmap."""
    given = batch()
    used = torch.tensor([USED, (1, 0, 2, 3)])
    expected = [fastattn.attention_packed(**given, row_lengths=x) for x in used]
    found = torch.vmap(lambda x: fastattn.attention_packed(**given, row_lengths=x))(used)
    torch.testing.assert_close(found, torch.stack(expected))
    given |= dict(row_lengths=used[0])
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in given.items()}
        out = fastattn.attention_packed(**fake, max_q=max(STORED), max_k=max(KEYS))
    assert out.shape == expected[0].shape


def test_a_padded_call_takes_no_tensor_for_causal():
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    with pytest.raises((TypeError, ValueError), match="causal: got"):
        fastattn.attention(q, k, v, causal=torch.tensor([True, False]))


@pytest.mark.slow
def test_compiled():
    given, used = batch(), torch.tensor(USED)
    longest = dict(max_q=max(STORED), max_k=max(KEYS))
    run = torch.compile(
        lambda used, **x: fastattn.attention_packed(**x, **longest, row_lengths=used),
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(
        run(used, **given), fastattn.attention_packed(**given, row_lengths=used)
    )
