"""Packed batches in Triton's kernels: the tiles that GPUs get, tensor descriptors, and offsets that
nobody checked, which a GPU's kernels clamp."""

import pytest
import torch
from cases import DTYPES, FEATURE, PLAIN, name_of
from runners import INTERPRETED, every_backend, passed
from slices import inside_nan
from test_packed import FEW, batch, everywhere

import fastattn
from fastattn.backends import triton as backend

pytestmark = pytest.mark.usefixtures("one_thread")
if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)

SIZES = ((5, 7), (0, 3), (70, 150), (3, 0), (130, 64))
BUSY = tuple(
    map(FEATURE.get, ("lengths", "bottom_right", "alibi", "bias_grad", "sinks", "dropout"))
)


@every_backend
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("features", [PLAIN, BUSY], ids=name_of)
def test_tiles_of_a_gpu(name, arch, features, monkeypatch):
    """On sm_90 a descriptor ends where a sequence does; what follows of its neighbours is NaN where
    there are lengths."""
    monkeypatch.setattr(backend, "architecture", lambda device: arch)
    made = batch(features, DTYPES["bfloat16"], SIZES)
    passed(everywhere(name, made))


@every_backend
@pytest.mark.parametrize("arch", [80, 90])
def test_few_rows_are_those_of_a_key_head(name, arch, monkeypatch):
    """The keys of each are split, and rows of all heads make one tile."""
    monkeypatch.setattr(backend, "architecture", lambda device: arch)
    split, own = [], backend.Job.decode
    monkeypatch.setattr(backend.Job, "decode", lambda *args: split.append(args[-1]) or own(*args))
    features = [FEATURE[x] for x in ("gqa", "bottom_right", "lengths")]
    made = batch(features, torch.float16, tuple((m, 3 * n) for m, n in FEW))
    passed(everywhere(name, made))
    assert split and split[0] > 1


# Offsets of 12 rows and 20 keys, and what is made of them.
HOSTILE = {
    "below": ((-3, 5, 12), (-(2**40), 9, 20), (0, 5, 12), (0, 9, 20)),
    "beyond": ((0, 5, 2**40), (0, 9, 21), (0, 5, 12), (0, 9, 20)),
    "all beyond": ((0, 12, 99, 2**33), (0, 20, 30, 40), (0, 12, 12, 12), (0, 20, 20, 20)),
    "falling": ((0, 12, 3), (0, 20, -5), (0, 12, 12), (0, 20, 20)),
    "too long": ((0, 12), (0, 20), (0, 8), (0, 15)),  # for max_q = 8 and max_k = 15
}


@every_backend
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_offsets_are_clamped(name, kind, causal, monkeypatch):
    """Around rows and keys lies NaN."""
    monkeypatch.setattr(backend, "check_values", lambda spec, t: None)
    draft = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 2, n, 16, generator=draft) for n in (12, 20, 20)]
    q, k, v = (inside_nan(x)[0].transpose(0, 1).requires_grad_() for x in leaves)
    *given, rows, keys = map(torch.tensor, HOSTILE[kind])
    most = dict(max_q=8, max_k=15) if kind == "too long" else dict(max_q=12, max_k=20)
    options = dict(causal=causal, backend=name, return_lse=True, **most)

    def attention(cu_q, cu_k):
        results = fastattn.attention_packed(q, k, v, cu_q, cu_k, **options)
        loss = sum(x[: rows.max()].square().sum() for x in results)
        grads = torch.autograd.grad(loss, (q, k, v))
        ends = (rows, rows, rows, keys, keys)
        return [x[: end.max()] for x, end in zip((*results, *grads), ends, strict=True)]

    for found, meant in zip(attention(*given), attention(rows, keys), strict=True):
        assert found.isfinite().all() and torch.equal(found, meant)
