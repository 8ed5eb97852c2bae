"""Single instructions of csrc/cuda/ptx.cuh, run by probe.cu: inputs, and the outputs committed.

emu/probe.json has the outputs of every case here, and the GPU that gave the same:

    python -m tests.gpu_emulation.probe --confirm  # on a GPU, with the CUDA kernels built: compare
    python -m tests.gpu_emulation.probe --accept   # take the outputs from the emulator
"""

import argparse
import ctypes
import hashlib
import json
import subprocess
from typing import NamedTuple

import numpy as np

from tests.gpu_emulation.emulator import EMULATOR, KERNELS, Emulator, aligned

SOURCE, INSTRUCTIONS = KERNELS / "probe.cu", KERNELS / "ptx.cuh"
RECORD = EMULATOR / "probe.json"

LOAD, LOAD_TRANSPOSED, MULTIPLY_BF16, MULTIPLY_F16, COPY = range(5)
EXP2, LOG2, PACK_BF16, PACK_F16, WIDEN_BF16, WIDEN_F16, SHUFFLE = range(5, 12)
RECIPROCAL, PRODUCT_LOW, PRODUCT_HIGH, FETCH_ADD = range(12, 16)

# --- inputs -------------------------------------------------------------------------------------


class Case(NamedTuple):
    what: int
    inputs: dict  # by argument name; the others are zeros


def random_words(seed, count):
    """Uniform 32-bit words. Bit generators are stable over numpy versions, unlike distributions."""
    return (np.random.PCG64(seed).random_raw(count) >> np.uint64(32)).astype(np.uint32)


def permutation(seed, count):
    return np.argsort(random_words(seed, count), kind="stable")


def whole(seed, count):
    return (random_words(seed, count) % 16).astype(np.float32) - 8


def between(low, high, seed, count):
    return (low + (high - low) * (random_words(seed, count) / 2**32)).astype(np.float32)


def floats(words):
    return np.asarray(words, np.uint32).view(np.float32)


def both_signs(values):
    values = np.asarray(values, np.float32)
    return np.concatenate([values, -values])


def filled(*parts):
    """128 values: the parts joined, the last one cut to fit."""
    joined = np.concatenate([np.asarray(x) for x in parts])
    assert len(joined) - len(parts[-1]) <= 128 <= len(joined)
    return joined[:128]


def half(x, what):
    """float32 as bits of the 16-bit format to multiply, in which each value is exact."""
    if what == MULTIPLY_F16:
        return np.asarray(x, np.float16).view(np.uint16)
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def load(what):
    """Rows of 8 elements of 16 bits, all different, in random order."""
    elements = permutation(what, 2048).astype(np.uint16)
    rows = permutation(10 + what, 256)[:32]
    return Case(what, {"words": elements.view(np.uint32), "address": 16 * rows})


def multiply(what, kind):
    """Numbers that have exact products and sums in float32, in any order of addition."""
    a, b, d = whole(20, 32 * 8), whole(21, 32 * 4), whole(22, 32 * 4)
    if kind == "subnormal":  # A only; B makes bfloat16's products normal in float32
        least, factor = (2.0**-24, 1.0) if what == MULTIPLY_F16 else (2.0**-133, 2.0**64)
        a, b, d = a * np.float32(least), b * np.float32(factor), d * np.float32(least * factor)
    if kind == "infinite":
        a[[8 * 0, 8 * 4, 8 * 8, 8 * 8 + 1]] = np.inf, np.nan, np.inf, -np.inf  # rows 0, 1, 2
        b[[4 * 4, 4 * 21 + 1]] = 0, np.inf  # 0 times infinity in column 1; infinity in column 5
        d[4 * 28] = -np.inf
    a, b = (half(x, what).view(np.uint32) for x in (a, b))
    return Case(what, {"a": a, "b": b, "d": d})


def exponents():
    special = [np.inf, np.nan, 0, 1, 127, 127.5, 128, 129, 1000, 3.4e38, 126, 126.5, 140.5]
    special += [148.5, 149, 149.5, 150, 151, 2.0**-24, 2.0**-25, 1e-38, 1e-40, 1e-45]
    return filled(both_signs(special), between(-20, 0, 30, 40), between(-125, 127, 31, 60))


def logarithms():
    special = [np.inf, np.nan, 0, 1, 2, 0.5, 3, 2.0**-126, 3.4e38, 1e-38, 1e-39, 1e-40, 1e-45]
    around_one = floats(0x3F800000 + np.arange(-4, 5))
    wide = floats(0x00800000 + random_words(42, 60) % 0x7F000000)  # every exponent
    row_sums = between(1, 5000, 40, 20), between(0.5, 2, 41, 40)
    return filled(both_signs(special), around_one, *row_sums, wide)


def divisors():
    special = [np.inf, np.nan, 1, 2, 3, 0.5, 1e-30, 1e30, 7, 2.0**-125, 2.0**125]
    wide = floats(0x01000000 + random_words(46, 80) % 0x7D000000)  # the inverse is normal, too
    return filled(both_signs(special), between(1, 2, 45, 40), wide)


