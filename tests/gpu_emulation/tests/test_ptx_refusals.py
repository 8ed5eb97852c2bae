"""The PTX translator refuses an unknown form by its name and line; known ones are tested."""

import re

import pytest

from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.ptx import cpp, forms, hopper, text
from tests.gpu_emulation.tests import (
    test_ptx_bulk,
    test_ptx_hopper,
    test_ptx_products,
    test_ptx_warpgroups,
)
from tests.gpu_emulation.tests.test_ptx_values import HEADER

pytestmark = needs_emulator

REGISTERS = ".reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<3>; .reg .b16 %h<3>;"


@pytest.mark.parametrize(
    "code, expected",
    [
        ("frobnicate.b32 %r0, %r1;", "line 6: frobnicate.b32 is no form that is known"),
        ("add.s128 %r0, %r1, %r2;", "line 6: add.s128 is no form.*known are add.<T:INT>"),
        ("add.rz.f32 %r0, %r1, %r2;", "add.rz.f32 is no form"),
        ("add.sat.s32 %r0, %r1, %r2;", "add.sat.s32 is no form"),
        ("cvt.rz.f32.f64 %r0, %d0;", "cvt.rz.f32.f64 is no form"),
        ("ex2.approx.f16 %h0, %h1;", "ex2.approx.f16 is no form"),
        ("ld.global.nc.b32 %r0, [%d0];", "ld.global.nc.b32 is no form"),
        ("ld.volatile.global.b32 %r0, [%d0];", "ld.volatile.global.b32 is no form"),
        ("atom.global.add.u32 %r0, [%d0], 1;", "atom.global.add.u32 is no form"),
        ("prmt.b32.f4e %r0, %r1, %r2, %r3;", "prmt.b32.f4e is no form"),
        ("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 %r0;", "m16n8k4.*is no form"),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%r0,%r1,%r2,%r3},"
            "{%r0,%r1,%r2,%r3}, {%r0,%r1}, {%r0,%r1,%r2,%r3};",
            "a product of bf16 and f16",
        ),
        ("add.s32 %r0, %r1;", "add.s32 with 2 operands, expected 3"),
        ("add.s32 %r0, %d1, %r2;", "%d1 is .b64, expected .u32"),
        ("mov.u32 %r0, %clock;", "operand %clock as .u32"),
        ("mov.u32 %r0, %r9;", "operand %r9 as .u32"),
        ("mov.u64 %d0, nowhere;", "operand nowhere as .u64"),
        ("mov.u32 7, %r1;", "result 7, expected a register"),
        ("bra $nowhere;", "label \\$nowhere"),
        ("ld.global.v4.b64 {%d0, %d1, %d2, %d3}, [%d4];", "at most 16 bytes"),
        ("ld.global.v2.b32 {%r0, %r1, %r2}, [%d4];", "3 registers, expected 2"),
        ("cp.async.cg.shared.global [%r0], [%d0], 8;", "a copy of 8 bytes"),
        ("cp.async.ca.shared.global [%r0], [%d0], %r1;", "operand %r1, expected a number"),
        ("ld.param.u64 %d0, [n+4];", "8 bytes at 4 of n"),
        ("ld.param.u64 %d0, [other];", "operand other as .u64"),
        (".reg .b128 %q;", "registers of type .b128"),
        (".branchtargets here;", "'.branchtargets here' is no instruction"),
        (".local .align 4 .b8 big[65540];", "65540 bytes of local memory, expected at most 64 KB"),
        (".shared .align 4 .b8 big[49156];", "49156 bytes of static shared memory, expected .* 48"),
        ("setp.lt.and.s32 %p0, %r0, %r1;", "3 operands"),
        ("@%r0 mov.u32 %r1, 0;", "%r0 is .b32, expected .pred"),
    ],
)
def test_unsupported_ptx_is_refused_by_name(code, expected):
    module = f"{HEADER}.visible .entry k(.param .u64 n)\n{{ {REGISTERS}\n{code}\nret;\n}}\n"
    with pytest.raises(text.Refused, match=expected):
        cpp.source(list(text.kernels(module).values()))


@pytest.mark.parametrize(
    "module, expected",
    [
        (HEADER + ".const .b32 x = 1;\n", "line 4: '.const .b32 x = 1;', expected an entry"),
        (HEADER + ".visible .func f()\n{ ret; }\n", "'.visible .func f\\(\\)', expected an entry"),
        (HEADER + ".entry k()\n.reqnctapercluster 2\n{ ret; }\n", "directive .reqnctapercluster"),
        (HEADER + ".entry k(.param .b128 x)\n{ ret; }\n", "parameter '.param .b128 x'"),
        (HEADER + ".entry k()\n{ ret;\n", "k has no end"),
        (HEADER.replace("80", "70") + ".entry k()\n{ ret; }\n", "target sm_70, expected one of"),
    ],
)
def test_modules_with_what_has_no_meaning_here_are_refused(module, expected):
    with pytest.raises(text.Refused, match=expected):
        cpp.source(list(text.kernels(module).values()))


def test_every_form_of_hopper_is_tested():
    modules = test_ptx_hopper, test_ptx_products, test_ptx_bulk
    kernels = [code for x in modules for code in x.KERNELS.values()]
    kernels += [code for _, _, code, _ in test_ptx_warpgroups.REGISTERS.values()]
    for form in (forms.form(*x) for x in hopper.FORMS):
        pattern = re.compile(rf"(?<![\w.]){form.pattern.pattern}(?=[\s;])")
        assert any(pattern.search(code) for code in kernels), form.name
