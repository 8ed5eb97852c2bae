"""The CPU kernels on AMX's tiles: the chip agrees with the model, errors are small, loads few."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from tests.cpu.test_amx import TILED, every_tiled, needs_chip, on_tiles
from tests.gpu_emulation.emulator import ROOT
from tests.support.backends import variant
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.kernel_builds import ON_THE_MODEL, run, use_library  # noqa: F401
from tests.support.kernel_builds import build as build_kernels

pytestmark = on_tiles


# Products of planes for each dtype: for scores, and for sums.
PRODUCTS = {"bfloat16": (1, 1), "float16": (4, 3), "float32": (6, 6)}


@pytest.mark.skipif(len(TILED) < 2, reason="needs AMX and its model")
@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("features", ["", "causal", "window", "gqa+alibi+dropout", "softcap+sinks"])
@pytest.mark.parametrize("m", [1, 3, 16, 150])
def test_chip_and_model_give_the_same_bits(features, m, dtype):
    given = tuple(FEATURE[x] for x in features.split("+") if x)
    problem = build(Dims(2, 2, 2, m, 333, 48, 72), given, DTYPES[dtype])
    found = {}
    for isa in TILED:
        with variant(isa):
            found[isa] = problem.run(fastattn.attention, backend="cpu")
    for name, value in found["amx_bf16"].items():
        assert torch.equal(value, found["amx_model"][name]), name


NEAR = {"atol": 0.01, "rtol": 0}


@every_tiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e2, 1e3, 1e5])
def test_scores_far_from_zero(isa, size, causal):
    """Every pass and every tile computes the same scores, masked or not: weights sum to 1 in each
    row and dV is right although the rounding of a score is 1e-3, 1 and 1e4."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 200, 64, generator=generator).bfloat16() for _ in range(4))
    q, k = q * size, k * size
    exact = v.double().requires_grad_()
    right = fastattn.reference.attention(q.double(), k.double(), exact, causal=causal)
    (expected,) = torch.autograd.grad(right, exact, dout.double())
    with variant(isa):
        ours = v.clone().requires_grad_()
        out = fastattn.attention(q, k, ours, causal=causal, backend="cpu")
        (found,) = torch.autograd.grad(out, ours, dout)
        weights = fastattn.attention_weights(q, k, causal=causal, backend="cpu")
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(1, 2, 200).double(), **NEAR)
    assert (out.double() - right).norm() <= 0.01 * right.norm()
    assert (found.double() - expected).norm() <= 0.01 * expected.norm()


@every_tiled
def test_no_rows(isa):
    with variant(isa):
        q, k = (torch.ones(1, 4, n, 8, dtype=torch.bfloat16) for n in (0, 5))
        assert fastattn.attention(q, k, k, backend="cpu").shape == (1, 4, 0, 8)


@every_tiled
@pytest.mark.parametrize("m", [1, 40])
def test_subnormal_values_count_as_zero(isa, m):
    """As the README states; the least normal numbers are kept."""
    q = k = torch.ones(1, 1, 50, 32, dtype=torch.bfloat16)
    for value, kept in ((1e-39, False), (1.5e-38, True)):
        v = torch.full_like(k, value)
        with variant(isa):
            out = fastattn.attention(q[:, :, :m], k, v, backend="cpu")
        assert out.any() == kept


@pytest.fixture(scope="module")
def trapped(tmp_path_factory):
    """(the kernels with the compiler flags of the real library, a library that emulates their
    instructions)"""
    folder = tmp_path_factory.mktemp("chip")
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("cuda"))
    flags = [*ON_THE_MODEL[:-1], "-O3", "-mprefer-vector-width=512"]
    library = libraries.CpuLibrary(build_kernels(folder / "csrc", folder, *flags))
    target = folder / "trap.so"
    flags = ["-std=gnu++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-mfma"]
    run(*flags, ROOT / "tests" / "cpu" / "amx_trap.cpp", "-o", target)
    trap = ctypes.CDLL(str(target))
    trap.end.restype = ctypes.c_int64
    return library, trap


def of_both(library, trap, use_library, problem):  # noqa: F811
    """(results of the model, results of the assembly, number of emulated instructions)"""
    with variant("amx_model"):
        expected = problem.run(fastattn.attention, backend="cpu")
    use_library(library)
    trap.begin()
    try:
        found = problem.run(fastattn.attention, backend="cpu")
    finally:
        executed = trap.end()
    return expected, found, executed


