"""score_mod and mask_mod of fastattn.attention and the other calls, beside all other arguments.

The judge is fastattn.reference.attention in float64, with the function on whole tensors.
"""

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.tracing import trace_mask_mod, trace_score_mod

B, H, HK, M, N, D = 2, 4, 2, 33, 41, 16
G = torch.Generator().manual_seed(5)
TABLE = torch.randn(H, M + N, generator=G, dtype=torch.float64)
SLOPES = torch.rand(H, generator=G, dtype=torch.float64)
MASK = torch.randn(H, M, N, generator=G, dtype=torch.float64)


def bent(s, b, h, i, j):
    return torch.tanh(s) * 2 + TABLE[h, i - j + N] * s + b * 0.1


def shown(b, h, i, j):
    return (i + 2 * j + h) % 5 != b


def tensors(M=M, N=N, grad=False, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = (B, H, M, D), (B, HK, N, D), (B, HK, N, D)
    made = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_(grad) for x in made]


def indices(B, H, M, N):
    return {
        name: torch.arange(n).view(-1, *(1,) * (3 - dim))
        for dim, (name, n) in enumerate(zip("bhij", (B, H, M, N)))
    }


def exact(q, k, v, score_mod=bent, mask_mod=shown, mask=None, **arguments):
    sizes = indices(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    whole = {}
    if score_mod is not None:
        traced = trace_score_mod(score_mod, dtype=torch.float64)
        whole["score_mod"] = lambda s: evaluate(*traced, score=s, **sizes)
    if mask_mod is not None:
        seen = evaluate(*trace_mask_mod(mask_mod), **sizes)
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)
    return fastattn.reference.attention(q, k, v, mask=mask, **whole, **arguments)


