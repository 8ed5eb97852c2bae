"""score_mod and mask_mod in the CPU's kernels: the interpreter, on each instruction set."""

import pytest
import torch
from hypothesis import assume, given, settings

import fastattn
from fastattn import api
from fastattn.backends.native import libraries
from fastattn.call.spec import acc_dtype
from fastattn.dispatch.operation import FORWARD
from fastattn.dispatch.run_pass import arguments
from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.lowering import Begin, lower
from fastattn.score_mods.mod_text import ModText
from fastattn.score_mods.operators import OPS
from fastattn.score_mods.recognition import Shape
from fastattn.score_mods.tracing import trace_mask_mod, trace_score_mod
from tests.score_mods import trees
from tests.support.backends import variant, variants
from tests.support.marks import parametrize
from tests.support.program_operators import CASES, IDS, function_of, indices, share_of_wrong_scores

if libraries.cpu_unavailable():
    pytest.skip(libraries.cpu_unavailable(), allow_module_level=True)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
ISAS = {name: variants("cpu", dtype) for name, dtype in DTYPES.items()}
EVERY = [(isa, name) for name in DTYPES for isa in ISAS[name]]
G = torch.Generator().manual_seed(11)
B, H, M, N, D = 2, 3, 150, 170, 16
TABLE = torch.randn(H, M + N, generator=G)
SLOPES = torch.rand(H, generator=G)
BUCKETS = torch.randn(12, H, generator=G)


