"""Arithmetic of sm_100 in the PTX translator, against numpy: pairs of float32, and the greatest and
least of a warp."""

import re

import numpy as np
import pytest

from tests.gpu_emulation.emulator import Emulator, aligned, needs_emulator
from tests.gpu_emulation.ptx import blackwell, forms, library
from tests.gpu_emulation.tests.test_ptx_blackwell import HEADER
from tests.gpu_emulation.tests.test_ptx_blackwell import KERNELS as PRODUCTS
from tests.gpu_emulation.tests.test_ptx_values import as_aligned, entry

pytestmark = needs_emulator
named = pytest.mark.parametrize

EACH = """
.reg .b32 %t, %x<2>; .reg .b64 %at, %g, %o, %a, %b, %c, %d; .reg .f32 %f<5>; mov.u32 %t, %tid.x;
mul.wide.u32 %at, %t, 8; ld.param.u64 %g, [given]; add.s64 %g, %g, %at; ld.param.u64 %o, [out];
add.s64 %o, %o, %at; ld.global.b64 %a, [%g]; ld.global.b64 %b, [%g+1024];
ld.global.b64 %c, [%g+2048];
"""
PAIRS = {
    f"{name}{more}{ftz}.f32x2": count
    for name, count, mores in (
        ("add", 2, ("", ".rn")),
        ("sub", 2, ("", ".rn")),
        ("mul", 2, ("", ".rn")),
        ("fma.rn", 3, ("",)),
    )
    for more in mores
    for ftz in ("", ".ftz")
}
SOME = 0x0F03F0FC
REDUCED = f"""mov.b64 {{%x0, %x1}}, %a; mov.b32 %f0, %x0; redux.sync.WAY.f32 %f1, %f0, -1;
st.global.f32 [%o], %f1; .reg .pred %p; and.b32 %t, %t, 31; mov.b32 %x0, {SOME};
shr.u32 %x0, %x0, %t; and.b32 %x0, %x0, 1; setp.eq.u32 %p, %x0, 0; @%p bra $end;
redux.sync.WAY.f32 %f1, %f0, {SOME}; st.global.f32 [%o+4], %f1; $end:"""


def pair(opcode, count):
    return f"{opcode} %d, {', '.join(('%a', '%b', '%c')[:count])}; st.global.b64 [%o], %d;"


def of_values(opcode):
    return "v_" + opcode.replace(".", "_")


KERNELS = {
    of_values(x): entry(of_values(x), "given out", [EACH, pair(x, n)], "") for x, n in PAIRS.items()
}
KERNELS |= {x: entry(x, "given out", [EACH, REDUCED.replace("WAY", x)], "") for x in ("max", "min")}


@pytest.fixture(scope="module")
def executor():
    return library.Executor(Emulator(), HEADER + "".join(KERNELS.values()))


def test_every_form_is_tested():
    kernels = [*KERNELS.values(), *PRODUCTS.values()]
    for form in (forms.form(*x) for x in blackwell.FORMS):
        pattern = re.compile(rf"(?<![\w.]){form.pattern.pattern}(?=[\s;])")
        assert any(pattern.search(code) for code in kernels), form.name


def numbers(count, seed=0):
    g = np.random.default_rng(seed)
    x = g.standard_normal((3, count)).astype(np.float32)
    edges = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, 1e-30, 2**-126]
    x[:, : len(edges)] = edges
    x[1, : len(edges)] = np.roll(edges, 5)
    x[2, : len(edges)] = np.roll(edges, 2)
    return x


@named("opcode", PAIRS)
def test_pairs(executor, opcode):
    x = numbers(256)
    out = aligned(256, np.float32)
    found = executor.launch(of_values(opcode), (1,), (128,), 0, [as_aligned(x.ravel()), out])
    assert not found.count, found.first

    def flushed(x):
        tiny = (np.abs(x) < 2.0**-126) & (".ftz" in opcode)
        return np.where(tiny, np.copysign(np.float32(0), x), x)

    a, b, c = (flushed(y).astype(np.longdouble) for y in x)
    with np.errstate(all="ignore"):
        exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[opcode[:3]]
        expected = flushed(exact.astype(np.float32))
    np.testing.assert_array_equal(out, expected)
    number = ~np.isnan(expected)
    assert np.array_equal(np.signbit(out)[number], np.signbit(expected)[number])


@named("way", ["max", "min"])
def test_the_greatest_and_the_least_of_a_warp(executor, way):
    x = numbers(256)[0].reshape(128, 2)
    x[64:96, 0] = np.nan
    given = np.zeros((3, 256), np.float32)
    given[0] = x.ravel()
    out = aligned(256, np.float32)
    found = executor.launch(way, (1,), (128,), 0, [as_aligned(given.ravel()), out])
    assert not found.count, found.first
    inside = np.array([SOME >> lane & 1 == 1 for lane in range(32)])
    for warp, got in zip(x[:, 0].reshape(4, 32), out.reshape(4, 32, 2)):
        of_all, of_some = (getattr(np, f"f{way}").reduce(y) for y in (warp, warp[inside]))
        np.testing.assert_array_equal(got[:, 0], np.full(32, of_all))
        np.testing.assert_array_equal(got[inside, 1], np.full(inside.sum(), of_some))
