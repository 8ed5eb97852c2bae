"""Keys and values in pages in Triton's kernels: pages of whole tiles and pages with gathered rows,
the tiles used on GPUs, keys split among programs, and unchecked tables, which kernels on a GPU
clamp."""

import pytest
import torch

import fastattn
from fastattn.backends.triton import job
from tests.semantics.test_packed import FEW, batch
from tests.semantics.test_paged import in_pages
from tests.support.backends import INTERPRETED, every_backend
from tests.support.cases import DTYPES, FEATURE, PLAIN, inside_nan, name_of

pytestmark = pytest.mark.usefixtures("one_thread")
if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)

SIZES = ((5, 7), (0, 3), (70, 270), (3, 0), (130, 64))
BUSY = tuple(map(FEATURE.get, ("bottom_right", "left_window", "alibi", "float_mask", "sinks")))
DRAWN = tuple(map(FEATURE.get, ("bottom_right", "gqa", "softcap", "dropout")))
PAGES = (1, 5, 16, 48, 64, 256)  # tiles have 64 keys on sm_80, and 128 on sm_90


def same_bits(name, made, pages, **more):
    """Assert that a batch gives the same bits with keys in pages and with contiguous keys."""
    most = int(made.given["cu_k"].diff().max())
    options = dict(backend=name, return_lse=True) | more
    with torch.no_grad():
        whole = fastattn.attention_packed(**made.given | dict(max_k=most), **options)
        for page in pages:
            given = in_pages(made, page, torch.int32) | dict(max_k=most)
            found = fastattn.attention_packed(**given, **options)
            for x, y in zip(whole, found, strict=True):
                assert torch.equal(x, y), page


@every_backend
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("features", [PLAIN, BUSY, DRAWN], ids=name_of)
def test_tiles_of_a_gpu(name, arch, features, monkeypatch):
    """Also on sm_90, where tensor descriptors read contiguous keys but not pages."""
    monkeypatch.setattr(job, "architecture", lambda device: arch)
    same_bits(name, batch(features, DTYPES["bfloat16"], SIZES), PAGES)


@every_backend
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("features", [PLAIN, DRAWN], ids=name_of)
def test_keys_are_split(name, arch, features, monkeypatch):
    monkeypatch.setattr(job, "architecture", lambda device: arch)
    split, own = [], job.Job.decode
    monkeypatch.setattr(job.Job, "decode", lambda *args: split.append(args[-1]) or own(*args))
    same_bits(name, batch(features, torch.float16, tuple((m, 3 * n) for m, n in FEW)), PAGES[1::2])
    assert split[0] > 1 and set(split) == {split[0]}


# {kind: (table, lengths, table as clamped, lengths as clamped)} for six pages of four keys.
HOSTILE = {
    "pages below": ([[-1, -(2**31), 2], [3, 3, -9]], (10, 12), [[0, 0, 2], [3, 3, 0]], (10, 12)),
    "pages beyond": ([[6, 1, 2**31 - 1], [3, 99, 4]], (9, 12), [[5, 1, 5], [3, 5, 4]], (9, 12)),
    "one page for all": ([[4, 4, 4], [4, 4, 4]], (12, 7), [[4, 4, 4], [4, 4, 4]], (12, 7)),
    "lengths": ([[0, 1, 2], [3, 4, 5]], (2**40, -1), [[0, 1, 2], [3, 4, 5]], (12, 0)),
    "by one": ([[-1, 1, 6], [3, 4, 6]], (13, 15), [[0, 1, 5], [3, 4, 5]], (12, 12)),
}


def unchecked(name, kind, table_dtype=torch.int64, **more):
    """(result, expected result). NaN surrounds the pages; zeros follow the table in memory."""
    draft = torch.Generator().manual_seed(0)
    pools = [torch.randn(8, 2, 4, 16, generator=draft) for _ in "kv"]
    for x in pools:
        x[0], x[7] = torch.nan, torch.nan
    k, v = (inside_nan(x).transpose(1, 2)[1:7] for x in pools)
    q = torch.randn(9, 2, 16, generator=draft)
    options = dict(backend=name, return_lse=True, cu_q=torch.tensor([0, 4, 9])) | more

    def attention(table, lengths):
        memory = torch.zeros(40, dtype=table_dtype)
        memory[:6] = torch.tensor(table).flatten()
        given = dict(block_table=memory[:6].view(2, 3), key_lengths=torch.tensor(lengths))
        return fastattn.attention_packed(q, k, v, **given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "check_values", lambda spec, t: None)
        return attention(*HOSTILE[kind][:2]), attention(*HOSTILE[kind][2:])


@every_backend
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tables_and_lengths_are_clamped(name, kind, dtype):
    for more in ({}, dict(causal="bottom_right", max_k=50)):
        for x, y in zip(*unchecked(name, kind, dtype, **more), strict=True):
            assert not x.isnan().any() and torch.equal(x, y)


@every_backend
def test_a_table_of_no_pages(name, monkeypatch):
    """With no pages, the output is 0, for any table and lengths."""
    monkeypatch.setattr(job, "check_values", lambda spec, t: None)
    pool = torch.zeros(0, 4, 2, 16)
    table, lengths = torch.tensor([[3, 0]]), torch.tensor([7])
    given = dict(block_table=table, key_lengths=lengths, cu_q=torch.tensor([0, 5]))
    out = fastattn.attention_packed(torch.ones(5, 2, 16), pool, pool, **given, backend=name)
    assert out.shape == (5, 2, 16) and not out.any()