def to_round(infinity, least_normal, step):
    """float32 near the numbers of a narrower format. Its last bit is `step` in float32's bits."""
    special = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000]
    special += [0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FFFFFFF]
    for even in (0x3F800000, least_normal, infinity - 2 * step):
        for middle in (even + step // 2, even + 3 * step // 2):  # one rounds down, the other up
            special += [middle - 1, middle, middle + 1]
    return np.array(special, np.uint32)


def to_narrow(what):
    if what == PACK_BF16:
        special = to_round(0x7F800000, 0x00800000, 1 << 16)
        tiny = floats([0x8000, 0x8001, 0x17FFF, 0x18000, 0x7F7FFF, 0x7F8000])
    else:
        special = to_round(0x47800000, 0x38800000, 1 << 13)
        tiny = np.float32(2.0**-25) * np.float32([0.5, 1, 1 + 2.0**-23, 2, 3, 5, 2045, 2047])
    anything = floats(random_words(50, 20))
    small = floats((random_words(51, 60) & 0x8FFFFFFF) + 0x30000000)  # from 2^-31 to 2
    return filled(both_signs(floats(special)), both_signs(tiny), anything, small)


def to_widen(what):
    """16-bit values, below high halves that must make no difference."""
    bits = 7 if what == WIDEN_BF16 else 10
    infinity = 0x7FFF >> bits << bits
    special = [0, 1, 2, (1 << bits) - 1, 1 << bits, 0x3C00, 0x3F80]
    special += [infinity - 1, infinity, infinity + 1, infinity + (1 << (bits - 1)), 0x7FFF]
    halves = filled(special, np.add(special, 0x8000), random_words(60, 128) & 0xFFFF)
    return (random_words(61, 128) & 0xFFFF0000) | halves.astype(np.uint32)


def cases():
    found = {"load_matrices": load(LOAD), "load_matrices_transposed": load(LOAD_TRANSPOSED)}
    rows = 16 * permutation(71, 256)[:32]
    found["copy16"] = Case(COPY, {"words": random_words(70, 1024), "address": rows})
    for kind in ("whole", "subnormal", "infinite"):
        found[f"multiply_bf16_{kind}"] = multiply(MULTIPLY_BF16, kind)
        found[f"multiply_f16_{kind}"] = multiply(MULTIPLY_F16, kind)
    found["exp2"] = Case(EXP2, {"d": exponents()})
    found["log2"] = Case(LOG2, {"d": logarithms()})
    found["pack_bf16"] = Case(PACK_BF16, {"d": to_narrow(PACK_BF16)})
    found["pack_f16"] = Case(PACK_F16, {"d": to_narrow(PACK_F16)})
    found["widen_bf16"] = Case(WIDEN_BF16, {"a": to_widen(WIDEN_BF16)})
    found["widen_f16"] = Case(WIDEN_F16, {"a": to_widen(WIDEN_F16)})
    moved = filled([0x7F800001, 0xFFC12345, 0x80000000, 1], random_words(80, 124))
    for flip in (1, 2, 4, 8, 16):
        inputs = {"d": floats(moved), "b": [flip] * 64}
        found[f"shuffle_xor_{flip}"] = Case(SHUFFLE, inputs)
    found["reciprocal"] = Case(RECIPROCAL, {"d": divisors()})
    factors = {"a": filled([0, 1, 2**32 - 1, 2**31], random_words(90, 124))}
    factors["b"] = filled([2**32 - 1, 0, 2**32 - 1, 0, 2, 0, 3, 0], random_words(91, 120))[:64]
    found["product_low"] = Case(PRODUCT_LOW, factors)
    found["product_high"] = Case(PRODUCT_HIGH, factors)
    found["fetch_add"] = Case(FETCH_ADD, factors)
    return found


CASES = cases()

# --- running --------------------------------------------------------------------------------------


def arguments(words=None, address=None, a=None, b=None, d=None):
    given = (words, 1024, np.uint32), (address, 32, np.uint32), (a, 128, np.uint32)
    given += (b, 64, np.uint32), (d, 128, np.float32)
    arrays = []
    for values, size, dtype in given:
        arrays.append(aligned(size, dtype))
        if values is not None:
            arrays[-1][:] = np.ravel(values)
    return arrays


def on_emulator(emulator, case, **options):
    """Four words of each lane, after one instruction."""
    out = aligned(128, np.uint32)
    findings = emulator.run(
        "fa_cuda_probe", case.what, *arguments(**case.inputs), out, None, **options
    )
    assert not findings.count, findings.first
    return out.reshape(32, 4)


def on_gpu(case):
    """The same from nvcc's code on a GPU."""
    import torch

    from fastattn.backends.native import libraries

    entry = libraries.cuda().dll.fa_cuda_probe
    arrays = [*arguments(**case.inputs), aligned(128, np.uint32)]
    tensors = [torch.from_numpy(x.view(np.int32)).cuda() for x in arrays]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = entry(case.what, *pointers, stream)
    assert status == 0, f"CUDA error {status}"
    return tensors[-1].cpu().numpy().view(np.uint32).reshape(32, 4)


# --- comparing outputs ----------------------------------------------------------------------------

# Calculated outputs: their type, and the bits of infinity. All NaN count as equal.
CALCULATED = {
    MULTIPLY_BF16: (np.uint32, 0x7F800000),
    MULTIPLY_F16: (np.uint32, 0x7F800000),
    PACK_BF16: (np.uint16, 0x7F80),
    PACK_F16: (np.uint16, 0x7C00),
    WIDEN_F16: (np.uint32, 0x7F800000),
}


def same(x, y, dtype=np.uint32, infinity=None):
    """For each lane: are x and y equal bit for bit? Any NaN equals any other."""
    x, y = (np.ascontiguousarray(z).view(dtype) for z in (x, y))
    found = x == y
    if infinity:
        magnitude = np.iinfo(dtype).max >> 1
        found |= ((x & magnitude) > infinity) & ((y & magnitude) > infinity)
    return found.all(-1)


def ulps(x, y):
    """The number of float32 steps between x and y; 0 between NaN and NaN."""

    def place(x):
        bits = x.view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    apart = np.where(np.isnan(x) | np.isnan(y), 1 << 32, abs(place(x) - place(y)))
    return np.where(np.isnan(x) & np.isnan(y), 0, apart)


def near(what, x, found, expected):
    """Within the errors of ex2.approx.ftz, rcp.approx.ftz and lg2.approx.ftz."""
    close = ulps(found, expected) <= 2
    if what != LOG2:
        return close
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return close | ((0.5 <= x) & (x <= 2) & (abs(found - expected) <= 2.0**-22))


def complaints(name, found, expected):
    """One line for each lane with outputs other than expected."""
    case = CASES[name]
    if case.what in (EXP2, LOG2, RECIPROCAL):
        x = case.inputs["d"].reshape(32, 4)
        right = near(case.what, x, found.view(np.float32), expected.view(np.float32)).all(-1)
    else:
        right = same(found, expected, *CALCULATED.get(case.what, ()))

    def words(lane):
        return " ".join(f"{word:08x}" for word in lane)

    return [
        f"{name}, lane {lane}: got {words(found[lane])}, expected {words(expected[lane])}"
        for lane in np.flatnonzero(~right)
    ]


# --- the committed record -------------------------------------------------------------------------


def recorded():
    return json.loads(RECORD.read_text())


def record(confirmed_on, ptx_sha256, outputs):
    found = dict(confirmed_on=confirmed_on, ptx_sha256=ptx_sha256, outputs=outputs)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def as_lines(output):
    return [" ".join(f"{word:08x}" for word in line) for line in output.reshape(16, 8)]


def as_words(lines):
    return np.array([int(x, 16) for x in " ".join(lines).split()], np.uint32).reshape(32, 4)


def digest():
    return hashlib.sha256(INSTRUCTIONS.read_bytes()).hexdigest()


def unconfirmed(found):
    """The reason why no GPU has confirmed the record as it is, or None."""
    gpu = found["confirmed_on"]
    if gpu is None:
        why = f"no GPU has confirmed the outputs in {RECORD.name} yet"
    elif found["ptx_sha256"] != digest():
        why = f"{INSTRUCTIONS.name} has changed since its outputs were confirmed on {gpu}"
    else:
        return None
    confirm = "python -m tests.gpu_emulation.probe --confirm"
    return f"{why}: run `make test-gpu` on one, then `{confirm}`, and commit"


def gpu_name():
    import torch

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    return f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"


def confirm():
    outputs = recorded()["outputs"]
    wrong = [
        line
        for name, case in CASES.items()
        for line in complaints(name, on_gpu(case), as_words(outputs[name]))
    ]
    if not wrong:
        record(gpu_name(), digest(), outputs)
    return wrong


def accept():
    """Take the emulator's outputs. A GPU's confirmation stays if the outputs are unchanged."""
    old, emulator = recorded() if RECORD.exists() else {}, Emulator(SOURCE)
    outputs = {name: as_lines(on_emulator(emulator, case)) for name, case in CASES.items()}
    if not (old.get("confirmed_on") and old["outputs"] == outputs):
        record(None, digest(), outputs)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--confirm", action="store_true", help="record that this GPU gives the same")
    group.add_argument("--accept", action="store_true", help="take the outputs from the emulator")
    if parser.parse_args(arguments).accept:
        accept()
        return 0
    try:
        wrong = confirm()
    except RuntimeError as error:  # no library, or no GPU
        raise SystemExit(str(error)) from None
    print("\n".join(wrong) or f"{RECORD}: confirmed")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
