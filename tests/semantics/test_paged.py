"""Keys and values in pages: `attention_packed(..., block_table=...)` gives the bits that it gives
for the same keys stored contiguously. Nothing else in pages or in the table is read."""

import pytest
import torch

import fastattn
from fastattn.backends.native.launcher import prepared
from fastattn.call.spec import Feature
from tests.semantics.test_packed import CASES, batch, name_of
from tests.support.backends import declares, every_backend, not_interpreted, on_variants, small
from tests.support.cases import FEATURE
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES = (16, 1, 5, 64, 129, 256)  # rows: part of a tile, other sizes, more than all keys
UNFIT = ("lengths", "lse")  # they set key_lengths, or matter to gradients only


def in_pages(made, page, dtype=torch.int64, spare=3):
    """A batch's arguments with keys and scales scattered over pages. Unused pages are NaN, and the
    table has invalid entries past each length."""
    generator = torch.Generator().manual_seed(page)
    kept = [x for x in ("k", "v", "k_scale", "v_scale") if x in made.given]
    given = {x: y for x, y in made.given.items() if x not in ("cu_k", *kept)}
    lengths = torch.tensor([keys.stop - keys.start for keys in made.keys])
    each = -(-lengths // page)
    order = torch.randperm(int(each.sum()) + spare, generator=generator)
    table = torch.full((len(lengths), int(each.max()) + 1), -(10**9))
    table[:, 1::2] = 10**9
    pools = {}
    for name in kept:
        x = made.given[name]
        nonsense = torch.nan if x.is_floating_point() else 99
        pools[name] = torch.full((len(order), page, *x.shape[1:]), nonsense, dtype=x.dtype)
    at = 0
    for b, keys in enumerate(made.keys):
        mine = order[at : at + int(each[b])]
        at += int(each[b])
        table[b, : len(mine)] = mine
        for name, pool in pools.items():
            for n, chosen in enumerate(mine.tolist()):
                rows = made.given[name][keys][n * page : (n + 1) * page]
                pool[chosen, : len(rows)] = rows
    if "mask" in given:  # else it needs a column for every row of the pages
        given["max_k"] = int(lengths.max())
    return given | pools | dict(block_table=table.to(dtype), key_lengths=lengths.to(dtype))


def of_scores(features):
    return not any(f.group in UNFIT or f.layout for f in features)


@every_backend
@parametrize("features", [f for f in CASES if of_scores(f)], ids=name_of, fast=11)
def test_pages_have_the_bits_of_a_contiguous_cache(name, features):
    declares(name, torch.float32, Feature.PAGED)
    for dtype in small((torch.float32, torch.bfloat16), (torch.float32,)):
        made = batch(features, dtype)
        for isa in on_variants(name, dtype):
            with torch.no_grad():
                options = dict(backend=name, return_lse=True)
                whole = fastattn.attention_packed(**made.given, **options)
                for page in small(PAGES, PAGES[:1]):
                    found = fastattn.attention_packed(**in_pages(made, page), **options)
                    for x, y in zip(whole, found, strict=True):
                        assert torch.equal(x, y), (isa, dtype, page)


WRONG = {
    "block_table: got page 9 of sequence 1, expected one of the 6 pages": dict(
        block_table=torch.tensor([[0, 1], [9, 2]])
    ),
    "block_table: got page -1 of sequence 0": dict(block_table=torch.tensor([[-1, 1], [3, 2]])),
    r"key_lengths: got 9 of sequence 0, expected a value in \[0, 8\]": dict(
        key_lengths=torch.tensor([9, 3])
    ),
    r"key_lengths: got 8 of sequence 0, expected a value in \[0, 7\], what 2 pages of 4": dict(
        max_k=7
    ),
    "key_lengths: got -2 of sequence 1": dict(key_lengths=torch.tensor([8, -2])),
    "key_lengths: got None, expected how many keys each sequence has": dict(key_lengths=None),
    r"block_table: got shape \(1, 2\), expected \(B, blocks\) = \(2, 2\)": dict(
        block_table=torch.tensor([[0, 1]])
    ),
    r"block_table: got shape \(2,\), expected 2 dimensions": dict(block_table=torch.tensor([0, 1])),
    "block_table.dtype: got torch.float32": dict(block_table=torch.zeros(2, 2)),
    "cu_k and block_table: got both, expected": dict(cu_k=torch.tensor([0, 8, 11])),
    r"v: got shape .*, expected 6 pages, as k has": dict(v=torch.zeros(5, 4, 2, 8)),
    r"k: got shape \(11, 2, 8\), expected 4 dimensions \(P, page, Hk, D\)": dict(
        k=torch.zeros(11, 2, 8)
    ),
    "k: got shape .* 4294967297, .*, expected pages of 1 to 2147483647 keys": dict(
        k=torch.zeros(1, 1, 2, 8).expand(6, 2**32 + 1, 2, 8),
        v=torch.zeros(1, 1, 2, 8).expand(6, 2**32 + 1, 2, 8),
        max_k=100,
    ),
    "k: got shape .*, expected pages of 1 to": dict(
        k=torch.zeros(6, 0, 2, 8), v=torch.zeros(6, 0, 2, 8)
    ),
}


def some():
    pool = torch.zeros(6, 4, 2, 8)
    return dict(
        q=torch.zeros(5, 2, 8),
        k=pool,
        v=pool,
        cu_q=torch.tensor([0, 2, 5]),
        block_table=torch.tensor([[0, 1], [3, 2]]),
        key_lengths=torch.tensor([8, 3]),
    )


@every_backend
@pytest.mark.parametrize("message", WRONG)
def test_invalid_page_tables_raise(name, message):
    declares(name, torch.float32, Feature.PAGED)
    for backend in (name, "reference"):
        fastattn.attention_packed(**some(), backend=backend)
        with pytest.raises(ValueError, match=message):
            fastattn.attention_packed(**(some() | WRONG[message]), backend=backend)


def test_neither_offsets_nor_pages():
    given = {x: y for x, y in some().items() if x != "block_table"}
    with pytest.raises(ValueError, match="cu_k and block_table: got neither"):
        fastattn.attention_packed(**given | dict(k=torch.zeros(5, 2, 8), v=torch.zeros(5, 2, 8)))


@every_backend
def test_a_table_without_columns(name):
    declares(name, torch.float32, Feature.PAGED)
    given = some() | dict(
        block_table=torch.zeros(2, 0, dtype=torch.int64), key_lengths=torch.zeros(2).long()
    )
    for change in ({}, dict(q=torch.zeros(0, 2, 8), cu_q=torch.zeros(3).long())):
        assert not fastattn.attention_packed(**(given | change), backend=name).any()


@not_interpreted
def test_other_threads_run_during_a_long_call():
    """Brief calls keep the GIL; whether a call is brief depends on the number of its pages."""
    for blocks, brief in ((2, True), (2000, False)):
        given = some() | dict(block_table=torch.zeros(2, blocks, dtype=torch.int64))
        assert prepared(fastattn.explain(**given).spec).brief == brief


@pytest.mark.slow
@not_interpreted
def test_pages_are_explained_and_compiled():
    made = batch((FEATURE["bottom_right"],), torch.float32)
    given = in_pages(made, 16)
    assert fastattn.explain(**given).spec.features & Feature.PAGED
    compiled = torch.compile(fastattn.attention_packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given), fastattn.attention_packed(**given))


@every_backend
def test_columns_of_a_mask(name):
    """A mask has a column for every row in the table's pages, or one; with max_k, max_k columns."""
    declares(name, torch.float32, Feature.PAGED)
    page, blocks = 4, 3
    q, k = torch.randn(3, 2, 8), torch.randn(2 * blocks, page, 2, 8)
    given = dict(
        cu_q=torch.tensor([0, 2, 3]),
        block_table=torch.arange(2 * blocks).view(2, blocks),
        key_lengths=torch.tensor([5, 7]),
        backend=name,
    )
    mask = torch.randn(2, 1, 2, page * blocks)
    out = fastattn.attention_packed(q, k, k, mask=mask, **given)
    assert torch.equal(
        out, fastattn.attention_packed(q, k, k, mask=mask[..., :7], max_k=7, **given)
    )
    with pytest.raises(ValueError, match=r"mask: .*12"):
        fastattn.attention_packed(q, k, k, mask=mask[..., :7], **given)
    fastattn.attention_packed(q, k, k, mask=mask[..., :1], **given)
