"""torch's jagged tensors in `scaled_dot_product_attention` and `MultiheadAttention`: the results of
each sequence alone."""

import pytest
import torch

import fastattn
from tests.support.backends import not_interpreted

pytestmark = [
    not_interpreted,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

ROWS, KEYS = (5, 0, 33, 1), (7, 3, 40, 0)


def jagged(lengths, heads=2, dim=16, grad=True):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(sum(lengths), heads, dim, requires_grad=grad)
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2), values


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("key_heads", (2, 1))
def test_each_sequence_by_itself(causal, key_heads):
    (q, q_rows), (k, k_rows), (v, v_rows) = (
        jagged(ROWS),
        jagged(KEYS, key_heads),
        jagged(KEYS, key_heads, 24),
    )
    k = torch.nested.nested_tensor_from_jagged(k_rows, v.offsets()).transpose(1, 2)
    given = dict(is_causal=causal, enable_gqa=key_heads == 1)
    out = fastattn.scaled_dot_product_attention(q, k, v, **given)
    assert out.is_nested and out.shape[:2] == q.shape[:2] and out.shape[2] == q.shape[2]
    found = torch.autograd.grad(out.values().square().sum(), (q_rows, k_rows, v_rows))
    parts = [
        fastattn.scaled_dot_product_attention(*(x[None] for x in one), **given)[0]
        for one in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    ]
    for x, y in zip(out.unbind(), parts, strict=True):
        assert torch.equal(x, y)
    total = sum(x.square().sum() for x in parts)
    expected = torch.autograd.grad(total, (q_rows, k_rows, v_rows))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_compiled_results_equal_eager_ones():
    """Compiled results equal eager ones, also after the lengths change."""

    def attention(x):
        x = x.transpose(1, 2)
        return fastattn.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(attention, backend="aot_eager")
    for lengths in ((5, 9), (3, 30)):
        rows = [torch.randn(n, 2, 16) for n in lengths]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        assert torch.equal(compiled(x).values(), attention(x).values())


