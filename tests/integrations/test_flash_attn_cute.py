"""FlashAttention-4's functions: rows of a covering array, of every pair of arguments and layouts,
against an oracle that takes one sequence at a time; functions, blocks, selected keys; refusals."""

import pytest
import torch
from torch.nn import functional as F

from fastattn.flash_attn import cute
from tests.features.covering import array
from tests.integrations.test_flash_attn import offsets, random, signature_of
from tests.support import flash_attn_oracle as oracle

H, HK, D, DV = 4, 2, 8, 6
FACTORS = {
    "rows": ("dense", "padded", "packed"),
    "keys": ("dense", "padded", "packed", "paged"),
    "used_q": (False, True),
    "used_k": (False, True),
    "sizes": ("many", "few", "more rows"),
    "causal": (False, True),
    "window": ((None, None), (7, 3), (4, None), (None, 2), (0, 0), (-2, 9), (9, -3), (None, -2)),
    "softcap": (0.0, 1.5),
    "scale": (None, 0.7),
    "sinks": (False, True),
    "qv": ("no", "beside", "alone"),
    "score_mod": ("no", "table", "lengths", "offsets"),
    "mask_mod": ("no", "table", "lengths", "scalars"),
    "blocks": ("no", "some", "with full"),
    "selected": (False, True),
}
# The numbers of rows and of keys of each sequence.
SIZES = {
    "many": ((65, 0, 33, 64), (65, 9, 0, 130)),
    "few": ((1, 2, 1, 4), (33, 64, 1, 17)),
    "more rows": ((40, 17, 3, 9), (3, 17, 1, 5)),
}
BLOCK = (16, 32)


def forbidden(f, a, g, b):
    if (f, a) == ("rows", "dense"):
        return (g == "keys" and b != "dense") or (g in ("used_q", "used_k") and b)
    if (f, a) == ("keys", "dense"):
        return g == "rows" and b != "dense"
    if f == "mask_mod" and a != "no":
        return (g == "causal" and b) or (g == "window" and b != (None, None))
    if f == "score_mod" and a != "no":
        return g == "softcap" and b
    if f == "selected" and a:
        others = g in ("score_mod", "mask_mod", "blocks") and b != "no"
        return others or (g == "window" and b != (None, None))
    if (f, a) == ("causal", True):  # an empty window
        return (g, b) == ("window", (9, -3)) or (g == "window" and b[0] == -2)
    return False


ROWS = array(FACTORS, forbidden)


def named(row):
    return "-".join(f"{n}={x}" for n, x in row.items() if x != FACTORS[n][0]) or "plain"


