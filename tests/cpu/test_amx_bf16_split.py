"""float32 and float16 on AMX's tiles, which multiply bfloat16: a number is split into planes,
three bfloat16 terms for a float32 and two for a float16. This must cost no accuracy at any size
of the values. The vector kernels compute what cannot be split exactly, without an effect on
other results."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fastattn
from tests.cpu.test_amx import every_tiled, on_tiles
from tests.support.backends import variant
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.error_budget import oracle

pytestmark = on_tiles
VECTORS = "avx512"  # computes the blocks without planes
BLOCK = 32  # rows in gradients that use the same kernel together
every_planed = pytest.mark.parametrize("dtype", ["float32", "float16"])
every_multiplied = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


def case(dims, dtype="float32", **arguments):
    """Random tensors, and incoming gradients for out and the LSE."""
    problem = build(dims, (FEATURE["lse_loss"],), DTYPES[dtype])
    return replace(problem, kwargs=problem.kwargs | arguments)


def computed(isa, problem, everything=True):
    """{"out", "lse"} and, if `everything`, "dq", "dk", "dv" and "weights"."""
    arguments = {x: y for x, y in problem.kwargs.items() if x != "return_lse"}
    with variant(isa):
        found = problem.run(fastattn.attention, everything, backend="cpu")
        if everything:
            found["weights"] = fastattn.attention_weights(
                problem.q, problem.k, **arguments, backend="cpu"
            )
    return found


def same(x, y):
    """Equal bit for bit, except that any NaN equals any other."""
    kept = {"nan": 0.0, "posinf": torch.inf, "neginf": -torch.inf}
    whole = {4: torch.int32, 2: torch.int16}[x.element_size()]
    bits = (z.nan_to_num(**kept).contiguous().view(whole) for z in (x, y))
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(*bits)


def differ(found, expected):
    """The names of the results that differ."""
    return [name for name, value in expected.items() if not same(found[name], value)]


# ----------------------------------------------------------------------------------------- accuracy

# Allowed errors as a share of torch's: forward and backward. Both float16 results are rounded to
# float16; the last 2% are chance. In bfloat16 torch's largest weight is exactly 1, which makes it
# more accurate by a few per cent.
SHARE = {"float32": (0.5, 1.0), "float16": (1.02, 1.02), "bfloat16": (1.06, 1.06)}
SHARE_OF_SMALL_HEADS = 0.6  # forward: scores of few terms have fewer roundings than exp
SHARE_OF_LONG_GRADIENTS = 0.57
# torch's sum over long keys for few rows errs three times as much on one vendor's chips as on
# another's, ours does not: it is compared with the result's size.
ERROR_OF_FEW_ROWS = 2.0**-22.5
BIAS = {"float32": 2.0**-25, "float16": 2.0**-18}


def errors_beside_torch(isa, dtype, dims, causal, backward):
    """name -> norms of (our error, torch's error, the exact result)."""
    problem = build(dims, (), DTYPES[dtype])

    def results(attention, dtype, **more):
        given = [x.to(dtype).requires_grad_(backward) for x in (problem.q, problem.k, problem.v)]
        out = attention(*given, **more)
        if not backward:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, given, problem.dout.to(dtype))]

    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact = results(sdpa, torch.float64, is_causal=causal)
    theirs = results(sdpa, DTYPES[dtype], is_causal=causal)
    with variant(isa):
        ours = results(fastattn.attention, DTYPES[dtype], causal=causal, backend="cpu")
    return {
        name: tuple(float(x.norm()) for x in (mine - right, other - right, right))
        for name, mine, other, right in zip(("out", "dq", "dk", "dv"), ours, theirs, exact)
    }


def complaints_beside_torch(dtype, errors, forward=None):
    forward, backward = forward or SHARE[dtype][0], SHARE[dtype][1]
    share = {name: forward if name == "out" else backward for name in errors}
    return [
        f"{name}: {mine / other:.3f} of torch's error, not {share[name]}"
        for name, (mine, other, _) in errors.items()
        if not mine <= share[name] * other
    ]


@every_tiled
@every_multiplied
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("n, d", [(700, 64), (300, 128), (350, 40)])
def test_errs_no_more_than_torch(isa, n, d, causal, dtype):
    """float32 outputs: half as much as torch, or as its fused kernel, which takes these inputs."""
    errors = errors_beside_torch(isa, dtype, Dims(1, 1, 1, n, n, d, d), causal, True)
    forward = SHARE_OF_SMALL_HEADS if dtype == "float32" and d < 64 else None
    assert not complaints_beside_torch(dtype, errors, forward)


@every_tiled
@every_planed
@pytest.mark.parametrize("m", [3, 48])
def test_errs_no_more_than_torch_on_long_keys(isa, m, dtype):
    """Many keys, where one running sum over all of them would be the largest error."""
    errors = errors_beside_torch(isa, dtype, Dims(1, 2, 2, m, 2048, 64, 64), False, False)
    assert not complaints_beside_torch(dtype, errors)
    if dtype == "float32" and m < 16:
        assert errors["out"][0] <= ERROR_OF_FEW_ROWS * errors["out"][2]


