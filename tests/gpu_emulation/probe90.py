"""The probes of sm_90a (instructions90.py) on the emulator, as PTX, and on a GPU.

emu/probe90.json has a digest of what each must give, and the GPU that gave it:

    python -m tests.gpu_emulation.probe90 --confirm  # on a GPU, with the CUDA library: compare
    python -m tests.gpu_emulation.probe90 --accept   # take the digests from instructions90.py
"""

import argparse
import ctypes
import functools
import hashlib
import json

import torch

from bench.static_gpu import ptxas
from tests.gpu_emulation import instructions90, probe
from tests.gpu_emulation.emulator import EMULATOR, KERNELS, ROOT, Emulator
from tests.gpu_emulation.ptx import library

SOURCE = KERNELS / "sm90" / "probe.cu"
INSTRUCTIONS = [KERNELS / "sm90" / "ptx.cuh", KERNELS / "sm90" / "tensor_map.h"]
RECORD = EMULATOR / "probe90.json"
CASES = {case.name: case for case in instructions90.cases()}


@functools.cache
def emulator():
    return Emulator(SOURCE)


@functools.cache
def ptx():
    """What nvcc makes of the probes."""
    flags = ("-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-ptx", "-arch=sm_90a")
    headers = [*KERNELS.glob("*.cuh"), *KERNELS.glob("*.h"), *(KERNELS / "sm90").glob("*.*")]
    key = library.digest(ptxas.version(), *flags, ROOT / "csrc" / "abi.h", *sorted(headers))
    return library.made("probes", f"{key}.ptx", [ptxas.nvcc(), *flags, SOURCE]).read_text()


@functools.cache
def executor():
    return library.Executor(emulator(), ptx())


class Emulated:
    """Replaces libraries.CudaLibrary: probes run on the emulator, or there as PTX. `options` go to
    the emulator, which leaves its findings in `found`."""

    def __init__(self, executor=None, **options):
        self.executor, self.options, self.found = executor, options, None

    def probe_sm90(self, given, stream):
        entry = "fa_cuda_probe_sm90", ctypes.c_char_p(given), None
        if self.executor is None:
            code, self.found = emulator().call(*entry, **self.options)
            return code
        with self.executor.instead(lambda name: ptx()):
            code, self.found = emulator().call(*entry, **self.options)
            assert self.executor.launches() == 1
        return code

    def failed_kernel(self):
        return b"a kernel"

    def error(self, code):
        return b"an error"


def complaint(emulated, name, limit=0):
    """What a probe does wrong there; "" for nothing."""
    case, report = CASES[name], torch.zeros(2, dtype=torch.int32)
    ran = instructions90.launch(emulated.probe_sm90, case, torch.device("cpu"), report, limit=limit)
    return instructions90.complaint(emulated, case, ran, report)


# --- the record -----------------------------------------------------------------------------------


def expected():
    """By case, a digest of what must come out."""
    found = {}
    for name, case in CASES.items():
        parts = [str(case.what).encode()]
        for x in (case.a, case.b, case.out, case.tile and case.tile.memory, case.expected):
            parts.append(b"" if x is None else x.contiguous().view(torch.uint8).numpy().tobytes())
        found[name] = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return found


def instructions():
    return hashlib.sha256(b"".join(x.read_bytes() for x in INSTRUCTIONS)).hexdigest()


def recorded():
    return json.loads(RECORD.read_text())


def record(gpu, instructions):
    found = dict(confirmed_on=gpu, instructions_sha256=instructions, outputs=expected())
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def unconfirmed(found):
    """The reason why no GPU has confirmed the record as it is, or None."""
    gpu = found["confirmed_on"]
    if gpu is None:
        why = f"no GPU has confirmed the outputs in {RECORD.name} yet"
    elif found["instructions_sha256"] != instructions():
        names = " or ".join(x.name for x in INSTRUCTIONS)
        why = f"{names} of sm90 has changed since its outputs were confirmed on {gpu}"
    else:
        return None
    confirm = "python -m tests.gpu_emulation.probe90 --confirm"
    return f"{why}: run `{confirm}` on a GPU of compute capability 9.0, and commit"


def accept():
    """Take the expected outputs. A GPU's confirmation stays if they are unchanged."""
    old = recorded() if RECORD.exists() else {}
    if not (old.get("confirmed_on") and old["outputs"] == expected()):
        record(None, None)


def on_gpu():
    """By case, what is wrong on this GPU."""
    from fastattn.backends.native import libraries

    device = torch.device("cuda", torch.cuda.current_device())
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        raise RuntimeError(f"got a GPU of compute capability {capability}, expected (9, 0)")
    cuda, report, found = libraries.cuda(), torch.zeros(2, dtype=torch.int32).pin_memory(), {}
    start = cuda.entry("fa_cuda_probe_sm90", ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)
    for name, case in CASES.items():
        report.zero_()
        ran = instructions90.launch(start, case, device, report)
        torch.cuda.synchronize(device)
        found[name] = instructions90.complaint(cuda, case, ran, report)
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--confirm", action="store_true", help="record that this GPU gives the same")
    group.add_argument("--accept", action="store_true", help="take the outputs as they should be")
    if parser.parse_args(arguments).accept:
        accept()
        return 0
    try:
        found = on_gpu()
    except (RuntimeError, AssertionError) as error:  # no library, or no GPU
        raise SystemExit(str(error)) from None
    for name in CASES:
        print(f"{name}: {found.get(name, 'it was not run') or 'right'}")
    if any(found.get(name, "it was not run") for name in CASES):
        return 1
    record(probe.gpu_name(), instructions())
    print(f"{RECORD}: confirmed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