ASSEMBLED = [(1, ""), (3, "gqa+dropout"), (40, "causal"), (150, "window"), (70, "softcap+sinks")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("d", [24, 64, 72])
@pytest.mark.parametrize("m, features", ASSEMBLED)
def test_the_assembly_gives_the_bits_of_the_model(trapped, use_library, m, features, d, dtype):  # noqa: F811
    """As compiled for the chip. On other chips a trap handler emulates each instruction."""
    given = tuple(FEATURE[x] for x in features.split("+") if x)
    problem = build(Dims(1, 2, 2, m, 99, d, 40), given, DTYPES[dtype])
    expected, found, executed = of_both(*trapped, use_library, problem)
    assert executed == 0 if "amx_bf16" in TILED else executed > 100
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


BESIDE_TORCH = """
import torch
from fastattn import attention
from fastattn.backends.native import libraries
torch.set_num_threads(1)
libraries.select_cpu_isa("amx_bf16")
x = torch.randn(256, 256).bfloat16()
q = torch.randn(1, 2, 200, 64).bfloat16()
product, out = x @ x, attention(q, q, q, backend="cpu")
for _ in range(20):
    assert torch.equal(attention(q, q, q, backend="cpu"), out) and torch.equal(x @ x, product)
"""


@needs_chip
def test_torch_has_its_tiles_in_the_same_thread():
    environment = {x: y for x, y in os.environ.items() if x != "ONEDNN_MAX_CPU_ISA"}
    command = [sys.executable, "-c", BESIDE_TORCH]
    subprocess.run(command, env=environment, check=True, timeout=120)


# Tile loads and stores for each tile product, which determine the time on a chip. They include
# those of C, which is accumulated over several calls.
COUNTED = {"zero": 0, "load": 1, "store": 2, "dot": 3}


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """The kernels on a model that counts: (library, a function that returns and resets counts)."""
    folder = tmp_path_factory.mktemp("counting")
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("cuda"))
    header = folder / "csrc" / "cpu" / "amx" / "amx_model.h"
    text = header.read_text()
    head = "struct Machine {"
    text = text.replace(head, f'extern "C" FA_EXPORT int64_t counts[4];\n{head}')
    for name, at in COUNTED.items():
        start = text.index("{", text.index(f"void {name}(")) + 1
        text = text[:start] + f" ++counts[{at}]; " + text[start:]
    header.write_text(text)
    with open(folder / "csrc" / "cpu" / "unit.cpp", "a") as isa:
        isa.write('extern "C" FA_EXPORT int64_t counts[4] = {};\n')
    library = libraries.CpuLibrary(build_kernels(folder / "csrc", folder, *ON_THE_MODEL))
    counts = (ctypes.c_int64 * 4).in_dll(library.dll, "counts")

    def since():
        found = dict(zip(COUNTED, counts, strict=True))
        counts[:] = [0] * 4
        return found

    return library, since


SQUARE = Dims(1, 1, 1, 256, 1024, 64, 64)
WIDE = Dims(1, 1, 1, 256, 1024, 128, 128)
FEW = Dims(1, 4, 1, 4, 1024, 128, 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, what, dims, most_loads, most_stores",
    [
        # K Q^T: at D = 64, 2 loads of K for 4 products and 4 loads of Q for 16; at D = 128, 4 for
        # 4. P V summed over 256 keys: 36 for 32; gradients summed over 128 rows or keys: 20 for 16.
        ("bfloat16", "forward", SQUARE, (0.75 + 1.125) / 2, 0.3125),
        ("bfloat16", "forward", WIDE, (1 + 1.125) / 2, 0.1875),
        ("bfloat16", "few rows", FEW, 1.625, 0.25),
        ("bfloat16", "gradients", SQUARE, (2 * 0.625 + 3 * 1.25) / 5, 0.35),
        ("bfloat16", "gradients", WIDE, (2 * 1 + 3 * 1.25) / 5, 0.25),
        # A loaded plane is used for the next product, too. float32: 16 loads for 24 products of
        # scores and 14 for 24 of sums. float16: 12 for 16 and 8 for 12.
        ("float32", "forward", SQUARE, (16 / 24 + 14 / 24) / 2, (1 / 12 + 1 / 24) / 2),
        ("float32", "few rows", FEW, (12 / 12 + 11 / 12) / 2, (1 / 24 + 1 / 24) / 2),
        ("float32", "gradients", SQUARE, (2 * 16 / 24 + 3 * 14 / 24) / 5, (2 / 12 + 3 / 24) / 5),
        ("float16", "forward", SQUARE, (4 * 12 / 16 + 3 * 8 / 12) / 7, (4 / 8 + 3 / 12) / 7),
        ("float16", "gradients", SQUARE, (8 * 12 / 16 + 9 * 8 / 12) / 17, (8 / 8 + 9 / 12) / 17),
    ],
)
def test_loads_for_each_product(counting, use_library, dtype, what, dims, most_loads, most_stores):  # noqa: F811
    library, since = counting
    use_library(library)
    problem = build(dims, (), DTYPES[dtype])
    problem.run(fastattn.attention, False, backend="cpu")
    found = since()
    if what == "gradients":
        problem.run(fastattn.attention, backend="cpu")
        found = {x: y - found[x] for x, y in since().items()}
    scores, sums = PRODUCTS[dtype]
    needed = 2 * scores + 3 * sums if what == "gradients" else scores + sums
    loads, stores = (found[x] / found["dot"] for x in ("load", "store"))
    assert found["dot"] == needed * dims.B * dims.H * dims.M * dims.N * dims.D / 8192
    assert loads <= most_loads + 1e-9 and stores <= most_stores + 1e-9
