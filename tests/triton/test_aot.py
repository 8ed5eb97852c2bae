"""Every tile in the tables compiles for sm_80 and sm_90, and some for sm_75, on a machine without a
GPU, and the checker rejects bad kernels."""

import dataclasses
import importlib.metadata
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from bench.static_gpu import aot
from bench.static_gpu.aot import CompiledKernel, KernelCase
from tests.support import build_lock
from tests.support.backends import INTERPRETED, needs_triton
from tests.support.checkout import ROOT

needs_compiler = [
    needs_triton,
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set: there is nothing to compile"),
]


# ------------------------------------------------------------------------------ the tables' kernels

# The variants that need the most registers and shared memory; `make aot` has the rest. IEEE float32
# is the same on both chips and slow to compile, so one chip is enough.
MORE = ((64, "plain"), (128, "packed"), (64, "tangents"))
CASES = [
    case
    for case in aot.cases((80, 90), variants=("causal", "everything"))
    if case.dtype == "bfloat16" or (case.head_dim <= 128 and case.variant == "causal")
] + [KernelCase(arch, "bfloat16", *x) for arch in (80, 90) for x in MORE]
CASES += [KernelCase(80, "float32", *x) for x in ((64, "ieee"), (256, "causal"))]
CASES += [KernelCase(75, x, n, "causal") for x in ("bfloat16", "float32") for n in (64, 256)]


@pytest.fixture(scope="module")
def kernels(request):
    """{case: its kernels} for the cases of the chosen tests."""
    mine = [x for x in request.session.items if x.path == request.path]
    items = [x for x in mine if "kernels" in getattr(x, "fixturenames", ())]
    each = {x.callspec.params["case"] for x in items if hasattr(x, "callspec")}
    chosen = (
        [x for x in CASES if x in each] if all(hasattr(x, "callspec") for x in items) else CASES
    )
    sources = sorted((ROOT / "kernels").glob("*.py"))
    key = build_lock.digest(
        importlib.metadata.version("triton"), Path(aot.__file__), *sources, chosen
    )
    found = build_lock.made("aot", key, lambda: list(aot.compile_all(chosen, workers=2)))
    return dict(zip(chosen, found, strict=True))


class TestTables:
    pytestmark = needs_compiler

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_compiles_within_its_budget(self, kernels, case):
        import triton

        budget = aot.budget_of(triton.__version__)
        wrong = {str(k): aot.faults(k, budget) for k in kernels[case]}
        assert kernels[case] and not {name: what for name, what in wrong.items() if what}

    @pytest.mark.slow
    def test_products_are_those_of_the_chip(self, kernels):
        for case in CASES:
            for k in kernels[case]:
                if case.arch == 75 and k.name in ("forward", "dq", *aot.BY_KEYS):
                    assert k.mix["ffma"] and not (k.mix["mma"] or k.mix["cp_async"]), k
                elif k.name in ("forward", "dq", *aot.BY_KEYS) and case.dtype == "bfloat16":
                    assert k.mix["wgmma" if case.arch == 90 else "mma"] and k.mix["exp2"], k
                    by_pointers = k.name.endswith("_t")  # tiles of tangents
                    assert bool(k.mix["tma"]) == (case.arch == 90 and not by_pointers), k
                elif k.name in ("forward", "dq", *aot.BY_KEYS):
                    ieee = case.variant == "ieee" or case.head_dim == 256
                    products = "ffma" if ieee else "wgmma" if case.arch == 90 else "mma"
                    others = {"wgmma", "mma"} - {products}
                    assert k.mix[products] and not any(k.mix[x] for x in others), k

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "case, share",
        [
            (KernelCase(80, "float32", 64, "causal"), 0.65),
            (KernelCase(90, "float32", 64, "causal"), 0.3),
        ],
        ids=str,
    )
    def test_parts_issue_fewer_instructions_than_ieee_has_multiply_adds(self, kernels, case, share):
        found = {k.name: k for k in kernels[case]}
        products = dict(forward=2, dq=3, dkv=4)
        assert found.keys() == products.keys()
        for name, n in products.items():
            assert found[name].loop and issued(found[name]) <= share * 64 * n, found[name]

    @pytest.mark.slow
    def test_every_pass_is_compiled(self, kernels):
        for arch in (80, 90):
            names = {k.name for case in CASES if case.arch == arch for k in kernels[case]}
            assert names == {
                *("forward", "delta", "dq", "dkv", "dmask", "split", "combine", "weights"),
                *("weights average", "dq given", "dq given sums", "dk given"),
                *("dk", "dv"),  # of 256 columns on sm_90, and of 128 in float32
                *("jvp", "rates", "dq_t", "dkv_t"),
            }


