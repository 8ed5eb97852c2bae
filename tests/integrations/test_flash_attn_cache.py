"""`flash_attn_with_kvcache`, and keys in pages: every cache layout with every way to append and to
mask, with garbage where nothing may be read, and with tables that point out of range."""

import pytest
import torch

from fastattn import flash_attn as fa
from fastattn.flash_attn import checks
from tests.integrations.test_flash_attn import HK, D, H, offsets, random
from tests.support import flash_attn_oracle as oracle
from tests.support.marks import parametrize

B, M, CAPACITY = 4, 5, 140
LENGTHS = torch.tensor([0, 64, 129, 33], dtype=torch.int32)
# Page sizes from single keys to more than the longest sequence. 7 divides no length but 0.
LAYOUTS = ["plain", "batch_idx", "leftpad", "batch_idx_leftpad"]
LAYOUTS += [f"page_{n}" for n in (1, 7, 16, 64, 256)]
LAYOUTS += ["page_7_leftpad", "page_16_batch_idx", "page_64_batch_idx_leftpad"]
NEW = {"nothing": (0, None), "one": (1, None), "three": (3, None), "as_many": (M, None)}
NEW |= {"interleaved": (3, True), "halves": (M, False)}
LOOKS = {
    "all": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(9, 2)),
    "left_causal": dict(causal=True, window_size=(9, -1)),
    "alibi": dict(alibi_slopes=torch.linspace(0.1, 1, B * H).view(B, H)),
    "causal_alibi": dict(causal=True, alibi_slopes=torch.linspace(0.1, 1, H)),
    "softcap_sinks": dict(softcap=2.0, s_aux=torch.tensor([0.3, -1.0, 2.0, 0.0]).double()),
    "scale": dict(softmax_scale=0.9, num_splits=3),
}


