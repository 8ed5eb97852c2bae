"""`fastattn.flash_attn`'s functions equal flash-attn 2.8's: each argument alone and many together,
packed or not, forward and backward, compared with an oracle by flash-attn's documentation."""

import inspect
import itertools

import pytest
import torch

from fastattn import flash_attn as fa
from tests.support import flash_attn_oracle as oracle

H, HK, D = 4, 2, 8
SIZES = {"square": (65, 65), "few_rows": (2, 64), "many_rows": (63, 9), "one_row": (1, 33)}
# Sequences of a packed batch: no rows, no keys or neither; one token; sizes at the edges of blocks.
ROWS, KEYS = (0, 1, 64, 5, 0, 63, 1, 9), (3, 1, 65, 0, 0, 63, 64, 2)
ARGUMENTS = {
    "causal": lambda B: dict(causal=True),
    "window": lambda B: dict(window_size=(7, 3)),
    "narrow": lambda B: dict(window_size=(0, 0)),
    "left": lambda B: dict(window_size=(4, -1)),
    "right": lambda B: dict(window_size=(-1, 2)),
    "softcap": lambda B: dict(softcap=1.5),
    "alibi": lambda B: dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.25, 1.0])),
    "alibi_of_items": lambda B: dict(alibi_slopes=torch.linspace(0.02, 1, B * H).view(B, H)),
    "scale": lambda B: dict(softmax_scale=0.7),
    "sinks": lambda B: dict(s_aux=torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "sinks_apart": lambda B: dict(
        s_aux=torch.tensor([-torch.inf, 200.0, 2.0, 0.0], dtype=torch.float64)
    ),
}


TOGETHER = [
    ("causal", "softcap", "alibi_of_items", "scale", "sinks"),
    ("causal", "left", "softcap", "alibi", "scale", "sinks"),
    ("window", "softcap", "alibi_of_items", "scale", "sinks"),
]
every_argument = pytest.mark.parametrize(
    "names", [(), *((x,) for x in ARGUMENTS), *TOGETHER], ids=lambda x: "-".join(x) or "plain"
)


def random(*shape, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed + 7919 * len(shape) + shape[0])
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def drawn(*shapes, **kind):
    return [random(*shape, seed=at, **kind).requires_grad_() for at, shape in enumerate(shapes)]


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def given(names, B):
    found = {}
    for name in names:
        found |= ARGUMENTS[name](B)
    if "s_aux" in found:
        found["s_aux"].requires_grad_()
    return found


def agree(got, expected, leaves, tolerance=1e-9):
    """Results are equal, and so are the gradients of a loss on all finite ones."""
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)

    def gradients(results):
        weights = [random(*x.shape, seed=40 + at) for at, x in enumerate(expected)]
        finite = [torch.where(y.isfinite(), x, 0) for x, y in zip(results, expected)]
        loss = sum((x * w).sum() for x, w in zip(finite, weights))
        return torch.autograd.grad(loss, leaves)

    torch.testing.assert_close(
        gradients(got), gradients(expected), rtol=10 * tolerance, atol=10 * tolerance
    )


def leaves_of(tensors, arguments):
    return [*tensors, *(x for x in [arguments.get("s_aux")] if x is not None)]


@pytest.mark.parametrize("size", SIZES)
@every_argument
def test_dense(names, size):
    M, N = SIZES[size]
    tensors, arguments = drawn((2, M, H, D), (2, N, HK, D), (2, N, HK, 6)), given(names, 2)
    out, lse, S_dmask = fa.flash_attn_func(*tensors, return_attn_probs=True, **arguments)
    assert S_dmask is None
    agree((out, lse), oracle.dense(*tensors, **arguments), leaves_of(tensors, arguments))
    assert torch.equal(fa.flash_attn_func(*tensors, **arguments), out)


@every_argument
def test_packed(names):
    cu_q, cu_k = offsets(ROWS), offsets(KEYS)
    T, S = int(cu_q[-1]), int(cu_k[-1])
    tensors, arguments = drawn((T, H, D), (S, HK, D), (S, HK, 6)), given(names, len(ROWS))
    where = cu_q, cu_k, max(ROWS), max(KEYS)
    out, lse, S_dmask = fa.flash_attn_varlen_func(
        *tensors, *where, return_attn_probs=True, **arguments
    )
    assert S_dmask is None and lse.shape == (H, T)
    expected = oracle.varlen(*tensors, cu_q, cu_k, **arguments)
    agree((out, lse), expected, leaves_of(tensors, arguments))
    assert torch.equal(fa.flash_attn_varlen_func(*tensors, *where, **arguments), out)


