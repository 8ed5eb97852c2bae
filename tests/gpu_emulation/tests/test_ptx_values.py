"""The PTX translator: each form that computes a value, in every type, against an independent
source: Python's integers and fractions, numpy's floats, torch's bfloat16.

Each opcode has a kernel, and all kernels are compiled at once.
"""

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.gpu_emulation.emulator import Emulator, aligned, needs_emulator
from tests.gpu_emulation.ptx import forms, library

pytestmark = needs_emulator
LANES = 256

# --- every opcode of every form -------------------------------------------------------------------


def opcodes(form):
    """(opcode, {name: its value}) for each opcode of a form."""
    choices = []
    for part in re.split(r"(<[^>]*>|\[[^]]*\])", form.name):
        if part.startswith("<"):
            group, _, names = part[1:-1].partition(":")
            choices.append([(x, {group: x}) for x in forms.SETS.get(names, names).split("|")])
        elif part.startswith("["):
            choices.append([(part[1:-1], {part[2:-1]: True}), ("", {})])
        else:
            choices.append([(part, {})])
    for each in itertools.product(*choices):
        names = {k: v for _, groups in each for k, v in groups.items()}
        opcode = "".join(x for x, _ in each)
        yield opcode, names | ({"ftz": True} if ".ftz" in opcode else {})


def bits(kind):
    return 1 if kind == "pred" else int(re.sub(r"\D", "", kind))


def kinds_of(form, names):
    """Types of an opcode's operands. Types in brackets may be in wider registers."""
    if form.name.startswith("setp"):
        return ["pred", names["T"], names["T"], *["pred"] * ("bool" in names)]
    own = names.get("T", "")
    doubled = f"{own[:1]}{2 * bits(own)}" if own[:1] in ("u", "s") else ""
    stand = {"T": own, "S": names.get("S"), "W": doubled}
    if own[:1] in ("u", "s", "b"):
        stand |= {"B": f"u{bits(own)}", "WB": f"u{2 * bits(own)}"}
    return [stand.get(x.strip("[]"), x.strip("[]")) for x in form.kinds]


def value_kernel(name, opcode, kinds, wide):
    """d[i] = opcode(a[i], b[i], c[i], e[i]), on words of 64 bits of which the low bits count."""
    lines, operands = ["mov.u32 %t, %tid.x;", "mul.wide.u32 %at, %t, 8;"], []
    for x, kind in zip("dabce", kinds):
        size = 64 if wide and x in "da" else max(16, bits(kind))
        register = kind if kind == "pred" or kind[0] == "f" else f"b{size}"
        lines += [f".reg .{register} %{x};", f".reg .b64 %p{x};", f"ld.param.u64 %p{x}, [{x}];"]
        lines += [f"add.s64 %p{x}, %p{x}, %at;"]
        operands.append(f"%{x}")
        if x == "d":
            continue
        if kind == "pred":
            lines += [f"ld.global.u32 %t, [%p{x}];", "and.b32 %t, %t, 1;"]
            lines += [f"setp.ne.b32 %{x}, %t, 0;"]
        else:
            lines += [f"ld.global.b{bits(register)} %{x}, [%p{x}];"]
    lines += [f"{opcode} {', '.join(operands)};"]
    if kinds[0] == "pred":
        lines += ["selp.b32 %t, 1, 0, %d;", "st.global.u32 [%pd], %t;"]
    else:
        lines += [f"st.global.b{64 if wide else max(16, bits(kinds[0]))} [%pd], %d;"]
    return entry(name, "a b c e d", [".reg .b32 %t;", ".reg .b64 %at;", *lines])


def entry(name, pointers, lines, directives=".maxntid 256, 1, 1"):
    parameters = ", ".join(f".param .u64 {x}" for x in pointers.split())
    body = "\n".join(lines)
    return f".visible .entry {name}({parameters})\n{directives}\n{{\n{body}\nret;\n}}\n"


HEADER = ".version 8.8\n.target sm_80\n.address_size 64\n"
VALUES = [x for x in forms.ARITHMETIC + forms.CONVERSIONS if not x.name.startswith("cvta")]


