"""64-bit Arm: the recorded instruction counts, and that every instruction set is checked.

The kernels themselves run under qemu: `make test-arm`.
"""

import re
import runpy

from bench.instructions import arm, x86
from tests.support.checkout import ROOT

RECORD = x86.recorded("GCC", arm.RECORD).instructions
BEFORE_BFMMLA = 6_512_951  # forward in bfloat16 on NEON, which widened it to float32
COMPILERS = runpy.run_path(str(ROOT / ".ci" / "compilers.py"))["COMPILERS"]


def test_every_instruction_set_is_counted_and_compiled():
    cmake = (ROOT / "csrc" / "CMakeLists.txt").read_text()
    known = set(re.search(r"set\(FA_KNOWN ([\w\s]+)\)", cmake)[1].split())
    counted = set(arm.ISAS)
    assert counted <= known
    by_gcc_alone = {"sve256"}
    kinds = {"native", "all"}  # of a build, and no sets
    assert {isa for x in COMPILERS for isa in x.isas} == known - by_gcc_alone - kinds
    assert {name.partition(" ")[0] for name in RECORD} == counted


def test_bfmmla_takes_at_most_two_fifths_of_what_widening_took():
    assert RECORD["neon_bf16 forward bfloat16"] <= 0.4 * BEFORE_BFMMLA
