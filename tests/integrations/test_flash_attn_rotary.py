"""`fastattn.flash_attn.rotary` equals flash-attn 2.8's rotary embeddings: rotations of complex
numbers in float64, one sequence at a time, values and gradients."""

import functools
from itertools import pairwise

import pytest
import torch

from fastattn.flash_attn import rotary
from fastattn.rotation import kernel, rotate
from tests.support.flash_attn_oracle import turned

B, N, H, HK, D, S = 3, 6, 4, 2, 8, 17
LENGTHS = (4, 0, 6)  # of packed sequences
OFFSETS = {"start": 0, "int": 5, "tensor": torch.tensor([3, 0, 9], dtype=torch.int32)}

of_pairs = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
of_columns = pytest.mark.parametrize("columns", [D, 4], ids=["all_columns", "first_columns"])
of_offsets = pytest.mark.parametrize("offset", OFFSETS)
in_place = pytest.mark.parametrize("inplace", [False, True], ids=["new", "in_place"])


def random(*shape, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed + len(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def table(columns, dtype=torch.float64, seed=0):
    angle = 3 * random(S, columns // 2, seed=seed)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def of_sequence(offsets, b):
    return int(offsets[b]) if isinstance(offsets, torch.Tensor) else offsets


def dense(x, cos, sin, offsets, interleaved, conjugate=False):
    """x (B,N,H,D) rotated."""
    sin = -sin if conjugate else sin
    places = [of_sequence(offsets, b) + torch.arange(x.shape[1]) for b in range(len(x))]
    return torch.stack([turned(y, cos, sin, at, interleaved) for y, at in zip(x, places)])


def packed(x, cos, sin, cu, offsets, interleaved, conjugate=False):
    """x (T,H,D) rotated."""
    sin = -sin if conjugate else sin
    return torch.cat(
        [
            turned(x[i:j], cos, sin, of_sequence(offsets, b) + torch.arange(j - i), interleaved)
            for b, (i, j) in enumerate(pairwise(cu.tolist()))
        ]
    )


def agree(call, expected, *leaves):
    """Values and gradients are equal. `call` may write to its arguments: it gets no leaves."""
    got, wanted = call(*(x * 1 for x in leaves)), expected(*leaves)
    torch.testing.assert_close(got, wanted.to(got), rtol=1e-12, atol=1e-12)
    weights = random(*wanted.shape, seed=77)
    gradients = [torch.autograd.grad((y * weights).sum(), leaves) for y in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@in_place
@of_pairs
@of_columns
@of_offsets
@pytest.mark.parametrize("conjugate", [False, True], ids=["forth", "back"])
def test_dense(offset, columns, interleaved, inplace, conjugate):
    x, given = random(B, N, H, D).requires_grad_(), (*table(columns), OFFSETS[offset])
    flags = dict(interleaved=interleaved, conjugate=conjugate)
    agree(
        lambda x: rotary.apply_rotary(x, *given, inplace=inplace, **flags),
        lambda x: dense(x, *given, **flags),
        x,
    )


@in_place
@of_pairs
@of_columns
@of_offsets
@pytest.mark.parametrize("conjugate", [False, True], ids=["forth", "back"])
def test_packed(offset, columns, interleaved, inplace, conjugate):
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x, (cos, sin) = random(sum(LENGTHS), H, D).requires_grad_(), table(columns)
    flags = dict(interleaved=interleaved, conjugate=conjugate)
    where = OFFSETS[offset], cu, max(LENGTHS)
    agree(
        lambda x: rotary.apply_rotary(x, cos, sin, *where, inplace=inplace, **flags),
        lambda x: packed(x, cos, sin, cu, OFFSETS[offset], **flags),
        x,
    )


@of_pairs
def test_the_public_function_has_flash_attns_order_of_arguments(interleaved):
    cu = torch.tensor([0, 4, 4, 10])
    x, (cos, sin) = random(10, H, D), table(D)
    y = rotary.apply_rotary_emb(x, cos, sin, interleaved, True, OFFSETS["tensor"], cu, 6)
    assert y is x
    wanted = packed(random(10, H, D), cos, sin, cu, OFFSETS["tensor"], interleaved)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb


@in_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_table", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_rounded_once(dtype, of_table, inplace):
    x, (cos, sin) = random(B, N, H, D, dtype=dtype), table(D, of_table)
    exact = dense(x, cos, sin, 0, False)
    y = rotary.apply_rotary_emb(x.clone(), cos, sin, inplace=inplace)
    assert y.dtype == dtype
    sum_error = 2**-22 * x.double().abs().max()
    assert (
        (y.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + sum_error
    ).all()


def written(x):
    """The rotated input and its result, of a call in place."""
    return x, rotary.apply_rotary_emb(x, *table(D), inplace=True)


@pytest.mark.parametrize("strides", ["dense", "transposed", "slice"])
def test_in_place_writes_into_any_strides(strides):
    whole = random(B, H, N, 3 * D) if strides == "transposed" else random(B, N, H, 3 * D)
    x = whole.transpose(1, 2) if strides == "transposed" else whole
    x = x[..., :D].contiguous() if strides == "dense" else x[..., D : 2 * D]
    before = x.clone()
    x, y = written(x)
    assert y is x
    torch.testing.assert_close(x, dense(before, *table(D), 0, False), rtol=1e-12, atol=1e-12)
    if strides != "dense":
        untouched = whole.clone()
        untouched[..., D : 2 * D] = 0
        fresh = random(*whole.shape)
        fresh[..., D : 2 * D] = 0
        assert torch.equal(untouched, fresh)


def test_a_new_result_leaves_the_input():
    x = random(B, N, H, D)
    y = rotary.apply_rotary_emb(x, *table(4))
    assert torch.equal(x, random(B, N, H, D)) and y.data_ptr() != x.data_ptr()


def test_a_recorded_write_gives_the_input_its_gradient():
    """Code that ignores the result of apply_rotary_emb_qkv_ has the right gradient."""
    leaf, weights = random(B, N, 3, H, D).requires_grad_(), random(B, N, 3, H, D, seed=3)
    qkv = leaf * 1
    rotary.apply_rotary_emb_qkv_(qkv, *table(D))
    (got,) = torch.autograd.grad((qkv * weights).sum(), leaf)
    back = [dense(x, *table(D), 0, False, conjugate=True) for x in weights.unbind(2)[:2]]
    wanted = torch.stack([*back, weights[:, :, 2]], 2)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["leaf", "view", "unbound"])
def test_a_write_that_autograd_does_not_record(kind):
    leaf = random(2, B, N, H, D).requires_grad_()
    before, weights = leaf.detach().clone(), random(B, N, H, D, seed=3)
    if kind == "leaf":
        x = leaf.detach()[0].requires_grad_()
    else:
        x = leaf[0] if kind == "view" else (leaf * 1).unbind(0)[0]
    x, y = written(x)
    assert y.data_ptr() == x.data_ptr()
    torch.testing.assert_close(y, dense(before[0], *table(D), 0, False), rtol=1e-12, atol=1e-12)
    given = weights.clone()
    (got,) = torch.autograd.grad(y, x if kind == "leaf" else leaf, given)
    assert torch.equal(given, weights)  # flash-attn rotates it in place
    wanted = dense(weights, *table(D), 0, False, conjugate=True)
    torch.testing.assert_close(got if kind == "leaf" else got[0], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", ["unbind", "split"])
def test_each_of_several_views_is_written(split):
    def call(qkv):
        parts = qkv.unbind(2) if split == "unbind" else [x[:, :, 0] for x in qkv.split(1, 2)]
        q, k = (rotary.apply_rotary_emb(x, *table(D), inplace=True) for x in parts[:2])
        return torch.stack([q, k, parts[2]], 2)

    def wanted(qkv):
        q, k = (dense(x, *table(D), 0, False) for x in qkv.unbind(2)[:2])
        return torch.stack([q, k, qkv[:, :, 2]], 2)

    agree(call, wanted, random(B, N, 3, H, D).requires_grad_())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo itself reads it
@pytest.mark.parametrize("kind", ["leaf", "result"])
def test_compiled_writes(kind):
    def call(leaf):
        qkv = leaf if kind == "leaf" else leaf * 1
        return rotary.apply_rotary_emb_qkv_(qkv, *table(D), seqlen_offsets=2)

    found = []
    for function in (call, torch.compile(call, backend="aot_eager")):
        leaf = random(B, N, 3, H, D).requires_grad_()
        y = function(leaf)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("is_leaf", [False, True], ids=["recorded", "unrecorded"])
def test_the_second_derivative(is_leaf):
    def call(x):
        x = x.clone().unbind(0)[0][None] if not is_leaf else x.clone().split(1)[0]
        return rotary.apply_rotary_emb(x, *table(D), inplace=True).sin()

    x = random(1, 2, 1, D).requires_grad_()
    assert torch.autograd.gradcheck(call, x) and torch.autograd.gradgradcheck(call, x)


def test_gradients_of_the_table():
    x, leaves = random(B, N, H, D), [y.requires_grad_() for y in table(D)]
    agree(
        lambda cos, sin: rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=2),
        lambda cos, sin: dense(x, cos, sin, 2, False),
        *leaves,
    )
    with pytest.raises(ValueError, match="cos: got a tensor that requires grad for a rotation in"):
        rotary.apply_rotary_emb(x, *leaves, inplace=True)
    with torch.no_grad():
        rotary.apply_rotary_emb(x, *leaves, inplace=True)


@of_pairs
@of_offsets
@pytest.mark.parametrize("tables", [1, 2], ids=["one_table", "table_of_keys"])
@pytest.mark.parametrize("layout", ["stacked", "grouped"])
def test_qkv(layout, tables, offset, interleaved):
    heads = (H, H, H) if layout == "stacked" else (H, HK, HK)
    leaf = random(B, N, sum(heads), D).requires_grad_()
    of_all = [x for at in range(tables) for x in table(4, seed=at)]
    given = dict(interleaved=interleaved, seqlen_offsets=OFFSETS[offset])
    given |= dict(num_heads_q=H) if layout == "grouped" else {}

    def call(x):
        x = x.unflatten(2, (3, H)) if layout == "stacked" else x
        y = rotary.apply_rotary_emb_qkv_(x, *of_all, **given)
        assert y is x
        assert torch.equal(y.reshape(leaf.shape)[:, :, -heads[2] :], leaf[:, :, -heads[2] :])
        return y.reshape(leaf.shape)

    def wanted(x):
        q, k, v = x.split(heads, 2)
        last = OFFSETS[offset], interleaved
        return torch.cat([dense(q, *of_all[:2], *last), dense(k, *of_all[-2:], *last), v], 2)

    agree(call, wanted, leaf)


@of_pairs
@of_offsets
def test_kv(offset, interleaved):
    given = *table(4), interleaved, OFFSETS[offset]

    def wanted(kv):
        k, v = kv.unbind(2)
        return torch.stack([dense(k, *table(4), OFFSETS[offset], interleaved), v], 2)

    leaf = random(B, N, 2, HK, D).requires_grad_()
    agree(lambda kv: rotary.apply_rotary_emb_kv_(kv, *given), wanted, leaf)


@of_pairs
@pytest.mark.parametrize("of_items", [False, True], ids=["shared_angles", "angles_of_items"])
def test_the_plain_function(of_items, interleaved):
    x, (cos, sin) = random(B, N, H, D).requires_grad_(), table(4)
    at = torch.arange(N) + torch.tensor([[3], [0], [9]]) if of_items else torch.arange(N)
    agree(
        lambda x: rotary.apply_rotary_emb_torch(x, cos[at], sin[at], interleaved),
        lambda x: dense(x, cos, sin, at[:, 0] if of_items else 0, interleaved),
        x,
    )
    turn = torch.zeros(1, D // 2, dtype=torch.float64), torch.ones(1, D // 2, dtype=torch.float64)
    quarter = turned(x[0, :1], *turn, torch.tensor([0]), interleaved)
    assert torch.equal(rotary.rotate_half(x[0, :1], interleaved), quarter)


# ----------------------------------------------------------------------------- the module


def angles(dim, base=10000.0):
    inv_freq = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.arange(S, dtype=torch.float64)[:, None] * inv_freq


def of_module(dim, base=10000.0, scale_base=None, positions=S):
    """cos and sin of queries, and of keys, by the definition of xPos."""
    angle, scale = angles(dim, base), 1.0
    if scale_base is not None:
        zeta = (torch.arange(0, dim, 2, dtype=torch.float64) + 0.4 * dim) / (1.4 * dim)
        power = (torch.arange(S, dtype=torch.float64) - positions // 2) / scale_base
        scale = zeta ** power[:, None]
    return (angle.cos() * scale, angle.sin() * scale), (angle.cos() / scale, angle.sin() / scale)


MODULES = {
    "plain": {},
    "interleaved": dict(interleaved=True),
    "base": dict(base=500.0),
    "xpos": dict(scale_base=8),
}


@pytest.mark.parametrize("form", ["qkv", "grouped", "q_kv"])
@pytest.mark.parametrize("offset", ["int", "tensor"])
@pytest.mark.parametrize("name", MODULES)
def test_module(name, offset, form):
    module, offsets = rotary.RotaryEmbedding(4, **MODULES[name]), OFFSETS[offset]
    sizes = {k: v for k, v in MODULES[name].items() if k != "interleaved"}
    of_q, of_k = of_module(4, **sizes)
    heads = (H, H, H) if form == "qkv" else (H, HK, HK)
    x = random(B, N, sum(heads), D)
    q, k, v = (y.clone() for y in x.split(heads, 2))
    if form == "q_kv":
        got = module(q.clone(), torch.stack([k, v], 2), offsets, max_seqlen=S)
        got = torch.cat([got[0], got[1].flatten(2, 3)], 2)
    elif form == "qkv":
        got = module(x.unflatten(2, (3, H)), None, offsets, S).flatten(2, 3)
    else:
        got = module(x, seqlen_offset=offsets, max_seqlen=S, num_heads_q=H)
    interleaved = module.interleaved
    turn = [dense(y, *t, offsets, interleaved) for y, t in ((q, of_q), (k, of_k))]
    torch.testing.assert_close(got, torch.cat([*turn, v], 2), rtol=1e-5, atol=1e-5)


def test_module_has_flash_attns_buffers():
    module = rotary.RotaryEmbedding(8, scale_base=512)
    assert {name: tuple(x.shape) for name, x in module.named_buffers()} == dict(
        inv_freq=(4,), scale=(4,)
    )
    assert not module.state_dict() and module.inv_freq.dtype == torch.float32
    module.load_state_dict({})
    assert rotary.RotaryEmbedding(8).scale is None


def test_module_keeps_its_tables_until_they_are_too_short():
    module, x = rotary.RotaryEmbedding(D), random(B, N, 3, H, D, dtype=torch.float32)
    module(x.clone(), seqlen_offset=5)
    first = module._cos_cached
    assert first.shape == (N + 5, D // 2) and first.dtype == torch.float32
    module(x.clone())
    assert module._cos_cached is first
    module(x.clone(), seqlen_offset=6)
    assert len(module._cos_cached) == N + 6
    module(x.bfloat16())
    assert module._cos_cached.dtype == torch.bfloat16 and len(module._cos_cached) == N
    with torch.inference_mode():
        module(x.clone())
    module(x.clone().requires_grad_() * 1)  # autograd cannot save tensors of inference mode


@pytest.mark.parametrize("scale_base", [None, 8], ids=["plain", "xpos"])
def test_a_rounded_module_has_exact_tables(scale_base):
    module, exact = (rotary.RotaryEmbedding(D, scale_base=scale_base) for _ in range(2))
    module.bfloat16()
    x = random(B, N, 3, H, D, dtype=torch.float32)
    assert module.inv_freq.dtype == torch.bfloat16
    assert torch.equal(module(x.clone(), seqlen_offset=9), exact(x.clone(), seqlen_offset=9))


def test_subclasses_replace_frequencies_and_tables():
    class Scaled(rotary.RotaryEmbedding):
        def _compute_inv_freq(self, device=None):
            return super()._compute_inv_freq(device) / 4

    x = random(B, N, 3, H, D)
    got = Scaled(D)(x.clone())
    cos, sin = (angles(D) / 4).cos(), (angles(D) / 4).sin()
    wanted = dense(x[:, :, 0], cos, sin, 0, False)
    torch.testing.assert_close(got[:, :, 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_at_an_offset_have_the_bits_of_the_whole_sequence(dtype):
    module = rotary.RotaryEmbedding(D)
    qkv = random(B, N, 3, H, D, dtype=dtype)
    whole = module(qkv.clone())
    step = module(qkv[:, 4:].clone(), seqlen_offset=4)
    assert torch.equal(step, whole[:, 4:])


# ----------------------------------------------------------------------------- errors

X, TABLE = random(B, N, H, D), table(D)
CU = torch.tensor([0, 4, 10])
FLAT = random(10, H, D)
WRONG = {
    "x_of_two_dimensions": (lambda f: f(X[0, 0], *TABLE), r"x: got shape \(4, 8\), expected"),
    "x_of_integers": (lambda f: f(X.long(), *TABLE), r"x.dtype: got torch.int64"),
    "cos_too_wide": (lambda f: f(X[..., :4], *TABLE), r"cos: got 4 columns, expected R / 2"),
    "cos_of_items": (lambda f: f(X, *(t[None] for t in TABLE)), r"cos: got shape \(1, 17, 4\)"),
    "another_sin": (lambda f: f(X, TABLE[0], TABLE[1][:9]), r"sin: got shape \(9, 4\)"),
    "cos_too_short": (
        lambda f: f(X, *(t[:5] for t in TABLE)),
        r"seqlen_offsets: got 0 for 6 rows, expected positions 0 to 4",
    ),
    "offset_too_large": (
        lambda f: f(X, *TABLE, seqlen_offsets=12),
        r"seqlen_offsets: got 12 for 6 rows",
    ),
    "offset_below_0": (lambda f: f(X, *TABLE, seqlen_offsets=-1), r"seqlen_offsets: got -1"),
    "offsets_of_a_batch": (
        lambda f: f(X, *TABLE, seqlen_offsets=torch.tensor([0, 1])),
        r"seqlen_offsets: got torch.int64 \(2,\), expected int32 or int64 \(3,\)",
    ),
    "offsets_too_large": (
        lambda f: f(X, *TABLE, seqlen_offsets=torch.tensor([0, 12, 0])),
        r"seqlen_offsets: got 17, expected 0 to 16: the positions of cos",
    ),
    "offsets_below_0": (
        lambda f: f(X, *TABLE, seqlen_offsets=torch.tensor([0, -2, 0])),
        r"seqlen_offsets: got -2, expected 0 to 16",
    ),
    "no_max_seqlen": (lambda f: f(FLAT, *TABLE, cu_seqlens=CU), "max_seqlen: got None beside"),
    "max_seqlen_too_small": (
        lambda f: f(FLAT, *TABLE, cu_seqlens=CU, max_seqlen=5),
        "max_seqlen: got 6, expected 0 to 5",
    ),
    "cu_seqlens_too_short": (
        lambda f: f(FLAT, *TABLE, cu_seqlens=CU[:2], max_seqlen=9),
        "cu_seqlens: got 4 last, expected 10, the rows of the packed tensor",
    ),
    "cu_seqlens_that_fall": (
        lambda f: f(FLAT, *TABLE, cu_seqlens=torch.tensor([0, 6, 4, 10]), max_seqlen=9),
        "cu_seqlens: got 4 after 6, expected offsets that never fall",
    ),
    "offsets_of_a_packed_batch": (
        lambda f: f(FLAT, *TABLE, seqlen_offsets=CU[:1], cu_seqlens=CU, max_seqlen=6),
        r"seqlen_offsets: got torch.int\d+ \(1,\), expected int32 or int64",
    ),
    "cu_seqlens_of_a_padded_batch": (
        lambda f: f(X, *TABLE, cu_seqlens=CU, max_seqlen=6),
        r"x: got shape \(3, 6, 4, 8\), expected \(total, heads, head_dim\)",
    ),
}


@in_place
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, inplace):
    call, message = WRONG[name]
    before = X.clone(), FLAT.clone()
    with pytest.raises(ValueError, match=message):
        call(lambda *args, **kwargs: rotary.apply_rotary_emb(*args, inplace=inplace, **kwargs))
    assert torch.equal(X, before[0]) and torch.equal(FLAT, before[1])


@pytest.mark.parametrize("heads", [None, 3, 9], ids=str)
def test_grouped_heads_need_their_number(heads):
    with pytest.raises(ValueError, match=f"num_heads_q: got {heads} beside 8 heads"):
        rotary.apply_rotary_emb_qkv_(random(B, N, 8, D), *TABLE, num_heads_q=heads)


def test_wrong_stacks_are_refused():
    with pytest.raises(ValueError, match="qkv: got shape"):
        rotary.apply_rotary_emb_qkv_(random(B, N, 2, H, D), *TABLE)
    with pytest.raises(ValueError, match="kv: got shape"):
        rotary.apply_rotary_emb_kv_(random(B, N, 3, H, D), *TABLE)
    with pytest.raises(ValueError, match="x: got shape"):
        rotary.apply_rotary_emb(random(B, N, 3, H, D), *TABLE)
    with pytest.raises(ValueError, match="dim: got 7, expected an even number"):
        rotary.RotaryEmbedding(7)
    with pytest.raises(ValueError, match="max_seqlen: got None beside a tensor seqlen_offset"):
        rotary.RotaryEmbedding(D)(random(B, N, 3, H, D), seqlen_offset=OFFSETS["tensor"])


CALLS = {
    "dense": lambda x, cos, sin: rotary.apply_rotary_emb(x[:, :, 0], cos, sin),
    "offsets": lambda x, cos, sin: rotary.apply_rotary_emb(
        x[:, :, 0], cos, sin, seqlen_offsets=torch.tensor([1, 0])
    ),
    "packed": lambda x, cos, sin: rotary.apply_rotary_emb(
        x[0, :, 0], cos, sin, cu_seqlens=torch.tensor([0, 2, 5]), max_seqlen=3
    ),
    "in place": lambda x, cos, sin: rotary.apply_rotary_emb(x[:, :, 0], cos, sin, inplace=True),
    "qkv in place": rotary.apply_rotary_emb_qkv_,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_pass_of_the_kernel_rotates(call, monkeypatch):
    """And torch's operations, which rotate where it has no such layout, give the same."""
    x, angle = torch.randn(2, 5, 3, 4, 16), torch.rand(8, 8)
    call = functools.partial(call, cos=angle.cos(), sin=angle.sin())
    passes = []
    run = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *given: passes.append(1) or run(*given))
    got = call(x.clone())
    assert passes == [1]
    monkeypatch.setattr(rotate, "_axes", lambda x, cos: None)
    torch.testing.assert_close(got, call(x.clone()))
    assert passes == [1]