def plan():
    """{kernel: (text, form, opcode, names, kinds, whether registers are wider)}."""
    found = {}
    for form in VALUES:
        for opcode, names in opcodes(form):
            kinds = kinds_of(form, names)
            for wide in (False, True)[: 1 + ("[T] [S]" == " ".join(form.kinds))]:
                name = f"v{len(found)}"
                code = value_kernel(name, opcode, kinds, wide)
                found[name] = (code, form, opcode, names, kinds, wide)
    return found


PLAN = plan()


@pytest.fixture(scope="module")
def executor():
    return library.Executor(Emulator(), HEADER + "".join(x[0] for x in PLAN.values()))


EDGES = {
    "int": [0, 1, -1, 2, -2, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 2**15, 2**31, 2**63],
    "f32": [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        -1e-40,
        3e38,
        0.5,
        1.5,
        2.5,
        2**31,
    ],
}
EDGES["f32"] += [-(2.0**31), 2.0**32, 2.0**63, -3e9, 1e20, 2.0**-126, 2.0**-149, 255.5, -0.6]


def inputs(kind, seed):
    """Random words of 64 bits, in which the low bits hold a value of this kind."""
    g = np.random.default_rng(seed)
    words = g.integers(0, 2**64, LANES, dtype=np.uint64)
    if kind in ("f32", "f64"):
        values = g.standard_normal(LANES) * 10.0 ** g.integers(-9, 10, LANES)
        edges = g.permutation(np.array(EDGES["f32"] * 3))
        values[: len(edges)] = edges
        if kind == "f64":
            return values.view(np.uint64)
        with np.errstate(over="ignore", under="ignore"):
            low = values.astype(np.float32).view(np.uint32)
        return words & np.uint64(2**64 - 2**32) | low
    words[LANES // 2 :] >>= g.integers(0, 64, LANES // 2).astype(np.uint64)  # small numbers, too
    edges = g.permutation(np.array([x % 2**64 for x in EDGES["int"] * 3], np.uint64))
    words[: len(edges)] = edges
    return words


def numbers(words, kind):
    """The values in words: Python integers, or an array of floats."""
    n = bits(kind)
    if kind in ("f32", "f64"):
        return words.astype(f"u{n // 8}").view(f"f{n // 8}")
    low = [int(x) % 2**n for x in words]
    return [x - 2**n if kind[0] == "s" and x >= 2 ** (n - 1) else x for x in low]


def trunc_div(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def extracted(a, at, length, signed):
    at, length = at % 256, length % 256
    found = (a >> at) % 2**length
    if signed and length and found >= 2 ** (length - 1):
        found -= 2**length
    return found


def inserted(a, b, at, length, n):
    """bfi, on binary digits from the lowest."""
    digits = list(f"{b:0{n}b}"[::-1])
    for i, digit in enumerate(f"{a:0{n}b}"[::-1][:length]):
        if at + i < n:
            digits[at + i] = digit
    return int("".join(digits)[::-1], 2)


def permuted(a, b, choice):
    data = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    found = 0
    for i in range(4):
        nibble = choice >> 4 * i & 15
        byte = data[nibble & 7]
        found |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return found


# Integers, one lane at a time: results have any size, and the caller keeps the low bits.
WHOLE = {
    "add": lambda n, a, b: a + b,
    "sub": lambda n, a, b: a - b,
    "mul.lo": lambda n, a, b: a * b,
    "mul.hi": lambda n, a, b: a * b >> n["bits"],
    "mul.wide": lambda n, a, b: a * b,
    "mad.lo": lambda n, a, b, c: a * b + c,
    "mad.wide": lambda n, a, b, c: a * b + c,
    "div": lambda n, a, b: trunc_div(a, b) if b else -1,
    "rem": lambda n, a, b: a - b * trunc_div(a, b) if b else -1,
    "min": lambda n, a, b: min(a, b),
    "max": lambda n, a, b: max(a, b),
    "min.relu": lambda n, a, b: max(min(a, b), 0),
    "max.relu": lambda n, a, b: max(a, b, 0),
    "neg": lambda n, a: -a,
    "abs": lambda n, a: abs(a),
    "and": lambda n, a, b: a & b,
    "or": lambda n, a, b: a | b,
    "xor": lambda n, a, b: a ^ b,
    "not": lambda n, a: ~a,
    "shl": lambda n, a, b: a << min(b, 64),
    "shr": lambda n, a, b: a >> min(b, 64),
    "bfe": lambda n, a, b, c: extracted(a, b, c, n["T"][0] == "s"),
    "bfi": lambda n, a, b, c, d: inserted(a, b, c % 256, d % 256, n["bits"]),
    "prmt": lambda n, a, b, c: permuted(a, b, c),
    "selp": lambda n, a, b, c: a if c else b,
    "cvt": lambda n, a: a,
}


def fused(a, b, c):
    """a b + c, rounded once."""
    if a.dtype == np.float32:  # the product is exact in float64, the sum in all bits that matter
        return (a.astype(np.longdouble) * b + c).astype(np.float32)
    with_fractions = np.empty_like(a)
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist())):
        if not all(map(math.isfinite, (x, y, z))):
            with_fractions[i] = x * y + z
        else:
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            with_fractions[i] = float(exact) if exact else x * y + z
    return with_fractions


