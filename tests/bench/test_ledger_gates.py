"""What the ledger demands of the kernels of csrc/cuda/sm90: the order of an iteration, registers
and what ptxas says. Each demand is broken in a listing."""

import re

import pytest

from bench.static_gpu import ledger_compilers, ledger_gates, ledger_page, ledger_report
from bench.static_gpu.ledger_cases import Compiled, LedgerCase, cases
from fastattn.backends.native import libraries

SCORES = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24"
VALUES = "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR16].tnspB, R88"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x{}"
EX2 = "MUFU.EX2 R0, R0"
LOOP = [
    "BAR.SYNC.DEFER_BLOCKING R7, 0x100",
    *[SCORES] * 3,
    f"{SCORES}, gsb0",
    *[VALUES] * 3,
    f"{VALUES}, gsb0",
    "BAR.ARV R6, 0x100",
    WAIT.format(1),
    *[EX2] * 3,
    WAIT.format(0),
]
SAID = """
ptxas info    : Compiling entry function 'forward_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
CASE = LedgerCase("cuda", 90, "forward", 64, "plain")
FEW = "USETMAXREG.DEALLOC.CTAPOOL 0x20"
MANY = "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0"


def listing(*loops, limits=(FEW, MANY)):
    """A kernel with these loops, one after the other."""
    lines = ['\t.section\t.text.forward,"ax",@progbits']
    lines += [f"        /*0000*/ {x} ;" for x in limits]
    for k, loop in enumerate(loops):
        lines += [f".L_x_{k}:", *(f"        /*0000*/ {x} ;" for x in loop)]
        lines += [f"        /*0000*/ @!P0 BRA `(.L_x_{k}) ;"]
    return "\n".join([*lines, "        /*0000*/ EXIT ;"])


def kernel(*loops, case=CASE, said=SAID, **others):
    code = listing(*(loops or (LOOP,)), **others)
    return Compiled(case, 64, 64, 4, 2, 168, 0, 0, code, said, 8, (32, 240), 0)


def wrong(*loops, **others):
    return ledger_report.count(kernel(*loops, **others)).wrong


def test_a_kernel_with_this_order_has_no_fault():
    row = ledger_report.count(kernel())
    assert row.wrong == () and row.limits == (32, 240)
    assert row.order == ledger_gates.Order((1, 0), exponentials=3, between=3, barriers=2)
    assert ledger_page.order_line(row).split() == ["1,0", "3/3", "2", "32/240"]


def moved(line, to):
    """The loop, with the last of these lines elsewhere."""
    loop = LOOP.copy()
    at = len(loop) - 1 - loop[::-1].index(line)
    loop.insert(to, loop.pop(at))
    return loop


@pytest.mark.parametrize(
    "loop, text",
    [
        (moved(EX2, len(LOOP)), "overlap: got 2/3 exponentials"),
        (moved(EX2, 4), "overlap: got 2/3 exponentials"),
        (moved(WAIT.format(1), len(LOOP)), r"waits: got \(0, 1\), expected \(1, 0\)"),
        (
            [x.replace(WAIT.format(1), WAIT.format(0)) for x in LOOP],
            r"waits: got \(0, 0\), expected \(1, 0\)",
        ),
        ([*LOOP, WAIT.format(0)], r"waits: got \(1, 0, 0\)"),
        ([x for x in LOOP if "DEPBAR" not in x], r"waits: got \(\).*overlap: got 0/3"),
        ([*LOOP, LOOP[0]], "barriers: got 3, expected at most 2"),
        ([*LOOP, "BAR.ARV R6, 0x100"], "barriers: got 3, expected at most 2"),
    ],
)
def test_another_order_is_a_fault(loop, text):
    assert re.search(text, " ".join(wrong(loop)))
    # also in a loop that is neither the shortest nor the longest
    nops = [["NOP"] * n + LOOP for n in (0, 9)]
    assert re.search(text, " ".join(wrong(nops[0], ["NOP"] * 5 + loop, nops[1])))


@pytest.mark.parametrize("limits", [(), (FEW,), (MANY,), (FEW, MANY.replace("0xf0", "0xe8"))])
def test_other_limits_of_registers_are_a_fault(limits):
    (found,) = wrong(limits=limits)
    assert found.startswith("setmaxnreg: got (") and "expected (32, 240)" in found


def test_a_plain_kernel_may_not_spill():
    for what in ("stores", "loads"):
        said = SAID.replace(f"0 bytes spill {what}", f"8 bytes spill {what}")
        assert "got 8 bytes spilled" in " ".join(wrong(said=said))
        assert not wrong(said=said, case=CASE._replace(feature="mask"))


def test_serialised_products_are_a_fault():
    said = SAID + "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async ...\n"
    for feature in ("plain", "mask"):
        found = wrong(said=said, case=CASE._replace(feature=feature))
        assert found == ("ptxas: got C7512, expected no serialised products",)


def test_backward_has_waits_of_its_own():
    case = CASE._replace(name="dqkv")
    loop = [x for x in LOOP if "DEPBAR" not in x] + [*[VALUES] * 12, EX2]
    waits = [WAIT.format(1), EX2, *map(WAIT.format, (1, 1, 0))]
    assert wrong([x for x in loop if x != EX2] + waits, case=case) == ()
    assert "waits: got (1, 1, 0)" in wrong([x for x in loop if x != EX2] + waits[1:], case=case)[0]


def test_kernels_of_other_folders_have_no_such_demands():
    for case in (CASE._replace(compiler="cuda_sm80"), CASE._replace(compiler="triton")):
        assert not wrong([*LOOP, LOOP[0]], case=case, limits=(), said="C7512")


def test_a_fault_of_the_order_fails_the_command(monkeypatch):
    monkeypatch.setattr(
        ledger_report.ledger_code, "compiled", lambda *_: iter([kernel([*LOOP, LOOP[0]])])
    )
    rows, found = ledger_report.count_all([CASE])
    assert len(rows) == 1
    assert found == [f"{CASE}: barriers: got 3, expected at most 2"]


# ------------------------------------------------------------------------------ calls' constants


@pytest.mark.parametrize("feature", ["mask", "alibi", "softcap", "dropout", "sinks"])
def test_a_feature_is_among_the_constants_of_its_call(feature):
    """Else its branches are undecided, and the shortest way leaves the feature out."""
    fields = {"alibi": "slopes", "dropout": "dropout_p"}
    at = libraries.offset(fields.get(feature, feature))
    plain = ledger_compilers.constants(CASE, 0x480)
    found = ledger_compilers.constants(CASE._replace(feature=feature), 0x480)
    words = [0x480 + at, 0x480 + at + 4]
    assert not any(plain[x] for x in words) and any(found[x] for x in words)
    assert min(found) == 0x480


def test_the_recorded_counts_differ_between_features():
    """So each feature's path is decided. Sinks are outside of the loops."""
    (recorded,) = (x for name, x in ledger_report.budgets().items() if name.startswith("nvcc"))
    for case in cases():
        if case.by_nvcc and case.feature == "plain" and case.head_dim < 256:
            names = [str(case._replace(feature=x)) for x in ("mask", "alibi", "softcap", "dropout")]
            found = [tuple(recorded[x].values()) for x in names if x in recorded]
            assert len({*found}) == len(found), case


def test_the_parameters_are_found_behind_the_tensor_maps():
    elf = """
	Attribute:	EIATTR_PARAM_CBANK
	Format:	EIFMT_SVAL
	Value:	0xf 0x8e40210
	Attribute:	EIATTR_KPARAM_INFO
	Format:	EIFMT_SVAL
	Value:	Index : 0x0	Ordinal : 0x5	Offset  : 0x8d0	Size    : 0x14
	Value:	Index : 0x0	Ordinal : 0x4	Offset  : 0x270	Size    : {:#x}
"""
    size = libraries.PARAMS_SIZE
    assert ledger_compilers.parameters_at(elf.format(size)) == 0x480
    with pytest.raises(RuntimeError, match="expected FaParams"):
        ledger_compilers.parameters_at(elf.format(size + 8))


def test_the_page_has_the_kernels_of_sm90_first():
    page = (ledger_report.RESULTS / "ledger-sm_90.txt").read_text()
    rows = re.findall(r"^(cuda|cuda_sm80) forward D64 plain .*", page, re.M)
    assert rows == ["cuda", "cuda_sm80"]
