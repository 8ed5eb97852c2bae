"""FlashAttention-3's functions: rows of a covering array, of every pair of arguments and layouts,
against an oracle that takes one sequence at a time; gradients; caches; refusals."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from fastattn.flash_attn import flash_attn_3 as fa3
from fastattn.flash_attn import sequences
from tests.features.covering import array
from tests.integrations.test_flash_attn import offsets, random, signature_of
from tests.support import flash_attn_oracle as oracle

H, HK, D, DV = 4, 2, 8, 6
SCORES = {
    "causal": (False, True),
    "window": ((-1, -1), (7, 3), (4, -1), (-1, 2), (0, 0)),
    "chunk": (0, 5, 16, 64),
    "softcap": (0.0, 1.5),
    "scale": (None, 0.7),
    "sinks": (False, True),
    "qv": (False, True),
    "scales": ("no", "k", "q and v", "all"),
}
CALLS = {
    "form": ("padded", "packed"),
    "used_q": (False, True),
    "used_k": (False, True),
    "index": (torch.int32, torch.int64),
    "sizes": ("many", "few", "more rows"),
    "dtype": ("float64", "float32", "float8_e4m3fn"),
    **SCORES,
}
CACHES = {
    "rows": ("padded", "packed", "one"),
    "new": ("no", "padded", "packed"),
    "rotary": ("no", "interleaved", "halves", "from elsewhere"),
    "page": (0, 1, 7, 16, 64),
    "batch_idx": (False, True),
    "leftpad": (False, True),
    "lengths": ("each", "one", "full"),
    "dtype": ("float64", "float32", "float8_e4m3fn"),
    **SCORES,
}
# The numbers of rows and of keys of each sequence.
SIZES = {
    "many": ((65, 0, 33, 64), (65, 9, 0, 130)),
    "few": ((1, 2, 1, 4), (33, 64, 1, 17)),
    "more rows": ((40, 17, 3, 9), (3, 17, 1, 5)),
}
CAPACITY = 140


def forbidden(f, a, g, b):
    if f == "form" and a == "padded":
        return g.startswith("used") and b  # flash_attn_func has no lengths
    if f == "dtype" and a == "float8_e4m3fn":
        return g == "qv" and b
    if f == "rotary" and a != "no":
        return (g, b) == ("new", "no") or (g == "dtype" and b == "float8_e4m3fn")
    return (f, a) == ("lengths", "full") and g == "new" and b != "no"


def named(row, of):
    return "-".join(f"{n}={row[n]}" for n in of if row[n] != of[n][0]) or "plain"


def rows_of(of):
    found = array(of, forbidden)
    return pytest.mark.parametrize("row", found, ids=[named(row, of) for row in found])


def scores_of(row):
    """The arguments of a call, and those of the oracle."""
    left, right = (None if x < 0 else x for x in row["window"])
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64).requires_grad_()
    given = dict(
        causal=row["causal"],
        window_size=row["window"],
        attention_chunk=row["chunk"],
        softcap=row["softcap"],
        softmax_scale=row["scale"],
        s_aux=sinks if row["sinks"] else None,
    )
    own = dict(causal=row["causal"], window=(left, right), chunk=row["chunk"])
    own |= dict(softcap=row["softcap"], scale=row["scale"], sinks=given["s_aux"])
    return given, own


def scales_of(row, B):
    names = dict(no="", k="k", all="qkv").get(row["scales"], "qv")
    g = torch.Generator().manual_seed(3)
    found = {x: (0.5 + torch.rand(B, HK, generator=g)) if x in names else None for x in "qkv"}
    given = {f"{x}_descale": y for x, y in found.items()}
    return given, {x: torch.ones(B, HK) if y is None else y for x, y in found.items()}


def scaled(b, scales, q, k, v, qv):
    """The numbers of sequence b in float64, times their scales."""
    of_rows, of_k, of_v = (scales[x][b].double()[:, None] for x in "qkv")
    of_rows = of_rows.repeat_interleave(H // HK, 0)
    qv = None if qv is None else qv.double() * of_rows
    return q.double() * of_rows, k.double() * of_k, v.double() * of_v, qv


def numbers(row, *shapes):
    """Tensors in the row's dtype. The gradient of float8 is not defined."""
    found = [random(*shape, seed=at) for at, shape in enumerate(shapes)]
    dtype = getattr(torch, row["dtype"])
    found = [x.to(dtype) for x in found]
    return found if row["dtype"].startswith("float8") else [x.requires_grad_() for x in found]