BESIDE = {
    "nothing": {},
    "causal": dict(causal=True),
    "causal at the bottom right": dict(causal="bottom_right"),
    "a window": dict(window=(9, 4)),
    "key lengths": dict(key_lengths=torch.tensor([17, 41])),
    "softcap": dict(softcap=1.5),
    "slopes": dict(alibi_slopes=SLOPES),
    "a bool mask": dict(mask=MASK > -0.5),
    "a float mask": dict(mask=MASK),
    "sinks": dict(sinks=SLOPES * 3),
    "dropout": dict(dropout_p=0.3, seed=7),
    "a scale": dict(scale=-0.7),
    "all": dict(
        causal=True, key_lengths=torch.tensor([30, 41]), softcap=1.5, alibi_slopes=SLOPES,
        mask=MASK, sinks=SLOPES, dropout_p=0.2, seed=3, scale=0.5,
    ),
}  # fmt: skip
BACKENDS = ["cpu", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("functions", ["both", "score_mod", "mask_mod"])
@pytest.mark.parametrize("name", BESIDE)
def test_every_argument(name, functions, backend, monkeypatch):
    """Out, the LSE, and gradients, with the operators of each backend that runs programs."""
    arguments = BESIDE[name]
    given = tensors(grad=True)
    named = dict(score_mod=bent, mask_mod=shown)
    if functions != "both":
        named = {functions: named[functions]}
    if backend == "reference":  # which takes functions as programs only where they are lowered
        monkeypatch.setattr(api, "runs_programs", lambda *given: True)
    found = fastattn.attention(*given, return_lse=True, backend=backend, **named, **arguments)
    named = {"score_mod": None, "mask_mod": None} | named
    right = exact(*given, return_lse=True, **named, **arguments)

    def grads(out, lse):
        seen = lse > -torch.inf
        return torch.autograd.grad(out.sin().sum() + lse[seen].sum(), given)

    torch.testing.assert_close(
        (*found, *grads(*found)), (*right, *grads(*right)), rtol=1e-7, atol=1e-8
    )


OF_FORMS = {  # score_mods of the forms that are taken apart
    "as it is": lambda s, b, h, i, j: s,
    "a cap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "a bias": lambda s, b, h, i, j: s + TABLE[h, i - j + N],
    "a cap and a bias": lambda s, b, h, i, j: 2 * torch.tanh(s / 2) + (i - j) * 0.1,
    "hidden keys": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "hidden keys and a bias": lambda s, b, h, i, j: torch.where(i >= j, s + j * 0.1, -float("inf")),
}


@pytest.mark.parametrize("form", ["programs", "masks"])
@pytest.mark.parametrize("masked", [False, True], ids=["alone", "mask_mod"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("name", OF_FORMS)
def test_a_softcap_follows_each_form(name, softcap, masked, form, monkeypatch):
    """It is never dropped. -inf is no hidden key for a softcap: it becomes -softcap."""
    if form == "masks":  # as on a GPU
        monkeypatch.setattr(api, "runs_programs", lambda *given: False)
    functions = dict(score_mod=OF_FORMS[name], mask_mod=shown if masked else None)
    given = [x * 3 for x in tensors()]
    try:
        found = fastattn.attention(*given, softcap=softcap, **functions)
    except NotImplementedError as error:
        assert form == "masks" and softcap and name != "as it is", error
        return
    torch.testing.assert_close(found, exact(*given, softcap=softcap, **functions))


@pytest.mark.parametrize("name", ["nothing", "softcap", "all"])
def test_weights(name):
    arguments = BESIDE[name]
    q, k, v = tensors(grad=True)
    found = fastattn.attention_weights(q, k, score_mod=bent, mask_mod=shown, **arguments)
    right = exact(q, k, v, return_weights=True, **arguments)[1]
    torch.testing.assert_close(found, right)
    probe = torch.randn(found.shape, generator=G, dtype=torch.float64)
    of_found = torch.autograd.grad((found * probe).sum(), (q, k))
    of_right = torch.autograd.grad((right * probe).sum(), (q, k))
    torch.testing.assert_close(of_found, of_right)


def test_forward_mode():
    given, moves = tensors(), tensors(seed=1)
    found = fastattn.attention_jvp(*given, *moves, score_mod=bent, mask_mod=shown, causal=True)

    def run(*given):
        return exact(*given, causal=True)

    torch.testing.assert_close(found, torch.func.jvp(run, tuple(given), tuple(moves)))


@pytest.mark.slow
def test_second_derivatives():
    """Of q, k, v and of a captured tensor."""
    q, k, v = (x[:1, :2, :4, :3].detach().requires_grad_() for x in tensors(M=4, N=4))
    table = (TABLE[:, :8] / 3).clone().requires_grad_()

    def run(q, k, v, table):
        def score(s, b, h, i, j):
            return torch.tanh(s * table[h, i]) + table[h, i - j + 3] * s

        return fastattn.attention(q, k, v, score_mod=score, causal=True)

    assert torch.autograd.gradcheck(run, (q, k, v, table))
    assert torch.autograd.gradgradcheck(run, (q, k, v, table))
    moved = torch.func.jvp(lambda x: run(q, k, v, x), (table.detach(),), (table.detach(),))[1]
    h = 1e-6
    ahead = run(q, k, v, table + h * table.detach()) - run(q, k, v, table)
    torch.testing.assert_close(ahead / h, moved, rtol=1e-4, atol=1e-4)


LENGTHS = [(5, 9), (0, 4), (20, 20), (7, 0), (12, 30)]


def packed(grad=False):
    rows, keys = map(torch.tensor, zip(*LENGTHS))
    cu_q, cu_k = (torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]) for x in (rows, keys))
    T, S = int(cu_q[-1]), int(cu_k[-1])
    draw = torch.Generator().manual_seed(4)
    q = torch.randn(T, H, D, generator=draw, dtype=torch.float64)
    k, v = torch.randn(2, S, HK, D, generator=draw, dtype=torch.float64).unbind()
    return [x.requires_grad_(grad) for x in (q, k, v)], cu_q, cu_k


@pytest.mark.parametrize("name", ["nothing", "causal at the bottom right", "softcap"])
def test_packed(name):
    """b counts sequences; i and j count within a sequence."""
    arguments = BESIDE[name]
    (q, k, v), cu_q, cu_k = packed(grad=True)
    table = TABLE.clone().requires_grad_()

    def score(s, b, h, i, j):
        return torch.tanh(s) * 2 + table[h, i - j + N] * s + b * (i - j) * 0.01

    out = fastattn.attention_packed(
        q, k, v, cu_q, cu_k, score_mod=score, mask_mod=shown, **arguments
    )
    parts = []
    for b in range(len(LENGTHS)):
        own = [
            x[cu[b] : cu[b + 1]].transpose(0, 1)[None]
            for x, cu in zip((q, k, v), (cu_q, cu_k, cu_k))
        ]
        given = dict(
            score_mod=lambda s, _, h, i, j, b=b: score(s, torch.tensor(b), h, i, j),
            mask_mod=lambda _, h, i, j, b=b: (i + 2 * j + h) % 5 != b,
        )
        parts.append(exact(*own, **given, **arguments)[0].transpose(0, 1))
    right = torch.cat(parts)
    torch.testing.assert_close(out, right)
    leaves = q, k, v, table
    found = torch.autograd.grad(out.sin().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(right.sin().sum(), leaves))


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_cache(page_size, rows):
    """Rows stand at the end of the keys: i counts the rows of the call."""
    _, k, v = tensors()
    q = tensors(M=rows)[0]
    cache = fastattn.KVCache(B, HK, D, capacity=64, page_size=page_size, dtype=torch.float64)
    cache.append(k, v)
    found = cache.attention(q, score_mod=bent, mask_mod=shown)
    torch.testing.assert_close(found, exact(q, k, v, causal="bottom_right"))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 0, 0)], ids=str)
