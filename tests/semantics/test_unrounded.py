"""`Options.acc_dtype_out`: results of 16-bit calls in the accumulation dtype, for parts of a call.

After rounding, they equal the results of the plain call bit for bit.
"""

import pytest
import torch

from fastattn import api
from fastattn.backends import base
from fastattn.call.spec import DIFFERENTIABLE, Feature, Tangents, acc_dtype
from fastattn.call.validation import describe
from fastattn.dispatch import run_pass
from fastattn.dispatch.operation import ATTENTION, BACKWARD, FORWARD, JVP, WEIGHTS
from tests.support.backends import declares, every_backend, not_interpreted, on_variants
from tests.support.cases import DTYPES, FEATURE, SHAPES, Dims, build

pytestmark = pytest.mark.usefixtures("one_thread")

EVERYTHING = "causal left_window lengths alibi softcap bias_grad sinks dropout gqa lse_loss"
CASES = (
    "",
    EVERYTHING,
    "head_bias_grad place wide_values",
    "key_bias_grad one_query gqa",
    "many_queries narrow_values expanded_dout",
)
DIMS = (SHAPES[1], Dims(1, 2, 2, 70, 45, 32, 32))  # head dims of partial and of whole vectors
SIXTEEN = ("bfloat16", "float16")


def run(problem, name, acc_dtype_out):
    """{"out", "normaliser", "dq", ...}; backward gets the rounded out in both cases."""
    given = {x: y for x, y in problem.kwargs.items() if x != "return_lse"}
    t, o = api.prepare(problem.q, problem.k, problem.v, given | dict(backend=name))
    o = o._replace(acc_dtype_out=acc_dtype_out, grad=True)
    out, normaliser = run_pass.run(FORWARD, ATTENTION, t, o)
    dlse = problem.dlse
    grads = problem.dout, None if dlse is None else torch.stack([dlse, torch.zeros_like(dlse)])
    outs = out.to(problem.q.dtype), normaliser
    needs_grad = [x for x in DIFFERENTIABLE if x in problem.needs_grad]
    found = run_pass.run(BACKWARD, ATTENTION, t, o, (grads, outs), needs_grad)
    return dict(out=out, normaliser=normaliser) | {f"d{x}": y for x, y in zip(needs_grad, found)}


@every_backend
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("names", CASES, ids=lambda x: x.replace(" ", "+") or "plain")
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_rounded_they_are_the_plain_ones(name, dtype, names, dims):
    declares(name, DTYPES[dtype], Feature.UNROUNDED)
    problem = build(dims, [FEATURE[x] for x in names.split()], DTYPES[dtype])
    for _ in on_variants(name, DTYPES[dtype]):
        holds(problem, name)


@not_interpreted
@pytest.mark.parametrize("names", CASES[:2], ids=["plain", "everything"])
def test_the_reference_supports_unrounded_outputs(names):
    holds(build(DIMS[0], [FEATURE[x] for x in names.split()], torch.bfloat16), "reference")


def holds(problem, name):
    plain, found = (run(problem, name, acc_dtype_out) for acc_dtype_out in (False, True))
    for x, value in found.items():
        assert value.dtype == acc_dtype(plain[x].dtype), x
        assert torch.equal(value.to(plain[x].dtype), plain[x]), x
    for x in ("out", "dq", "dk", "dv"):
        assert not torch.equal(found[x], plain[x].float()), f"{x} was rounded"


@every_backend
def test_a_wide_out_and_dout_are_taken(name):
    problem = build(DIMS[0], (), torch.bfloat16)
    declares(name, torch.bfloat16, Feature.UNROUNDED)
    t, o = api.prepare(problem.q, problem.k, problem.v, dict(backend=name))
    o = o._replace(acc_dtype_out=True, grad=True)
    for _ in on_variants(name, torch.bfloat16):
        outs = run_pass.run(FORWARD, ATTENTION, t, o)
        each = [
            run_pass.run(BACKWARD, ATTENTION, t, o, ((dout, None), outs), ["q", "k", "v"])
            for dout in (problem.dout, problem.dout.float())
        ]
        assert all(torch.equal(x, y) for x, y in zip(*each))
        # With a gradient of the LSE alone.
        dlse = torch.ones_like(outs[1])
        found = run_pass.run(BACKWARD, ATTENTION, t, o, ((None, dlse), outs), ["v"])
        assert not found[0].any()
        groups = (None, None), outs
        zeros = run_pass.run(BACKWARD, ATTENTION, t, o, groups, ["q"])
        assert zeros[0].dtype == found[0].dtype


@not_interpreted
@pytest.mark.parametrize("names", [CASES[1], "key_bias_grad"])
def test_fake_tensors_have_the_same_layout(names):
    problem = build(DIMS[0], [FEATURE[x] for x in names.split()], torch.bfloat16)
    given = {x: y for x, y in problem.kwargs.items() if x != "return_lse"}
    t, o = api.prepare(problem.q, problem.k, problem.v, given)
    o = o._replace(acc_dtype_out=True, grad=True)
    operator = torch.ops.fastattn.attention
    given = tuple(run_pass.arguments(FORWARD, t, o))
    torch.library.opcheck(operator, given, test_utils="test_faketensor")
    outs = operator(*given)
    needs_grad = [x for x in DIFFERENTIABLE if x in problem.needs_grad]
    back = problem.dout, None, *outs, *t, *o, needs_grad
    torch.library.opcheck(torch.ops.fastattn.attention_backward, back, test_utils="test_faketensor")


def spec_of(dtype, acc_dtype_out=True):
    x = torch.zeros(1, 2, 3, 8, dtype=dtype)
    t, o = api.prepare(x, x, x, {})
    return describe(t, o._replace(acc_dtype_out=acc_dtype_out))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unrounded_does_not_change_float32_and_float64(dtype):
    assert spec_of(DTYPES[dtype]) == spec_of(DTYPES[dtype], acc_dtype_out=False)


def test_backends_without_unrounded_outputs_decline():
    """The CUDA C++ kernels can store only 16 bits."""
    why = base.get("cuda").support.why_not(spec_of(torch.bfloat16))
    assert "does not support unrounded" in why
    assert "acc_dtype_out" not in str(base.get("triton").support.why_not(spec_of(torch.bfloat16)))


@not_interpreted
def test_calls_without_unrounded_outputs():
    x = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    t, o = api.prepare(x, x, x, {})
    o, cu = o._replace(acc_dtype_out=True), torch.tensor([0, 3])
    weights = t._replace(v=None, normaliser=torch.zeros(2, 1, 2, 3))
    packed = t._replace(cu_q=cu, cu_k=cu), o._replace(max_q=3, max_k=3)
    for op, call in ((WEIGHTS, (weights, o)), (ATTENTION, packed)):
        with pytest.raises(
            ValueError, match="acc_dtype_out: got True, expected False of weights and"
        ):
            run_pass.run(FORWARD, op, *call)
    with pytest.raises(NotImplementedError, match="unrounded results have no derivative but"):
        run_pass.run(JVP, ATTENTION, t, o, (Tangents(x), (None, None)))