def tolerance(row):
    return {"float64": 1e-9, "float32": 2e-5}.get(row["dtype"], 0.06)


def close(row, got, expected):
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance(row), atol=tolerance(row))


@rows_of(CALLS)
def test_calls(row):
    ms, ns = SIZES[row["sizes"]]
    if row["form"] == "padded":
        ms, ns = (ms[0],) * 4, (ns[0],) * 4
    T, S = sum(ms), sum(ns)
    q, k, v, qv = numbers(row, (T, H, D), (S, HK, D), (S, HK, DV), (T, H, DV))
    leaves = [q, k, v]
    qv = qv if row["qv"] else None
    given, own = scores_of(row)
    descales, scales = scales_of(row, 4)
    used_q = [max(0, m - 2) for m in ms] if row["used_q"] else ms
    used_k = [max(0, n - 3) for n in ns] if row["used_k"] else ns
    given |= dict(qv=qv, return_attn_probs=True, **descales)
    if row["form"] == "padded":
        shapes = [x if x is None else x.unflatten(0, (4, -1)) for x in (q, k, v, qv)]
        out, lse = fa3.flash_attn_func(*shapes[:3], **given | dict(qv=shapes[3]))
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    else:
        index = row["index"]
        for name, some in (("seqused_q", used_q), ("seqused_k", used_k)):
            if row[name.removeprefix("seq")]:
                given[name] = torch.tensor(some, dtype=index)
        where = offsets(ms, index), offsets(ns, index), max(ms), max(ns)
        out, lse = fa3.flash_attn_varlen_func(q, k, v, *where, **given)
    outs, lses = [], []
    for b, (i, j) in enumerate(zip(offsets(ms)[:-1].tolist(), offsets(ns)[:-1].tolist())):
        m, n, own_qv = used_q[b], used_k[b], None if qv is None else qv[i : i + used_q[b]]
        x = scaled(b, scales, q[i : i + m], k[j : j + n], v[j : j + n], own_qv)
        one, of_one = oracle.sequence(*x, **own)
        sink = -torch.inf if own["sinks"] is None else own["sinks"][:, None]
        unused = torch.zeros(H, ms[b] - m, dtype=torch.float64) + sink
        outs.append(F.pad(one, (0, 0, 0, 0, 0, ms[b] - m)))
        lses.append(torch.cat((of_one, unused), 1))
    expected = torch.cat(outs), torch.cat(lses, 1)
    close(row, (out, lse), expected)
    if row["dtype"].startswith("float8"):
        assert out.dtype == torch.bfloat16
        return
    leaves += [x for x in (qv, own["sinks"]) if x is not None]
    dout, dlse = random(*out.shape, seed=8), random(*lse.shape, seed=9)
    dlse = torch.where(expected[1].isfinite(), dlse, 0)

    def gradients(out, lse):
        finite = torch.where(expected[1].isfinite(), lse, 0)
        loss = (out.double() * dout).sum() + (finite.double() * dlse).sum()
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    close(dict(row, dtype=row["dtype"]), gradients(out, lse), gradients(*expected))


