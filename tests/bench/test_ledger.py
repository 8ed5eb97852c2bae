"""The ledger of machine code: it reads listings, counts instructions by kind, and can fail."""

import argparse
import json
import re

import pytest

from bench.static_gpu import (
    ledger_code,
    ledger_model,
    ledger_page,
    ledger_report,
    sass,
    sass_arithmetic,
    sass_kinds,
    sass_values,
    sass_walk,
)
from bench.static_gpu.ledger_cases import Compiled, LedgerCase, cases
from bench.static_gpu.ledger_model import Tile
from tests.gpu_emulation.ptx.ours import needs_nvcc

needs_triton = pytest.mark.skipif(
    bool(ledger_code.unavailable("triton")), reason=str(ledger_code.unavailable("triton"))
)

# A kernel of one warp: 16 rows, 8 keys, D = 8. A kernel parameter switches a feature in the loop.
# Copies are an inner loop of three. One branch skips masking, another checks the bounds of rows.
# The first tile loads more. The loop that spins on a barrier is placed after the kernel's end.
TOY = """
	.section	.text.toy,"ax",@progbits
.text.toy:
        /*0000*/                   S2R R0, SR_CTAID.X ;
        /*0010*/                   ISETP.NE.U32.AND P3, PT, RZ, c[0x0][0x160], PT ;
        /*0020*/                   IMAD.MOV.U32 R20, RZ, RZ, R0 ;
        /*0030*/                   @!P0 BRA `(.L_x_9) ;
.L_x_0:
        /*0040*/                   ISETP.NE.AND P4, PT, R20, R0, PT ;
        /*0050*/                   IMAD.MOV.U32 R6, RZ, RZ, 0x3 ;
.L_x_1:
        /*0060*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0070*/                   IADD3 R6, R6, -0x1, RZ ;
        /*0080*/                   ISETP.NE.AND P1, PT, R6, RZ, PT ;
        /*0090*/               @P1 BRA `(.L_x_1) ;
        /*00a0*/                   LDGDEPBAR ;
        /*00b0*/                   DEPBAR.LE SB0, 0x1 ;
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R13 ;
        /*00d0*/              @!P0 BRA `(.L_x_8) ;
.L_x_2:
        /*00e0*/              @!P4 LDSM.16.M88.4 R40, [R2] ;
        /*00f0*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0100*/              @!PT LDS RZ, [RZ] ;
        /*0110*/                   HMMA.16816.F32.BF16 R12, R8, R10, RZ ;
        /*0120*/              @!P3 BRA `(.L_x_3) ;
        /*0130*/                   FADD R12, R12, R21 ;
        /*0140*/                   FADD R13, R13, R21 ;
.L_x_3:
        /*0150*/               @P0 BRA P2, `(.L_x_4) ;
        /*0160*/                   FSEL R12, R12, -INF , P5 ;
        /*0170*/                   FSEL R13, R13, -INF , P5 ;
        /*0180*/                   FSEL R14, R14, -INF , P5 ;
.L_x_4:
        /*0190*/                   MOV R16, RZ ;
        /*01a0*/               @P6 BRA `(.L_x_5) ;
        /*01b0*/                   MUFU.EX2 R16, R12 ;
.L_x_5:
        /*01c0*/                   IADD3 R20, R20, 0x8, RZ ;
        /*01d0*/                   ISETP.GE.AND P0, PT, R20, R22, PT ;
        /*01e0*/              @!P0 BRA `(.L_x_0) ;
.L_x_9:
        /*01f0*/                   STG.E [R24.64], R12 ;
        /*0200*/                   EXIT ;
.L_x_8:
        /*0210*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R13 ;
        /*0220*/              @!P0 BRA `(.L_x_8) ;
        /*0230*/                   BRA `(.L_x_2) ;
"""
CASE = LedgerCase("triton", 80, "forward", 8, "plain")
KERNEL = Compiled(CASE, 16, 8, 1, 2, 128, 40960, 0, TOY)
TILE = Tile(rows=16, keys=8, loaded_side=8, head_dim=8, warps=1, stages=2)
PLAIN = 30  # instructions of an iteration


def toy(listing=TOY):
    (code,) = sass.read(listing).values()
    (loop,) = code.main_loops()
    return code, loop