def tensors(dtype, M=M, N=N, heads=H, grad=True, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (B, heads, M, D), (B, heads, N, D), (B, heads, N, D)
    made = [torch.randn(*shape, generator=draw).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


# -- operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", libraries.cpu_isas())
@parametrize("whole, name, text", CASES, ids=IDS, fast=25)
def test_each_operator(whole, name, text, isa):
    """The scores are those of the program on torch tensors, in the same precision."""
    function = function_of(text, whole)
    for dtype in (torch.float32, torch.float64):
        if isa not in variants("cpu", dtype):
            continue
        q, k, _ = tensors(dtype, M=37, N=45, grad=False)
        with variant(isa):
            wrong = share_of_wrong_scores(function, q / 4, k / 4)
        assert wrong < (2e-3 if dtype == torch.float32 else 1e-6), name


def test_each_operator_has_a_number():
    known = set(libraries.cpu().score_mod_ops.split())
    for name, op in OPS.items():  # the score is a tile, and no value that is computed
        for kinds, kind in op.signatures:
            letter = (kinds[-1] if kinds else kind)[0]
            text = f"{name}:{letter}" if kinds or name == "constant" else name
            assert text in known or name == "score"
    assert {"load:f", "load:i", "copy", "hide", "check", "scatter"} <= known


@pytest.mark.slow
@given(trees.trees("bool", scores=False))
@settings(max_examples=60, deadline=None)
def test_random_masks(tree):
    """A pair has a probability where the tree is true."""
    assume(not any(x in tree.text for x in ("tanh", "sigmoid", "exp", "cos", "sqrt", "/")))
    traced = trace_mask_mod(tree.function)
    sizes = trees.B, trees.H, trees.N, trees.N
    seen = evaluate(*traced, **indices(*sizes)).expand(sizes)
    for dtype in (torch.float32, torch.float64):
        draw = torch.Generator().manual_seed(1)
        q = torch.randn(trees.B, trees.H, trees.N, D, generator=draw).to(dtype)
        lowered = lower(None, traced.program, traced.tensors, Shape(*sizes), dtype, Begin())
        assert lowered is not None or dtype == torch.float32
        p = fastattn.attention_weights(q, q, mask_mod=tree.function)
        assert torch.equal(p > 0, seen), dtype


@pytest.mark.slow
@given(trees.trees("float", scores=True))
@settings(max_examples=60, deadline=None)
def test_random_scores_and_gradients(tree):
    """Out and all gradients in float64 are those of autograd through the program."""
    traced = trace_score_mod(tree.function, dtype=torch.float64)
    sizes = trees.B, trees.H, trees.N, trees.N
    draw = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, *sizes[:3], D, generator=draw, dtype=torch.float64).unbind()
    table = trees.TABLES["float"]
    leaves = [*(x.requires_grad_() for x in (q, k, v)), table]
    s = evaluate(*traced, score=q @ k.mT * D**-0.5, **indices(*sizes))
    assume(s.isfinite().all() and s.abs().max() < 1e4)
    expected = torch.softmax(s.expand(sizes), -1) @ v
    right = torch.autograd.grad(expected.sin().sum(), leaves, allow_unused=True)
    assume(all(x is None or (x.isfinite().all() and x.abs().max() < 1e6) for x in right))
    out = fastattn.attention(q, k, v, score_mod=tree.function)
    found = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    for got, x in zip(found, right):
        got, x = (torch.zeros(()) if y is None else y for y in (got, x))
        torch.testing.assert_close(got.expand(x.shape) if x.ndim else x, x, rtol=1e-5, atol=1e-6)


# -- bits ------------------------------------------------------------------------------------------


BIASES = {
    "relative": lambda s, b, h, i, j: s + (i - j) * 0.05,
    "a table by distance": lambda s, b, h, i, j: s + TABLE[h, i - j + N - 1],
    "a table by distance, turned": lambda s, b, h, i, j: s + TABLE[h, j - i + M - 1],
    "buckets": lambda s, b, h, i, j: s + BUCKETS[((i - j).abs() // 9).clamp(max=11), h],
    "of a row": lambda s, b, h, i, j: s - SLOPES[h] * i,
    "of a key and an item": lambda s, b, h, i, j: s + j * (b + 1.0) * 0.01,
    "one number": lambda s, b, h, i, j: s + 0.25,
}


def results(given, **arguments):
    """Out, the LSE, and the gradients of q, k and v."""
    out, lse = fastattn.attention(*given, return_lse=True, **arguments)
    loss = out.float().square().sum() + lse[lse > -torch.inf].sum()
    return out, lse, *torch.autograd.grad(loss, given)


def materialised(function, dtype, sizes, like):
    traced = trace_score_mod(function, dtype=dtype)
    found = evaluate(*traced, score=torch.zeros((), dtype=dtype), **indices(*sizes))
    return found.to(dtype).expand(1, 1, *like).contiguous() if found.ndim == 0 else found


@pytest.mark.parametrize("rows", [M, 3, 1])
@parametrize("isa, dtype", EVERY, fast=6)
@pytest.mark.parametrize("name", BIASES)
def test_bits_are_those_of_the_same_bias(name, isa, dtype, rows):
    given = tensors(DTYPES[dtype], M=rows)
    mask = materialised(BIASES[name], acc_dtype(DTYPES[dtype]), (B, H, rows, N), (rows, N))
    with variant(isa):
        found, expected = results(given, score_mod=BIASES[name]), results(given, mask=mask)
    for got, right in zip(found, expected):
        if torch.equal(got, right):
            continue
        # Few rows with a bias of their own take another kernel than a mask that all rows share.
        assert rows < M and dtype != "float64"
        bound = 2e-2 if dtype == "bfloat16" else 1e-5
        torch.testing.assert_close(got, right, rtol=bound, atol=bound)


def test_hidden_blocks_are_not_read():
    """Else 0 times NaN would be NaN. A document's end is one of blocks, and of tiles of 12 to 128
    rows: a tile with rows of two documents reads the keys of both."""
    end = 384
    q, k, v = tensors(torch.float32, M=2 * end, N=2 * end, grad=False)
    v[:, :, end:] = torch.nan
    documents = torch.arange(2 * end) // end
    out = fastattn.attention(q, k, v, mask_mod=lambda b, h, i, j: documents[i] == documents[j])
    assert out[:, :, :end].isfinite().all() and out[:, :, end:].isnan().all()
    assert not fastattn.attention(q, k, v, mask_mod=lambda b, h, i, j: j < 0).any()


# -- captured tensors ------------------------------------------------------------------------------

CAPTURED = {
    "a table by distance": lambda x: lambda s, b, h, i, j: s + x[h, i - j + N],
    "a table by distance, turned": lambda x: lambda s, b, h, i, j: s + x[h, j - i + M],
    "one number a head": lambda x: lambda s, b, h, i, j: s + x[h, 0] * (i - j) / 50,
    "a scale a head": lambda x: lambda s, b, h, i, j: s * x[h, 1],
    "of rows": lambda x: lambda s, b, h, i, j: s * x[h, i],
    "of keys": lambda x: lambda s, b, h, i, j: s * torch.sigmoid(x[0, j]),
    "of buckets": lambda x: lambda s, b, h, i, j: s + x[h, (i * 3 + j) % 50],
    "two of one": lambda x: lambda s, b, h, i, j: torch.tanh(s * x[h, i]) + x[h, j] * x[1, 2],
    "a product of parts": lambda x: lambda s, b, h, i, j: s + torch.dot(x[:3, i], x[:3, j]) / 4,
    "a distance": lambda x: lambda s, b, h, i, j: s - (x[:, i] - x[:, j]).norm(),
    "the nearest": lambda x: lambda s, b, h, i, j: s * (x[h, :5] - x[h, j]).abs().amin(),
    "from the end": lambda x: lambda s, b, h, i, j: s + x[h, i - j],
}


@parametrize("isa, dtype", EVERY, fast=7)
@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captured_tensors(name, isa, dtype):
    """Against float64; the gradient of a captured tensor has its own dtype."""
    given = tensors(DTYPES[dtype])
    table = TABLE.clone().requires_grad_()

    def loss(given, table, attention, **how):
        out = attention(*given, score_mod=CAPTURED[name](table), causal=True, **how)
        return (out.double() * torch.sin(torch.arange(float(N)))[:D]).sum()

    with variant(isa):
        found = torch.autograd.grad(loss(given, table, fastattn.attention), [*given, table])
    wide = [x.detach().double().requires_grad_() for x in (*given, table)]

    def exactly(q, k, v, score_mod, causal):
        traced = trace_score_mod(score_mod, dtype=torch.float64)
        where = indices(B, H, M, N)
        return fastattn.reference.attention(
            q, k, v, causal=causal, score_mod=lambda s: evaluate(*traced, score=s, **where)
        )

    right = torch.autograd.grad(loss(wide[:3], wide[3], exactly), wide)
    bound = {"float32": 2e-4, "float64": 2e-5, "bfloat16": 5e-2}[dtype]  # the table is float32
    for got, x in zip(found, right):
        torch.testing.assert_close(got.double(), x, rtol=bound, atol=bound * float(x.abs().max()))


def test_gradients_of_captured_tensors_have_one_order(threads):
    """The same bits on any number of threads, in more tasks than there are parts."""
    q, k, v = torch.randn(3, 2, 4, 1200, 8, generator=G).unbind()
    table = torch.randn(4, 2400, generator=G).requires_grad_()
    found = []
    for n in (1, 2, 3, 8):
        threads(n)
        out = fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j])
        found += torch.autograd.grad(out.square().sum(), table)
    assert all(torch.equal(found[0], x) for x in found)


def test_a_captured_tensor_that_is_changed_raises():
    q, k, v = tensors(torch.float32)
    table = TABLE.clone().requires_grad_()
    out = fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + N])
    with torch.no_grad():
        table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("isa, dtype", EVERY)