def test_vmap(in_dims):
    q, k, v = tensors()
    given = [
        torch.stack([x, x * 0.5, -x], 0 if dim is None else dim) if dim is not None else x
        for x, dim in zip((q, k, v), in_dims)
    ]

    def run(q, k, v):
        return fastattn.attention(q, k, v, score_mod=bent, mask_mod=shown)

    found = torch.vmap(run, in_dims)(*given)
    each = [
        run(*(x if dim is None else x.select(dim, at) for x, dim in zip(given, in_dims)))
        for at in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(each))


def test_vmap_over_captured_tensors():
    q, k, v = tensors()
    tables = torch.stack([TABLE, -TABLE])

    def run(table):
        return fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + N])

    torch.testing.assert_close(torch.vmap(run)(tables), torch.stack([run(x) for x in tables]))


def test_per_example_gradients():
    q, k, v = tensors()

    def loss(table, q):
        def score(s, b, h, i, j):
            return s + table[h, i - j + N]

        return fastattn.attention(q, k, v, score_mod=score).sin().sum()

    rows = torch.stack([q, q * 2])
    found = torch.vmap(torch.func.grad(loss), (None, 0))(TABLE, rows)
    each = torch.stack([torch.func.grad(loss)(TABLE, x) for x in rows])
    torch.testing.assert_close(found, each)


def test_rows_are_invariant():
    q, k, v = (x.float() for x in tensors())
    table = TABLE.float()
    functions = dict(
        score_mod=lambda s, b, h, i, j: s + table[h, i - j + N], mask_mod=shown, row_invariant=True
    )
    whole = fastattn.attention(q, k, v, **functions)
    one = fastattn.attention(q[:, :, 7:8], k, v, place=fastattn.Place(row=7), **functions)
    assert torch.equal(one, whole[:, :, 7:8])


def test_autocast():
    given = tensors(dtype=torch.float32)
    table = TABLE.float()
    score = lambda s, b, h, i, j: s + table[h, i - j + N]  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        out = fastattn.attention(*given, score_mod=score)
    expected = fastattn.attention(*(x.bfloat16() for x in given), score_mod=score)
    assert torch.equal(out, expected)


def test_a_mask_where_no_kernel_runs_programs(monkeypatch):
    """As on a GPU: what a function adds to a score, and what it hides, are a mask."""
    monkeypatch.setattr(api, "runs_programs", lambda *given: False)
    given = tensors()
    added = lambda s, b, h, i, j: s + TABLE[h, i - j + N]  # noqa: E731
    for beside in ({}, dict(mask=MASK), dict(mask=MASK > 0), dict(causal=True)):
        found = fastattn.attention(*given, score_mod=added, mask_mod=shown, **beside)
        torch.testing.assert_close(found, exact(*given, score_mod=added, **beside))
    with pytest.raises(NotImplementedError, match="amounts to no mask"):
        fastattn.attention(*given, score_mod=bent)
    with pytest.raises(NotImplementedError, match="amounts to no mask"):
        fastattn.attention(*given, score_mod=added, softcap=2.0)


def test_a_captured_mask_is_a_mask():
    """No copy of it is made, and its gradient goes to its place."""
    given = tensors()
    mask = MASK.clone().requires_grad_()
    out = fastattn.attention(*given, score_mod=lambda s, b, h, i, j: s + mask[h, i, j])
    right = fastattn.attention(*given, mask=mask)
    assert torch.equal(out, right)
    (found,) = torch.autograd.grad(out.sin().sum(), mask)
    assert torch.equal(found, torch.autograd.grad(right.sin().sum(), mask)[0])


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_backends_that_run_no_programs_say_so(backend, monkeypatch):
    monkeypatch.setattr(api, "runs_programs", lambda *given: True)
    with pytest.raises((NotImplementedError, RuntimeError), match="score_mod"):
        fastattn.attention(*tensors(), score_mod=bent, backend=backend)


def test_errors_of_the_tensors_come_first():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="head dim"):
        fastattn.attention(q, k[..., :8], v, score_mod=bent)
    with pytest.raises(TypeError, match="returns a bool"):
        fastattn.attention(q, k, v, mask_mod=lambda b, h, i, j: i - j)