def problem(layout, new="nothing", rows=M, dtype=torch.float64):
    """Arguments of a call. Memory without keys is NaN; unused entries of tables are invalid."""
    g = torch.Generator().manual_seed(len(layout))
    count, interleaved = NEW[new]
    lengths, found = LENGTHS, {"cache_seqlens": LENGTHS}
    ends = lengths + count
    items, capacity = B, CAPACITY
    if "batch_idx" in layout:
        items, found["cache_batch_idx"] = 7, torch.tensor([5, 0, 3, 6], dtype=torch.int32)
    if layout.endswith("leftpad"):
        found["cache_leftpad"] = torch.tensor([0, 63, 1, 33], dtype=torch.int32)
    if layout.startswith("page"):
        capacity = int(layout.split("_")[1])
        used = [-(-int(n) // capacity) for n in ends]
        items = sum(used) + 3
        table = torch.full((B, -(-CAPACITY // capacity)), -(10**6), dtype=torch.int32)
        blocks = iter(torch.randperm(items, generator=g).tolist())
        for b, n in enumerate(used):
            table[b, :n] = torch.tensor([next(blocks) for _ in range(n)], dtype=torch.int32)
            table[b, n:] = torch.tensor([-1, items, 2**31 - 1])[
                torch.arange(table.shape[1] - n) % 3
            ]
        found["block_table"] = table
        if "cache_batch_idx" in found:
            found["block_table"] = torch.full((7, table.shape[1]), -7, dtype=torch.int32)
            found["block_table"][found["cache_batch_idx"]] = table
    shape = (items, capacity, HK)
    k_cache, v_cache = random(*shape, D, seed=1), random(*shape, 6, seed=2)
    hide(k_cache, v_cache, found, lengths)
    if count:
        found |= dict(k=random(B, count, HK, D, seed=3), v=random(B, count, HK, 6, seed=4))
    if interleaved is not None:
        angles = 6 * random(CAPACITY + rows, 3, seed=5)
        found |= dict(rotary_cos=angles.cos(), rotary_sin=angles.sin())
        found["rotary_interleaved"] = interleaved
    found |= dict(q=random(B, rows, H, D, seed=6), k_cache=k_cache, v_cache=v_cache)
    return {n: x.to(dtype) if is_real(x) else x for n, x in found.items()}


def is_real(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def hide(k_cache, v_cache, found, lengths):
    """Fill everything that is not a key with NaN."""
    keep = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for b, n in enumerate(lengths.tolist()):
        first = int(found["cache_leftpad"][b]) if "cache_leftpad" in found else 0
        for j in range(first, n):
            if "block_table" in found:
                page, row = k_cache.shape[1], found.get("cache_batch_idx", range(B))[b]
                keep[found["block_table"][row, j // page], j % page] = True
            else:
                keep[found["cache_batch_idx"][b] if "cache_batch_idx" in found else b, j] = True
    for x in (k_cache, v_cache):
        x[~keep] = torch.nan


def agree(given, tolerance=1e-9):
    own = given | {"k_cache": given["k_cache"].clone(), "v_cache": given["v_cache"].clone()}
    out, lse = fa.flash_attn_with_kvcache(**own, return_softmax_lse=True)
    given = {name: x for name, x in given.items() if name != "num_splits"}
    *expected, k_cache, v_cache = oracle.with_kvcache(**given)
    for got, wanted in zip(
        (out, lse, own["k_cache"], own["v_cache"]), (*expected, k_cache, v_cache)
    ):
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    assert not out.isnan().any() and not out.requires_grad
    return out


@parametrize("look", LOOKS, fast=7)
@pytest.mark.parametrize("new", NEW)
@parametrize("layout", LAYOUTS, fast=2)
def test_layouts(layout, new, look):
    out = agree(problem(layout, new) | LOOKS[look])
    assert out.shape == (B, M, H, 6)


@pytest.mark.parametrize("look", LOOKS)
@parametrize("layout", LAYOUTS, fast=7)
def test_one_row(layout, look):
    agree(problem(layout, "one", rows=1) | LOOKS[look])
    agree(problem(layout, "interleaved", rows=1) | LOOKS[look])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["plain", "page_16"])
def test_dtypes(layout, dtype):
    agree(problem(layout, dtype=dtype) | LOOKS["left_causal"], 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("lengths", [0, 1, 63, 64, 65, 140, None, torch.tensor([140, 0, 1, 63])])
@pytest.mark.parametrize("layout", ["plain", "page_64"])
def test_lengths(layout, lengths):
    given = problem(layout) | {"causal": True, "cache_seqlens": lengths}
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].nan_to_num(0.5)
    if "block_table" in given:
        given["block_table"] = torch.arange(B * 3).view(B, 3).flip(1) % len(given["k_cache"])
    agree(given)


@pytest.mark.parametrize("page", (None, 4, 8))
def test_two_sequences_do_not_write_to_one_row(page):
    """Two sequences may read shared rows; sequences of different lengths write different rows."""
    k_cache, v_cache = random(4, 8, HK, D, seed=1), random(4, 8, HK, 6, seed=2)
    q, k, v = random(2, 1, H, D), random(2, 1, HK, D, seed=3), random(2, 1, HK, 6, seed=4)
    found = dict(cache_batch_idx=torch.tensor([2, 2]))
    if page:
        k_cache, v_cache = (x.view(-1, page, *x.shape[2:]) for x in (k_cache, v_cache))
        found = dict(block_table=torch.tensor([[1, 3], [1, 3]]))
    fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=5, **found)
    apart = torch.tensor([5, 6])
    fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=apart, **found)
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match="k: got keys of two sequences for one row"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5, **found)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


def test_the_cache_may_have_any_strides():
    given = problem("plain", "three")
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
    agree(given | {"causal": True})


@pytest.mark.parametrize("name", ("q", "k_cache", "v_cache", "k", "v", "s_aux"))
def test_a_gradient_is_not_dropped(name):
    """A tensor that requires grad raises before anything is written, unless gradients are off."""
    given = problem("plain", "three") | LOOKS["softcap_sinks"]
    given[name] = given[name].clone().requires_grad_()
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=f"{name}: got a tensor that requires grad.*no gradients"):
        fa.flash_attn_with_kvcache(**given)
    torch.testing.assert_close(given["k_cache"], before, rtol=0, atol=0, equal_nan=True)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert not fa.flash_attn_with_kvcache(**given).requires_grad


@pytest.mark.parametrize("look", [{}, LOOKS["left_causal"], LOOKS["window"], dict(dropout_p=0.3)])
@pytest.mark.parametrize("page", [1, 7, 16, 64, 256])
def test_pages_of_a_packed_batch(page, look):
    """Of flash_attn_varlen_func, by its `block_table`."""
    rows, keys = [0, 5, 64, 1], [3, 65, 64, 0]
    used = [-(-n // page) for n in keys]
    k = random(sum(used) + 2, page, HK, D, seed=1)
    v = random(sum(used) + 2, page, HK, D, seed=2)
    g = torch.Generator().manual_seed(page)
    blocks = torch.randperm(len(k), generator=g).split([*used, 2])[:-1]
    table = torch.full((4, 65), -5, dtype=torch.int32)
    for b, x in enumerate(blocks):
        table[b, : len(x)] = x
    q, cu_q, cu_k = random(sum(rows), H, D, seed=3), offsets(rows), offsets(keys)
    flat = [torch.cat([x[y].flatten(0, 1)[:n] for y, n in zip(blocks, keys)]) for x in (k, v)]
    where = cu_q, cu_k, max(rows), max(keys)
    got = fa.flash_attn_varlen_func(
        q, k, v, *where, block_table=table, return_attn_probs=True, **look
    )
    kept = {} if got[2] is None else {"kept": got[2] >= 0}
    expected = oracle.varlen(q, *flat, cu_q, cu_k, **look, **kept)
    torch.testing.assert_close(got[:2], expected)


@pytest.mark.parametrize("look", [{}, LOOKS["window"]])
@pytest.mark.parametrize("entry", [-1, 9, -(2**31)])
def test_invalid_pages_raise(entry, look):
    k = random(9, 16, HK, D)
    table = torch.tensor([[0, 1], [8, entry]], dtype=torch.int32)
    where = offsets([3, 4]), offsets([32, 17]), 4, 32
    call = dict(block_table=table, **look)
    with pytest.raises(ValueError, match=f"block_table: got (page )?{entry}"):
        fa.flash_attn_varlen_func(random(7, H, D), k, k, *where, **call)
    where = offsets([3, 4]), offsets([32, 16]), 4, 32  # these keys do not reach that entry
    fa.flash_attn_varlen_func(random(7, H, D), k, k, *where, **call)
    where = offsets([3, 4]), offsets([33, 16]), 4, 33
    with pytest.raises(ValueError, match="cu_seqlens_k: got 33"):
        fa.flash_attn_varlen_func(random(7, H, D), k, k, *where, **call)


def test_keys_in_pages_have_gradients():
    """flash-attn has none."""
    k, where = random(2, 16, HK, D).requires_grad_(), (offsets([3]), offsets([20]), 3, 20)
    q, table = random(3, H, D), torch.tensor([[1, 0]])
    stored = k[[1, 0]].flatten(0, 1)[:20]
    grads = []
    for keys, more in ((k, dict(block_table=table)), (stored, {})):
        out = fa.flash_attn_varlen_func(q, keys, keys, *where, **more)
        grads.append(torch.autograd.grad(out.sin().sum(), k)[0])
    torch.testing.assert_close(*grads)


def without(given, *names):
    return {name: x for name, x in given.items() if name not in names}


def changed(layout, new="nothing", drop=(), **changes):
    return lambda: fa.flash_attn_with_kvcache(**without(problem(layout, new), *drop) | changes)


def pointing(entry, new="nothing"):
    """A call with a table that has this value in an entry that the lengths need."""

    def call():
        given = problem("page_16", new)
        before = [given[name].clone() for name in ("k_cache", "v_cache")]
        given["block_table"][2, 3] = len(given["k_cache"]) if entry == "past" else entry
        try:
            fa.flash_attn_with_kvcache(**given)
        finally:
            for x, name in zip(before, ("k_cache", "v_cache")):
                torch.testing.assert_close(given[name], x, rtol=0, atol=0, equal_nan=True)

    return call


@pytest.mark.parametrize(
    "call, message",
    [
        (pointing(-1), "block_table: got -1, expected 0 to"),
        (pointing("past"), "block_table: got"),
        (pointing(2**31 - 1), "block_table: got 2147483647, expected 0 to"),
        (pointing(10**6, "three"), "block_table: got 1000000"),  # and nothing was written
        (changed("plain", cache_seqlens=141), "cache_seqlens: got 141, expected 0 to 140"),
        (changed("plain", cache_seqlens=-1), "cache_seqlens: got -1"),
        (changed("plain", "three", cache_seqlens=138), "cache_seqlens: got 138, expected 0 to 137"),
        (changed("plain", cache_seqlens=LENGTHS[:2]), "cache_seqlens: got torch.int32"),
        (changed("plain", cache_seqlens=LENGTHS.float()), "cache_seqlens: got torch.float32"),
        (changed("plain", "one", cache_seqlens=None), "cache_seqlens: got None beside k"),
        (
            changed("batch_idx", cache_batch_idx=torch.tensor([0, 7, 1, 2])),
            "cache_batch_idx: got 7",
        ),
        (changed("page_16", cache_batch_idx=torch.arange(B) + 1), "cache_batch_idx: got 4"),
        (changed("leftpad", cache_leftpad=torch.tensor([0, 65, 0, 0])), "cache_leftpad: got 65"),
        (changed("page_16", block_table=torch.zeros(2, 9).int()), "block_table: got torch.int32"),
        (changed("plain", "one", drop=["v"]), "v: got None, expected torch.float64"),
        (changed("plain", "one", drop=["k"]), "k: got None, expected torch.float64"),
        (changed("plain", "one", k=random(B, 1, HK, D).float()), "k: got torch.float32"),
        (changed("plain", "one", v=random(B, 2, HK, 6)), "v: got torch.float64 .4, 2, 2, 6., exp"),
        (changed("plain", rotary_cos=random(9, 2)), "rotary_cos: got it without k"),
        (changed("plain", "halves", rotary_cos=random(150, 5)), "rotary_cos: got shape"),
        (changed("plain", "halves", rotary_sin=random(9, 3)), "rotary_sin: got shape .9, 3., expe"),
        (changed("plain", "halves", drop=["rotary_sin"]), "rotary_sin: got None"),
        (
            changed("plain", "halves", rotary_cos=random(99, 3), rotary_sin=random(99, 3)),
            "rotary_cos: got 129, expected 0 to 98",
        ),
        (changed("plain", v_cache=random(B, 9, HK, D)), "v_cache: got shape"),
        (
            changed("plain", k_cache=random(2, 9, HK, D), v_cache=random(2, 9, HK, D)),
            "k_cache: got",
        ),
        (changed("plain", q=random(B, M, H, 9)), "k_cache: got shape"),
    ],
)
def test_unsupported_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("last", [5, torch.tensor([5, 0, 8, 2])], ids=str)
def test_entries_are_clamped_on_other_devices_than_cpu(last):
    """Checking values would wait for the GPU. A meta tensor stands for a tensor on one."""
    x = torch.tensor([-(2**31), 0, 2**31 - 1, 2])
    assert checks.within("x", x.to("meta"), 5).device.type == "meta"
    found = checks.clamped(x, torch.as_tensor(last)).tolist()
    assert found == [0, 0, torch.as_tensor(last).max(), 2]