def test_an_index_out_of_range_raises_where_it_is_seen(isa, dtype):
    q, k, v = tensors(DTYPES[dtype])
    small = TABLE[:, :M].clone()
    with variant(isa):
        with pytest.raises(IndexError, match="out of range"):
            fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + small[h, i - j + 30])
        hidden = lambda s, b, h, i, j: s + small[h, i - j]  # noqa: E731
        out = fastattn.attention(q, k, v, score_mod=hidden, causal=True)
        table = torch.cat([small, torch.zeros(H, N)], 1)
        same = lambda s, b, h, i, j: s + table[h, (i - j).clamp(min=0)]  # noqa: E731
        assert torch.equal(out, fastattn.attention(q, k, v, score_mod=same, causal=True))
        near = dict(mask_mod=lambda b, h, i, j: (i >= j) & ((i + j) % 3 > 0))
        out = fastattn.attention(q, k, v, score_mod=hidden, **near)
        assert torch.equal(out, fastattn.attention(q, k, v, score_mod=same, **near))


FEW, NO = torch.zeros(100), torch.zeros(0)  # fewer than N
DOCUMENT = torch.arange(N) // 20
WRONG = {  # functions that hide pairs at which they index out of range
    "mask_mod": dict(mask_mod=lambda b, h, i, j: FEW[j] > 0),
    "an empty tensor": dict(mask_mod=lambda b, h, i, j: NO[j] > 0),
    "the first of two conditions": dict(
        mask_mod=lambda b, h, i, j: (FEW[j] > 0) & (DOCUMENT[i] == DOCUMENT[j])
    ),
    "a part of a condition": dict(
        mask_mod=lambda b, h, i, j: ~((FEW[j] == 0) | (DOCUMENT[i] == DOCUMENT[j]))
    ),
    "a condition of a score_mod": dict(
        score_mod=lambda s, b, h, i, j: torch.where(FEW[j] > 0, s, -torch.inf)
    ),
    "score_mod": dict(score_mod=lambda s, b, h, i, j: torch.where(FEW[j] > 0, 2 * s, -torch.inf)),
    "what a score_mod adds": dict(score_mod=lambda s, b, h, i, j: s + (FEW - torch.inf)[j]),
}


