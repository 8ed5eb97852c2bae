"""AMX's tiles: the model follows the rules of the instruction, and the chip agrees with it."""

import ctypes
import itertools

import numpy as np
import pytest

from fastattn.backends.native import libraries
from tests.gpu_emulation.emulator import ROOT
from tests.support.backends import INTERPRETED
from tests.support.kernel_builds import AMX_FLAGS, run

TILED = (
    [] if libraries.cpu_unavailable() else [x for x in libraries.cpu_isas() if x.startswith("amx_")]
)
needs_tiles = pytest.mark.skipif(not TILED, reason="neither AMX nor its model is here")
on_tiles = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no test of Triton"),
    needs_tiles,
]
pytestmark = on_tiles
every_tiled = pytest.mark.parametrize("isa", TILED)
HARNESS = ROOT / "tests" / "cpu" / "amx_tiles.cpp"
needs_chip = pytest.mark.skipif("amx_bf16" not in TILED, reason="no AMX that may be used here")


def harness(sources, folder, model=True):
    """The library of amx_tiles.cpp, with the headers in `sources`."""
    flags = ["-std=gnu++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w", *AMX_FLAGS]
    flags += ["-DFA_ISA=tested", f"-I{sources}", *["-DFA_AMX_MODEL"] * model]
    target = folder / f"amx-{'model' if model else 'chip'}.so"
    run(*flags, HARNESS, "-o", target)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module", params=["model", pytest.param("chip", marks=needs_chip)])
def tiles(request, tmp_path_factory):
    return harness(ROOT / "csrc", tmp_path_factory.mktemp("amx"), request.param == "model")


def halves(rng, shape, kind):
    """bfloat16 bits of one kind. Each kind tests one of the instruction's rules."""
    u = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    sign_and_bits, more = u & 0x807F, u >> 16

    def near(exponent, spread):
        return sign_and_bits + ((exponent + more % spread) << 7)

    special = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x3F80, 0xBF80, 0x7F7F, 1, 0x8001, 0x80], "u4")
    some_nan = np.where(u >> 24 < 2, 0x7F81 + (u & 0x3E) + (u & 0x8000), near(120, 14))
    return {
        "near one": 0x3F00 + (u & 0x80FF),
        "any": u & 0xFFFF,
        "finite": np.where(u & 0x7F80 == 0x7F80, u & 0xBF80, u & 0xFFFF),
        "tiny products": near(60, 8),
        "subnormal": near(0, 3),
        "special": special[u % len(special)],
        "nan": some_nan,
        "least normal products": near(62, 3),
        "overflow": near(187, 8),
    }[kind].astype(np.uint32) & 0xFFFF


KINDS = ["near one", "any", "finite", "tiny products", "subnormal", "special", "nan"]
KINDS += ["least normal products", "overflow"]
SUMS = {  # values of C: (mask, exponents, how many of them), or bits
    "zero": lambda u: u * 0,
    "any": lambda u: u,
    "near one": lambda u: (u & 0x807FFFFF) + ((120 + (u >> 8) % 10) << 23),
    "subnormal": lambda u: (u & 0x807FFFFF) + ((u >> 9) % 3 << 23),
    "infinite": lambda u: (u & 0x80000000) | 0x7F800000,
    "least normal": lambda u: (u & 0x80000001) | 0x00800000,
}


def operands():
    """(A, B, C) of 270 tile products, and of 64 that are subnormal or not by their rounding."""
    rng = np.random.default_rng(0)
    found = []
    for kind, other, (at, sums) in itertools.product(KINDS, range(5), enumerate(SUMS.values())):
        shape = (1, 16, 16)
        kinds = kind, KINDS[(at + other) % len(KINDS)] if other % 3 == 2 else kind
        a, b = (halves(rng, shape, x) | halves(rng, shape, x) << 16 for x in kinds)
        if other % 2:  # so few terms that each operation affects the sum
            a[:, :, 1 + at % 3 :] = 0
            b[:, 1 + at % 3 :] = 0
        found.append((a, b, sums(rng.integers(0, 1 << 32, shape, dtype=np.uint32))))
    a, b = np.zeros((2, 64, 16, 16), np.uint32)
    for i in range(64):  # 2^-126 - p, for p about 2^-150
        half, sign = 16 * (i % 2), rng.integers(0, 2, 16, dtype=np.uint32) << 15
        rest = rng.integers(0, 128, (2, 16), dtype=np.uint32) * (i % 4 > 0)
        a[i, :, 0], b[i, 0] = (64 << 7 | sign) << half, 64 << 7 << half
        a[i, :, 1] = ((52 - rng.integers(0, 3)) << 7 | sign ^ 0x8000 | rest[0]) << half
        b[i, 1] = (52 << 7 | rest[1]) << half
    found.append((a, b, np.zeros_like(a)))
    return [np.ascontiguousarray(np.concatenate(x).astype(np.uint32)) for x in zip(*found)]


A, B, C = operands()
DEFAULT = 0x1F80  # MXCSR: round to nearest, keep subnormal numbers
TRUNCATING = 0x7F80


def products(library, plain=False, mxcsr=DEFAULT):
    c = C.copy()
    pointers = (ctypes.c_void_p(x.ctypes.data) for x in (A, B, c))
    after = library.multiply(*pointers, ctypes.c_int64(len(c)), mxcsr, int(plain))
    assert after & 0xFFC0 == mxcsr & 0xFFC0
    return c


def test_a_product_follows_the_amx_rules(tiles):
    """Bit for bit, in any rounding mode of the process."""
    expected = products(tiles, plain=True)
    assert np.isnan(expected.view(np.float32)).any() and np.isinf(expected.view(np.float32)).any()
    for mxcsr in (DEFAULT, TRUNCATING):
        np.testing.assert_array_equal(products(tiles, mxcsr=mxcsr), expected)


def test_tiles_are_illegal_outside_a_use(tiles):
    """A nested use leaves the outer one, torch's for example, its tiles."""
    always, before, inside, nested, after, chip = (tiles.legal() >> x & 1 for x in range(6))
    assert (always, before, inside, nested, after) == (1, 0, 1, 1, 0)
    if "amx_bf16" in libraries.build()["instruction_sets"].split():
        assert chip == ("amx_bf16" in TILED)
    assert tiles.handler_comes_back()


def test_a_refusal_has_a_reason(tiles):
    tiles.refused.restype = ctypes.c_char_p
    assert bool(tiles.refused()) != bool(tiles.legal() >> 5 & 1)
