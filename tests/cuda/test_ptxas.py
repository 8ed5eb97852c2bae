"""The check on nvcc's machine code of the CUDA kernels, and that the check can fail."""

import dataclasses
import itertools
import json
import re

import pytest

from bench.static_gpu import cuda_library, ptxas
from tests.gpu_emulation.ptx.ours import needs_nvcc

FITS = ptxas.Kernel("sm_80", "forward_kernel<Forward<BF16, 128, 128, false> >", 200, 81920, 0, 96)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("folder", ptxas.OF_FOLDER)
def test_the_kernels_spill_no_more_than_allowed(folder, capsys):
    recorded = report(folder).partition("\n")[0]
    if ptxas.version() != recorded:
        pytest.skip(f"the budget is of {recorded}, here is {ptxas.version()}")
    try:
        assert ptxas.main(["--check", "--of", folder]) == 0, capsys.readouterr().out
    except cuda_library.NotBuilt as missing:
        pytest.skip(str(missing))


def report(folder):
    return (ptxas.RESULTS / ptxas.REPORTS[folder]).read_text()


PASSES = {"sm80": ("forward", "backward", "mask_gradient", "weights", "decode")}
PASSES |= {"sm90": ("forward", "backward")}


@pytest.mark.parametrize("folder", ptxas.OF_FOLDER)
def test_a_report_is_of_every_dtype_and_pass(folder):
    archs, dtypes = ptxas.OF_FOLDER[folder], ("BF16", "F16")
    for arch, what, dtype in itertools.product(archs, PASSES[folder], dtypes):
        kernel = rf"^{arch} .* {ptxas.PRODUCTS[arch]}  {what}_kernel<\w+<{dtype}> >"
        assert re.search(kernel, report(folder), re.M), kernel
    assert set(json.loads(ptxas.BUDGET.read_text())) == set(ptxas.ARCHS)


HOPPER = dataclasses.replace(FITS, arch="sm_90a", registers=240, shared=200 * 1024)
OTHERS = [
    dataclasses.replace(FITS, name="forward_kernel<Forward<BF16, 64, 64, true> >", products=64),
    dataclasses.replace(FITS, arch="sm_90", registers=168),
]


def test_a_summary_has_the_most_of_alike_kernels(monkeypatch):
    monkeypatch.setattr(ptxas, "version", lambda: "nvcc 1.0")
    first, second, *lines = ptxas.summary("sm80", [FITS, *OTHERS]).splitlines()
    assert first == "nvcc 1.0"
    hashed = ptxas.digest(ptxas.listing([FITS, *OTHERS]))
    assert second == f"sha256 of local/cuda-ptxas.txt: {hashed}"
    name = "forward_kernel<Forward<BF16> >"
    memory = "81920 bytes shared     0 bytes spilled"
    assert lines == [
        f"sm_80   2 kernels  200 registers  {memory}   64 to  96 HMMA  {name}",
        f"sm_90   1 kernels  168 registers  {memory}   96 to  96 HMMA  {name}",
    ]


