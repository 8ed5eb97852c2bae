"""Calls that find what new GPU kernels likely get wrong, on a GPU or the emulator."""

from dataclasses import replace

import torch

import fastattn
from tests.support.cases import FEATURE, Dims, build

# Kernels are compiled for these head dims; for calls in between they are padded.
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
EVERYTHING = tuple(
    FEATURE[name]
    for name in ("causal", "softcap", "alibi", "key_bias_grad", "sinks", "dropout", "lse_loss")
)


def small_shapes(d, dv, dtype, rows=67, keys=83):
    """Problems of few tiles for each kernel of a head dim: plain, with a band, with all features, a
    few rows on many keys; grouped heads, lengths."""
    dims = Dims(1, 2, 1, rows, keys, d, dv)
    causal, lengths = FEATURE["causal"], replace(FEATURE["lengths"], dims=lambda x: replace(x, B=4))
    return [
        build(dims, (), dtype),
        build(dims, (causal, FEATURE["lse_loss"]), dtype),
        build(replace(dims, M=keys, N=keys), (lengths,), dtype),
        build(dims, EVERYTHING, dtype),
        build(replace(dims, M=3, N=2 * keys), (causal,), dtype),
    ]


def awkward_tensors(dtype):
    """Problems that TMA cannot copy: head dims that are not whole eights, and tensors that are not
    at multiples of 16 bytes."""
    dims = Dims(1, 2, 2, 70, 90, 64, 64)
    found = [build(replace(dims, D=60), (), dtype), build(replace(dims, Dv=61), (), dtype)]
    for name in ("q", "k", "v", "dout"):
        problem = build(dims, (), dtype)
        x = getattr(problem, name)
        apart = torch.full((*x.shape[:3], 68), torch.nan, dtype=dtype)
        apart[..., 1:65] = x
        found.append(replace(problem, **{name: apart[..., 1:65]}))
    return found


def behind_lengths(dtype, rows=70):
    """(garbage, problem): the same call with other numbers behind the lengths of its keys. All have
    the same results, to the bit. Packed neighbours are behind a sequence's end, too."""
    lengths = torch.tensor([0, 1, 65, 90])
    for garbage in (0.0, torch.nan, torch.inf, -3e4):
        problem = build(Dims(4, 2, 2, rows, 90, 64, 64), (), dtype)
        problem.kwargs["key_lengths"] = lengths
        for b, length in enumerate(lengths.tolist()):
            problem.k[b, :, length:] = problem.v[b, :, length:] = garbage
        yield garbage, problem


def packed_beside(garbage, dtype, device, backend=None):
    """The results of the first of two packed sequences: what is in the second must not matter."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(150, 2, 64, generator=g).to(dtype) for _ in range(3))
    q[70:] = k[70:] = v[70:] = garbage
    q, k, v = (x.to(device).requires_grad_() for x in (q, k, v))
    cu = torch.tensor([0, 70, 150], dtype=torch.int32, device=device)
    out = fastattn.attention_packed(q, k, v, cu, backend=backend)
    out[:70].float().sum().backward()
    return [x.detach()[:70] for x in (out, q.grad, k.grad, v.grad)]


def different(first, found):
    """The names of results that have other bits."""
    return [name for name, x in found.items() if not torch.equal(x, first[name])]
