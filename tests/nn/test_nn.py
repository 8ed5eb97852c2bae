"""`fastattn.nn` against the same modules written out naively: outputs, weights and gradients."""

import copy
import io
import math
import re
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn import nn
from tests.support.backends import every_backend, small
from tests.support.nn_naive import naive, same

MASKS = {
    "none": lambda m, n: None,
    "matrix": lambda m, n: torch.arange(n) % 3 != torch.arange(m)[:, None] % 3,
    "integers": lambda m, n: (torch.arange(n) < n - 2).long().expand(m, n),
    "floats": lambda m, n: (torch.arange(n) > 0).float(),
    "a row hidden": lambda m, n: (torch.arange(m) != 1)[:, None].expand(m, n),
}


@every_backend
@pytest.mark.parametrize("mask", small(list(MASKS), ["integers"]))
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)], ids=str)
def test_any_leading_dimensions(name, lead, mask, on):
    q, k, v = (torch.randn(*lead, n, d) for n, d in ((5, 8), (7, 8), (7, 4)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given = MASKS[mask](5, 7)
    module = nn.ScaledDotProductAttention()
    same(module(q, k, v, given, need_weights=True), naive(q, k, v, given), leaves)
    torch.testing.assert_close(module(q, k, v, given), naive(q, k, v, given)[0])


# Leading dimensions, and a mask of each item or of some dimensions.
ITEMS = [((2,), (2, 5, 7)), ((2, 3), (2, 1, 5, 7)), ((2, 4, 3), (3, 5, 7))]
ITEMS += [((2, 4, 3), x) for x in ((4, 1, 5, 7), (2, 1, 3, 5, 1), (7,))]


@every_backend
@pytest.mark.parametrize("lead, shape", ITEMS, ids=str)
def test_masks_with_leading_dimensions(name, lead, shape, on):
    q, k, v = (torch.randn(*lead, n, 8) for n in (5, 7, 7))
    mask = (torch.arange(math.prod(shape)) ** 2 % 5 - 1).view(shape)  # -1 shows, like all but 0
    found = nn.ScaledDotProductAttention()(q, k, v, mask, need_weights=True)
    torch.testing.assert_close(found, naive(q, k, v, mask), rtol=2e-5, atol=2e-6)


@every_backend
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_causal_self_attention(name, heads, bias, on):
    module = nn.CausalSelfAttention(10, 15, 9, num_heads=heads, qkv_bias=bias)
    x = torch.randn(2, 7, 10, requires_grad=True)

    def split(y):
        return y if heads == 1 else y.view(2, 7, heads, 15 // heads).transpose(1, 2)

    out, weights = naive(
        *(split(p(x)) for p in (module.q_proj, module.k_proj, module.v_proj)), None, True
    )
    out = out if heads == 1 else module.out_proj(out.transpose(1, 2).reshape(2, 7, 15))
    same(module(x, need_weights=True), (out, weights), [x, *module.parameters()])
    torch.testing.assert_close(module(x[0]), module(x)[0])
    with pytest.raises(ValueError, match="context_length"):
        module(torch.randn(2, 10, 10))


@every_backend
def test_concatenated_heads_are_single_heads_side_by_side(name, on):
    module = nn.ConcatenatedHeads(10, 5, num_heads=3)
    x = torch.randn(2, 7, 10)
    out, weights = module(x, need_weights=True)
    assert out.shape == (2, 7, 15) and weights.shape == (2, 3, 7, 7)
    for h, head in enumerate(module.heads):
        torch.testing.assert_close(out[..., 5 * h : 5 * h + 5], head(x))
    wide = nn.CausalSelfAttention(10, 15, num_heads=3)
    for child, proj in wide.named_children():
        if child != "out_proj":
            proj.weight.data = torch.cat([getattr(h, child).weight for h in module.heads])
    wide.out_proj = torch.nn.Identity()
    torch.testing.assert_close(wide(x), out)


@every_backend
@pytest.mark.parametrize("heads", [1, 2])
def test_dropout_is_active_in_training_only_and_in_the_weights(name, heads, on):
    module = nn.CausalSelfAttention(8, 8, dropout=0.4, num_heads=heads)
    x = torch.randn(2, 9, 8)
    torch.manual_seed(5)
    out, weights = module(x, need_weights=True)
    whole = copy.deepcopy(module).eval()(x, need_weights=True)[1]
    kept = weights != 0
    torch.testing.assert_close(weights[kept], whole[kept] / 0.6)
    if heads == 1:  # the output uses the others
        torch.testing.assert_close(out, weights @ module.v_proj(x))
    assert 0.3 < (~kept & (whole != 0)).sum() / (whole != 0).sum() < 0.5
    torch.manual_seed(5)
    torch.testing.assert_close(module(x), out)
    assert not torch.equal(module(x), out)
    assert torch.equal(module.eval()(x), module(x))


def test_wrong_shapes_raise():
    attention = nn.ScaledDotProductAttention()
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="same leading dimensions"):
        attention(x, x[:1], x)
    with pytest.raises(ValueError, match="same leading dimensions"):
        attention(x[0, 0], x[0, 0], x[0, 0])
    with pytest.raises(ValueError, match="mask: got shape"):
        attention(x, x, x, torch.ones(1, 1, 5, 5))
    with pytest.raises(ValueError, match="multiple"):
        nn.CausalSelfAttention(8, 8, num_heads=3)


DROPPING = {
    "ScaledDotProductAttention": lambda: nn.ScaledDotProductAttention(dropout=0.4),
    "SelfAttention": lambda: nn.SelfAttention(12, dropout=0.4),
    "CausalSelfAttention": lambda: nn.CausalSelfAttention(12, 12, None, 0.4, num_heads=2),
    "ConcatenatedHeads": lambda: nn.ConcatenatedHeads(12, 6, None, 0.4),
    "PackedSelfAttention": lambda: nn.PackedSelfAttention(12, 2, dropout=0.4),
    "TracedAttention": lambda: nn.TracedAttention(12, 2, dropout=0.4),
    "SharedHeadAttention": lambda: nn.SharedHeadAttention(12, 2, dropout=0.4),
}


@pytest.mark.parametrize("kind", DROPPING)
def test_every_module_drops_out_in_training_alone(kind):
    module, x = DROPPING[kind](), torch.randn(2, 9, 12)
    inputs = [x] * (1 if "Self" in kind or "Heads" in kind else 3)
    module.train()
    assert not torch.equal(module(*inputs), module(*inputs))
    module.eval()
    assert torch.equal(module(*inputs), module(*inputs))


def test_options_reach_what_they_are_for():
    x = torch.randn(2, 7, 10)
    scaled = nn.SelfAttention(10, 4, scale=0.1)
    q, k, v = (p(x) for p in (scaled.q_proj, scaled.k_proj, scaled.v_proj))
    torch.testing.assert_close(scaled(x), naive(q, k, v, scale=0.1)[0])
    heads = nn.ConcatenatedHeads(10, 5, 9, 0.3, num_heads=2, qkv_bias=True).heads
    assert [(h.context_length, h.dropout, h.q_proj.bias is None) for h in heads] == [
        (9, 0.3, False)
    ] * 2
    biases = [nn.PackedSelfAttention(10, 2, bias=False), nn.TracedAttention(10, 2, bias=False)]
    for module in [*biases, nn.LuongAttention(10, bias=False)]:
        assert not [name for name, _ in module.named_parameters() if "bias" in name]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("shape", [(7, 7), (2, 7, 7), (2, 1, 7, 7), (1, 1, 7), (7,)], ids=str)
def test_masks_of_causal_self_attention(heads, shape):
    """A mask per item has as many dimensions as x, for any number of heads."""
    module, x = nn.CausalSelfAttention(10, 8, num_heads=heads), torch.randn(2, 7, 10)
    mask = (torch.arange(math.prod(shape)) ** 2 % 5 > 1).view(shape)
    q, k, v = (p(x).view(2, 7, heads, -1).transpose(1, 2) for p in list(module.children())[:3])
    wide = mask[:, None] if mask.ndim == 3 else mask
    _, expected = naive(q, k, v, wide, causal=True)
    _, weights = module(x, mask, need_weights=True)
    torch.testing.assert_close(weights, expected[:, 0] if heads == 1 else expected)
    stack = nn.ConcatenatedHeads(10, 4, num_heads=2)
    assert (stack(x, mask, need_weights=True)[1][expected.expand(2, 2, 7, 7) == 0] == 0).all()


def test_results_compared_with_minus_1e9_of_the_tutorials():
    """Tutorials add -1e9 to the scores where a mask is 1. Results agree except for rows without
    keys: in tutorials their weights are equal and the output is the mean of v; here it is 0."""
    q, k, v = torch.randn(3, 2, 5, 8)
    hidden = (torch.arange(25).view(5, 5) ** 2 % 7 > 3).float()
    hidden[3] = 1
    weights = torch.softmax(q @ k.mT / 8**0.5 + hidden * -1e9, -1)
    out, found = nn.ScaledDotProductAttention()(q, k, v, hidden == 0, need_weights=True)
    seen = torch.arange(5) != 3
    torch.testing.assert_close(found[:, seen], weights[:, seen])
    torch.testing.assert_close(out[:, seen], (weights @ v)[:, seen])
    torch.testing.assert_close((weights @ v)[:, 3], v.mean(1))
    assert not out[:, 3].any() and not found[:, 3].any()


def test_an_additive_mask_is_refused():
    x = torch.randn(2, 4, 8)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    with pytest.raises(ValueError, match="-inf"):
        nn.ScaledDotProductAttention()(x, x, x, mask)


# --- heads, as the tutorials write them -----------------------------------------------------------

HEAD_MASKS = {
    "none": None,
    "matrix": torch.ones(6, 6).tril(),
    "items": torch.arange(72).view(2, 6, 6) ** 2 % 7 > 2,
    "padding": (torch.arange(6) < torch.tensor([4, 6])[:, None]).int()[:, None, None],
}
HEADS = pytest.mark.parametrize("embed, heads", small([(200, 5), (12, 4), (7, 1)], [(10, 2)]))


def heads_of(x, heads):
    return x.view(2, -1, heads, x.shape[-1] // heads).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(2, 6, -1)


def four(mask):
    return mask[:, None] if mask is not None and mask.ndim == 3 else mask


@every_backend
@HEADS
@pytest.mark.parametrize("mask", small(list(HEAD_MASKS), ["items", "padding"]))
def test_packed_self_attention(name, embed, heads, mask, on):
    module, mask = nn.PackedSelfAttention(embed, heads), HEAD_MASKS[mask]
    x = torch.randn(2, 6, embed, requires_grad=True)
    q, k, v = module.qkv_proj(x).view(2, 6, 3, heads, embed // heads).permute(2, 0, 3, 1, 4)
    out, weights = naive(q, k, v, four(mask))
    expected = module.out_proj(joined(out)), weights
    same(module(x, mask, need_weights=True), expected, [x, *module.parameters()])
    torch.testing.assert_close(module(x, mask), expected[0])


@every_backend
@HEADS
@pytest.mark.parametrize("mask", small(list(HEAD_MASKS), ["items", "padding"]))
def test_shared_head_attention(name, embed, heads, mask, on):
    module, mask = nn.SharedHeadAttention(embed, heads), HEAD_MASKS[mask]
    inputs = [torch.randn(2, 6, embed, requires_grad=True) for _ in range(3)]
    cut = (x.reshape(2, 6, heads, embed // heads) for x in inputs)
    q, k, v = (p(x) for p, x in zip((module.q_proj, module.k_proj, module.v_proj), cut))
    energy = torch.einsum("nqhd,nkhd->nhqk", q, k)
    if mask is not None:
        energy = energy.masked_fill(four(mask) == 0, -torch.inf)
    weights = torch.softmax(energy / embed**0.5, dim=3).nan_to_num(0.0)
    out = torch.einsum("nhql,nlhd->nqhd", weights, v).reshape(2, 6, embed)
    expected = module.out_proj(out), weights
    found = module(*inputs, mask, need_weights=True)
    if mask is None or (weights.sum(-1) > 0).all():
        same(found, expected, [*inputs, *module.parameters()])
    else:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@every_backend
@HEADS
@pytest.mark.parametrize("mask", small(list(HEAD_MASKS), ["items", "padding"]))
def test_every_step_of_traced_attention(name, embed, heads, mask, on):
    module, mask = nn.TracedAttention(embed, heads).eval(), HEAD_MASKS[mask]
    inputs = [torch.randn(2, 6, embed, requires_grad=True) for _ in range(3)]
    trace = {}
    x = module(*inputs, mask, trace=trace)
    feats = [p(y) for p, y in zip((module.q_proj, module.k_proj, module.v_proj), inputs)]
    splits = [heads_of(y, heads) for y in feats]
    out, attention = naive(*splits, four(mask), scale=embed**-0.5)
    expected = dict(zip(("Q_feat", "K_feat", "V_feat"), feats))
    expected |= dict(zip(("Q_split", "K_split", "V_split"), splits))
    expected |= dict(attention=attention, x_raw=out, x_rsh1=out.transpose(1, 2))
    expected |= dict(x_rsh2=joined(out), x=module.out_proj(joined(out)))
    for what, y in expected.items():
        torch.testing.assert_close(trace[what], y, rtol=2e-5, atol=2e-6, msg=what)
    assert trace.keys() == {*expected, "scores"} and trace["x"] is x
    kept = trace["attention"] > 0
    scores = splits[0] @ splits[1].mT * embed**-0.5
    torch.testing.assert_close(trace["scores"][kept], scores[kept])
    same([module(*inputs, mask)], [expected["x"]], [*inputs, *module.parameters()])


def test_the_scale_of_the_paper_can_be_set():
    x = torch.randn(2, 6, 12)
    module = nn.TracedAttention(12, 4, dropout=0.0, scale=3**-0.5)
    q, k, v = (heads_of(p(x), 4) for p in (module.q_proj, module.k_proj, module.v_proj))
    torch.testing.assert_close(module(x, x, x), module.out_proj(joined(naive(q, k, v)[0])))
    for kind in (nn.PackedSelfAttention, nn.TracedAttention, nn.SharedHeadAttention):
        with pytest.raises(ValueError, match="multiple"):
            kind(12, 5)


# --- sequence to sequence ----------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("mask", [None, "padding", "all hidden"])
def test_luong_attention(name, mask, on):
    module = nn.LuongAttention(8, 6)
    state, memory = (torch.randn(2, n, 8, requires_grad=True) for n in (3, 5))
    if mask:
        mask = torch.arange(5) < torch.tensor([4, 5 if mask == "padding" else 0])[:, None]
    context, weights = naive(
        state, memory, memory, None if mask is None else mask[:, None], scale=1.0
    )
    expected = torch.tanh(module.combine(torch.cat([context, state], -1))), weights
    same(module(state, memory, mask, True), expected, [state, memory, *module.parameters()])
    out, weights = module(state[:, 1], memory, mask, need_weights=True)
    torch.testing.assert_close((out, weights), tuple(x[:, 1] for x in expected))


@pytest.mark.parametrize("mask", [None, "padding", "all hidden"])
def test_bahdanau_attention(mask):
    module = nn.BahdanauAttention(8, 6, 4)
    state, memory = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 5, 6)
    if mask:
        mask = torch.arange(5) < torch.tensor([4, 5 if mask == "padding" else 0])[:, None]
    out, weights = module(state, memory, mask, need_weights=True)
    for b in range(2):
        for i in range(3):
            n = 5 if mask is None else int(mask[b].sum())
            seen = memory[b, :n]
            hidden = torch.tanh(module.state_proj(state[b, i]) + module.memory_proj(seen))
            p = torch.softmax(module.score(hidden)[:, 0], 0)
            torch.testing.assert_close(weights[b, i], torch.cat([p, torch.zeros(5 - n)]))
            torch.testing.assert_close(out[b, i], p @ seen)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        (grad,) = torch.autograd.grad(out.sum(), state, retain_graph=True)
    assert grad.isfinite().all()
    assert module(state * torch.nan, memory, mask)[0].isnan().all()
    for bad in (torch.ones(3, 5), torch.ones(2, 4, 5), torch.ones(5)):
        for kind in (module, nn.LuongAttention(6)):
            with pytest.raises(ValueError, match="mask: got shape"):
                kind(state[..., :6] if kind is not module else state, memory, bad)
    with pytest.raises(ValueError, match="state, memory"):
        module(state[:1], memory)
    torch.testing.assert_close(module(state[:, 0], memory, mask), out[:, 0])


# --- positions ---------------------------------------------------------------------------------


def sinusoid(pos, column, size):
    angle = pos / 10000 ** (column // 2 * 2 / size)
    return math.cos(angle) if column % 2 else math.sin(angle)


@pytest.mark.parametrize("size", [1, 6, 7])
def test_sinusoids(size):
    encoding = nn.SinusoidalPositionalEncoding(size, max_len=50, dropout=0.0)
    expected = torch.tensor([[sinusoid(i, c, size) for c in range(size)] for i in range(50)])
    x = torch.randn(2, 50, size)
    torch.testing.assert_close(encoding(x) - x, expected.expand(2, 50, size))
    torch.testing.assert_close(encoding(x[0]), encoding(x)[0])
    torch.testing.assert_close(encoding(x[:, 7:9], offset=7), encoding(x)[:, 7:9])
    first = nn.SinusoidalPositionalEncoding(size, 50, 0.0, batch_first=False)
    torch.testing.assert_close(first(x.transpose(0, 1)), encoding(x).transpose(0, 1))
    assert encoding(x.bfloat16()).dtype == torch.bfloat16 and not encoding.state_dict()
    exact = encoding(x.double()) - x.double()
    assert torch.equal(encoding.bfloat16()(x.double()) - x.double(), exact)
    for wrong in (x[..., None, :], x.long(), torch.randn(2, 5, size + 1)):
        with pytest.raises(ValueError, match="embed_dim"):
            encoding(wrong)
    for bad in (dict(offset=1), dict(offset=-1)):
        with pytest.raises(ValueError, match="max_len"):
            encoding(x, **bad)


def test_positional_dropout_is_of_training_alone():
    encoding = nn.SinusoidalPositionalEncoding(8, dropout=0.5)
    x = torch.ones(1, 40, 8)
    assert (encoding(x) == 0).any() and not (encoding.eval()(x) == 0).any()
    assert torch.equal(encoding(x), encoding(x))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_are_those_of_complex_numbers(interleaved):
    D, N = 10, 13
    x = torch.randn(2, 3, N, D, dtype=torch.float64)
    rope = nn.RotaryEmbedding(D, interleaved=interleaved)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    angle = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle))
    expected = turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)
    torch.testing.assert_close(rope(x), expected)
    torch.testing.assert_close(rope(x[..., 4:, :], offset=4), rope(x)[..., 4:, :])
    positions = torch.randperm(N)
    torch.testing.assert_close(rope(x[..., positions, :], positions), rope(x)[..., positions, :])
    one = torch.tensor([5])
    torch.testing.assert_close(rope(x, one), rope(x, one.expand(N)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_scores_depend_on_differences_alone(interleaved):
    rope = nn.RotaryEmbedding(16, rotary_dim=12, interleaved=interleaved)
    q, k = torch.randn(2, 6, 16, dtype=torch.float64)
    near, far = (rope(q, offset=at) @ rope(k, offset=at).T for at in (0, 10**6))
    torch.testing.assert_close(near, far)
    assert torch.equal(rope(q)[..., 12:], q[..., 12:])
    torch.testing.assert_close(rope(q).norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize("dims", [(), (3,)], ids=["rows", "heads"])
def test_rotations_of_nested_tensors(dims):
    offsets = torch.tensor([0, 3, 5])
    x, positions = torch.randn(5, *dims, 8), torch.tensor([0, 4, 1, 7, 2])
    given = [torch.nested.nested_tensor_from_jagged(t, offsets) for t in (x, positions)]
    rope = nn.RotaryEmbedding(8)
    got = rope(given[0], given[1].view(2, -1, *(1 for _ in dims)) if dims else given[1])
    right = rope(x.movedim(0, -2), positions).movedim(-2, 0)
    torch.testing.assert_close(got.values(), right)


@pytest.mark.filterwarnings("ignore")  # torch's exporters emit warnings
@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rotations_in_onnx(dynamo):
    """An exporter knows torch's operators alone."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    rope, x, file = nn.RotaryEmbedding(8), torch.randn(2, 3, 4, 8), io.BytesIO()
    model = torch.nn.Sequential(rope)  # without an input for the offset
    torch.onnx.export(model, (x,), file, input_names=["x"], dynamo=dynamo)
    model = onnx.load_from_string(file.getvalue())
    got = ReferenceEvaluator(model).run(None, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(got), rope(x))


def test_rotations_keep_the_dtype_and_their_precision():
    rope, x = nn.RotaryEmbedding(64).bfloat16(), torch.randn(4, 64)
    exact = nn.RotaryEmbedding(64)(x.double(), offset=100_000)
    torch.testing.assert_close(rope(x, offset=100_000).double(), exact, rtol=0, atol=1e-6)
    assert rope(x.bfloat16()).dtype == torch.bfloat16
    for bad in (dict(rotary_dim=5), dict(rotary_dim=66), dict(rotary_dim=0)):
        with pytest.raises(ValueError, match="rotary_dim"):
            nn.RotaryEmbedding(64, **bad)
    with pytest.raises(ValueError, match="head_dim"):
        rope(x[:, :60])
    with pytest.raises(ValueError, match="one of the two"):
        rope(x, torch.arange(4), offset=1)
    slower = nn.RotaryEmbedding(64, base=1e6)(x) - nn.RotaryEmbedding(64)(x)
    assert not slower[0].any() and slower[1:].abs().max() > 0.01


def test_alibi_slopes():
    """8 heads: 1/2 to 1/256 (Press et al., section 3). 12 heads: these, and 4 of those for 16."""
    eight = [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(nn.alibi_slopes(8), torch.tensor(eight))
    more = [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]
    torch.testing.assert_close(nn.alibi_slopes(12), torch.tensor(eight + more))
    assert nn.alibi_slopes(1).tolist() == [2.0**-8] and nn.alibi_slopes(16)[1] == 0.5
    q = torch.randn(1, 12, 5, 8)
    assert fastattn.attention(q, q, q, alibi_slopes=nn.alibi_slopes(12)).shape == q.shape
    with pytest.raises(ValueError, match="num_heads"):
        nn.alibi_slopes(0)


# --- the table ---------------------------------------------------------------------------------


def test_the_table_of_documents_names_classes_and_tests_that_exist():
    rows = re.findall(r"^ *\S.*  ([A-Z]\w+(?:, \w+)*) +([CDNT]) (\w+)$", nn.__doc__, re.MULTILINE)
    named = {"RotaryEmbedding"}
    named.update(*(classes.split(", ") for classes, _, _ in rows))
    classes = [x for x in map(vars(nn).get, nn.__all__) if isinstance(x, type)]
    assert {x.__name__ for x in classes if issubclass(x, torch.nn.Module)} == named
    files = {"D": "test_tutorial_outputs.py", "N": "test_nn.py", "T": "test_nn_transformer.py"}
    files["C"] = "test_nn_conversion.py"
    for _, file, words in rows:
        text = Path(__file__).with_name(files[file]).read_text()
        assert re.search(rf"^def test_\w*{words}", text, re.MULTILINE), words
