"""On a GPU: a score_mod and a mask_mod, in every pass. The oracle is the same call in float64 on
the CPU."""

import pytest
import torch

import fastattn
from tests.support.gpu import BACKENDS, DEVICE, on_gpu

pytestmark = [*on_gpu, pytest.mark.skipif(bool(BACKENDS["triton"]), reason=str(BACKENDS["triton"]))]

B, H, D = 2, 4, 64
DTYPES = {"float32": (torch.float32, 2e-5), "bfloat16": (torch.bfloat16, 2e-2)}


def functions(length, device, dtype=torch.float32):
    """Functions for calls of at most so many rows and keys, with captured tensors on the device."""
    draw = torch.Generator().manual_seed(3)
    drawn = torch.randn(H, 2 * length, generator=draw), torch.rand(H, generator=draw)
    table, slopes = (x.to(torch.bfloat16).to(device, dtype) for x in drawn)
    documents = (torch.arange(length) // 50).to(device)
    lengths = torch.tensor([length - 20, length // 2], device=device)

    def bent(s, b, h, i, j):
        far = torch.exp(-(i - j).abs() / 9.0) + torch.sin(slopes[h] * j) + ((i - j) // 3 % 7) * 0.1
        # |s| ** 1.5 has no second derivative at 0: near it, rounding of s changes results by 2%.
        return 5 * torch.tanh((s + far) / 5) + torch.sigmoid(s) * (s * s + 0.1) ** 0.75

    return {
        "relative": dict(score_mod=lambda s, b, h, i, j: s + table[h, i - j + length - 1]),
        "slopes": dict(score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i) / 9),
        "bent": dict(score_mod=bent),
        "documents": dict(
            mask_mod=lambda b, h, i, j: (documents[i] == documents[j]) & (j < lengths[b])
        ),
        "both": dict(score_mod=bent, mask_mod=lambda b, h, i, j: (i - j).abs() < 40 + 9 * h),
    }


NAMES = tuple(functions(1, "cpu"))


def results(call, device, dtype, rows, keys):
    """The output, the LSE, and the first and second derivatives by q, k and v."""
    draw = torch.Generator().manual_seed(0)
    shapes = (B, H, rows, D), (B, H // 2, keys, D), (B, H // 2, keys, D)
    rounded = [torch.randn(*x, generator=draw).to(torch.bfloat16) for x in shapes]
    q, k, v = (x.to(device, dtype).requires_grad_() for x in rounded)
    moves = [torch.randn(*x, generator=draw).to(device, dtype) for x in shapes]
    out, lse = call(q, k, v)
    if rows < 16:
        return out.detach(), lse.detach()
    loss = out.double().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()
    grads = torch.autograd.grad(loss, (q, k, v), create_graph=True)
    moved = sum((x * y).sum(dtype=torch.float64) for x, y in zip(grads, moves))
    second = torch.autograd.grad(moved, (q, k, v))
    return out.detach(), lse.detach(), *(x.detach() for x in grads), *second


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [200, 3])
def test_every_pass(name, dtype, rows):
    """Out, LSE, gradients and their derivatives, of many rows and of few."""
    (dtype, bound), keys = DTYPES[dtype], 200 if rows > 16 else 700
    given = functions(700, DEVICE)[name]
    exact = functions(700, "cpu", torch.float64)[name]
    q, k = (torch.empty(B, H, n, D, device=DEVICE, dtype=dtype) for n in (rows, keys))
    assert fastattn.explain(q, k, k, **given).backend == "triton"
    found = results(
        lambda *x: fastattn.attention(*x, return_lse=True, **given), DEVICE, dtype, rows, keys
    )
    expected = results(
        lambda *x: fastattn.attention(*x, return_lse=True, **exact),
        "cpu",
        torch.float64,
        rows,
        keys,
    )
    for x, y in zip(found, expected, strict=True):
        scale = 1 + float(y[y.isfinite()].abs().max())
        torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=bound * scale)


@pytest.mark.parametrize("name", ["documents", "both"])
def test_blocks_are_skipped_in_a_long_call(name):
    """With lists of blocks, 4,096 keys: the results of the same mask."""
    n = 4096
    given = functions(n, DEVICE)[name]
    q, k, v = (
        torch.randn(1, H, n, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    b, h, i, j = (torch.arange(x, device=DEVICE) for x in (1, H, n, n))
    mask = given["mask_mod"](b[:, None, None, None], h[:, None, None], i[:, None], j)
    found = [
        fastattn.attention(q, k, v, **given),
        fastattn.attention(q, k, v, **given | dict(mask_mod=None), mask=mask, backend="triton"),
    ]
    grads = [torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in found]
    for x, y in zip((found[0], *grads[0]), (found[1], *grads[1]), strict=True):
        scale = 1 + float(y.detach().float().abs().max())
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=1e-2 * scale)


def test_gradients_of_captured_tensors():
    """The same bits in every run, and those of float64 within rounding."""
    n = 300
    draw = torch.Generator().manual_seed(1)
    sizes = dict(table=(H, 2 * n), of_head=(H,), of_key=(n,), of_row=(n,), buckets=(8, H))
    drawn = {x: torch.randn(size, generator=draw) for x, size in sizes.items()}

    def gradients(device, dtype):
        own = {x: y.to(device, dtype).requires_grad_() for x, y in drawn.items()}

        def score(s, b, h, i, j):
            bent = torch.tanh(s * own["of_head"][h] + own["table"][h, i - j + n])
            near = own["buckets"][((i - j).abs() // 16).clamp(max=7), h]
            return bent + near + own["of_key"][j] * own["of_row"][i]

        def call(q, k, v):
            return fastattn.attention(q, k, v, score_mod=score, causal=True)

        made = torch.Generator().manual_seed(0)
        shapes = (B, H, n, D), (B, H // 2, n, D), (B, H // 2, n, D)
        leaves = [torch.randn(*x, generator=made).to(device, dtype) for x in shapes]
        leaves = [x.requires_grad_() for x in leaves]
        return torch.autograd.grad(call(*leaves).square().sum(), [*own.values(), *leaves])

    found, again = gradients(DEVICE, torch.float32), gradients(DEVICE, torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    for x, y in zip(found, gradients("cpu", torch.float64), strict=True):
        scale = 1 + float(y.abs().max())
        torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=5e-5 * scale)


def test_an_index_out_of_range_is_clamped_and_raises_on_request(monkeypatch):
    short = torch.randn(90, device=DEVICE)
    q = torch.randn(1, H, 100, D, device=DEVICE)
    given = dict(score_mod=lambda s, b, h, i, j: s + short[j])
    clamped = dict(score_mod=lambda s, b, h, i, j: s + short[j.clamp(max=89)])
    assert torch.equal(fastattn.attention(q, q, q, **given), fastattn.attention(q, q, q, **clamped))
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    with pytest.raises(IndexError, match="indexes a captured tensor out of range at a pair"):
        fastattn.attention(q, q, q, **given)
    with pytest.raises(IndexError, match="indexes a captured tensor out of range at a pair"):
        fastattn.attention(q, q, q, mask_mod=lambda b, h, i, j: short[j] > 99)
    hidden = given | dict(mask_mod=lambda b, h, i, j: j < 90)
    assert fastattn.attention(q, q, q, **hidden).isfinite().all()