@pytest.mark.parametrize("names", [(), ("causal",), ("window", "alibi")], ids=str)
def test_stacked_forms(names):
    arguments = given(names, 2) | {"softmax_scale": 0.3, "return_attn_probs": True}
    (qkv, q, kv) = drawn((2, 33, 3, H, D), (2, 5, H, D), (2, 33, 2, HK, D))
    cu, cu_q = offsets([33, 33], torch.int64), offsets([5, 5])
    flat, rows, pairs = qkv.flatten(0, 1), q.flatten(0, 1), kv.flatten(0, 1)
    for got, expected in (
        (fa.flash_attn_qkvpacked_func(qkv, **arguments), (*qkv.unbind(2), [])),
        (fa.flash_attn_kvpacked_func(q, kv, **arguments), (q, *kv.unbind(2), [])),
        (
            fa.flash_attn_varlen_qkvpacked_func(flat, cu, 33, **arguments),
            (*flat.unbind(1), [cu, cu, 33, 33]),
        ),
        (
            fa.flash_attn_varlen_kvpacked_func(rows, pairs, cu_q, cu, 5, 33, **arguments),
            (rows, *pairs.unbind(1), [cu_q, cu, 5, 33]),
        ),
    ):
        *tensors, where = expected
        function = fa.flash_attn_varlen_func if where else fa.flash_attn_func
        for x, y in zip(got[:2], function(*tensors, *where, **arguments)):
            assert torch.equal(x, y)
    (gradient,) = torch.autograd.grad(fa.flash_attn_qkvpacked_func(qkv).square().sum(), qkv)
    expected = oracle.dense(*qkv.unbind(2))[0].square().sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, qkv)[0])


@pytest.mark.parametrize("names", [(), ("causal",), ("window", "sinks"), ("alibi",)], ids=str)
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_S_dmask_marks_the_dropped_weights(form, names):
    p = 0.3
    if form == "dense":
        tensors, arguments = drawn((2, 33, H, D), (2, 65, HK, D), (2, 65, HK, D)), given(names, 2)
        function, where, reference = fa.flash_attn_func, (), oracle.dense
    else:
        cu_q, cu_k = offsets(ROWS), offsets(KEYS)
        shapes = (sum(ROWS), H, D), (sum(KEYS), HK, D), (sum(KEYS), HK, D)
        tensors, arguments = drawn(*shapes), given(names, len(ROWS))
        function, where = fa.flash_attn_varlen_func, (cu_q, cu_k, max(ROWS), max(KEYS))
        reference = lambda *x, **y: oracle.varlen(*x[:3], cu_q, cu_k, **y)  # noqa: E731
    torch.manual_seed(0)
    out, lse, S = function(
        *tensors, *where, dropout_p=p, return_attn_probs=True, deterministic=True, **arguments
    )
    B = 2 if form == "dense" else len(ROWS)
    assert S.shape == (B, H, *((33, 65) if form == "dense" else (max(ROWS), max(KEYS))))
    kept = S >= 0  # flash-attn's own tests decode it so
    expected = reference(*tensors, kept=kept, dropout_p=p, **arguments)
    agree((out, lse), expected, leaves_of(tensors, arguments))
    visible = S != 0
    assert abs((visible & ~kept).sum() / visible.sum() - p) < 0.03
    torch.manual_seed(0)
    again = function(*tensors, *where, dropout_p=p, return_attn_probs=True, **arguments)
    assert all(torch.equal(x, y) for x, y in zip((out, lse, S), again))


@pytest.mark.parametrize("softcap", [0.0, 0, -1.0, None])
def test_a_softcap_of_0_or_below_is_off(softcap):
    tensors = drawn((1, 9, H, D), (1, 5, H, D), (1, 5, H, D))
    assert torch.equal(fa.flash_attn_func(*tensors, softcap=softcap), fa.flash_attn_func(*tensors))


@pytest.mark.parametrize("window", [(-1, -1), (-7, -1), [-1, -1], torch.tensor([-1, -1])], ids=str)
def test_a_window_below_0_has_no_limit(window):
    tensors = drawn((1, 9, H, D), (1, 5, H, D), (1, 5, H, D))
    plain = fa.flash_attn_func(*tensors)
    assert torch.equal(fa.flash_attn_func(*tensors, window_size=window), plain)


# name -> parameters in order, with defaults; fastattn adds those after *.
SHARED = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0"
SHARED += " alibi_slopes=None deterministic=False return_attn_probs=False"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {SHARED} * s_aux=None",
    "flash_attn_kvpacked_func": f"q kv {SHARED} * s_aux=None",
    "flash_attn_qkvpacked_func": f"qkv {SHARED} * s_aux=None",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {SHARED} block_table=None * s_aux=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {SHARED} * s_aux=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {SHARED} * s_aux=None",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True "
    "alibi_slopes=None num_splits=0 return_softmax_lse=False * s_aux=None",
}


def signature_of(function):
    found, starred = [], False
    for x in inspect.signature(function).parameters.values():
        if x.kind is x.KEYWORD_ONLY and not starred:
            found, starred = [*found, "*"], True
        default = "" if x.default is x.empty else f"={x.default}".replace(" ", "")
        found.append(x.name + default)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature_of(getattr(fa, name)) == SIGNATURES[name].split()