@pytest.mark.parametrize("rows", [M, 220, 1], ids=["few pairs", "blocks have classes", "decoding"])
@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_range_hides_no_pair(name, rows):
    q, k, v = tensors(torch.float32, M=rows)
    part = dict(place=fastattn.Place(0, 0, 0, 0, rows, N))  # of which nothing is an argument
    for place in ({}, part):
        with pytest.raises(IndexError, match="out of range"):
            fastattn.attention(q, k, v, **WRONG[name], **place)
    with pytest.raises(IndexError, match="out of range"):
        fastattn.attention_weights(q, k, **WRONG[name])
    with pytest.raises(IndexError, match=r"index (100|0) is out of range"):
        fastattn.flex_attention(q, k, v, **WRONG[name])


@pytest.mark.parametrize("isa, dtype", EVERY)
def test_an_index_out_of_range_hides_no_pair_on(isa, dtype):
    """Each set of kernels, packed and in pages, too. The last sequence has too many keys."""
    with variant(isa):
        q, k, v = (x.detach()[0].transpose(0, 1) for x in tensors(DTYPES[dtype], M=N))
        pool = [x.unflatten(0, (17, 10)) for x in (k, v)]
        for keys, raises in ((100, False), (101, True)):
            cu_q, cu_k = (torch.tensor([0, 60, end], dtype=torch.int32) for end in (N, 60 + keys))
            pages = torch.stack([torch.arange(11), torch.arange(6, 17)]).int()
            paged = dict(block_table=pages, key_lengths=torch.tensor([60, keys]).int())
            hides = dict(mask_mod=lambda b, h, i, j: FEW[j] > 0)
            for x, y, where in (
                (k[: 60 + keys], v[: 60 + keys], dict(cu_k=cu_k, max_k=keys)),
                (*pool, paged),
            ):
                about = dict(cu_q=cu_q, max_q=110) | where | hides
                if raises:
                    with pytest.raises(IndexError, match="out of range"):
                        fastattn.attention_packed(q, x, y, **about)
                else:
                    assert not fastattn.attention_packed(q, x, y, **about).any()


HIDES = {  # arguments that hide the pairs of keys from 100 on
    "causal": dict(causal=True),
    "window": dict(window=(None, 0)),
    "lengths": dict(key_lengths=torch.tensor([100, 7])),
    "bool mask": dict(mask=torch.arange(N) < 100),
    "infinite mask": dict(mask=torch.where(torch.arange(N) < 100, 0, -torch.inf)),
}
CONDITIONS = {  # and of a mask_mod
    "a length": lambda b, h, i, j: j < 100,
    "others": lambda b, h, i, j: (DOCUMENT[j] < 5) & (DOCUMENT[i] < 7),
}


def few(b, h, i, j):
    return FEW[j] == 0


def few_clamped(b, h, i, j):
    return FEW[j.clamp(max=99)] == 0