@rows_of(CACHES)
def test_caches(row):
    B, before = 4, [0, 64, 129, 33]
    ms = dict(padded=(5,) * B, packed=(3, 0, 17, 1), one=(1,) * B)[row["rows"]]
    new = dict(no=(0,) * B, padded=(3,) * B, packed=(2, 0, 9, 1))[row["new"]]
    if row["lengths"] != "each":
        before = [40 if row["lengths"] == "one" else CAPACITY] * B
    starts = [0, 63, 1, 33] if row["leftpad"] else [0] * B
    starts = [min(x, n) for x, n in zip(starts, before)]
    items, page = 7 if row["batch_idx"] else B, row["page"] or CAPACITY
    ends = [n + more for n, more in zip(before, new)]
    g = torch.Generator().manual_seed(1)
    count = -(-CAPACITY // page)
    if row["lengths"] == "full" and row["page"]:
        before = ends = [count * page] * B
    blocks = torch.randperm(items * count + 2, generator=g)[: items * count].view(items, count)
    at = torch.tensor([5, 0, 3, 6]) if row["batch_idx"] else torch.arange(B)
    table = blocks[at] if row["page"] else at[:, None]
    P = items * count + 2 if row["page"] else items
    shapes = (sum(ms), H, D), (P, page, HK, D), (P, page, HK, DV), (sum(ms), H, DV)
    q, k_cache, v_cache, qv = numbers(row, *shapes)
    k_new, v_new = numbers(row, (sum(new), HK, D), (sum(new), HK, DV))
    q, k_cache, v_cache, qv, k_new, v_new = (
        x.detach() for x in (q, k_cache, v_cache, qv, k_new, v_new)
    )
    given, own = scores_of(row)
    if own["sinks"] is not None:
        own["sinks"] = given["s_aux"] = own["sinks"].detach()
    descales, scales = scales_of(row, B)
    given |= descales | dict(return_softmax_lse=True)
    if row["lengths"] == "each":
        given["cache_seqlens"] = torch.tensor(before, dtype=torch.int32)
    elif row["lengths"] == "one":
        given["cache_seqlens"] = before[0]
    if row["batch_idx"]:
        given["cache_batch_idx"] = at.int()
    if row["leftpad"]:
        given["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
    if row["page"]:
        given["page_table"] = blocks.int() if row["batch_idx"] else table.int()
    angles, firsts, turned = None, before, row["rotary"] != "no"
    if turned:
        angles = 6 * random(2 * CAPACITY, 2, seed=5)
        given |= dict(rotary_cos=angles.cos(), rotary_sin=angles.sin())
        given["rotary_interleaved"] = row["rotary"] == "interleaved"
        if row["rotary"] == "from elsewhere":
            firsts = [11, 0, 90, 4]
            given["rotary_seqlens"] = torch.tensor(firsts, dtype=torch.int32)
    packed = row["rows"] == "packed"
    if packed:
        given |= dict(cu_seqlens_q=offsets(ms), max_seqlen_q=max(ms))
    if row["new"] != "no":
        given |= dict(k=k_new, v=v_new)
        if row["new"] == "packed":
            given["cu_seqlens_k_new"] = offsets(new)
        else:
            given |= {x: given[x].unflatten(0, (B, -1)) for x in "kv"}
    shaped = (lambda x: x) if packed else (lambda x: x.unflatten(0, (B, -1)))
    caches = k_cache.clone(), v_cache.clone()
    if row["qv"]:
        given["qv"] = shaped(qv)
    out, lse = fa3.flash_attn_with_kvcache(shaped(q), *caches, **given)
    if not packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    local = row["causal"] or row["window"] != (-1, -1) or row["chunk"]
    outs, lses = [], []
    for b, (i, j) in enumerate(zip(offsets(ms)[:-1].tolist(), offsets(new)[:-1].tolist())):
        rows, fresh = q[i : i + ms[b]], k_new[j : j + new[b]]
        if turned:
            turn = angles.cos(), angles.sin()
            places = firsts[b] + torch.arange(ms[b]) * bool(local)
            rows = oracle.turned(rows, *turn, places, given["rotary_interleaved"])
            places = firsts[b] + torch.arange(new[b])
            fresh = oracle.turned(fresh, *turn, places, given["rotary_interleaved"])
        for x, some in ((k_cache, fresh), (v_cache, v_new[j : j + new[b]])):
            for step, one in enumerate(some):
                place = before[b] + step
                x[table[b, place // page], place % page] = one.to(x.dtype)
        of_keys = (x[table[b]].flatten(0, 1)[starts[b] : ends[b]] for x in (k_cache, v_cache))
        x = scaled(b, scales, rows, *of_keys, qv[i : i + ms[b]] if row["qv"] else None)
        one, of_one = oracle.sequence(*x, **own)
        outs.append(one)
        lses.append(of_one)
    close(row, (out, lse), (torch.cat(outs), torch.cat(lses, 1)))
    close(row, caches, (k_cache, v_cache))


@pytest.mark.parametrize("heads_q", [None, 4])
def test_queries_keys_and_values_in_one_tensor(heads_q):
    qkv = random(2, 9, *((3, H) if heads_q is None else (H + 2 * HK,)), D)
    parts = qkv.unbind(2) if heads_q is None else qkv.split((H, HK, HK), 2)
    look = dict(
        causal=True, attention_chunk=4, softcap=2.0, k_descale=torch.rand(2, parts[1].shape[2])
    )
    out, lse = fa3.flash_attn_qkvpacked_func(
        qkv, num_heads_q=heads_q, return_attn_probs=True, **look
    )
    expected = fa3.flash_attn_func(*parts, return_attn_probs=True, **look)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_parts_are_combined(packed, dtype):
    """Of which one sees no key of a row."""
    q, k, v = random(2, 5, H, D), random(2, 33, HK, D), random(2, 33, HK, D)
    parts = [
        fa3.flash_attn_func(q, k[:, i:j], v[:, i:j], window_size=(20, -1), return_attn_probs=True)
        for i, j in ((0, 30), (30, 33))
    ]
    outs = torch.stack([x for x, _ in parts]).to(dtype)
    lses = torch.stack([x.transpose(1, 2) for _, x in parts])
    lses[1, 0] = -torch.inf
    if packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    out, lse = fa3.flash_attn_combine(outs, lses)
    p = (lses - lses.logsumexp(0)).exp()[..., None]
    eps = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse, lses.logsumexp(0))
    torch.testing.assert_close(out.double(), (outs.double() * p).sum(0), rtol=eps, atol=eps)
    assert out.dtype == dtype
    into = torch.empty_like(out, dtype=torch.float32)
    assert fa3.flash_attn_combine(outs, lses, into)[0] is into
    torch.testing.assert_close(into.to(dtype), out)
    assert fa3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0].dtype == torch.float16


SHARED = "softmax_scale=None causal=False"
SCALES = "q_descale=None k_descale=None v_descale=None"
SHOWN = "window_size=(-1,-1) attention_chunk=0 softcap=0.0"
TUNED = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": f"q k v {SHARED} qv=None {SCALES} {SHOWN} {TUNED} * s_aux=None",
    "flash_attn_qkvpacked_func": f"qkv {SHARED} {SCALES} {SHOWN} deterministic=False "
    "num_heads_q=None sm_margin=0 return_attn_probs=False * s_aux=None",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"seqused_q=None seqused_k=None {SHARED} qv=None {SCALES} {SHOWN} {TUNED} * s_aux=None",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None "
    "rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
    "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
    f"{SCALES} {SHARED} {SHOWN} rotary_interleaved=True scheduler_metadata=None num_splits=0 "
    "pack_gqa=None sm_margin=0 return_softmax_lse=False * s_aux=None",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "get_scheduler_metadata": None,
}


def test_signatures():
    assert SIGNATURES.keys() == set(fa3.__all__)
    for name, expected in SIGNATURES.items():
        if expected is not None:
            assert signature_of(getattr(fa3, name)) == expected.split(), name


X, C = torch.zeros(2, 5, 4, 8), torch.tensor([0, 2, 5])
F8 = X.to(torch.float8_e4m3fn)


def cached(**given):
    return lambda: fa3.flash_attn_with_kvcache(X, X.clone(), X.clone(), **given)


def packed(**given):
    return lambda: fa3.flash_attn_varlen_func(X[0], X[0], X[0], C, C, 3, 3, **given)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: fa3.flash_attn_func(X, X, X, attention_chunk=-1), ValueError, "attention_chunk"),
        (lambda: fa3.flash_attn_func(X, X, X, qv=X[0]), ValueError, "qv: got shape"),
        (
            lambda: fa3.flash_attn_func(X, X, X, k_descale=torch.ones(4)),
            ValueError,
            r"k_descale: got shape \(4,\), expected \(2, 4\)",
        ),
        (
            lambda: fa3.flash_attn_func(X, X, X, q_descale=torch.ones(2, 4, requires_grad=True)),
            ValueError,
            "q_descale: got a tensor that requires grad",
        ),
        (lambda: fa3.flash_attn_func(F8, F8, F8, qv=F8), NotImplementedError, "qv: got it beside"),
        (lambda: fa3.flash_attn_func(F8, X, X), ValueError, "q.dtype: got torch.float8"),
        (packed(seqused_q=torch.tensor([3, 3])), ValueError, r"seqused_q.* got 3, expected 0 to 2"),
        (packed(seqused_k=torch.tensor([2, 4])), ValueError, "seqused_k: got 4 of sequence 1"),
        (
            packed(seqused_k=torch.tensor([2, 4]), seqused_q=torch.tensor([2, 1])),
            ValueError,
            "seqused_k: got 4 of sequence 1, expected a value in .0, 3.",
        ),
        (packed(seqused_k=torch.tensor([2.0, 4])), ValueError, "seqused_k: got torch.float32"),
        (packed(seqused_q=torch.tensor([2])), ValueError, "seqused_q: got torch.int64"),
        (cached(cu_seqlens_q=C), ValueError, "q: got shape"),
        (cached(cu_seqlens_k_new=C), ValueError, "cu_seqlens_k_new: got it without k"),
        (
            cached(k=X[0], v=X[0], cu_seqlens_k_new=C, cache_seqlens=3),
            ValueError,
            "cache_seqlens: got 3, expected 0 to 2",
        ),
        (cached(k=X, v=X, cu_seqlens_k_new=C, cache_seqlens=0), ValueError, "k: got"),
        *(
            (
                cached(k=X[0], v=X[0], cu_seqlens_k_new=torch.tensor(offsets), cache_seqlens=0),
                ValueError,
                "cu_seqlens_k_new: got",
            )
            for offsets in ([1, 3, 5], [0, 3, 2], [0, 2, 4], [0, 2, 7], [0, 5], [0, 1, 2, 5], [0])
        ),
        (cached(k=X, cache_seqlens=0), ValueError, "v: got None, expected .*k and v go together"),
        (
            lambda: fa3.flash_attn_with_kvcache(X.double(), X, X, cache_seqlens=0),
            ValueError,
            "q.dtype: got torch.float64",
        ),
        (
            cached(page_table=torch.zeros(3, 1, dtype=torch.int32), cache_seqlens=0),
            ValueError,
            "page_table: got torch.int32 .3, 1.",
        ),
        (packed(qv=X[0, :, :3]), ValueError, "qv: got shape"),
        (
            lambda: fa3.flash_attn_func(
                X, X, X, qv=torch.zeros(5, 2, 4, 8), q_descale=torch.ones(2, 4)
            ),
            ValueError,
            "qv: got shape .5, 2, 4, 8., expected .2, 5, 4",
        ),
        (
            lambda: fa3.flash_attn_func(X[:, :, :1], X, X, k_descale=torch.ones(2, 4)),
            ValueError,
            "k: got 4 heads, expected a number that divides the 1 heads of q",
        ),
        (
            lambda: fa3.flash_attn_func(F8.to(torch.float8_e5m2), F8, F8),
            ValueError,
            "q.dtype: got torch.float8_e5m2 beside",
        ),
        *(
            (lambda x=x: fa3.flash_attn_func(X, X, X, attention_chunk=x), ValueError, "an int: 0")
            for x in (2.5, True, None)
        ),
        (lambda: fa3.flash_attn_qkvpacked_func(X, num_heads_q=3), ValueError, "num_heads_q: got 3"),
        (lambda: fa3.flash_attn_combine(X[0], X[0]), ValueError, "out_partial: got"),
        (lambda: fa3.flash_attn_combine(X, X), ValueError, "lse_partial: got shape"),
    ],
)
def test_refusals(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_an_error_leaves_the_cache_as_it_is():
    for wrong in (
        dict(qv=X[:, :, :3]),
        dict(k_descale=torch.ones(3, 4)),
        dict(s_aux=torch.ones(3)),
        dict(cu_seqlens_q=torch.tensor([0, 2, 4])),
    ):
        k_cache, q = X.clone(), X[0] if "cu_seqlens_q" in wrong else X
        with pytest.raises(ValueError):
            given = dict(k=X[:, :2] + 1, v=X[:, :2], cache_seqlens=1) | wrong
            fa3.flash_attn_with_kvcache(q, k_cache, X.clone(), **given)
        assert not k_cache.any()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)], ids=str)
def test_nothing_is_rotated(shape):
    q, new = torch.randn(*shape, 4, 8), torch.randn(shape[0], 0, 4, 8)
    cache, angles = torch.randn(shape[0], 9, 4, 8), torch.randn(9, 4)
    turn = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin())
    given = dict(k=new, v=new, cache_seqlens=5, causal=True) | turn
    assert fa3.flash_attn_with_kvcache(q, cache, cache, **given).shape == q.shape


def test_what_has_no_effect_is_said_once(monkeypatch):
    monkeypatch.setattr(sequences, "_said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = fa3.flash_attn_func(X, X, X, num_splits=1)
    with pytest.warns(UserWarning, match="num_splits: it tunes") as told:
        tuned = fa3.flash_attn_func(X, X, X, num_splits=3)
        fa3.flash_attn_func(X, X, X, num_splits=3)
    assert len(told) == 1 and told[0].filename == __file__ and torch.equal(plain, tuned)