def chosen(pick, zero_negative):
    """min and max: numpy handles NaN, and `zero_negative` decides the sign of two zeros."""

    def result(a, b, *more):
        if more:  # three operands
            return result(result(a, b), *more)
        zeros = np.where(zero_negative(np.signbit(a), np.signbit(b)), -0.0, 0.0).astype(a.dtype)
        return np.where((a == 0) & (b == 0), zeros, pick(a, b))

    return result


FLOAT = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": fused,
    "div": np.divide,
    "rcp": lambda a: np.ones_like(a) / a,
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(np.float32),
    "min": chosen(np.fmin, np.logical_or),
    "max": chosen(np.fmax, np.logical_and),
    "abs": np.abs,
    "neg": np.negative,
    "copysign": lambda a, b: np.copysign(b, a),
    "selp": lambda a, b, c: np.where(np.array(c) == 1, a, b),
}


def flushed(x, names):
    if "ftz" not in names or getattr(x, "dtype", None) != np.float32:
        return x
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def compared(names, a, b, *rest):
    """For each lane, 1 if the comparison is true."""
    floats = names["T"][0] == "f"
    found = []
    for i, (x, y) in enumerate(zip(a, b)):
        unordered = bool(floats and (np.isnan(x) or np.isnan(y)))
        cmp, base = names["cmp"], names["cmp"][:2]
        if cmp in ("num", "nan"):
            true = unordered == (cmp == "nan")
        elif unordered:
            true = cmp.endswith("u")
        else:
            sign = (x > y) - (x < y) if not floats else int(x > y) - int(x < y)
            true = {"eq": [0], "ne": [-1, 1], "lt": [-1], "le": [-1, 0], "gt": [1], "ge": [0, 1]}
            true = sign in true[base]
        if rest:
            c = bool(rest[0][i])
            true = {"and": true and c, "or": true or c, "xor": true != c}[names["bool"]]
        found.append(int(true))
    return found


def to_whole(x, kind, rounded, source):
    """x rounded and clamped to the type's range; NaN is 0, or only the top bit set."""
    if math.isnan(x):
        return 2 ** (bits(kind) - 1) if source == "f64" or bits(kind) == 64 else 0
    low, high = (-(2 ** (bits(kind) - 1)), 2 ** (bits(kind) - 1) - 1)
    low, high = (low, high) if kind[0] == "s" else (0, 2 ** bits(kind) - 1)
    return int(max(low, min(high, x))) if math.isinf(x) else max(low, min(high, rounded(x)))


# A float32 to a whole number, as a float32.
ROUNDED = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def converted(opcode, kinds, names, a, b=None):
    to, source = kinds[:2]
    if "x2" in opcode:
        high, low = (narrowed(x, "bf16" in opcode) for x in (a, b))
        return [int(x) << 16 | int(y) for x, y in zip(high, low)]
    if opcode in ("cvt.f32.bf16", "cvt.f32.f16"):
        half = np.array(a, np.uint16)
        if opcode.endswith(".f16"):
            return half.view(np.float16).astype(np.float32)
        return (half.astype(np.uint32) << 16).view(np.float32)
    if opcode in ("cvt.rn.bf16.f32", "cvt.rn.f16.f32"):
        return [int(x) for x in narrowed(a, "bf16" in opcode)]
    if to == source == "f32":
        return ROUNDED[opcode.split(".")[1]](a)
    if to[0] == "f" and source[0] == "f":
        return a.astype(f"f{bits(to) // 8}")
    if to[0] == "f":
        return np.array(a, dtype=f"{source[0].replace('s', 'i')}{bits(source) // 8}").astype(
            f"f{bits(to) // 8}"
        )
    rounded = math.trunc if "rzi" in opcode else round
    return [to_whole(float(x), to, rounded, source) for x in a]


