"""The loops in machine code: they are found, an iteration is one way through them, its counts are
held against the record."""

import dataclasses

import pytest

from bench.instructions import gpu, x86
from bench.static_gpu import budgets, ptxas, sass

# A kernel with a loop in which a branch skips a mask, another an exponential; a loop before it
# copies, and one behind the kernel's end spins on a barrier.
TOY = """
	.section	.text.toy,"ax",@progbits
.text.toy:
        /*0000*/                   S2R R0, SR_CTAID.X ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
.L_x_0:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R13 ;
        /*0040*/              @!P0 BRA `(.L_x_8) ;
.L_x_2:
        /*0050*/                   HMMA.16816.F32.BF16 R12, R8, R10, RZ ;
        /*0060*/               @P0 BRA P2, `(.L_x_4) ;
        /*0070*/                   FSEL R12, R12, -INF , P5 ;
        /*0080*/                   FSEL R13, R13, -INF , P5 ;
.L_x_4:
        /*0090*/               @P6 BRA `(.L_x_5) ;
        /*00a0*/                   MUFU.EX2 R16, R12 ;
        /*00b0*/                   STL [R1], R16 ;
.L_x_5:
        /*00c0*/                   BAR.SYNC.DEFER_BLOCKING R7, 0x100 ;
        /*00d0*/              @!P0 BRA `(.L_x_0) ;
        /*00e0*/                   EXIT ;
.L_x_8:
        /*00f0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R13 ;
        /*0100*/              @!P0 BRA `(.L_x_8) ;
        /*0110*/                   BRA `(.L_x_2) ;
"""


def toy(text=TOY):
    (code,) = sass.read(text).values()
    return code


def test_instructions_are_read_with_their_guards_and_operands():
    first, copies, back = toy().instructions[:3]
    assert (first.opcode, back.guard, back.target) == ("S2R", "P1", ".L_x_1")
    assert copies.base == "LDGSTS" and sass.spills(toy().instructions) == 1


def test_the_main_loop_has_products_and_exponentials():
    code = toy()
    headers = [code.labels[f".L_x_{k}"] for k in (1, 0, 8)]
    assert [loop.header for loop in code.loops] == headers
    (main,) = code.main_loops()
    assert main.header == headers[1] and not toy(TOY.replace("MUFU.EX2", "FADD")).main_loops()


def test_an_iteration_computes_a_whole_tile_and_no_more():
    """It has the exponential, and neither the mask nor the second wait."""
    (counts,) = toy().counts()
    assert counts == sass.Counts(9, 1, 1, 1, 0, 1, ())
    issued = toy().iteration(toy().main_loops()[0])
    assert not any(x.opcode == "FSEL" for x in issued)


def test_exponentials_count_as_overlapped_between_the_waits_for_products():
    wait, ex2 = "WARPGROUP.DEPBAR.LE gsb0, 0x{}", "MUFU.EX2 R0, R0"
    lines = [ex2, wait.format(1), ex2, ex2, wait.format(0), ex2]
    text = "".join(f"        /*0000*/ {x} ;\n" for x in lines)
    found = sass.count(list(toy(text).instructions))
    assert (found.waits, found.exponentials, found.between) == ((1, 0), 4, 2)
    assert "waits 1,0  2/4 overlapped" in str(found)


KERNEL = ptxas.Kernel("sm_80", "forward_kernel<Forward<BF16, 64, 64, false> >", 9, 0, 9)


@pytest.fixture
def counting(monkeypatch, tmp_path):
    """Check a loop of so many instructions against a record of its own."""
    monkeypatch.setattr(gpu, "RECORD", tmp_path / "gpu.json")
    monkeypatch.setattr(ptxas, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(ptxas, "version", lambda: "nvcc 1.0")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    triton = x86.Counts("triton 3.0", {"sm_90 bfloat16 D64 plain forward": 7})
    monkeypatch.setattr(gpu, "of_triton", lambda: triton)

    def check(instructions, accept=False):
        loop = sass.Counts(instructions, 0, 1, 1, 0, 0, ())
        found = {"sm90": [dataclasses.replace(KERNEL, loops=(loop,))]}
        monkeypatch.setattr(ptxas, "compile_all", found.__getitem__)
        return gpu.check(accept)

    return check


def test_a_loop_that_grows_is_a_fault(counting, capsys):
    assert counting(500) == 1 and "no record" in capsys.readouterr().out
    assert counting(500, accept=True) == 0 and counting(505) == 0
    assert counting(520) == 1 and "more" in capsys.readouterr().out
    assert set(budgets.read(gpu.RECORD)) == {"nvcc 1.0: sm_80", "triton 3.0: sm_90"}


@pytest.mark.skipif(not gpu.RECORD.exists(), reason="there is no record")
def test_the_record_has_every_pass():
    names = [f"{x.split(': ')[1]} {y}" for x, of in budgets.read(gpu.RECORD).items() for y in of]
    for kernel in ("forward", "backward", "decode"):
        assert any(x.startswith(f"sm_90a {kernel}_kernel") for x in names), kernel
    for case in gpu.cases():
        assert f"{case} forward" in names and f"{case} dq" in names
