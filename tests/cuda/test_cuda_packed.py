"""Packed batches in the CUDA kernels, on the emulator: each sequence has the values and the bits of
a separate call, and unchecked offsets are clamped."""

import pytest
import torch

import fastattn
from fastattn.backends.native import cuda
from tests.gpu_emulation.emulated import everywhere
from tests.gpu_emulation.emulator import needs_emulator
from tests.semantics.test_packed import CASES, CUT, HOSTILE, batch, clamped
from tests.semantics.test_paged import PAGES, in_pages, of_scores
from tests.support.cases import FEATURE, name_of
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]
MANY = 132  # multiprocessors: few rows of many keys are split among them

# Rows and keys: none, one, a full tile of either, and one more or less; the longest sequence is not
# the last.
SIZES = ((5, 7), (0, 3), (1, 1), (130, 65), (3, 0), (128, 64))


# Many rows; and few rows with keys that one block takes.
@pytest.mark.slow
@parametrize("sizes, processors", [(SIZES, 0), (((1, 141), (2, 0), (3, 70)), MANY)], fast=1)
@parametrize("names", ["", *CUT], fast=1)
def test_a_batch_has_the_bits_of_single_calls(names, sizes, processors):
    made = batch([FEATURE[x] for x in names.split()], torch.bfloat16, sizes)
    with everywhere(sm_count=processors):
        found = made.run()
        for b, problem in enumerate(made.alone):
            own = problem.run(fastattn.attention)
            for what, x in made.of_sequence(found, b).items():
                assert torch.equal(x, own[what]), (b, what)


PAGED = [f for f in CASES if of_scores(f)]


def test_pages_may_begin_anywhere():
    """Rows in a page are at multiples of 16 bytes; the pages themselves are not."""
    made = batch((), torch.bfloat16, ((40, 70), (3, 9)))
    given = in_pages(made, 16)
    for name in "kv":
        pages = given[name]
        room = pages.new_full((len(pages), pages[0].numel() + 4), torch.nan)
        given[name] = room[:, :-4].unflatten(1, pages.shape[1:]).copy_(pages)
    with everywhere(), torch.no_grad():
        for x, y in zip(
            fastattn.attention_packed(**made.given, return_lse=True),
            fastattn.attention_packed(**given, return_lse=True),
            strict=True,
        ):
            assert torch.equal(x, y)


@parametrize("features", PAGED, ids=name_of, fast=3)
def test_pages_have_the_bits_of_a_contiguous_cache(features):
    """For many rows, and for few with split keys; page sizes vary in turn."""
    at = PAGED.index(features)
    for sizes, processors in ((SIZES, 0), (((1, 141), (2, 0), (3, 370)), MANY)):
        made = batch(features, torch.bfloat16, sizes)
        with everywhere(sm_count=processors) as backend, torch.no_grad():
            whole = fastattn.attention_packed(**made.given, return_lse=True)
            splits = backend.splits
            for page in (PAGES[at % 6], PAGES[(at + 3) % 6]):
                given = in_pages(made, page) | dict(max_k=max(n for _, n in sizes))
                found = fastattn.attention_packed(**given, return_lse=True)
                assert backend.splits == splits
                for x, y in zip(whole, found, strict=True):
                    assert torch.equal(x, y), page


@pytest.mark.parametrize("processors", [0, MANY])
def test_pages_are_clamped(processors, monkeypatch):
    """Three pages of 16 keys, and lengths beyond their space."""
    monkeypatch.setattr(cuda, "check_values", lambda spec, t: None)
    q, k = (torch.randn(n, 2, 16).bfloat16() for n in (5, 48))
    pool = k.view(3, 16, 2, 16)
    table = torch.tensor([[0, -7, 2**40], [3, 2, 1]])

    def attention(table, lengths):
        more = dict(block_table=table, key_lengths=torch.tensor(lengths), max_k=48)
        return fastattn.attention_packed(q, pool, pool, torch.tensor([0, 2, 5]), **more)

    with everywhere(sm_count=processors):
        found = attention(table, [2**40, -3])
        assert torch.equal(found, attention(table.clamp(0, 2), [48, 0]))
        assert found.isfinite().all()


@parametrize("kind", HOSTILE, fast=2)
@pytest.mark.parametrize("processors", [0, MANY])
def test_offsets_are_clamped(kind, processors, monkeypatch):
    """The memory around rows and keys is NaN."""
    monkeypatch.setattr(cuda, "check_values", lambda spec, t: None)
    with everywhere(sm_count=processors):  # "falling" offsets have no gradient
        for found, meant in clamped(kind, torch.bfloat16, gradients=kind != "falling"):
            assert found.isfinite().all() and torch.equal(found, meant)


def test_gradients_where_sequences_overlap_come_to_an_end(monkeypatch):
    """Two sequences that could wait for each other. The gradients' values do not matter."""
    monkeypatch.setattr(cuda, "check_values", lambda spec, t: None)
    x = torch.randn(300, 1, 16).bfloat16().requires_grad_()
    cu = torch.tensor([0, 300, 0, 300])
    with everywhere(check=False):
        out = fastattn.attention_packed(x, x, x, cu, cu, max_q=300, max_k=300)
        out.sum().backward()
    assert out.isfinite().all()