def test_a_report_that_is_stale_is_a_fault(monkeypatch, tmp_path, capsys):
    """Even if the change is not in the summary's own columns. Each folder has its own."""
    monkeypatch.setattr(ptxas, "version", lambda: "nvcc 1.0")
    monkeypatch.setattr(ptxas, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(ptxas, "RESULTS", tmp_path)
    ptxas.BUDGET.write_text("{}")

    def run(*arguments, other=OTHERS[0]):
        kernels = {"sm80": [FITS, other], "sm90": [HOPPER]}
        monkeypatch.setattr(ptxas, "compile_all", lambda folder, jobs: kernels[folder])
        return ptxas.main(list(arguments))

    assert run("--accept") == 0 and run("--check") == 0
    listing = (tmp_path / "local" / "cuda-ptxas.txt").read_text()
    assert FITS.name in listing and listing in capsys.readouterr().out
    smaller = dataclasses.replace(OTHERS[0], registers=199)
    assert run(other=smaller) == 0 and run("--check", other=smaller) == 1
    assert "cuda-ptxas.txt is stale" in capsys.readouterr().out
    assert run("--check", "--of", "sm90", other=smaller) == 0
    assert run("--accept", "--of", "sm90", other=smaller) == 0
    assert run("--check", other=smaller) == 1
    assert run("--accept", other=smaller) == 0 and run("--check", other=smaller) == 0
    assert set(json.loads(ptxas.BUDGET.read_text())) == set(ptxas.ARCHS)


@pytest.mark.parametrize(
    "changed, budget, wrong",
    [
        ({}, {}, False),
        ({"spilled": 4}, {}, True),
        ({"spilled": 4, "name": FITS.name.replace("128", "256")}, {}, True),
        ({"spilled": 4, "name": FITS.name.replace("128", "256")}, 4, False),
        ({"spilled": 4}, 4, True),  # a plain kernel of 128 has no budget
        ({"spilled": 4, "name": FITS.name.replace("false", "true")}, 4, False),
        ({"products": 0}, {}, True),
        ({"products": 0, "name": "delta_kernel<BF16>"}, {}, False),
        ({"shared": 99 * 1024}, {}, False),
        ({"shared": 99 * 1024 + 16}, {}, True),
    ],
)
def test_faults_of_a_kernel_are_found(changed, budget, wrong):
    kernel = dataclasses.replace(FITS, **changed)
    allowed = {kernel.arch: {kernel.name: budget}} if budget else {}
    assert bool(ptxas.faults([kernel], allowed)) == wrong


@pytest.mark.parametrize(
    "changed, budget, fault",
    [
        ({}, {}, ""),
        ({"spilled": 4, "name": FITS.name.replace("128", "256")}, 4, "at most 0 bytes spilled"),
        ({"spilled": 4, "name": FITS.name.replace("false", "true")}, 4, ""),
        ({"spilled": 8, "name": FITS.name.replace("false", "true")}, 4, "at most 4 bytes spilled"),
        ({"products": 0}, {}, "expected HGMMA"),
        ({"shared": 227 * 1024}, {}, ""),
        ({"shared": 227 * 1024 + 16}, {}, "at most 232448 bytes shared"),
        ({"warnings": ("C7510",)}, {}, "C7510: expected no such warning"),
        ({"warnings": (ptxas.NO_CLASS,)}, {}, "its name has no sm90: expected no such warning"),
    ],
)
def test_faults_of_a_kernel_for_sm_90a_are_found(changed, budget, fault):
    """Spills in any plain kernel, and what only such a chip has."""
    kernel = dataclasses.replace(HOPPER, **changed)
    allowed = {kernel.arch: {kernel.name: budget}} if budget else {}
    found = ptxas.faults([kernel], allowed)
    assert len(found) == bool(fault) and all(x.endswith(fault) for x in found), found


@pytest.mark.parametrize(
    "name, plain",
    [
        ("forward_kernel<Forward<BF16, 64, 64, false> >", True),
        ("forward_kernel<Forward<BF16, 64, 64, true> >", False),
        ("forward_kernel<Forward<BF16, 64, 64, true, false> >", False),  # general, without a mask
        ("forward_kernel<Forward<BF16, 64, 64, false, false> >", True),
        ("forward_kernel<MaskedForward<BF16, 64, 64> >", False),
        ("backward_kernel<Backward<BF16, 64, true, false> >", True),  # with a band
        ("backward_kernel<Backward<BF16, 64, false, true> >", False),
        ("backward_kernel<Backward<BF16, 64, 64, 3, false> >", True),
    ],
)
def test_plain_kernels_are_known_by_their_names(name, plain):
    assert ptxas.may_not_spill(dataclasses.replace(HOPPER, name=name)) == plain


SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Used 168 registers, used 6 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'two'
ptxas info    : (C7512) Potential Performance Loss: some other reason in function 'two'
ptxas info    : (C7517) warpgroup.wait is injected in around line 54 by compiler in function 'two'
ptxas info    : (C7601) another warning about 'one'
"""


def test_serialised_products_are_those_of_their_kernel():
    assert ptxas.serialisations(SAID) == {"two": ("C7510", "C7512", "C7517")}


def test_kernels_of_both_folders_have_their_own_shared_memory():
    name = "fa::{}::Forward<fa::ptx::BF16, 64, 64, false>"
    for folder in ptxas.OF_FOLDER:
        assert ptxas.qualified(name.format(folder)) == f"{folder}::Forward<BF16, 64, 64, false>"
    assert ptxas.qualified("delta_kernel") == "delta_kernel"