def issued(kernel):
    """Instructions of a loop of all threads, for each score."""
    tile, warps, _ = kernel.tile.split()
    rows, keys = map(int, tile.split("x"))
    return kernel.loop * 32 * int(warps[1:]) / (rows * keys)


# -------------------------------------------------------------------------------------- the checker

CASE = KernelCase(90, "bfloat16", 128, "plain")
GOOD = CompiledKernel(
    CASE, "dkv", "64x128 w8 s2", rows=128, registers=255, shared=131072, mix=Counter(wgmma=72)
)


def kernel(arch=90, dtype="bfloat16", **changes):
    return dataclasses.replace(GOOD, case=CASE._replace(arch=arch, dtype=dtype), **changes)


LIMITS = {75: 65536, 80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}
NO_WGMMA = Counter(mma=64)


@pytest.mark.parametrize(
    "kernel, budget, fault",
    [
        (GOOD, {}, ""),
        (kernel(spills=1), {}, "1 spill instructions, 0 allowed"),
        (kernel(spills=1), {str(GOOD): 1}, ""),
        (kernel(spills=2), {str(GOOD): 1}, "2 spill instructions, 1 allowed"),
        (kernel(spills=2), {str(kernel(name="dq")): 2}, "2 spill instructions, 0 allowed"),
        (kernel(spills=9), None, ""),  # none was made for this Triton
        *((kernel(x, shared=most), None, "") for x, most in LIMITS.items()),
        *(
            (kernel(x, shared=most + 16), None, f"{most + 16} bytes of shared memory, sm_{x} has")
            for x, most in LIMITS.items()
        ),
        (kernel(100, tensor=512), None, ""),
        (kernel(100, tensor=1024), None, "1024 columns of tensor memory"),
        (kernel(mix=NO_WGMMA), {}, "wgmma expected"),
        (kernel(mix=Counter(wgmma=8, mma=8)), {}, "wgmma expected"),
        (kernel(mix=NO_WGMMA, rows=64), {}, "wgmma expected"),
        (kernel(mix=Counter()), {}, "wgmma expected"),
        (kernel(mix=NO_WGMMA, rows=32), {}, ""),
        (kernel(mix=Counter(), name="delta", rows=0), {}, ""),
        (kernel(dtype="float32", mix=NO_WGMMA), {}, ""),
        (kernel(80, mix=NO_WGMMA), {}, ""),
        (kernel(error="OutOfResources: no"), None, "OutOfResources: no"),
    ],
)
def test_faults_of_a_kernel_are_found(kernel, budget, fault):
    found = aot.faults(kernel, budget)
    assert len(found) == bool(fault) and all(fault in x for x in found), found


def test_a_listing_is_one_line_a_kernel():
    broken = kernel(name="dq", error="CompilationError: no")
    first, second, *lines = aot.listing("3.9.0", [GOOD, broken]).splitlines()
    assert "3.9.0" in first and second.split()[:3] == ["kernel", "tile", "registers"]
    assert lines[0].split()[:9] == [*str(GOOD).split(), *GOOD.tile.split(), "255"]
    assert lines[1].endswith("CompilationError: no") and len(lines) == 2


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Run the program with stub compilation results and its own budget file."""
    pytest.importorskip("triton")
    monkeypatch.setattr(aot, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(aot, "RESULTS", tmp_path)

    def run(kernel, *arguments):
        monkeypatch.setattr(aot, "compile_all", lambda every, workers: iter([[kernel]]))
        return aot.main(list(arguments))

    return run


def test_the_program_fails_on_a_fault(program, capsys, tmp_path):
    assert program(GOOD) == 0 and program(kernel(error="OutOfResources: no")) == 1
    assert f"{GOOD} ({GOOD.tile}): OutOfResources: no" in capsys.readouterr().out
    (full,) = (tmp_path / "local").iterdir()
    assert str(GOOD) in full.read_text()


def test_spills_that_are_accepted_are_the_budget(program, capsys):
    assert program(kernel(spills=5), "--accept") == 0
    assert program(kernel(spills=5)) == 0
    assert program(kernel(spills=6)) == 1
    assert "6 spill instructions, 5 allowed" in capsys.readouterr().out


def test_part_of_the_tables_makes_no_report(program, tmp_path):
    assert program(GOOD, "--arch", "90") == 0 and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        program(GOOD, "--arch", "90", "--accept")
