"""On a GPU: layouts of results, values that may not be read, sizes of 0.

The cases, the oracle and the error budget are those of the CPU tests. The oracle runs on the CPU.
"""

import pytest
import torch

import fastattn
from fastattn.backends.native.cuda import lacks_sm_90
from tests.support.backends import declares
from tests.support.cases import (
    FEATURE,
    PLAIN,
    Dims,
    square,
)
from tests.support.gpu import (
    BACKENDS,
    DIM,
    DTYPES,
    EVERYTHING,
    attend,
    build,
    every_dtype,
    on_device,
    on_every_backend,
    on_gpu,
)

pytestmark = on_gpu


def shapes(dtype):
    """Sizes below one large block, and sizes of several blocks; none is a multiple of a block."""
    dim = DIM[dtype]
    return square(2, 2, 97, dim), Dims(2, 2, 2, 129, 331, dim, dim)


def test_fused_kernels_are_here():
    """On a GPU that the kernels support, missing kernels are a failure, not a skip."""
    if torch.cuda.get_device_capability() < (7, 5):
        pytest.skip("the kernels need compute capability 7.5 or newer")
    assert None in BACKENDS.values(), BACKENDS
    absent = [why for why in BACKENDS.values() if why]
    known = ("not installed", "not built", "needs compute capability 8.0")  # CUDA C++ on a T4
    assert all(any(x in why for x in known) for why in absent), absent
    q = torch.zeros(1, 1, 3, 16, device="cuda", dtype=torch.bfloat16)
    assert fastattn.explain(q, q, q).backend in BACKENDS


@pytest.mark.skipif(bool(BACKENDS["cuda"]), reason=f"cuda: {BACKENDS['cuda']}")
def test_kernels_of_sm_90_serve():
    """On a GPU that has them: no check, no driver and no address keeps them from a plain call."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of sm_90 need compute capability 9.0")
    if why := lacks_sm_90():
        pytest.skip(f"the library has no kernels of sm_90: {why}")
    for dim in (64, 128):
        x = torch.randn(1, 2, 300, dim, device="cuda", dtype=torch.bfloat16)
        kernels = fastattn.explain(x, x, x, backend="cuda").kernels
        assert kernels["forward"] == "sm_90", kernels


# ------------------------------------------------------------------------------------ memory


@on_every_backend
@pytest.mark.parametrize("features", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_results_have_the_documented_layout(name, features):
    """out and gradients lie as (B,M,H,D) on the inputs' device; return_lse changes no bit."""
    problem = on_device(build(shapes("bfloat16")[0], features, torch.bfloat16))
    found = attend(problem, name)
    for what in ("out", "dq", "dk", "dv"):
        assert found[what].transpose(1, 2).is_contiguous(), what
        assert found[what].device == problem.q.device, what
    kwargs = problem.kwargs | dict(return_lse=True)
    with torch.no_grad():
        out, lse = fastattn.attention(problem.q, problem.k, problem.v, **kwargs, backend=name)
    assert torch.equal(out, found["out"])
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == out.shape[:3]


# A kernel may start a block of keys that no row sees: it must not multiply its NaN values by 0.
TAILS = {
    "full": {},
    "bottom_right": dict(causal="bottom_right"),
    "left": dict(window=(5, None)),
    "softcap": dict(causal="bottom_right", window=(70, None), softcap=3.0),
    "dropout": dict(causal=True, dropout_p=0.3, seed=5),
}


@every_dtype
@on_every_backend
@pytest.mark.parametrize("kind", TAILS)
@pytest.mark.parametrize("m", [3, 129])
def test_keys_past_the_end_are_never_read(name, dtype, kind, m):
    """Values past the lengths change no bit of the results, and their gradients are 0."""
    declares(name, DTYPES[dtype])
    lengths, dim = [0, 1, 65, 330], DIM[dtype]
    first = None
    for garbage in (0.0, torch.nan, torch.inf, -3e4):
        problem = build(Dims(4, 4, 2, m, 330, dim, dim), (), DTYPES[dtype])
        problem.kwargs |= dict(key_lengths=torch.tensor(lengths), **TAILS[kind])
        for b, length in enumerate(lengths):
            problem.k[b, :, length:] = garbage
            problem.v[b, :, length:] = garbage
        found = attend(on_device(problem), name)
        for b, length in enumerate(lengths):
            assert not found["dk"][b, :, length:].any(), (garbage, b)
            assert not found["dv"][b, :, length:].any(), (garbage, b)
        assert not found["out"][0].any() and not found["dq"][0].any(), "an empty item"
        first = first or found
        for what, value in found.items():
            assert value.isfinite().all(), (garbage, what)
            assert torch.equal(value, first[what]), (garbage, what)


@every_dtype
@on_every_backend
def test_a_packed_neighbour_changes_no_bit(name, dtype):
    """Tiles of the first sequence reach into the second."""
    declares(name, DTYPES[dtype])
    first = None
    for garbage in (1.0, torch.nan, torch.inf):
        g = torch.Generator().manual_seed(0)
        leaves = [torch.randn(150, 2, DIM[dtype], generator=g).to(DTYPES[dtype]) for _ in range(3)]
        for x in leaves:
            x[70:] = garbage
        leaves = [x.cuda().requires_grad_() for x in leaves]
        cu = torch.tensor([0, 70, 150], dtype=torch.int32, device="cuda")
        out = fastattn.attention_packed(*leaves, cu, cu, backend=name)
        grads = torch.autograd.grad(out[:70].float().sum(), leaves)
        found = [x[:70] for x in (out, *grads)]
        first = first or found
        assert all(map(torch.equal, first, found)), garbage


