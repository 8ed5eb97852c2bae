"""A call under torch.compile and torch.export, and torch's own checks of the operators."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing

import fastattn
from fastattn.dispatch.library_ops import split
from tests.support.marks import parametrize
from tests.support.torch_calls import everything, inputs, op_arguments, rand


@pytest.mark.slow
@pytest.mark.parametrize("grads", [False, True])
def test_opcheck(grads):
    torch.library.opcheck(torch.ops.fastattn.attention.default, op_arguments(grads))
    for average in (False, True):
        arguments = op_arguments(grads, v=False, normaliser=True, average=average)
        torch.library.opcheck(torch.ops.fastattn.weights.default, arguments)


@pytest.mark.slow
def test_weights_by_a_given_lse_compile_as_one_graph_of_any_size():
    def both(q, k, v):
        out, lse = fastattn.attention(q, k, v, return_lse=True)
        return out, fastattn.attention_weights(q, k, lse=lse)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for M in (5, 9, 11):  # from the second size on, the compiler makes M a symbol
        q, (_, k, v) = rand(2, 4, M, 3), inputs()
        torch.testing.assert_close(compiled(q, k, v), both(q, k, v))


@pytest.mark.slow
def test_opcheck_of_the_backward_operators():
    t = op_arguments(False)
    out, normaliser = torch.ops.fastattn.attention(*t)
    dout = torch.randn_like(out)
    for given, needs_grad in (
        (None, ["q", "k", "v", "mask", "sinks"]),
        (normaliser, ["q", "v", "sinks"]),
    ):
        torch.library.opcheck(
            torch.ops.fastattn.attention_backward.default,
            (dout, given, out, normaliser, *itertools.chain(*split(t)), needs_grad),
        )
    t = op_arguments(False, v=False, normaliser=True, average=True)
    weights = torch.ops.fastattn.weights(*t)
    torch.library.opcheck(
        torch.ops.fastattn.weights_backward.default,
        (weights, weights, *itertools.chain(*split(t)), ["q", "k", "mask", "sinks"]),
    )


def seen_by_autograd(f, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = f(*leaves)
    return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), leaves)


@parametrize("compiler", ["aot_eager", "inductor"], fast=1)
def test_compile_fullgraph(attention, compiler):
    rest = everything(dtype=torch.float32)

    def f(q, k, v, mask, sinks):
        given = rest | dict(mask=mask, sinks=sinks)
        out, lse = attention(q * 1.5, k, v, **given, return_lse=True)
        return out * 2, lse

    tensors = (*inputs(dtype=torch.float32), rest["mask"], rest["sinks"])
    compiled = torch.compile(f, fullgraph=True, backend=compiler)
    torch.testing.assert_close(seen_by_autograd(compiled, tensors), seen_by_autograd(f, tensors))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors)[0], f(*tensors)[0])


COMPILES = """
import torch, fastattn

def attention(q, k, v):
    return fastattn.attention(q, k, v, causal=True)

def weights(q, k, v):
    return fastattn.attention_weights(q, k)

leaves = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
for f in (attention, weights):
    expected = f(*leaves)
    found = torch.compile(f, fullgraph=True)(*leaves)
    torch.testing.assert_close(found, expected)
    pairs = ((x, leaves[:2], x.detach()) for x in (found, expected))
    torch.testing.assert_close(*(torch.autograd.grad(*x) for x in pairs))
"""


@pytest.mark.slow
def test_inductor_keeps_the_operators_whole_where_the_environment_has_ci(tmp_path):
    """CI services set the variable CI: inductor then raises for an operator that has a
    decomposition but no lowering."""
    given = os.environ | dict(CI="true", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], capture_output=True, text=True, env=given
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_compile_with_dynamic_shapes_never_compiles_again(attention):
    def f(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    # The compiler would unify sizes that are equal by chance.
    for B, M, N in ((5, 11, 13), (7, 9, 17), (10, 12, 15)):
        tensors = inputs(B=B, M=M, N=N, Dv=6, dtype=torch.float32)
        torch.testing.assert_close(
            seen_by_autograd(compiled, tensors), seen_by_autograd(f, tensors)
        )
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1] > 0


@pytest.mark.slow
def test_compile_draws_fresh_dropout_and_takes_seeds(attention):
    q, k, v = inputs(dtype=torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(seed):
        return attention(q, k, v, dropout_p=0.5, seed=seed)

    assert not f(None).equal(f(None))
    assert f(5).equal(attention(q, k, v, dropout_p=0.5, seed=5))
    assert f(torch.tensor([5])).equal(f(5))


def test_compile_under_autocast(attention):
    q, k, v = inputs(dtype=torch.float32)

    def f(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v)

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
    assert out.dtype == torch.bfloat16 and out.equal(f(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
def test_export(attention, strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True, window=(3, None))

    tensors = inputs(dtype=torch.float32)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Model(), tensors, dynamic_shapes=[{0: batch}] * 3, strict=strict)
    again = inputs(B=3, dtype=torch.float32)
    torch.testing.assert_close(
        program.module()(*again), attention(*again, causal=True, window=(3, None))
    )
    assert "fastattn.attention" in str(program.graph)