@every_tiled
@pytest.mark.parametrize("m, n, long", [(48, 2048, ("dq",)), (2048, 64, ("dk", "dv"))])
def test_errs_less_than_torch_in_long_gradients(isa, m, n, long):
    """One running sum over all keys or rows would be the largest error. In float16 it never is."""
    errors = errors_beside_torch(isa, "float32", Dims(1, 1, 1, m, n, 64, 64), False, True)
    for name in long:
        mine, other, _ = errors[name]
        assert mine <= SHARE_OF_LONG_GRADIENTS * other, (name, mine / other)


@every_tiled
@every_planed
def test_rounding_has_no_sign(isa, dtype):
    """The error of leaving out small terms of products is unbiased: the mean of positive values is
    off by far less than the bound of one rounding."""
    problem = case(Dims(1, 2, 2, 130, 600, 32, 32), dtype)
    for x in (problem.q, problem.k, problem.v, problem.dout):
        x.abs_()
    exact, found = oracle(problem), computed(isa, problem)
    for name in ("out", "dv"):
        off = float((found[name].double() - exact[name]).mean() / exact[name].mean())
        assert abs(off) < BIAS[dtype], (name, off)


@every_tiled
@every_planed
@pytest.mark.parametrize("m", [100, 5])
def test_lse_is_float32_for_every_dtype_of_q(isa, m, dtype):
    """With one key the LSE is the score itself, where a product of the last planes matters: its
    error is that of float32, except for the lower precision of e^x."""
    problem = case(Dims(1, 8, 2, m, 150, 64, 64), dtype, window=(0, 0))
    exact = oracle(problem)["lse"]
    mine, theirs = (
        float((computed(x, problem, everything=False)["lse"] - exact).norm())
        for x in (isa, VECTORS)
    )
    assert mine <= 2 * theirs, mine / theirs


# ------------------------------------------------------------------------------------------- choice


@every_tiled
@every_planed
@pytest.mark.parametrize("m, d", [(70, 33), (3, 33), (70, 64)])
def test_the_tiles_are_in_use(isa, dtype, m, d):
    """Otherwise everything above would test the vector kernels."""
    problem = case(Dims(1, 4, 1, m, 150, d, 40), dtype)
    vectors, found = (computed(x, problem) for x in (VECTORS, isa))
    assert not same(found["lse"], vectors["lse"])


@every_tiled
@pytest.mark.parametrize("exponent, vectors", [(59, False), (60, True), (127, True)])
def test_a_scale_that_makes_tiny_products_visible_runs_on_vector_kernels(isa, exponent, vectors):
    """Products below the least normal number are 0 on tiles."""
    clean = case(Dims(1, 4, 1, 70, 150, 33, 40), scale=2.0**exponent)
    half = 2.0 ** (-exponent / 2)
    problem = replace(clean, q=clean.q * half, k=clean.k * half)
    theirs, found = (computed(x, problem) for x in (VECTORS, isa))
    assert (not differ(found, theirs)) == vectors


WITHOUT_FLOAT32 = """
import torch
from fastattn import attention, attention_weights
from fastattn.backends.native import libraries
torch.set_num_threads(1)
def results(dtype, m):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(1, *shape, generator=generator).to(dtype)
    given = [draw(4, m, 33).requires_grad_()] + [draw(1, 150, 33).requires_grad_() for _ in "kv"]
    out, lse = attention(*given, causal="bottom_right", return_lse=True, backend="cpu")
    weights = attention_weights(*given[:2], backend="cpu")
    grads = torch.autograd.grad(out, given, draw(4, m, 33))
    return [x.detach() for x in (lse, out, weights, *grads)]
cases = [(dtype, m) for dtype in (torch.float32, torch.float16) for m in (70, 3)]
isa = {isa!r}
assert libraries.cpu_isa() == isa
units, found = libraries.cpu_units(), [results(*x) for x in cases]
assert set(units["float32"].values()) == {{"avx512"}}, units
libraries.select_cpu_isa("avx512")
for (dtype, m), first in zip(cases, found):
    again = [torch.equal(x, y) for x, y in zip(first, results(dtype, m))]
    assert all(again) or dtype != torch.float32, (m, again)
    assert not again[0] or dtype == torch.float32, "float16 has its tiles"
assert units["float16"]["many rows"] == isa, units
"""


def in_a_process(code, **environment):
    command = [sys.executable, "-c", code]
    given = os.environ | environment
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@every_tiled
def test_float32_can_be_left_to_the_vector_kernels(isa):
    """Bit for bit, and only float32."""
    code = WITHOUT_FLOAT32.format(isa=isa)
    found = in_a_process(code, FASTATTN_CPU_ISA=isa, FASTATTN_FLOAT32="vector")
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@every_tiled
def test_an_unknown_value_of_FASTATTN_FLOAT32_is_refused(isa):
    found = in_a_process("import fastattn", FASTATTN_CPU_ISA=isa, FASTATTN_FLOAT32="vectors")
    assert found.returncode and "ValueError" in found.stderr
    what, _, expected = found.stderr.splitlines()[-1].partition("expected")
    assert "FASTATTN_FLOAT32: got 'vectors'" in what and "vector" in expected
