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
        assert ptxas.main([]) == 0, capsys.readouterr().out
    except cuda_library.NotBuilt as missing:
        pytest.skip(str(missing))
    printed = capsys.readouterr().out
    assert printed.rpartition("\n")[0].rpartition("\n")[0] + "\n" == ptxas.REPORT.read_text(), (
        "the report is stale: python -m bench.static_gpu.ptxas --accept"
    )


def test_the_report_is_of_every_dtype_and_pass():
    report = ptxas.REPORT.read_text()
    for arch in ptxas.ARCHS:
        for what in ("forward", "backward", "mask_gradient", "weights", "decode"):
            for dtype in ("BF16", "F16"):
                assert f"{what}_kernel<" in report and dtype in report and arch in report
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
