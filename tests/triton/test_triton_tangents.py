"""Triton's passes that take tangents: the tiles used on GPUs, results that are not requested, and
tangents of hidden values. test_tangents has the tests for every backend."""

from dataclasses import replace

import pytest
import torch

from fastattn.backends.triton import job
from tests.support.backends import INTERPRETED, every_backend, looked_at, passed
from tests.support.cases import DTYPES, FEATURE, Dims, build, square
from tests.support.tangents import complaints, directions, exact, passes

pytestmark = pytest.mark.usefixtures("one_thread")
if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)


def named(names):
    return tuple(FEATURE[x] for x in names.split("+") if x != "plain")


def wrong(problem, known=True):
    given = directions(problem)
    return complaints("triton", problem, exact(problem, *given), given, known=known)


@every_backend
@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("dim", [24, 72, 130])
@pytest.mark.parametrize("names", ["plain", "causal+softcap+bias_grad+dropout+gqa"])
def test_tiles_of_a_gpu(name, names, dim, arch, monkeypatch):
    """At head dim 72 on sm_90, dK and dV have separate launches."""
    monkeypatch.setattr(job, "architecture", lambda device: arch)
    passed(wrong(build(Dims(1, 1, 1, 70, 140, dim, dim), named(names), DTYPES["float16"])))


@every_backend
@pytest.mark.parametrize("names", ["bool_mask", "bias_grad+causal"])
def test_masks_whose_structure_forward_uses(name, names):
    """Forward uses the block structure of these masks; the tangent passes read them whole."""
    with looked_at():
        passed(wrong(build(square(1, 2, 37, 7), named(names), torch.float32), known=False))


@every_backend
@pytest.mark.parametrize("needs_grad", ["q", "k", "v", "qv"])
def test_some_gradients_only(name, needs_grad):
    problem = build(square(1, 2, 19, 5), named("gqa"), torch.float32)
    given = directions(problem)
    every = passes("triton", problem, *given)
    found = passes("triton", replace(problem, needs_grad=tuple(needs_grad)), *given)
    for x in needs_grad:
        assert torch.equal(found[f"d{x}_t"], every[f"d{x}_t"])
    assert found.keys() == {"out_t", "lse_t", *(f"d{x}_t" for x in needs_grad)}


def hidden_leaks():
    """True if tangents past the key lengths, or where a mask is -inf, change any result."""
    problem = build(square(4, 1, 21, 5), named("lengths+float_mask"), torch.float32)
    problem = replace(problem, needs_grad=("q", "k", "v", "mask"))
    moves, *incoming = directions(problem)
    calm = passes("triton", problem, moves, *incoming)
    wild = {x: y.clone() for x, y in moves.items()}
    for b, length in enumerate(problem.kwargs["key_lengths"].tolist()):
        wild["k"][b, :, length:], wild["v"][b, :, length:] = torch.nan, torch.inf
        assert not calm["dk_t"][b, :, length:].any() and not calm["dv_t"][b, :, length:].any()
        assert length or not (calm["out_t"][b].any() or calm["lse_t"][b].any())
    wild["mask"][problem.kwargs["mask"] == -torch.inf] = torch.nan
    found = passes("triton", problem, wild, *incoming)
    return not all(torch.equal(found[x], y) and y.isfinite().all() for x, y in calm.items())


@every_backend
def test_hidden_keys_do_not_change_tangents(name):
    assert not hidden_leaks()
