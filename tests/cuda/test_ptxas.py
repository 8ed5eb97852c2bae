"""The check on nvcc's machine code of the CUDA kernels, and that the check can fail."""

import dataclasses
import json

import pytest

from bench.static_gpu import cuda_library, ptxas
from tests.ptx.ours import needs_nvcc

FITS = ptxas.Kernel("sm_80", "forward_kernel<Forward<BF16, 128, 128, false> >", 200, 81920, 0, 96)


@needs_nvcc
def test_the_kernels_spill_no_more_than_allowed(capsys):
    recorded = ptxas.REPORT.read_text().partition("\n")[0]
    if ptxas.version() != recorded:
        pytest.skip(f"the budget is of {recorded}, here is {ptxas.version()}")
    try:
        assert ptxas.main(["--check"]) == 0, capsys.readouterr().out
    except cuda_library.NotBuilt as missing:
        pytest.skip(str(missing))


def test_the_report_is_of_every_dtype_and_pass():
    report = ptxas.REPORT.read_text()
    for arch in ptxas.ARCHS:
        for what in ("forward", "backward", "mask_gradient", "weights", "decode"):
            for dtype in ("BF16", "F16"):
                assert f"{what}_kernel<" in report and dtype in report and arch in report
    assert set(json.loads(ptxas.BUDGET.read_text())) == set(ptxas.ARCHS)


OTHERS = [
    dataclasses.replace(FITS, name="forward_kernel<Forward<BF16, 64, 64, true> >", products=64),
    dataclasses.replace(FITS, arch="sm_90", registers=168),
]


def test_a_summary_has_the_most_of_alike_kernels(monkeypatch):
    monkeypatch.setattr(ptxas, "version", lambda: "nvcc 1.0")
    first, second, *lines = ptxas.summary([FITS, *OTHERS]).splitlines()
    assert first == "nvcc 1.0"
    assert ptxas.digest(ptxas.listing([FITS, *OTHERS])) in second
    name = "forward_kernel<Forward<BF16> >"
    memory = "81920 bytes shared     0 bytes spilled"
    assert lines == [
        f"sm_80   2 kernels  200 registers  {memory}   64 to  96 HMMA  {name}",
        f"sm_90   1 kernels  168 registers  {memory}   96 to  96 HMMA  {name}",
    ]


def test_a_report_that_is_stale_is_a_fault(monkeypatch, tmp_path, capsys):
    """Even if the change is not in the summary's own columns."""
    monkeypatch.setattr(ptxas, "version", lambda: "nvcc 1.0")
    monkeypatch.setattr(ptxas, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(ptxas, "REPORT", tmp_path / "cuda-ptxas.txt")

    def run(*arguments, other=OTHERS[0]):
        monkeypatch.setattr(ptxas, "compile_all", lambda jobs: [FITS, other])
        return ptxas.main(list(arguments))

    assert run("--accept") == 0 and run("--check") == 0
    listing = (tmp_path / ptxas.LISTING).read_text()
    assert FITS.name in listing and listing in capsys.readouterr().out
    smaller = dataclasses.replace(OTHERS[0], registers=199)
    assert run(other=smaller) == 0 and run("--check", other=smaller) == 1
    assert "is stale" in capsys.readouterr().out
    assert run("--accept", other=smaller) == 0 and run("--check", other=smaller) == 0


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