def narrowed(x, bfloat16):
    if bfloat16:
        found = torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    else:
        found = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), 0x7FFF, found)


def expected(form, opcode, names, kinds, words):
    operands = [flushed(numbers(x, kind), names) for x, kind in zip(words, kinds[1:])]
    base = next(x for x in (".".join(opcode.split(".")[:2]), opcode.split(".")[0]) if x in KNOWN)
    with np.errstate(all="ignore"):
        if base == "setp":
            return compared(names, *operands)
        if base == "cvt" and "[T] [S]" != " ".join(form.kinds):
            return flushed(converted(opcode, kinds, names, *operands), names)
        if re.fullmatch(r"(add|fma).rn.f32.b?f16", opcode):  # one or two numbers of 16 bits
            kind = f"cvt.f32.{opcode.rpartition('.')[2]}"
            *few, last = operands
            return FLOAT[base](*(converted(kind, ["f32", "b16"], names, x) for x in few), last)
        if kinds[1][0] == "f":
            found = flushed(FLOAT[base](*operands), names)
            return np.nan_to_num(np.clip(found, 0, 1)) + np.float32(0) if "sat" in names else found
        names = names | {"bits": bits(kinds[1])}
        return [WHOLE[base](names, *each) for each in zip(*operands)]


KNOWN = {*WHOLE, *FLOAT, "setp"}
APPROXIMATED = ("ex2", "lg2")


def run_values(executor, name):
    """Run the kernel of an opcode: the error as text, or ""."""
    _, form, opcode, names, kinds, wide = PLAN[name]
    words = [inputs(kind, seed) for seed, kind in enumerate(kinds[1:])]
    if opcode.startswith(("shl", "shr", "bf")):  # amounts in range, and some beyond
        for x in words[1 + opcode.startswith("bfi") :]:
            x[40:] %= np.uint64(70)
    arrays = [as_aligned(x) for x in words] + [aligned(LANES, np.uint64)] * (4 - len(words))
    out = aligned(LANES, np.uint64)
    found = executor.launch(name, (1,), (LANES,), 0, [*arrays, out])
    if found.count:
        return f"{opcode}: {found.first}"
    want = expected(form, opcode, names, kinds, words)
    return different(opcode, out, want, kinds[0], wide)


def different(opcode, out, want, kind, wide):
    n = 64 if wide else max(16, bits(kind)) if kind != "pred" else 32
    got = out & np.uint64(2**n - 1)
    if kind in ("f32", "f64"):
        got = numbers(got, kind)
        equal = got.view(f"u{bits(kind) // 8}") == want.view(f"u{bits(kind) // 8}")
        equal |= np.isnan(got) & np.isnan(want)
        if opcode.startswith(APPROXIMATED):
            close = np.abs(got.view(np.int32).astype(np.int64) - want.view(np.int32)) <= 2
            equal |= close & (np.signbit(got) == np.signbit(want))
    else:
        # A wider register holds the sign extension, too.
        want = numbers(np.array([int(x) % 2**64 for x in want], np.uint64), kind)
        want = np.array([x % 2**n for x in want], np.uint64)
        equal = got == want
    if equal.all():
        return ""
    i = int(np.flatnonzero(~equal)[0])
    return f"{opcode}: lane {i} has {got[i]}, expected {want[i]}; {(~equal).sum()} lanes differ"


def as_aligned(x):
    made = aligned(len(x), x.dtype)
    made[:] = x
    return made


@pytest.mark.slow
@pytest.mark.parametrize("form", VALUES, ids=lambda form: form.name)
def test_a_value_by_an_independent_source(executor, form):
    names = [name for name, x in PLAN.items() if x[1] is form]
    wrong = [x for x in (run_values(executor, name) for name in names) if x]
    assert names and not wrong, "\n".join(wrong[:8])