def test_every_function_has_a_signature_here():
    assert set(SIGNATURES) == set(fa.flash_attn_interface.__all__)
    assert set(SIGNATURES) < set(fa.__all__) and fa.__version__.startswith("2.8.")


X = torch.zeros(2, 5, 4, 8)
C = torch.tensor([0, 2, 4])


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: fa.flash_attn_func(X[0], X, X), ValueError, "q: got shape .5, 4, 8., expected .b"),
        (lambda: fa.flash_attn_func(X, None, X), TypeError, "k: got NoneType, expected a torch"),
        (lambda: fa.flash_attn_func(X, X[:, :, :3], X), ValueError, "k: got 3 heads"),
        (lambda: fa.flash_attn_func(X, X.int(), X), ValueError, "k.dtype: got torch.int32"),
        (lambda: fa.flash_attn_func(X, X, X, window_size=3), ValueError, "window_size: got 3"),
        (lambda: fa.flash_attn_func(X, X, X, window_size=(1.5, 0)), ValueError, "window_size: go"),
        (lambda: fa.flash_attn_func(X, X, X, 1.5), ValueError, "dropout_p: got 1.5"),
        (lambda: fa.flash_attn_func(X, X, X, 0, "a"), TypeError, "softmax_scale: got 'a'"),
        (lambda: fa.flash_attn_func(X, X, X, alibi_slopes=X[0, 0, 0]), ValueError, "alibi_slopes"),
        (lambda: fa.flash_attn_func(X, X, X, s_aux=X), ValueError, "s_aux: got shape"),
        (lambda: fa.flash_attn_qkvpacked_func(X), ValueError, "qkv: got shape"),
        (lambda: fa.flash_attn_kvpacked_func(X, X[:, :, None]), ValueError, "kv: got shape"),
        (lambda: fa.flash_attn_varlen_func(X, X, X, C, C, 2, 2), ValueError, "q: got shape"),
        (lambda: fa.flash_attn_varlen_func(*[X[0]] * 3, C, C, 2, 2), ValueError, "cu_seqlens_q"),
    ],
)
def test_unsupported_arguments_are_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("arguments", [{}, dict(causal=True), dict(window_size=(2, 1))], ids=str)
def test_a_sequence_longer_than_max_seqlen_raises(arguments):
    x, cu = random(10, H, D), torch.tensor([0, 4, 10])
    message = "^cu_seqlens_q: got 4 rows in sequence 0, expected at most max_seqlen_q = 3; max_seq"
    with pytest.raises(ValueError, match=message):
        fa.flash_attn_varlen_func(x, x, x, cu, cu, 3, 10, **arguments)


@pytest.mark.parametrize("look", [dict(causal=True), dict(window_size=(2, 1))], ids=str)
@pytest.mark.parametrize("wrong", [[0], [0, 4, 12], [0, 4], [1, 4, 10], [0, 12, 10], [0, 4, 9, 10]])
@pytest.mark.parametrize("side", ["q", "k"])
def test_invalid_offsets_raise(side, wrong, look):
    x, wrong, right = random(10, H, D), torch.tensor(wrong), torch.tensor([0, 5, 10])
    cu_q, cu_k = (wrong, right) if side == "q" else (right, wrong)
    with pytest.raises(ValueError, match=r"cu_seqlens_[qk]"):
        fa.flash_attn_varlen_func(x, x, x, cu_q, cu_k, 10, 10, **look)


@pytest.mark.parametrize("look", [{}, dict(causal=True), dict(window_size=(1, 1))], ids=str)
@pytest.mark.parametrize("size", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)], ids=str)
def test_nothing(size, look):
    """Without items, rows or keys, all results that exist are zero."""
    B, M, N = size
    q, k, table = random(B, M, H, D), random(B, N, HK, D), torch.zeros(B, 0, dtype=torch.int32)
    cu_q, cu_k = offsets([M] * B), offsets([N] * B)
    dropped = dict(dropout_p=0.5, return_attn_probs=True, **look)
    assert fa.flash_attn_func(q, k, k, **dropped)[2].shape == (B, H, M, N)
    where = cu_q, cu_k, M, N
    packed = [x.flatten(0, 1) for x in (q, k, k)]
    assert fa.flash_attn_varlen_func(*packed, *where, **dropped)[2].shape == (B, H, M, N)
    pages = random(3, 16, HK, D)
    for out in (
        fa.flash_attn_func(q, k[:, :0], k[:, :0], **look),
        fa.flash_attn_with_kvcache(q, k, k, cache_seqlens=0, **look),
        fa.flash_attn_with_kvcache(q, pages, pages, block_table=table, **look),
    ):
        assert out.shape == q.shape and not out.any()


@pytest.mark.slow
def test_compiled_in_one_graph():
    cu = offsets([3, 0, 7])
    q, x = random(2, 5, H, D).requires_grad_(), random(10, H, D)

    def call(q):
        first = fa.flash_attn_func(q, q, q, causal=True, window_size=(3, -1), softcap=2.0)
        return first.sum() + fa.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, window_size=(2, 1))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), call(q))