def counted(constants=None, dear=False, listing=TOY):
    issued = sass_walk.iteration(*toy(listing), constants or {0x160: 0}, dear)
    return len(issued), sass_kinds.count([x for x, runs in issued if runs])


# -------------------------------------------------------------------------------------- the reader


def test_loops_are_those_of_branches_back():
    code, main = toy()
    headers = [code.labels[f".L_x_{k}"] for k in (0, 1, 8)]
    assert [loop.header for loop in code.loops] == headers
    assert main.header == headers[0]
    assert not any(
        x.base in ("EXIT", "STG") for b in main.blocks for x in code.instructions[b : b + 1]
    )


def test_an_iteration_of_a_full_tile():
    """It has three copies and the exponential, but no feature, mask, first tile or second wait."""
    total, kinds = counted()
    assert total == PLAIN
    expected = "global 3, shared 1, tensor 1, mufu 1, barrier 1, wait 2, int 9, move 2, branch 8"
    assert kinds == {x.split()[0]: int(x.split()[1]) for x in expected.split(", ")}


@pytest.mark.parametrize(
    "constants, dear, more",
    [({0x160: 1}, False, 2), ({}, True, 3 + 2 + 3), ({0x160: 0}, True, 3 + 3)],
    ids=["a switch is on", "masked, switch unknown", "masked"],
)
def test_other_paths_through_the_loop(constants, dear, more):
    total, kinds = counted(constants or {0: 0}, dear)
    assert (total, kinds["tensor"], kinds["mufu"]) == (PLAIN + more, 1, 1)


@pytest.mark.parametrize("known", [False, True, None])
def test_predicates_that_are_kept_as_bits(known):
    """Predicates saved by P2R, or by LOP3 as single bits of a register with unknown other bits."""
    state = sass_values.State({}, predicates={} if known is None else {"P1": known})
    for line in (
        "LOP3.LUT R9, R9, 0xfffffffd, RZ, 0xc0, !PT",
        "@P1 LOP3.LUT R9, R9, 0x2, RZ, 0xfc, !PT",
        "LOP3.LUT P0, RZ, R9, 0x2, RZ, 0xc0, !PT",
        "LOP3.LUT P2, RZ, R9, 0x4, RZ, 0xc0, !PT",
        "P2R R7, PR, RZ, 0x2",
        "ISETP.NE.AND P3, PT, R7, RZ, PT",
    ):
        guard, opcode, operands = re.fullmatch(r"(?:@(\S+) )?(\S+) (.*)", line).groups()
        x = sass.Instruction(guard or "", opcode, tuple(operands.split(", ")))
        sass_arithmetic.execute(state, x)
    assert [state.predicate(x) for x in ("P0", "P2", "P3")] == [known, None, known]


def test_values_computed_in_a_loop_are_unknown_in_the_next_iteration():
    """The copy counter is unknown in the next iteration. Carried over, the loop would not end."""
    carried = TOY.replace("IMAD.MOV.U32 R6, RZ, RZ, 0x3", "NOP").replace(
        "IMAD.MOV.U32 R20", "IMAD.MOV.U32 R6, RZ, RZ, 0x3 ;\n        /*0025*/ IMAD.MOV.U32 R20"
    )
    total, kinds = counted(listing=carried)
    assert total == PLAIN - 2 * 4 and kinds["global"] == 1