def test_unsupported_jagged_calls_are_refused():
    q, _ = jagged(ROWS)
    other, _ = jagged(KEYS)
    dense, flat, rows_first = torch.zeros(4, 2, 5, 16), q.select(1, 0), q.transpose(1, 2)
    for arguments, message in (
        ((q, q, q, torch.ones(1, 1)), "attn_mask: got a mask beside jagged"),
        ((q, q, other), "value: got sequences at .*, expected .*, as key has"),
        ((flat, flat, flat), r"query: got 3 dimensions, expected 4 \(B, H, L\*, E\)"),
        (
            (rows_first, rows_first, rows_first),
            r"query: got \(4, j\d+, 2, 16\), expected \(B, H, L\*, E\)",
        ),
        ((q, *(jagged(KEYS, 1)[0],) * 2), "heads, expected equal numbers, or enable_gqa"),
        ((q, q, q, None, 1.5), "dropout probability"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fastattn.scaled_dot_product_attention(*arguments)
    for tensors in ((q, dense, dense), (dense, q, q)):
        with pytest.raises(TypeError, match=r"got a jagged tensor, .* attention_packed its values"):
            fastattn.scaled_dot_product_attention(*tensors)
    starts = torch.tensor([0, 1, 2])
    holes = torch.nested.narrow(torch.zeros(3, 9, 2, 16), 1, starts, 4, torch.jagged)
    with pytest.raises(RuntimeError, match=r"holes, expected x.contiguous\(\)"):
        fastattn.scaled_dot_product_attention(*(holes.transpose(1, 2),) * 3)


def module(**given):
    torch.manual_seed(3)
    return fastattn.MultiheadAttention(12, 3, batch_first=True, **given)


def of_width(lengths, width, cu=None):
    x, rows = jagged(lengths, 1, width)
    rows = rows.detach().squeeze(1).requires_grad_()
    return torch.nested.nested_tensor_from_jagged(rows, x.offsets() if cu is None else cu), rows


CAUSAL = {"": {}, "causal": dict(is_causal=True)}


@pytest.mark.parametrize("average", (True, False), ids=("average", "heads"))
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("kind", ("self", "cross", "cross_of_widths"))
def test_a_module_takes_each_sequence_by_itself(kind, causal, average):
    widths = dict(kdim=5, vdim=7) if kind == "cross_of_widths" else {}
    mha = module(**widths)
    query, *leaves = of_width(ROWS, 12)
    key = value = query
    if kind != "self":
        key, rows = of_width(KEYS, widths.get("kdim", 12))
        value, more = of_width(KEYS, widths.get("vdim", 12), key.offsets())
        leaves += [rows, more]
    leaves += list(mha.parameters())
    out, weights = mha(query, key, value, average_attn_weights=average, **CAUSAL[causal])
    same, none = mha(query, key, value, need_weights=False, **CAUSAL[causal])
    assert none is None and torch.equal(same.values(), out.values())
    assert out.is_nested and out.shape == query.shape and weights.shape[0] == len(ROWS)

    total, expected = (out.values().square().sum() + weights.square().sum()), 0
    for b, (q, k, v) in enumerate(zip(query.unbind(), key.unbind(), value.unbind(), strict=True)):
        L, S = len(q), len(k)
        hidden = torch.ones(L, S, dtype=torch.bool).triu(1) if causal else None
        alone = (x[None] for x in (q, k, v))
        one, given = mha(*alone, average_attn_weights=average, attn_mask=hidden)
        torch.testing.assert_close(out.unbind()[b], one[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights[b][..., :L, :S], given[0], rtol=1e-5, atol=1e-6)
        assert not weights[b][..., L:, :].any() and not weights[b][..., S:].any()
        expected = expected + one.square().sum() + given.square().sum()
    found = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves), rtol=1e-4, atol=1e-5)


def test_a_module_drops_what_its_weights_drop():
    mha = module(dropout=0.5)
    x, _ = of_width(ROWS, 12)
    with torch.no_grad():
        mha.in_proj_bias.zero_()
        mha.in_proj_weight[24:] = mha.out_proj.weight.copy_(torch.eye(12))
        torch.manual_seed(1)
        out, weights = mha(x, x, x, average_attn_weights=False)
        torch.manual_seed(1)
        assert torch.equal(mha(x, x, x, need_weights=False)[0].values(), out.values())
    for mine, p, rows in zip(out.unbind(), weights, x.unbind(), strict=True):
        v = rows.view(-1, 3, 4).transpose(0, 1)
        expected = (p[:, : len(rows), : len(rows)] @ v).transpose(0, 1).flatten(1)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    assert (weights == 0).sum() > (mha.eval()(x, x, x, average_attn_weights=False)[1] == 0).sum()


@pytest.mark.slow
def test_a_module_is_compiled():
    mha = module().requires_grad_(False)
    compiled = torch.compile(lambda x: mha(x, x, x, need_weights=False)[0], backend="aot_eager")
    for lengths in ((5, 9), (3, 30)):
        x = of_width(lengths, 12)[0].detach()
        assert torch.equal(compiled(x).values(), mha(x, x, x)[0].values())


def test_modules_refuse_unsupported_jagged_calls():
    x, _ = of_width(ROWS, 12)
    mask = torch.zeros(4, 33, dtype=torch.bool)
    for given, made, reason in (
        (
            dict(key_padding_mask=mask),
            {},
            r"masks are not supported .*\(is_causal=True needs none\)",
        ),
        ({}, dict(add_zero_attn=True), "add_bias_kv or add_zero_attn"),
        ({}, dict(batch_first=False), "batch_first was not True"),
    ):
        mha = fastattn.MultiheadAttention(12, 3, **(dict(batch_first=True) | made))
        with pytest.raises(AssertionError, match=reason):
            mha(x, x, x, **given)
    dense, deep = (
        torch.zeros(4, 5, 12),
        torch.nested.nested_tensor_from_jagged(torch.zeros(39, 2, 12), x.offsets()),
    )
    for inputs, reason in (
        ((x, dense, dense), "and others are not"),
        ((dense, x, x), "and others are not"),
        ((deep, deep, deep), "expected query.dim.. of 3 but got 4"),
    ):
        with pytest.raises(AssertionError, match=reason):
            module()(*inputs)
    other, _ = of_width((39,), 12)
    with pytest.raises(RuntimeError, match="value: got sequences at"):
        module()(x, x, other)
    with pytest.raises(
        RuntimeError, match=r"query: got \(4, 12, j\d+\), expected \(B, L\*, \.\.\.\)"
    ):
        module()(*[x.transpose(1, 2)] * 3)
    with pytest.raises(AssertionError, match="embedding dimension of 12, but got 5"):
        module()(*[of_width(ROWS, 5)[0]] * 3)
