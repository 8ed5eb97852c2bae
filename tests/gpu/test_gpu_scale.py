"""On a GPU: long sequences, more than 2^16 heads, offsets past 32 bits, and linear memory."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

import fastattn
from tests.support.backends import declares
from tests.support.cases import Dims, build
from tests.support.gpu import DEVICE, on_device, on_every_backend, on_gpu

pytestmark = on_gpu
GIGABYTE = 1 << 30
BFLOAT16 = torch.bfloat16


def randn(*shape, dtype=BFLOAT16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def need_memory(size):
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < size:
        pytest.skip(f"{size / GIGABYTE:.0f} GB of memory needed, {free / GIGABYTE:.0f} GB free")


# ---------------------------------------------------------------------------------- long sequences


class Exact(NamedTuple):
    """Some rows in float64, and the size of the rounding errors to expect in units of eps.

    Errors of single probabilities are independent, so the error of a sum is about the root of the
    sum of their squares. A lost key exceeds that even if it is one of thousands.
    """

    values: dict
    sizes: dict


def exact_rows(q, k, v, rows, dout=None, causal=False, window=None):
    """out and lse of `rows` (row numbers); with dout, gradients as if dout were 0 elsewhere.

    k and v may have one head for all query heads. Memory is rows x N.
    """
    q, k, v = q[:, :, rows].double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5
    ahead = torch.arange(k.shape[2], device=q.device) - rows[:, None]
    left, right = window or (None, None)
    right = 0 if causal else right
    s = q @ k.mT * scale
    if left is not None:
        s.masked_fill_(ahead < -left, -torch.inf)
    if right is not None:
        s.masked_fill_(ahead > right, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = s.sub_(lse[..., None]).exp_()
    out = p @ v
    values, sizes = dict(out=out, lse=lse), dict(out=root(p, v) + out.abs(), lse=lse.abs() + 1)
    if dout is None:
        return Exact(values, sizes)
    dout = dout[:, :, rows].double()
    dp = dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)
    stored = (dout * out).square().sum(-1, keepdim=True).sqrt()  # out is rounded when stored
    ds = p * (dp - delta)
    spread = p * (dp.abs() + delta.abs() + stored)
    values |= dict(dq=scale * (ds @ k), dk=heads(scale * (ds.mT @ q)), dv=heads(p.mT @ dout))
    sizes |= dict(
        dq=scale * (root(spread, k) + stored * (p @ k).abs()),
        dk=heads(scale * root(spread.mT, q)),
        dv=heads(root(p.mT, dout)),
    )
    return Exact(values, {x: size + values[x].abs() for x, size in sizes.items()})


def root(a, b):
    return (a.square() @ b.square()).sqrt()


def heads(x):
    """The sum over the query heads of one key head."""
    return x.sum(1, keepdim=True)


def close(found, exact, what, dtype, n):
    if what == "lse":  # sums over every key: 64 lost keys of 131,072 exceed this tenfold
        eps, units = torch.finfo(torch.float32).eps, 32
    else:  # float32 sums round too: n additions err by the root of n
        eps, units = torch.finfo(dtype).eps, 4 if dtype.itemsize == 2 else 16 + n**0.5 / 2
    error = (found.double() - exact.values[what]).abs()
    over = ~(error <= units * eps * exact.sizes[what] + 1e-30)
    assert not over.any(), (
        f"{what}: {int(over.sum())} of {over.numel()} over, the worst error {error.max():.3g}, "
        f"first at {over.nonzero()[0].tolist()}"
    )


# Whole tiles of 128; 512 tiles and 65 rows; 1024 tiles; float32: 128 tiles and 65 rows.
LENGTHS = {"bfloat16": (16_384, 65_601, 131_072), "float32": (16_449,)}
KINDS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(4096, 0)),
    "both_sides": dict(window=(1000, 500)),
}


@pytest.mark.parametrize("dtype, n", [(d, n) for d, ns in LENGTHS.items() for n in ns])
@pytest.mark.parametrize("kind", KINDS)
@on_every_backend
def test_long_sequences(name, kind, dtype, n):
    """Forward of every row; backward with dout at some rows only, so a row skipped there shows."""
    dtype = getattr(torch, dtype)
    declares(name, dtype)
    need_memory(12 * GIGABYTE)
    dim = 64 if dtype.itemsize == 2 else 16
    q, k, v = (randn(1, h, n, dim, dtype=dtype, seed=h).requires_grad_() for h in (2, 1, 1))
    out, lse = fastattn.attention(q, k, v, **KINDS[kind], return_lse=True, backend=name)
    leaves = [x.detach() for x in (q, k, v)]
    for start in range(0, n, 1024):
        rows = torch.arange(start, min(start + 1024, n), device=q.device)
        exact = exact_rows(*leaves, rows, **KINDS[kind])
        close(out.detach()[:, :, rows], exact, "out", dtype, n)
        close(lse.detach()[:, :, rows], exact, "lse", dtype, n)
    generator = torch.Generator().manual_seed(n)
    edges = torch.tensor([0, 1, 63, 64, 127, 128, n // 2, n - 129, n - 65, n - 2, n - 1])
    rows = torch.cat([edges, torch.randint(n, (200,), generator=generator)]).unique().to(q.device)
    dout = torch.zeros_like(out)
    dout[:, :, rows] = randn(1, 2, len(rows), dim, dtype=dtype, seed=3)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    exact = exact_rows(*leaves, rows, dout, **KINDS[kind])
    close(dq[:, :, rows], exact, "dq", dtype, n)
    close(dk, exact, "dk", dtype, n)
    close(dv, exact, "dv", dtype, n)
    others = torch.ones(n, dtype=torch.bool, device=q.device)
    others[rows] = False
    assert not dq[:, :, others].any(), "rows without an incoming gradient"


@on_every_backend
@pytest.mark.parametrize("m", [1, 16])
def test_long_decoding(name, m):
    n = 131_072
    q, k, v = (randn(1, *x, 64, seed=x[0]) for x in ((8, m), (1, n), (1, n)))
    options = dict(causal="bottom_right", return_lse=True, backend=name)
    out, lse = fastattn.attention(q, k, v, **options)
    for i in range(m):  # row i of the last m rows sees n - m + i + 1 keys
        keys = n - m + i + 1
        row = torch.zeros(1, dtype=torch.int64, device=q.device)
        exact = exact_rows(q[:, :, i : i + 1], k[:, :, :keys], v[:, :, :keys], row)
        close(out[:, :, i : i + 1], exact, "out", BFLOAT16, n)
        close(lse[:, :, i : i + 1], exact, "lse", BFLOAT16, n)


# -------------------------------------------------------------------------------------- many heads


@on_every_backend
@pytest.mark.parametrize("batch, heads", [(70_000, 1), (1, 70_000), (300, 300)])
@pytest.mark.parametrize("m, n", [(1, 1), (3, 2), (2, 3)])
def test_more_heads_than_16_bits(name, batch, heads, m, n):
    leaves = [randn(batch, heads, x, 16, seed=x + 7).requires_grad_() for x in (m, n, n)]
    out = fastattn.attention(*leaves, causal="bottom_right", backend=name)
    dout = randn(*out.shape, seed=1)
    grads = torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = fastattn.reference.attention(*exact, causal="bottom_right")
    wanted = torch.autograd.grad(want, exact, dout.double())
    for found, right in zip((out, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=0.03, atol=0.15)
        assert (found.double() - right).abs().mean() < 0.01


@on_every_backend
def test_few_keys_many_rows(name):
    """One key, a million causal rows: the number of programs sharing the cache exceeds 32 bits."""
    m = 1 << 20
    q, k, v = randn(2, 2, 1, 16).expand(2, 2, m, 16), randn(2, 2, 1, 16), randn(2, 2, 1, 16)
    out = fastattn.attention(q, k, v, causal=True, backend=name)
    assert torch.equal(out, v.expand_as(out))


# ---------------------------------------------------------------------------------- past 32 bits

# Strides of q, k, v, dout as (B, H, rows, 64), and of the mask; only "items" has B > 1.
FAR = {
    "heads": ((0, (1 << 31) + 8, 64, 1), (0, (1 << 31) + 8, 129, 1)),
    "items": (((1 << 30) + 8, 1 << 14, 64, 1), ((1 << 30) + 8, 1 << 15, 129, 1)),  # of three
    "rows": ((0, 1 << 13, (1 << 24) + 8, 1), (0, 1 << 15, (1 << 24) + 8, 1)),  # of 129
    "columns": ((0, 64, 1 << 10, 1 << 25), (0, 256, 1 << 10, 1 << 24)),  # of 64, of 129
}


@on_every_backend
@pytest.mark.parametrize("far", FAR)
def test_strides_past_32_bits(name, far):
    """Elements 2^31 apart, by one stride or by a multiple of it, in every input."""
    need_memory(6 * GIGABYTE)
    near = on_device(build(Dims(3 if far == "items" else 1, 2, 2, 129, 129, 64, 64), (), BFLOAT16))
    near.kwargs["mask"] = randn(near.q.shape[0], 2, 129, 129)
    near.needs_grad += ("mask",)
    memory = torch.empty((1 << 31) + (1 << 26), dtype=BFLOAT16, device=DEVICE)

    def spread(at, x, strides):
        return memory.as_strided(x.shape, strides, at << 20).copy_(x)

    inputs, mask = FAR[far]
    found = replace(
        near,
        **{x: spread(at, getattr(near, x), inputs) for at, x in enumerate(("q", "k", "v", "dout"))},
        kwargs=dict(mask=spread(4, near.kwargs["mask"], mask)),
    ).run(fastattn.attention, backend=name)
    for what, value in near.run(fastattn.attention, backend=name).items():
        # Not bitwise: a tensor descriptor may be able to read one layout and not the other.
        torch.testing.assert_close(found[what], value, rtol=2e-2, atol=2e-2, msg=what)


@on_every_backend
def test_output_past_32_bits(name):
    """An output of over 2^31 elements, from one expanded query row and one key."""
    m = (1 << 25) + 65
    need_memory(14 * GIGABYTE)
    q = randn(1, 1, 1, 64).expand(1, 1, m, 64)
    k, v = randn(1, 1, 1, 64, seed=1), randn(1, 1, 1, 64, seed=2)
    out = fastattn.attention(q, k, v, backend=name)
    assert out.numel() > 1 << 31
    for start in range(0, m, 1 << 22):
        part = out[:, :, start : start + (1 << 22)]
        assert torch.equal(part, v.expand_as(part)), start


@on_every_backend
def test_weights_past_32_bits(name):
    n = 46_400
    need_memory(14 * GIGABYTE)
    q, k = randn(1, 1, n, 16), randn(1, 1, n, 16, seed=1)
    weights = fastattn.attention_weights(q, k, causal=True, backend=name)
    assert weights.numel() > 1 << 31
    for row in (0, 1, n // 2, n - 2, n - 1):
        scores = q[0, 0, row].double() @ k[0, 0, : row + 1].double().mT / 4
        want = torch.softmax(scores, 0)
        found = weights[0, 0, row].double()
        torch.testing.assert_close(found[: row + 1], want, rtol=2e-2, atol=1e-7)
        assert not found[row + 1 :].any()


# ------------------------------------------------------------------------------------------ memory


def peak(kind, n, name):
    """Bytes that the call adds at its peak, results included."""
    grad = kind in ("backward", "everything")
    leaves = [randn(1, 8, n, 64, seed=x).requires_grad_(grad) for x in range(3)]
    q, k, v = leaves
    kwargs = dict(backend=name)
    if kind in ("dropout", "everything"):
        kwargs |= dict(dropout_p=0.1, seed=1)
    if kind == "padding":
        kwargs |= dict(mask=torch.rand(1, 1, 1, n, device=DEVICE) < 0.9)
    if kind == "everything":
        bias = randn(1, 1, 1, n, seed=5).requires_grad_()
        leaves.append(bias)
        kwargs |= dict(mask=bias, causal=True, softcap=9.0, window=(n // 2, None))
    dout = randn(1, 8, n, 64, seed=4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = fastattn.attention(q, k, v, **kwargs)
    grads = torch.autograd.grad(out, leaves, dout) if grad else ()
    torch.cuda.synchronize()
    del out, grads
    return torch.cuda.max_memory_allocated() - before


@on_every_backend
@pytest.mark.parametrize("kind", ["forward", "dropout", "padding", "backward", "everything"])
def test_peak_memory_is_linear(name, kind):
    peak(kind, 256, name)
    found = [peak(kind, n, name) for n in (4096, 8192, 16_384)]
    assert found[0] >= 8 * 4096 * 64 * 2, "the measurement sees at least the output"
    for small, large in pairwise(found):
        assert large <= 2.2 * small, f"{[x >> 10 for x in found]} KB"


@on_every_backend
@pytest.mark.parametrize("m", [1, 16])
def test_memory_of_decoding(name, m):
    """The partial results of the splits are small compared with the keys."""
    n = 131_072
    q, k, v = (randn(1, *x, 64) for x in ((8, m), (1, n), (1, n)))
    fastattn.attention(q, k, v, backend=name)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fastattn.attention(q, k, v, backend=name)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 2 * n * 64 * 2, f"{extra >> 10} KB"
