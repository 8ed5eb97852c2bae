"""The check on nvcc's machine code of the CUDA kernels, and that the check can fail."""

import dataclasses

import pytest

from bench.static_gpu import budgets, cuda_library, ptxas, sass
from tests.gpu_emulation.ptx.ours import needs_nvcc

FITS = ptxas.Kernel("sm_80", "forward_kernel<Forward<BF16, 128, 128, false> >", 200, 0, 96)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("folder", ptxas.OF_FOLDER)
def test_the_kernels_spill_no_more_than_allowed(folder, capsys):
    recorded = budgets.read(ptxas.BUDGET)["nvcc"]["version"]
    if ptxas.version() != recorded:
        pytest.skip(f"the budget is of {recorded}, here is {ptxas.version()}")
    try:
        assert ptxas.main(["--of", folder]) == 0, capsys.readouterr().out
    except cuda_library.NotBuilt as missing:
        pytest.skip(str(missing))


HOPPER = dataclasses.replace(FITS, arch="sm_90a", registers=240)
ORDER = sass.Counts(600, 0, 16, 90, 90, 2, (1, 0))


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Run the program on these kernels, with a budget of its own."""
    monkeypatch.setattr(ptxas, "version", lambda: "nvcc 1.0")
    monkeypatch.setattr(ptxas, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(ptxas, "RESULTS", tmp_path)

    def run(*arguments, **changed):
        kernels = {"sm80": [dataclasses.replace(GENERAL, **changed)], "sm90": [HOPPER]}
        monkeypatch.setattr(ptxas, "compile_all", lambda folder, jobs: kernels[folder])
        return ptxas.main(list(arguments))

    return run


GENERAL = dataclasses.replace(FITS, name=FITS.name.replace("false", "true"), spilled=8)


def test_the_budget_is_what_was_accepted(program, tmp_path, capsys):
    assert program() == 1 and program("--accept") == 0 and program() == 0
    assert program(spilled=9) == 1 and program("--of", "sm90") == 0
    text = ptxas.BUDGET.read_text()
    assert '"sm_80 forward_kernel<Forward<BF16> >": {"128, 128, true": 8}' in text
    assert '"nvcc": {"version": "nvcc 1.0"}' in text
    listing = (tmp_path / "local" / "cuda-sm80.txt").read_text()
    assert GENERAL.name in listing and listing in capsys.readouterr().out


WIDE, GENERAL_FORM = FITS.name.replace("128", "256"), GENERAL.name


@pytest.mark.parametrize(
    "kernel, changed, budget, fault",
    [
        (FITS, {}, 0, ""),
        (FITS, {"spilled": 4}, 0, "at most 0 bytes spilled"),
        (FITS, {"spilled": 4, "name": WIDE}, 0, "at most 0 bytes spilled"),
        (FITS, {"spilled": 4, "name": WIDE}, 4, ""),
        (FITS, {"spilled": 4}, 4, "at most 0 bytes spilled"),  # plain and of 128: has no budget
        (FITS, {"spilled": 4, "name": GENERAL_FORM}, 4, ""),
        (FITS, {"products": 0}, 0, "expected HMMA"),
        (FITS, {"products": 0, "name": "delta_kernel<BF16>"}, 0, ""),
        (HOPPER, {}, 0, ""),
        (HOPPER, {"spilled": 4, "name": WIDE}, 4, "at most 0 bytes spilled"),
        (HOPPER, {"spilled": 4, "name": GENERAL_FORM}, 4, ""),
        (HOPPER, {"spilled": 8, "name": GENERAL_FORM}, 4, "at most 4 bytes spilled"),
        (HOPPER, {"products": 0}, 0, "expected HGMMA"),
        (HOPPER, {"warnings": ("C7510",)}, 0, "C7510: expected no such warning"),
        (HOPPER, {"warnings": (ptxas.NO_CLASS,)}, 0, "has no sm90: expected no such warning"),
    ],
)
def test_faults_of_a_kernel_are_found(kernel, changed, budget, fault):
    """For sm_90a these are spills in any plain kernel, and what only such a chip has."""
    kernel = dataclasses.replace(kernel, **changed)
    found = ptxas.faults([kernel], {kernel.template: {kernel.constants: budget}})
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


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({}, ""),
        ({"waits": (0, 0)}, "expected waits (1, 0), got (0, 0)"),
        ({"waits": (1, 0, 0)}, "expected waits (1, 0), got (1, 0, 0)"),
        ({"between": 89}, "expected a product under every exponential"),
        ({"barriers": 3}, "expected at most 2 barriers, got 3"),
    ],
)
def test_the_order_of_a_loop_for_sm_90a_is_judged(changed, fault):
    loops = (ORDER._replace(**changed), *(() if "barriers" in changed else (ORDER,)))
    found = ptxas.faults([dataclasses.replace(HOPPER, loops=loops)], {})
    assert len(found) == bool(fault) and all(x.endswith(fault) for x in found), found
    assert not ptxas.faults([dataclasses.replace(FITS, loops=loops)], {})