def functions(row):
    """FlashAttention-4's arguments, and of sequence b (a score_mod, what else may be seen)."""
    table = random(H, 150, seed=11).requires_grad_()
    seen = random(150, 150, seed=12) > -0.7
    given, aux = {}, [table, seen]

    def score(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        if row["score_mod"] == "table":
            return s + aux_tensors[0][h, kv_idx]
        if row["score_mod"] == "lengths":
            return s * 0.5 + (seqlen_info.seqlen_k - seqlen_info.seqlen_q) * 0.0625 * (h + 1) + b
        first = seqlen_info.offset_q - seqlen_info.offset_k
        return s + (first + q_idx - kv_idx) * 0.125

    def mask(b, h, q_idx, kv_idx, seqlen_info, aux_tensors, *scalars):
        if row["mask_mod"] == "table":
            return aux_tensors[1][q_idx, kv_idx]
        if row["mask_mod"] == "lengths":
            return kv_idx <= q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q
        return (q_idx + kv_idx * scalars[0][0]) % 3 > 0

    def score_with_scalars(*arguments, aux_scalars, **named):
        return score(*arguments, **named)

    if row["score_mod"] != "no":
        given["score_mod"] = score
    if row["mask_mod"] != "no":
        given["mask_mod"] = mask
    if row["mask_mod"] == "scalars":
        given["aux_scalars"] = (2,)
        if "score_mod" in given:
            given["score_mod"] = score_with_scalars
    if given:
        given["aux_tensors"] = aux

    def of_sequence(b, m, n, first_row, first_key):
        i, j = torch.arange(m)[:, None], torch.arange(n)[None]
        h = torch.arange(H)[:, None, None]
        shown = None

        def of_scores(s):
            if row["score_mod"] == "table":
                return s + table[:, None, :n]
            if row["score_mod"] == "lengths":
                return s * 0.5 + (n - m) * 0.0625 * (h + 1) + b
            return s if row["score_mod"] == "no" else s + (first_row - first_key + i - j) * 0.125

        if row["mask_mod"] == "table":
            shown = seen[:m, :n]
        elif row["mask_mod"] == "lengths":
            shown = j <= i + n - m
        elif row["mask_mod"] == "scalars":
            shown = (i + 2 * j) % 3 > 0
        return of_scores, shown

    return given, of_sequence, table


def blocks_of(row, ms, used_k, longest):
    """BlockSparseTensorsTorch, and of each sequence (H,M,N) pairs of blocks whole, or in part."""
    g = torch.Generator().manual_seed(4)
    kinds, most = 3 if row["blocks"] == "with full" else 2, -(-longest // BLOCK[1])

    def drawn(*sizes):
        return torch.randint(0, kinds, sizes, generator=g)

    if row["rows"] == "packed":
        lists, each, entries = [], [], []
        for m, n in ((-(-m // BLOCK[0]), -(-n // BLOCK[1])) for m, n in zip(ms, used_k)):
            kind = drawn(H, m, n)
            lists.append(listed(kind, n))
            each.append(kind)
            entries.append(m * n)
        lists = [torch.cat([x.flatten(1) for x in some], 1) for some in zip(*lists)]
        where = offsets([-(-m // BLOCK[0]) for m in ms]), offsets(entries)
    else:
        kind = drawn(1, H, -(-ms[0] // BLOCK[0]), most)
        widest = max(int((kind == x).sum(-1).max()) for x in (1, 2))
        lists, each, where = list(listed(kind, max(1, widest))), [kind[0]] * 4, (None, None)
    if row["blocks"] == "some":
        lists[2:] = None, None
    each = [x.repeat_interleave(BLOCK[0], 1).repeat_interleave(BLOCK[1], 2) for x in each]
    return cute.BlockSparseTensorsTorch(*lists, *where, block_size=BLOCK), each


def listed(kind, columns):
    """The numbers and lists of blocks in part, and those of whole blocks."""
    for what in (1, 2):
        order = (kind != what).int().sort(dim=-1, stable=True).indices
        yield from ((kind == what).sum(-1).int(), order[..., :columns].int())


@pytest.mark.parametrize("row", ROWS, ids=map(named, ROWS))
def test_calls(row):
    ms, ns = SIZES[row["sizes"]]
    if row["rows"] != "packed":
        ms = (ms[0],) * 4
    if row["keys"] in ("dense", "padded"):
        ns = (ns[0],) * 4
    T, S = sum(ms), sum(ns)
    shapes = (T, H, D), (S, HK, D), (S, HK, DV), (T, H, DV)
    q, k, v, qv = (random(*shape, seed=at).requires_grad_() for at, shape in enumerate(shapes))
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64).requires_grad_()
    sinks = sinks if row["sinks"] else None
    used_q = [max(0, m - 2) for m in ms] if row["used_q"] else ms
    used_k = [max(0, n - 3) for n in ns] if row["used_k"] else ns
    first_q, first_k = offsets(ms), offsets(ns)
    given, of_sequence, table = functions(row)
    given |= dict(softmax_scale=row["scale"], causal=row["causal"], window_size=row["window"])
    given |= dict(learnable_sink=sinks, softcap=row["softcap"], return_lse=True)
    tensors = dict(q=q, k=k, v=v, qv=qv)
    if row["qv"] == "no":
        tensors.pop("qv")
    leaves = [*tensors.values(), *([] if sinks is None else [sinks])]
    leaves += [table] if row["score_mod"] == "table" else []
    if row["qv"] == "alone":
        tensors |= dict(q=None, k=None)
        leaves = leaves[2:]
    each = None
    if row["blocks"] != "no":
        given["block_sparse_tensors"], each = blocks_of(row, ms, used_k, max(ns))
    selected = None
    if row["selected"]:
        g = torch.Generator().manual_seed(5)
        selected = torch.randint(-2, max(ns) + 2, (T, 20), generator=g)
        given["gather_kv_indices"] = selected.int()

    def shaped(name, x):
        if x is None or (name in ("q", "qv") and row["rows"] == "packed"):
            return x
        if name in ("q", "qv") or row["keys"] in ("dense", "padded"):
            return x.unflatten(0, (4, -1))
        return x

    tensors = {name: shaped(name, x) for name, x in tensors.items()}
    if row["selected"] and row["rows"] != "packed":
        given["gather_kv_indices"] = given["gather_kv_indices"].unflatten(0, (4, -1))
    function = cute.flash_attn_func
    if row["rows"] != "dense":
        function = cute.flash_attn_varlen_func
        if row["rows"] == "packed":
            given |= dict(cu_seqlens_q=first_q, max_seqlen_q=max(used_q))
        if row["keys"] == "packed":
            given |= dict(cu_seqlens_k=first_k, max_seqlen_k=max(ns))
        for name, some in (("q", used_q), ("k", used_k)):
            if row[f"used_{name}"]:
                given[f"seqused_{name}"] = torch.tensor(some, dtype=torch.int32)
    if row["keys"] == "paged":
        tensors, given["page_table"] = paged(tensors, ns)
        given["seqused_k"] = torch.tensor(used_k, dtype=torch.int32)
    out, lse = function(**tensors, **given)
    if row["qv"] != "no":
        lse = lse.transpose(-1, -2)
    if row["rows"] != "packed":
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    outs, lses = [], []
    of_keys_first = first_k if row["keys"] == "packed" else torch.zeros(5, dtype=torch.int32)
    of_rows_first = first_q if row["rows"] == "packed" else torch.zeros(5, dtype=torch.int32)
    for b in range(4):
        i, j, m, n = int(first_q[b]), int(first_k[b]), used_q[b], used_k[b]
        of_scores, shown = of_sequence(b, m, n, int(of_rows_first[b]), int(of_keys_first[b]))
        if each is not None:
            kind = each[b][:, :m, :n]
            shown = (kind == 2) | ((kind == 1) & (True if shown is None else shown))
        if selected is not None:
            shown = torch.zeros(m, max(ns) + 4, dtype=torch.bool)
            shown = shown.scatter(1, selected[i : i + m].clamp(min=-1) + 1, True)[:, 1 : n + 1]
        own = dict(causal=row["causal"], window=row["window"], softcap=row["softcap"])
        own |= dict(scale=row["scale"], sinks=sinks, score_mod=of_scores, shown=shown)
        x = q[i : i + m], k[j : j + n], v[j : j + n]
        of_qv = qv[i : i + m] if row["qv"] == "beside" else None
        if row["qv"] == "alone":
            x = qv[i : i + m], x[2], x[2]
        one, of_one = oracle.sequence(*x, of_qv, **own)
        sink = -torch.inf if sinks is None else sinks[:, None]
        unused = torch.zeros(H, ms[b] - m, dtype=torch.float64) + sink
        outs.append(F.pad(one, (0, 0, 0, 0, 0, ms[b] - m)))
        lses.append(torch.cat((of_one, unused), 1))
    expected = torch.cat(outs), torch.cat(lses, 1)
    for x, y in zip((out, lse), expected):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    dout, dlse = random(*out.shape, seed=8), random(*lse.shape, seed=9)

    def gradients(out, lse):
        loss = (out * dout).sum() + (torch.where(expected[1].isfinite(), lse, 0) * dlse).sum()
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(gradients(out, lse), gradients(*expected), rtol=1e-8, atol=1e-8)


def paged(tensors, ns, page=16):
    """Keys and values in pages in an order of their own: tensors, the table."""
    used = [-(-n // page) for n in ns]
    order = torch.randperm(sum(used) + 2, generator=torch.Generator().manual_seed(6))
    table = torch.full((4, max(used) + 1), -5, dtype=torch.int32)
    rows, at, first = [], 0, 0
    for b, (n, count) in enumerate(zip(ns, used)):
        table[b, :count] = order[at : at + count]
        j = torch.arange(n)
        rows.append(table[b].long()[j // page] * page + j % page)
        at, first = at + count, first + n
    places = torch.cat(rows)

    def laid(x):
        if x is None:
            return None
        pages = x.new_zeros((len(order) * page, *x.shape[1:]))
        return pages.index_copy(0, places, x).unflatten(0, (-1, page))

    return tensors | {name: laid(tensors[name]) for name in "kv"}, table


SCORES = "learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False "
MODS = "score_mod=None score_mod_bwd=None mask_mod=None"
SIGNATURES = {
    "flash_attn_func": "q k v qv=None gather_kv_indices=None softmax_scale=None causal=False "
    f"window_size=(None,None) {SCORES} {MODS} aux_tensors=None aux_scalars=None "
    "block_sparse_tensors=None block_sparse_tensors_bwd=None return_lse=False",
    "flash_attn_varlen_func": "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None "
    "max_seqlen_k=None min_seqlen_k=None seqused_q=None seqused_k=None gather_kv_indices=None "
    f"page_table=None softmax_scale=None causal=False window_size=(None,None) {SCORES} {MODS} "
    "block_sparse_tensors=None aux_tensors=None aux_scalars=None return_lse=False "
    "scheduler_metadata=None seqlen_k_per_split=None disable_scheduler_metadata=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None cu_seqlens=None "
    "seqused=None virtual_batch_idx=None return_lse=True",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature_of(getattr(cute, name)) == SIGNATURES[name].split()


def test_the_lse_is_returned_if_it_is_wanted():
    """Or if a tensor requires grad, as FlashAttention-4 does."""
    x, sinks = random(1, 5, H, D), torch.zeros(H).double().requires_grad_()
    assert cute.flash_attn_func(x, x, x)[1] is None
    assert cute.flash_attn_func(x.clone().requires_grad_(), x, x)[1] is not None
    assert cute.flash_attn_varlen_func(x, x, x, learnable_sink=sinks)[1] is not None
    outs, lses = torch.stack([x, x]), random(2, 1, 5, H)
    assert cute.flash_attn_combine(outs, lses, return_lse=False)[1] is None


def test_pages_without_lengths():
    """All of their keys are used."""
    table = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32)
    pages, q = random(3, 4, H, D, seed=1), random(2, 5, H, D)
    keys = pages[table].flatten(1, 2)
    out = cute.flash_attn_varlen_func(q, pages, pages, page_table=table, causal=True)[0]
    torch.testing.assert_close(out, cute.flash_attn_func(q, keys, keys, causal=True)[0])


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_a_mask_mod_is_not_asked_where_all_blocks_are_whole(rows):
    q, k, v = torch.randn(3, 2, 8, 2, 16)
    one, none = (torch.full((2, 1, 1), x, dtype=torch.int32) for x in (1, 0))
    lists, given = (none, none[..., None], one, none[..., None]), dict(block_size=(8, 8))
    if rows == "packed":
        lists = [x.view(1, 2) for x in lists]
        given |= dict(cu_total_m_blocks=offsets([1, 1]))
    blocks = cute.BlockSparseTensorsTorch(*lists, **given)
    given = dict(mask_mod=lambda b, h, i, j, info, aux: j < i, block_sparse_tensors=blocks)
    if rows == "packed":
        given |= dict(cu_seqlens_q=offsets([8, 8]))
        out = cute.flash_attn_varlen_func(q.flatten(0, 1), k, v, **given)[0].view_as(q)
    else:
        out = cute.flash_attn_func(q, k, v, **given)[0]
    torch.testing.assert_close(out, cute.flash_attn_func(q, k, v)[0])


@pytest.mark.parametrize("window", [(-1, -1), (None, None), (99, 99)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_that_hide_nothing(window, causal):
    """transformers passes (-1, -1) for no window."""
    x = random(1, 9, H, D)
    out = cute.flash_attn_func(x, x, x, window_size=window, causal=causal)[0]
    expected = torch.stack([oracle.sequence(x[0], x[0], x[0], causal=causal)[0]])
    torch.testing.assert_close(out, expected)


X = torch.zeros(2, 5, 4, 8)
C = torch.tensor([0, 2, 5], dtype=torch.int32)


def true(b, h, i, j, info, aux):
    return i >= 0


COUNTS = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
BLOCKS = cute.BlockSparseTensorsTorch(*COUNTS, block_size=(128, 128))
SELECTED = dict(gather_kv_indices=torch.zeros(2, 5, 3, dtype=torch.int32))


def dense(*tensors, **given):
    return lambda: cute.flash_attn_func(*(tensors or (X, X, X)), **given)


def gathered(**given):
    """Selected keys of packed sequences of 2 and 3 rows and keys."""
    where = dict(cu_seqlens_q=C, cu_seqlens_k=C) | given
    indices = torch.zeros(5, 2, dtype=torch.int32)
    return lambda: cute.flash_attn_varlen_func(X[0], X[0], X[0], **where, gather_kv_indices=indices)


FIRST = torch.tensor([0, 1, 3], dtype=torch.int32)  # blocks of 2 rows and of 4 keys
OF_ROWS = torch.ones(1, 3, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)


def in_blocks(**wrong):
    """Blocks of packed sequences of 2 and 3 rows and keys."""
    given = dict(cu_total_m_blocks=FIRST, cu_block_idx_offsets=FIRST, block_size=(2, 4)) | wrong
    blocks = cute.BlockSparseTensorsTorch(*OF_ROWS)._replace(**given)
    where = None, C, C, 3, 3
    return lambda: cute.flash_attn_varlen_func(
        X[0], X[0], X[0], *where, block_sparse_tensors=blocks
    )


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (gathered(seqused_k=torch.tensor([5, 3])), ValueError, "seqused_k: got 5 of sequence 0"),
        (gathered(seqused_k=torch.tensor([-1, 3])), ValueError, "seqused_k: got -1"),
        (gathered(seqused_q=torch.tensor([2, 4])), ValueError, "seqused_q.1.: got 4"),
        (gathered(cu_seqlens_k=torch.tensor([0, 3, 2])), ValueError, "cu_seqlens_k: got 2 last"),
        (gathered(cu_seqlens_q=torch.tensor([1, 2, 5])), ValueError, "cu_seqlens_q: got 1 first"),
        (gathered(max_seqlen_q=2), ValueError, "cu_seqlens_q: got 3 rows in sequence 1"),
        (gathered(cu_seqlens_q=torch.tensor([0])), ValueError, "cu_seqlens_k: got"),
        (
            lambda: cute.flash_attn_func(
                *[X.to(torch.float8_e4m3fn)] * 3, gather_kv_indices=SELECTED["gather_kv_indices"]
            ),
            NotImplementedError,
            "q.dtype: got eight bits with gather",
        ),
        (dense(None, None, X), ValueError, "q: got None, expected q and k, or qv and v alone"),
        (dense(None, X, X, X), ValueError, "q: got None"),
        (dense(X, None, X), ValueError, "k: got None"),
        (dense(mask_mod=true, causal=True), ValueError, "causal: got True beside mask_mod"),
        (dense(mask_mod=true, window_size=(3, 0)), ValueError, "window_size: got .* mask_mod"),
        (dense(score_mod=true, softcap=2.0), ValueError, "softcap: got 2.0 beside score_mod"),
        (dense(window_size=(-3, 1)), ValueError, "window_size: got .*expected edges with a key"),
        (dense(window_size=(-3, None), causal=True), ValueError, "window_size: got"),
        (dense(window_size=(1.5, 2)), ValueError, "window_size: got"),
        (dense(window_size=3), ValueError, "window_size: got 3, expected a pair"),
        (dense(block_sparse_tensors=BLOCKS._replace(block_size=None)), ValueError, "block_size"),
        (
            dense(block_sparse_tensors=BLOCKS._replace(cu_total_m_blocks=C)),
            ValueError,
            "cu_total_m_blocks: got a tensor, expected .* None",
        ),
        *(
            (in_blocks(**wrong), ValueError, f"block_sparse_tensors.{message}")
            for wrong, message in (
                (dict(cu_total_m_blocks=None), "cu_total_m_blocks: got None, expected offsets"),
                (dict(cu_block_idx_offsets=None), "cu_block_idx_offsets: got None with"),
                (dict(cu_total_m_blocks=FIRST[:2]), r"cu_total_m_blocks: got torch.int32 \(2,\)"),
                (dict(cu_total_m_blocks=FIRST + 1), "cu_total_m_blocks: got 1 first"),
                (dict(cu_total_m_blocks=2 * FIRST), "cu_total_m_blocks: got 6 last, expected 3"),
                (dict(cu_total_m_blocks=FIRST[[0, 0, 2]]), "cu_total_m_blocks: got 1, expected 0"),
                (dict(cu_block_idx_offsets=FIRST + 2), "cu_block_idx_offsets: got 5, expected 0"),
                (dict(cu_block_idx_offsets=FIRST - 3), "cu_block_idx_offsets: got -3, expected 0"),
                (dict(cu_block_idx_offsets=FIRST[:-1]), "cu_block_idx_offsets: got torch.int32"),
                (dict(mask_block_cnt=OF_ROWS[0] * 2), "mask_block_cnt: got 2, expected 0 to 1"),
                (dict(mask_block_idx=OF_ROWS[1] + 1), "mask_block_idx: got 1, expected 0 to 0"),
                (dict(mask_block_cnt=OF_ROWS[0].repeat(3, 1)), "mask_block_idx: got .* .3, blocks"),
                (
                    dict(zip(BLOCKS._fields, (x.repeat(3, 1) for x in OF_ROWS))),
                    r"mask_block_cnt: got shape \(3, 3\), expected \(1 or 4, 3\)",
                ),
            )
        ),
        *(
            (dense(block_sparse_tensors=BLOCKS._replace(**wrong)), ValueError, message)
            for wrong, message in (
                (dict(block_size=(128, 0)), "block_size: got .128, 0."),
                (dict(block_size=128), "block_size: got 128"),
                (dict(block_size=(2, 128)), "mask_block_cnt: got shape .1, 1, 1., expected"),
                (dict(mask_block_cnt=COUNTS[0].expand(3, 1, 1)), "mask_block_idx: got"),
                (dict(mask_block_cnt=COUNTS[0].float()), "mask_block_cnt: got torch.float32"),
                (dict(mask_block_cnt=-COUNTS[0]), "mask_block_cnt: got -1, expected 0 to 1"),
                (dict(mask_block_cnt=2 * COUNTS[0]), "mask_block_cnt: got 2, expected 0 to 1"),
                (dict(mask_block_idx=COUNTS[1] + 1), "mask_block_idx: got 1, expected 0 to 0"),
                (dict(full_block_idx=COUNTS[1]), "full_block_idx: expected it with"),
            )
        ),
        (dense(**SELECTED, mask_mod=true), NotImplementedError, "mask_mod: got it beside gather"),
        (dense(**SELECTED, window_size=(3, 0)), NotImplementedError, "window_size: got it beside"),
        (
            dense(gather_kv_indices=torch.zeros(2, 5, 3)),
            ValueError,
            "gather_kv_indices: got torch.float32",
        ),
        (
            lambda: cute.flash_attn_varlen_func(
                X[0], X, X, None, C, C, page_table=torch.zeros(2, 1, dtype=torch.int32)
            ),
            ValueError,
            "page_table: got it with cu_seqlens_k",
        ),
    ],
)
def test_refusals(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
