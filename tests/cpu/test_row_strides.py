"""The distance of rows does not change a bit. Where it puts rows in the same places of a cache, the
kernels for AVX2 copy them (`collide` in product.h), behind each other or with a gap."""

import pytest
import torch

import fastattn
from tests.support.backends import on_variants

GAP = 24  # numbers between rows; no row collides with another


def tensors(dtype, d, dv, gap):
    """q, k, v and the gradient of the output, of four heads side by side in each row."""
    generator = torch.Generator().manual_seed(d)
    for n, width in ((100, d), (150, d), (150, dv), (100, dv)):
        x = torch.randn(2, n, 4, width, generator=generator, dtype=dtype)
        rows = torch.zeros(2, n, 4 * width + gap, dtype=dtype)
        at = rows[..., : 4 * width].unflatten(-1, (4, width))
        at.copy_(x)
        yield at.transpose(1, 2)


def results(dtype, d, dv, gap):
    """The output, its gradients, their gradients, and a tangent."""
    *given, dout = tensors(dtype, d, dv, gap)
    given = [x.requires_grad_() for x in given]
    dout.requires_grad_()
    out = fastattn.attention(*given, causal=True, backend="cpu")
    first = torch.autograd.grad(out, given, dout, create_graph=True)
    second = torch.autograd.grad(first, [*given, dout], [x.detach() for x in given])
    q, k, v = (x.detach() for x in given)
    _, tangent = torch.func.jvp(
        lambda *x: fastattn.attention(*x, causal=True, backend="cpu"), (q, k, v), (q, k, v)
    )
    return [x.detach() for x in (out, *first, *second, tangent)]


@pytest.mark.parametrize("d, dv", [(100, 100), (256, 256), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_distance_of_rows_changes_no_bit(dtype, d, dv, one_thread):
    for isa in on_variants("cpu"):
        for x, y in zip(results(dtype, d, dv, 0), results(dtype, d, dv, GAP)):
            assert x.isfinite().all() and torch.equal(x, y), isa


def test_forward_mode_stays_within_its_memory(one_thread):
    """It once copied values to rows that had no room, and the allocator ended the process."""
    q, k, v = (
        torch.randn(1, 2, n, d, dtype=torch.float64) for n, d in ((40, 64), (128, 64), (128, 128))
    )
    for _ in range(20):
        torch.func.jvp(lambda *x: fastattn.attention(*x, backend="cpu"), (q, k, v), (q, k, v))
