"""Packed batches in Triton's kernels: the tiles used on GPUs, tensor descriptors, and unchecked
offsets, which kernels on a GPU clamp."""

import pytest
import torch

from fastattn.backends.triton import job
from tests.semantics.test_packed import FEW, HOSTILE, batch, clamped, everywhere
from tests.support.backends import INTERPRETED, every_backend, passed
from tests.support.cases import DTYPES, FEATURE, PLAIN, name_of

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
    """On sm_90 a tensor descriptor ends with its sequence. With lengths, keys past a length are
    NaN."""
    monkeypatch.setattr(job, "architecture", lambda device: arch)
    made = batch(features, DTYPES["bfloat16"], SIZES)
    passed(everywhere(name, made))


@every_backend
@pytest.mark.parametrize("arch", [80, 90])
def test_few_rows_are_those_of_a_key_head(name, arch, monkeypatch):
    """For few rows, keys are split, and the rows of all heads of a key head form one tile."""
    monkeypatch.setattr(job, "architecture", lambda device: arch)
    split, own = [], job.Job.decode
    monkeypatch.setattr(job.Job, "decode", lambda *args: split.append(args[-1]) or own(*args))
    features = [FEATURE[x] for x in ("gqa", "bottom_right", "lengths")]
    made = batch(features, torch.float16, tuple((m, 3 * n) for m, n in FEW))
    passed(everywhere(name, made))
    assert split and split[0] > 1


@every_backend
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_offsets_are_clamped(name, kind, causal, monkeypatch):
    """The memory around rows and keys is NaN."""
    monkeypatch.setattr(job, "check_values", lambda spec, t: None)
    options = dict(causal=causal, backend=name)
    for found, meant in clamped(kind, torch.float32, **options):
        assert found.isfinite().all() and torch.equal(found, meant)