@pytest.mark.parametrize(
    "line, kind",
    [
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24, gsb0", "tensor"),
        ("UTCHMMA gdesc[UR4], gdesc[UR8], tmem[UR24], tmem[UR34], idesc[UR35], !UPT", "tensor"),
        ("MUFU.RCP R0, R0", "mufu"),
        ("FFMA R0, R1, R2, R3", "fp32"),
        ("FMNMX R0, R1, R2, !PT", "float"),
        ("F2FP.BF16.PACK_AB R0, R1, R2", "convert"),
        ("IMAD.WIDE.U32 R0, R1, 0x4, R2", "int"),
        ("UISETP.GE.AND UP0, UPT, UR4, UR5, UPT", "int"),
        ("R2UR UR4, R0", "move"),
        ("ULDC.64 UR4, c[0x0][0x118]", "move"),
        ("LDSM.16.MT88.4 R0, [R1]", "shared"),
        ("SHFL.BFLY PT, R0, R1, 0x1, 0x1f", "shared"),
        ("@UP0 UTMALDG.2D [UR20], [UR4]", "global"),
        ("LDG.E.U16 R0, [R2.64]", "global"),
        ("STL.64 [R1+0x8], R2", "spill"),
        ("LDTM.x32 R4, tmem[UR4]", "tmem"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barrier"),
        ("SYNCS.ARRIVE.TRANS64 RZ, [UR21], R0", "barrier"),
        ("WARPGROUP.ARRIVE", "barrier"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "wait"),
        ("DEPBAR.LE SB0, 0x1", "wait"),
        ("BSSY B0, `(.L_x_0)", "branch"),
        ("VOTEU.ANY UR4, UPT, PT", "other"),
        ("@!PT LDS RZ, [RZ]", "other"),  # no thread runs it
    ],
)
def test_each_kind(line, kind):
    (code,) = sass.read(f'\t.section .text.x,"ax"\n        /*0000*/      {line} ;\n').values()
    assert sass_kinds.count(code.instructions) == {kind: 1}


def test_an_unknown_opcode_is_named():
    wrong = KERNEL._replace(listing=TOY.replace("FSEL R13", "FNEW.X R13"))
    with pytest.raises(ValueError, match=r"does not know: FNEW\.X"):
        ledger_report.count(wrong)


def test_a_loop_that_cannot_be_read_is_a_fault(monkeypatch):
    """A listing without products, one with too few, and one with an opcode of unknown kind."""
    listings = ["", TOY.replace("MUFU.EX2", "FADD"), TOY.replace("16816", "1688"), TOY]
    listings += [TOY.replace("FSEL R13", "FNEW.X R13")]
    found = [KERNEL._replace(listing=x) for x in listings[1:]]
    monkeypatch.setattr(ledger_code, "compiled", lambda every, workers: iter(found))
    rows, wrong = ledger_report.count_all([CASE] * 4)
    assert [row.case for row in rows] == [CASE]
    assert "got no loop" in wrong[0] and "got 1.00 products" in wrong[1] and "FNEW.X" in wrong[2]


# --------------------------------------------------------------------------------------- the model


def test_counts_are_of_64_by_64_scores():
    row = ledger_report.count(KERNEL)
    scale = 64 * 64 // (16 * 8)
    assert row.main.counts["instructions"] == scale * PLAIN
    assert row.masked.counts["instructions"] == scale * (PLAIN + 2 + 3 + 3)
    assert row.main.counts["LDSM"] == scale and row.main.counts["LDGSTS"] == 3 * scale
    assert row.main.products == 2 and row.main.opcodes == {"HMMA.16816": scale, "MUFU.EX2": scale}
    assert row.main.cycles == {
        "tensor": 64 * 64 * 8 * 2 / 1024,
        "mufu": scale * 32 / 16,
        "fp32": 0,
        "shared": scale * (512 + 3 * 512) / 128,
        "issue": scale * PLAIN / 4,
    }
    assert row.main.bound == ("shared", 512)


@pytest.mark.parametrize(
    "line, fmas, shared",
    [
        ("HMMA.16816.F32.BF16 R12, R8, R10, RZ", 16 * 8 * 16, 0),
        ("HMMA.1688.F32.BF16 R12, R8, R10, RZ", 16 * 8 * 8, 0),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ", 64 * 128 * 4, 2 * 16 * (64 + 128) / 4),
        ("HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR16].tnspB, R88", 64 * 64 * 4, 2 * 16 * 64 / 4),
        ("LDSM.16.M88.4 R8, [R2]", 0, 512),
        ("LDSM.16.M88 R8, [R2]", 0, 128),
        ("STS.64 [R8], R2", 0, 256),
        ("LDGSTS.E.BYPASS.128 [R3], [R4.64]", 0, 512),
        ("SHFL.BFLY PT, R0, R1, 0x1, 0x1f", 0, 128),
    ],
)
def test_products_and_bytes_of_a_warp(line, fmas, shared):
    (code,) = sass.read(f'\t.section .text.x,"ax"\n        /*0000*/      {line} ;\n').values()
    (x,) = code.instructions
    assert (ledger_model.product(x), ledger_model.shared_bytes(x)) == (fmas, shared)


def flight(*lines, stages=2):
    text = "".join(f"        /*0000*/      {x} ;\n" for x in lines)
    (code,) = sass.read(f'\t.section .text.x,"ax"\n{text}').values()
    return ledger_model.in_flight(code.instructions, stages)


def test_products_in_flight_during_exponentials():
    product, ex2 = "HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4], R8, gsb0", "MUFU.EX2 R0, R0"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x{}"
    assert flight(product, wait.format(0), ex2, ex2) == (2, 0, 0)
    assert flight(product, ex2, wait.format(0), ex2) == (2, 1, 0)
    assert flight(product, wait.format(1), ex2) == (1, 1, 0)
    copies = "LDGDEPBAR", "DEPBAR.LE SB0, 0x{}"
    assert flight(copies[0], copies[1].format(1), ex2) == (1, 0, 1)
    assert flight(copies[0], copies[1].format(0), ex2) == (1, 0, 0)
    landed, copy = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R13", "UTMALDG.2D [UR4], [UR8]"
    assert flight(landed, ex2, copy) == (1, 0, 0)
    assert flight(landed, ex2, copy, stages=3) == (1, 0, 1)


@pytest.mark.parametrize(
    "registers, shared, warps, columns, arch, expected",
    [
        (255, 0, 8, 0, 80, 1),
        (128, 0, 8, 0, 80, 2),
        (64, 81920, 4, 0, 80, 2),
        (64, 81920, 4, 0, 120, 1),
        (64, 0, 8, 256, 100, 2),
        (32, 0, 8, 0, 120, 6),
    ],
    ids=["registers", "half of them", "shared memory", "less of it", "tensor memory", "warps"],
)
def test_blocks_of_a_multiprocessor(registers, shared, warps, columns, arch, expected):
    assert ledger_model.blocks(registers, shared, warps, columns, arch) == expected


# -------------------------------------------------------------------------------------- the budget


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A function that runs the command on one given kernel, with separate budget and results."""
    monkeypatch.setattr(ledger_report, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(ledger_report, "RESULTS", tmp_path)
    monkeypatch.setattr(ledger_code, "unavailable", lambda compiler: None)
    monkeypatch.setattr(ledger_code, "version", lambda compiler: f"{compiler} 1.0")

    def run(kernel=KERNEL, accept=False, **options):
        monkeypatch.setattr(ledger_code, "compiled", lambda every, workers: iter([kernel]))
        given = dict.fromkeys(("compilers", "archs", "passes", "dims", "features"))
        given |= {"compilers": ["triton"], "workers": 1, "accept": accept}
        return ledger_report.run(argparse.Namespace(**given | options))

    return run


def test_a_count_may_not_grow(program, capsys, tmp_path):
    assert program() == 0 and "not judged" in capsys.readouterr().out
    assert program(accept=True) == 0 and program() == 0
    assert set(json.loads((tmp_path / "budget.json").read_text())) == {"triton 1.0"}
    capsys.readouterr()
    more = KERNEL._replace(listing=TOY.replace("LDGDEPBAR ;", "LDGDEPBAR ;\n /*0*/ NOP ;"))
    assert program(more) == 1
    expected = f"{CASE}: instructions: got {32 * (PLAIN + 1)}, expected at most {32 * PLAIN}"
    assert expected in capsys.readouterr().out
    assert program(more, accept=True) == 0 and program() == 0  # a smaller count is no fault


def test_a_budget_holds_for_one_version_of_each_compiler(program, monkeypatch, tmp_path):
    def recorded():
        return set(json.loads((tmp_path / "budget.json").read_text()))

    program(accept=True)
    program(KERNEL._replace(case=CASE._replace(compiler="cuda")), True, compilers=["cuda"])
    assert recorded() == {"triton 1.0", "cuda 1.0"}
    monkeypatch.setattr(ledger_code, "version", lambda compiler: f"{compiler} 2.0")
    program(accept=True)
    assert recorded() == {"triton 2.0", "cuda 1.0"}


def test_removed_kernels_have_no_budget(program, tmp_path):
    """Cases that no longer exist are removed, for either compiler; cases not run now are kept."""
    file, one = tmp_path / "budget.json", str(next(cases()))
    file.write_text(json.dumps({"cuda 1.0": {one: {}, "sm_80 cuda dq D8": {}}}))
    program(accept=True)
    kept = {compiler: set(x) for compiler, x in json.loads(file.read_text()).items()}
    assert kept == {"cuda 1.0": {one}, "triton 1.0": {str(CASE)}}


def test_a_spill_in_the_loop_is_a_fault(program, capsys):
    program(accept=True)
    assert program(KERNEL._replace(listing=TOY.replace("MOV R16, RZ", "LDL R16, [R1]"))) == 1
    assert "spill: got 32, expected at most 0" in capsys.readouterr().out


def test_a_kernel_without_a_budget_is_a_fault(program, capsys):
    program(accept=True)
    assert program(KERNEL._replace(case=CASE._replace(feature="mask"))) == 1
    assert "got no budget" in capsys.readouterr().out


def test_a_missing_compiler_is_named(program, monkeypatch, capsys):
    monkeypatch.setattr(ledger_code, "unavailable", lambda compiler: "nvcc is not installed")
    assert program() == 2 and "triton: nvcc is not installed" in capsys.readouterr().out


def test_options_that_leave_nothing_are_refused(program):
    with pytest.raises(ValueError, match="options that together select no kernel"):
        program(compilers=["cuda"], archs=[120])


# ----------------------------------------------------------------------------- what was recorded


def test_the_budget_and_the_pages_are_of_every_kernel():
    names = {name for kernels in ledger_report.budgets().values() for name in kernels}
    assert names == set(map(str, cases()))
    for arch in ledger_model.CHIPS:
        page = (ledger_report.RESULTS / f"ledger-sm_{arch}.txt").read_text()
        for case in cases():
            if case.arch == arch:
                assert f"\n{str(case).partition(' ')[2]} " in page, case


def test_a_short_report_has_the_same_table_and_fewer_columns():
    row, versions = ledger_report.count(KERNEL), {"triton": "triton 1.0"}
    full, short = (
        ledger_page.report([row], 80, versions, full=x).splitlines()[1:] for x in (True, False)
    )
    end = full.index("")
    assert short[: end + 1] == full[: end + 1] and len(short) == len(full) == end + 3
    found = dict(zip(short[-2].split()[2:], short[-1][45:].split()))
    assert short[-1][:45] == full[-1][:45]
    of_full = dict(zip(full[-2].split()[2:], full[-1][45:].split()))
    for name in ("instr", "masked", "LDSM", "spill"):
        assert found[name] == of_full[name]
    unit, cycles = row.main.bound
    expected = dict(regs=row.registers, blocks=row.blocks, bound=unit, cycles=f"{cycles:.0f}")
    assert {x: found[x] for x in expected} == {x: str(y) for x, y in expected.items()}


def test_peers_are_listed_with_ours():
    peers = json.loads(ledger_page.PEERS.read_text())
    assert peers["source"] and {x["who"] for x in peers["loops"]} == set(peers["versions"])
    records = ledger_page.compared([ledger_report.count(KERNEL)], 80)
    assert {x["who"] for x in records} == {"triton", "FA2"}
    of_peak = {(x["who"], x["pass"], x["head_dim"]): ledger_page.peak(x, 80) for x in records}
    assert of_peak["FA2", "forward", 128] == 100
    assert of_peak["FA2", "backward", 64] == pytest.approx(100 * 1280 / 1496)
    assert of_peak["triton", "forward", 8] == pytest.approx(100 * 64 / 512)
    assert len(ledger_page.comparison_table(records, 80)) == len(records) + 1


def held(case):
    """Assert that a kernel, compiled now, is within its budget."""
    version = ledger_code.version(case.compiler)
    if version not in ledger_report.budgets():
        pytest.skip(f"the budget is of {', '.join(ledger_report.budgets())}, here is {version}")
    rows, wrong = ledger_report.count_all([case])
    assert not wrong and not ledger_report.faults(rows, {case.compiler: version})


@pytest.mark.slow
@needs_nvcc
@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        LedgerCase("cuda", 80, "forward", 64, "plain"),
        LedgerCase("cuda", 80, "dqkv", 64, "plain"),
        LedgerCase("cuda", 80, "dqkv", 64, "mask"),
        LedgerCase("cuda", 90, "forward", 128, "plain"),
        LedgerCase("cuda_sm80", 90, "forward", 128, "softcap"),
    ],
    ids=str,
)
def test_nvcc_stays_within_the_budget(case):
    held(case)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    "case",
    [LedgerCase("triton", arch, "forward", 64, "plain") for arch in ledger_model.CHIPS]
    + [LedgerCase("triton", 90, "dkv", 128, "softcap")],
    ids=str,
)
def test_triton_stays_within_the_budget(case):
    held(case)