def nothing_to_see(m, n, dtype):
    """(arguments that hide all keys from some rows, which rows these are), for several features."""
    hidden = torch.zeros(m, n, dtype=torch.bool)
    hidden[m // 3 : m // 2] = True
    yield dict(mask=~hidden), hidden.all(-1)
    yield dict(mask=torch.zeros(m, n, dtype=dtype).masked_fill(hidden, -torch.inf)), hidden.all(-1)
    yield dict(causal="bottom_right"), torch.arange(m) < m - n
    yield dict(window=(2, 2)), torch.arange(m) > n + 1
    yield dict(key_lengths=torch.zeros(1, dtype=torch.int64)), torch.ones(m, dtype=torch.bool)


@every_dtype
@on_every_backend
@pytest.mark.parametrize("sizes", [(7, 4), (150, 131), (16, 700)], ids=str)
def test_rows_with_nothing_to_attend_to(name, dtype, sizes):
    """Output exactly 0, LSE -inf, gradients exactly 0 from those rows and finite everywhere."""
    declares(name, DTYPES[dtype])
    m, n = sizes
    for kwargs, empty in nothing_to_see(m, n, DTYPES[dtype]):
        problem = build(
            Dims(1, 2, 2, m, n, *[DIM[dtype]] * 2), (FEATURE["lse_loss"],), DTYPES[dtype]
        )
        problem.kwargs |= kwargs
        problem.dlse.fill_(1)
        found = attend(on_device(problem), name)
        empty = empty.to(found["out"].device)
        case = str(list(kwargs))
        assert not found["out"][:, :, empty].any(), case
        assert (found["lse"][:, :, empty] == -torch.inf).all(), case
        assert found["lse"][:, :, ~empty].isfinite().all(), case
        assert not found["dq"][:, :, empty].any(), case
        assert all(found[x].isfinite().all() for x in ("out", "dq", "dk", "dv")), case


@every_dtype
@pytest.mark.parametrize("softcap", [None, 3.0])
@on_every_backend
def test_infinite_key_leaves_other_gradients_finite(name, dtype, softcap):
    """Tile rows and keys past the last compute 0 * inf = NaN, which may not reach any sum."""
    declares(name, DTYPES[dtype])
    problem = build(Dims(1, 1, 1, 5, 9, *[DIM[dtype]] * 2), (), DTYPES[dtype])
    problem.q.abs_(), problem.dout.fill_(1)
    problem.k[0, 0, 3] = -torch.inf
    problem.kwargs |= dict(softcap=softcap, mask=torch.zeros(1, 1, 1, 9, dtype=DTYPES[dtype]))
    problem.needs_grad = ("k", "v", "mask")
    found = attend(on_device(problem), name)
    assert all(x.isfinite().all() for x in found.values())


@every_dtype
@on_every_backend
def test_nan_query_stays_in_its_row(name, dtype):
    declares(name, DTYPES[dtype])
    problem = on_device(build(shapes(dtype)[1], (), DTYPES[dtype]))
    for kwargs in ({}, dict(causal=True), dict(softcap=3.0), dict(window=(9, 0))):
        tensors = problem.q, problem.k, problem.v
        clean = fastattn.attention(*tensors, **kwargs, backend=name)
        spoiled = problem.q.clone()
        spoiled[0, 1, 37, 5] = torch.nan
        out, lse = fastattn.attention(
            spoiled, *tensors[1:], **kwargs, return_lse=True, backend=name
        )
        assert out[0, 1, 37].isnan().all() and lse[0, 1, 37].isnan(), kwargs
        out[0, 1, 37] = clean[0, 1, 37]
        assert torch.equal(out, clean), kwargs


EMPTY = {
    "no_batch": Dims(0, 2, 2, 3, 4, 5, 6),
    "no_heads": Dims(2, 0, 0, 3, 4, 5, 6),
    "no_queries": Dims(2, 2, 2, 0, 4, 5, 6),
    "no_keys": Dims(2, 2, 2, 3, 0, 16, 16),
    "no_values": Dims(2, 2, 2, 3, 4, 16, 0),
    "no_dims": Dims(2, 2, 2, 3, 4, 0, 16),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_backend
@pytest.mark.parametrize("dims", EMPTY.values(), ids=EMPTY)
def test_sizes_of_zero(name, dtype, dims):
    declares(name, DTYPES[dtype])
    problem = build(dims, (FEATURE["lse_loss"],), DTYPES[dtype])
    found = on_device(problem).run(fastattn.attention, backend=name, scale=1.0)
    exact = problem.to(torch.float64).run(fastattn.reference.attention, scale=1.0)
    for what, value in found.items():
        tolerance = dict(rtol=0, atol=16 * torch.finfo(DTYPES[dtype]).eps)
        torch.testing.assert_close(value.cpu().double(), exact[what], **tolerance, msg=what)