@pytest.mark.parametrize("name", HIDES)
def test_a_mask_mod_may_index_out_of_range_where_arguments_hide(name):
    q, k, v = tensors(torch.float32, M=100)
    out = fastattn.attention(q, k, v, mask_mod=few, **HIDES[name])
    assert torch.equal(out, fastattn.attention(q, k, v, mask_mod=few_clamped, **HIDES[name]))
    out.sum().backward()


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_may_index_out_of_range_where_those_before_it_hide(name, part):
    """Whether they become arguments, as those of a whole call may, or not; in kernels, and in the
    mask that a backend without programs gets."""
    q, k, v = tensors(torch.float32, M=100, grad=False)
    before = CONDITIONS[name]
    given = dict(place=fastattn.Place(0, 0, 0, 0, 100, N)) if part else {}
    wrong, right = (dict(mask_mod=fastattn.and_masks(before, x)) for x in (few, few_clamped))
    out = fastattn.attention(q, k, v, **right, **given)
    assert torch.equal(out, fastattn.attention(q, k, v, **wrong, **given))
    of_score = dict(score_mod=lambda s, b, h, i, j: torch.where(FEW[j] == 0, s, -torch.inf))
    assert torch.equal(out, fastattn.attention(q, k, v, mask_mod=before, **of_score, **given))
    if part:
        masked = fastattn.attention(q, k, v, backend="reference", **wrong, **given)
        torch.testing.assert_close(out, masked)


def test_the_oracle_finds_an_index_out_of_range():
    """As it runs the programs of compiled code where no kernel does."""
    q, k, v = tensors(torch.float32, M=100, grad=False)
    for hides, raises in ((dict(causal=True), False), ({}, True)):
        t, o = api.prepare(q, k, v, hides | dict(mask_mod=few))
        o = o._replace(backend="reference")
        if raises:
            with pytest.raises(IndexError, match="out of range"):
                torch.ops.fastattn.attention(*arguments(FORWARD, t, o))
        else:
            out, _ = torch.ops.fastattn.attention(*arguments(FORWARD, t, o))
            torch.testing.assert_close(out, fastattn.attention(q, k, v, causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_an_empty_captured_tensor_has_no_element(dtype):
    """Also where blocks have classes, for which nothing is known of its elements."""
    empty, q = torch.empty(0, dtype=dtype), torch.randn(1, 1, 300, 8)
    with pytest.raises(IndexError, match="out of range"):
        fastattn.attention(q, q, q, mask_mod=lambda b, h, i, j: -(empty[j] + 0) <= 0, backend="cpu")


def test_nothing_outside_of_a_table_is_read():
    """An operator that is called with another table than the one its program was made for."""
    q, k, v = (x.detach() for x in tensors(torch.float32))
    traced = trace_score_mod(lambda s, b, h, i, j: s + TABLE[h, i - j + N])
    shape = Shape(B, H, M, N)
    lowered = lower(traced.program, None, traced.tensors, shape, torch.float32, Begin())
    run = torch.ops.fastattn.attention
    room = torch.full((5,), 2.0)
    t, o = api.prepare(q, k, v, {})
    t, o = t._replace(captured_floats=room[1:2]), o._replace(score_mod=lowered.text)
    out, _ = run(*arguments(FORWARD, t, o))
    torch.testing.assert_close(out, fastattn.attention(q, k, v))  # 2 is added to each score


LOAD = "captured float:1 int:1\nscore float\ni int\nload"
REFUSED = {
    "no programs": ("nothing", "programs"),
    "an unknown operator": ("captured float:1 int:1\nread float 0\n\n\n\n", "value 0"),
    "a mask that is no bool": ("\n\ncaptured float:1 int:1\ni int\n\n", "expected bool"),
    "other captured tensors": ("captured float:2 int:1\nscore float\n\n\n\n", "expected"),
    "a mask that reads the score": (
        "\n\ncaptured float:1 int:1\nscore float\nto_bool bool 0\n\n",
        "reads the score",
    ),
    # Kernels clamp indices to a table: there must be one.
    "a load of no floats": (f"{LOAD} float @0 1\nadd float 0 2\n\n\n\n", "captured"),
    "a load of no ints": (
        f"{LOAD} int @1 1\nto_float float 2\nadd float 0 3\n\n\n\n",
        "captured",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operators_refuse_other_texts(case):
    text, said = REFUSED[case]
    q, k, v = tensors(torch.float32, grad=False)
    with pytest.raises(ValueError, match=said):
        t, o = api.prepare(q, k, v, {})
        torch.ops.fastattn.attention(*arguments(FORWARD, t, o._replace(score_mod=text)))


def test_programs_of_a_call_as_text():
    traced = trace_score_mod(lambda s, b, h, i, j: s + TABLE[h, i - j + N])
    shape = Shape(B, H, M, N)
    text = lower(traced.program, None, traced.tensors, shape, torch.float32, Begin()).text
    assert ModText.parse(text).text() == text
